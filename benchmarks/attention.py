"""The attention and its parts beside dense attention and other implementations.

python benchmarks/attention.py --shapes A C --rows whole cudnn
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lib.baselines import DENSE, dense_attention, fla_attention, flex_attention
from lib.block_choices import Choices, blocks_of_4_neighbours, make_choice
from lib.candidate import Candidate, Result, measure_candidate
from lib.comparison import crossovers, speedups
from lib.formulas import Work, branch_work
from lib.parity import check_parity
from lib.recorder import OK, Recorder, Refused, failure
from lib.script import Benchmark, BenchOptions
from lib.shapes import DTYPES, AttentionShape, free_shapes, make_inputs, named_shapes
from trifocal.errors import UserError
from trifocal.ops import (
    Geometry,
    backend_choices,
    compressed_attention,
    mean_compress,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from trifocal.testing.inputs import Inputs

RowKind = Literal["end_to_end", "compression", "whole", "parts", "cudnn", "flash", "flex", "fla"]
Direction = Literal["forward", "both"]
_SLOW_TO_COMPILE: set[RowKind] = {"flex", "fla"}
_SPARSE: set[RowKind] = {"end_to_end", "compression", "whole", "parts"}
PARTS = ("compressed", "scoring", "selected", "window")

NOTES = (
    "Medians of calls timed with events on the device, the L2 cache flushed before each; p20 and p80 are the spread. "
    "Random inputs.",
    "forward_ms is without gradients, as in prefill; forward_backward_ms is one training call; backward_ms is their "
    "difference. The device_ms of each are of the device only, held up until the host has handed over the whole call.",
    "extra_peak_gib is the largest allocation beyond the inputs, results and gradients included.",
    "tflop and gib are by formula: products over the keys that queries see, and every input and result moved once.",
    "Row whole with smooth choices: blocks are given, and scoring runs beside, as if it had chosen them. "
    "blocks_of_4_neighbours: different blocks that four adjacent queries choose together.",
    "Row end to end: means of keys and values, sigmoid of the gates' logits, and whole: the cost of a call. Row "
    "compression: only the means. Row whole begins with compressed keys and values and with gates.",
    "first_call_seconds: the first call of the row in this process; with an empty Triton cache (TRITON_CACHE_DIR) it "
    "includes compilation, except of kernels that an earlier row compiled.",
    "Row rest: whole without the parts, so the combination and the difference that one call makes.",
)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(BenchOptions):
    """Time the attention and its parts beside dense attention and others, in one run; refuses to time wrong results."""

    shapes: tuple[str, ...] = ()
    """Shapes by name: A, B, C, D, P8k, P16k, P32k, P64k; P is the last four. A B C D unless others are given."""
    tokens: tuple[int, ...] = ()
    """Free shapes: lengths, each with every pair of --heads."""
    heads: tuple[str, ...] = ("64/4",)
    """Free shapes: query heads/groups."""
    batch: int = 1
    """Free shapes: sequences."""
    head_dim: int = 128
    """Free shapes: width of queries and keys."""
    value_dim: int = 0
    """Free shapes: width of values; 0: as --head-dim."""
    geometry: Geometry = field(default_factory=Geometry)
    """Block sizes, in tokens."""
    rows: tuple[RowKind, ...] = get_args(RowKind)
    """Rows: the sparse attention end_to_end, its compression of keys and values, the whole after it, and its
    parts; dense SDPA by cudnn and flash; compiled FlexAttention (causal and window); fla-core's parallel_nsa."""
    choices: tuple[Choices, ...] = ("random",)
    """Choices of blocks: random (from random inputs), smooth (drifting slowly, as in trained models)."""
    direction: Direction = "both"
    """Figures: only forward, or forward and a training call."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of the inputs."""
    call_seconds: float = 0.3
    """Time to spend on each figure, more or less; at least five calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("batch", "head_dim", "call_seconds")
        if self.value_dim < 0:
            raise UserError(f"--value-dim must be at least 0, got {self.value_dim}")

    def all_shapes(self) -> list[AttentionShape]:
        """The shapes asked for."""
        names = self.shapes or (() if self.tokens else ("A", "B", "C", "D"))
        sizes = {"batch": self.batch, "head_dim": self.head_dim, "value_dim": self.value_dim or self.head_dim}
        return named_shapes(names) + free_shapes(self.tokens, self.heads, **sizes)


class AttentionBench:
    """One run of measurements."""

    def __init__(self, options: AttentionOptions, recorder: Recorder) -> None:
        self.options = options
        self.shapes = options.all_shapes()
        self.device = options.torch_device
        self.dtype = DTYPES[options.dtype]
        self.recorder = recorder
        self._refusals: dict[tuple[int, ...], str] = {}

    def run(self) -> None:
        """Measure everything; rows are in `recorder.rows`."""
        # Rows that take long to compile come last: if time runs out, they are missing.
        for kinds in (set(get_args(RowKind)) - _SLOW_TO_COMPILE, _SLOW_TO_COMPILE):
            rows = kinds & set(self.options.rows)
            for shape in self.shapes if rows else ():
                self._measure_shape(shape, rows)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def _measure_shape(self, shape: AttentionShape, rows: set[RowKind]) -> None:
        options, device = self.options, self.device
        self.recorder.say(f"{shape.name}: {shape.batch} x {shape.tokens}, {shape.heads}/{shape.groups} heads")
        try:
            inputs = make_inputs(shape, options.geometry, device, self.dtype)
            d_o = torch.randn(shape.batch, shape.tokens, shape.heads, shape.value_dim, device=device, dtype=self.dtype)
        except RuntimeError as error:
            self._keep({**self._labels(shape, "inputs", ""), "status": failure(error)})
            return
        # Dense first: the others are compared with it even where time runs out.
        for name in DENSE:
            if name in rows:
                self._measure(shape, f"dense {name}", "", partial(dense_attention, name, inputs, shape), d_o)
        if _SPARSE & rows:
            self._measure_sparse(shape, inputs, d_o)
        if "flex" in rows:
            for mask in ("causal", "window"):
                made = partial(flex_attention, mask, inputs, shape, options.geometry)
                self._measure(shape, f"flex {mask}", "", made, d_o)
        if "fla" in rows:
            self._measure(shape, "fla parallel_nsa", "", partial(fla_attention, inputs, shape, options.geometry), d_o)

    def _measure_sparse(self, shape: AttentionShape, inputs: Inputs, d_o: Tensor) -> None:
        options, geometry = self.options, self.options.geometry
        work = branch_work(shape, geometry, inputs.q.element_size())
        rows: dict[str, dict[str, Any]] = {}
        if {"end_to_end", "compression"} & set(options.rows):
            self._measure_compression(shape, inputs, d_o, work)
        for choices in options.choices if {"whole", "parts"} & set(options.rows) else ():
            try:
                self._check(shape)
                choice = make_choice(choices, inputs, geometry)
                union = blocks_of_4_neighbours(choice)
            except Exception as error:
                status = f"refused: {error}" if isinstance(error, Refused) else failure(error)
                self._keep({**self._labels(shape, "whole", choices), "status": status})
                continue
            # On random inputs the attention makes this very choice by itself.
            given = None if choices == "random" else choice
            if "whole" in options.rows:
                whole = partial(self._whole, inputs, given, work["whole"])
                rows["whole"] = self._measure(shape, "whole", choices, whole, d_o, blocks_of_4_neighbours=union)
            for part in PARTS if "parts" in options.rows else ():
                # Only the selected branch depends on the choice.
                if part == "selected" or part not in rows:
                    made = partial(self._part, part, inputs, choice, work[part])
                    rows[part] = self._measure(shape, part, choices if part == "selected" else "", made, d_o)
            if rows.keys() >= {"whole", *PARTS} and all(row["status"] == OK for row in rows.values()):
                self._keep(_rest(rows))

    def _measure_compression(self, shape: AttentionShape, inputs: Inputs, d_o: Tensor, work: dict[str, Work]) -> None:
        """Compression, by itself and with the whole call after it; the blocks are those of scoring."""
        rules: dict[str, Any] = {"geometry": self.options.geometry}
        raw, logits = (torch.randn_like(inputs.k_slc), torch.randn_like(inputs.v_slc)), torch.randn_like(inputs.gates)
        compress: Callable[[Tensor], Tensor] = partial(mean_compress, **rules)
        attention: Callable[..., Tensor] = partial(nsa_attention, **rules)

        def compress_both(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return compress(k), compress(v)

        def attend(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
            *branches, logits = others
            return attention(q, compress(k), compress(v), *branches, logits.sigmoid())

        try:
            self._check(shape)
        except Refused as error:
            for row in ("compression", "end to end"):
                if row.replace(" ", "_") in self.options.rows:
                    self._keep({**self._labels(shape, row, ""), "status": f"refused: {error}"})
            return
        if "compression" in self.options.rows:
            gradients = torch.randn_like(inputs.k_cmp), torch.randn_like(inputs.v_cmp)
            means = Candidate(compress_both, raw, work["compression"])
            self._measure(shape, "compression", "", lambda: means, gradients)
        if "end_to_end" in self.options.rows:
            everything = Candidate(attend, (inputs.q, *raw, *inputs[3:7], logits), work["end to end"])
            self._measure(shape, "end to end", "random", lambda: everything, d_o)

    def _whole(self, inputs: Inputs, choice: Tensor | None, work: Work) -> Candidate:
        rules: dict[str, Any] = {"geometry": self.options.geometry}
        if choice is None:
            return Candidate(partial(nsa_attention, **rules), tuple(inputs), work)
        tokens, lse = inputs.q.shape[1], self._lse(inputs)
        attention: Callable[..., Tensor] = partial(nsa_attention, selected_blocks=choice, **rules)

        def attend(q: Tensor, k_cmp: Tensor, *others: Tensor) -> Tensor:
            select_blocks(q, k_cmp, lse, num_keys=tokens, **rules)
            return attention(q, k_cmp, *others)

        return Candidate(attend, tuple(inputs), work, "blocks given, scoring beside")

    def _part(self, part: str, inputs: Inputs, choice: Tensor, work: Work) -> Candidate:
        q, k_cmp, geometry = inputs.q, inputs.k_cmp, self.options.geometry
        rules: dict[str, Any] = {"geometry": geometry, "num_keys": q.shape[1]}
        if part == "compressed":
            leaves = (q, k_cmp, inputs.v_cmp)
            return Candidate(lambda q, k, v: compressed_attention(q, k, v, **rules)[0], leaves, work)
        if part == "scoring":
            return Candidate(partial(select_blocks, **rules), (q, k_cmp, self._lse(inputs)), work)
        if part == "window":
            window = partial(window_attention, window_size=geometry.window_size)
            return Candidate(window, (q, inputs.k_win, inputs.v_win), work)
        selected = partial(selected_attention, selected_blocks=choice, geometry=geometry)
        return Candidate(selected, (q, inputs.k_slc, inputs.v_slc), work)

    def _lse(self, inputs: Inputs) -> Tensor:
        """Log-sum-exp of the compressed scores, made once; scoring reads it."""
        rules: dict[str, Any] = {"num_keys": inputs.q.shape[1]}
        with torch.no_grad():
            return compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, self.options.geometry, **rules)[1]

    def _check(self, shape: AttentionShape) -> None:
        """Refuse to time wrong results; once for each kind of shape."""
        options = self.options
        if shape.kind not in self._refusals:
            self._refusals[shape.kind] = ""
            try:
                share = check_parity(shape, options.geometry, self.device, self.dtype)
                self.recorder.say(f"parity of {shape.kind}: {share:.2f} of the allowed error")
            except Refused as reason:
                self._refusals[shape.kind] = str(reason)
            except Exception as error:
                self._refusals[shape.kind] = f"the comparison with float64 {failure(error)}"
        if self._refusals[shape.kind]:
            raise Refused(self._refusals[shape.kind])

    def _measure(
        self,
        shape: AttentionShape,
        row: str,
        choices: str,
        candidate: Callable[[], Candidate],
        d_o: Result,
        **more: Any,
    ) -> dict[str, Any]:
        options = self.options

        def figures() -> dict[str, Any]:
            before = backend_choices()
            made = candidate()
            measured = measure_candidate(made, d_o, options.direction, self.device, options.call_seconds)
            ran = {key[1] for key, count in backend_choices().items() if count != before.get(key, 0)}
            return {**measured, "backend": "+".join(sorted(ran)) or None, "note": made.note}

        kept = self.recorder.measure({**self._labels(shape, row, choices), **more}, figures)
        self.recorder.say(_line(kept))
        return kept

    def _keep(self, row: dict[str, Any]) -> None:
        self.recorder.keep(row)
        self.recorder.say(_line(row))

    def _labels(self, shape: AttentionShape, row: str, choices: str) -> dict[str, Any]:
        sizes = {"shape" if key == "name" else key: value for key, value in asdict(shape).items()}
        return {**sizes, "dtype": self.options.dtype, "row": row, "choices": choices}


def _rest(rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The whole without its parts, by difference."""
    whole = rows["whole"]
    labels = ("shape", "batch", "tokens", "heads", "groups", "head_dim", "value_dim", "dtype", "choices")
    row: dict[str, Any] = {key: whole[key] for key in labels} | {"row": "rest"}
    for key in ("forward_ms", "forward_backward_ms"):
        if key in whole:
            # Scoring has no backward: forward and backward together need only its forward.
            parts = [rows[part].get(key, rows[part].get("forward_ms", 0.0)) for part in PARTS]
            row[key] = whole[key] - sum(parts)
    return row | {"note": "by difference", "status": OK}


