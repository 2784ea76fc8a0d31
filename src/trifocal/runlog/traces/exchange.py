"""The communication between processes, by module or bucket, with times: `exchange_rank*.csv`.

Also `collectives_rank*.csv`, every collective of the window from PyTorch's flight recorder, and under DDP
`ddp_rank*.json`, DDP's own figures.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trifocal.runlog.stalls.collectives import Collective, recorded_collectives
from trifocal.runlog.traces.base import Mark, Moment, Trace, write_table

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

    name = "exchange"

    def __init__(self, moment: Moment, model: nn.Module, module: nn.Module, watch: "GradientWatch") -> None:
        super().__init__(moment)
        self._module, self._watch = module, watch
        # Not by time: the recorder's clock may be seconds off.
        self._before = {_identity(collective) for collective in recorded_collectives()}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        watch.observer = self._exchange

    def end(self) -> None:
        """Stop observing, and make the rows."""
        self._watch.observer = None
        for row, began, start, ended in self.seen:
            row |= self.moment.between(began, start, "begin_milliseconds")
            self.rows.append(row | (self.moment.between(start, ended[0]) if ended else {}))

    def write(self, folder: Path, rank: int) -> None:
        """Write the tables."""
        super().write(folder, rank)
        collectives = [found for found in recorded_collectives() if _identity(found) not in self._before]
        write_table(folder / f"collectives_rank{rank}.csv", [asdict(found) for found in collectives])
        if isinstance(self._module, DistributedDataParallel):
            figures = self._module._get_ddp_logging_data()
            (folder / f"ddp_rank{rank}.json").write_text(json.dumps(figures, indent=1, default=str) + "\n")

    def _exchange(self, kind: str, name: str, buffer: Tensor, parameters: Sequence[Tensor]) -> Callable[[], None]:
        row = self.moment.columns() | {
            "phase": self.moment.phase,
            "exchange": kind,
            "of": name,
            "bytes": buffer.nbytes,
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "parameters": " ".join(self._names[id(parameter)] for parameter in parameters),
        }
        ended: list[Mark] = []
        self.seen.append((row, self.moment.phase_began, self.moment.mark(), ended))
        return lambda: ended.append(self.moment.mark())


def _identity(collective: Collective) -> tuple[str, str, str, int]:
    return collective.library, collective.group, collective.operation, collective.number
