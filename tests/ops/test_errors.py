"""Every wrong argument is refused with the given and the expected value."""

import re

import pytest
import torch

from tests.ops.cases import USUAL, Case, draw
from trifocal import nsa_attention, ops

CASE = Case("", USUAL, 20, batch=2, heads=6, groups=2, dim=8, value_dim=5)  # C = 4
PACKED = Case("", USUAL, 20, heads=6, groups=2, lengths=(12, 8))
INPUTS = draw(CASE, torch.float32)
CHOSEN = torch.zeros(2, 20, 2, 3, dtype=torch.int32)
LSE = torch.zeros(2, 20, 6)


def refused(message):
    """The message must hold these words; written plainly, not as a pattern."""
    return pytest.raises(ValueError, match=re.escape(message))


def attend(geometry=USUAL, cu_seqlens=None, selected_blocks=None, backend="auto", **changes):
    return nsa_attention(
        *INPUTS._replace(**changes), geometry, cu_seqlens=cu_seqlens, selected_blocks=selected_blocks, backend=backend
    )


def test_the_inputs_themselves_are_fine():
    attend(selected_blocks=CHOSEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": INPUTS.q[0]}, "q must have the shape [B, T, H, D], got [20, 6, 8]"),
        ({"k_cmp": INPUTS.k_cmp[..., 0]}, "k_cmp must have the shape [B, C, G, D], got [2, 4, 2]"),
        ({"gates": INPUTS.gates[..., 0]}, "gates must have the shape [B, T, H, 3], got [2, 20, 6]"),
        ({"gates": INPUTS.gates[..., :2]}, "gates must have the shape [B, T, H, 3] = [2, 20, 6, 3], got [2, 20, 6, 2]"),
        ({"gates": torch.ones(2, 20, 6, 3, dtype=torch.int64)}, "gates must be floating point, got torch.int64"),
        ({"q": INPUTS.q.tolist()}, "q must be a tensor [B, T, H, D], got list"),
        ({"q": INPUTS.q[:, :, :5], "gates": INPUTS.gates[:, :, :5]}, "got H = 5 and G = 2"),
        ({"k_slc": INPUTS.k_slc[..., :7]}, "k_slc [B, S, G, D] must share B and D with q [B, T, H, D]"),
        ({"k_win": INPUTS.k_win[:1], "v_win": INPUTS.v_win[:1]}, "got [1, 20, 2, 8] and [2, 20, 6, 8]"),
        ({"k_cmp": INPUTS.k_cmp[:, :3], "v_cmp": INPUTS.v_cmp[:, :3]}, "C = 4 compressed blocks for 20 keys"),
        ({"v_cmp": INPUTS.v_cmp[:, :3]}, "v_cmp [B, C, G, V] must share B, C and G with k_cmp [B, C, G, D]"),
        ({"v_win": INPUTS.v_win[:, :, :1]}, "v_win [B, S, G, V] must share B, S and G with k_win [B, S, G, D]"),
        ({"k_slc": INPUTS.k_slc.double()}, "k_slc must have the dtype of q, torch.float32, got torch.float64"),
        ({"v_win": INPUTS.v_win.half()}, "v_win must have the dtype of q, torch.float32, got torch.float16"),
        ({"k_cmp": INPUTS.k_cmp.to("meta")}, "k_cmp must be on the device of q, cpu, got meta"),
        ({"q": INPUTS.q.long()}, "q must be of float64, float32, bfloat16 or float16, got torch.int64"),
        ({"q": INPUTS.q[:, :0], "gates": INPUTS.gates[:, :0]}, "may have no empty dimension, got [2, 0, 6, 8]"),
        ({"k_win": INPUTS.k_win[:, :19], "v_win": INPUTS.v_win[:, :19]}, "must hold between 20 and 20 keys"),
        ({"selected_blocks": CHOSEN[0]}, "selected_blocks must have the shape [B, T, G, N], got [20, 2, 3]"),
        ({"selected_blocks": CHOSEN[:, :, :1]}, "with [B, T, G] = [2, 20, 2], got [2, 20, 1, 3]"),
        ({"selected_blocks": CHOSEN.float()}, "selected_blocks must be of int32 or int64, got torch.float32"),
        ({"backend": "flash"}, "backend must be one of auto, reference, triton, got 'flash'"),
    ],
)
def test_nsa_attention(changes, message):
    with refused(message):
        attend(**changes)


def test_every_argument_is_checked():
    for name in INPUTS._fields:
        with refused(f"{name} must be a tensor ["):
            attend(**{name: None})


