"""OpenAI's answers, of the engine's updates."""

import json
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from trifocal.inference import TokenScore, Update
from trifocal.inference.text_stream import TextStream
from trifocal.serve.service import Call, Service

_Scored = tuple[int, TokenScore | None]


@dataclass
class _Place:
    """How far the log-probabilities of a completion are: its text, and whether that has not begun yet."""

    stream: TextStream
    begins: bool
    offset: int = 0


class Answer:
    """The answer to a call, whole or as events: new `tokens` of each choice so far, and how many choices are `open`."""

    def __init__(self, service: Service, call: Call) -> None:
        self._service, self._call = service, call
        self.id = f"{'chatcmpl' if call.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        samples = call.requests[0].samples
        self._first = {request: number * samples for number, request in enumerate(call.requests)}
        self.open = len(call.requests) * samples
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self._places: dict[int, _Place] = {}
        self._reused = dict.fromkeys(call.requests, 0)
        self._names: dict[tuple[int, bool], str] = {}
        self._owners: dict[tuple[str, bool], int] = {}
        # Written once: a stream has an event for every token. ASCII, because clients take U+0085, U+2028 and U+2029 for
        # ends of lines, and some read a stream without a look at its charset.
        usage = ', "usage": null' if call.include_usage else ""
        self._event = f'data: {json.dumps(self._head("chat.completion.chunk"))[:-1]}, "choices": [', f"]{usage}}}\n\n"

    @property
    def first_prompt(self) -> list[int]:
        """Tokens of the first prompt."""
        return self._call.requests[0].prompt_tensor.tolist()  # type: ignore[no-any-return]

    def choice(self, update: Update) -> dict[str, Any]:
        """What an update adds to a choice: its `index`, `text`, `logprobs` and `finish_reason`."""
        call, request = self._call, update.request
        index = self._first[request] + update.sample
        reason: str | None = None
        if update.completion is not None:
            reason = update.completion.finish_reason
            self._reused[request] = update.completion.reused_tokens
        text = update.text
        scores: list[_Scored] = [] if update.token is None else [(update.token, update.score)]
        if call.drops_token:
            text, scores, reason = "", [], "length"
        begins = index not in self.tokens
        self.tokens[index] += [token for token, _ in scores]
        logprobs = None
        if call.logprobs:
            logprobs = self._chat_logprobs(scores) if call.chat else self._logprobs(index, update, scores, begins)
        if begins and call.echo:
            text = call.texts[index // request.samples] + text
        self.open -= reason is not None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def event(self, choice: dict[str, Any], *, begins: bool = False) -> str:
        """An event of a stream."""
        if self._call.chat:
            text = choice.pop("text")
            delta = {"role": "assistant", "content": ""} if begins else {"content": text} if text else {}
            choice = {**choice, "delta": delta}
        return json.dumps(choice).join(self._event)

    def last_events(self) -> str:
        """The end of a stream."""
        usage = ""
        if self._call.include_usage:
            last = self._head("chat.completion.chunk") | {"choices": [], "usage": self.usage()}
            usage = f"data: {json.dumps(last)}\n\n"
        return usage + "data: [DONE]\n\n"

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer, of what the updates added."""
        joined: dict[int, dict[str, Any]] = {}
        for choice in choices:
            before = joined.setdefault(choice["index"], choice)
            if before is choice:
                continue
            before["text"] += choice["text"]
            before["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                before["logprobs"][name] += values
        found = [joined[index] for index in sorted(joined)]
        if self._call.chat:
            for choice in found:
                choice["message"] = {"role": "assistant", "content": choice.pop("text"), "refusal": None}
        return self._head("chat.completion") | {"choices": found, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens so far; `cached_tokens` are those of prompts that were found in the caches."""
        prompt = sum(len(request.prompt) for request in self._call.requests)
        new = sum(map(len, self.tokens.values()))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(self._reused.values())},
        }

    def _head(self, chat_object: str) -> dict[str, Any]:
        kind = chat_object if self._call.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._service.name}

    def _name(self, token: int, begins: bool = False) -> str:
        """The text of a token in its place, or its number: of a part of a character, or where another has this text."""
        key = token, begins
        if key not in self._names:
            text = self._service.tokenizer.token_text(token, begins=begins)
            known = bool(text) and "\ufffd" not in text and self._owners.setdefault((text, begins), token) == token
            self._names[key] = text if known else f"token_id:{token}"
        return self._names[key]

    def _logprobs(self, index: int, update: Update, scores: list[_Scored], begins: bool) -> dict[str, Any]:
        """Those of a completion, with the prompt's in front of its first token if it is repeated."""
        request, tokenizer = update.request, self._service.tokenizer
        tokens, echoed = request.prompt_tensor.tolist() if begins else [], ""
        if begins:
            before = [] if self._call.echo else tokens
            self._places[index] = _Place(TextStream(tokenizer, before), begins=not tokenizer.decode(before))
        if begins and self._call.echo:
            echoed = self._call.texts[index // request.samples]
            scores = [*zip(tokens, [None, *update.prompt_scores], strict=False), *scores]
        place, names, own, likeliest, offsets = self._places[index], list[str](), [], [], []
        for number, (token, score) in enumerate(scores):
            if echoed and number == len(tokens):
                # Behind the prompt as it came, whatever its tokens say.
                place.offset = len(echoed)
            name = self._name(token, place.begins)
            names.append(name)
            own.append(None if score is None else score.log_probability)
            top: dict[str, float] | None = None
            if score is not None:
                top = {}
                for other, log_p in [*score.likeliest, (token, score.log_probability)]:
                    top.setdefault(self._name(other, place.begins), log_p)
            likeliest.append(top)
            offsets.append(place.offset)
            text = place.stream.add(token)
            place.begins &= not text
            # The prompt may name special tokens, which have no text.
            place.offset += len(text) or (len(name) if echoed.startswith(name, place.offset) else 0)
        return {"tokens": names, "token_logprobs": own, "top_logprobs": likeliest, "text_offset": offsets}

    def _chat_logprobs(self, scores: list[_Scored]) -> dict[str, Any]:
        def entry(token: int, log_p: float) -> dict[str, Any]:
            text = self._name(token)
            encoded = None if text.startswith("token_id:") else list(text.encode())
            return {"token": text, "logprob": log_p, "bytes": encoded}

        content = []
        for token, score in scores:
            assert score is not None
            top = [entry(*pair) for pair in score.likeliest]
            content.append(entry(token, score.log_probability) | {"top_logprobs": top})
        return {"content": content}
