"""Text that every machine has: the Python files of the running interpreter."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from trifocal.data.sources.base import BadDocuments, Cursor, Document, fingerprint
from trifocal.errors import UserError

# Test suites are a third of the library, mostly tables of bytes and generated cases.
_SKIPPED = {"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload"}


class BuiltinSource:
    """Every `.py` file of the standard library outside its tests, and if asked of the installed packages."""

    def __init__(self, *, include_site_packages: bool = False, bad: BadDocuments | None = None) -> None:
        paths = sysconfig.get_paths()
        roots = [Path(paths["stdlib"])]
        if include_site_packages:
            roots += sorted({Path(paths["purelib"]), Path(paths["platlib"])})
        # Other versions have other files.
        self.name = f"builtin of Python {platform.python_version()}"
        self.bad = bad or BadDocuments()
        self._files: dict[str, Path] = {}
        sizes = []
        for root in roots:
            for path in _python_files(root):
                name = path.relative_to(root).as_posix()
                name = name if root == roots[0] else f"site-packages/{name}"
                # An empty file (most __init__.py) has no text to learn from.
                if name not in self._files and (size := path.stat().st_size):
                    self._files[name] = path
                    sizes.append((name, size))
        if not self._files:
            raise UserError(
                f"data.source builtin: no Python files under {paths['stdlib']}; use text:PATH with your own text"
            )
        self.shards, self.left_out = list(self._files), ""
        self.fingerprint = fingerprint("builtin", sizes)

    def read(self, shard: int, cursor: Cursor | None) -> Iterator[tuple[Document, Cursor]]:
        """One document, or none if the file is not UTF-8: a few packages have such files on purpose."""
        if cursor is not None:
            return
        name = self.shards[shard]
        try:
            text = self._files[name].read_bytes().decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            self.bad.skip(f"{self._files[name]} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}")
            return
        yield Document(name, text), (1,)


def _python_files(root: Path) -> Iterator[Path]:
    """The `.py` files under a folder, sorted by their path's parts."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)
