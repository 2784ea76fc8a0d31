"""The caches of earlier prompts, found again by their tokens.

A prompt's prefix is kept where a chunk of it ends at the end of a page: its pages, which are shared and never written
again, and its row of the rings. A later prompt that begins with the same tokens continues from there. Chunks begin at
the same places either way, so that no bit changes.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from trifocal.inference.cached_model import CachedModel, CachedSequence


class PrefixCache:
    """Keeps up to `spare_rows` prefixes; the least recently used goes first."""

    def __init__(self, model: CachedModel) -> None:
        self._model, self._most = model, model.spare_rows
        self._kept: OrderedDict[bytes, CachedSequence] = OrderedDict()

    @property
    def num_unused_rows(self) -> int:
        """Rows that are free, and are not for sequences of requests."""
        return self._most - len(self._kept)

    def keys(self, prompt: Tensor) -> list[bytes]:
        """Hashes of the first chunk of a prompt [T], its first two, …; nobody finds another text with the same one."""
        if not self._most:
            return []
        size, state, keys = self._model.prefill_chunk_size, hashlib.sha256(), []
        for end in range(size, len(prompt) + 1, size):
            state.update(prompt[end - size : end].numpy().tobytes())
            keys.append(state.digest())
        return keys

    def find(self, keys: Sequence[bytes], most: int) -> CachedSequence | None:
        """The longest kept prefix of a prompt, of at most `most` tokens; to be forked."""
        found = None
        for key in keys[: most // self._model.prefill_chunk_size]:
            if key in self._kept:
                self._kept.move_to_end(key)
                found = self._kept[key]
        return found

    def keep(self, keys: Sequence[bytes], sequence: CachedSequence) -> None:
        """Keep the prefix of a prompt, all of whose chunks so far are whole."""
        chunks, rest = divmod(sequence.length, self._model.prefill_chunk_size)
        if not keys or rest or sequence.length % self._model.pages.page_size or keys[chunks - 1] in self._kept:
            return
        if len(self._kept) == self._most:
            self.drop()
        self._kept[keys[chunks - 1]] = self._model.fork(sequence)

    def drop(self, but: CachedSequence | None = None) -> bool:
        """Drop the least recently used prefix, but not this one; whether there was one."""
        for key, sequence in self._kept.items():
            if sequence is not but:
                self._model.free(sequence)
                del self._kept[key]
                return True
        return False
