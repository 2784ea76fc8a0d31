"""The caches of earlier prompts, found again by their tokens.

A prompt's past is kept where a chunk of it ends at the end of a page: its pages, which are shared and never written
again, and its row of the rings. A later prompt that begins with the same tokens goes on from there. Chunks begin at
the same places either way, so that no bit changes.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from trifocal.inference.cached_model import CachedModel, CachedSequence


class PrefixCache:
    """Up to `spare_rows` pasts; the least recently used goes first.

    Args:
        model: The model.
    """

    def __init__(self, model: CachedModel) -> None:
        self._model, self._most = model, model.spare_rows
        self._kept: OrderedDict[bytes, CachedSequence] = OrderedDict()

    @property
    def num_unused_rows(self) -> int:
        """Rows that are free, and are not for sequences of requests."""
        return self._most - len(self._kept)

    def find(self, prompt: Sequence[int]) -> CachedSequence | None:
        """The longest kept past that the prompt begins with and goes on from; to be forked."""
        found = None
        for key in self._keys(prompt, len(prompt) - 1):
            if key in self._kept:
                self._kept.move_to_end(key)
                found = self._kept[key]
        return found

    def keep(self, prompt: Sequence[int], sequence: CachedSequence) -> None:
        """Keep the past of a prompt, all of whose chunks so far are whole."""
        length = sequence.length
        if not self._most or length % self._model.prefill_chunk_size or length % self._model.pages.page_size:
            return
        *_, key = self._keys(prompt, length)
        if key in self._kept:
            return
        if len(self._kept) == self._most:
            self.drop()
        self._kept[key] = self._model.fork(sequence)

    def drop(self, but: CachedSequence | None = None) -> bool:
        """Give the least recently used past up, but not this one; whether there was one."""
        for key, sequence in self._kept.items():
            if sequence is not but:
                self._model.free(sequence)
                del self._kept[key]
                return True
        return False

    def _keys(self, prompt: Sequence[int], length: int) -> Iterator[bytes]:
        """Hashes of the first chunk, the first two, … up to a length; nobody finds another text with the same one."""
        if not self._most:
            return
        size, state = self._model.prefill_chunk_size, hashlib.sha256()
        for end in range(size, length + 1, size):
            state.update(np.asarray(prompt[end - size : end], dtype=np.int64).tobytes())
            yield state.digest()
