"""A trained model in Python: the text that it generates, and its tokenizer."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from trifocal.cli.generate_model import LoadedModel, add_caches, load, memory_errors
from trifocal.cli.generate_options import GenerateArguments
from trifocal.data import Tokenizer
from trifocal.data.tokenizers import ByteTokenizer
from trifocal.errors import UserError
from trifocal.inference import Engine
from trifocal.models import DecoderLM
from trifocal.paths import shell_path, user_path
from trifocal.train.checkpoint.pretrained import open_pretrained


def generate(
    path_or_model: str | os.PathLike[str] | DecoderLM,
    prompt: str,
    max_new_tokens: int = 200,
    *,
    tokenizer: Tokenizer | None = None,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    stop_at_document_end: bool = True,
    checkpoint: str = "",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> str:
    """Continue a text with a trained model, as the command `trifocal generate` does.

    Each call with a path loads the model; `trifocal.inference.Engine` keeps one for many prompts.

    Args:
        path_or_model: The run, also while it goes on; one of its checkpoints; a folder of weights; or a model from
            `load_model`.
        prompt: The text to continue.
        max_new_tokens: Maximum number of new tokens.
        tokenizer: Tokenizer of a model, from `load_tokenizer`; bytes by default. A path brings its own.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw from this many likeliest tokens; 0: from all.
        top_p: Draw from the fewest likeliest tokens whose probabilities reach this together; 1: from all.
        min_p: Draw from tokens with at least this share of the likeliest one's probability; 0: from all.
        repetition_penalty: Divides positive logits of tokens that the text has, and multiplies negative ones; 1: none.
        seed: Makes the draw repeatable.
        stop: Strings that end the text before them.
        stop_at_document_end: Stop where the model ends the document.
        checkpoint: A checkpoint of the run, like `step_00000500`; the newest by default.
        device: Where to run; `"auto"` takes a GPU if there is one.

    Returns:
        The new text, without the prompt.

    Raises:
        UserError: If there is no model, it is broken, or an argument is out of range.
    """
    path = "" if isinstance(path_or_model, DecoderLM) else os.fspath(path_or_model)
    if isinstance(path_or_model, DecoderLM) and device == "auto":
        # A model of the user's stays where it is.
        device = "cuda" if next(path_or_model.parameters()).is_cuda else "cpu"
    options = GenerateArguments(
        path=path,
        prompt=prompt,
        checkpoint=checkpoint,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop),
        stop_at_document_end=stop_at_document_end,
        device=device,
    )
    prompts = [("the prompt", prompt)]
    if isinstance(path_or_model, DecoderLM):
        if checkpoint:
            raise UserError("checkpoint goes with the path of a run, got a model")
        model, tokenizer = path_or_model, tokenizer or ByteTokenizer()
        cached, tokens = add_caches(options, lambda: model, model.config, tokenizer, torch.float32, prompts)
        loaded = LoadedModel(Path("the model"), cached, tokenizer, tokens)
    else:
        if tokenizer is not None:
            raise UserError("tokenizer goes with a model, got a path, which brings its own")
        folder = user_path(path_or_model, "the path of the run")
        loaded = load(options, folder, f"trifocal generate {shell_path(folder)}", prompts)
    with memory_errors(loaded.model.device):
        (completion,) = Engine(loaded.model, loaded.tokenizer).complete([loaded.request(options, 0, "the prompt")])
    if completion.finish_reason == "error":
        raise UserError(f"{loaded.path}: the model's output is not finite: its weights are broken")
    return completion.text


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that a model was trained with.

    Args:
        path: The run, one of its checkpoints, or a folder of weights, as for `load_model`.

    Raises:
        UserError: If there is none, or one of its files is broken.
    """
    with open_pretrained(user_path(path, "the path of the run")) as found:
        return found.tokenizer()
