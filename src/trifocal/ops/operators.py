"""The operators that the dispatcher sees: `torch.ops.trifocal.*`, with all that compilers and checkpoint policies need.

An operator is opaque: `torch.compile` neither looks into it nor breaks the graph at it, and a policy of activation
checkpointing can keep its result. So each has a fake implementation, which gives only shapes, and a backward that
is an operator too. Bodies are the Triton kernels, imported when they first run; the choices of blocks, which have no
backward and are watched by telemetry, are operators for both backends. Geometry travels as a list of its sizes,
documents as their first fields, or as many times None.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from trifocal.ops import reference
from trifocal.ops.geometry import Geometry
from trifocal.ops.layout import Documents, place_type

DOCUMENTS = (
    "Tensor? cu_seqlens, Tensor? ids, Tensor? positions, SymInt? max_length, SymInt[]? compression, "
    "Tensor? first_blocks, Tensor? slots"
)
"""The arguments of documents in a schema: the first fields of `Documents`."""
_NUM_OF_DOCUMENTS = DOCUMENTS.count(",") + 1
Result = TypeVar("Result")


class Operator(Generic[Result]):
    """An operator with the arguments of a function with a geometry and documents, the schema's `SymInt[] geometry` and
    `DOCUMENTS`. `fake` makes results without memory, of the schema's arguments.
    """

    def __init__(
        self, name: str, arguments: str, results: str, body: Callable[..., Any], fake: Callable[..., Any]
    ) -> None:
        self._names = [argument.split()[-1] for argument in arguments.split(", ")]
        # Any strides: without the tag the compiler copies q once for each operator.
        self.definition = torch.library.custom_op(
            f"trifocal::{name}",
            functools.partial(self._run, body),
            mutates_args=(),
            schema=f"({arguments}) -> {results}",
            tags=(torch.Tag.flexible_layout,),
        )
        self.definition.register_fake(fake)  # type: ignore[union-attr]

    def __call__(self, *args: Any) -> Result:
        """Call with a geometry and documents as they are."""
        return self.definition(*flat(args))  # type: ignore[operator, no-any-return]

    def _run(self, body: Callable[..., Any], *flat_args: Any) -> Any:
        args = list(flat_args)
        if "cu_seqlens" in self._names:
            first = self._names.index("cu_seqlens")
            here = slice(first, first + _NUM_OF_DOCUMENTS)
            args[here] = [None if args[first] is None else Documents(*args[here])]
        if "geometry" in self._names:
            place = self._names.index("geometry")
            args[place] = _geometry(tuple(args[place]))
        with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
            return body(*args)

    def differentiate(
        self, backward: "Operator[Any]", kept: Callable[..., tuple[Any, ...]], num_outputs: int = 1
    ) -> None:
        """Give this operator a backward, for its first `num_outputs` outputs, which takes their gradients and what
        `kept` picks of inputs and outputs, and gives the gradients of the first inputs.
        """

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*outputs[num_outputs:])
            values = kept(inputs, outputs)
            ctx.save_for_backward(*(x for x in values if isinstance(x, Tensor)))
            ctx.values = [... if isinstance(x, Tensor) else x for x in values]

        def gradients(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = iter(ctx.saved_tensors)
            values = [next(saved) if x is ... else x for x in ctx.values]
            found = backward.definition(*d_outputs[:num_outputs], *values)  # type: ignore[operator]
            found = found if isinstance(found, tuple) else (found,)
            return *found, *(None,) * (len(self._names) - len(found))

        self.definition.register_autograd(gradients, setup_context=save)  # type: ignore[union-attr]


def flat(args: tuple[Any, ...]) -> list[Any]:
    """Arguments as the dispatcher takes them; None is documents that are not there."""
    found: list[Any] = []
    for x in args:
        if isinstance(x, Geometry):
            # Not `astuple`, which deep-copies every number: slow, and PyTorch 2.11 cannot compile it on Python 3.11.
            found.append([getattr(x, field.name) for field in fields(x)])
        elif x is None or isinstance(x, Documents):
            found += (None,) * _NUM_OF_DOCUMENTS if x is None else x[:_NUM_OF_DOCUMENTS]
        else:
            found.append(x)
    return found


_NAMES_OF_SIZES = [field.name for field in fields(Geometry)]


@functools.cache
def _geometry(sizes: tuple[int, ...]) -> Geometry:
    return Geometry(*sizes)


def _kernels(module: str, function: str) -> Callable[..., Any]:
    """A launcher of kernels of `ops.triton`, imported when it first runs."""

    def run(*args: Any) -> Any:
        return getattr(importlib.import_module(f"trifocal.ops.triton.{module}"), function)(*args)

    return run


def _on_backend(operation: str, kernels: Callable[..., Any]) -> Callable[..., Any]:
    """A body whose last argument is the backend: the reference of this name, or kernels."""

    def run(*args: Any) -> Any:
        *inputs, backend = args
        return (getattr(reference, operation) if backend == "reference" else kernels)(*inputs)

    return run


def _compressed_backward(d_o: Tensor | None, d_lse: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    backward = _kernels("interval.compressed", "compressed_backward")
    d_o = torch.zeros_like(inputs[3]) if d_o is None else d_o
    return backward(d_o, *inputs, d_lse)  # type: ignore[no-any-return]


def _empty(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors of these shapes and types."""
    return tuple(x.new_empty(x.shape) for x in tensors)


