"""The flags of `trifocal bench decode`, and what its parts share."""

import gc
from dataclasses import dataclass, replace
from typing import Literal

import torch

from trifocal.bench.options import TwinOptions, parse_size
from trifocal.bench.recorder import Recorder
from trifocal.errors import UserError
from trifocal.models import DecoderLM, ModelConfig
from trifocal.train.preflight import choose_device

Part = Literal["model", "prefill", "layer", "mix", "shell"]
SIZES = ("1x1024", "1x4096", "1x16384", "1x65536", "8x8192", "64x8192", "64x65536")


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(TwinOptions):
    """Time decoding of the sparse model, of its dense twin on the same engine, and of a plain dense model."""

    parts: tuple[Part, ...] = ("model", "prefill", "layer", "mix")
    """model: a token's time at --sizes; prefill: prompts of --prompt-tokens; layer: one attention at --layer-sizes;
    mix: many requests of many lengths; shell: trifocal generate on --run."""
    sizes: tuple[str, ...] = SIZES
    """Sequences x tokens of the past of each, like 8x8192."""
    new_tokens: int = 64
    """Tokens of a sequence that are timed at each size."""
    plain: bool = True
    """Time a plain dense model beside the engine's, compiled and recorded."""
    batch_invariant: bool = True
    """Products whose sums do not depend on the batch, as trifocal generate has them."""
    prompt_tokens: tuple[int, ...] = (8192, 65536)
    """Lengths of the prompts of the part prefill."""
    prefill_chunk_size: int = 0
    """Tokens of a prompt that go through the model at a time; 0: as trifocal generate chooses."""
    compile: bool = True
    """Compile the training forward that prefill is compared with; without effect on a CPU."""
    layer_sizes: tuple[str, ...] = ("1x65536", "32x65536", "256x8192", "512x4096")
    """Sequences x tokens of the part layer: 64 query heads and 4 KV heads of 128."""
    requests: int = 256
    """Requests of the mix."""
    mix_in: tuple[int, int] = (4096, 7680)
    """Fewest and most tokens of a prompt of the mix."""
    mix_out: tuple[int, int] = (512, 2048)
    """Fewest and most new tokens of a request of the mix."""
    max_sequences: int = 256
    """Sequences that the mix runs at a time, as far as memory allows."""
    run: str = ""
    """A trained run, checkpoint or folder of weights, for the part shell."""
    repeats: int = 5
    """Calls that are timed for a row of prefill and of shell."""
    row_seconds: float = 1.0
    """Time to spend on a row of layer and of the plain model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("new_tokens", "requests", "max_sequences", "repeats", "row_seconds")
        for size in (*self.sizes, *self.layer_sizes):
            parse_size(size)
        for name in ("mix_in", "mix_out"):
            fewest, most = getattr(self, name)
            if not 1 <= fewest <= most:
                raise UserError(f"--{name.replace('_', '-')} must be two numbers from 1 on, got {fewest} {most}")
        if any(length < 1 for length in self.prompt_tokens):
            raise UserError(f"--prompt-tokens must be at least 1 each, got {' '.join(map(str, self.prompt_tokens))}")
        if "shell" in self.parts and not self.run:
            raise UserError("--parts shell times a trained model: give one with --run RUN_DIR")


class DecodingBench:
    """What the parts of the bench share.

    Args:
        options: The flags.
        recorder: Takes the rows.

    Attributes:
        device: Where it runs.
    """

    def __init__(self, options: DecodeOptions, recorder: Recorder) -> None:
        self.options, self.recorder = options, recorder
        self.device = choose_device(options.device)
        self._models: dict[str, DecoderLM] = {}

    def config(self, attention: str) -> ModelConfig:
        """The model of a row."""
        return replace(self.options.model, attention=attention)  # type: ignore[arg-type]

    def model(self, attention: str) -> DecoderLM:
        """A twin with random weights, made once."""
        if attention not in self._models:
            model = DecoderLM(self.config(attention))
            model.init_weights(0)
            self._models[attention] = model.to(self.device).eval()
        return self._models[attention]

    def release(self) -> None:
        """Give the memory of a row back, and forget its peak."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
