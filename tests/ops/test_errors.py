"""Every wrong argument is refused with the given and the expected value: a row for each check, and who makes it."""

import re

import pytest
import torch

from tests.ops.cases import USUAL, Case, draw
from trifocal import nsa_attention, ops

CASE = Case("", USUAL, 20, batch=2, heads=6, groups=2, dim=8, value_dim=5)  # C = 4
PACKED = Case("", USUAL, 20, heads=6, groups=2, lengths=(12, 8))
INPUTS, OF_PACK = draw(CASE, torch.float32), draw(PACKED, torch.float32)
CHOSEN = torch.zeros(2, 20, 2, 3, dtype=torch.int32)
LSE = torch.zeros(2, 20, 6)
FEW = INPUTS._replace(q=INPUTS.q[:, -3:], gates=INPUTS.gates[:, -3:])


def refused(message):
    """The message must hold these words; written plainly, not as a pattern."""
    return pytest.raises(ValueError, match=re.escape(message))


def calls(inputs, **given):
    """A call of each operation, by name."""
    rows = inputs.q.shape[0]
    return {
        "compress": lambda: ops.mean_compress(inputs.k_slc, USUAL, **given),
        "compressed": lambda: ops.compressed_attention(*inputs[:3], USUAL, **given),
        "select": lambda: ops.select_blocks(*inputs[:2], LSE[:rows], USUAL, **given),
        "selected": lambda: ops.selected_attention(inputs.q, *inputs[3:5], CHOSEN[:rows], USUAL, **given),
        "window": lambda: ops.window_attention(inputs.q, *inputs[5:7], 5, **given),
        "whole": lambda: nsa_attention(*inputs, USUAL, **given),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": INPUTS.q[0]}, "q must have the shape [B, T, H, D], got [20, 6, 8]"),
        ({"q": INPUTS.q.long()}, "q must be of float64, float32, bfloat16 or float16, got torch.int64"),
        ({"q": INPUTS.q[:, :, :5], "gates": INPUTS.gates[:, :, :5]}, "got H = 5 and G = 2"),
        ({"k_slc": INPUTS.k_slc[:, :19], "v_slc": INPUTS.v_slc[:, :19]}, "T = 20 and S = 19"),
        ({"k_slc": INPUTS.k_slc.double()}, "k_slc must have the dtype of q, torch.float32, got torch.float64"),
        ({"k_cmp": INPUTS.k_cmp.to("meta")}, "k_cmp must be on the device of q, cpu, got meta"),
        ({"k_cmp": INPUTS.k_cmp[:, :3], "v_cmp": INPUTS.v_cmp[:, :3]}, "C = 4 compressed blocks for 20 keys"),
        ({"v_cmp": INPUTS.v_cmp[..., :1]}, "must share G and V, got [2, 4, 2, 1], [2, 20, 2, 5] and [2, 20, 2, 5]"),
        ({"gates": INPUTS.gates[..., :2]}, "gates must have the shape [B, T, H, 3] = [2, 20, 6, 3], got [2, 20, 6, 2]"),
        ({"selected_blocks": CHOSEN[:, :, :1]}, "with [B, T, G] = [2, 20, 2], got [2, 20, 1, 3]"),
        ({"selected_blocks": CHOSEN.float()}, "selected_blocks must be of int32 or int64, got torch.float32"),
        ({"backend": "flash"}, "backend must be one of auto, reference, triton, got 'flash'"),
        ({"geometry": {}}, "geometry must be a Geometry, got dict"),
        ({"scale": float("nan")}, "scale must be finite, got nan"),
        ({"scale": 10**400}, "scale must be a number, got 1000"),
        ({"k_win": INPUTS.k_win.to_sparse()}, "k_win must be a plain (strided) tensor, got one of layout"),
    ],
)
def test_nsa_attention(changes, message):
    tensors = {name: value for name, value in changes.items() if name in INPUTS._fields}
    others = {name: value for name, value in changes.items() if name not in tensors}
    with refused(message):
        nsa_attention(*INPUTS._replace(**tensors), **{"geometry": USUAL, **others})


