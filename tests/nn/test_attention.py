"""The attention layers: against their operations written out, padding, positions, arguments."""

import inspect

import pytest
import torch
from torch import Tensor

import trifocal.nn.attention as attention_module
import trifocal.nn.selected_attention as selected_module
from trifocal.nn import (
    DenseAttention,
    NSAttention,
    RotaryTables,
    SelectedAttention,
    WindowAttention,
    rotary_tables,
    rotate,
)
from trifocal.nn.attention_base import AttentionBase
from trifocal.nn.chooser import random_blocks
from trifocal.ops import (
    Documents,
    compressed_attention,
    mean_compress,
    select_blocks,
    selected_attention,
    window_attention,
)
from trifocal.testing.small_models import SMALL

DIM = 24
SIZES = {"dim": DIM, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 6}
OTHERS = [
    {"attention": "dense", "qk_norm": True, "qkv_bias": True, "o_bias": True},
    {"attention": "window"},
    {"attention": "selected", "qk_norm": True, "qkv_bias": True},
]


def sparse(geometry=SMALL, **options):
    torch.manual_seed(0)
    return NSAttention(geometry=geometry, **SIZES, **options).double()


def layer_of(attention="nsa", **options):
    """A layer with all weights drawn, those of norms and biases too."""
    own = {"nsa": {"geometry": SMALL}, "selected": {"geometry": SMALL}, "window": {"window_size": 7}, "dense": {}}
    kinds = {"nsa": NSAttention, "selected": SelectedAttention, "window": WindowAttention, "dense": DenseAttention}
    torch.manual_seed(0)
    layer = kinds[attention](**SIZES, **own[attention], **options).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.ndim == 1 and "gate" not in name:
                parameter.copy_(torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_a_layer_of_one_softmax_is_plain_attention(options):
    layer = layer_of(**options)
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    q = layer.q_proj(x).unflatten(-1, (4, 8))
    k = layer.k_proj(x).unflatten(-1, (2, 8))
    v = layer.v_proj(x).unflatten(-1, (2, 6)).repeat_interleave(2, dim=2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = (
            norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            for norm, x in ((layer.q_norm, q), (layer.k_norm, k))
        )
    tables = rotary_tables(torch.arange(40), 8, 10000.0, torch.float64)
    rotated, k_rotated = rotate(q, *tables), rotate(k, *tables)
    mask = torch.ones(40, 40, dtype=torch.bool).tril().expand(2, 4, 40, 40)
    if options["attention"] == "window":
        mask = mask.triu(-6)
    if options["attention"] == "selected":
        starts = rotary_tables(torch.arange(0, 37, 2), 8, 10000.0, torch.float64)
        k_cmp = rotate(mean_compress(k, SMALL), *starts)
        _, lse = compressed_attention(rotated, k_cmp, k_cmp, SMALL)
        blocks = select_blocks(rotated, k_cmp, lse, SMALL)
        chosen = (blocks[..., None] == torch.arange(40) // 8).any(3).transpose(1, 2)
        assert not chosen.all()
        mask = mask & chosen.repeat_interleave(2, dim=1)
    scores = torch.einsum("bthd,bshd->bhts", rotated, k_rotated.repeat_interleave(2, dim=2)) / 8**0.5
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = layer.o_proj(torch.einsum("bhts,bshv->bthv", p, v).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("attention", ["nsa", "selected"])
def test_given_blocks_are_read_instead_of_chosen_ones(attention):
    layer = layer_of(attention)
    x = torch.randn(1, 40, DIM, dtype=torch.float64)
    blocks = random_blocks(torch.arange(40), SMALL, 2, 0)
    chosen = []
    module = attention_module if attention == "nsa" else selected_module
    name = "nsa_attention" if attention == "nsa" else "selected_attention"
    original = getattr(module, name)

    def record(*tensors, **options):
        chosen.append(options.get("selected_blocks", tensors[3]))
        return original(*tensors, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, record)
        given = layer(x, selected_blocks=blocks)
    assert torch.equal(chosen[0], blocks)
    assert not torch.equal(given, layer(x))


def test_products_run_in_autocast_type_and_gates_in_fp32(monkeypatch):
    seen = []

    def record(*tensors, **options):
        seen.extend(tensor for tensor in tensors if isinstance(tensor, Tensor))
        return original(*tensors, **options)

    original = attention_module.nsa_attention
    monkeypatch.setattr(attention_module, "nsa_attention", record)
    with torch.autocast("cpu", torch.bfloat16):
        sparse(compressor="mlp", qk_norm=True, qkv_bias=True).float()(torch.randn(1, 20, DIM))
    *q_k_v, gates = seen
    assert [tensor.dtype for tensor in q_k_v] == [torch.bfloat16] * 7
    assert gates.dtype == torch.float32


@pytest.mark.parametrize(
    ("branch", "share"), [("cmp", (1.0, 0.0, 0.0)), ("slc", (0.0, 1.0, 0.0)), ("win", (0.0, 0.0, 1.0))]
)
def test_one_branch_alone_is_its_operation(branch, share):
    """The layer written out with the public operations: which projection, which position, which gate."""
    layer = sparse()
    with torch.no_grad():
        layer.gate.proj.weight.zero_()
        layer.gate.proj.bias.copy_(torch.logit(torch.tensor(share, dtype=torch.float64)).repeat(4))
    x = torch.randn(1, 40, DIM, dtype=torch.float64)
    k_rows, v_rows = layer.k_proj.weight.unflatten(0, (3, 2, 8)), layer.v_proj.weight.unflatten(0, (3, 2, 6))

    def at(tensor, positions):
        tables = rotary_tables(positions, 8, 10000.0, torch.float64)
        return rotate(tensor, *tables)

    def project(rows):
        return torch.einsum("bte,gde->btgd", x, rows)

    tokens = torch.arange(40)
    q = at(layer.q_proj(x).unflatten(-1, (4, 8)), tokens)
    k_cmp = at(mean_compress(project(k_rows[0]), SMALL), torch.arange(0, 37, 2))
    o, lse = compressed_attention(q, k_cmp, mean_compress(project(v_rows[0]), SMALL), SMALL, num_keys=40)
    if branch == "slc":
        blocks = select_blocks(q, k_cmp, lse, SMALL, num_keys=40)
        o = selected_attention(q, at(project(k_rows[1]), tokens), project(v_rows[1]), blocks, SMALL)
    if branch == "win":
        o = window_attention(q, at(project(k_rows[2]), tokens), project(v_rows[2]), SMALL.window_size)
    torch.testing.assert_close(layer(x), layer.o_proj(o.flatten(2)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
        ({"backend": "flash"}, "backend must be one of auto, reference, triton, got 'flash'"),
        ({"geometry": {}}, "geometry must be a Geometry, got dict"),
        ({"geometry": None}, "geometry must be a Geometry, got NoneType"),
        ({"head_dim": 2.0}, "head_dim must be an integer, got 2.0"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number, got '1e6'"),
        # What a configuration of transformers has.
        ({"rope_scaling": {"rope_type": "default"}}, "rope_scaling must be a RopeScaling, got dict"),
    ],
)
def test_wrong_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        NSAttention(**{**SIZES, "geometry": SMALL, **change})


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window_size must be at least 1, got 0"):
        WindowAttention(**SIZES, window_size=0)


def test_wrong_inputs_are_refused():
    layer = NSAttention(**SIZES, geometry=SMALL)
    with pytest.raises(ValueError, match=rf"x must have the shape \[B, T, E\], got \[5, {DIM}\]"):
        layer(torch.randn(5, DIM))
    with pytest.raises(ValueError, match=rf"with E = {DIM}, got \[1, 5, {DIM - 1}\]"):
        layer(torch.randn(1, 5, DIM - 1))
    with pytest.raises(ValueError, match=r"the layer's weights, torch.float32, got torch.float64: cast one of them"):
        layer(torch.randn(1, 5, DIM, dtype=torch.float64))
    with pytest.raises(ValueError, match="rotary must be a RotaryTables, got tuple"):
        layer(torch.randn(1, 5, DIM), rotary=tuple(layer.rotary_tables(torch.randn(1, 5, DIM))))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(1, 5, DIM, dtype=torch.bfloat16)).isfinite().all()


def test_the_sizes_of_nsa_are_in_its_signature():
    own, base = (inspect.signature(kind).parameters for kind in (NSAttention, AttentionBase))
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in own.values())
    shared = {*own} & {*base}
    assert shared == {*base} - {"branches"}
    assert all(own[name].default == base[name].default for name in shared - {"geometry"})


@pytest.mark.parametrize("attention", ["nsa", "selected", "window", "dense"])
def test_padded_rows_are_as_each_row_by_itself(attention):
    """Outputs and gradients of rows padded on the right, whatever stands in the padding; one row is padding only."""
    layer, lengths = layer_of(attention), [70, 0, 1, 33, 69]
    x = torch.randn(len(lengths), max(lengths), DIM, dtype=torch.float64)
    padding = torch.arange(x.shape[1]) >= torch.tensor(lengths)[:, None]
    d_o = torch.randn_like(x)
    rows = [row[None, :length].clone().requires_grad_() for row, length in zip(x, lengths, strict=True) if length]
    expected = [layer(row) for row in rows]
    for o, gradient in zip(expected, [d[None, :n] for d, n in zip(d_o, lengths, strict=True) if n], strict=True):
        o.backward(gradient)
    of_weights = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    padded = x.masked_fill(padding[..., None], float("nan")).requires_grad_()
    o = layer(padded, key_padding_mask=padding)
    o.backward(d_o)
    for found in (o, padded.grad):
        assert not found[padding].any()
    torch.testing.assert_close(o[~padding], torch.cat(expected, 1)[0], rtol=0, atol=1e-12)
    gradients = [row.grad for row in rows if row.grad is not None]
    torch.testing.assert_close(padded.grad[~padding], torch.cat(gradients, 1)[0], rtol=0, atol=1e-11)
    torch.testing.assert_close([one.grad for one in layer.parameters()], of_weights, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("attention", "options"), [("nsa", {"chooser": "index"}), ("selected", {"chooser": "index"}), ("dense", {})]
)
def test_hooks_of_a_layer_run_once_with_padding(attention, options):
    layer, x = layer_of(attention, **options), torch.randn(2, 40, DIM, dtype=torch.float64)
    given = {"key_padding_mask": torch.arange(40) >= torch.tensor([[40], [29]])}
    expected = layer(x, **given)
    layer.register_forward_hook(lambda layer, args, output: 2 * output)
    torch.testing.assert_close(layer(x, **given), 2 * expected)


def test_wrong_padding_is_refused():
    layer, x = layer_of("dense"), torch.randn(2, 5, DIM, dtype=torch.float64)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"must be bool, \[2, 5\], True at padding, got torch.int64, \[2, 5\]"):
        layer(x, key_padding_mask=mask.long())
    with pytest.raises(ValueError, match=r"got torch.bool, \[2, 4\]"):
        layer(x, key_padding_mask=mask[:, :4])
    with pytest.raises(ValueError, match=r"key_padding_mask must be a tensor \[B, T\], got list"):
        layer(x, key_padding_mask=mask.tolist())
    mask[1, 0] = True
    with pytest.raises(ValueError, match=r"padding before a token of row 1: pad after the tokens"):
        layer(x, key_padding_mask=mask)
    with pytest.raises(ValueError, match="key_padding_mask does not go with cu_seqlens"):
        layer(x[:1], key_padding_mask=mask[:1], cu_seqlens=torch.tensor([0, 5]))


def test_wrong_packing_is_refused():
    layer = sparse()
    with pytest.raises(ValueError, match="needs a batch of 1"):
        layer(torch.randn(2, 5, DIM, dtype=torch.float64), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="must end at the number of tokens"):
        layer(torch.randn(1, 5, DIM, dtype=torch.float64), cu_seqlens=torch.tensor([0, 4]))
    # One token's document must not spread over all of them: dense attention would see the future.
    one = Documents.from_cu_seqlens(torch.tensor([0, 1]), 1)
    with pytest.raises(ValueError, match="the documents hold 1 tokens, but there are 5"):
        DenseAttention(**SIZES).double()(torch.randn(1, 5, DIM, dtype=torch.float64), cu_seqlens=one)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_tables_that_were_rounded_on_the_way_are_made_again(attention):
    """FSDP's mixed precision casts every tensor that a layer is called with."""
    layer = layer_of(attention).bfloat16()
    x = torch.randn(1, 40, SIZES["dim"], dtype=torch.bfloat16)
    rounded = RotaryTables(*(pair and tuple(x.bfloat16() for x in pair) for pair in layer.rotary_tables(x)))
    assert torch.equal(layer(x, rotary=rounded), layer(x))


@pytest.mark.parametrize("obstacle", ["", "the tensors are not on a CUDA device"])
def test_dense_attention_copies_keys_only_where_it_must(obstacle, monkeypatch):
    """Where FlashAttention serves, SDPA shares keys between heads; the math is that of PyTorch's own kernel here."""
    q, k, v = (torch.randn(1, 9, heads, 8, dtype=torch.float64) for heads in (6, 2, 2))
    sdpa, heads_of_k = attention_module.nn.functional.scaled_dot_product_attention, []

    def counting(q, k, v, **options):
        heads_of_k.append(k.shape[1])
        return sdpa(q, k, v, **options)

    monkeypatch.setattr(attention_module.nn.functional, "scaled_dot_product_attention", counting)
    expected = attention_module.dense_attention(q, k, v)
    monkeypatch.setattr(attention_module, "flash_attention_obstacle", lambda *_: obstacle)
    found = attention_module.dense_attention(q, k, v)
    torch.testing.assert_close(found, expected)
    # Without as many values as keys FlashAttention does not serve.
    attention_module.dense_attention(q, k, v[..., :4])
    assert heads_of_k == [6, 6 if obstacle else 2, 6]
