"""Decoding equals the attention of the whole sequence at every position, by the reference."""

from dataclasses import replace

import pytest
import torch

from tests.ops.decode_cases import CASES, Decoder, draw, whole, whole_dense
from trifocal.ops import DenseCache, append_dense, append_sparse, decode_attention, decode_dense_attention
from trifocal.ops.decode.caches import Index, LearnedCompressor
from trifocal.testing.tolerances import error

each_case = pytest.mark.parametrize("case", CASES, ids=[case.why for case in CASES])
BOUND = {torch.float32: 1e-5, torch.float64: 1e-12}


def assert_rows(decoder, o, before, num_new, expected, bound):
    """Row `t` of each sequence is the whole sequence's at its position; rows without a token are zero."""
    for sequence, (start, count) in enumerate(zip(before, num_new, strict=True)):
        assert error(o[sequence, :count], expected[sequence, start : start + count]) <= bound, (sequence, start, count)
        assert not o[sequence, count:].any()


@each_case
@pytest.mark.parametrize(("dtype", "most_new"), [(torch.float64, 1), (torch.float32, 3), (torch.float64, 8)], ids=str)
def test_every_length_of_the_past_in_one_batch(case, dtype, most_new):
    """Around every border of a block, a stride, a page and the window; the last sequences have fewer new tokens."""
    lengths = list(range(0, 66, 3 if most_new == 8 else 1))
    tokens = draw(case, 1, 66 + most_new, dtype)
    expected = whole(case, tokens).expand(len(lengths), -1, -1, -1)
    decoder = Decoder(case, type(tokens)(*(x.expand(len(lengths), -1, -1, -1) for x in tokens)), most_new, "reference")
    decoder.fill(lengths)
    num_new = [most_new - index % (most_new + 1) for index in range(len(lengths))]
    before = list(lengths)
    for _ in range(2):
        num_new = [min(new, 66 + most_new - start) for new, start in zip(num_new, before, strict=True)]
        o = decoder.step(num_new)
        assert_rows(decoder, o, before, num_new, expected, BOUND[dtype])
        before = [start + new for start, new in zip(before, num_new, strict=True)]


@pytest.mark.parametrize("window_size", [None, 1, 7])
def test_dense_attention_at_every_length(window_size):
    case, lengths = CASES[0], list(range(0, 40, 3))
    tokens = draw(case, len(lengths), 50, torch.float64)
    expected = whole_dense(case, tokens, window_size)
    decoder = Decoder(case, tokens, 4, "reference")
    decoder.fill(lengths)
    num_new = [index % 5 for index in range(len(lengths))]
    bound = BOUND[torch.float64]
    assert_rows(decoder, decoder.step_dense(num_new, window_size), lengths, num_new, expected, bound)
    after = [start + new for start, new in zip(lengths, num_new, strict=True)]
    again = [1] * len(after)
    assert_rows(decoder, decoder.step_dense(again, window_size), after, again, expected, bound)


def test_rejected_tokens_are_written_over():
    """Speculative decoding: lengths go back, and other tokens follow."""
    case = CASES[0]
    tokens = draw(case, 1, 60, torch.float64)
    expected = whole(case, tokens)
    decoder = Decoder(case, tokens, 4, "reference")
    decoder.fill([37])
    wrong = draw(case, 1, 60, torch.float64, seed=9)
    right, decoder.tokens = decoder.tokens, wrong
    decoder.step([4])
    decoder.tokens = right
    decoder.lengths -= 3
    # The one that was kept is not the right one: it is written again too.
    decoder.lengths -= 1
    for start in range(37, 57, 4):
        assert_rows(decoder, decoder.step([4]), [start], [4], expected, BOUND[torch.float64])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"most_new": 9}, "T from 1 to 8"),
        ({"new": {"k_slc": slice(0)}}, r"no empty dimension, got \[2, 0, 2, 8\]"),
        ({"ring": 3}, "rings of at least"),
        ({"gates": None}, "window branch needs gates"),
        ({"columns": "lengths"}, "lengths must be contiguous"),
        ({"one_table": True}, r"rows of block_table must be contiguous and lie apart, got strides \[0, 1\]"),
        # As transformers lays tables out; and columns of a joint one.
        ({"rotary": lambda x: torch.cat((x, x), -1)}, r"cosines must have the shape \[max_len, D/2\] = \['\*', 4\]"),
        (
            {"index": Index(torch.zeros(2, 2, 2, 8), torch.zeros(2, 2, 8), ())},
            "an index must be given where the cache has k_idx, and only there",
        ),
        (
            {"compress": (LearnedCompressor(torch.zeros(3, 8), torch.zeros(5, 24), torch.zeros(8, 5)), None)},
            r"positions of the φ of keys must be contiguous, of shape \[8, 8\], got \[3, 8\]",
        ),
        (
            {"compress": (LearnedCompressor(torch.zeros(8, 8), torch.zeros(5, 64), torch.zeros(8, 5)), None)},
            "a learned φ of values must be given where the cache compresses them, and only there",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    case = CASES[0]
    tokens = draw(case, 2, 20, torch.float32)
    decoder = Decoder(case, tokens, change.get("most_new", 2), "reference")
    if "ring" in change:
        decoder.cache.__dict__["k_win"] = decoder.cache.k_win[:, :, : change["ring"]]
    batch = decoder.batch([1, 1])
    if "columns" in change:
        given = getattr(batch, change["columns"])
        batch = replace(batch, **{change["columns"]: torch.stack([given, given], -1)[..., 0]})
    if "one_table" in change:
        batch = replace(batch, block_table=batch.block_table[:1].expand_as(batch.block_table))
    new = decoder.new_tokens([1, 1])
    new = new._replace(**{name: getattr(new, name)[:, part] for name, part in change.get("new", {}).items()})
    decoder.rotary = tuple(map(change.get("rotary", lambda x: x), decoder.rotary))
    with pytest.raises(ValueError, match=message):
        if "gates" in change:
            decode_attention(new.q, None, decoder.cache, batch, case.geometry, decoder.rotary, window=True)
        else:
            optional = {name: change.get(name) for name in ("index", "compress")}
            append_sparse(decoder.cache, batch, *new[2:8], case.geometry, decoder.rotary, **optional)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k_idx", lambda x: torch.zeros(3, 2, 16, 8), r"k_idx must have the shape \[pages, 1, P, Di\] = "),
        ("k_slc", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), "k_slc must be contiguous in its last dim"),
        ("v_win", lambda x: x[:, :, 1:], "k_win and v_win must have the same pages or rows, groups and tokens"),
        ("k_raw", lambda x: x[:, :1], r"k_raw must have the shape \[\*, G, tokens, width\] = \['\*', 2, '\*', 8\]"),
    ],
)
def test_caches_that_kernels_would_read_wrong_are_not_made(name, change, message):
    decoder = Decoder(CASES[0], draw(CASES[0], 1, 20, torch.float32), 1, "reference")
    with pytest.raises(ValueError, match=message):
        replace(decoder.cache, **{name: change(getattr(decoder.cache, name))})
    with pytest.raises(ValueError, match="v must be contiguous in its last dimension, got a stride of 2"):
        DenseCache(decoder.dense.k, torch.stack((decoder.dense.v, decoder.dense.v), -1)[..., 0])


