"""Result files: figures with device, command and commit; JSON for programs, Markdown for people."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from trifocal.runlog.environment import environment
from trifocal.runlog.whole_files import write_whole

Row = Mapping[str, Any]


RESULTS = Path(__file__).parents[1] / "results"


def device_name() -> str:
    """The GPU, or the CPU where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def cpu_name() -> str:
    """The kind of CPU and its cores."""
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


class ResultFile:
    """`<what>_<device>_<date>.json` and the `.md` of the same name; may be written again as rows come in."""

    def __init__(
        self,
        what: str,
        title: str,
        *,
        folder: Path | None = None,
        device: str = "",
        commit: str = "",
        command: Sequence[str] = (),
    ) -> None:
        now = datetime.now(UTC)
        found = environment()
        self._head = {
            "title": title,
            "date": now.isoformat(timespec="seconds"),
            "device": device or device_name(),
            "commit": commit or _commit(found["trifocal"]),
            "command": shlex.join(command or ["python", *sys.argv]),
            "python": found["python"],
            "torch": torch.__version__,
            "triton": found["packages"]["triton"],
            "cudnn": found["torch"]["cudnn"],
        }
        name = self._head["device"]
        short = "cpu" if "CPU" in name else name.removeprefix("NVIDIA ").replace(" ", "-").lower()
        stem = (folder or RESULTS) / f"{what}_{short}_{now:%Y-%m-%d}"
        self.json = stem.with_suffix(".json")
        self.page = stem.with_suffix(".md")

    def write(
        self,
        rows: Sequence[Row],
        *,
        notes: Sequence[str] = (),
        columns: Sequence[str] = (),
        **tables: Sequence[Row],
    ) -> Path:
        """Write both files; returns the Markdown file.

        Units belong into the rows' keys. Rows with a `part` have a table for each of them on the page, which shows
        `columns`; the JSON has all. Further tables stand below the first.
        """
        content = {**self._head, "notes": list(notes), "rows": list(rows), **{k: list(v) for k, v in tables.items()}}
        self.json.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.json, json.dumps(content, indent=1) + "\n")
        head = self._head
        named = {"torch": "torch", "Triton": "triton", "cuDNN": "cudnn", "Python": "python"}
        versions = ", ".join(f"{name} {head[key]}" for name, key in named.items() if head[key])
        lines = [
            f"# {head['title']}",
            "",
            f"{head['device']}, {versions}, {head['date']}, commit `{head['commit']}`.",
            "",
            f"Command: `{head['command']}`",
            "",
        ]
        for part, members in by_part(rows).items():
            lines += [*([f"## {part.capitalize()}", ""] if part else []), *_table(members, columns), ""]
        lines.pop()
        for name, table in tables.items():
            if table:
                lines += ["", f"## {name.replace('_', ' ').capitalize()}", "", *_table(table)]
        lines += ["", *(f"- {note}" for note in notes)]
        write_whole(self.page, "\n".join(lines).rstrip() + "\n")
        return self.page


def by_part(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their part, without it, in order; rows without parts are one."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        rest = {key: value for key, value in row.items() if key != "part"}
        parts.setdefault(row.get("part", ""), []).append(rest)
    return parts or {"": []}


def _commit(state: Mapping[str, Any]) -> str:
    """The commit of the sources, with a mark if they were changed since; "unknown" outside a checkout."""
    if state["git_commit"] is None:
        return "unknown"
    return state["git_commit"][:12] + ("-dirty" if state["git_changed"] else "")


def _table(rows: Sequence[Row], columns: Sequence[str] = ()) -> list[str]:
    present = dict.fromkeys(key for row in rows for key in row)
    shown = [key for key in columns if key in present] if columns else list(present)
    return [
        "| " + " | ".join(key.replace("_", " ") for key in shown) + " |",
        "|" + "---|" * len(shown),
        *("| " + " | ".join(cell(row.get(key)) for key in shown) + " |" for row in rows),
    ]


def cell(value: Any) -> str:
    """A value as tables show it: numbers with four digits, "-" for nothing, the values of a list side by side."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
