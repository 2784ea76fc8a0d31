"""`trifocal generate`: continue a text with a trained model."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from trifocal.data import Tokenizer, make_tokenizer
from trifocal.errors import UserError
from trifocal.models import DecoderLM
from trifocal.paths import shell_path, user_path
from trifocal.train.arguments import parse_arguments
from trifocal.train.checkpoint import find_checkpoint, load_model_weights
from trifocal.train.config import RunConfig
from trifocal.train.inputs import autocast
from trifocal.train.preflight import choose_device
from trifocal.train.run_directory import load_run


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Continue a text with the model of a run; the text goes to standard output."""

    run_directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """The run."""
    prompt: str
    """The text to continue."""
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
    """Print continuations.

    Raises:
        UserError: If there is no run or checkpoint, or the prompt is empty or longer than the model was trained for, or
            the model's weights are broken.
    """
    options: GenerateArguments = parse_arguments(GenerateArguments, args, prog="trifocal generate")
    directory = user_path(options.run_directory, "RUN_DIR")
    config = load_run(directory)
    command = f"trifocal generate {shell_path(directory)} --prompt {shlex.quote(options.prompt)}"
    checkpoint = find_checkpoint(directory, options.checkpoint, command=command)
    tokenizer = make_tokenizer(config.data.tokenizer, separator=config.data.separator)
    prompt = _encode_prompt(options, config, tokenizer)
    device = choose_device(options.device)
    model = DecoderLM(config.model)
    load_model_weights(checkpoint, model=model, model_config=config.model)
    model.to(device)
    try:
        with autocast(device, config.train.precision):
            tokens = model.generate(
                prompt.expand(options.samples, -1).to(device),
                options.max_new_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=options.seed,
                stop_token=tokenizer.separator if options.stop_at_document_end else None,
                prefill_chunk_size=options.prefill_chunk_size,
            )
    except FloatingPointError as error:
        raise UserError(f"{checkpoint}: {error}; choose an earlier one with --checkpoint") from error
    for index, row in enumerate(tokens.tolist()):
        if options.samples > 1:
            print(f"--- {index + 1} of {options.samples}")
        print(options.prompt + tokenizer.decode(row[prompt.shape[1] :]))
    return 0


def _encode_prompt(options: GenerateArguments, config: RunConfig, tokenizer: Tokenizer) -> torch.Tensor:
    """The prompt's tokens, [1, T]."""
    try:
        tokens = tokenizer.encode(options.prompt)
    except UnicodeEncodeError as error:
        raise UserError("--prompt is not UTF-8 text") from error
    if len(tokens) == 0:
        raise UserError("--prompt is empty: give the model something to continue")
    if int(tokens.max()) >= config.model.vocab_size:
        raise UserError(f"--prompt has tokens outside the model's vocabulary of {config.model.vocab_size}")
    trained = config.train.sequence_length
    if len(tokens) > trained:
        raise UserError(f"--prompt has {len(tokens)} tokens, more than the {trained} that the model was trained on")
    total = len(tokens) + options.max_new_tokens
    if total > trained:
        note = f"note: prompt and new tokens make up to {total} tokens, the model was trained on {trained}"
        print(note, file=sys.stderr)
    return torch.from_numpy(tokens).long()[None]