def test_every_tensor_is_checked():
    for name in INPUTS._fields:
        with refused(f"{name} must be a tensor ["):
            nsa_attention(*INPUTS._replace(**{name: None}), USUAL)
    with refused("lse must have the shape [B, T, H] = [2, 20, 6], got [2, 6, 20]"):
        ops.select_blocks(*INPUTS[:2], LSE.transpose(1, 2), USUAL)
    with refused("num_keys must be an integer, got 20.0"):
        ops.compressed_attention(*INPUTS[:3], USUAL, num_keys=20.0)
    with refused("x must have the shape [B, S, G, D], got [20, 2, 8]"):
        ops.mean_compress(INPUTS.k_slc[0], USUAL)
    with refused("k must have the shape [B, S, G, D], got [20, 2, 8]"):
        ops.nsa(INPUTS.q, INPUTS.k_slc[0], INPUTS.v_slc, INPUTS.gates, USUAL)
    with refused("k_win must hold between 13 and 20 keys (S = 20, T = 3, w = 11), got 12"):
        nsa_attention(*FEW._replace(k_win=INPUTS.k_win[:, :12], v_win=INPUTS.v_win[:, :12]), USUAL)
    longer = torch.cat([INPUTS.k_win, INPUTS.k_win], 1), torch.cat([INPUTS.v_win, INPUTS.v_win], 1)
    with refused("got 40"):
        nsa_attention(*FEW._replace(k_win=longer[0], v_win=longer[1]), USUAL)


@pytest.mark.parametrize(
    ("q_idx", "k_idx", "message"),
    [
        (torch.zeros(1, 9, 8), torch.zeros(1, 9, 8), "q_idx must have the shape [B, T, G, Di], got [1, 9, 8]"),
        (torch.zeros(1, 9, 2, 8), torch.zeros(1, 9, 4), "share B and Di with q_idx [B, T, G, Di], which may have no"),
        (torch.zeros(1, 9, 2, 8), torch.zeros(1, 9, 8).half(), "k_idx must have the dtype of q_idx, torch.float32"),
    ],
)
def test_an_index_is_named_as_it_was_given(q_idx, k_idx, message):
    with refused(message):
        ops.select_blocks_by_index(q_idx, k_idx, USUAL)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (0, "window_size must be at least 1, got 0"),
        (True, "window_size must be an integer, got True"),
        (2**63 - 1, f"window_size may be at most 2147483647, got {2**63 - 1}"),
    ],
)
def test_window_size(window, message):
    with refused(message):
        ops.window_attention(INPUTS.q, INPUTS.k_win, INPUTS.v_win, window)


def test_scale_of_each_operation():
    for name, call in calls(INPUTS, scale=float("inf")).items():
        if name != "compress":
            with refused("scale must be finite, got inf"):
                call()


@pytest.mark.parametrize(
    ("borders", "message"),
    [
        (torch.tensor([1, 12, 20]), "cu_seqlens must start at 0, got 1"),
        (torch.tensor([0, 12, 19]), "cu_seqlens must end at the number of tokens, 20, got 19"),
        (torch.tensor([0, 12, 12, 20]), "cu_seqlens must increase, but document 1 goes from 12 to 12"),
        (torch.tensor([0.0, 20.0]), "cu_seqlens must be a tensor of int32 or int64, got torch.float32"),
    ],
)
def test_borders_of_documents(borders, message):
    with refused(message):
        nsa_attention(*OF_PACK, USUAL, cu_seqlens=borders)


def test_documents_of_each_operation():
    for call in calls(OF_PACK, cu_seqlens=PACKED.cu_seqlens).values():
        call()
    for call in calls(OF_PACK, cu_seqlens=PACKED.cu_seqlens + 1).values():
        with refused("cu_seqlens must start at 0, got 1"):
            call()
    for call in calls(INPUTS, cu_seqlens=PACKED.cu_seqlens).values():
        with refused("cu_seqlens needs B = 1: pack the documents one after the other, got B = 2"):
            call()


def test_documents_of_another_length_or_device():
    other = ops.Documents.from_cu_seqlens(torch.tensor([0, 21]), 21)
    with refused("the documents hold 21 tokens, but there are 20"):
        nsa_attention(*OF_PACK, USUAL, cu_seqlens=other)
    elsewhere = ops.Documents.from_cu_seqlens(PACKED.cu_seqlens, 20).to("meta")
    with refused("cu_seqlens must be on the device of q, cpu, got meta"):
        nsa_attention(*OF_PACK, USUAL, cu_seqlens=elsewhere)


def test_compressed_slots_of_documents():
    # 12 and 8 tokens hold 2 + 1 blocks; 20 // 4 = 5 slots are the padded count; nothing else is taken.
    for slots in (2, 4, 6):
        k, v = (torch.zeros(1, slots, 2, 8) for _ in range(2))
        with refused(f"C = 3 compressed blocks for 20 keys (block 8, stride 4), got C = {slots}"):
            ops.compressed_attention(OF_PACK.q, k, v, USUAL, cu_seqlens=PACKED.cu_seqlens)


def test_triton_that_cannot_run_says_why(monkeypatch):
    """Uninterpreted, no kernel runs on a CPU: the explicit backend raises with the reason, `auto` takes the other."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    names = [name for name in calls(INPUTS) if name != "compress"]
    for name in names:
        with pytest.raises(ValueError, match=r"backend 'triton' cannot run \w+ here: .{10,}"):
            calls(INPUTS, backend="triton")[name]()
        calls(INPUTS, backend="auto")[name]()
