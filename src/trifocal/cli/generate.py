"""`trifocal generate`: continue a text with a trained model."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from trifocal.cli.output import printable
from trifocal.data import Tokenizer
from trifocal.errors import UserError
from trifocal.generate import TextStream, stream
from trifocal.models import DecoderLM, ModelConfig
from trifocal.paths import shell_path, user_path
from trifocal.runlog.environment import host_memory_bytes
from trifocal.train.arguments import parse_arguments
from trifocal.train.micro_batch import autocast
from trifocal.train.preflight import choose_device
from trifocal.train.pretrained import open_pretrained
from trifocal.train.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Continue a text with a trained model; the text goes to standard output while it is made."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run, also while it goes on; or one of its checkpoints, or a folder of weights."""
    prompt: str
    """The text to continue; "-" reads it from standard input, as it is."""
    checkpoint: str = ""
    """A checkpoint of the run, like step_00000500; the newest by default."""
    max_new_tokens: int = 256
    """Tokens to add at most."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this together; 1: from all."""
    seed: int = 0
    """Makes the draw repeatable."""
    samples: int = 1
    """Continuations, drawn in one batch."""
    stop_at_document_end: bool = True
    """Stop where the model ends the document."""
    prefill_chunk_size: int = 0
    """Tokens of the prompt that go through the model at a time, to bound memory; 0: all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; "auto" takes a GPU if there is one."""

    def __post_init__(self) -> None:
        for name, lowest in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("samples", 1)):
            if getattr(self, name) < lowest:
                raise UserError(f"--{name.replace('_', '-')} must be at least {lowest}, got {getattr(self, name)}")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"--seed must fit 64 bits, got {self.seed}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p must lie in (0, 1], got {self.top_p}")
        if self.prefill_chunk_size < 0:
            raise UserError(f"--prefill-chunk-size must be at least 0, got {self.prefill_chunk_size}")


def run(args: Sequence[str]) -> int:
    """Print continuations, the first while it is made.

    Raises:
        UserError: If there is no model, its weights are broken, the prompt is empty or no text, or there is no memory.
    """
    options: GenerateArguments = parse_arguments(GenerateArguments, args, prog="trifocal generate")
    prompt = _read_prompt(options.prompt)
    path = user_path(options.path, "PATH")
    command = f"trifocal generate {shell_path(path)} --prompt {shlex.quote(options.prompt)}"
    with open_pretrained(path, options.checkpoint, command=command) as found:
        tokenizer, config = found.tokenizer(), found.config()
        tokens = _encode_prompt(prompt, config, tokenizer)
        device = choose_device(options.device)
        precision = "fp32" if found.run is None else found.run.train.precision
        _check_memory(options, config, tokens.shape[1], device, precision)
        model = found.model()
    _note_length(tokens.shape[1] + options.max_new_tokens, found.run)
    try:
        with autocast(device, precision):
            _print_continuations(model.to(device), tokens.to(device), options, prompt, tokenizer)
    except FloatingPointError as error:
        raise UserError(f"{found.path}: {error}; choose an earlier one with --checkpoint") from error
    except (MemoryError, RuntimeError) as error:
        if not _is_for_memory(error):
            raise
        raise UserError(
            f"{device} has no memory for so much; lower --samples, --max-new-tokens or --prefill-chunk-size"
        ) from error
    return 0


def _read_prompt(text: str) -> str:
    name = "--prompt"
    try:
        if text == "-":
            name = "standard input"
            text = sys.stdin.buffer.read().decode("utf-8")
        text.encode("utf-8")
    except UnicodeError as error:
        raise UserError(f"{name} is not UTF-8 text") from error
    if not text:
        raise UserError(f"{name} is empty: give the model something to continue")
    return text


def _encode_prompt(prompt: str, config: ModelConfig, tokenizer: Tokenizer) -> torch.Tensor:
    """The prompt's tokens, [1, T]."""
    tokens = tokenizer.encode(prompt)
    if len(tokens) == 0:
        raise UserError("the tokenizer makes no token of the prompt: give the model something to continue")
    if int(tokens.max()) >= config.vocab_size:
        raise UserError(f"the prompt has tokens outside the model's vocabulary of {config.vocab_size}")
    return torch.from_numpy(tokens).long()[None]


def _note_length(total: int, run: RunConfig | None) -> None:
    if run is not None and total > run.train.sequence_length:
        print(
            f"note: prompt and new tokens make up to {total} tokens, the model was trained on "
            f"{run.train.sequence_length}; it goes on past them",
            file=sys.stderr,
        )


def _check_memory(
    options: GenerateArguments, config: ModelConfig, prompt_length: int, device: torch.device, precision: str
) -> None:
    """Refuse what cannot fit: an allocation that the system only promises would end the process later."""
    has = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory_bytes()
    bytes_per_number = 2 if precision == "bf16" else 4
    cached = config.num_layers * config.num_kv_heads * (config.head_dim + config.value_dim) * bytes_per_number
    at_once = min(options.prefill_chunk_size or prompt_length, prompt_length) * (config.dim + config.mlp_dim)
    tokens = prompt_length + options.max_new_tokens
    needs = options.samples * (tokens * (8 + cached) + at_once * bytes_per_number + 4 * config.vocab_size)
    if has is not None and needs > has:
        raise UserError(
            f"{options.samples:,} x {tokens:,} tokens need at least {needs / 2**30:,.1f} GiB, {device} has "
            f"{has / 2**30:,.1f}; lower --samples or --max-new-tokens"
        )


def _is_for_memory(error: BaseException) -> bool:
    # On a CPU PyTorch says it in words alone.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def _print_continuations(
    model: DecoderLM, tokens: torch.Tensor, options: GenerateArguments, prompt: str, tokenizer: Tokenizer
) -> None:
    def show(text: str) -> None:
        # A terminal would obey what a model writes; a file gets it as it is.
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def head(index: int) -> str:
        return (f"--- {index + 1} of {options.samples}\n" if options.samples > 1 else "") + prompt

    steps = stream(
        model,
        tokens.expand(options.samples, -1),
        options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_token=tokenizer.separator if options.stop_at_document_end else None,
        prefill_chunk_size=options.prefill_chunk_size,
    )
    texts = [TextStream(tokenizer, tokens[0].tolist()) for _ in range(options.samples)]
    others = [""] * options.samples
    started = False
    try:
        for drawn in steps:
            for index, token in enumerate(drawn.tolist()):
                others[index] += texts[index].add(token)
            if not started:
                show(head(0))
                started = True
            show(others[0])
            others[0] = ""
    finally:
        if started:
            show(others[0] + texts[0].end() + "\n")
    for index in range(1, options.samples):
        show(head(index) + others[index] + texts[index].end() + "\n")