def test_branches_that_differ():
    one_group = {"k_win": INPUTS.k_win[:, :, :1], "v_win": INPUTS.v_win[:, :, :1]}
    with refused("must share G and V, got [2, 4, 2, 5], [2, 20, 2, 5] and [2, 20, 1, 5]"):
        attend(**one_group)
    with refused("must share G and V, got [2, 4, 2, 5], [2, 20, 1, 5] and [2, 20, 2, 5]"):
        attend(k_slc=INPUTS.k_slc[:, :, :1], v_slc=INPUTS.v_slc[:, :, :1])
    with refused("must share G and V, got [2, 4, 2, 1], [2, 20, 2, 5] and [2, 20, 2, 5]"):
        attend(v_cmp=INPUTS.v_cmp[..., :1])


def test_window_keys():
    few = INPUTS._replace(q=INPUTS.q[:, -3:], gates=INPUTS.gates[:, -3:])
    with refused("k_win must hold between 13 and 20 keys (S = 20, T = 3, w = 11), got 12"):
        nsa_attention(*few._replace(k_win=INPUTS.k_win[:, :12], v_win=INPUTS.v_win[:, :12]), USUAL)
    longer = torch.cat([INPUTS.k_win, INPUTS.k_win], 1), torch.cat([INPUTS.v_win, INPUTS.v_win], 1)
    with refused("got 40"):
        nsa_attention(*few._replace(k_win=longer[0], v_win=longer[1]), USUAL)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: ops.selected_attention(q, k, v, CHOSEN[:, :, :, :1], USUAL),
        lambda q, k, v: ops.window_attention(q, k, v, 5),
        lambda q, k, v: nsa_attention(q, *INPUTS[1:3], k, v, k, v, INPUTS.gates, USUAL),
    ],
    ids=["selected", "window", "nsa"],
)
def test_more_queries_than_keys(call):
    with pytest.raises(ValueError, match=r"T = 20.* S = 19"):
        call(INPUTS.q, INPUTS.k_slc[:, :19], INPUTS.v_slc[:, :19])


def test_select_blocks():
    q, k = INPUTS[:2]
    with refused("lse must have the shape [B, T, H] = [2, 20, 6], got [2, 6, 20]"):
        ops.select_blocks(q, k, LSE.transpose(1, 2), USUAL)
    with refused("lse must have the shape [B, T, H], got [2, 20, 6, 1]"):
        ops.select_blocks(q, k, LSE[..., None], USUAL)
    with refused("C = 4 compressed blocks for 20 keys"):
        ops.select_blocks(q, k[:, :3], LSE, USUAL)
    with refused("lse must be on the device of q, cpu, got meta"):
        ops.select_blocks(q, k, LSE.to("meta"), USUAL)
    with refused("lse must be floating point, got torch.int64"):
        ops.select_blocks(q, k, LSE.long(), USUAL)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (0, "window_size must be at least 1, got 0"),
        (2.5, "window_size must be an integer, got 2.5"),
        (True, "window_size must be an integer, got True"),
        (2**63 - 1, f"window_size may be at most 2147483647, got {2**63 - 1}"),
    ],
)
def test_window_size(window, message):
    with refused(message):
        ops.window_attention(INPUTS.q, INPUTS.k_win, INPUTS.v_win, window)


def test_num_keys():
    with refused("num_keys must be an integer, got 20.0"):
        ops.compressed_attention(*INPUTS[:3], USUAL, num_keys=20.0)
    with refused("num_keys must be an integer, got '20'"):
        ops.select_blocks(*INPUTS[:2], LSE, USUAL, num_keys="20")


CALLS = (
    lambda geometry, scale: ops.compressed_attention(*INPUTS[:3], geometry, scale=scale),
    lambda geometry, scale: ops.select_blocks(*INPUTS[:2], LSE, geometry, scale=scale),
    lambda geometry, scale: ops.selected_attention(INPUTS.q, *INPUTS[3:5], CHOSEN, geometry, scale=scale),
    lambda geometry, scale: nsa_attention(*INPUTS, geometry, scale=scale),
)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (float("nan"), "scale must be finite, got nan"),
        (float("inf"), "scale must be finite, got inf"),
        ([1.0], "scale must be a number, got [1.0]"),
        ("wide", "scale must be a number, got 'wide'"),
    ],
)
def test_scale(call, scale, message):
    with refused(message):
        call(USUAL, scale)
    if call is CALLS[0]:
        with refused(message):
            ops.window_attention(INPUTS.q, INPUTS.k_win, INPUTS.v_win, 5, scale=scale)


