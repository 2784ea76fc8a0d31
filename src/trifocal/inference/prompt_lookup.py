"""Guessing the next tokens of a sequence: those that followed its last tokens when they came before."""

from collections.abc import Sequence

_NGRAM = 3
# Steps without a guess after one that was wrong from its first token on.
_PAUSE = 8


class PromptLookup:
    """The tokens of a sequence, and what followed each n-gram last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}
        self._pause = 0
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Add a token."""
        end = len(self._tokens)
        if end >= _NGRAM:
            self._following[tuple(self._tokens[-_NGRAM:])] = end
        self._tokens.append(token)

    def guess(self, most: int) -> list[int]:
        """The next tokens, at most `most`; none where nothing is known, or the last guess was wrong."""
        if self._pause:
            self._pause -= 1
            return []
        first = self._following.get(tuple(self._tokens[-_NGRAM:]), len(self._tokens))
        return self._tokens[first : first + max(0, most)]

    def judge(self, right: int) -> None:
        """Learn how many tokens of a guess were right."""
        self._pause = 0 if right else _PAUSE
