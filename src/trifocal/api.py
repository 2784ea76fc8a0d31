"""A trained model in Python: the text that it generates, and its tokenizer."""

import os
from collections.abc import Sequence
from typing import Literal

import torch

from trifocal.data import Tokenizer
from trifocal.data.tokenizers import ByteTokenizer
from trifocal.errors import UserError
from trifocal.inference import Engine, Request, Sampling
from trifocal.inference.prompts import DEFAULT_TEMPERATURE, cache_for_prompts, encode_prompts, memory_errors
from trifocal.models import DecoderLM
from trifocal.ops.devices import computes_bf16
from trifocal.train.checkpoint.pretrained import open_pretrained, pretrained_path
from trifocal.train.config.check import choose_device


def generate(
    path_or_model: str | os.PathLike[str] | DecoderLM,
    prompt: str,
    max_new_tokens: int = 200,
    *,
    tokenizer: Tokenizer | None = None,
    temperature: float | Literal["auto"] = "auto",
    top_k: int | Literal["auto"] = "auto",
    top_p: float | Literal["auto"] = "auto",
    min_p: float | Literal["auto"] = "auto",
    repetition_penalty: float | Literal["auto"] = "auto",
    seed: int = 0,
    stop: Sequence[str] = (),
    stop_at_document_end: bool = True,
    checkpoint: str = "",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> str:
    """Continue a text with a trained model, as the command `trifocal generate` does.

    Each call with a path loads the model; `trifocal.inference.Engine` keeps one for many prompts.

    Args:
        path_or_model: The run, also while it trains; one of its checkpoints; a folder of weights; `demo`, the model
            that comes with the package; or a model from `load_model`.
        prompt: The text to continue.
        max_new_tokens: Maximum number of new tokens.
        tokenizer: Tokenizer of a model, from `load_tokenizer`; bytes by default. A path brings its own.
        temperature: Divides the logits; 0 takes the likeliest token. `"auto"`, as of the next four: as the model's
            `generation_config.json` says, else 0.8, and no filter or penalty.
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
    if not isinstance(prompt, str):
        raise UserError(f"prompt must be a text, got {prompt!r}")
    if isinstance(path_or_model, DecoderLM):
        if checkpoint:
            raise UserError("checkpoint goes with the path of a run, got a model")
        if not isinstance(tokenizer, Tokenizer | None):
            raise UserError(f"tokenizer must be one from load_tokenizer, got {type(tokenizer).__name__}")
        model, name, tokenizer = path_or_model, "the model", tokenizer or ByteTokenizer()
        config, weight, make = model.config, model.embedding.weight, lambda: model
        # A model of the user's stays where it is.
        place = weight.device if device == "auto" else choose_device(device)
        dtype = torch.bfloat16 if weight.dtype.itemsize == 2 and computes_bf16(place) else torch.float32
    elif isinstance(path_or_model, torch.nn.Module):
        raise UserError(f"a model must be a DecoderLM, without wrappers around it, got {type(path_or_model).__name__}")
    else:
        if tokenizer is not None:
            raise UserError("tokenizer goes with a model, got a path, which brings its own")
        path = pretrained_path(path_or_model, "the path of the run")
        found = open_pretrained(path, checkpoint)
        name, tokenizer, config, make = str(found.path), found.tokenizer(), found.config(), found.model
        place = choose_device(device)
        dtype = found.dtype(place)
    try:
        sampling = Sampling.of(
            tokenizer.generation,
            default_temperature=DEFAULT_TEMPERATURE,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        [tokens] = encode_prompts([("the prompt", prompt)], tokenizer, config)
        stop_tokens = tokenizer.ends if stop_at_document_end else ()
        request = Request(
            prompt=tokens, max_new_tokens=max_new_tokens, sampling=sampling, stop_tokens=stop_tokens, stop=stop
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    cached = cache_for_prompts(make, config, [("the prompt", tokens)], max_new_tokens, dtype, place)
    with memory_errors(place):
        (completion,) = Engine(cached, tokenizer).complete([request])
    if completion.finish_reason == "error":
        raise UserError(f"{name}: the model's output is not finite: its weights are broken")
    return completion.text


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that a model was trained with.

    Args:
        path: The run, one of its checkpoints, a folder of weights, or `demo`, as for `load_model`.

    Raises:
        UserError: If there is none, or one of its files is broken.
    """
    found = open_pretrained(pretrained_path(path, "the path of the run"))
    return found.tokenizer()
