"""The loss of a model that follows a frozen one: the divergence of their next tokens, in bounded memory."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Logits of one model that exist at a time: 128 MiB in fp32, of which a chunk needs about five.
_LOGITS_AT_ONCE = 1 << 25


def distillation_sums(
    hidden: Tensor, weight: Tensor, frozen: Tensor, frozen_weight: Tensor, targets: Tensor, *, trains_text: bool
) -> Tensor:
    """KL divergence of a model from the frozen one, and cross-entropy with the targets, each summed over the targets
    that count: [2], fp32 at least.

    Normed hidden states are [N, E] of the model and [N, F] of the frozen one, output weights [V, E] and [V, F], targets
    [N], -100 where none counts. Only the divergence has a gradient, unless `trains_text`.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    log_q = nn.functional.log_softmax(nn.functional.linear(hidden, weight), dim=-1, dtype=exact)
    with torch.no_grad():
        log_p = nn.functional.log_softmax(nn.functional.linear(frozen, frozen_weight), dim=-1, dtype=exact)
    divergence = nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    text = nn.functional.nll_loss(log_q if trains_text else log_q.detach(), targets, reduction="sum")
    return torch.stack((divergence.masked_fill(targets < 0, 0.0).sum(), text))


def chunked_sums(
    hidden: Tensor,
    weight: Tensor,
    frozen: Tensor,
    frozen_weight: Tensor,
    targets: Tensor,
    *,
    trains_text: bool,
    sums: Callable[..., Tensor] = distillation_sums,
) -> Tensor:
    """`distillation_sums` of a chunk of tokens after the other, made again in backward: in bounded memory."""
    # A power of two divides the usual lengths, so that all chunks are alike.
    rows = 1 << max(1, _LOGITS_AT_ONCE // weight.shape[0]).bit_length() - 1
    parts = zip(hidden.split(rows), frozen.split(rows), targets.split(rows), strict=True)
    found = [
        checkpoint(
            sums,
            *(own, weight, theirs, frozen_weight, wanted),
            trains_text=trains_text,
            use_reentrant=False,
            # Nothing is drawn, and a CUDA graph could not read the random state.
            preserve_rng_state=False,
        )
        for own, theirs, wanted in parts
    ]
    return torch.stack(found).sum(0)
