"""A model with caches, with as many sequences at a time as are useful and fit; and the tokens of prompts."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from trifocal.data import Tokenizer
from trifocal.data.sources.chats import BadChat
from trifocal.errors import UserError
from trifocal.inference.cached_model import CachedModel
from trifocal.inference.paged_cache import cache_bytes, longest_that_fits, memory_for_caches, plan_cache
from trifocal.models import DecoderLM, ModelConfig
from trifocal.ops.devices import is_out_of_memory

MAX_SEQUENCES = {"cuda": 256, "cpu": 16}
_KEPT_PREFIXES = 64
# Share of the memory for caches that the rows of kept prefixes may take.
_PREFIX_SHARE = 0.25
DEFAULT_TEMPERATURE = 0.8
"""Temperature of texts for people, where the model names none."""


def encode_prompts(
    prompts: Sequence[tuple[str, str]], tokenizer: Tokenizer, config: ModelConfig, *, chat: bool = False
) -> list[list[int]]:
    """The tokens of prompts, each a name for messages and a text, with `chat` a user's message."""
    encoded = []
    for name, text in prompts:
        try:
            tokens = tokenizer.encode_prompt([{"role": "user", "content": text}] if chat else text)
        except BadChat as error:
            raise UserError(f"{name}: {error}") from error
        if len(tokens) == 0:
            raise UserError(f"the tokenizer makes no token of {name}: give the model something to continue")
        if int(tokens.max()) >= config.vocab_size:
            raise UserError(f"{name} has tokens outside the model's vocabulary of {config.vocab_size}")
        encoded.append(tokens.tolist())
    return encoded


def cache_for_prompts(
    model: Callable[[], DecoderLM],
    config: ModelConfig,
    prompts: Sequence[tuple[str, Sequence[int]]],
    max_new_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    samples: int = 1,
    max_sequences: int = 0,
    prefill_chunk_size: int = 0,
) -> CachedModel:
    """A model with caches for prompts, each a name and tokens; of `max_sequences` at a time, or 0: as memory allows."""
    name, prompt = max(prompts, key=lambda prompt: len(prompt[1]))
    length = len(prompt) + max_new_tokens
    most = max_sequences or max(MAX_SEQUENCES[device.type], samples)
    return make_cached_model(
        model,
        config,
        dtype,
        device,
        what=f"{name} and its new tokens make {length:,}, which",
        remedy="lower --max-new-tokens or --samples, or shorten it",
        # The last token is never read.
        max_length=length - 1,
        sequences=min(most, len(prompts) * samples),
        samples=samples,
        prefill_chunk_size=prefill_chunk_size,
        # Beginnings end where chunks do, and chunks are longer than most prompts unless their size is given.
        spare_rows=_KEPT_PREFIXES if len(prompts) > 1 and 0 < prefill_chunk_size < len(prompt) else 0,
    )


def make_cached_model(
    model: Callable[[], DecoderLM],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    what: str,
    remedy: str,
    max_length: int,
    sequences: int,
    samples: int = 1,
    max_bytes: int | None = None,
    prefill_chunk_size: int = 0,
    spare_rows: int = 0,
    record_chunks: bool = False,
) -> CachedModel:
    """A model, made once it is known that they fit, with caches for up to `sequences` at a time, in `max_bytes` unless
    one takes more, and up to `spare_rows` in a quarter of that; UserError, with the remedy, if not even one fits.
    """
    with memory_errors(device):
        free, weight = memory_for_caches(config, dtype, device), cache_bytes(config, dtype, max_length)
        # The row of a wide window weighs as much as a long sequence.
        room = _PREFIX_SHARE * (free if max_bytes is None else min(free, max_bytes))
        spare_rows = max(0, min(spare_rows, int(room // max(weight.row, 1))))
        free -= spare_rows * weight.row + record_chunks * weight.page
        if max_bytes is not None:
            free = min(free, max(max_bytes, weight.of_sequence(max_length)))
        plan = plan_cache(config, dtype, max_length, free_bytes=free, sequences=sequences)
        if plan is None:
            fits = longest_that_fits(config, dtype, free)
            raise UserError(f"{what} do not fit into the memory of {device}; {fits:,} do: {remedy}")
        if plan.max_sequences < samples:
            fits = plan.max_sequences
            raise UserError(f"{samples:,} samples at a time do not fit into {device}, {fits:,} do: {remedy}")
        return CachedModel(
            model().to(device),
            max_sequences=plan.max_sequences,
            max_length=max_length,
            num_pages=plan.num_pages,
            dtype=dtype,
            prefill_chunk_size=prefill_chunk_size,
            spare_rows=spare_rows,
            record_chunks=record_chunks,
        )


@contextlib.contextmanager
def memory_errors(device: torch.device) -> Iterator[None]:
    """Turn a lack of memory into a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{device} has too little memory; lower --samples, --max-new-tokens, --max-sequences or "
            "--prefill-chunk-size"
        ) from error
