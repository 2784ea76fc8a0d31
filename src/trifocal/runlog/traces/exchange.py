"""The communication between processes, by module or bucket, with times: `exchange_rank*.csv`.

Also `collectives_rank*.csv`, every collective of the window from PyTorch's flight recorder, and under DDP
`ddp_rank*.json`, DDP's own figures.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trifocal.runlog.stalls.collectives import Collective, recorded_collectives
from trifocal.runlog.traces.base import Moment, Trace, write_table

if TYPE_CHECKING:
    from trifocal.distributed.gradient_watch import GradientWatch


class ExchangeTrace(Trace):
    """Notes each bucket of DDP, and each all-gather and reduce-scatter of FSDP2.

    Args:
        moment: The place within the traced step.
        model: The model, for the names of its parameters.
        module: The wrapped model.
        watch: Observes the communication.
    """

    def __init__(self, moment: Moment, model: nn.Module, module: nn.Module, watch: "GradientWatch") -> None:
        super().__init__(moment)
        self._module, self._watch = module, watch
        # Autograd and collectives call back from threads of their own; appending is atomic.
        self._seen: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        # Not by time: the recorder's clock may be seconds off.
        self._before = {_identity(collective) for collective in recorded_collectives()}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        watch.observer = self._exchange

    def end(self) -> None:
        """Stop observing, and make the rows."""
        self._watch.observer = None
        clock = self._moment.clock
        for columns, row, began, start, ended in self._seen:
            row = {**columns, **row, **clock.between(began, start, "begin_milliseconds")}
            self._rows.append(row | (clock.between(start, ended[0]) if ended else {}))

    def write(self, folder: Path, rank: int) -> None:
        """Write the tables."""
        write_table(folder / f"exchange_rank{rank}.csv", self._rows)
        collectives = [found for found in recorded_collectives() if _identity(found) not in self._before]
        write_table(folder / f"collectives_rank{rank}.csv", (found.row() for found in collectives))
        if isinstance(self._module, DistributedDataParallel):
            figures = self._module._get_ddp_logging_data()
            (folder / f"ddp_rank{rank}.json").write_text(json.dumps(figures, indent=1, default=str) + "\n")

    def _exchange(self, kind: str, name: str, buffer: Tensor, parameters: Sequence[Tensor]) -> Callable[[], None]:
        moment = self._moment
        names = [self._names[id(parameter)] for parameter in parameters]
        row = {
            "phase": moment.phase,
            "exchange": kind,
            "of": name,
            "bytes": buffer.numel() * buffer.element_size(),
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "parameters": " ".join(names),
        }
        ended: list[Any] = []
        self._seen.append((moment.columns(), row, moment.phase_began, moment.clock.mark(), ended))
        return lambda: ended.append(moment.clock.mark())


def _identity(collective: Collective) -> tuple[str, str, str, int]:
    return collective.library, collective.group, collective.operation, collective.number
