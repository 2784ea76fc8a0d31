"""Order and time of the modules' forward and backward passes: `modules_rank*.csv`."""

from collections import Counter

from torch import Tensor, nn

from trifocal.runlog.traces.base import Mark, ModuleHooks, Moment, Trace


class ModuleTrace(Trace):
    """Notes every pass through every module.

    A row's event is `forward`; `recompute` for a forward pass that checkpointing repeats in backward; or `backward`,
    from the gradient of the module's first output to that of its first input, if both exist.

    Args:
        moment: The place within the traced step.
        model: The model.
    """

    name = "modules"

    def __init__(self, moment: Moment, model: nn.Module) -> None:
        super().__init__(moment)
        self._open: list[tuple[Mark, list[Tensor]]] = []
        self._hooks = ModuleHooks(model, entered=self._entered, left=self._left)

    def end(self) -> None:
        """Remove the hooks, and make the rows."""
        self._hooks.remove()
        order: Counter[tuple[int, int, str]] = Counter()
        for columns, event, name, phase_began, begin, ended in self.seen:
            key = (columns["step"], columns["micro_batch"], event)
            order[key] += 1
            row = {**columns, "event": event, "order": order[key], "module": name}
            row |= self.moment.between(phase_began, begin, "begin_milliseconds")
            self.rows.append(row | (self.moment.between(begin, ended[0]) if ended else {}))

    def _entered(self, name: str, inputs: list[Tensor]) -> None:
        self._open.append((self.moment.mark(), inputs))

    def _left(self, name: str, outputs: list[Tensor]) -> None:
        begin, inputs = self._open.pop()
        moment = self.moment
        if not moment.phase:
            return
        again = moment.phase == "backward"
        event = "recompute" if again else "forward"
        self.seen.append((moment.columns(), event, name, moment.phase_began, begin, [moment.mark()]))
        # The gradient flows through the graph of the first pass; the repeated one only gives saved tensors. A module
        # outside autograd, or one that returns its input, has no backward pass.
        output = next((tensor for tensor in outputs if tensor.grad_fn is not None), None)
        if again or output is None:
            return
        columns, ended = moment.columns(), list[Mark]()

        def begun(gradient: Tensor) -> None:
            self.seen.append((columns, "backward", name, moment.phase_began, moment.mark(), ended))

        def finished(gradient: Tensor) -> None:
            ended.append(moment.mark())

        output.register_hook(begun)
        source = next((tensor for tensor in inputs if tensor.requires_grad and tensor is not output), None)
        if source is not None:
            source.register_hook(finished)
