"""The presets that come with the package: the files of `configs/`, which lie beside the code when it is installed."""

from pathlib import Path

from trifocal.errors import unknown

# In a checkout a link to configs/, in a wheel the files themselves.
_FOLDER = Path(__file__).parents[1] / "configs"


def presets() -> dict[str, Path]:
    """The files by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def preset_text(name: str) -> str:
    """A preset as it is written, with its comments.

    Raises:
        UserError: If there is none of that name; names the nearest one.
    """
    found = presets()
    if name not in found:
        raise unknown("preset", name, found)
    return found[name].read_text(encoding="utf-8")


def summary(name: str) -> str:
    """The first sentence of the comment at the beginning of a preset."""
    lines = []
    for line in preset_text(name).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).partition(". ")[0].rstrip(".")