@pytest.mark.parametrize("call", [*CALLS, lambda geometry, _: ops.mean_compress(INPUTS.k_slc, geometry)])
def test_geometry(call):
    with refused("geometry must be a Geometry, got dict"):
        call({}, None)


def test_mean_compress():
    with refused("x must have the shape [B, S, G, D], got [20, 2, 8]"):
        ops.mean_compress(INPUTS.k_slc[0], USUAL)
    with refused("cu_seqlens needs B = 1: pack the documents one behind the other, got B = 2"):
        ops.mean_compress(INPUTS.k_slc, USUAL, cu_seqlens=PACKED.cu_seqlens)
    with refused("x must be of float64, float32, bfloat16 or float16, got torch.int64"):
        ops.mean_compress(INPUTS.k_slc.long(), USUAL)


def packed_calls(borders):
    inputs = draw(PACKED, torch.float32)
    return (
        lambda: ops.mean_compress(inputs.k_slc, USUAL, cu_seqlens=borders),
        lambda: ops.compressed_attention(*inputs[:3], USUAL, cu_seqlens=borders),
        lambda: ops.select_blocks(*inputs[:2], LSE[:1], USUAL, cu_seqlens=borders),
        lambda: ops.selected_attention(inputs.q, *inputs[3:5], CHOSEN[:1], USUAL, cu_seqlens=borders),
        lambda: ops.window_attention(inputs.q, *inputs[5:7], 5, cu_seqlens=borders),
        lambda: nsa_attention(*inputs, USUAL, cu_seqlens=borders),
    )


@pytest.mark.parametrize(
    ("borders", "message"),
    [
        (torch.tensor([1, 12, 20]), "cu_seqlens must start at 0, got 1"),
        (torch.tensor([0, 12, 19]), "cu_seqlens must end at the number of tokens, 20, got 19"),
        (torch.tensor([0, 12, 12, 20]), "cu_seqlens must increase, but document 1 goes from 12 to 12"),
        (torch.tensor([0.0, 20.0]), "cu_seqlens must be a tensor of int32 or int64, got torch.float32"),
        (torch.tensor([[0, 20]]), "cu_seqlens must have the shape [documents + 1], got [1, 2]"),
        (torch.tensor([0]), "cu_seqlens must have the shape [documents + 1], got [1]"),
        ([0, 12, 20], "cu_seqlens must be a tensor of int32 or int64, got list"),
    ],
)
def test_borders_of_documents(borders, message):
    for call in packed_calls(borders):
        with refused(message):
            call()


def test_right_borders_are_taken():
    for call in packed_calls(PACKED.cu_seqlens):
        call()


def test_documents_of_another_length_or_device():
    inputs = draw(PACKED, torch.float32)
    other = ops.Documents.from_cu_seqlens(torch.tensor([0, 21]), 21)
    with refused("the documents hold 21 tokens, but there are 20"):
        nsa_attention(*inputs, USUAL, cu_seqlens=other)
    elsewhere = ops.Documents.from_cu_seqlens(PACKED.cu_seqlens, 20).to("meta")
    with refused("cu_seqlens must be on the device of q, cpu, got meta"):
        nsa_attention(*inputs, USUAL, cu_seqlens=elsewhere)


def test_compressed_slots_of_documents():
    # 12 and 8 tokens hold 2 + 1 blocks; 20 // 4 = 5 slots are the padded count; nothing else is taken.
    inputs = draw(PACKED, torch.float32)
    for slots in (2, 4, 6):
        k, v = (torch.zeros(1, slots, 2, 8) for _ in range(2))
        with refused(f"C = 3 compressed blocks for 20 keys (block 8, stride 4), got C = {slots}"):
            ops.compressed_attention(inputs.q, k, v, USUAL, cu_seqlens=PACKED.cu_seqlens)


@pytest.mark.parametrize("call", range(5))
def test_triton_that_cannot_run_says_why(call, monkeypatch):
    """Uninterpreted, no kernel runs on a CPU: the explicit backend raises with the reason, `auto` takes the other."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    calls = (
        lambda backend: ops.compressed_attention(*INPUTS[:3], USUAL, backend=backend),
        lambda backend: ops.select_blocks(*INPUTS[:2], LSE, USUAL, backend=backend),
        lambda backend: ops.selected_attention(INPUTS.q, *INPUTS[3:5], CHOSEN, USUAL, backend=backend),
        lambda backend: ops.window_attention(INPUTS.q, *INPUTS[5:7], 5, backend=backend),
        lambda backend: nsa_attention(*INPUTS, USUAL, backend=backend),
    )
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run \w+ here: .{10,}"):
        calls[call]("triton")
    calls[call]("auto")
