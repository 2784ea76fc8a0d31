"""Result files: what was measured, where, by which command, at which commit; JSON for programs, Markdown for people."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"


def device_name() -> str:
    """The GPU, or the CPU where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def cpu_name() -> str:
    """The kind of CPU and its cores."""
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def commit() -> str:
    """The commit of the tree, with a mark if it was changed since; "unknown" outside a checkout."""
    try:
        name = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip()


def write_results(
    what: str,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    folder: Path = FOLDER,
    notes: Sequence[str] = (),
    device: str = "",
    at_commit: str = "",
) -> Path:
    """Write `<what>_<device>_<date>.json` and `.md`.

    Args:
        what: Short name, for the file.
        title: Heading of the page.
        rows: One measurement each, with the same keys; units belong into the keys.
        folder: Where to.
        notes: Sentences under the table.
        device: What it ran on; `device_name()` unless given.
        at_commit: The commit, for a tree without its history.

    Returns:
        The Markdown file.
    """
    now = datetime.now(UTC)
    device = device or device_name()
    head = {
        "title": title,
        "date": now.isoformat(timespec="seconds"),
        "device": device,
        "commit": at_commit or commit(),
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "notes": list(notes),
    }
    short = "cpu" if "CPU" in device else device.removeprefix("NVIDIA ").replace(" ", "-").lower()
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{what}_{short}_{now:%Y-%m-%d}"
    stem.with_suffix(".json").write_text(json.dumps({**head, "rows": list(rows)}, indent=1) + "\n")
    page = stem.with_suffix(".md")
    page.write_text(_page(head, rows))
    return page


def _page(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        f"# {head['title']}",
        "",
        f"{head['device']}, torch {head['torch']}, Python {head['python']}, {head['date']}, commit `{head['commit']}`.",
        "",
        f"Command: `{head['command']}`",
        "",
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    lines += ["", *(f"- {note}" for note in head["notes"])]
    return "\n".join(lines).rstrip() + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