def _line(row: Mapping[str, Any]) -> str:
    figures = [
        f"{name} {row[key]:.4g} {unit}"
        for name, key, unit in (
            ("forward", "forward_ms", "ms"),
            ("forward+backward", "forward_backward_ms", "ms"),
            ("device", "forward_backward_device_ms", "ms"),
            ("extra peak", "forward_backward_extra_peak_gib", "GiB"),
        )
        if row.get(key) is not None
    ]
    words = [row["row"], *([row["choices"]] if row["choices"] else [])]
    return f"  {' '.join(words):24} {', '.join(figures) if row['status'] == OK else row['status']}"


ATTENTION = Benchmark(
    "attention",
    AttentionOptions,
    lambda options, recorder: AttentionBench(options, recorder).run(),
    NOTES,
    {
        "shape": "shape", "tokens": "tokens", "row": "row", "choices": "choices", "forward_ms": "fwd ms",
        "forward_backward_ms": "fwd+bwd ms", "forward_backward_extra_peak_gib": "peak GiB",
        "forward_backward_tflop_per_second": "TFLOP/s", "status": "status",
    },
    page_columns=(
        "shape", "tokens", "row", "choices", "forward_ms", "backward_ms", "forward_backward_ms",
        "forward_device_ms", "forward_backward_device_ms", "forward_extra_peak_gib",
        "forward_backward_extra_peak_gib", "forward_tflop_per_second", "forward_backward_tflop_per_second",
        "first_call_seconds", "backend", "note", "status",
    ),
    tables={"times_faster": speedups, "crossovers": crossovers},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(ATTENTION.main())
