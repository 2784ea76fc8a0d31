"""`trifocal bench`: figures side by side, as a table, JSON and a plot."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from trifocal.bench import (
    attention_speed,
    comparison,
    decoding_options,
    decoding_speed,
    kernel_times,
    training_speed,
)
from trifocal.bench.options import BenchOptions
from trifocal.bench.plot import MISSING, can_plot, plot_results
from trifocal.bench.recorder import OK, Recorder
from trifocal.bench.results import ResultFile, by_part, cell, cpu_name
from trifocal.errors import UserError, unknown
from trifocal.paths import user_path
from trifocal.train.arguments import parse_arguments
from trifocal.train.preflight import check_writable, choose_device, existing_folder


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Draw time over length, crossovers marked, from the result file of `trifocal bench attention`."""

    result: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RESULT.json")]
    """The file."""


PLOT = "draw an attention result again: RESULT.json"


@dataclass(frozen=True)
class Bench:
    """A bench: its measurements, and how their rows are shown.

    Attributes:
        options: Its flags.
        what: For the list of benches.
        measure: Measures every row into the recorder.
        notes: Sentences under the table.
        screen_columns: Keys of the rows that the screen shows, with their headings.
        page_columns: Keys that the page shows; all unless given.
        tables: Further tables that follow from the rows, for screen and page.
        plots: Whether the result can be drawn.
    """

    options: type[BenchOptions]
    what: str
    measure: Callable[[Any, Recorder], None]
    notes: Sequence[str]
    screen_columns: Mapping[str, str]
    page_columns: Sequence[str] = ()
    tables: Mapping[str, Callable[[Sequence[Any]], list[dict[str, Any]]]] = field(default_factory=dict)
    plots: bool = False


BENCHES: dict[str, Bench] = {
    "attention": Bench(
        attention_speed.AttentionOptions,
        "the attention and its parts beside dense attention and others",
        attention_speed.bench_attention,
        attention_speed.NOTES,
        {
            "shape": "shape", "tokens": "tokens", "row": "row", "choices": "choices", "forward_ms": "fwd ms",
            "forward_backward_ms": "fwd+bwd ms", "forward_backward_extra_peak_gib": "peak GiB",
            "forward_backward_tflop_per_second": "TFLOP/s", "status": "status",
        },
        page_columns=(
            "shape", "tokens", "row", "choices", "forward_ms", "backward_ms", "forward_backward_ms",
            "forward_device_ms", "forward_backward_device_ms",
            "forward_extra_peak_gib", "forward_backward_extra_peak_gib", "forward_tflop_per_second",
            "forward_backward_tflop_per_second", "backend", "note", "status",
        ),
        tables={"times_faster": comparison.speedups, "crossovers": comparison.crossovers},
        plots=True,
    ),
    "train": Bench(
        training_speed.TrainOptions,
        "training steps beside the dense twin's",
        training_speed.bench_train,
        training_speed.NOTES,
        {
            "size": "size", "attention": "attention", "data": "data", "cuda_graphs": "graphs",
            "tokens_per_second": "tokens/s", "step_ms": "step ms", "peak_gib": "peak GiB", "executed_mfu": "MFU",
            "dense_equivalent_mfu": "dense-eq. MFU", "status": "status",
        },
        tables={"over_dense": training_speed.speedups},
    ),
    "decode": Bench(
        decoding_options.DecodeOptions,
        "decoding: the model, prefill, one layer, a mix of requests, the shell",
        decoding_speed.bench_decode,
        decoding_speed.NOTES,
        {
            "attention": "attention", "sequences": "sequences", "tokens": "tokens", "requests": "requests",
            "token_ms": "ms/token", "keys_per_step": "keys/step", "cache_mib": "cache MiB/step",
            "prefill_seconds": "prefill s", "training_forward_seconds": "training forward s",
            "prefill_ratio": "ratio", "first_token_seconds": "first token s", "layer_ms": "ms",
            "floor_ms": "floor ms", "run": "run", "seconds": "s", "first_text_seconds": "first text s",
            "tokens_out_per_second": "tokens/s out", "tokens_in_per_second": "tokens/s in", "peak_gib": "peak GiB",
            "status": "status",
        },
        tables={"times_faster": decoding_speed.speedups},
    ),
    "kernels": Bench(
        kernel_times.KernelsOptions,
        "every kernel of an attention call on a GPU",
        kernel_times.bench_kernels,
        kernel_times.NOTES,
        {
            "shape": "shape", "direction": "direction", "kernel": "kernel", "launches": "launches", "ms": "ms",
            "us_a_launch": "µs a launch", "status": "status",
        },
    ),
}  # fmt: skip

