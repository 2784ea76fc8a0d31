"""Backward on Hopper: d_scores of some queries, or keys, at a time, which `dkdv` stores and `d_q` takes.

A chunk's d_scores fit a bounded buffer of each branch. Batch entries that fit go together. A longer one is cut: the
compressed branch by queries, while d_k and d_v are added up in fp32 from chunk to chunk; the window by keys, whose d_k
and d_v are complete, while the d_scores of a chunk's last keys stay for the next one's queries, which see these keys
too. d_q of a query is made when the d_scores of both branches are there, and written once.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifocal.ops import dispatch
from trifocal.ops.hopper.common import split_heads
from trifocal.ops.hopper.interval.d_q import Share, launch_d_q
from trifocal.ops.hopper.interval.dkdv import StoredScores, launch_dkdv
from trifocal.ops.hopper.tiles import KEYS_OF_DKDV, KEYS_OF_PLANE
from trifocal.ops.tiles import Tile, cdiv
from trifocal.ops.triton.interval.common import IntervalProblem


class _Chunk(NamedTuple):
    """Queries begin to end, whose d_scores with keys from `first_key` to `end_key` are stored."""

    begin: int
    end: int
    first_key: int
    end_key: int
    stored: StoredScores


class _Gradients:
    """Of one branch: d_k and d_v, which are there when `chunks` has come to its end."""

    def __init__(self, problem: IntervalProblem, dkdv: dict[str, Any]) -> None:
        self.problem, self.dkdv = problem, dkdv
        self.d_k: Tensor
        self.d_v: Tensor

    def chunks(self) -> Iterator[_Chunk]:
        """Chunks in the order of their queries; the d_scores of one are gone when the next is asked for."""
        problem = self.problem
        batch, num_keys = problem.k.shape[:2]
        if batch * _bytes_of_keys(problem, num_keys) <= dispatch.D_SCORES_BUFFER_BYTES:
            stored = _buffer(problem, num_keys)
            self.d_k, self.d_v = launch_dkdv(problem, **self.dkdv, stored=stored)
            return iter([_Chunk(0, problem.q.shape[1], 0, num_keys, stored)])
        assert batch == 1
        return self._by_keys() if problem.branch.is_window else self._by_queries()

    def _by_queries(self) -> Iterator[_Chunk]:
        q, k, v = self.problem.q, self.problem.k, self.problem.v
        totals = k.new_zeros(k.shape, dtype=torch.float32), v.new_zeros(v.shape, dtype=torch.float32)
        ranges = list(_query_ranges(self.problem))
        most = max(_bytes_of_rows(self.problem, end - begin) * _planes(num_keys) for begin, end, num_keys in ranges)
        memory = q.new_empty(most // q.element_size())
        for begin, end, num_keys in ranges:
            part = _cut(self.problem, begin, end, 0, num_keys)
            stored = _buffer(part, num_keys, memory)
            launch_dkdv(part, **self.dkdv, stored=stored, totals=totals)
            yield _Chunk(begin, end, 0, num_keys, stored)
        self.d_k, self.d_v = totals[0].to(k.dtype), totals[1].to(v.dtype)

    def _by_keys(self) -> Iterator[_Chunk]:
        problem, k, v = self.problem, self.problem.k, self.problem.v
        num_queries, num_keys = problem.q.shape[1], k.shape[1]
        shift, window_size = problem.branch.query_shift, problem.branch.window_size
        # Keys before a chunk that its queries see too, in whole tiles; and those of a chunk, at least as many.
        before = cdiv(window_size - 1, KEYS_OF_DKDV) * KEYS_OF_DKDV
        fitting = dispatch.D_SCORES_BUFFER_BYTES // _bytes_of_keys(problem, KEYS_OF_DKDV) * KEYS_OF_DKDV
        size = max(before, fitting - before, KEYS_OF_DKDV)
        stored = _buffer(problem, before + size)
        planes = stored.tensor.view(-1, stored.planes_of_group, *stored.tensor.shape[1:])
        self.d_k, self.d_v = k.new_empty(k.shape), v.new_empty(v.shape)
        for begin in range(0, num_keys, size):
            end = min(begin + size, num_keys)
            keys = slice(begin, end)
            if begin:
                planes[:, : _planes(before)] = planes[:, _planes(size) :]
            first, seeing_end = max(begin - shift, 0), min(end - shift + window_size - 1, num_queries)
            if seeing_end <= first:
                self.d_k[:, keys], self.d_v[:, keys] = 0.0, 0.0
                continue
            here = stored._replace(first_plane=_planes(before))
            part = _cut(problem, first, seeing_end, begin, end)
            self.d_k[:, keys], self.d_v[:, keys] = launch_dkdv(part, **self.dkdv, stored=here)
            if first < end - shift:
                origin = max(begin - before, 0)
                here = stored._replace(first_plane=_planes(before) - (begin - origin) // KEYS_OF_PLANE)
                yield _Chunk(first, end - shift, origin, end, here)

    def share(self, chunk: _Chunk, begin: int, end: int) -> Share:
        """Of the d_q of queries begin to end of a chunk."""
        part = _cut(self.problem, begin, end, chunk.first_key, chunk.end_key)
        return Share(part.k, part.branch, chunk.stored, chunk.begin - begin)


def launch_backward(
    problems: Sequence[IntervalProblem], d_q: Tensor | None, dkdv: Sequence[dict[str, Any]], tile: Tile
) -> tuple[Tensor, ...]:
    """Hopper version of `triton.interval.dkdv.launch_backward`, of one branch or both.

    Args:
        problems: Inputs of the compressed branch, the window, or both in this order, with the same queries; the copy
            engine can read them.
        d_q: Gradient of the queries from elsewhere, contiguous, or None.
        dkdv: Configurations of `dkdv.launch_dkdv`.
        tile: That of `d_q.launch_d_q`.

    Returns:
        d_q; d_k and d_v of each problem.
    """
    q = problems[0].q
    add = d_q is not None
    if d_q is None:
        d_q = q.new_empty(q.shape)
    batch = q.shape[0]
    most = max(_bytes_of_keys(problem, problem.k.shape[1]) for problem in problems)
    entries = min(batch, max(1, dispatch.D_SCORES_BUFFER_BYTES // most))
    if entries == batch:
        return d_q, *_backward_of_entries(problems, d_q, dkdv, tile, add)
    gradients = [x.new_empty(x.shape) for problem in problems for x in (problem.k, problem.v)]
    for first in range(0, batch, entries):
        some = slice(first, first + entries)
        parts = [_entries(problem, some) for problem in problems]
        found = _backward_of_entries(parts, d_q[some], dkdv, tile, add)
        for whole, part in zip(gradients, found, strict=True):
            whole[some] = part
    return d_q, *gradients


def _backward_of_entries(
    problems: Sequence[IntervalProblem], d_q: Tensor, dkdv: Sequence[dict[str, Any]], tile: Tile, add: bool
) -> list[Tensor]:
    """d_k and d_v of each problem; d_q goes to its place."""
    branches = [_Gradients(*each) for each in zip(problems, dkdv, strict=True)]
    chunks = [branch.chunks() for branch in branches]
    current = [next(each) for each in chunks]
    begin = 0
    while True:
        end = min(chunk.end for chunk in current)
        shares = [branch.share(chunk, begin, end) for branch, chunk in zip(branches, current, strict=True)]
        compressed = None if shares[0].branch.is_window else shares[0]
        window = shares[-1] if shares[-1].branch.is_window else None
        launch_d_q(d_q[:, begin:end], compressed, window, problems[0].scale, tile, add=add)
        begin = end
        # A chunk behind the last query is none: what is left to do there is to finish.
        following = [
            next(each, None) if chunk.end == end else chunk for each, chunk in zip(chunks, current, strict=True)
        ]
        if begin == d_q.shape[1]:
            return [x for branch in branches for x in (branch.d_k, branch.d_v)]
        current = [chunk for chunk in following if chunk is not None]


def _query_ranges(problem: IntervalProblem) -> Iterator[tuple[int, int, int]]:
    """Ranges of queries whose d_scores fit: begin, end, and the compressed keys that the last of them sees, or one."""
    branch, num_queries, most_keys = problem.branch, problem.q.shape[1], problem.k.shape[1]

    def keys_until(end: int) -> int:
        seen = (branch.query_shift + end - branch.block + branch.stride) // branch.stride
        return max(1, min(seen, most_keys))

    step, begin = 64, 0
    while begin < num_queries:
        ends = range(begin + step, num_queries + step, step)
        fitting = bisect.bisect_right(
            ends,
            dispatch.D_SCORES_BUFFER_BYTES,
            key=lambda end, begin=begin: _bytes_of_rows(problem, end - begin) * _planes(keys_until(end)),
        )
        end = min(ends[max(fitting - 1, 0)], num_queries)
        yield begin, end, keys_until(end)
        begin = end


def _entries(problem: IntervalProblem, some: slice) -> IntervalProblem:
    """Some batch entries."""
    names = ("d_o", "q", "k", "v", "lse", "delta")
    gate = None if problem.gate is None else problem.gate[some]
    return problem._replace(**{name: getattr(problem, name)[some] for name in names}, gate=gate)


def _cut(problem: IntervalProblem, begin: int, end: int, first_key: int, end_key: int) -> IntervalProblem:
    """Queries begin to end and the keys that are named; their numbers begin with 0."""
    branch, rows, keys = problem.branch, slice(begin, end), slice(first_key, end_key)
    # Compressed keys are never cut in front. The window's are tokens, and so is everything about documents.
    branch = branch._replace(query_shift=branch.query_shift + begin - first_key)
    if branch.is_packed and first_key:
        branch = branch._replace(
            ids=branch.ids[first_key:], positions=branch.positions[first_key:],
            query_begin=branch.query_begin[first_key:], query_end=branch.query_end - first_key,
        )  # fmt: skip
    cut = {name: getattr(problem, name)[:, rows] for name in ("d_o", "q", "lse", "delta")}
    gate = None if problem.gate is None else problem.gate[:, rows]
    return problem._replace(**cut, k=problem.k[:, keys], v=problem.v[:, keys], gate=gate, branch=branch)


def _buffer(problem: IntervalProblem, num_keys: int, memory: Tensor | None = None) -> StoredScores:
    """Room for the d_scores of so many keys, the first in plane 0: at the front of `memory`, if that is given."""
    q = problem.q
    q_per_kv, shares = split_heads(problem.q_per_kv)
    planes = _planes(num_keys)
    rows = _queries_of_plane(problem) * q_per_kv
    shape = (q.shape[0] * problem.k.shape[2] * shares * planes, rows, 1, KEYS_OF_PLANE)
    tensor = q.new_empty(shape) if memory is None else memory[: math.prod(shape)].view(shape)
    return StoredScores(tensor, planes, 0)


def _planes(num_keys: int) -> int:
    return cdiv(num_keys, KEYS_OF_DKDV) * (KEYS_OF_DKDV // KEYS_OF_PLANE)


def _queries_of_plane(problem: IntervalProblem) -> int:
    if problem.branch.is_window:
        return problem.branch.window_size + KEYS_OF_PLANE - 1
    return problem.q.shape[1]


def _bytes_of_rows(problem: IntervalProblem, num_queries: int) -> int:
    """Bytes of the rows of one batch entry in one plane of every group and share."""
    return num_queries * problem.q.shape[2] * KEYS_OF_PLANE * problem.q.element_size()


def _bytes_of_keys(problem: IntervalProblem, num_keys: int) -> int:
    """Bytes of the d_scores of one batch entry's keys."""
    return _planes(num_keys) * _bytes_of_rows(problem, _queries_of_plane(problem))
