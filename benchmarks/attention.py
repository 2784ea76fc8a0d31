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

from lib.baselines import (
    DENSE,
    dense_attention,
    fa4_attention,
    fla_attention,
    flex_attention,
    msa_attention,
    sfnsa_attention,
)
from lib.block_choices import Choices, blocks_of_neighbours, make_choice, one_branch_call, scored_choice, whole_call
from lib.candidate import Candidate, measure_candidate
from lib.choice_problem import check_index, random_index
from lib.comparison import crossovers, speedups
from lib.formulas import Work, branch_work
from lib.parity import check_parity
from lib.recorder import OK, Recorder, failure
from lib.script import Benchmark, BenchOptions
from lib.shapes import DTYPES, AttentionShape, free_shapes, make_inputs, named_shapes
from trifocal.errors import UserError
from trifocal.ops import (
    Geometry,
    backend_choices,
    compressed_attention,
    mean_compress,
    nsa_attention,
    select_blocks_by_index,
    selected_attention,
    window_attention,
)
from trifocal.testing.inputs import Inputs

RowKind = Literal["end_to_end", "whole", "one_branch", "parts", "cudnn", "flash", "fa4", "flex", "fla", "sfnsa", "msa"]
Direction = Literal["forward", "both"]
_CHOOSING: set[RowKind] = {"whole", "one_branch", "parts"}
_SPARSE: set[RowKind] = {"end_to_end", *_CHOOSING}
# Rows of packages that take long to compile.
_OTHERS = {
    "fa4": ("dense fa4", lambda inputs, shape, _: fa4_attention(inputs, shape)),
    "flex": ("flex window", flex_attention),
    "fla": ("fla parallel_nsa", fla_attention),
    "sfnsa": ("sfnsa", sfnsa_attention),
    "msa": ("flash-msa", msa_attention),
}
PARTS = ("compressed", "scoring", "selected", "window")

