"""Memory of a training step on one device, by formula.

A step has few moments at which memory can be fullest: a block's forward pass, the loss, the gradient of the logits,
and a block's backward pass through the MLP or the attention. For each of them the sizes of the tensors that exist then
are added up; the fullest is the estimate. Sizes of a block are in `trifocal.models.layer_memory`, those of the kernels'
buffers in `trifocal.models.kernel_memory`.

Weights, their gradients and both moments of AdamW are fp32: 16 bytes a parameter. What is kept for backward is linear
in tokens, in the type of the matrix products besides the residual stream and the norms, which are fp32. Under bf16 the
matrices are copied in bf16 for the length of a forward pass, and for backward where they were kept.

A compiled layer keeps less, fuses elementwise operations, and adds its gradients to the others after its whole backward
pass.

Not counted: memory outside of PyTorch's allocator, which processes and drivers take, and fragmentation. Evaluation,
samples and telemetry keep nothing for backward and take less than a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trifocal.models.counts import layer_parameters, parameter_count
from trifocal.models.layer_memory import BF16, FP32, LayerMemory, TrainingSetup
from trifocal.models.model_config import ModelConfig

# Recorded micro-batches hold more than others do, because nothing of it is given back: 0.25 to 0.34 GiB on an H200 at
# every size that was measured, where libraries take 0.06.
_WORKSPACES_OF_GRAPHS = 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device at the fullest moment of a step.

    Attributes:
        moment: Its name.
        weights: fp32 weights.
        optimizer: AdamW's two moments.
        gradients: Gradients that exist then, and what their exchange takes.
        copies: Matrices in bf16, and weights that fsdp has collected.
        activations: Kept for backward.
        working: Tensors that live only at that moment.
        workspace: Of libraries such as cuBLAS.
    """

    moment: str
    weights: int
    optimizer: int
    gradients: int
    copies: int
    activations: int
    working: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it together."""
        return (
            self.weights
            + self.optimizer
            + self.gradients
            + self.copies
            + self.activations
            + self.working
            + self.workspace
        )


def training_memory(config: ModelConfig, setup: TrainingSetup) -> Memory:
    """The memory of a training step, all steps after the first.

    Args:
        config: The model.
        setup: How it is trained.

    Returns:
        The fullest moment.
    """
    return max(_Step(config, setup).moments(), key=lambda memory: memory.total)


class _Step:
    """The moments of a step."""

    def __init__(self, config: ModelConfig, setup: TrainingSetup) -> None:
        self.config, self.setup = config, setup
        kinds = config.attention_of_layers
        of_kind = {kind: LayerMemory(config.of_one_kind(kind), setup) for kind in kinds}
        self.layers = [of_kind[kind] for kind in kinds]
        # For sizes that all layers share.
        self.layer = self.layers[0]
        self.parameters = parameter_count(config)
        self.block_parameters = [layer_parameters(config, kind) for kind in kinds]
        self.head_weights = config.dim * config.vocab_size
        self.sharded = setup.mode in ("fsdp", "hsdp")
        self.shards = setup.shards if self.sharded else 1
        self.lowered = self.layer.item < FP32
        first, last = setup.checkpointed_layers
        self.checkpointed = [first <= index < last for index in range(config.num_layers)]
        self.keeps = [
            layer.kept_checkpointed if again else layer.kept
            for layer, again in zip(self.layers, self.checkpointed, strict=True)
        ]

    def moments(self) -> Iterator[Memory]:
        """Every moment that can be the fullest."""
        for index in range(self.config.num_layers):
            yield self._forward(index)
        yield from self._loss()
        for index in reversed(range(self.config.num_layers)):
            yield from self._backward(index)
        yield self._memory("optimizer", gradients=self._gradients_before)

    def _forward(self, index: int) -> Memory:
        layer = self.layers[index]
        if self.checkpointed[index]:
            kept, working = self.keeps[index], layer.forward_working
        else:
            kept, working = layer.attention_kept, layer.attention_forward_working
        return self._memory(
            f"forward pass of layer {index}",
            gradients=self._gradients_before,
            copies=self._copies(index + 1),
            activations=sum(self.keeps[:index]) + kept,
            working=working,
        )

    def _loss(self) -> Iterator[Memory]:
        layer, layers = self.layer, self.config.num_layers
        kept = sum(self.keeps) + layer.residual + layer.norm + layer.normed
        numbers = layer.tokens * self.config.vocab_size
        # A CPU computes the softmax of lowered logits, and its gradient, on a copy of them in fp32.
        converted = FP32 * numbers if self.lowered and self.setup.device == "cpu" else 0
        logits = layer.item * numbers
        # Compiled, the logits are all there is: their softmax is made from them wherever it is needed.
        yield self._memory(
            "loss",
            gradients=self._gradients_before,
            copies=self._copies(layers) + self._head_copy,
            activations=kept,
            working=logits if self.setup.compiled else logits + FP32 * numbers + converted,
        )
        copies = self._kept_copies(layers) + self._head_copy
        gradients = self._gradients(0)
        # The log-probabilities, their gradient, and that of the logits.
        working = 2 * logits if self.setup.compiled else 2 * FP32 * numbers + max(logits, converted)
        yield self._memory("gradient of the logits", gradients, copies, kept, working)
        working = logits + layer.normed + self._new_gradient(self.head_weights)
        yield self._memory("gradient of the head", gradients, copies, kept, working)

    def _backward(self, index: int) -> Iterator[Memory]:
        layer, config, compiled = self.layers[index], self.config, self.setup.compiled
        matrix = config.dim * config.mlp_dim
        behind = sum(self.block_parameters[index + 1 :]) + self.head_weights
        copies = self._kept_copies(index) + self._cast_copy(index) + self._joint_copy(index)
        before = sum(self.keeps[:index]) + layer.kept
        # The gradient of the layer's output, and two of the tensors between the MLP's matrices.
        working = layer.residual + 2 * layer.mlp_hidden
        if compiled and self.checkpointed[index]:
            # In one pass with the product, which is made again, and so before the last matrix has its gradient.
            working += layer.normed + layer.mlp_hidden
        yield self._memory(
            f"MLP's backward pass, layer {index}", self._gradients(behind, matrix), copies, before, working
        )
        working = layer.residual + layer.normed + self._new_gradient(matrix) + (0 if compiled else layer.mlp_hidden)
        yield self._memory(
            f"gradient of the MLP's last matrix, layer {index}", self._gradients(behind), copies, before, working
        )
        # One of the tensors between the matrices is left, beside the gradients of the first matrices' outputs.
        working = layer.residual + layer.normed + 2 * layer.mlp_hidden + self._new_gradient(matrix)
        yield self._memory(
            f"gradient of the MLP's first matrices, layer {index}",
            self._gradients(behind, matrix),
            copies,
            before - 3 * layer.mlp_hidden,
            working,
        )
        working = layer.residual + layer.attention_backward_working
        if compiled:
            # The attention's output; the residual stream's gradient in bf16, and its parts from both first matrices.
            working += layer.middle + 3 * layer.normed
        yield self._memory(
            f"attention's backward pass, layer {index}",
            self._gradients(behind, 3 * matrix),
            copies,
            before - layer.mlp_kept,
            working,
        )

    def _memory(self, moment: str, gradients: int, copies: int = 0, activations: int = 0, working: int = 0) -> Memory:
        own = self.parameters // self.shards
        return Memory(
            moment=moment,
            weights=FP32 * own,
            optimizer=2 * FP32 * own,
            gradients=gradients,
            copies=copies,
            activations=activations + max(layer.rotary_tables for layer in self.layers),
            working=working,
            workspace=self.setup.workspace_bytes * (1 + (_WORKSPACES_OF_GRAPHS if self.setup.cuda_graphs else 0)),
        )

    @property
    def _gradients_before(self) -> int:
        """Gradients in a forward pass: those of the step before, or the sums over earlier micro-batches."""
        whole = FP32 * self.parameters
        if self.setup.micro_batches == 1 or self.setup.mode == "none" or self.setup.cuda_graphs:
            return whole // self.shards
        # Sums over micro-batches are whole in each process; ddp has its buckets beside them.
        return whole if self.sharded else 2 * whole

    def _gradients(self, behind: int, inside: int = 0) -> int:
        """Gradients in a backward pass that is done with layers of `behind` parameters, and `inside` of the next."""
        block = (FP32 + self._collected_item) * max(self.block_parameters) if self.sharded else 0
        if self.setup.micro_batches > 1 or self.setup.mode == "ddp" or self.setup.cuda_graphs:
            # A compiled layer's are added to the others after the last of them.
            apart = FP32 * inside if self.setup.compiled and not self.sharded else 0
            return self._gradients_before + block + apart
        return FP32 * min(behind + inside, self.parameters) // self.shards + block

    def _new_gradient(self, weights: int) -> int:
        """A matrix's gradient as the product gives it, and as it is added to the others."""
        return (self.layer.item + (FP32 if self.lowered else 0)) * weights

    @property
    def _collected_item(self) -> int:
        return BF16 if self.lowered else FP32

    @property
    def _collected_weights(self) -> int:
        """Weights that are whole under fsdp: two blocks, and the weights outside of blocks."""
        if not self.sharded:
            return 0
        outside = self.parameters - sum(self.block_parameters)
        blocks = sorted(self.block_parameters)[-2:] if self.setup.reshard_after_forward else self.block_parameters
        return self._collected_item * (sum(blocks) + outside)

    def _joint_copy(self, index: int) -> int:
        """A block's weights that are laid side by side, in the type of the products."""
        return self.layer.item * self.layers[index].joint_weights

    def _cast_copy(self, index: int) -> int:
        """A block's other matrices as autocast copies them. Under fsdp they are collected in that type."""
        if not self.lowered or self.sharded:
            return 0
        return BF16 * max(0, self.block_parameters[index] - self.layers[index].joint_weights)

    @property
    def _head_copy(self) -> int:
        return BF16 * self.head_weights if self.lowered and not self.sharded else 0

    def _copies(self, layers: int) -> int:
        """Copies and collected weights after, and with, the forward pass of some layers."""
        kept = [index for index in range(layers) if not self.checkpointed[index] or index == layers - 1]
        # Autocast keeps its copies for the length of a forward pass.
        cast = kept if self.setup.compiled else range(layers)
        return self._collected_weights + sum(map(self._cast_copy, cast)) + sum(map(self._joint_copy, kept))

    def _kept_copies(self, layers: int) -> int:
        """Those that remain for the backward pass of the first layers."""
        kept = [index for index in range(layers) if not self.checkpointed[index]]
        return self._collected_weights + sum(self._cast_copy(index) + self._joint_copy(index) for index in kept)
