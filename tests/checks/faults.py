"""Faults that were really made once, to be put into healthy code: each has to make its check fail."""

import types
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from trifocal.checks import training_checks
from trifocal.models import DecoderLM
from trifocal.nn import Block, NSAttention
from trifocal.nn import attention as nn_attention
from trifocal.ops import DecodeBatch, compressed_attention, nsa_attention, select_blocks, window_attention


def masked_attention(q, k, v, mask):
    """Plain attention under a mask [T, S]; the material that the faults are made of."""
    heads = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(heads, 2), v.repeat_interleave(heads, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhts,bshv->bthv", p, v)


def distances(q, k):
    """Position of each query less that of each key, [T, S]."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    queries = torch.arange(num_keys - num_queries, num_keys)
    return queries[:, None] - torch.arange(num_keys)


def replacing_window(window):
    """`nsa_attention` with another window branch: `window(q, k, v, w)`."""

    def attention(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, geometry, **rules):
        dropped = torch.cat((gates[..., :2], torch.zeros_like(gates[..., 2:])), -1)
        rest = nsa_attention(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, dropped, geometry, **rules)
        return rest + gates[..., 2:] * window(q, k_win, v_win, geometry.window_size)

    return attention


def leaking_window(q, k, v, window_size):
    """The window was cut before it was sliced: a query sees the token after it."""
    distance = distances(q, k)
    return masked_attention(q, k, v, (distance >= -1) & (distance < window_size))


class LostGradient(torch.autograd.Function):
    """Passes values on and halves the gradient of one tensor."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream / 2


def halved_value_gradient(q, k_cmp, v_cmp, k_slc, v_slc, *rest, **rules):
    """Right output, wrong gradient of one input."""
    return nsa_attention(q, k_cmp, v_cmp, k_slc, LostGradient.apply(v_slc), *rest, **rules)


def copies_per_query(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, geometry, **rules):
    """The selected branch gathers every query's keys and values and keeps them for backward."""
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, geometry)
    chosen = select_blocks(q, k_cmp, lse, geometry).long()
    size, num_keys = geometry.selection_block_size, k_slc.shape[1]
    tokens = (chosen.clamp(min=0)[..., None] * size + torch.arange(size)).flatten(-2).clamp(max=num_keys - 1)
    seen = tokens <= torch.arange(num_keys)[:, None, None]
    seen &= (chosen >= 0).repeat_interleave(size, -1)
    group = torch.arange(k_slc.shape[2])[:, None]
    heads = q.shape[2] // k_slc.shape[2]
    k, v = (x[0, tokens[0], group] for x in (k_slc, v_slc))  # [T, G, n * l', D]
    scores = torch.einsum("tgrd,tgsd->tgrs", q[0].unflatten(1, (-1, heads)), k) / q.shape[-1] ** 0.5
    p = scores.masked_fill(~seen[0, :, :, None], -torch.inf).softmax(-1)
    o_slc = torch.einsum("tgrs,tgsv->tgrv", p, v).flatten(1, 2)[None]
    o_win = window_attention(q, k_win, v_win, geometry.window_size)
    return (torch.stack((o_cmp, o_slc, o_win), -2) * gates[..., None]).sum(-2)


def with_attention(model, function):
    """Let the sparse layers of one model call another function; other models are left alone."""
    for layer in model.attention_layers():
        code = NSAttention.forward
        namespace = dict(vars(nn_attention), nsa_attention=function)
        layer.forward = types.MethodType(
            types.FunctionType(code.__code__, namespace, code.__name__, code.__defaults__, code.__closure__), layer
        )
        layer.forward.__func__.__kwdefaults__ = code.__kwdefaults__
    return model


def late_bound_residual(self, tokens, documents, choice_samples=None, local_tokens=None):
    """`checkpoint(lambda x: block(x), x)` in a loop: every layer is computed again as the last one."""
    x = self.embedding(tokens)
    for block in self.blocks:
        if self._checkpointed_layers:
            x = checkpoint(lambda inp: Block.forward(block, inp), x, use_reentrant=False)  # noqa: B023
        else:
            x = block(x)
    return x


def late_bound_models():
    """The fault in all models of a process that a check starts."""
    DecoderLM._last_residual = late_bound_residual


def before_the_worker(monkeypatch, statement):
    """Let each process that `compare_processes` starts run a statement first."""
    run_processes = training_checks.run_processes

    def run(arguments, *rest, **options):
        flag, code = arguments
        return run_processes([flag, f"{statement}; {code}"], *rest, **options)

    monkeypatch.setattr(training_checks, "run_processes", run)


def at_other_lengths(function, change):
    """Decoding with lengths that are changed: `decode_attention` or `decode_dense_attention`."""

    def attention(*arguments, **rules):
        arguments = [replace(x, lengths=change(x.lengths)) if isinstance(x, DecodeBatch) else x for x in arguments]
        return function(*arguments, **rules)

    return attention