NOTES = (
    "Medians of calls timed with events on the device, the L2 cache flushed before each; p20 and p80 are the spread. "
    "Random inputs. Random choices are the attention's own, smooth and real ones are given.",
    "forward_ms is without gradients, as in prefill; forward_backward_ms is one training call; backward_ms is their "
    "difference. The device_ms of each are of the device only, held up until the host has handed over the whole call.",
    "extra_peak_gib is the largest allocation beyond the inputs, results and gradients included.",
    "tflop and gib are by formula: products over the keys that queries see, and every input and result moved once.",
    "Where blocks are given, what chooses (scoring in whole, the index in one branch) runs beside, as if it had chosen "
    "them. blocks_of_8_neighbours: different blocks that eight adjacent queries choose together, over n.",
    "Row one branch: selected attention with the choice by an index; neither the index's projections nor its loss.",
    "Row end to end: means of keys and values, sigmoid of the gates' logits, and whole: the cost of a call. Row whole "
    "begins with compressed keys and values and with gates.",
    "first_call_seconds: the first call of the row in this process; with an empty Triton cache (TRITON_CACHE_DIR) it "
    "includes compilation, except of kernels that an earlier row compiled.",
    "whole, one branch and the parts give equal bits from run to run; rows with a note about atomics do not.",
)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(BenchOptions):
    """Time the attention and its parts beside dense attention and others, in one run; refuses to time wrong results."""

    shapes: tuple[str, ...] = ()
    """Shapes by name: A to G, P8k, P16k, P32k, P64k; P is the last four. A B C D E unless others are given."""
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
    """Rows: NSA end_to_end, the whole after the compression of keys and values, and its parts; one_branch, selected
    attention with an index; dense SDPA by cudnn and flash, and flash-attn-4 (fa4); compiled FlexAttention over the
    window; fla-core's parallel_nsa; SFNSA; flash-msa."""
    choices: tuple[Choices, ...] = get_args(Choices)
    """Choices of blocks: random (from random inputs), smooth (drifting slowly), real (a pretrained model's, up to 8,192
    tokens)."""
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
        names = self.shapes or (() if self.tokens else ("A", "B", "C", "D", "E"))
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
        for kinds in (set(get_args(RowKind)) - _OTHERS.keys(), _OTHERS.keys()):
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
        for kind in [kind for kind in _OTHERS if kind in rows]:
            name, make = _OTHERS[kind]
            self._measure(shape, name, "", partial(make, inputs, shape, options.geometry), d_o)

    def _measure_sparse(self, shape: AttentionShape, inputs: Inputs, d_o: Tensor) -> None:
        options, geometry, rows = self.options, self.options.geometry, set(self.options.rows)
        if refusal := self._refusal(shape):
            self._keep({**self._labels(shape, "sparse", ""), "status": refusal})
            return
        work = branch_work(shape, geometry, inputs.q.element_size())
        if "end_to_end" in rows:
            everything = partial(self._end_to_end, inputs, work["end to end"])
            self._measure(shape, "end to end", "random", everything, d_o)
        index = random_index(shape, self.device, self.dtype)
        parts = [*PARTS] if "parts" in rows else []
        for choices in options.choices if _CHOOSING & rows else ():
            try:
                given = make_choice(choices, inputs, geometry)
                scored = scored_choice(inputs, geometry)() if given is None else given
                indexed = select_blocks_by_index(*index, geometry) if given is None else given
            except Exception as error:
                self._keep({**self._labels(shape, "choices", choices), "status": failure(error)})
                continue
            for row, chosen in {"whole": scored, "one branch": indexed}.items():
                if row.replace(" ", "_") in rows:
                    made = partial(self._call, row, inputs, index, given, work[row])
                    union = blocks_of_neighbours(chosen)
                    self._measure(shape, row, choices, made, d_o, blocks_of_8_neighbours=union)
            for part in parts:
                made = partial(self._part, part, inputs, scored, work[part])
                self._measure(shape, part, choices if part == "selected" else "", made, d_o)
            # The others do not depend on the choice.
            parts = [part for part in parts if part == "selected"]

    def _call(
        self, row: str, inputs: Inputs, index: tuple[Tensor, Tensor], given: Tensor | None, work: Work
    ) -> Candidate:
        note = "" if given is None else "blocks given"
        if row == "whole":
            return Candidate(whole_call(inputs, self.options.geometry, given), tuple(inputs), work, note)
        leaves = (inputs.q, inputs.k_slc, inputs.v_slc)
        return Candidate(one_branch_call(index, self.options.geometry, given), leaves, work, note)

    def _end_to_end(self, inputs: Inputs, work: Work) -> Candidate:
        compress = partial(mean_compress, geometry=self.options.geometry)

        def attend(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
            *branches, logits = others
            return nsa_attention(q, compress(k), compress(v), *branches, logits.sigmoid(), self.options.geometry)

        raw = torch.randn_like(inputs.k_slc), torch.randn_like(inputs.v_slc)
        return Candidate(attend, (inputs.q, *raw, *inputs[3:7], torch.randn_like(inputs.gates)), work)

    def _part(self, part: str, inputs: Inputs, choice: Tensor, work: Work) -> Candidate:
        q, k_cmp, geometry = inputs.q, inputs.k_cmp, self.options.geometry
        rules: dict[str, Any] = {"geometry": geometry, "num_keys": q.shape[1]}
        if part == "compressed":
            leaves = (q, k_cmp, inputs.v_cmp)
            return Candidate(lambda q, k, v: compressed_attention(q, k, v, **rules)[0], leaves, work)
        if part == "scoring":
            return Candidate(scored_choice(inputs, geometry), (), work)
        if part == "window":
            window = partial(window_attention, window_size=geometry.window_size)
            return Candidate(window, (q, inputs.k_win, inputs.v_win), work)
        selected = partial(selected_attention, selected_blocks=choice, geometry=geometry)
        return Candidate(selected, (q, inputs.k_slc, inputs.v_slc), work)

    def _refusal(self, shape: AttentionShape) -> str:
        """Why results of this kind of shape must not be timed, empty if they are right; looked at once."""
        if shape.kind not in self._refusals:
            problem = (shape, self.options.geometry, self.device, self.dtype)
            try:
                self.recorder.say(f"parity of {shape.kind}: {check_parity(*problem):.2f} of the allowed error")
                if "one_branch" in self.options.rows:
                    check_index(*problem)
                self._refusals[shape.kind] = ""
            except Exception as error:
                self._refusals[shape.kind] = failure(error)
        return self._refusals[shape.kind]

    def _measure(
        self, shape: AttentionShape, row: str, choices: str, make: Callable[[], Candidate], d_o: Tensor, **more: Any
    ) -> None:
        options = self.options

        def figures() -> dict[str, Any]:
            before = backend_choices()
            made = make()
            measured = measure_candidate(made, d_o, options.direction, self.device, options.call_seconds)
            ran = {key[1] for key, count in backend_choices().items() if count != before.get(key, 0)}
            return {**measured, "backend": "+".join(sorted(ran)) or None, "note": made.note}

        self.recorder.say(_line(self.recorder.measure({**self._labels(shape, row, choices), **more}, figures)))

    def _keep(self, row: dict[str, Any]) -> None:
        self.recorder.keep(row)
        self.recorder.say(_line(row))

    def _labels(self, shape: AttentionShape, row: str, choices: str) -> dict[str, Any]:
        sizes = {"shape" if key == "name" else key: value for key, value in asdict(shape).items()}
        return {**sizes, "dtype": self.options.dtype, "row": row, "choices": choices}


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
        "shape", "tokens", "row", "choices", "blocks_of_8_neighbours", "forward_ms", "backward_ms",
        "forward_backward_ms",
        "forward_device_ms", "forward_backward_device_ms", "forward_extra_peak_gib",
        "forward_backward_extra_peak_gib", "forward_tflop_per_second", "forward_backward_tflop_per_second",
        "first_call_seconds", "backend", "note", "status",
    ),
    tables={"times_faster": speedups, "crossovers": crossovers},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(ATTENTION.main())
