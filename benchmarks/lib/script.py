"""The command line of a benchmark: flags, rows measured one after another, a table on screen, and result files."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from lib.recorder import OK, Recorder
from lib.results import ResultFile, by_part, cell, cpu_name
from trifocal.cli.output import unwinding_signals
from trifocal.errors import UserError
from trifocal.models import ModelConfig
from trifocal.models.conversion import MIX
from trifocal.train import load_config

PRESET = "m7c_125m"
MODEL_NOTE = (
    f"Without flags of a model it is that of the preset {PRESET}, with an index and a learned compressor. Results up "
    "to 2026-11-25 are of --model.chooser compressed --model.compressor mean."
)
# Columns of the screen's tables where it is no screen.
_FILE_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The flags of every benchmark."""

    seconds: float = 600.0
    """Time limit of the whole; rows that it leaves out are listed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; "auto" takes a GPU if there is one."""
    name: str = ""
    """Name of the result files; by default the benchmark's own."""
    output: Path | None = None
    """Folder of the result files; by default benchmarks/results."""
    commit: str = ""
    """The commit to write down, for a tree without its history."""

    def __post_init__(self) -> None:
        self.check_positive("seconds")

    def check_positive(self, *names: str) -> None:
        """Refuse a number that is not above 0."""
        for name in names:
            if not getattr(self, name) > 0:
                raise UserError(f"--{name.replace('_', '-')}: expected a number above 0, got {getattr(self, name)}")

    @property
    def torch_device(self) -> torch.device:
        """The device that `--device` names."""
        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise UserError("--device cuda: PyTorch sees no GPU here; use cpu or auto")
        return torch.device("cuda" if available and self.device != "cpu" else "cpu")


_ATTENTIONS: dict[str, dict[str, Any]] = {
    "nsa": {},
    "selected": {"attention": "selected", "chooser": "index"},
    "mix": {"layer_types": MIX, "chooser": "index"},
    "dense": {"attention": "dense"},
    "mix-dense": {"layer_types": (*MIX[:3], "dense")},
}
"""How the models of rows differ from that of the flags."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(BenchOptions):
    """The flags of a benchmark that measures sparse models beside their dense baselines."""

    attention: tuple[Literal["nsa", "selected", "mix", "dense", "mix-dense"], ...] = ("nsa", "dense")
    """The models to measure: with three branches; one branch with an index; three windows and one such layer again and
    again; dense; three windows and a dense layer."""
    model: ModelConfig = field(default_factory=lambda: load_config(PRESET).model)
    """The sparse model, by default the production preset's; the dense baseline differs only in the attention."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Type of the matrix products, and of the caches of decoding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.attention != "nsa":
            raise UserError("--model.attention is set row by row; choose the rows with --attention")
        if self.model.layer_types or self.model.from_:
            raise UserError(
                "a benchmark's models have one kind of attention and random weights: no layer_types, no from"
            )

    def model_of(self, attention: str) -> ModelConfig:
        """The model of a row."""
        return replace(self.model, **_ATTENTIONS[attention])


def parse_size(size: str, instead: str = "") -> tuple[int, int]:
    """Sequences and tokens of a size like 4x8192; `instead` is another word that is valid, for the message."""
    sequences, cross, tokens = size.partition("x")
    if not (cross and sequences.isdecimal() and tokens.isdecimal() and int(sequences) and int(tokens)):
        also = f", or {instead}" if instead else ""
        raise UserError(f'expected sequences x tokens, like 4x8192{also}; got "{size}"')
    return int(sequences), int(tokens)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: what measures its rows into the recorder, and how they are shown.

    The screen has `screen_columns` with their headings, the page `page_columns` or all; rows make `tables`.
    """

    name: str
    options: type[BenchOptions]
    measure: Callable[[Any, Recorder], None]
    notes: Sequence[str]
    screen_columns: Mapping[str, str]
    page_columns: Sequence[str] = ()
    tables: Mapping[str, Callable[[Sequence[Any]], list[dict[str, Any]]]] = field(default_factory=dict)

    @unwinding_signals()
    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure, write the result files after every row, and show the tables.

        Returns 0, 1 if a row failed or was refused, 2 for bad flags.
        """
        arguments = sys.argv[1:] if arguments is None else arguments
        try:
            options = tyro.cli(self.options, args=arguments, prog=f"{self.name}.py")
            on_cpu = options.torch_device.type == "cpu"
            file = ResultFile(
                options.name or self.name,
                self.name.capitalize(),
                folder=options.output,
                device=cpu_name() if on_cpu else "",
                commit=options.commit,
                command=["python", f"benchmarks/{self.name}.py", *arguments],
            )

            def tables() -> dict[str, list[dict[str, Any]]]:
                return {name: make(recorder.rows) for name, make in self.tables.items()} | recorder.tables

            def write() -> None:
                file.write(recorder.rows, notes=self.notes, columns=self.page_columns, **tables())

            recorder = Recorder(options.seconds, lambda text: print(text, flush=True), write)
            self.measure(options, recorder)
        except UserError as error:
            print(f"{self.name}.py: {error}", file=sys.stderr)
            return 2
        self._show(recorder.rows, tables())
        print(f"{file.page}\n{file.json}")
        return recorder.exit_status

    def _show(self, rows: Sequence[Any], tables: Mapping[str, Sequence[Any]]) -> None:
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _FILE_WIDTH)
        # The reason why a row was not measured is too long for a cell.
        brief = [{**row, "status": row["status"].partition(":")[0]} for row in rows]
        for part, members in by_part(brief).items():
            console.print(_table(part, members, self.screen_columns))
        for reason in dict.fromkeys(row["status"] for row in rows if row["status"] != OK):
            print(reason)
        for title, table in tables.items():
            if table:
                headings = {key: key.replace("_", " ") for row in table for key in row}
                console.print(_table(title.replace("_", " "), table, headings))


def _table(title: str, rows: Sequence[Any], columns: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title=title or None, title_justify="left")
    present = {key: heading for key, heading in columns.items() if any(row.get(key) is not None for row in rows)}
    for key, heading in present.items():
        number = all(isinstance(row.get(key), int | float | None) for row in rows)
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row.get(key)) for key in present))
    return table
