"""The configuration of a run: a file or preset, what pretrained weights say, and overrides."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trifocal.errors import UserError, unknown
from trifocal.fields import checked, dotted_fields, from_table, nested, read_flags, value_of
from trifocal.paths import read_toml, user_path
from trifocal.train.checkpoint.pretrained import pretrained_values
from trifocal.train.config.sections import RunConfig

# In a checkout a link to configs/, in a wheel the files themselves.
_PRESETS = Path(__file__).parents[2] / "configs"
ALIASES = {"lr": "optimizer.learning_rate", "batch_size": "train.global_batch_size", "steps": "train.steps"}
"""Short names of flags that are typed often."""


def load_config(path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Read a TOML config and apply overrides to it.

    Where `model.from` names weights, the whole section `model` comes from there, and the tokenizer; overrides go before
    both.

    Args:
        path: The TOML file, or the name of a preset; None: the defaults, and the model of `model.from`.
        overrides: Flags as on a command line, `["--train.steps", "200", "--model.dim=64"]`, or values by key,
            `{"train.steps": 200, "model.dim": 64}`.

    Returns:
        The whole configuration; each section is checked by itself, and `preflight` checks them against each other.

    Raises:
        UserError: If the file cannot be read, or a key, flag or value is not valid; names the nearest valid one.
    """
    if path is None:
        config = RunConfig()
    else:
        config = from_table(RunConfig, read_toml(_config_file(path)), str(path))
    given = _values(overrides)
    source = given.get("model.from", config.model.from_)
    if not source:
        return override(config, given)
    try:
        found = pretrained_values(source, tokenizer="data.tokenizer" not in given)
    except UserError as error:
        if "model.from" in given:
            raise
        raise UserError(f"{path}: model.from: {error}") from error
    config = override(config, found | {"model.from": source} | given)
    if path is None and "data.tokenizer" not in found | given and config.data.has_text:
        raise UserError(f"{source} has no tokenizer; name one with --data.tokenizer")
    return config


def _config_file(path: str | Path) -> Path:
    """The file at this path, or else the preset of this name."""
    file = user_path(path, "config file")
    if file.exists():
        return file
    found = presets()
    if not file.suffix and file.name == str(path):
        if str(path) not in found:
            raise unknown("config file or preset", str(path), found)
        return found[str(path)]
    if file.stem in found:
        raise UserError(f"{file}: no such file; for the preset of this name write {file.stem}")
    return file


def presets() -> dict[str, Path]:
    """The files by name."""
    return {path.stem: path for path in sorted(_PRESETS.glob("*.toml"))}


def comment(path: Path) -> str:
    """The comment at the beginning of a preset, with its marks."""
    return "".join(itertools.takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines(True)))


def summary(path: Path) -> str:
    """The first sentence of the comment at the beginning of a preset."""
    text = " ".join(line.lstrip("# ") for line in comment(path).splitlines())
    return text.partition(". ")[0].rstrip(".")


def override(config: RunConfig, overrides: Sequence[str] | Mapping[str, Any]) -> RunConfig:
    """Apply overrides, flags or values by key as of `load_config`, to a configuration; UserError if one is invalid."""
    given = _values(overrides)
    if not given:
        return config
    values = {name: value_of(config, name) for name in dotted_fields(RunConfig)}
    if "model.num_layers" in given:
        # A preset's pattern repeats over another number of layers.
        values["model.layer_types"] = repeating(config.model.layer_types)
    if "data.source" in given:
        sources = checked(str | tuple[str, ...], given["data.source"], "data.source")
        values["data.revision"] = config.data.revisions_of([sources] if isinstance(sources, str) else sources)
    return from_table(RunConfig, nested(values | given))


def repeating(names: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest pattern that repeats to these names of layers."""
    return next((names[:n] for n in range(1, len(names)) if names[:n] * (len(names) // n) == names), names)


def _values(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Overrides by key."""
    if isinstance(overrides, Mapping):
        given = dict(overrides)
    else:
        words, given = read_flags(dotted_fields(RunConfig), overrides, aliases=ALIASES)
        if words:
            raise UserError(f"expected a flag like --train.steps, got {words[0]!r}")
    # One key changes all layers, also those of a preset that names them; weights belong to their sources.
    before: dict[str, Any] = {"model.layer_types": ()} if "model.attention" in given else {}
    if "data.source" in given:
        before |= {"data.weights": (), "data.weights_after": (), "data.change_step": 0}
    return before | given
