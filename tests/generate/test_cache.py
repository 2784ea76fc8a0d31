"""Decoding with caches gives what one pass over the whole sequence gives, whatever was prefilled how."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trifocal.generate import NSACache, make_caches
from trifocal.models import DecoderLM
from trifocal.ops import Geometry

OPTIONS: list[dict[str, Any]] = [
    {},
    {"compressor": "mlp", "gate": "softmax"},
    {"shared_kv": True},
    {"attention": "dense"},
    {"layer_types": ("window", "selected"), "qk_norm": True, "qkv_bias": True},
]
# l, d, l', n, first, last, w: the usual one; blocks that do not overlap with a window of one; a window wider than
# everything; no forced last block.
GEOMETRIES = [
    Geometry(4, 2, 8, 3, 1, 1, 7),
    Geometry(4, 4, 4, 2, 1, 1, 1),
    Geometry(6, 2, 6, 2, 0, 2, 1000),
    Geometry(2, 1, 4, 3, 2, 0, 5),
]
LONGEST_PREFILL = 3 * 8


def in_pieces(model: DecoderLM, tokens: Tensor, sizes: list[int]) -> Tensor:
    """Logits of all positions, the tokens going through the cache in pieces of the given sizes."""
    caches = make_caches(model.config, tokens.shape[1])
    with torch.inference_mode():
        return torch.cat([model(piece, cache=caches) for piece in tokens.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_equals_one_pass_after_prefills_of_every_length(
    make_model: Callable[..., DecoderLM], options: dict[str, Any]
) -> None:
    model, length = make_model(**options), LONGEST_PREFILL + 6
    torch.manual_seed(0)
    tokens = torch.randint(31, (2, length))
    with torch.no_grad():
        expected = model(tokens)
    for prefill in range(1, LONGEST_PREFILL + 1):
        given = in_pieces(model, tokens, [prefill] + [1] * (length - prefill))
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-11, msg=lambda m, n=prefill: f"prefill {n}: {m}")


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("sizes", [[1] * 60, [60], [13] * 4 + [8], [2, 30, 1, 1, 26], [3] * 20], ids=len)
def test_chunks_equal_one_pass(make_model: Callable[..., DecoderLM], geometry: Geometry, sizes: list[int]) -> None:
    for options in OPTIONS[1:]:
        model = make_model(geometry=geometry, **options)
        torch.manual_seed(0)
        tokens = torch.randint(31, (1, 60))
        with torch.no_grad():
            expected = model(tokens)
        torch.testing.assert_close(in_pieces(model, tokens, sizes), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [[40], [7, 7, 7, 7, 7, 5], [19] + [1] * 21], ids=["prefill", "chunks", "decode"])
def test_no_logit_sees_the_future(
    make_model: Callable[..., DecoderLM], options: dict[str, Any], sizes: list[int]
) -> None:
    model, length = make_model(**options), 40
    torch.manual_seed(0)
    tokens = torch.randint(31, (1, length))
    # Row t differs from the original from token t on.
    later = torch.arange(length) >= torch.arange(length)[:, None]
    changed = torch.where(later, (tokens + torch.randint(1, 31, (length, length))) % 31, tokens)
    difference = (in_pieces(model, changed, sizes) - in_pieces(model, tokens, sizes)).abs().amax(-1)
    assert difference[~later].max() < 1e-12
    assert difference.diagonal().min() > 1e-3


def test_the_cache_keeps_no_more_than_the_branches_need(make_model: Callable[..., DecoderLM]) -> None:
    geometry = Geometry(4, 2, 8, 3, 1, 1, 7)
    model = make_model(num_layers=1, geometry=geometry)
    cache = NSACache(geometry, capacity=200)
    with torch.inference_mode():
        model(torch.randint(31, (1, 90)), cache=[cache])
        storages = {
            name: buffer._buffer.untyped_storage().data_ptr()
            for name, buffer in vars(cache).items()
            if hasattr(buffer, "_buffer")
        }
        for _ in range(110):
            model(torch.randint(31, (1, 1)), cache=[cache])
    lengths = {name: buffer._buffer.shape[1] for name, buffer in vars(cache).items() if name in storages}
    assert lengths == {
        **dict.fromkeys(("_k_cmp", "_v_cmp"), 99),
        **dict.fromkeys(("_k_slc", "_v_slc"), 200),
        **dict.fromkeys(("_k_win", "_v_win"), 14),
        **dict.fromkeys(("_k_raw", "_v_raw"), 8),
    }
    # The same memory from the first token to the last.
    for name, pointer in storages.items():
        assert getattr(cache, name)._buffer.untyped_storage().data_ptr() == pointer


def test_a_block_is_emitted_every_stride_and_never_twice() -> None:
    geometry = Geometry(4, 2, 8, 3, 1, 1, 7)
    cache = NSACache(geometry, capacity=40)
    emitted: list[tuple[int, int]] = []

    def compress(k: Tensor, v: Tensor, first_position: int) -> tuple[Tensor, Tensor]:
        # Tokens carry their position: the stretch must start where it says.
        assert k[0, :, 0, 0].tolist() == list(range(first_position, first_position + k.shape[1]))
        starts = range(0, k.shape[1] - 4 + 1, 2)
        emitted.extend((cache.length, first_position + start) for start in starts)
        return k[:, list(starts)], v[:, list(starts)]

    with torch.inference_mode():
        for piece in torch.arange(40.0).split([1, 1, 1, 1, 5, 1, 1, 17, 1, 1, 1, 1, 1, 7]):
            token = piece[None, :, None, None]
            (k_cmp, _), (k_slc, _), (k_win, _) = cache.extend((token, token), (token, token), (token, token), compress)
            assert k_cmp.flatten().tolist() == list(range(0, cache.length - 3, 2))
            assert k_slc.flatten().tolist() == list(range(cache.length))
            reach = min(cache.length, len(piece) + 6)
            assert k_win.flatten().tolist() == list(range(cache.length - reach, cache.length))
    assert [start for _, start in emitted] == list(range(0, 37, 2))


def test_misuse_is_refused(make_model: Callable[..., DecoderLM]) -> None:
    for attention in ("nsa", "dense"):
        model = make_model(attention=attention)
        caches = make_caches(model.config, 8)
        with pytest.raises(ValueError, match=r"use torch\.inference_mode\(\)"):
            model(torch.randint(31, (2, 4)), cache=caches)
        tokens = torch.randint(31, (2, 4))
        with torch.inference_mode():
            model(tokens, cache=caches)
            with pytest.raises(ValueError, match=r"holds a batch of 2 .* got 3 "):
                model(torch.randint(31, (3, 1)), cache=caches)
            # What was refused left nothing behind.
            more = torch.randint(31, (2, 2))
            expected = model(torch.cat((tokens, more), dim=1))[:, 4:]
            torch.testing.assert_close(model(more, cache=caches), expected, rtol=0, atol=1e-11)
        caches = make_caches(model.config, 8)
        with torch.inference_mode():
            model(torch.randint(31, (2, 5)), cache=caches)
            with pytest.raises(ValueError, match="room for 8 tokens, got 5 and 4 more"):
                model(torch.randint(31, (2, 4)), cache=caches)
            with pytest.raises(ValueError, match="cannot be given together"):
                model(torch.randint(31, (1, 2)), cache=caches, cu_seqlens=torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        make_caches(model.config, 0)
