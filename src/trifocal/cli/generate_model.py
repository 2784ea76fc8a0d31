"""The flags of `trifocal generate`, and the model that they name, with caches for the prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trifocal.cli.flags import ModelArguments
from trifocal.data import Tokenizer
from trifocal.errors import UserError
from trifocal.fields import check_at_least
from trifocal.inference import CachedModel, Request, Sampling
from trifocal.inference.prompts import DEFAULT_TEMPERATURE, cache_for_prompts, encode_prompts
from trifocal.inference.sampler import SETTINGS
from trifocal.train.checkpoint.pretrained import open_pretrained
from trifocal.train.config.check import choose_device


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(ModelArguments):
    """Continue a text with a trained model; the text goes to standard output while it is made. Or a file of prompts."""

    prompt: str = ""
    """The text to continue; "-" reads it from standard input, as it is."""
    chat: bool = False
    """Take each prompt as the first message of a chat, by the tokenizer's template; only the answer is printed."""
    prompts: str = ""
    """Instead of --prompt: a file with a JSON object a line, {"prompt": TEXT}, other keys are kept; or a .txt with a
    prompt a line."""
    output: str = ""
    """With --prompts: the new file to write, a JSON object with the index of its prompt a line, as they end."""
    append: bool = False
    """Continue an --output that exists: the prompts whose texts it has are skipped."""
    max_new_tokens: int = 256
    """Tokens to add at most."""
    temperature: float | Literal["auto"] = "auto"
    """Divides the logits; 0 always takes the likeliest token. "auto", as of the next four: as the model's
    generation_config.json says, else 0.8."""
    top_k: int | Literal["auto"] = "auto"
    """Draw from this many likeliest tokens; 0, else: from all."""
    top_p: float | Literal["auto"] = "auto"
    """Draw from the fewest likeliest tokens whose probabilities reach this together; 1, else: from all."""
    min_p: float | Literal["auto"] = "auto"
    """Draw from tokens with at least this share of the likeliest one's probability; 0, else: from all."""
    repetition_penalty: float | Literal["auto"] = "auto"
    """Divides positive logits of tokens that the text has, and multiplies negative ones; 1, else: none."""
    seed: int = 0
    """Makes the draw repeatable; prompts and samples have their own seeds, which follow from it."""
    samples: int = 1
    """Continuations of each prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end the text before them."""
    stop_at_document_end: bool = True
    """Stop where the model ends the document."""
    logprobs: bool = False
    """Give the log-probability of each new token by the model, without temperature and filters."""
    prefill_chunk_size: int = 0
    """Tokens of a prompt that go through the model at a time, to bound memory; 0: up to 65,536, on a CPU 8,192."""
    max_sequences: int = 0
    """Sequences at a time; 0: as memory allows, up to 256."""

    def __post_init__(self) -> None:
        check_at_least(self, "", max_new_tokens=1, samples=1, prefill_chunk_size=0, max_sequences=0)
        try:
            self.sampling({})
        except ValueError as error:
            flag = str(error).partition(" ")[0]
            raise UserError(str(error).replace(flag, f"--{flag.replace('_', '-')}", 1)) from error
        if 0 < self.max_sequences < self.samples:
            raise UserError(f"--max-sequences must be at least --samples, got {self.max_sequences} and {self.samples}")
        if "" in self.stop:
            raise UserError("--stop must not be empty")
        if bool(self.prompt) == bool(self.prompts):
            raise UserError(
                "give the text to continue as --prompt TEXT, or a file of texts as --prompts FILE; neither may be empty"
            )
        if bool(self.prompts) != bool(self.output):
            raise UserError("--prompts FILE and --output OUT.jsonl go together")
        if self.append and not self.output:
            raise UserError("--append continues --output OUT.jsonl; give it with --prompts FILE")

    def sampling(self, generation: Mapping[str, Any], number: int = 0) -> Sampling:
        """Settings of prompt `number` for a model's `generation`: its samples have the seeds behind each other."""
        given = {name: getattr(self, name) for name in SETTINGS}
        seed = (self.seed + number * self.samples) % 2**64
        return Sampling.of(generation, seed=seed, default_temperature=DEFAULT_TEMPERATURE, **given)


@dataclass(frozen=True)
class LoadedModel:
    """A model with caches, the folder of its weights, its tokenizer, and the tokens of each prompt."""

    path: Path
    model: CachedModel
    tokenizer: Tokenizer
    tokens: list[list[int]]

    def request(self, options: GenerateArguments, index: int, name: str, *, number: int = 0) -> Request:
        """The request of a prompt, by its index in `tokens`; its number among all prompts decides its seed."""
        return Request(
            prompt=self.tokens[index],
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling(self.tokenizer.generation, number),
            samples=options.samples,
            stop_tokens=self.tokenizer.ends if options.stop_at_document_end else (),
            stop=options.stop,
            name=name,
        )


def load(options: GenerateArguments, path: Path, prompts: Sequence[tuple[str, str]]) -> LoadedModel:
    """Load a model, and make room for its prompts, each a name and a text; UserError if that cannot be."""
    device = choose_device(options.device)
    found = open_pretrained(path, options.checkpoint)
    config, tokenizer = found.config(), found.tokenizer()
    tokens = encode_prompts(prompts, tokenizer, config, chat=options.chat)
    model = cache_for_prompts(
        found.model,
        config,
        [(name, of_prompt) for (name, _), of_prompt in zip(prompts, tokens, strict=True)],
        options.max_new_tokens,
        found.dtype(device),
        device,
        samples=options.samples,
        max_sequences=options.max_sequences,
        prefill_chunk_size=options.prefill_chunk_size,
    )
    return LoadedModel(found.path, model, tokenizer, tokens)
