"""Baselines on the same inputs: dense attention, FlexAttention, and others' sparse attention."""

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from lib.candidate import Candidate
from lib.formulas import attention_work, branch_work
from lib.recorder import Unavailable
from lib.shapes import AttentionShape
from trifocal.models.counts import compressed_keys, dense_keys, selected_keys, window_keys
from trifocal.ops import Geometry
from trifocal.testing.inputs import Inputs

DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
# Tokens and query blocks of FlexAttention's mask.
_FLEX_BLOCK = 128
_PROBE_TOKENS = 128
# Width of flash-msa's heads, and tokens of its blocks.
_MSA_SIZE = 128


def _imported(module: str, package: str, device: torch.device) -> tuple[ModuleType, str]:
    """A module of another package, and the package's name with its version."""
    if device.type != "cuda":
        raise Unavailable(f"{package} needs a CUDA device")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module), f"{package} {importlib.metadata.version(package)}"
    except (ImportError, RuntimeError) as error:
        raise Unavailable(f"needs `pip install {package}`: {error}") from error


def fa4_attention(inputs: Inputs, shape: AttentionShape) -> Candidate:
    """Causal dense attention by flash-attn-4."""
    module, version = _imported("flash_attn.cute", "flash-attn-4", inputs.q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor | tuple[Tensor, ...] = module.flash_attn_func(q, k, v, causal=True)
        return o[0] if isinstance(o, tuple) else o

    work = attention_work(shape, dense_keys(shape.tokens), shape.tokens, inputs.q.element_size())
    return Candidate(attend, (inputs.q, inputs.k_slc, inputs.v_slc), work, f"{version}, gradients by atomics")


def dense_attention(name: str, inputs: Inputs, shape: AttentionShape) -> Candidate:
    """Causal dense attention by one of SDPA's backends, with the keys and values of the selected branch.

    Keys are shared among the heads of a group by SDPA itself where the backend accepts that, else copied for every
    head inside the timed call; values are padded to the width of the keys where the backend asks for it.
    """
    backend = DENSE[name]
    device = inputs.q.device
    if name == "cudnn" and device.type != "cuda":
        raise Unavailable("cuDNN needs a CUDA device")
    forms = [(shared, padded) for padded in (False, True) for shared in (True, False)]
    refusals = []
    for shared, padded in forms:
        if padded and shape.head_dim <= shape.value_dim:
            continue
        attend = _dense(backend, shared, shape.head_dim - shape.value_dim if padded else 0)
        leaves = (inputs.q, inputs.k_slc, inputs.v_slc)
        try:
            with warnings.catch_warnings():
                # Why a backend refuses comes as warnings; the exception is enough.
                warnings.simplefilter("ignore")
                small = [x[:1, :_PROBE_TOKENS].detach().clone().requires_grad_() for x in leaves]
                o = attend(*small)
                torch.autograd.grad(o, small, torch.randn(o.shape, device=device, dtype=o.dtype))
        except RuntimeError as error:
            refusals.append(str(error).splitlines()[0])
            continue
        note = ["keys shared by enable_gqa" if shared else "keys copied for every head"]
        if padded:
            note.append(f"values padded from {shape.value_dim} to {shape.head_dim}")
        work = attention_work(shape, dense_keys(shape.tokens), shape.tokens, inputs.q.element_size())
        return Candidate(attend, leaves, work, ", ".join(note))
    raise Unavailable(f"SDPA's {name} backend refuses these inputs: {refusals[-1]}")


def _dense(backend: SDPBackend, shared: bool, padding: int) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        value_dim = v.shape[-1]
        if not shared:
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        if padding:
            v = pad(v, (0, padding))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return o.transpose(1, 2)[..., :value_dim]

    return attend


def flex_attention(inputs: Inputs, shape: AttentionShape, geometry: Geometry) -> Candidate:
    """Compiled FlexAttention over the sliding window; it skips no blocks of a choice that differs between queries."""
    if inputs.q.device.type != "cuda":
        raise Unavailable("compiled FlexAttention is timed only on CUDA devices")
    from torch.nn.attention import flex_attention as flex

    reach = geometry.window_size

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < reach)

    blocks = _block_mask(flex, shape.tokens, reach, visible, inputs.q.device)
    # Shapes are compiled in, and the number of compilations of one function is limited.
    torch.compiler.reset()
    compiled: Callable[..., Tensor] = torch.compile(flex.flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=blocks, enable_gqa=True).transpose(1, 2)

    work = attention_work(shape, window_keys(reach, shape.tokens), shape.tokens, inputs.q.element_size())
    return Candidate(attend, (inputs.q, inputs.k_win, inputs.v_win), work, "only the window branch")


def _block_mask(flex: Any, tokens: int, reach: int, visible: Callable[..., Tensor], device: torch.device) -> Any:
    """Which blocks of keys each block of queries sees in part and in full, without a mask of tokens by tokens."""
    count = -(-tokens // _FLEX_BLOCK)
    distance = torch.arange(count, device=device)[:, None] - torch.arange(count, device=device)
    nearest, farthest = distance * _FLEX_BLOCK - _FLEX_BLOCK + 1, distance * _FLEX_BLOCK + _FLEX_BLOCK - 1
    seen = (farthest >= 0) & (nearest < reach) & (distance >= 0)
    full = (nearest >= 0) & (farthest < reach)
    if tokens % _FLEX_BLOCK:
        full[-1] = False

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1).int()[None, None], order.int()[None, None]

    return flex.BlockMask.from_kv_blocks(
        *listed(seen & ~full), *listed(full), BLOCK_SIZE=_FLEX_BLOCK, mask_mod=visible, seq_lengths=(tokens, tokens)
    )


