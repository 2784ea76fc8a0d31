"""What chooses the blocks of a sparse layer, and the loss that teaches it.

| chooser | score of a block | learned |
|---|---|---|
| compressed | the compressed attention's probability in it | nothing for the choice's sake |
| index | the largest product of an index query and an index key in it | the index, by the loss of the choice |
| exact | the selected branch's own attention over the whole past in it | nothing: a control, slower than dense |
| random | drawn | nothing: a control |

The loss, `trifocal.ops.choice_loss`, changes the parameters of the index only: its input is detached. Trifocal's
trainer gives each layer the queries of a step. In any other training loop a model, or a layer outside of one, draws
them in each call and attaches the loss to its result, so that `backward` teaches an index wherever it is.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trifocal.nn.attention_base import INDEX_DIM, AttentionBase, ChoiceSample, RotaryTables
from trifocal.nn.compressor import MeanCompressor, MLPCompressor
from trifocal.nn.context import Chunk, TokenShard, chunks_of
from trifocal.nn.projection import fill, project, whole
from trifocal.nn.rope import rotate
from trifocal.ops import Documents, Geometry, compressed_attention, select_blocks, select_blocks_by_index
from trifocal.ops.choice_loss import Sample, choice_loss, draw_queries, hash_numbers
from trifocal.ops.dispatch import Backend, check_backend
from trifocal.ops.layout import num_compressed_slots
from trifocal.ops.validation import check_geometry

Chooser = Literal["compressed", "index", "exact"]
# The choice needs only the scores' log-sum-exp. Few columns of values are the least that the operation takes.
VALUE_COLUMNS = 16


class IndexHeads(nn.Module):
    """One index query for each KV head, and one index key that they share, of a layer's input [B, T, E]."""

    def __init__(self, dim: int, num_kv_heads: int) -> None:
        super().__init__()
        self.query_proj = nn.Linear(dim, num_kv_heads * INDEX_DIM, bias=False)
        self.key_proj = nn.Linear(dim, INDEX_DIM, bias=False)

    @property
    def maps(self) -> tuple[nn.Linear, nn.Linear]:
        """Maps of the layer's input, which gets no gradient from them, to queries and key."""
        return self.query_proj, self.key_proj


