"""A trained model with caches for the prompts that a command has."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trifocal.cli.generate_options import GenerateArguments
from trifocal.data import Tokenizer
from trifocal.errors import UserError
from trifocal.inference import CachedModel, Request
from trifocal.inference.paged_cache import CachePlan, longest_that_fits, memory_for_caches, plan_cache
from trifocal.models import DecoderLM, ModelConfig
from trifocal.train.checkpoint.pretrained import open_pretrained
from trifocal.train.config.check import choose_device

_MOST_SEQUENCES = {"cuda": 256, "cpu": 16}


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        path: The folder of its weights.
        model: The model with its caches.
        tokenizer: Its tokenizer.
        tokens: The tokens of each prompt.
    """

    path: Path
    model: CachedModel
    tokenizer: Tokenizer
    tokens: list[list[int]]

    def request(self, options: GenerateArguments, index: int, name: str, *, number: int = 0) -> Request:
        """The request of a prompt, by its index in `tokens`; its number among all prompts decides its seed."""
        return Request(
            prompt=self.tokens[index],
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling(number),
            samples=options.samples,
            stop_tokens=(self.tokenizer.separator,) if options.stop_at_document_end else (),
            stop=options.stop,
            name=name,
        )


def load(options: GenerateArguments, path: Path, command: str, prompts: Sequence[tuple[str, str]]) -> LoadedModel:
    """Load a model, and make room for its prompts.

    Args:
        options: The flags.
        path: The run, a checkpoint, or a folder of weights.
        command: The user's command, for advice.
        prompts: Name and text of each.

    Raises:
        UserError: If there is no model, a prompt makes no tokens or too many, or there is no memory.
    """
    with open_pretrained(path, options.checkpoint, command=command) as found:
        dtype = torch.bfloat16 if found.run is not None and found.run.train.precision == "bf16" else torch.float32
        tokenizer = found.tokenizer()
        model, tokens = add_caches(options, found.model, found.config(), tokenizer, dtype, prompts)
    longest = model.max_length + 1
    if found.run is not None and longest > found.run.train.sequence_length:
        print(
            f"note: prompt and new tokens make up to {longest} tokens, the model was trained on "
            f"{found.run.train.sequence_length}; it goes on past them",
            file=sys.stderr,
        )
    return LoadedModel(found.path, model, tokenizer, tokens)


def add_caches(
    options: GenerateArguments,
    model: Callable[[], DecoderLM],
    config: ModelConfig,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    prompts: Sequence[tuple[str, str]],
) -> tuple[CachedModel, list[list[int]]]:
    """A model with caches for its prompts, and the tokens of each; the model is made once the prompts are right.

    Args:
        options: The flags.
        model: Makes the model.
        config: Its configuration.
        tokenizer: Its tokenizer.
        dtype: Type of its arithmetic and caches.
        prompts: Name and text of each.

    Raises:
        UserError: If a prompt makes no tokens or too many, or there is no memory.
    """
    tokens = _encode(prompts, config, tokenizer)
    device = choose_device(options.device)
    longest_prompt, longest_name = max(zip(map(len, tokens), (name for name, _ in prompts), strict=True))
    # The last token is never read.
    longest = longest_prompt + options.max_new_tokens - 1
    with memory_errors(device):
        plan = _plan(options, config, dtype, device, len(tokens), longest, longest_name)
        cached = CachedModel(
            model().to(device),
            max_sequences=plan.max_sequences,
            max_length=longest,
            num_pages=plan.num_pages,
            dtype=dtype,
            prefill_chunk_size=options.prefill_chunk_size,
        )
    return cached, tokens


@contextlib.contextmanager
def memory_errors(device: torch.device) -> Iterator[None]:
    """Turn a lack of memory into a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU PyTorch says it in words alone.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise UserError(
            f"{device} has no memory for so much; lower --samples, --max-new-tokens, --max-sequences or "
            "--prefill-chunk-size"
        ) from error


def _encode(prompts: Sequence[tuple[str, str]], config: ModelConfig, tokenizer: Tokenizer) -> list[list[int]]:
    encoded = []
    for (name, _), tokens in zip(prompts, tokenizer.encode_batch([text for _, text in prompts]), strict=True):
        if len(tokens) == 0:
            raise UserError(f"the tokenizer makes no token of {name}: give the model something to continue")
        if int(tokens.max()) >= config.vocab_size:
            raise UserError(f"{name} has tokens outside the model's vocabulary of {config.vocab_size}")
        encoded.append(tokens.tolist())
    return encoded


def _plan(
    options: GenerateArguments,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_prompts: int,
    max_length: int,
    longest_name: str,
) -> CachePlan:
    """As many sequences as are useful and fit.

    Raises:
        UserError: If a prompt's samples do not fit; names the longest sequence that would.
    """
    free = memory_for_caches(config, dtype, device)
    most = options.max_sequences or max(_MOST_SEQUENCES[device.type], options.samples)
    wanted = min(most, num_prompts * options.samples)
    plan = plan_cache(config, dtype, max_length, free_bytes=free, sequences=wanted)
    if plan is None:
        fits = longest_that_fits(config, dtype, free)
        raise UserError(
            f"{longest_name} and its new tokens make {max_length + 1:,}, which do not fit into the memory of {device}; "
            f"{fits:,} do: lower --max-new-tokens or shorten it"
        )
    if plan.max_sequences < options.samples:
        raise UserError(
            f"{options.samples:,} samples do not fit into the memory of {device} at a time, {plan.max_sequences:,} do; "
            "lower --samples or --max-new-tokens"
        )
    return plan