@pytest.mark.parametrize("part", [slice(5), slice(1, 4)], ids=["heads", "width"])
def test_queries_that_do_not_fit_the_cache_are_refused(part):
    case = CASES[0]
    decoder = Decoder(case, draw(case, 2, 20, torch.float32), 1, "reference")
    new, batch = decoder.append([1, 1])
    q = new.q[:, :, part] if part.start is None else new.q[..., part]
    message = r"q \[B, T, H, D\] must have D = 8 and a multiple of the cache's 2 groups for H"
    with pytest.raises(ValueError, match=message):
        decode_dense_attention(q, decoder.dense, batch, decoder.rotary)
    with pytest.raises(ValueError, match=message):
        decode_attention(q, None, decoder.cache, batch, case.geometry, decoder.rotary, window=False)
    with pytest.raises(ValueError, match=r"q must have the dtype of the cache, torch.float32, got torch.float16"):
        decode_dense_attention(new.q.half(), decoder.dense, batch, decoder.rotary)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": None}, "batch must be a DecodeBatch, got NoneType"),
        ({"cache": None}, "cache must be a DenseCache or WindowCache, got NoneType"),
        ({"k": None}, r"k must be a tensor \[B, T, heads, width\], got NoneType"),
        ({"v": None}, r"v must be a tensor \[B, T, G, V\], got NoneType"),
        ({"k": lambda x: x.long()}, "k must be of float64, float32, bfloat16 or float16, got torch.int64"),
        ({"v": lambda x: x.to("meta")}, "v must be on cpu, as other tensors of this call are, got meta"),
        ({"rotary": None}, r"rotary must be two tables, cosines and sines \[max_len, D/2\], got NoneType"),
        ({"rows": [0, 1]}, r"rows must be a tensor \[B\], got list"),
        ({"block_table": lambda x: x.to("meta")}, "block_table must be on cpu, as other tensors"),
    ],
)
def test_what_is_no_such_tensor_is_refused(change, message):
    """Whole numbers were cast into the cache in silence, and the rest failed deep inside."""
    decoder = Decoder(CASES[0], draw(CASES[0], 2, 20, torch.float32), 1, "reference")
    new, batch = decoder.new_tokens([1, 1]), decoder.batch([1, 1])
    given = {"cache": decoder.dense, "batch": batch, "k": new.k_slc, "v": new.v_slc, "rotary": decoder.rotary}
    for name, value in change.items():
        held = given[name] if name in given else getattr(batch, name)
        wrong = value(held) if callable(value) else value
        given.update({name: wrong} if name in given else {"batch": replace(batch, **{name: wrong})})
    with pytest.raises(ValueError, match=message):
        append_dense(**given)


def test_a_window_has_its_own_cache():
    """A wider one than the rings hold would read what is written over; pages of every token have no window."""
    decoder = Decoder(CASES[0], draw(CASES[0], 2, 20, torch.float32), 2, "reference")
    new, batch = decoder.new_tokens([1, 1]), decoder.batch([1, 1])
    for cache, size, message in (
        (decoder.windows(9), 10, "k_win and v_win must be rings of at least 11 tokens for 2 at a time, got 10"),
        (decoder.windows(9), None, "a window_size must be given with a WindowCache, and only there"),
        (decoder.dense, 9, "a window_size must be given with a WindowCache, and only there"),
        (decoder.windows(9), 0, "window_size"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_dense_attention(new.q, cache, batch, decoder.rotary, window_size=size)
