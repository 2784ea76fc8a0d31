"""Backward on Hopper: d_scores of some queries, or keys, at a time, which `dkdv` stores and `d_q` takes.

A chunk's d_scores fit a bounded buffer. Batch entries that fit go together. A longer one is cut: the compressed branch
by queries, whose d_q is then complete, while d_k and d_v are added up in fp32 from chunk to chunk; the window by keys,
whose d_k and d_v are complete, while the d_scores of a chunk's last keys stay for the next one's queries, which see
these keys too.
"""

import bisect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trifocal.ops import dispatch
from trifocal.ops.hopper.common import split_heads
from trifocal.ops.hopper.interval.d_q import launch_d_q
from trifocal.ops.hopper.interval.dkdv import StoredScores, launch_dkdv
from trifocal.ops.hopper.tiles import KEYS_OF_DKDV, KEYS_OF_PLANE
from trifocal.ops.tiles import Tile, cdiv
from trifocal.ops.triton.interval.common import IntervalProblem


def launch_backward(
    problem: IntervalProblem, d_q: Tensor | None, dkdv: dict[str, Any], tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """Hopper version of `triton.interval.dkdv.launch_backward`.

    Args:
        problem: Inputs; the copy engine can read them.
        d_q: Gradient of the queries from elsewhere, contiguous, or None.
        dkdv: Configuration of `dkdv.launch_dkdv`.
        tile: That of `d_q.launch_d_q`.
    """
    q, k, v = problem.q, problem.k, problem.v
    add = d_q is not None
    if d_q is None:
        d_q = q.new_empty(q.shape)
    batch, num_keys = k.shape[:2]
    entries = dispatch.D_SCORES_BUFFER_BYTES // max(1, _bytes_of_keys(problem, num_keys))
    if entries >= batch:
        d_k, d_v = _whole(problem, d_q, dkdv, tile, add)
        return d_q, d_k, d_v
    d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
    cut = _by_keys if problem.branch.is_window else _by_queries
    for first in range(0, batch, max(1, entries)):
        some = slice(first, first + max(1, entries))
        part = _cut(problem, some, slice(None), slice(None))
        d_k[some], d_v[some] = (_whole if entries else cut)(part, d_q[some], dkdv, tile, add)
    return d_q, d_k, d_v


def _whole(problem: IntervalProblem, d_q: Tensor, dkdv: dict[str, Any], tile: Tile, add: bool) -> tuple[Tensor, Tensor]:
    """d_k and d_v; d_q goes to its place."""
    stored = _buffer(problem, problem.k.shape[1])
    d_k, d_v = launch_dkdv(problem, **dkdv, stored=stored)
    launch_d_q(problem, d_q, stored, tile, add=add)
    return d_k, d_v


def _by_queries(
    problem: IntervalProblem, d_q: Tensor, dkdv: dict[str, Any], tile: Tile, add: bool
) -> tuple[Tensor, Tensor]:
    """As `_whole`, of one batch entry of the compressed branch that does not fit."""
    k, v = problem.k, problem.v
    totals = k.new_zeros(k.shape, dtype=torch.float32), v.new_zeros(v.shape, dtype=torch.float32)
    chunks = list(_query_chunks(problem))
    most = max(_bytes_of_rows(problem, end - begin) * _planes(num_keys) for begin, end, num_keys in chunks)
    memory = problem.q.new_empty(most // problem.q.element_size())
    for begin, end, num_keys in chunks:
        queries = slice(begin, end)
        part = _cut(problem, slice(None), queries, slice(num_keys), problem.branch.query_shift + begin)
        stored = _buffer(part, num_keys, memory)
        launch_dkdv(part, **dkdv, stored=stored, totals=totals)
        launch_d_q(part, d_q[:, queries], stored, tile, add=add)
    return totals[0].to(k.dtype), totals[1].to(v.dtype)


def _query_chunks(problem: IntervalProblem) -> Iterator[tuple[int, int, int]]:
    """Chunks of queries whose d_scores fit: begin, end, and the compressed keys that the last of them sees, or one."""
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


def _by_keys(
    problem: IntervalProblem, d_q: Tensor, dkdv: dict[str, Any], tile: Tile, add: bool
) -> tuple[Tensor, Tensor]:
    """As `_whole`, of one batch entry of the window that does not fit."""
    q, k, v, branch = problem.q, problem.k, problem.v, problem.branch
    num_queries, num_keys, shift = q.shape[1], k.shape[1], branch.query_shift
    # Keys before a chunk that its queries see too, in whole tiles; and those of a chunk, at least as many.
    before = cdiv(branch.window_size - 1, KEYS_OF_DKDV) * KEYS_OF_DKDV
    fitting = dispatch.D_SCORES_BUFFER_BYTES // _bytes_of_keys(problem, KEYS_OF_DKDV) * KEYS_OF_DKDV
    size = max(before, fitting - before, KEYS_OF_DKDV)
    stored = _buffer(problem, before + size)
    planes = stored.tensor.view(-1, stored.planes_of_group, *stored.tensor.shape[1:])
    d_k, d_v = k.new_empty(k.shape), v.new_empty(v.shape)
    for begin in range(0, num_keys, size):
        end = min(begin + size, num_keys)
        if begin:
            planes[:, : _planes(before)] = planes[:, _planes(size) :]
        first = max(begin - shift, 0)
        seeing = slice(first, min(end - shift + branch.window_size - 1, num_queries))
        own = slice(first, end - shift)
        if seeing.stop <= first:
            d_k[:, begin:end], d_v[:, begin:end] = 0.0, 0.0
            continue
        here = stored._replace(first_plane=_planes(before))
        part = _cut(problem, slice(None), seeing, slice(begin, end), shift + first - begin)
        d_k[:, begin:end], d_v[:, begin:end] = launch_dkdv(part, **dkdv, stored=here)
        if first < own.stop:
            origin = max(begin - before, 0)
            part = _cut(problem, slice(None), own, slice(origin, end), shift + first - origin)
            here = stored._replace(first_plane=_planes(before) - (begin - origin) // KEYS_OF_PLANE)
            launch_d_q(part, d_q[:, own], here, tile, add=add, first_query=-first)
    return d_k, d_v


def _cut(
    problem: IntervalProblem, entries: slice, queries: slice, keys: slice, query_shift: int | None = None
) -> IntervalProblem:
    """Some batch entries, queries and keys of a problem, the first query at place `query_shift` among the keys."""
    branch, first_key = problem.branch, keys.start or 0
    if query_shift is not None:
        branch = branch._replace(query_shift=query_shift)
    if branch.is_packed and first_key:
        # Documents of the window: everything counts tokens, which are keys.
        branch = branch._replace(
            ids=branch.ids[first_key:], positions=branch.positions[first_key:],
            query_begin=branch.query_begin[first_key:], query_end=branch.query_end - first_key,
        )  # fmt: skip
    rows = {name: getattr(problem, name)[entries, queries] for name in ("d_o", "q", "lse", "delta")}
    gate = None if problem.gate is None else problem.gate[entries, queries]
    k, v = problem.k[entries, keys], problem.v[entries, keys]
    return problem._replace(**rows, k=k, v=v, gate=gate, branch=branch)


def _buffer(problem: IntervalProblem, num_keys: int, memory: Tensor | None = None) -> StoredScores:
    """Room for the d_scores of so many keys, the first in plane 0: at the front of `memory`, if that is given."""
    q = problem.q
    q_per_kv, shares = split_heads(problem.q_per_kv)
    planes = _planes(num_keys)
    rows = _queries_of_plane(problem, q.shape[1]) * q_per_kv
    shape = (q.shape[0] * problem.k.shape[2] * shares * planes, rows, 1, KEYS_OF_PLANE)
    tensor = q.new_empty(shape) if memory is None else memory[: math.prod(shape)].view(shape)
    return StoredScores(tensor, planes, 0)


def _planes(num_keys: int) -> int:
    return cdiv(num_keys, KEYS_OF_DKDV) * (KEYS_OF_DKDV // KEYS_OF_PLANE)


def _queries_of_plane(problem: IntervalProblem, num_queries: int) -> int:
    if problem.branch.is_window:
        return min(problem.branch.window_size + KEYS_OF_PLANE - 1, num_queries)
    return num_queries


def _bytes_of_rows(problem: IntervalProblem, num_queries: int) -> int:
    """Bytes of the rows of one batch entry in one plane of every group and share."""
    return num_queries * problem.q.shape[2] * KEYS_OF_PLANE * problem.q.element_size()


def _bytes_of_keys(problem: IntervalProblem, num_keys: int) -> int:
    """Bytes of the d_scores of one batch entry's keys."""
    return _planes(num_keys) * _bytes_of_rows(problem, _queries_of_plane(problem, problem.q.shape[1]))
