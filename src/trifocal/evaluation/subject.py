"""The model that is evaluated, and whether a length fits the machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trifocal.data import DataConfig, Tokenizer
from trifocal.models import DecoderLM
from trifocal.runlog.environment import host_memory_bytes
from trifocal.train.config.sections import RunConfig
from trifocal.train.step.micro_batch import autocast

# Random numbers of validation rows have a key of three numbers: this one differs from theirs.
SPLIT = 2
# Tokens of rows that are run together: enough for a GPU, little for a host.
_TOKENS_AT_ONCE = {"cuda": 65536, "cpu": 4096}


class TooShort(Exception):
    """A sequence is too short for a task; the message says how much it needs."""


@dataclass(frozen=True)
class Subject:
    """A trained model, on its device, with what its evaluation needs; None where that is not known.

    `data` are the text or the task; `precision` is that of the products: `Pretrained.dtype`, or that of weights of
    another type than fp32; the loss is compared with that of the model `beside`, of the same tokens.
    """

    model: DecoderLM
    tokenizer: Tokenizer
    data: DataConfig | None
    run: RunConfig | None
    device: torch.device
    precision: str
    trained_length: int | None = None
    beside: DecoderLM | None = None

    def rows_at_once(self, length: int) -> int:
        """Rows of this length to run together."""
        return max(1, _TOKENS_AT_ONCE[self.device.type] // length)

    def lacks_memory(self, length: int) -> str:
        """Why a sequence does not fit; empty if nothing is known. The reference keeps two numbers a head and pair of
        tokens, and a host may promise such memory and then kill the process.
        """
        config = self.model.config
        if set(config.attention_of_layers) == {"dense"}:
            return ""
        if config.resolved_backend("evaluate", self.precision, self.device) != "reference":
            return ""
        cuda = self.device.type == "cuda"
        has = torch.cuda.get_device_properties(self.device).total_memory if cuda else host_memory_bytes()
        needs = 2 * 4 * config.num_heads * length**2
        if needs < has:
            return ""
        return f"the reference backend needs {needs / 2**30:,.0f} GiB for it, {self.device} has {has / 2**30:,.0f}"

    @torch.no_grad()
    def score_answers(self, rows: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]]) -> tuple[Tensor, Tensor]:
        """Whether each valid target is the likeliest token, and its loss in nats, row after row of one document."""
        at_once = self.rows_at_once(max(len(tokens) for tokens, _ in rows))
        scored = [self._score(*stack_rows(rows[first : first + at_once])) for first in range(0, len(rows), at_once)]
        return torch.cat([right for right, _ in scored]), torch.cat([losses for _, losses in scored])

    def _score(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device, self.precision):
            hidden = self.model.hidden_states(tokens.to(self.device))
            asked = targets >= 0
            # Only these: at 65,536 tokens all logits would take gigabytes.
            logits = self.model.logits(hidden[asked.to(self.device)])
        wanted = targets[asked].to(self.device)
        losses = torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none")
        return (logits.argmax(-1) == wanted).cpu(), losses.cpu()


def stack_rows(rows: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[Tensor, Tensor]:
    """Tokens and targets of rows, each [T], as [rows, T]; padded on the right, which no token of a row sees."""
    longest = max(len(tokens) for tokens, _ in rows)
    padded = [np.pad(row, ((0, 0), (0, longest - len(row[0]))), constant_values=-100) for row in rows]
    stacked = torch.from_numpy(np.stack(padded, axis=1).astype(np.int64))
    return stacked[0].clamp(min=0), stacked[1]
