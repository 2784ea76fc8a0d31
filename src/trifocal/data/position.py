"""Checks that a saved position belongs to the present data."""

from collections.abc import Mapping, Sequence
from typing import Any

from trifocal.errors import UserError

POSITION_VERSION = 4


def check_position(
    state: Mapping[str, Any], *, name: str, settings: Mapping[str, Any], content: str, shards: Sequence[str]
) -> None:
    """Refuse a position in other data, or in data with other settings.

    Args:
        state: From `Loader.state_dict`.
        name: Name of the data that this run reads.
        settings: The settings that decide the rows, by configuration key.
        content: Hashes of the files' contents, of equal length, in the order of `shards`.
        shards: Names of the files.

    Raises:
        UserError: If the data or the settings differ; names the differences.
    """
    if state.get("version") != POSITION_VERSION:
        raise UserError(
            f"data position of version {state.get('version')}, expected {POSITION_VERSION}: go on with the version of "
            "trifocal that saved the checkpoint, or start a new run"
        )
    saved = state["settings"]
    if differ := [key for key in settings if saved.get(key) != settings[key]]:
        raise UserError(
            f"the data position belongs to {state['source']}, this run reads {name}: "
            f"{_differences(differ, saved, settings)}; resume with the saved values"
        )
    if state["content"] != content:
        width = len(content) // len(shards)
        changed = [
            shard
            for index, shard in enumerate(shards)
            if state["content"][index * width :][:width] != content[index * width :][:width]
        ]
        more = f" and {len(changed) - 1} more files have" if len(changed) > 1 else " has"
        raise UserError(
            f"{changed[0]}{more} changed since the checkpoint was saved: {name} has files of the same names and "
            "sizes, but other content; put the old files back, or start a new run with the new ones"
        )


def _differences(keys: Sequence[str], saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Keys of the configuration with both values; a key with a fingerprint for its value, by name alone."""

    def shown(key: str) -> str:
        has_values = key in saved and key != "data.tokenizer" and " " not in key
        return f"{key} {saved[key]} -> {now[key]}" if has_values else f"{key} differ"

    return ", ".join(map(shown, keys))
