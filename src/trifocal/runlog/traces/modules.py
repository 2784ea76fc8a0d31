"""Order and time of the modules' forward and backward passes: `modules_rank*.csv`."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trifocal.runlog.traces.base import Mark, ModuleHooks, Moment, Trace, write_table


class ModuleTrace(Trace):
    """Notes every pass through every module.

    A row's event is `forward`; `recompute` for a forward pass that checkpointing repeats in backward; or `backward`,
    from the gradient of the module's first output to that of its first input, if both exist.

    Args:
        moment: The place within the traced step.
        model: The model.
    """

    def __init__(self, moment: Moment, model: nn.Module) -> None:
        super().__init__(moment)
        self._open: list[tuple[str, Mark, list[Tensor]]] = []
        # Autograd and collectives call back from threads of their own; appending is atomic.
        self._seen: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._hooks = ModuleHooks(model, entered=self._entered, left=self._left)

    def end(self) -> None:
        """Remove the hooks, and make the rows."""
        self._hooks.remove()
        clock = self._moment.clock
        order: dict[tuple[int, int, str], int] = {}
        for columns, event, name, phase_began, begin, ended in self._seen:
            key = (columns["step"], columns["micro_batch"], event)
            order[key] = order.get(key, 0) + 1
            row = {**columns, "event": event, "order": order[key], "module": name}
            row |= clock.between(phase_began, begin, "begin_milliseconds")
            if ended and ended[0] is not None:
                row |= clock.between(begin, ended[0])
            self._rows.append(row)

    def write(self, folder: Path, rank: int) -> None:
        """Write the table."""
        write_table(folder / f"modules_rank{rank}.csv", self._rows)

    def _entered(self, name: str, inputs: list[Tensor]) -> None:
        self._open.append((name, self._moment.clock.mark(), inputs))

    def _left(self, name: str, outputs: list[Tensor]) -> None:
        _, begin, inputs = self._open.pop()
        moment = self._moment
        if not moment.phase:
            return
        again = moment.phase == "backward"
        event = "recompute" if again else "forward"
        self._seen.append((moment.columns(), event, name, moment.phase_began, begin, [moment.clock.mark()]))
        if again:
            # The gradient flows through the graph of the first pass; the repeated one only gives saved tensors.
            return
        # A module outside autograd, or one that returns its input, has no backward pass.
        output = next((tensor for tensor in outputs if tensor.grad_fn is not None), None)
        if output is None:
            return
        columns, ended = moment.columns(), list[Mark]()

        def begun(gradient: Tensor) -> None:
            self._seen.append((columns, "backward", name, moment.phase_began, moment.clock.mark(), ended))

        def finished(gradient: Tensor) -> None:
            ended.append(moment.clock.mark())

        output.register_hook(begun)
        source = next((tensor for tensor in inputs if tensor.requires_grad and tensor is not output), None)
        if source is not None:
            source.register_hook(finished)
