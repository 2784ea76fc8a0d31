"""The presets that come with the package: the files of `configs/`, which lie beside the code when it is installed."""

import itertools
from pathlib import Path

# In a checkout a link to configs/, in a wheel the files themselves.
_FOLDER = Path(__file__).parents[2] / "configs"


def presets() -> dict[str, Path]:
    """The files by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def comment(path: Path) -> str:
    """The comment at the beginning of a preset, with its marks."""
    return "".join(itertools.takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines(True)))


def summary(path: Path) -> str:
    """The first sentence of the comment at the beginning of a preset."""
    text = " ".join(line.lstrip("# ") for line in comment(path).splitlines())
    return text.partition(". ")[0].rstrip(".")
