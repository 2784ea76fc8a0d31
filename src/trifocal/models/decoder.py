"""The decoder: embedding, blocks, norm, output projection, loss. How it is run in parallel is decided outside."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trifocal.models.model_config import ModelConfig
from trifocal.nn import (
    Block,
    DenseAttention,
    NSAttention,
    RMSNorm,
    SelectedAttention,
    WindowAttention,
)
from trifocal.nn.attention_base import AttentionBase
from trifocal.nn.random_selection import random_blocks
from trifocal.ops import Documents
from trifocal.ops.validation import check_rank

IGNORED_TARGET = -100
SMALL_STD = 0.02


class DecoderLM(nn.Module):
    """A decoder-only language model with sparse or dense attention.

    Weights are meant to stay in fp32; run the model under `torch.autocast` for bf16 arithmetic. Norms, rotary
    positions, gates, softmax and loss stay in fp32 there, and so does the residual stream.

    Args:
        config: Sizes and choices.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            Block(_attention(config, kind), config.dim, config.mlp_dim, config.norm_eps, config.mlp_bias)
            for kind in config.attention_of_layers
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self._checkpointed_layers = range(0)
        self._compiles = False
        self._compile()
        self.init_weights()

    def __getstate__(self) -> dict[str, Any]:
        # Compiled code is neither copied nor pickled: a copy compiles its own when it first runs.
        return {name: value for name, value in super().__getstate__().items() if name not in ("_run_block", "_run_end")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile()
        self._wrap()

    def _compile(self) -> None:
        """Compile one function for all blocks, and one for the loss, where asked for."""
        self._run_block: Callable[..., Tensor] = run_block
        self._run_end: Callable[..., Tensor] = run_end
        if self._compiles:
            self._run_block = torch.compile(run_block, fullgraph=True, dynamic=False)
            self._run_end = torch.compile(run_end, fullgraph=True, dynamic=False)

    def _wrap(self) -> None:
        """Wrap the forward of compiled and checkpointed blocks. Hooks, FSDP's among them, stay outside of it."""
        for index, block in enumerate(self.blocks):
            block.__dict__.pop("forward", None)
            checkpointed = index in self._checkpointed_layers
            if checkpointed or self._compiles:
                block.forward = functools.partial(train_block, self._run_block, checkpointed, block.forward)

    def init_weights(self, seed: int | torch.Generator | None = None) -> None:
        """Draw all weights anew.

        Matrices are normal with a variance of 1 / inputs, so that their output for a normed token has a variance of 1.
        For matrices that write into the residual stream it is divided by `2 * num_layers`, so that the stream's
        variance does not grow with depth. An embedding that is not tied starts at a standard deviation of 0.02, so that
        Adam's first steps change it visibly. So do the positions and the output of a learned compressor, which starts
        as the mean. Norms start at 1, biases at 0.

        Args:
            seed: A number, which gives the same weights on every device; or a generator; or None for PyTorch's
                global one.
        """
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        device = "cpu" if generator is None else generator.device
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device=device)
            if name.endswith("norm.weight"):
                drawn.fill_(1.0)
            elif name.endswith(".bias"):
                drawn.zero_()
            else:
                drawn.normal_(std=self._initial_std(name, parameter), generator=generator)
            with torch.no_grad():
                parameter.copy_(drawn)

    def _initial_std(self, name: str, matrix: Tensor) -> float:
        if name.endswith(("_compressor.positions", "_compressor.down_proj.weight")):
            return SMALL_STD
        if name == "embedding.weight" and not self.config.tie_embeddings:
            return SMALL_STD
        std = matrix.shape[1] ** -0.5
        if name.endswith((".attention.o_proj.weight", ".mlp.down_proj.weight")):
            std /= (2 * self.config.num_layers) ** 0.5
        return std

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cu_seqlens: Tensor | Documents | None = None,
    ) -> Tensor:
        """Compute logits, or the loss.

        Args:
            tokens: [B, T], int64 or int32.
            targets: The token that should follow each position, [B, T], int64; -100 where there is none.
            cu_seqlens: Borders of packed documents, [documents + 1], with B == 1; nothing crosses them.

        Returns:
            Logits, [B, T, vocab_size]; or with targets their mean loss in nats, a scalar in fp32 (fp64 for an
            fp64 model), 0 if every target is -100.

        Raises:
            ValueError: If shapes do not fit; the message names them.
        """
        _check_tokens(tokens, targets)
        x = self._last_residual(tokens, cu_seqlens)
        if targets is None:
            return self.logits(self.norm(x))
        end = self._run_end if torch.is_grad_enabled() else run_end
        return end(self.norm, self._output_weight(), x, targets)

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        cu_seqlens: Tensor | Documents | None = None,
    ) -> Tensor:
        """The normed output of the last block, [B, T, E]; arguments and errors as in `forward`."""
        _check_tokens(tokens, None)
        return self.norm(self._last_residual(tokens, cu_seqlens))

    def _last_residual(self, tokens: Tensor, cu_seqlens: Tensor | Documents | None) -> Tensor:
        documents = cu_seqlens
        if isinstance(documents, Tensor):
            # Checked before the copy: borders on the host need no wait for a GPU.
            documents = Documents.from_cu_seqlens(documents, tokens.shape[1]).to(tokens.device)

        x = self.embedding(tokens)
        layers = self.attention_layers()
        # A layer with compressed blocks has the tables of the others too.
        first = next((layer for layer in layers if layer.geometry is not None), layers[0])
        rotary = first.rotary_tables(x, documents)
        choices = self._random_choices(x, documents)
        for index, block in enumerate(self.blocks):
            given = {"selected_blocks": choices[index]} if index in choices else {}
            x = block(x, cu_seqlens=documents, rotary=rotary, **given)
        return x

    def _random_choices(self, x: Tensor, documents: Documents | None) -> dict[int, Tensor]:
        """The blocks of each layer that draws them at random, [B, T, G, N]."""
        config = self.config
        if config.selection == "importance":
            return {}
        if documents is not None:
            positions = documents.positions
        else:
            positions = torch.arange(x.shape[1], device=x.device)
        return {
            layer: random_blocks(positions, config.geometry, config.num_kv_heads, layer).expand(x.shape[0], -1, -1, -1)
            for layer, kind in enumerate(config.attention_of_layers)
            if kind in ("nsa", "selected")
        }

    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states [..., E] to logits [..., vocab_size]."""
        return nn.functional.linear(hidden, self._output_weight())

    def _output_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def compile_training(self) -> None:
        """Compile each layer, and the loss, when training first runs them; passes without gradients stay eager.

        The layers are alike, so that one of them is compiled for all: the start takes a few seconds at any depth.
        Lengths are compiled in; another one compiles anew. So does a copy of the model.
        """
        self._compiles = True
        self._compile()
        self._wrap()

    def set_activation_checkpointing(self, first: int, last: int) -> None:
        """Recompute layers `first` up to, not including, `last` in backward instead of keeping their activations.

        The chosen blocks and, on the Triton backend, the branches' outputs are kept. `(0, 0)` turns it off.

        Raises:
            ValueError: If the range does not lie within the layers.
        """
        if not 0 <= first <= last <= len(self.blocks):
            raise ValueError(
                f"checkpointed layers must satisfy 0 <= first <= last <= {len(self.blocks)}, got {first}, {last}"
            )
        self._checkpointed_layers = range(first, last)
        self._wrap()

    def attention_layers(self) -> list[AttentionBase]:
        """The attention of each layer, first to last."""
        return [block.attention for block in self.blocks]  # type: ignore[misc]

    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Continue each row of prompts [B, T]; options and errors as of `trifocal.generate.generate`."""
        from trifocal.generate import generate

        return generate(self, tokens, max_new_tokens, **options)


