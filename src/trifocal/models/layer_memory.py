"""Sizes of what one decoder block keeps and needs while a step runs; `trifocal.models.memory` adds them up.

All sizes are bytes for one micro-batch. "Kept" tensors live from forward to backward, "working" ones only in one pass.

`torch.compile` sees a layer's forward and backward together. It keeps the inputs of backward's products and operators,
as eager does, and recomputes tensors that only elementwise kernels read. In bytes a token, bf16:

| | eager | compiled | because |
|---|---|---|---|
| SiLU's result | 2 * mlp_dim | 0 | the kernel that needs it makes it from the gate's projection |
| between attention and MLP | 4 * dim | 2 * dim | the residual stream is the layer's input and the attention's output |
| a norm's scaled input, on a CPU | 4 * dim | 0 | it is made from the input and its scale |

So it is in PyTorch 2.11 and 2.13; `tests/models/test_compiled_memory.py` counts it in the graphs of the one that is
installed. The reference is an exception, for the worse: the compiler recognises what its backward makes again on
purpose, and keeps a tile of probabilities a branch instead.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from trifocal.models.kernel_memory import KernelMemory, kernel_memory
from trifocal.models.model_config import ModelConfig
from trifocal.nn.compressor import MLPCompressor
from trifocal.nn.gate import NUM_BRANCHES
from trifocal.nn.selected_attention import VALUE_COLUMNS

FP32, INT32, BF16 = 4, 4, 2


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The settings, besides the model, that decide a step's memory.

    Attributes:
        sequence_length: Tokens of a sequence, T.
        micro_batch_size: Sequences of a forward and backward pass, B.
        micro_batches: Passes of a step in this process.
        precision: Of the matrix products.
        checkpointed_layers: Half-open range of layers that recompute their activations.
        compiled: Whether layers are compiled, each forward and backward pass as a whole.
        device: Where it runs; a norm keeps more on a CPU.
        backend: What runs the sparse attention, resolved.
        packed: Whether the rows of a micro-batch may be passed as one row of documents: the reference's tiles then
            have the side B * T.
        mode: How the model is spread over processes.
        shards: Processes that share one copy of the model under fsdp and hsdp.
        reshard_after_forward: Whether those give a block's weights back after its forward pass.
        cuda_graphs: Whether micro-batches are recorded: gradients then stay in one place.
        workspace_bytes: Taken by libraries from the same allocator.
    """

    sequence_length: int
    micro_batch_size: int
    micro_batches: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpointed_layers: tuple[int, int] = (0, 0)
    compiled: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["reference", "triton"] = "reference"
    packed: bool = False
    mode: Literal["none", "ddp", "fsdp", "hsdp"] = "none"
    shards: int = 1
    reshard_after_forward: bool = True
    cuda_graphs: bool = False
    workspace_bytes: int = 0


