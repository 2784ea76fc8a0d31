"""The text of tokens as they come, up to a stop string."""

from collections.abc import Sequence

from trifocal.data import Tokenizer


class TextStream:
    """The text of tokens as they come, behind those `before`, a character at a time; what may begin a stop string is
    held back until it is known, and nothing comes once one has `stopped` it.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(before)
        # The first of them are out already, and are kept as neighbours of the others.
        self._said = len(self._tokens)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that one more token completes; empty in the middle of a character."""
        self._tokens.append(token)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        del self._tokens[: self._said]
        self._said = len(self._tokens)
        return self._up_to_stop(text)

    def end(self) -> str:
        """What is left: bytes that never became a character, and the beginning of a stop string that did not come."""
        if self.stopped:
            return ""
        text = self._up_to_stop(self._pending())
        held, self._held = self._held, ""
        return text + held

    def _up_to_stop(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        # The longest end of the text that begins a stop string. A character is passed once, so that the strings' length
        # does not matter.
        begin = 0
        while begin < len(text) and not any(stop.startswith(text[begin:]) for stop in self._stop):
            begin += 1
        self._held = text[begin:]
        return text[:begin]

    def _pending(self) -> str:
        said = self._tokenizer.decode(self._tokens[: self._said])
        return self._tokenizer.decode(self._tokens)[len(said) :]
