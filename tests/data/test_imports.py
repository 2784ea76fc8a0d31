"""Files of the room import each other in one direction, imports inside functions included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import trifocal.data


def test_no_file_imports_another_in_a_circle() -> None:
    folder = Path(trifocal.data.__file__).parent
    imports: dict[str, set[str]] = {}
    for file in folder.glob("*.py"):
        found = imports.setdefault(f"trifocal.data.{file.stem}", set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trifocal.data"):
                found.add(str(node.module))
    assert len(imports) > 10
    # Raises CycleError, which names the circle.
    list(TopologicalSorter(imports).static_order())