def _attention_results(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _size(sizes: list[int], name: str) -> int:
    # Not by a Geometry: a compiler with dynamic shapes may give symbols, which that refuses.
    return sizes[_NAMES_OF_SIZES.index(name)]


def _index_loss_results(q_idx: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, sizes, num_blocks = rest[3], rest[6], rest[7]
    rows = (*tokens.shape, q_idx.shape[2])
    shape = (*rows, -(-num_blocks // 16) * 16)
    figures, d_products = (q_idx.new_empty(size, dtype=torch.float32) for size in ((2, *rows), shape))
    return figures, d_products, q_idx.new_empty(shape, dtype=place_type(_size(sizes, "selection_block_size")))


mean_compress: Operator[Tensor] = Operator(
    "mean_compress",
    f"Tensor x, SymInt[] geometry, SymInt num_blocks, {DOCUMENTS}",
    "Tensor",
    _kernels("mean_compression", "mean_compress_forward"),
    lambda x, geometry, num_blocks, *_: x.new_empty((x.shape[0], num_blocks, *x.shape[2:])),
)
"""Means of the compressed blocks, [B, C, G, D]; see `trifocal.ops.mean_compress`."""
mean_compress_backward: Operator[Tensor] = Operator(
    "mean_compress_backward",
    f"Tensor d_x_cmp, SymInt[] geometry, SymInt num_tokens, {DOCUMENTS}",
    "Tensor",
    _kernels("mean_compression", "mean_compress_backward"),
    lambda d_x_cmp, geometry, num_tokens, *_: d_x_cmp.new_empty((d_x_cmp.shape[0], num_tokens, *d_x_cmp.shape[2:])),
)
mean_compress.differentiate(mean_compress_backward, lambda x, _: (x[1], x[0].shape[1], *x[3:]))

select_blocks: Operator[Tensor] = Operator(
    "select_blocks",
    f"Tensor q, Tensor k_cmp, Tensor lse, SymInt[] geometry, SymInt num_keys, float scale, {DOCUMENTS}, str backend",
    "Tensor",
    _on_backend("select_blocks", _kernels("scoring", "select_blocks_forward")),
    lambda q, k, _, sizes, *__: q.new_empty(
        (*q.shape[:2], k.shape[2], _size(sizes, "num_selected_blocks")), dtype=torch.int32
    ),
)
"""The choice of blocks, [B, T, G, N]; see `trifocal.ops.select_blocks`."""
select_blocks_by_index: Operator[Tensor] = Operator(
    "select_blocks_by_index",
    f"Tensor q_idx, Tensor k_idx, SymInt[] geometry, {DOCUMENTS}, str backend",
    "Tensor",
    _on_backend("select_blocks_by_index", _kernels("index_scoring", "select_blocks_by_index_forward")),
    lambda q, _, sizes, *__: q.new_empty((*q.shape[:3], _size(sizes, "num_selected_blocks")), dtype=torch.int32),
)
"""The choice of blocks, [B, T, G, N]; see `trifocal.ops.select_blocks_by_index`."""

index_loss: Operator[tuple[Tensor, Tensor, Tensor]] = Operator(
    "index_loss",
    "Tensor q_idx, Tensor k_idx, Tensor q, Tensor k, Tensor tokens, Tensor starts, Tensor eligible, "
    f"SymInt[] geometry, SymInt num_blocks, float share_floor, float least_mass, {DOCUMENTS}",
    "(Tensor, Tensor, Tensor)",
    _kernels("choice_loss", "index_loss_forward"),
    _index_loss_results,
)
"""Loss, differentiable by the index, and recall of an index by query and group, [2, B, M, G], for
`trifocal.ops.choice_loss`. More is for backward."""
index_loss_backward: Operator[tuple[Tensor, Tensor]] = Operator(
    "index_loss_backward",
    "Tensor d_figures, Tensor d_products, Tensor places, Tensor q_idx, Tensor k_idx, Tensor tokens, Tensor starts, "
    "SymInt[] geometry",
    "(Tensor, Tensor)",
    _kernels("choice_loss", "index_loss_backward"),
    lambda d_figures, d_products, places, q_idx, k_idx, *_: _empty(q_idx, k_idx),
)
index_loss.differentiate(index_loss_backward, lambda x, outputs: (*outputs[1:], *x[:2], *x[4:6], x[7]))


def _attention(
    name: str, rules: str, forward: Callable[..., Any], backward: Callable[..., Any], num_outputs: int = 1
) -> Operator[tuple[Tensor, Tensor]]:
    """The operator `NAME_attention` from q, k, v and rules to o and lse, with a backward of `num_outputs` of these."""
    qkv, rules = "Tensor q, Tensor k, Tensor v", f"{rules}, float scale, {DOCUMENTS}"
    d_outputs = "Tensor d_o" if num_outputs == 1 else "Tensor? d_o, Tensor? d_lse"
    attention: Operator[tuple[Tensor, Tensor]] = Operator(
        f"{name}_attention", f"{qkv}, {rules}", "(Tensor, Tensor)", forward, _attention_results
    )
    gradients: Operator[tuple[Tensor, ...]] = Operator(
        f"{name}_attention_backward",
        f"{d_outputs}, {qkv}, Tensor o, Tensor lse, {rules}",
        "(Tensor, Tensor, Tensor)",
        backward,
        lambda *args: _empty(*args[num_outputs : num_outputs + 3]),
    )
    attention.differentiate(gradients, lambda x, outputs: (*x[:3], *outputs, *x[3:]), num_outputs)
    return attention


compressed_attention = _attention(
    "compressed",
    "SymInt[] geometry, SymInt num_keys",
    _kernels("interval.compressed", "compressed_forward"),
    _compressed_backward,
    num_outputs=2,
)
"""o and lse over the compressed blocks, both differentiable."""
selected_attention = _attention(
    "selected",
    "Tensor selected_blocks, SymInt[] geometry",
    _kernels("selected.forward", "selected_forward"),
    _kernels("selected.backward", "selected_backward"),
)
"""o and lse over the tokens of the chosen blocks; lse is not differentiable."""
window_attention = _attention(
    "window",
    "SymInt window_size",
    _kernels("interval.window", "window_forward"),
    _kernels("interval.window", "window_backward"),
)
"""o and lse over the window; lse is not differentiable."""