@dataclass(frozen=True)
class LayerMemory:
    """One block of a model under a setup.

    Args:
        config: The model, with one attention in all layers.
        setup: How it is trained.
    """

    config: ModelConfig
    setup: TrainingSetup

    @property
    def tokens(self) -> int:
        """n, tokens of the micro-batch."""
        return self.setup.micro_batch_size * self.setup.sequence_length

    @property
    def item(self) -> int:
        """Bytes of a number in the type of the matrix products."""
        return BF16 if self.setup.precision == "bf16" else FP32

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of the batch as the model sees it, and their length."""
        if self.setup.packed:
            return 1, self.tokens
        return self.setup.micro_batch_size, self.setup.sequence_length

    @property
    def residual(self) -> int:
        """The residual stream, and its gradient."""
        return FP32 * self.tokens * self.config.dim

    @property
    def norm(self) -> int:
        """Tensors that a norm keeps besides its input: the scale of each token and, on a CPU, the scaled input."""
        scaled = self.config.dim if self.setup.device == "cpu" and not self.setup.compiled else 0
        return FP32 * self.tokens * (1 + scaled)

    @property
    def normed(self) -> int:
        """A norm's result, in the type of the products."""
        return self.item * self.tokens * self.config.dim

    @property
    def rotary_tables(self) -> int:
        """Cosines and sines of tokens and compressed blocks, which all layers share."""
        _, length = self.rows
        blocks = length // self.config.geometry.compression_stride if self.config.chooses_blocks else 0
        return FP32 * self.config.head_dim * (length + blocks)

    @property
    def projected_columns(self) -> int:
        """Columns of the product of the attention's input with all its projections."""
        c = self.config
        columns = c.num_heads * c.head_dim + self._key_branches * c.num_kv_heads * (c.head_dim + c.value_dim)
        if c.attention == "nsa":
            columns += NUM_BRANCHES * c.num_heads
        return columns + (-columns % 64 if self.setup.device == "cuda" else 0)

    @property
    def joint_weights(self) -> int:
        """Weights that are copied side by side for that product."""
        return self.config.dim * self.projected_columns

    @property
    def mlp_hidden(self) -> int:
        """One tensor between the matrices of the MLP."""
        return self.item * self.tokens * self.config.mlp_dim

    @property
    def middle(self) -> int:
        """The tensor kept between attention and MLP: the residual stream, or the attention's output alone."""
        return self.normed if self.setup.compiled else self.residual

    @property
    def mlp_kept(self) -> int:
        """Input, both projections, the SiLU's result and the product."""
        hidden = 3 if self.setup.compiled else 4
        return self.middle + self.norm + self.normed + hidden * self.mlp_hidden

    @cached_property
    def choice(self) -> int:
        """The chosen blocks."""
        return INT32 * self.tokens * self.config.num_kv_heads * self.config.geometry.num_selected_blocks

    @property
    def branches(self) -> int:
        """Outputs of attention that are kept: one, or those that the gates mix."""
        return NUM_BRANCHES if self.config.attention == "nsa" else 1

    @cached_property
    def branch_outputs(self) -> int:
        """Outputs of the branches and their log-sum-exps."""
        c = self.config
        return self.branches * self.tokens * c.num_heads * (self.item * c.value_dim + FP32)

    @property
    def _head_norms(self) -> int:
        """What the norms of queries and keys keep besides their input: a scale a head and, on a CPU, scaled heads."""
        c = self.config
        heads = (c.num_heads + self._key_branches * c.num_kv_heads) if c.qk_norm else 0
        # Eager, the input is converted to fp32 and kept so.
        copies = 0 if self.setup.compiled else (self.item < FP32) + (self.setup.device == "cpu")
        return FP32 * self.tokens * heads * (1 + copies * c.head_dim)

    @property
    def _norms_keep_input(self) -> bool:
        """Whether the norms of queries and keys keep their input as it is."""
        return self.config.qk_norm and (self.setup.compiled or self.item == FP32)

    @property
    def _projected_kept(self) -> int:
        """What is kept of the product of the attention's input with all its projections."""
        c = self.config
        if not c.qkv_bias:
            # The values are columns of the one tensor.
            return self.item * self.tokens * self.projected_columns
        # With a bias each of them is a tensor of its own, and those of the compressed branch are not needed again.
        columns = c.num_kv_heads * c.value_dim * (2 if self._key_branches == NUM_BRANCHES else 1)
        return self.item * self.tokens * columns + self._norm_inputs

    @property
    def _norm_inputs(self) -> int:
        c = self.config
        columns = (c.num_heads + self._key_branches * c.num_kv_heads) * c.head_dim
        return self.item * self.tokens * columns if self._norms_keep_input else 0

    @property
    def _key_branches(self) -> int:
        return 1 if self.config.shared_kv else self.branches

    @cached_property
    def attention_kept(self) -> int:
        """Everything of the attention, with its input in the residual stream."""
        c, n, item = self.config, self.tokens, self.item
        heads_v = item * n * c.num_heads * c.value_dim
        queries = item * n * c.num_heads * c.head_dim
        kept = self.residual + self.norm + self.normed + queries + self._head_norms
        if c.attention == "dense":
            outputs = heads_v + FP32 * n * c.num_heads
            if self._varlen:
                # Rotated keys.
                return kept + outputs + item * n * c.num_kv_heads * c.head_dim + self._projected_kept
            # Keys and values are repeated for every head, and the projections' outputs are not needed again.
            copies = item * n * c.num_heads * (c.head_dim + c.value_dim)
            mask = item * n * self.setup.sequence_length if self.setup.packed else 0
            scores = self.tile if self._dense_scores else 0
            inputs = self._norm_inputs if c.qkv_bias else self._projected_kept
            return kept + copies + outputs + mask + scores + (inputs if self._norms_keep_input else 0)
        if self._saved_scores:
            # Of the branches the compiler keeps the fp32 copies that they multiply, and of the gates their logits too.
            nsa = c.attention == "nsa"
            copies = c.num_heads * c.head_dim + (2 if nsa else 1) * c.num_kv_heads * (c.head_dim + c.value_dim)
            numbers = n * c.num_heads * (FP32 + ((FP32 + item) * NUM_BRANCHES if nsa else 0))
            outputs = self.branches * heads_v + (self._compressor_kept if nsa else 0)
            return kept - queries + FP32 * n * copies + numbers + outputs + heads_v + self._saved_scores
        # Rotated.
        keys = item * n * c.num_kv_heads * c.head_dim * (2 if self._key_branches == NUM_BRANCHES else 1)
        projected = self._projected_kept
        if c.attention != "nsa":
            # The one output is the output projection's input too.
            return kept + keys + projected + self.branch_outputs + (self.choice if c.chooses_blocks else 0)
        gates = FP32 * n * c.num_heads * NUM_BRANCHES
        return kept + keys + projected + gates + self._compressor_kept + self.branch_outputs + self.choice + heads_v

    @cached_property
    def _compressed(self) -> int:
        """How many compressed keys, or values, all KV heads have."""
        rows, length = self.rows
        geometry = self.config.geometry
        blocks = length // geometry.compression_stride if self.setup.packed else geometry.num_compressed_blocks(length)
        return rows * blocks * self.config.num_kv_heads

    @cached_property
    def _compressor_kept(self) -> int:
        c = self.config
        kept = self.item * self._compressed * (c.head_dim + c.value_dim)
        if c.compressor == "mlp":
            inputs = c.geometry.compression_block_size * (c.head_dim + c.value_dim)
            hidden = MLPCompressor.hidden_features(c.head_dim) + MLPCompressor.hidden_features(c.value_dim)
            kept += self.item * self._compressed * (inputs + 2 * hidden)
        return kept

    @property
    def kept(self) -> int:
        """Bytes that the block keeps for backward."""
        return self.attention_kept + self.mlp_kept

    @property
    def kept_checkpointed(self) -> int:
        """Bytes that it keeps if its activations are recomputed."""
        c = self.config
        kept = self.residual + (self.choice if c.chooses_blocks else 0)
        if c.attention == "dense" or self.setup.backend != "triton":
            return kept
        if c.attention == "selected" and not self.setup.compiled:
            # The compiler drops the compressed branch: with the choice nothing needs it again.
            kept += self.tokens * c.num_heads * (self.item * min(VALUE_COLUMNS, c.head_dim) + FP32)
        return kept + self.branch_outputs

    @property
    def tile(self) -> int:
        """The scores of all queries and all keys of a row, fp32; the dense twin cuts documents into rows again."""
        rows, length = self.rows
        if self.config.attention == "dense":
            rows, length = self.setup.micro_batch_size, self.setup.sequence_length
        return FP32 * rows * self.config.num_heads * length**2

    @property
    def _saved_scores(self) -> int:
        """Tensors of the compiled reference: the selected or window branch's probabilities, and compressed scores."""
        c = self.config
        if not self.setup.compiled or self.setup.backend != "reference" or c.attention == "dense":
            return 0
        if c.attention != "nsa":
            return self.tile
        _, length = self.rows
        return 2 * self.tile + FP32 * length * self._compressed * (c.num_heads // c.num_kv_heads)

    @property
    def _dense_scores(self) -> bool:
        """Whether the dense twin's attention writes its scores: the CPU's kernel takes keys and values of one width."""
        return self.setup.device == "cpu" and self.config.head_dim != self.config.value_dim

    @property
    def _varlen(self) -> bool:
        """Whether the dense twin runs FlashAttention on documents as they lie; see `trifocal.nn.packed`."""
        # Imported here, because PyTorch's varlen attention imports its compiler.
        from trifocal.nn.packed import WIDEST_HEAD

        setup, widest = self.setup, max(self.config.head_dim, self.config.value_dim)
        return setup.packed and setup.device == "cuda" and setup.precision == "bf16" and widest <= WIDEST_HEAD

    @property
    def _mask(self) -> int:
        """The reference's largest mask, a byte a pair: that of the chosen blocks, or the window's."""
        rows, length = self.rows
        return (rows * self.config.num_kv_heads if self.config.chooses_blocks else 1) * length**2

    @cached_property
    def attention_forward_working(self) -> int:
        """Most that the attention's forward pass needs beyond what it keeps."""
        c, n = self.config, self.tokens
        if c.attention == "dense":
            return 0
        if self.setup.backend == "triton":
            return self._kernels.forward
        # Scores and their exponentials; the mask and its inverse; the queries in fp32.
        return 2 * self.tile + 2 * self._mask + FP32 * n * c.num_heads * c.head_dim

    @cached_property
    def attention_backward_working(self) -> int:
        """Most that the attention's backward pass needs beyond what is kept, without the residual's gradient."""
        c, n, item = self.config, self.tokens, self.item
        heads_d, heads_v = n * c.num_heads * c.head_dim, n * c.num_heads * c.value_dim
        if c.attention == "dense":
            scores = 2 * self.tile if self._dense_scores else 0
            return 2 * item * (heads_v + heads_d) + scores
        numbers = FP32 * n * c.num_heads * self.branches
        if self.setup.backend == "triton":
            return item * heads_v + self._kernels.backward
        # Probabilities, where they are not kept, their gradient, and that of the scores. Each branch's gradient of o,
        # and in fp32 that of o for one branch, the queries, and their gradient.
        casts = item * heads_d if item < FP32 else 0
        linear = item * self.branches * heads_v + FP32 * (heads_v + 2 * heads_d) + casts + numbers
        return (2 if self._saved_scores else 3) * self.tile + self._mask + linear

    @cached_property
    def _kernels(self) -> KernelMemory:
        c, (rows, length) = self.config, self.rows
        dtype = torch.bfloat16 if self.item == BF16 else torch.float32
        sizes = c.num_heads, c.num_kv_heads, c.head_dim, c.value_dim
        window = c.sliding_window or c.geometry.window_size
        return kernel_memory(c.geometry, rows, length, *sizes, dtype, self.setup.packed, c.attention, window)

    @property
    def forward_working(self) -> int:
        """Most that a checkpointed block's forward pass needs besides its input."""
        attention = self.attention_kept - self._saved_scores - self.residual - self._kept_inside
        # Compiled, the product is written over one of its factors.
        mlp = self.middle + self.normed + (2 if self.setup.compiled else 3) * self.mlp_hidden
        return max(attention + self.attention_forward_working, mlp)

    @property
    def _kept_inside(self) -> int:
        """The tensors that a checkpointed block keeps and that its attention makes."""
        return self.kept_checkpointed - self.residual