# Columns of the screen's tables where it is no screen.
_FILE_WIDTH = 160


def run(args: Sequence[str]) -> int:
    """Measure, show a table and write the result files.

    Returns:
        0, or 1 if a row failed or was refused.

    Raises:
        UserError: If an argument is bad.
    """
    if not args or args[0] in ("-h", "--help"):
        benches = {name: bench.what for name, bench in BENCHES.items()} | {"plot": PLOT}
        rows = "\n".join(f"  {name:10} {what}" for name, what in benches.items())
        print(f"usage: trifocal bench WHAT …\n\n{rows}\n\ntrifocal bench WHAT --help shows its flags.")
        return 0 if args else 2
    options = parse(args)
    if isinstance(options, PlotOptions):
        return _plot(user_path(options.result, "RESULT"))
    name = args[0]
    title = f"trifocal bench {name}"
    on_cpu = choose_device(options.device).type == "cpu"
    file = ResultFile(
        options.name or name,
        title[0].upper() + title[1:],
        folder=user_path(options.output, "--output") if options.output else None,
        device=cpu_name() if on_cpu else "",
        commit=options.commit,
        command=["trifocal", "bench", *args],
    )
    # Nothing is made yet: the work may still be refused.
    folder = file.json.parent
    check_writable(existing_folder(folder), f"cannot write into {folder}")
    return _measure(BENCHES[name], options, file)


def parse(args: Sequence[str]) -> Any:
    """The options of `trifocal bench`'s arguments.

    Raises:
        UserError: If the bench or a flag is unknown, or a value does not fit.
    """
    name = args[0]
    options = {name: bench.options for name, bench in BENCHES.items()} | {"plot": PlotOptions}
    if name not in options:
        raise unknown("bench", name, options)
    return parse_arguments(options[name], args[1:], prog=f"trifocal bench {name}")


def _measure(bench: Bench, options: BenchOptions, file: ResultFile) -> int:
    """Measure, writing the files after every row, and show the tables."""

    def tables() -> dict[str, list[dict[str, Any]]]:
        return {name: make(recorder.rows) for name, make in bench.tables.items()}

    def write() -> None:
        more = tables() | recorder.tables
        file.write(recorder.rows, notes=bench.notes, columns=bench.page_columns, **more)

    recorder = Recorder(options.seconds, _say, write)
    bench.measure(options, recorder)
    _show(bench, recorder.rows, tables() | recorder.tables)
    print(f"{file.page}\n{file.json}")
    if bench.plots and any(row["status"] == OK for row in recorder.rows):
        _plot_if_possible(file.json)
    return recorder.exit_status


def _show(bench: Bench, rows: Sequence[Any], tables: Mapping[str, Sequence[Any]]) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _FILE_WIDTH)
    # The reason why a row was not measured is too long for a cell.
    brief = [{**row, "status": row["status"].partition(":")[0]} for row in rows]
    for part, members in by_part(brief).items():
        console.print(_table(part, members, bench.screen_columns))
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


def _plot_if_possible(result: Path) -> None:
    if not can_plot():
        print(f"{MISSING} {shlex.quote(str(result))}")
        return
    picture = plot_results(result)
    if picture is not None:
        print(picture)


def _plot(result: Path) -> int:
    picture = plot_results(result)
    if picture is None:
        raise UserError(f"{result} has no shape at two lengths or more; time some with --tokens")
    print(picture)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
