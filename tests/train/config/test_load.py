"""Configuration: exact round trips, refusals that name the nearest key."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.train.tiny import TOML, write_config
from trifocal.errors import UserError, nearest, unknown
from trifocal.fields import dotted_fields, from_table, read_flags
from trifocal.train import RunConfig, load_config
from trifocal.train.config.load import ALIASES, override, repeating
from trifocal.train.config.toml import to_toml

ROOT = Path(__file__).parents[3]
FIELDS = dotted_fields(RunConfig)


@dataclasses.dataclass(frozen=True)
class Inner:
    number: int = 1
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Everything:
    text: str
    number: int
    real: float
    truth: bool
    choice: Literal["a", "b"] = "a"
    either: float | Literal["auto"] = "auto"
    inner: Inner = dataclasses.field(default_factory=Inner)


@settings(deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    number=st.integers(-(2**63), 2**63 - 1),
    real=st.floats(allow_nan=False, allow_infinity=False),
    truth=st.booleans(),
    either=st.floats(allow_nan=False, allow_infinity=False) | st.just("auto"),
)
def test_what_is_written_loads_back_equal(text, number, real, truth, either):
    value = Everything(text, number, real, truth, either=either, inner=Inner(number, text))
    table = tomllib.loads(to_toml(value))
    loaded = from_table(Everything, table, "test")
    assert loaded == value
    assert [type(getattr(loaded, name)) for name in ("number", "real", "truth")] == [int, float, bool]


def test_every_field_is_read_somewhere():
    """A field that nothing reads is a bug: each must be an attribute that some code outside its class asks for."""
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "config.py"]
    code = "\n".join(sources)
    unread = [name for name in FIELDS if not re.search(rf"\.{name.rpartition('.')[2]}\b", code)]
    assert not unread


def test_every_field_is_documented_in_the_help(capsys):
    from trifocal.cli import main

    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    # Frames are drawn where the terminal's encoding has them.
    text = "\n".join(
        line.strip("│╭╰╮╯─- ") if line.strip(" │")[:2] != "--" else line.strip("│ ") for line in text.splitlines()
    )
    blocks = re.split(r"\n(?=--)", text)
    described = {block.split()[0]: block for block in blocks if block.startswith("--")}
    for name in FIELDS:
        words = " ".join(described[f"--{name}"].splitlines()[1:])
        assert len(words) > 10, f"--{name} has no description: {words}"
    for flag in ("--resume", "--checkpoint", "--overwrite"):
        assert flag in described
    # The flags that people need come first, and exist.
    first = re.findall(r"^(--[\w.-]+) ", text.partition("all flags:")[0], re.MULTILINE)
    assert len(first) == 10
    assert {flag[2:].replace("-", "_") for flag in first} <= {*FIELDS, *ALIASES, "resume", "overwrite"}


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    flags = ["--train.steps", "9", "--model.geometry.window-size=16", "--train.compile", "--run.directory", "-x"]
    config = load_config(write_config(tmp_path), flags)
    assert (config.train.steps, config.model.geometry.window_size, config.train.compile) == (9, 16, True)
    assert config.run.directory == "-x"
    assert (config.train.global_batch_size, config.optimizer.beta2) == (4, 0.95)
    config = load_config(write_config(tmp_path), ["--lr", "1e-4", "--batch-size=6", "--steps", "8"])
    assert (config.optimizer.learning_rate, config.train.global_batch_size, config.train.steps) == (1e-4, 6, 8)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (("steps = 6", "stepz = 6"), 'unknown key "train.stepz"; the nearest valid one is "train.steps"'),
        (("steps = 6", "steps = true"), "train.steps must be an integer, got True"),
        (("steps = 6", "steps = 0"), "train.steps must be at least 1, got 0"),
        (('device = "cpu"', 'device = "gpu"'), "run.device must be one of 'auto', 'cpu', 'cuda', got 'gpu'"),
        (("[model.geometry]", "geometry = 3\n[log]"), "model.geometry must be a table, got 3"),
        (("dim = 16", "layer_types = 5"), "model.layer_types must be a list, got 5"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, edit, expected):
    path = write_config(tmp_path)
    text = path.read_text()
    if "geometry" in edit[0]:
        text = text.partition("compression_block_size")[0]
    path.write_text(text.replace(*edit, 1))
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--precision=bf16"], 'the nearest valid one is "--train.precision"'),
        (["--train.steps"], "--train.steps needs a value"),
        (["--train.choice_loss_weight", "fast"], "_weight must be a finite number or 'auto', got 'fast'"),
        (["--optimizer.learning_rate=-Inf"], "--optimizer.learning_rate must be a finite number, got -inf"),
        (["--train.compile", "maybe"], "--train.compile must be true or false, got 'maybe'"),
        (["--train.activation_checkpointing", "some"], 'a range of layers like "0:6", got "some"'),
        (["--log.heartbeat_seconds", "1e300"], "log.heartbeat_seconds may be at most 1e+09, got 1e+300"),
        (["steps", "5"], "expected a flag like --train.steps, got 'steps'"),
    ],
)
def test_bad_flags_are_refused_in_one_line(tmp_path, flags, expected):
    path = write_config(tmp_path)
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        load_config(path, flags)
    assert "\n" not in str(caught.value) and "─" not in str(caught.value)


@pytest.mark.parametrize(
    "words", [["dense", "window"], ["dense,window"], ["dense,", "window"], ['["dense", "window"]'], ["=dense,window"]]
)
def test_lists_are_words_or_between_commas_or_json(words):
    flag = "--model.layer_types"
    flags = [flag + words[0]] if words[0].startswith("=") else [flag, *words]
    given = ["--model.num_layers", "2", "--model.unscaled_layers", "0", *flags]
    assert override(RunConfig(), given).model.layer_types == ("dense", "window")
    for wrong, got in (('["dense", 1]', "1"), ("[dense]", "'[dense]'"), ("", "''")):
        with pytest.raises(UserError, match=f"^--model.layer_types must be one of .*, got {re.escape(got)}$"):
            override(RunConfig(), [flag, wrong])
    # A text may have commas and brackets.
    assert read_flags({"stop": tuple[str, ...]}, ["--stop", "[a], b", "c"]) == ([], {"stop": ("[a], b", "c")})


def test_a_commit_that_a_run_has_saved_stays_with_its_data_set():
    """`--resume` may name further sources, and `evaluate --source` another one."""
    commit, branch = "0123456789" * 4, "refs/convert/parquet"
    saved = override(RunConfig(), {"data.source": ("hf:a/x", "text:b"), "data.revision": (commit, "main")})
    for sources, revisions in (
        (("text:b", "hf:c/y", "hf:a/x#body"), ("main", "main", commit)),
        ("hf:a/x", commit),
        (("hf:c/y", "text:b"), "main"),
    ):
        assert override(saved, {"data.source": sources}).data.revision == revisions
    assert saved.data.only("hf:c/y").revision == "main"
    named = override(saved, {"data.source": "hf:a/x", "data.revision": branch})
    assert override(named, {"data.source": "hf:c/y"}).data.revision == branch


def test_a_pattern_of_layers_repeats_over_another_number_of_layers():
    mix = override(RunConfig(), {"model.num_layers": 8, "model.layer_types": ("window", "dense", "dense", "dense")})
    assert override(mix, {"model.num_layers": 4}).model.layer_types == ("window", "dense", "dense", "dense")
    with pytest.raises(UserError, match="must divide 6 layers, got 4"):
        override(mix, {"model.num_layers": 6})
    alike = override(RunConfig(), {"model.layer_types": ("window",)})
    assert override(alike, {"model.num_layers": 5}).model.layer_types == ("window",) * 5
    for names in (("window", "dense", "window"), ("window", "dense", "dense", "window", "dense", "window")):
        assert repeating(names) == names, "ends that are the same are no pattern"


def test_the_nearest_name_is_of_the_same_leaf_or_alike():
    assert nearest("train.learning_rate", FIELDS) == "optimizer.learning_rate"
    assert nearest("train.sequence_lenght", FIELDS) == "train.sequence_length"
    assert nearest("windowsize", FIELDS) == "model.geometry.window_size"
    assert nearest("windowsize", []) == ""
    assert str(unknown("key", "windowsize", [])) == 'unknown key "windowsize"; there is none'


def test_an_integer_of_any_size_is_named_in_a_message(tmp_path):
    (tmp_path / "a.toml").write_text(f"[model]\nattention = 0x{'f' * 5000}\n")
    with pytest.raises(UserError, match="got an integer of 20000 bits"):
        load_config(tmp_path / "a.toml", [])


TINY = from_table(RunConfig, tomllib.loads(TOML.format(directory="run", text="text")))
QUICK = settings(max_examples=60, deadline=None)

NUMBERS = ["1e999", "-1e309", "1e308", "1e300", "1e-320", "-0.0", "nan", "inf", "-inf", str(2**63), str(-(2**63)),
           "2147483647", "2147483648", "0", "-1", "1" * 400, "1" * 5000, "0x" + "f" * 5000, "1_0", "+5"]  # fmt: skip
TEXTS = ["", " ", "\0", "\udcff", "é", "\u0663:\u0665", "0:1", "1:" + "9" * 5000, "-", "--", "=", "\n", "~"]
OTHERS = ["true", "[]", "{}", "2020-01-01", "[[1]]", "[" * 3000 + "]" * 3000, "{a=" * 80 + "1" + "}" * 80]


def check_saved(config):
    assert from_table(RunConfig, tomllib.loads(to_toml(config))) == config


@QUICK
@given(st.sampled_from(sorted(FIELDS)), st.sampled_from(NUMBERS + TEXTS + OTHERS) | st.text(max_size=20))
def test_flags(name, value):
    try:
        config = override(TINY, [f"--{name}={value}"])
    except UserError as error:
        assert name.rpartition(".")[2] in str(error) or "Geometry" in str(error) or "block" in str(error)
    else:
        check_saved(config)


@QUICK
@example(name="model.from", value="'~'")
@given(
    st.sampled_from(sorted(FIELDS)),
    st.sampled_from(NUMBERS + OTHERS + ['"\\u0000"', '"\\uDCFF"', "'~'"]) | st.text(max_size=20),
)
def test_files(tmp_path_factory, name, value):
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
