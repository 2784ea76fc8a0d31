"""A trained model with caches for the prompts that a command has."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trifocal.cli.generate_options import GenerateArguments
from trifocal.data import Tokenizer
from trifocal.inference import CachedModel, Request
from trifocal.inference.prompts import cache_for_prompts, encode_prompts, memory_errors
from trifocal.train.checkpoint.pretrained import open_pretrained
from trifocal.train.config.check import choose_device

__all__ = ["LoadedModel", "load", "memory_errors"]


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


def load(options: GenerateArguments, path: Path, prompts: Sequence[tuple[str, str]]) -> LoadedModel:
    """Load a model, and make room for its prompts.

    Args:
        options: The flags.
        path: The run, a checkpoint, or a folder of weights.
        prompts: Name and text of each.

    Raises:
        UserError: If there is no model, a prompt makes no tokens or too many, or there is no memory.
    """
    with open_pretrained(path, options.checkpoint) as found:
        config, tokenizer = found.config(), found.tokenizer()
        tokens = encode_prompts(prompts, tokenizer, config)
        model = cache_for_prompts(
            found.model,
            config,
            [(name, of_prompt) for (name, _), of_prompt in zip(prompts, tokens, strict=True)],
            options.max_new_tokens,
            torch.bfloat16 if found.run is not None and found.run.train.precision == "bf16" else torch.float32,
            choose_device(options.device),
            samples=options.samples,
            max_sequences=options.max_sequences,
            prefill_chunk_size=options.prefill_chunk_size,
            weights=options.weights,
        )
    longest = model.max_length + 1
    if found.run is not None and longest > found.run.train.sequence_length:
        print(
            f"note: prompt and new tokens make up to {longest} tokens, the model was trained on "
            f"{found.run.train.sequence_length}; it goes on past them",
            file=sys.stderr,
        )
    return LoadedModel(found.path, model, tokenizer, tokens)