def fla_attention(inputs: Inputs, shape: AttentionShape, geometry: Geometry) -> Candidate:
    """fla-core's `parallel_nsa`, whose compressed blocks are the selection blocks: less work than the paper's."""
    fla, version = _imported("fla.ops.nsa.parallel", "fla-core", inputs.q.device)
    heads_per_group = shape.heads // shape.groups
    if heads_per_group < 16 or heads_per_group & (heads_per_group - 1):
        raise Unavailable(f"its groups have a power of two of at least 16 heads, here {heads_per_group}")
    size = geometry.selection_block_size
    # flash-attn-4 is not the flash-attn that it asks for.
    window = geometry.window_size if fla.flash_attn_func is not None else 0

    def attend(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        g_cmp, g_slc, g_win = gates.unbind(-1)
        o: Tensor = fla.parallel_nsa(
            q, k, v, g_cmp, g_slc, g_win,
            block_counts=geometry.num_selected_blocks, block_size=size, window_size=window,
        )  # fmt: skip
        return o

    coarse = Geometry(size, size, size, geometry.num_selected_blocks, 1, geometry.num_local_blocks, max(window, 1))
    compressed, selected = compressed_keys(coarse, shape.tokens), selected_keys(coarse, shape.tokens)
    keys = compressed + selected + (window_keys(window, shape.tokens) if window else 0)
    work = attention_work(shape, keys, shape.tokens, inputs.q.element_size())
    scoring = 2.0 * shape.batch * shape.heads * shape.head_dim * compressed
    note = f"{version}, does less: compression block = stride = {size}, one k and v for all branches"
    note += "" if window else ", no window (that needs flash-attn)"
    leaves = (inputs.q, inputs.k_slc, inputs.v_slc, inputs.gates)
    return Candidate(attend, leaves, work._replace(forward_flops=work.forward_flops + scoring), note)


def sfnsa_attention(inputs: Inputs, shape: AttentionShape, geometry: Geometry) -> Candidate:
    """SFNSA's `HFNSACore`, from keys, values and the gates' logits to the output."""
    module, version = _imported("flash_nsa", "flash-nsa", inputs.q.device)
    config = module.NSAConfig(
        qk_head_dim=shape.head_dim, v_head_dim=shape.value_dim, num_heads=shape.heads, num_kv_heads=shape.groups,
        kernel_size=geometry.compression_block_size, stride=geometry.compression_stride,
        block_size=geometry.selection_block_size, top_n=geometry.num_selected_blocks, window_size=geometry.window_size,
        num_init_blocks=geometry.num_initial_blocks, num_local_blocks=geometry.num_local_blocks,
    )  # fmt: skip
    core = module.HFNSACore(config)
    ends = torch.arange(shape.batch + 1, device=inputs.q.device, dtype=torch.int32) * shape.tokens

    def attend(*leaves: Tensor) -> Tensor:
        o: Tensor = core(*(x.flatten(0, 1) for x in leaves), ends)
        return o.unflatten(0, (shape.batch, shape.tokens))

    work = branch_work(shape, geometry, inputs.q.element_size())["end to end"]
    leaves = (inputs.q, inputs.k_slc, inputs.v_slc, inputs.gates)
    return Candidate(attend, leaves, work, f"{version}, one k and v for all branches")


def msa_attention(inputs: Inputs, shape: AttentionShape, geometry: Geometry) -> Candidate:
    """flash-msa: as many tokens a query, in blocks of 128 chosen by proxy heads, whose gradients backward has too."""
    module, version = _imported("flash_msa", "flash-msa", inputs.q.device)
    if (shape.head_dim, shape.value_dim) != (_MSA_SIZE, _MSA_SIZE) or shape.tokens % _MSA_SIZE:
        raise Unavailable(f"it takes D and V of {_MSA_SIZE} and tokens in multiples of that")
    blocks = min(geometry.selected_tokens, shape.tokens) // _MSA_SIZE
    q_proxy, k_proxy = (
        torch.randn(shape.batch, heads, shape.tokens, _MSA_SIZE, device=inputs.q.device, dtype=inputs.q.dtype)
        for heads in (shape.groups, 1)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = module.flash_msa_func(q_proxy, k_proxy, q, k, v, blocks * _MSA_SIZE, _MSA_SIZE**-0.5)[0]
        return o.unflatten(-1, (shape.heads, _MSA_SIZE))

    read = selected_keys(Geometry(_MSA_SIZE, _MSA_SIZE, _MSA_SIZE, blocks, 0, 1, 1), shape.tokens)
    work = attention_work(shape, read, shape.tokens, inputs.q.element_size())
    scores = 2.0 * shape.batch * shape.groups * _MSA_SIZE * dense_keys(shape.tokens)
    leaves = tuple(x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k_slc, inputs.v_slc))
    note = f"{version}, {blocks} blocks of {_MSA_SIZE}, its selector included; gradients by atomics, the selector's too"
    return Candidate(attend, leaves, work._replace(forward_flops=work.forward_flops + scores), note)
