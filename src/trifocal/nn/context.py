"""The part of each sequence that one process has, where several processes share a sequence: context parallelism.

A sequence is cut into `2N` equal chunks for `N` processes. Process `i` has chunk `i` and chunk `2N - 1 - i`: the work
of a query grows with its position, so all have the same work. Projections, norms and MLPs see only local tokens.
Attention gathers the keys of all processes; for a window, only those in front of a chunk. A chunk's queries are then
the last positions of the keys up to the chunk's end, as every operation takes them (`T < S`); so a layer attends once
for each chunk, and is exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trifocal.ops import Documents


@dataclass(frozen=True)
class ContextShard:
    """A process's place among those that share each sequence: number `rank` of `size`, N.

    `gather(xs)` collects the local tokens of every process, for each of some tensors, [B, T, ...] -> [B, S, ...] in the
    order of the sequence. `gather(xs, past)` collects only the `past` tokens, of one chunk at most, in front of both
    local chunks, one after the other; the first chunk of a sequence has none. Differentiable: the backward pass sums
    the gradients of all processes.
    """

    rank: int
    size: int
    gather: Callable[..., list[Tensor]]

    @property
    def num_chunks(self) -> int:
        """Chunks of a sequence."""
        return 2 * self.size

    def local_tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """Local tokens of a tensor with all S along `dim`; ValueError if they do not cut evenly into the chunks."""
        if x.shape[dim] % self.num_chunks:
            raise ValueError(
                f"{self.size} processes share a sequence in {self.num_chunks} equal chunks, got {x.shape[dim]} tokens; "
                f"the length must be a multiple of {self.num_chunks}"
            )
        chunks = x.chunk(self.num_chunks, dim)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim)


class Chunk(NamedTuple):
    """Queries `begin` to `end` of a layer's T, which lie one after the other, and the keys up to their end: `num_keys`,
    S, tokens of these documents, or None.
    """

    begin: int
    end: int
    num_keys: int
    documents: Documents | None

    @property
    def first_token(self) -> int:
        """Token of the first query."""
        return self.num_keys - (self.end - self.begin)

    def queries(self, x: Tensor) -> Tensor:
        """Own rows of x [B, T, ...]."""
        return _rows(x, self.begin, self.end)

    def keys(self, x: Tensor, count: int | None = None) -> Tensor:
        """The keys of x [B, S, ...] that lie up to the chunk's end, or the first `count`."""
        return _rows(x, 0, self.num_keys if count is None else count)


class TokenShard(NamedTuple):
    """This process's tokens in one forward pass, the two chunks of a sequence of `num_tokens`, with their positions [T]
    in the documents, which are of all tokens, or None.
    """

    shard: ContextShard
    num_tokens: int
    positions: Tensor
    documents: Documents | None
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, shard: ContextShard, tokens: Tensor, documents: Documents | None) -> "TokenShard":
        """Local tokens, [B, T], two equal chunks of sequences with these documents of all S tokens."""
        if tokens.shape[1] % 2:
            raise ValueError(
                f"a process that shares a sequence has two equal chunks of it, got {tokens.shape[1]} tokens; cut "
                "sequences with ContextShard.local_tokens"
            )
        num_tokens = shard.size * tokens.shape[1]
        positions = torch.arange(num_tokens, device=tokens.device) if documents is None else documents.positions
        local_positions = shard.local_tokens(positions, 0)
        length = num_tokens // shard.num_chunks
        ends = length * (shard.rank + 1), num_tokens - length * shard.rank
        chunks = tuple(
            Chunk(place * length, (place + 1) * length, end, None if documents is None else documents.part(0, end))
            for place, end in enumerate(ends)
        )
        return cls(shard, num_tokens, local_positions, documents, chunks)

    def windows(self, xs: Sequence[Tensor], window_size: int) -> list[tuple[Chunk, list[Tensor]]]:
        """For each chunk of local xs [B, T, ...], the chunk with its keys counted from the first token that its windows
        reach, and these tokens of each x.
        """
        past = window_size - 1
        is_near = 0 < past <= self.num_tokens // self.shard.num_chunks
        # A window that is wider than a chunk would need several processes.
        gathered, found = self.shard.gather(xs, past) if is_near else self.shard.gather(xs), []
        for chunk in self.chunks:
            first = max(0, chunk.first_token - past)
            reach = chunk.first_token - first
            if is_near:
                pairs = zip((x[:, :reach] for x in gathered), map(chunk.queries, xs), strict=True)
                keys, gathered = [torch.cat(pair, dim=1) for pair in pairs], [x[:, reach:] for x in gathered]
            else:
                keys = [x[:, first : chunk.num_keys] for x in gathered]
            documents = None if self.documents is None else self.documents.part(first, chunk.num_keys)
            found.append((chunk._replace(num_keys=chunk.num_keys - first, documents=documents), keys))
        return found


def chunks_of(x: Tensor, documents: Documents | None, local_tokens: TokenShard | None) -> tuple[Chunk, ...]:
    """The chunks of a layer's queries x [B, T, ...]: one where all tokens are here."""
    return (Chunk(0, x.shape[1], x.shape[1], documents),) if local_tokens is None else local_tokens.chunks


def _rows(x: Tensor, begin: int, end: int) -> Tensor:
    # A slice of everything would cost a copy in backward.
    return x if end - begin == x.shape[1] else x[:, begin:end]


def joined(parts: list[Tensor]) -> Tensor:
    """Results of the chunks, one after the other, [B, T, ...]."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