def _check_tokens(tokens: Tensor, targets: Tensor | None) -> None:
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens must be a tensor [B, T], got {type(tokens).__name__}")
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"tokens must be [B, T] of int64 or int32 and not empty, got {list(tokens.shape)} of {tokens.dtype}"
        )
    if targets is None:
        return
    check_rank("targets", targets, "[B, T]")
    if targets.shape != tokens.shape:
        raise ValueError(f"targets must have the shape of tokens, {list(tokens.shape)}, got {list(targets.shape)}")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be of int64, got {targets.dtype}")


def train_block(
    run: Callable[..., Tensor],
    checkpointed: bool,
    forward: Callable[..., Tensor],
    x: Tensor,
    **given: Any,
) -> Tensor:
    """A wrapped block: `run`, which is `run_block` or compiled from it, in training; else the block's own forward."""
    if not torch.is_grad_enabled():
        return forward(x, **given)
    return run(checkpointed, forward, x, **given)


def run_block(checkpointed: bool, forward: Callable[..., Tensor], x: Tensor, **given: Any) -> Tensor:
    """One layer in training, by its `Block.forward`; `checkpointed` computes it again in backward."""
    if not checkpointed:
        return forward(x, **given)
    # Nothing in a block is random, so no random state is kept, which a CUDA graph could not read.
    return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False, context_fn=_save_attention, **given)


def run_end(norm: nn.Module, output_weight: Tensor, x: Tensor, targets: Tensor) -> Tensor:
    """The loss from the last layer's output."""
    return _mean_loss(nn.functional.linear(norm(x), output_weight), targets)


# Non-reentrant checkpointing that keeps the results of some operators. The choice, because one made again costs as
# much as the first and in another precision might turn out otherwise: 4 bytes a slot. The branches' outputs and
# log-sum-exps, where the kernels make them: 2V + 4 bytes a head each, together 1.5 times the layer's input at H*V = E.
# They give back the most time for their bytes. At 65,536 tokens and 64/4 heads of 128, an H200 saves for each KiB
# kept about 380 ns with the choice, 14 with the selected, 8 with the compressed branch (in proportion to the length)
# and 3 with the window; the products of an MLP on 768 dims would save about 1.
_save_attention = functools.partial(
    create_selective_checkpoint_contexts,
    [
        torch.ops.trifocal.select_blocks.default,
        torch.ops.trifocal.compressed_attention.default,
        torch.ops.trifocal.selected_attention.default,
        torch.ops.trifocal.window_attention.default,
    ],
)


def _attention(config: ModelConfig, kind: str) -> AttentionBase:
    sizes: dict[str, Any] = {
        "dim": config.dim,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "value_dim": config.value_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "qk_norm": config.qk_norm,
        "norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "o_bias": config.o_bias,
    }
    if kind == "dense":
        return DenseAttention(**sizes)
    if kind == "window":
        window = config.sliding_window or config.geometry.window_size
        return WindowAttention(window_size=window, backend=config.backend, **sizes)
    if kind == "selected":
        return SelectedAttention(geometry=config.geometry, backend=config.backend, **sizes)
    return NSAttention(
        **sizes,
        geometry=config.geometry,
        compressor=config.compressor,
        gate=config.gate,
        shared_kv=config.shared_kv,
        backend=config.backend,
    )


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the targets that count, in fp32 at least."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    # Not `cross_entropy`: under autocast it would first make a full-precision copy of the logits.
    log_p = nn.functional.log_softmax(logits.flatten(0, 1), dim=-1, dtype=exact)
    total = nn.functional.nll_loss(log_p, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
    return total / (targets != IGNORED_TARGET).sum().clamp(min=1)