class ChoosingAttention(AttentionBase):
    """An attention layer that chooses blocks.

    Args:
        geometry: Block sizes, in tokens.
        chooser: `"compressed"`, `"index"` or `"exact"`.
        backend: `"auto"`, `"reference"` or `"triton"`; see `trifocal.ops.dispatch`.
        **sizes: Those of `AttentionBase`.

    Attributes:
        watcher: Called with the rotated queries and keys of the selected branch before each choice; for telemetry.
        choice_loss_weight: Weight of the loss that teaches an index outside of Trifocal's trainer; 0: none.
        choice_loss_stretch: One query of each stretch of this many tokens teaches it. In a model that of the first
            layer with an index holds for all.
        choice_figures: Loss and recall of the choice in the last call that taught the index outside of Trifocal's
            trainer, means over queries and groups, [2]; None before.
    """

    geometry: Geometry
    k_compressor: MeanCompressor | MLPCompressor

    def __init__(
        self, *, geometry: Geometry, chooser: Chooser = "compressed", backend: Backend = "auto", **sizes: Any
    ) -> None:
        check_geometry(geometry)
        super().__init__(geometry=geometry, **sizes)
        check_backend(backend)
        if chooser not in ("compressed", "index", "exact"):
            raise ValueError(f"chooser must be 'compressed', 'index' or 'exact', got {chooser!r}")
        self.chooser, self.backend = chooser, backend
        self.watcher: Callable[[Tensor, Tensor], None] | None = None
        self.choice_loss_weight, self.choice_loss_stretch = 1.0, 64
        self.choice_figures: Tensor | None = None
        self.index: IndexHeads | None = (
            IndexHeads(self.q_proj.in_features, self.num_kv_heads) if chooser == "index" else None
        )
        self.begin_index()

    @torch.no_grad()
    def begin_index(self) -> None:
        """Give the index its first weights, by `first_index`. Where queries and keys are normed, its own stay."""
        # On the meta device, which has no weights, the mean would import PyTorch's compiler, for seconds.
        if self.index is None or self.q_norm is not None or self.q_proj.weight.is_meta:
            return
        # On the CPU, so that every device gets the same bits; the keys of the selected branch, which teaches the index.
        keys = whole(self.k_proj.weight).cpu().chunk(self.branches)[self.branches // 2]
        begun = first_index(whole(self.q_proj.weight).cpu(), keys, self.num_kv_heads, self.head_dim)
        for linear, weight in zip(self.index.maps, begun, strict=True):
            fill(linear.weight, weight)

    @property
    def learns_choice(self) -> bool:
        """Whether a call now teaches the index: in training, unless its parameters are frozen or the weight is 0."""
        return self.training and torch.is_grad_enabled() and self.choice_loss_weight > 0 and self.trains_index

    @property
    def trains_index(self) -> bool:
        """Whether there is an index that is not frozen."""
        if self.index is None:
            return False
        # FSDP1 may leave no parameters here, only weights that are views of a flat one.
        weights = [getattr(linear, "weight", None) for linear in self.index.maps]
        return any(getattr(weight, "requires_grad", False) for weight in (*self.index.parameters(), *weights))

    def _draw(self, x: Tensor, positions: Tensor, padding: Tensor | None = None) -> ChoiceSample | None:
        """Queries that teach the index in a call outside of a model, none of padding [B, T]; None if nothing does."""
        if not self.learns_choice:
            return None
        fields = draw_queries(positions, len(x), 1, self.geometry, self.choice_loss_stretch)
        drawn = Sample(*(field[0] for field in fields))
        if padding is not None:
            drawn = drawn._replace(eligible=drawn.eligible & ~padding.gather(1, drawn.tokens))
        return (drawn,)

    def _on_rows(self, forward: Callable[..., Any], x: Tensor, key_padding_mask: Tensor, **given: Any) -> Tensor:
        drawn = self._draw(x, torch.arange(x.shape[1], device=x.device), key_padding_mask)
        if drawn is None:
            return super()._on_rows(forward, x, key_padding_mask, **given)
        output, figures = forward(self, x, choice_sample=drawn, **given)
        return self._attach(output, figures, drawn)

    def _result(
        self, output: Tensor, choice_sample: ChoiceSample | None, drawn: ChoiceSample | None, *states: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output, [B, T, E], with the figures of a given sample, or with the loss of drawn queries attached."""
        if choice_sample is not None:
            return output, self._choice_loss(choice_sample, *states)
        return output if drawn is None else self._attach(output, self._choice_loss(drawn, *states), drawn)

    def _attach(self, output: Tensor, figures: Tensor, drawn: ChoiceSample) -> Tensor:
        figures = figures / (drawn[0].eligible.sum() * self.num_kv_heads).clamp(min=1)
        if not torch.compiler.is_compiling():
            self.choice_figures = figures.detach()
        return attach_loss(output, self.choice_loss_weight * figures[0])

    def _project_all(
        self, x: Tensor, choice_sample: ChoiceSample | None, *others: nn.Linear
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor], Tensor | None]:
        """As `_project`, and unrotated index heads, [B, T, G + 1, Di]; None without an index."""
        if self.index is None:
            return *self._project(x, *others), None
        if choice_sample is None:
            # Nothing teaches the index: it gets no gradient, not even zeros, by which a weight would decay.
            with torch.no_grad():
                [heads] = project(x, (), apart=self.index.maps)
            return *self._project(x, *others), heads.unflatten(-1, (-1, INDEX_DIM))
        q, keys, values, [*outputs, heads] = self._project(x, *others, apart=self.index.maps)
        return q, keys, values, outputs, heads.unflatten(-1, (-1, INDEX_DIM))

    def _gathered(
        self, keys_and_values: list[Tensor], heads: Tensor | None, rotary: RotaryTables, local_tokens: TokenShard | None
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor] | None]:
        """Keys and values [B, S, G, *] of all tokens, from `local_tokens` where processes share them; and rotated index
        queries with the index keys of all tokens, from unrotated `heads`, or None: in one exchange.
        """
        index = None
        if heads is not None:
            assert rotary.index_tokens is not None
            index = split_heads(rotate(heads, *rotary.index_tokens))
        if local_tokens is None:
            return keys_and_values, index
        if index is None:
            return local_tokens.shard.gather(keys_and_values), None
        *keys_and_values, k_idx = local_tokens.shard.gather((*keys_and_values, index[1]))
        return keys_and_values, (index[0], k_idx)

    def _num_compressed(self, chunk: Chunk) -> int:
        """Compressed blocks, or slots of documents, of the tokens up to a chunk's end."""
        return num_compressed_slots(chunk.num_keys, self.geometry, chunk.documents)

    @torch.no_grad()
    def _chosen(self, q: Tensor, k: Tensor, index: tuple[Tensor, Tensor] | None, chunk: Chunk) -> Tensor | None:
        """The choice, [B, T, G, N], of a chunk's rotated q among rotated k up to its end; None: by compressed keys."""
        if self.watcher is not None:
            self.watcher(q, k)
        if index is not None:
            q_idx, k_idx = chunk.queries(index[0]), chunk.keys(index[1])
            return select_blocks_by_index(q_idx, k_idx, self.geometry, cu_seqlens=chunk.documents, backend=self.backend)
        if self.chooser == "exact":
            return choose_blocks(q, k, k.shape[1], tokens_as_blocks(self.geometry), chunk.documents, self.backend)
        return None

    def _choice_loss(
        self,
        choice_sample: ChoiceSample,
        q: Tensor,
        k: Tensor,
        index: tuple[Tensor, Tensor] | None,
        documents: Documents | None,
        local_tokens: TokenShard | None,
    ) -> Tensor:
        """The loss of the layer's queries, whose gradient reaches only the index, and their recall, summed: [2]."""
        if index is None:
            raise ValueError(f'a loss of the choice teaches an index, but the chooser is "{self.chooser}"')
        figures = []
        for chunk, sample in zip(chunks_of(q, documents, local_tokens), choice_sample, strict=True):
            student = {"q_idx": chunk.queries(index[0]), "k_idx": chunk.keys(index[1])}
            q_rows, keys = chunk.queries(q), chunk.keys(k)
            figures.append(
                choice_loss(q_rows, keys, sample, self.geometry, chunk.documents, backend=self.backend, **student)
            )
        return functools.reduce(torch.add, figures)


class _Attach(torch.autograd.Function):
    """Returns the first input; in backward the second gets a gradient of 1, whatever that of the first is."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, attached: Tensor) -> Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.type, ctx.device = attached.dtype, attached.device
        if torch.compiler.is_compiling():
            # A compiler moves to backward, in part, what no output of forward needs, and draws its queries again there.
            return result.masked_fill((attached > 0) & (attached < 0), 0)
        # Not a view: FSDP warns of those.
        return result.clone()

    @staticmethod
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return d_result, torch.ones((), dtype=ctx.type, device=ctx.device)


def attach_loss(result: Tensor, loss: Tensor) -> Tensor:
    """A result, unchanged, whose backward pass is also that of a loss, with a gradient of 1."""
    return _Attach.apply(result, loss)  # type: ignore[no-any-return, no-untyped-call]


def rotate_blocks(k_cmp: Tensor, rotary: RotaryTables) -> Tensor:
    """Compressed keys [B, C, G, D], rotated by the first tokens of their blocks."""
    assert rotary.blocks is not None
    return rotate(k_cmp, *rotary.blocks)


def first_index(q: Tensor, k: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The weights with which an index begins, so that it asks and answers as the attention that it is to follow.

    Each index query is the mean of its group's heads, and the index key that of all groups. Where heads have another
    width, the index takes the dimensions whose rotary frequencies are nearest to its own, and scores keep their size.
    Weights of queries [H * D, E] and of one branch's keys [G * D, E] give those of index queries [G * Di, E] and index
    key [Di, E].
    """
    pairs = torch.arange(INDEX_DIM // 2, device=q.device) * head_dim // INDEX_DIM
    columns = torch.cat((pairs, pairs + head_dim // 2))
    factor = (head_dim / INDEX_DIM) ** 0.25
    queries = q.unflatten(0, (num_kv_heads, -1, head_dim)).mean(1) * factor
    key = k.unflatten(0, (num_kv_heads, head_dim)).mean(0) * factor
    return queries[:, columns].flatten(0, 1), key[columns]


def choice_recall(model: nn.Module) -> dict[str, float]:
    """How well the indexes of a model choose, in the last training call outside of Trifocal's trainer.

    Args:
        model: A model with layers that choose by an index, or such a layer.

    Returns:
        For each layer that was taught, by its name in the model: the attention's mass in the chosen blocks, as a share
        of what the best choice holds, from 0 to 1; the mean over the sampled queries. Forced blocks do not count. A
        call whose queries choose all of their blocks teaches nothing; nor is the recall of a layer kept in compiled
        code, unless it is one of a model of Trifocal's.

    Reads from the device, so it waits for it.
    """
    found = {
        name: layer.choice_figures
        for name, layer in model.named_modules()
        if isinstance(layer, ChoosingAttention) and layer.choice_figures is not None
    }
    recalls = torch.stack([*found.values()])[:, 1].tolist() if found else []
    return {name: recall for name, recall in zip(found, recalls, strict=True) if recall}


def split_heads(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Index heads [B, T, G + 1, Di] as queries [B, T, G, Di] and keys [B, T, Di]."""
    return heads[:, :, :-1], heads[:, :, -1]


def tokens_as_blocks(geometry: Geometry) -> Geometry:
    """The geometry in which each token is a compressed block: its choice is by exact mass."""
    sizes = {**vars(geometry), "compression_block_size": 1, "compression_stride": 1}
    return Geometry(**sizes)


def choose_blocks(
    q: Tensor, k_cmp: Tensor, num_keys: int, geometry: Geometry, documents: Documents | None, backend: str
) -> Tensor:
    """The choice, [B, T, G, N], of rotated q [B, T, H, D] among rotated compressed keys without values [B, C, G, D]."""
    few = k_cmp[..., :VALUE_COLUMNS]
    _, lse = compressed_attention(q, k_cmp, few, geometry, num_keys=num_keys, cu_seqlens=documents, backend=backend)
    return select_blocks(q, k_cmp, lse, geometry, num_keys=num_keys, cu_seqlens=documents, backend=backend)


def random_blocks(positions: Tensor, geometry: Geometry, num_kv_heads: int, layer: int) -> Tensor:
    """The forced blocks, and others drawn uniformly from the rest of the candidates, without replacement.

    A hash of position, layer and KV head draws, so that the same call gives the same choice: in a forward pass that is
    made again, and after a resume.

    Positions are those of the queries in their document, [T]. Block indices are as of `trifocal.ops.select_blocks`,
    [1, T, G, N], int32, ascending; -1 pads.
    """
    total, first, last = geometry.num_selected_blocks, geometry.num_initial_blocks, geometry.num_local_blocks
    device, drawn = positions.device, total - first - last
    positions_T1 = positions.long()[:, None]
    own_T1 = positions_T1 // geometry.selection_block_size
    keys_TG = positions_T1 * num_kv_heads + torch.arange(num_kv_heads, device=device)
    numbers_TGN = hash_numbers(
        hash_numbers(keys_TG + (layer + 1) * 0x9E3779B9)[..., None] + torch.arange(drawn, device=device)
    )
    # Floyd's way to draw a subset: number i of the candidates up to one more each time, or else the newest of them.
    newest_T1 = own_T1 + 1 - first - last - drawn
    chosen: list[Tensor] = []
    for number_TG in numbers_TGN.unbind(-1):
        pick_TG = number_TG % (newest_T1.clamp(min=0) + 1)
        taken_TG = torch.zeros_like(pick_TG, dtype=torch.bool)
        for other_TG in chosen:
            taken_TG |= pick_TG == other_TG
        chosen.append(torch.where(taken_TG, newest_T1, pick_TG))
        newest_T1 = newest_T1 + 1
    forced = [torch.full_like(keys_TG, block) for block in range(first)]
    local = [(own_T1 - back).expand_as(keys_TG) for back in range(last)]
    blocks_TGN = torch.stack([*forced, *(first + pick_TG for pick_TG in chosen), *local], dim=-1).sort(-1).values
    # With no more candidates than n, all of them.
    all_N = torch.arange(total, device=device)
    own_T11 = own_T1[..., None]
    every_T1N = all_N.where(all_N <= own_T11, -1)
    return blocks_TGN.where(own_T11 >= total, every_T1N).to(torch.int32)[None]
