"""The model that is served, and what requests may ask of it."""

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trifocal.data import Tokenizer
from trifocal.data.sources.chats import BadChat, Chat, read_messages
from trifocal.errors import UserError, nearest, one_line
from trifocal.fields import checked
from trifocal.inference import Request, Sampling
from trifocal.inference.request import MAX_LIKELIEST, in_vocabulary
from trifocal.inference.sampler import SETTINGS
from trifocal.serve.errors import ApiError

_Prompt = list[int] | NDArray[np.int32]
# Every token of the answer is searched for them.
_MAX_STOPS, _MAX_STOP_CHARACTERS = 32, 1024
_MAX_SEED = 2**63 - 1
_DEFAULT_TOKENS = 16
_COMMON: dict[str, type] = {
    "model": str,
    "stream": bool,
    "n": int,
    "seed": int,
    "max_tokens": int,
    "max_completion_tokens": int,
    "ignore_eos": bool,
    **dict.fromkeys(SETTINGS, float),
    "top_k": int,
}
_OWN: dict[bool, dict[str, type]] = {
    False: {"logprobs": int, "echo": bool},
    True: {"logprobs": bool, "top_logprobs": int},
}
# Checked where they are read, for they have several types.
_OTHERS = ("prompt", "messages", "stop", "stream_options")
# Names for the books of the client.
_WITHOUT_EFFECT = ("user", "metadata", "safety_identifier", "prompt_cache_key")
# Parameters of OpenAI and of vLLM that are not supported, with values that ask for nothing; without any, that is 0,
# false or an empty one.
_UNSUPPORTED = {
    *("presence_penalty", "frequency_penalty", "logit_bias", "suffix", "tools", "functions", "store", "echo"),
    *("stop_token_ids", "include_stop_str_in_output", "min_tokens", "use_beam_search", "continue_final_message"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "length_penalty": (1,),
    "add_generation_prompt": (True,),
}


@dataclass(frozen=True, eq=False)
class Call:
    """A checked request of a client, with one of the engine for each prompt; `echo` puts the prompts' `texts` first,
    and `drops_token` leaves out a token that was not asked for.
    """

    chat: bool
    requests: list[Request]
    texts: list[str]
    echo: bool
    logprobs: bool
    stream: bool
    include_usage: bool
    drops_token: bool


@dataclass(frozen=True)
class Service:
    """The model that is served, with its tokenizer: sequences of up to `max_length` tokens, `max_sequences` at a time,
    `max_answers` of a call; whether it takes `chats`.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    max_length: int
    max_sequences: int
    max_answers: int
    chats: bool

    def check_name(self, name: str) -> None:
        """Refuse the name of another model."""
        if name != self.name:
            message = f"there is no model {one_line(name, 80)}; {self.name} is served"
            raise ApiError(404, message, param="model", code="model_not_found")

    def read(self, body: dict[str, Any], *, chat: bool) -> Call:
        """Check the body of a request; ApiError, with the name, if something is wrong or not supported."""
        known = _COMMON | _OWN[chat]
        neutral = _NEUTRAL | {"best_of": (body.get("n") or 1,)}
        values: dict[str, Any] = {}
        for name, value in body.items():
            if value is None or name in _WITHOUT_EFFECT or value in neutral.get(name, ()):
                continue
            if name in _UNSUPPORTED and name not in known and not value:
                continue
            if name in known:
                values[name] = _checked(known[name], value, name)
            elif name not in _OTHERS:
                name = one_line(name, 80)
                near = "" if name in _UNSUPPORTED else nearest(name, [*known, *_OTHERS], 0.8)
                remedy = f"the nearest valid one is {near}" if near else "leave it out"
                raise ApiError(400, f"the parameter {name} is not supported; {remedy}", param=name)
        self.check_name(values.get("model", self.name))
        if values.get("top_k") == -1:
            # From all, for vLLM.
            values["top_k"] = 0
        samples = values.get("n", 1)
        if not 1 <= samples <= self.max_sequences:
            raise ApiError(400, f"n must be from 1 to {self.max_sequences}, got {samples}", param="n")
        given: list[Any] = [body.get("messages")] if chat else self._parts(body.get("prompt"), samples)
        prompts = [self._chat_prompt(part) if chat else self._prompt(part) for part in given]
        logprobs, likeliest = _logprobs(values, chat)
        echo = values.get("echo", False)
        limit = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
        count = values.get(limit, None if chat else _DEFAULT_TOKENS)
        drops_token = echo and count == 0
        if count is not None and count < 1 and not drops_token:
            raise ApiError(400, f"{limit} must be at least 1, got {count}", param=limit)
        requests = [
            self._request(
                prompt,
                count,
                values,
                samples=samples,
                stop=_stops(body.get("stop")),
                likeliest=likeliest,
                score_prompt=echo and logprobs,
            )
            for prompt in prompts
        ]
        return Call(
            chat=chat,
            requests=requests,
            texts=[part if isinstance(part, str) else self.tokenizer.decode(part) for part in given] if echo else [],
            echo=echo,
            logprobs=logprobs,
            stream=values.get("stream", False),
            include_usage=_include_usage(body.get("stream_options")),
            drops_token=drops_token,
        )

    def _request(self, prompt: _Prompt, count: int | None, values: dict[str, Any], **options: Any) -> Request:
        room = self.max_length - len(prompt)
        if room < max(1, count or 1):
            new = "" if count is None else f", and {max(1, count):,} new ones were asked for"
            raise ApiError(
                400, f"the prompt takes {len(prompt):,} of the {self.max_length:,} tokens that fit{new}",
                code="context_length_exceeded",
            )  # fmt: skip
        seed = values.get("seed", secrets.randbelow(_MAX_SEED))
        try:
            request = Request(
                prompt=prompt,
                max_new_tokens=room if count is None else max(1, count),
                sampling=Sampling.of(
                    self.tokenizer.generation, seed=seed, **{name: values[name] for name in SETTINGS if name in values}
                ),
                stop_tokens=() if values.get("ignore_eos") else self.tokenizer.ends,
                **options,
            )
        except ValueError as error:
            name = str(error).partition(" ")[0]
            raise ApiError(400, str(error), param=name if name in values else "prompt") from error
        if not in_vocabulary(request.prompt_tensor, self.vocab_size):
            raise ApiError(400, f"tokens of a prompt must be from 0 to {self.vocab_size - 1}", param="prompt")
        return request

    def _parts(self, prompt: Any, samples: int) -> list[Any]:
        """The prompts of a completion, each a text or tokens, which `_prompt` checks."""
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise ApiError(400, "prompt must be a text, a list of tokens, or a list of them", param="prompt")
        if len(prompt) * samples > self.max_answers:
            raise ApiError(
                400, f"{len(prompt) * samples:,} answers were asked for; at most {self.max_answers:,} may be",
                param="prompt",
            )  # fmt: skip
        return prompt

    def _prompt(self, part: Any) -> _Prompt:
        """A prompt in tokens."""
        if isinstance(part, str):
            part = self._encode(_checked(str, part, "prompt"))
        elif not isinstance(part, list) or {*map(type, part)} - {int}:
            raise ApiError(400, "prompt must be a text, a list of tokens, or a list of them", param="prompt")
        if len(part) == 0:
            raise ApiError(400, "the prompt is empty; give the model something to continue", param="prompt")
        return part  # type: ignore[no-any-return]

    def _chat_prompt(self, messages: Any) -> NDArray[np.int32]:
        """The prompt of a chat, in tokens."""
        if not self.chats:
            raise ApiError(400, f"{self.name} has no chat template; use /v1/completions")
        try:
            given = [_with_text(message) for message in messages] if isinstance(messages, list) else messages
            chat = read_messages(given)
        except BadChat as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
        try:
            return self._encode(chat)
        except BadChat as error:
            # The message itself names the tokenizer, whose name may be a path.
            raise ApiError(
                400, f"the chat template refuses the messages: {one_line(error.__cause__)}", param="messages"
            ) from error

    def _encode(self, prompt: str | Chat) -> NDArray[np.int32]:
        texts = [prompt] if isinstance(prompt, str) else [message.get("content") or "" for message in prompt]
        # Tokenizing takes a hundred bytes a character, and seconds: several such prompts would end the server.
        if (characters := sum(map(len, texts))) > self.max_length * self.tokenizer.longest:
            most = f"more than the {self.max_length:,} tokens that fit can have"
            message = f"the prompt has {characters:,} characters, {most}"
            raise ApiError(400, message, code="context_length_exceeded")
        try:
            return self.tokenizer.encode_prompt(prompt)
        except UserError as error:
            raise ApiError(400, "the tokenizer cannot encode the text") from error


def _checked(kind: type, value: Any, name: str) -> Any:
    try:
        return checked(kind, value, name)
    except UserError as error:
        raise ApiError(400, str(error), param=name) from error


def _with_text(message: Any) -> Any:
    """A message whose content is a text, also where it came in parts."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = message["content"]
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ApiError(400, "messages may have only parts of the type text", param="messages")
    return message | {"content": "".join(_checked(str, part.get("text"), "text") for part in parts)}


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    texts = isinstance(stops, list) and all(isinstance(text, str) and text for text in stops)
    if not texts or len(stops) > _MAX_STOPS or sum(map(len, stops)) > _MAX_STOP_CHARACTERS:
        raise ApiError(
            400, f"stop must be a text or a list of at most {_MAX_STOPS}, none of them empty, of together at most "
            f"{_MAX_STOP_CHARACTERS:,} characters", param="stop",
        )  # fmt: skip
    return tuple(stops)


def _logprobs(values: dict[str, Any], chat: bool) -> tuple[bool, int]:
    """Whether log-probabilities are wanted, and of how many likeliest tokens."""
    name = "top_logprobs" if chat else "logprobs"
    count = values.get(name, 0)
    if not 0 <= count <= MAX_LIKELIEST:
        raise ApiError(400, f"{name} must be from 0 to {MAX_LIKELIEST}, got {count}", param=name)
    if chat and count and not values.get("logprobs"):
        raise ApiError(400, "top_logprobs needs logprobs = true", param=name)
    return values.get("logprobs", False) if chat else "logprobs" in values, count


def _include_usage(options: Any) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object", param="stream_options")
    for name, value in options.items():
        # False asks for nothing.
        if name != "include_usage" and value not in (None, False):
            name = f"stream_options.{one_line(name, 80)}"
            raise ApiError(400, f"the parameter {name} is not supported; leave it out", param=name)
    return bool(_checked(bool, options.get("include_usage") or False, "include_usage"))
