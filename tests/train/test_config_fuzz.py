"""No text in a file and no flag ends in a traceback, and every accepted configuration can be saved and opened again."""

import operator
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.train.tiny import TOML
from trifocal.errors import UserError
from trifocal.fields import dotted_fields, from_table
from trifocal.train import RunConfig, load_config
from trifocal.train.config.load import override
from trifocal.train.config.toml import to_toml

FIELDS = dotted_fields(RunConfig)
TINY = from_table(RunConfig, tomllib.loads(TOML.format(directory="run", text="text")))
QUICK = settings(max_examples=60, deadline=None)

NUMBERS = ["1e999", "-1e309", "1e308", "1e300", "1e-320", "-0.0", "nan", "inf", "-inf", str(2**63), str(-(2**63)),
           "2147483647", "2147483648", "0", "-1", "1" * 400, "1" * 5000, "0x" + "f" * 5000, "1_0", "+5"]  # fmt: skip
TEXTS = [
    "",
    " ",
    "\0",
    "a\0b",
    "\udcff",
    "é",
    "\u0663:\u0665",
    "²:³",
    "0:1",
    "1:" + "9" * 5000,
    "-",
    "--",
    "=",
    "\n",
    "~",
]
OTHERS = ["true", "[]", "{}", "2020-01-01", "[[1]]", "[" * 3000 + "]" * 3000, "{a=" * 80 + "1" + "}" * 80]


def check_saved(config: RunConfig) -> None:
    assert from_table(RunConfig, tomllib.loads(to_toml(config))) == config


@QUICK
@given(st.sampled_from(sorted(FIELDS)), st.sampled_from(NUMBERS + TEXTS + OTHERS) | st.text(max_size=20))
def test_flags(name: str, value: str) -> None:
    try:
        config = override(TINY, [f"--{name}={value}"])
    except UserError as error:
        assert name.rpartition(".")[2] in str(error) or "Geometry" in str(error) or "block" in str(error)
    else:
        check_saved(config)


@QUICK
@given(
    st.lists(st.sampled_from(["-", "--", "--train.steps", "5", "--=", "--train", "=", "-h"]) | st.text(), max_size=4)
)
def test_words_that_are_no_flags(words: list[str]) -> None:
    try:
        check_saved(override(TINY, words))
    except UserError as error:
        assert str(error)


@QUICK
@example(name="model.from", value="'~'")
@given(
    st.sampled_from(sorted(FIELDS)),
    st.sampled_from(NUMBERS + OTHERS + ['"\\u0000"', '"\\uDCFF"', "'~'"]) | st.text(max_size=20),
)
def test_files(tmp_path_factory: pytest.TempPathFactory, name: str, value: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    section, _, leaf = name.rpartition(".")
    text = "[model]\n" if not section.startswith("model") else ""
    path.write_bytes(f"{text}[{section}]\n{leaf} = {value}\n".encode("utf-8", "surrogatepass"))
    try:
        config = load_config(path)
    except UserError as error:
        assert str(path) in str(error)
    else:
        check_saved(config)


@pytest.mark.parametrize("name", sorted(name for name, kind in FIELDS.items() if kind is float))
@pytest.mark.parametrize("value", ["1e999", "1e309", "-inf", "nan"])
def test_a_number_that_is_not_finite_is_refused_by_key(tmp_path: Path, name: str, value: str) -> None:
    expected = f"{name} must be a finite number"
    with pytest.raises(UserError, match=expected):
        override(TINY, [f"--{name}", value])
    with pytest.raises(UserError, match=expected):
        override(TINY, {name: float(value)})
    section, _, leaf = name.rpartition(".")
    path = tmp_path / "config.toml"
    path.write_text(f"[{section}]\n{leaf} = {value}\n")
    with pytest.raises(UserError, match=expected):
        load_config(path)


def test_code_cannot_make_what_cannot_be_opened_again() -> None:
    from dataclasses import replace

    for section, values in (("train", {"gradient_clip_norm": float("inf")}), ("run", {"directory": "a\0"})):
        with pytest.raises(UserError, match=f"{section}.{next(iter(values))}"):
            changed: Any = replace(operator.attrgetter(section)(TINY), **values)
            replace(TINY, **{section: changed})


@pytest.mark.parametrize("name", ["a\0b.toml", "\udcff.toml"])
def test_a_path_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^config file "):
        load_config(name)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--parallel.timeout_seconds", "1e300"], r"parallel.timeout_seconds may be at most 1e\+09, got 1e\+300"),
        (["--log.heartbeat_seconds", "1e300"], "log.heartbeat_seconds may be at most"),
        (["--train.steps", str(2**63)], "--train.steps must fit 64 bits"),
        (["--trace.steps", "0:1"], 'trace.steps: steps count from 1, got "0:1"'),
        (["--trace.steps", "1:" + "9" * 5000], "trace.steps must be ranges of steps"),
        (["--train.activation_checkpointing", "0:" + "9" * 5000], "a range of layers"),
    ],
)
def test_bounds_that_follow_from_what_is_computed(flags: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        override(TINY, flags)
