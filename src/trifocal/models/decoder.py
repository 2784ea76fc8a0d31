"""The decoder: embedding, blocks, norm, output projection, loss. How it is run in parallel is decided outside."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifocal.models.choice_teaching import ChoiceSamples, ChoiceTeaching
from trifocal.models.distillation import chunked_sums, distillation_sums
from trifocal.models.layers import draw_weights, make_blocks, run_block, run_blocks, share_places, wrap_blocks
from trifocal.models.model_config import ModelConfig
from trifocal.nn import RMSNorm
from trifocal.nn.attention_base import AttentionBase
from trifocal.nn.chooser import ChoosingAttention, attach_loss
from trifocal.nn.context import ContextShard, TokenShard
from trifocal.nn.projection import fill
from trifocal.ops import Documents
from trifocal.ops.choice_loss import sample_queries
from trifocal.ops.validation import check_rank, check_type

IGNORED_TARGET = -100
# Graphs of a layer that may be compiled in a process: dynamo's own limit of eight would end a training. Of all models:
# four types of layers, in rows and packed, recomputed or not, are sixteen.
_COMPILED_KINDS = 64


class Distillation(NamedTuple):
    """What a model learns from a frozen one, of the same vocabulary and on the same device, in a training step; `total`
    gets the divergence of each pass added, summed over its targets, nats, a scalar in fp32.
    """

    frozen: "DecoderLM"
    text_weight: float
    total: Tensor


class DecoderLM(nn.Module):
    """A decoder-only language model with sparse or dense attention.

    Weights are meant to stay in fp32; run the model under `torch.autocast` for bf16 arithmetic. Norms, rotary
    positions, gates, softmax and loss stay in fp32 there, and so does the residual stream.

    Args:
        config: Sizes and choices.

    Attributes:
        context: This process's place among those that share each sequence of a loss; None where each has its own.
            Without targets, a forward pass is of whole sequences in each process.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_type("config", config, ModelConfig)
        self.config = config
        self.context: ContextShard | None = None
        # Initialised in `init_weights`: on the meta device that would import PyTorch's compiler, for a second.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.dim), freeze=False)
        self.blocks = make_blocks(config)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self._checkpointed_layers = range(0)
        self._compiles = False
        self._compile()
        self.init_weights()

    def __getstate__(self) -> dict[str, Any]:
        # Compiled code is neither copied nor pickled: a copy compiles its own when it first runs. Nor does a copy share
        # its sequences with other processes.
        left = ("_run_block", "_run_end", "_draw", "_share", "_sums")
        return {name: value for name, value in super().__getstate__().items() if name not in left} | {"context": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile()
        self._wrap()

    def _compile(self) -> None:
        """Compile one function for all blocks, and those around them, where asked for."""

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            if not self._compiles:
                return function
            return functools.partial(run_compiled, torch.compile(function, fullgraph=True, dynamic=False))

        self._run_block, self._run_end = compiled(run_block), compiled(run_end)
        self._draw, self._share = compiled(sample_queries), compiled(share_places)
        self._sums = compiled(distillation_sums)

    def _wrap(self) -> None:
        wrap_blocks(self.blocks, self._checkpointed_layers, self._run_block)

    def init_weights(self, seed: int | torch.Generator | None = None) -> None:
        """Draw all weights anew; of a model that FSDP2 has sharded in every process.

        Matrices are normal with a variance of 1 / inputs, so that their output for a normed token has a variance of 1.
        For matrices that write into the residual stream it is divided by `2 * num_layers`, so that the stream's
        variance does not grow with depth; norms behind attention and MLP would undo that. An embedding that is not
        tied starts at a standard deviation of 0.02, so that Adam's first steps change it visibly. So do the positions
        and the output of a learned compressor, which starts as the mean. Norms start at 1, biases at 0.

        The branches of sparse attention start with the same keys, which become different as they learn. So from the
        first step on, a block is chosen by the keys that are then read in it. An index starts as the mean of these keys
        and of each group's queries; where they are normed it is drawn.

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
            draw_weights(drawn, name, self.config, generator)
            fill(parameter, drawn)
        for layer in self.attention_layers():
            if isinstance(layer, ChoosingAttention):
                layer.begin_index()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cu_seqlens: Tensor | Documents | None = None,
        teaching: ChoiceTeaching | None = None,
        distillation: Distillation | None = None,
    ) -> Tensor:
        """Compute logits, or the loss.

        Args:
            tokens: [B, T], int64 or int32. With targets and a `context`, the local ones: `ContextShard.local_tokens`.
            targets: The token that should follow each position, [B, T], int64; -100 where there is none.
            cu_seqlens: Boundaries of packed documents, [documents + 1], with B == 1; nothing crosses them. Those of all
                tokens in any case.
            teaching: What the choice of blocks learns from these tokens; with targets. The result is the same with and
                without it; its backward pass then teaches the choice too.
            distillation: The frozen model that these tokens teach to follow; with targets. The result stays the loss on
                the text; its backward pass is that of the divergence and the weighted loss.

        Returns:
            Logits, [B, T, vocab_size]; or with targets their mean loss in nats, a scalar in fp32 (fp64 for an
            fp64 model), 0 if every target is -100. With a `context`, this process's share of it; the shares add up.

        Raises:
            ValueError: If shapes do not fit; the message names them.
        """
        if targets is None:
            return self.logits(self.hidden_states(tokens, cu_seqlens=cu_seqlens))
        _check_tokens(tokens, targets)
        context = self.context
        num_tokens = tokens.shape[1] * (1 if context is None else context.size)
        documents = self._documents(cu_seqlens, num_tokens, tokens.device)
        choice_samples = None
        if teaching is None and context is None:
            choice_samples = ChoiceSamples.of_call(self.attention_layers(), tokens, documents)
        counted = (targets != IGNORED_TARGET).sum()
        local_tokens, taught_tokens = None, tokens
        if context is not None:
            local_tokens = TokenShard.of(context, tokens, documents)
            # All tokens draw the samples. Both of a process's chunks have its count, so that the sum is twofold.
            wanted = (counted.expand(1, 2), *(() if teaching is None else (tokens,)))
            counts, *gathered = context.gather(wanted)
            counted, [taught_tokens] = counts.sum() // 2, gathered or [tokens]
        if teaching is not None:
            positions = torch.arange(num_tokens, device=tokens.device) if documents is None else documents.positions
            choice_samples = ChoiceSamples.of_step(
                self.attention_layers(), teaching, taught_tokens, positions, local_tokens, self._draw
            )
        x = self._last_residual(tokens, documents, choice_samples, local_tokens)
        counted = counted.clamp(min=1)
        if distillation is None:
            end = self._run_end if torch.is_grad_enabled() else run_end
            loss = end(self.norm, self.head, self.embedding.weight, x, targets, counted)
        else:
            loss = self._distilled_loss(distillation, x, tokens, targets, counted, documents, local_tokens)
        if choice_samples is None:
            return loss
        if teaching is None:
            choice_loss = choice_samples.call_loss()
            # Its gradient is scaled as that of the loss is.
            return loss + (choice_loss - choice_loss.detach())
        figures = choice_samples.figures()
        teaching.totals.add_(figures.detach())
        return attach_loss(loss, figures[:, 0].sum())

    def _distilled_loss(
        self,
        distillation: Distillation,
        x: Tensor,
        tokens: Tensor,
        targets: Tensor,
        counted: Tensor,
        documents: Documents | None,
        local_tokens: TokenShard | None,
    ) -> Tensor:
        """The loss on the text from the last layer's output, with the backward pass of what is taught."""
        frozen, weight = distillation.frozen, distillation.text_weight
        with torch.no_grad():
            states = frozen.norm(frozen._last_residual(tokens, documents, local_tokens=local_tokens))
        divergence, text = chunked_sums(
            self.norm(x).flatten(0, 1),
            self._output_weight(),
            states.flatten(0, 1),
            frozen._output_weight().detach(),
            targets.flatten(),
            trains_text=weight > 0,
            sums=self._sums,
        )
        distillation.total.add_(divergence.detach())
        taught = (divergence + weight * text if weight else divergence) / counted
        return text.detach() / counted + (taught - taught.detach())

    def hidden_states(self, tokens: Tensor, *, cu_seqlens: Tensor | Documents | None = None) -> Tensor:
        """The normed output of the last block, [B, T, E]; arguments and errors as in `forward`."""
        _check_tokens(tokens, None)
        documents = self._documents(cu_seqlens, tokens.shape[1], tokens.device)
        choice_samples = ChoiceSamples.of_call(self.attention_layers(), tokens, documents)
        hidden = self.norm(self._last_residual(tokens, documents, choice_samples))
        return hidden if choice_samples is None else attach_loss(hidden, choice_samples.call_loss())

    def _documents(
        self, cu_seqlens: Tensor | Documents | None, num_tokens: int, device: torch.device
    ) -> Documents | None:
        if cu_seqlens is None:
            return None
        documents = Documents.of(cu_seqlens, num_tokens, device)
        # `Documents` have the room that they were made with.
        return documents if not self._compiles or isinstance(cu_seqlens, Documents) else documents.with_room()

    def _last_residual(
        self,
        tokens: Tensor,
        documents: Documents | None,
        choice_samples: ChoiceSamples | None = None,
        local_tokens: TokenShard | None = None,
    ) -> Tensor:
        x = self.embedding(tokens)
        share = self._share if torch.is_grad_enabled() and local_tokens is None else share_places
        for residual in run_blocks(
            self.blocks,
            self.config,
            x,
            documents,
            choice_samples=choice_samples,
            local_tokens=local_tokens,
            share=share,
        ):
            x = residual
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states [..., E] to logits [..., vocab_size]."""
        return project_out(self.head, self.embedding.weight, hidden)

    def _output_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def compile_training(self) -> None:
        """Compile each layer, and the loss, when training first runs them; passes without gradients stay eager.

        The layers are alike, so that one of them is compiled for all: the start takes a few seconds at any depth.
        Lengths of rows and packs are compiled in; another one compiles anew, as do many more documents in a pack, and a
        copy of the model.
        """
        self._compiles = True
        self._compile()
        self._wrap()

    def set_activation_checkpointing(self, first: int, last: int) -> None:
        """Recompute layers `first` up to, not including, `last` in backward instead of keeping their activations.

        The chosen blocks and, on the Triton backend, the branches' outputs are kept. `(0, 0)` turns it off.
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


def meta_model(config: ModelConfig) -> DecoderLM:
    """A model without weights, on the meta device: none are drawn, which for a billion takes many seconds."""
    with torch.device("meta"):
        return DecoderLM(config)


def project_out(head: nn.Module | None, embedding: Tensor, hidden: Tensor) -> Tensor:
    """Logits of hidden states, by the head itself, which may have an adapter or other weights, or a tied embedding."""
    return nn.functional.linear(hidden, embedding) if head is None else head(hidden)


def run_compiled(compiled: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Run what `torch.compile` made, which may compile anew for `_COMPILED_KINDS` kinds of arguments."""
    # Here: from PyTorch 2.12 on, each thread has a limit of its own.
    if not torch.compiler.is_compiling() and torch._dynamo.config.recompile_limit < _COMPILED_KINDS:
        torch._dynamo.config.recompile_limit = _COMPILED_KINDS
    return compiled(*given, **named)


def run_end(
    norm: nn.Module, head: nn.Module | None, embedding: Tensor, x: Tensor, targets: Tensor, counted: Tensor
) -> Tensor:
    """The loss from the last layer's output: cross-entropy in fp32 at least, summed, divided by `counted` targets."""
    logits = project_out(head, embedding, norm(x))
    exact = torch.promote_types(logits.dtype, torch.float32)
    # Not `cross_entropy`: under autocast it would first make a full-precision copy of the logits.
    log_p = nn.functional.log_softmax(logits.flatten(0, 1), dim=-1, dtype=exact)
    return nn.functional.nll_loss(log_p, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum") / counted
