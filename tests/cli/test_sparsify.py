"""`trifocal sparsify`: its steps are ordinary commands, each done once, and what is done is kept."""

import errno
import json
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.cli.test_commands import refused
from tests.train.tiny import write_documents, write_model
from trifocal import load_model, load_tokenizer
from trifocal.cli import main, sparsify
from trifocal.cli import train as train_command
from trifocal.cli.flags import parse_arguments
from trifocal.data import DataConfig
from trifocal.doctor.measured import Need
from trifocal.errors import UserError
from trifocal.runlog import read_metrics
from trifocal.runlog.run import read_evaluation
from trifocal.train import RunConfig, saving
from trifocal.train.loop import TrainResult
from trifocal.train.run_folder import RunLock, load_run

BLOCKS = ["--geometry.compression-block-size", "4", "--geometry.compression-stride", "2"]
BLOCKS += ["--geometry.selection-block-size", "8", "--geometry.num-initial-blocks", "1", "--selected-blocks", "3"]
SHORT = ["--sequence-length", "64", "--rows", "2", "--index-steps", "3", "--steps", "4", "--sequences", "2"]
SHORT += ["--validation-fraction", "0.3", "--device", "cpu"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense model of bytes."""
    return write_model(tmp_path_factory.mktemp("dense") / "dense", num_heads=2)


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """The configurations whose needs were asked for; none is measured."""
    asked = []

    def need_of(name, config):
        asked.append(config)
        need = {"name": name, "parameters": 10, "state_bytes": 160, "disk_bytes": 120, "device": "CPU"}
        if config.train.micro_batch_size > 1:
            remedies = ("--train.micro_batch_size 1", "--train.sequence_length 32")
            return Need(**need, problem="the memory does not suffice: 1 GiB", remedies=remedies)
        return Need(**need, peak_bytes=1000, step_seconds=0.5)

    monkeypatch.setattr(sparsify, "need_of", need_of)
    return asked


def arguments(dense, folder, *more):
    text = write_documents(folder / "text")
    return [str(dense), str(folder / "out"), "--data", f"text:{text}", *BLOCKS, *SHORT, *more]


def test_a_dense_model_becomes_a_sparse_one_that_was_measured(dense, tmp_path, capsys, monkeypatch, planned):
    words, out = arguments(dense, tmp_path, "--keep-dense", "1"), tmp_path / "out"
    other = write_documents(tmp_path / "other", 90)
    for file in other.iterdir():
        # The blocks cover these: no query of this source has a choice.
        file.write_text(file.read_text().upper()[:20])
    words[words.index("--data") + 2 : words.index("--data") + 2] = [f"text:{other}", "--data-weights", "2,1"]
    monkeypatch.setattr(sparsify, "_LEG", 2)
    # A full disk ends it behind the last checkpoint of a training; what was done stays, and the weights are written.
    export = saving.export_weights

    def full(model, tokenizer, folder, **rest):
        if folder.parent.name == "trained":
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        export(model, tokenizer, folder, **rest)

    monkeypatch.setattr(saving, "export_weights", full)
    assert "No space left on device" in refused(capsys, "sparsify", *words)
    monkeypatch.setattr(saving, "export_weights", export)
    index = read_metrics(out / "steps" / "index" / "metrics.jsonl")
    assert main(["sparsify", *words]) == 0
    text = capsys.readouterr().out
    assert [name in text for name in ("layers", "convert", "plan", "index")] == [True] * 4
    assert text.count(": done before, in ") == 4
    assert read_metrics(out / "steps" / "index" / "metrics.jsonl") == index, "the index is not taught again"

    # What did not fit was lowered, and says so by the flag.
    assert [config.train.micro_batch_size for config in planned] == [2, 1]
    trained = load_run(out / "steps" / "trained")
    assert trained.train.micro_batch_size == 1 and trained.distill.from_ == str(dense)
    kinds = trained.model.attention_of_layers
    record = json.loads((out / "sparsify.json").read_text())["steps"]
    harm = {int(layer): value for layer, value in record["layers"]["divergence_of_layers"].items()}
    assert kinds[max(harm, key=lambda layer: harm[layer])] == "dense" and sorted(kinds) == ["dense", "selected"]
    geometry = trained.model.geometry
    assert (geometry.num_selected_blocks, geometry.num_local_blocks, geometry.selection_block_size) == (3, 1, 8)
    assert trained.model.has_index
    # Legs of two steps; three at most.
    assert record["index"]["taught_steps"] in (2, 3)
    rows = list(read_metrics(out / "steps" / "trained" / "metrics.jsonl", "train"))
    assert rows[-1]["step"] == 4 and all(row["divergence"] > 0 for row in rows)

    evaluation = read_evaluation(out / "steps" / "trained" / "evaluation" / "step_00000004.json")
    assert evaluation["beside"] == str(dense)
    losses, found = [row for row in evaluation["rows"] if row["task"] == "loss"], record["measure"]
    assert [row["source"] for row in losses] == list(trained.data.source) and trained.data.weights == (2, 1)
    assert all(row["sequences"] == 2 and row["beside_loss"] != row["loss"] for row in losses)
    mean = sum(row["loss"] * row["targets"] for row in losses) / sum(row["targets"] for row in losses)
    assert found["loss"] == pytest.approx(mean) and losses[0]["loss"] != losses[1]["loss"]
    assert 0 < found["divergence"] < 1 and 0.5 < found["agreement"] < 1
    assert len(found["recall_of_layers"]) == 1
    assert f"dense {found['beside_loss']:.4f}" in text and f"same likeliest token {found['agreement']:.2%}" in text

    # OUT is a folder of weights, for `serve` and the rest.
    assert load_model(out).config == trained.model
    assert load_tokenizer(out).fingerprint == load_tokenizer(dense).fingerprint
    assert text.count("try next") == 1 and "steps/trained" not in text.partition("try next")[2]
    assert text.endswith(
        f"--data.source text:{tmp_path / 'text'} text:{other} --data.weights 2.0,1.0 "
        f"--train.sequence_length {trained.train.sequence_length}\n"
    )

    assert "was begun with another --steps (sparsify.json" in refused(capsys, "sparsify", *words, "--steps", "5")
    changed = [word for word in words if word not in (f"text:{other}", "--data-weights", "2,1")]
    assert "was begun with another --data (" in refused(capsys, "sparsify", *changed)
    assert "was begun with another DIR (" in refused(capsys, "sparsify", str(out), *words[1:])
    # The text is not read again.
    monkeypatch.delattr(sparsify, "read_validation")
    assert main(["sparsify", *words]) == 0
    assert capsys.readouterr().out.count(": done before, in ") == 7


@pytest.mark.parametrize(("to", "last"), [("selected", "selected"), ("mix", "selected"), ("nsa", "nsa")])
def test_every_target_is_converted_to(tmp_path, to, last):
    dense = write_model(tmp_path / "dense", num_layers=4)
    options = parse_arguments(
        sparsify.SparsifyArguments, arguments(dense, tmp_path, "--to", to), prog="trifocal sparsify"
    )
    work = sparsify._Work(options, dense, tmp_path / "out")
    work.steps.mkdir(parents=True)
    work._convert()
    found = load_model(work.start).config
    assert found.attention_of_layers == (*["window" if to == "mix" else last] * 3, last) and found.has_index


def test_a_flag_of_the_geometry_leaves_its_other_defaults():
    def blocks(*more):
        words = ["DIR", "OUT", "--data", "builtin", *more]
        return parse_arguments(sparsify.SparsifyArguments, words, prog="trifocal sparsify").blocks

    assert blocks("--geometry.num-initial-blocks", "2") == replace(blocks(), num_initial_blocks=2)
    assert blocks().num_selected_blocks == 32


def test_trainings_of_several_processes_are_launched(tmp_path, monkeypatch):
    """The other commands are not; a status that is not 0 ends all."""
    launched = []

    class Launched:
        def __init__(self, words):
            launched.append(words)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait(self):
            return len(launched) - 1

    monkeypatch.setattr(sparsify.subprocess, "Popen", Launched)
    sparsify._command("train", "--resume", str(tmp_path), processes=2)
    assert launched[0][1:] == [
        *["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "trifocal", "train", "--resume"],
        str(tmp_path),
    ]
    with pytest.raises(sparsify._Ended) as ended:
        sparsify._command("train", processes=2)
    assert ended.value.args == (1,)


def test_a_sigterm_reaches_the_processes_of_a_training(monkeypatch):
    """It may come to the command only; the processes save, and end with a status that is not 0."""
    calls = []

    def wait():
        calls.append("wait")
        if len(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        return 1

    child = SimpleNamespace(wait=wait, terminate=lambda: calls.append("terminate"))
    monkeypatch.setattr(sparsify.subprocess, "Popen", lambda _: nullcontext(child))
    # Without a handler the signal would end the tests.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(sparsify._Ended):
            sparsify._command("train", processes=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == ["wait", "terminate", "wait"]


def test_ctrl_c_in_the_last_step_of_a_training_ends_the_command_too(tmp_path, monkeypatch):
    rest = {"directory": tmp_path, "step": 3, "loss": None, "evaluation": None, "sample": None}
    for asked in (False, True):
        result = TrainResult(**rest, finished=True, stop_requested=asked)
        monkeypatch.setattr(train_command, "_resume", lambda *_, result=result: (RunConfig(), result))
        assert train_command.run(["--resume", str(tmp_path)], advise=False) == int(asked)


def test_a_step_that_is_stopped_leaves_the_command_that_continues_to_sparsify(tmp_path):
    stopped = TrainResult(directory=tmp_path, step=3, finished=False, loss=None, evaluation=None, sample=None)
    assert train_command._summary(RunConfig(), stopped, advise=False) == "\nstopped at step 3, which is saved"
    assert f"continue with:\n  trifocal train --resume {tmp_path}" in train_command._summary(
        RunConfig(), stopped, advise=True
    )


def test_recall_that_stands_still_ends_the_teaching(dense, tmp_path, monkeypatch):
    rows = [{"kind": "train", "step": step, "unix_time_seconds": 0, "choice_recall": [None, min(0.9, step / 100)]}
            for step in range(2, 181, 2)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, after = sparsify.recalls(tmp_path, 60, 60)
    assert after - before == pytest.approx(0.3)
    before, after = sparsify.recalls(tmp_path, 120, 20)
    assert after - before == pytest.approx(0)
    options = parse_arguments(sparsify.SparsifyArguments, arguments(dense, tmp_path), prog="trifocal sparsify")
    work, trained = sparsify._Work(replace(options, index_steps=300), dense, tmp_path / "out"), []
    work.length, work.index = 64, tmp_path
    monkeypatch.setattr(work, "_train", lambda folder, settings, steps: trained.append(steps))
    assert work._teach() == {"taught_steps": 180, "recall": pytest.approx(0.9)} and trained == [60, 120, 180]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--sequence-length", "24"), "the selected blocks cover 24 tokens, and rows have 24: nothing would be sparse"),
        (("--sequence-length", "4000"), "the held-out text is shorter than a row of 4,000 tokens; give more text"),
        (("--selected-blocks", "2"), "all 2 blocks are initial or local ones: none is chosen"),
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--seed", "-1"), "--seed must be at least 0, got -1"),
        (("--learning-rate", "0"), "--learning-rate must be positive, got 0.0"),
        (("--selected-blocks", "1"), "--selected-blocks 1 is too few: num_initial_blocks + num_local_blocks must lie"),
        (("--keep-dense", "2"), "--keep-dense must be less than the 2 dense layers, got 2"),
        (("--validation-fraction", "1"), r"--validation-fraction must lie in (0, 1), got 1"),
        (("--data", "text:/nowhere"), "/nowhere"),
        (("--data-weights", "1"), "--data: data.weights needs several sources"),
        (("--to", "dense"), "--to must be one of 'selected', 'mix', 'nsa', got 'dense'"),
    ],
)
def test_bad_input_is_one_line(dense, tmp_path, capsys, more, message):
    words = arguments(dense, tmp_path)
    for flag in more[::2]:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    assert message in refused(capsys, "sparsify", *words, *more)
    assert not (tmp_path / "out").exists()


def test_documents_that_the_blocks_cover_are_one_line(dense, tmp_path, capsys):
    words = arguments(dense, tmp_path)
    for file in (tmp_path / "text").iterdir():
        file.write_text(file.read_text()[:20])
    message = refused(capsys, "sparsify", *words)
    assert "blocks cover 24 tokens, and the longest held-out document has 21: nothing would be sparse" in message
    assert not (tmp_path / "out").exists()


def test_another_call_that_works_there_is_left_alone(dense, tmp_path, capsys):
    words = arguments(dense, tmp_path)
    options = parse_arguments(sparsify.SparsifyArguments, words, prog="trifocal sparsify")
    work = sparsify._Work(options, dense, tmp_path / "out")
    work.index.mkdir(parents=True)
    work._save()
    with RunLock() as other:
        other.acquire(work.steps)
        assert f"another call works in {work.output}; wait for it" in refused(capsys, "sparsify", *words)
        assert not work.start.exists()
    with RunLock() as other:
        other.acquire(work.index)
        with pytest.raises(UserError, match="steps/index is in use: process"):
            work._train(work.index, {}, 3)
        assert other.holds(work.index)


def test_a_call_that_failed_before_its_record_can_be_repeated(dense, tmp_path, capsys):
    words, steps = arguments(dense, tmp_path), tmp_path / "out" / "steps"
    options = parse_arguments(sparsify.SparsifyArguments, words, prog="trifocal sparsify")
    steps.mkdir(parents=True)
    (steps / ".lock").touch()
    assert sparsify._read_record(options, steps.parent)["steps"] == {}
    (steps / "mine").touch()
    assert "exists already; give a new folder" in refused(capsys, "sparsify", *words)


def test_a_source_that_is_no_model_is_one_line(dense, tmp_path, capsys):
    bare, narrow = shutil.copytree(dense, tmp_path / "bare"), tmp_path / "narrow"
    (bare / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(capsys, "sparsify", str(bare), *arguments(dense, tmp_path)[1:])
    write_model(narrow, vocab_size=200)
    message = refused(capsys, "sparsify", str(narrow), str(tmp_path / "third"), *arguments(dense, tmp_path)[2:])
    assert "tokenizer bytes has 257 tokens, the model 200: it is that of another model" in message
    flags = ["--model.from", str(narrow), "--data.source", f"text:{tmp_path / 'text'}"]
    message = refused(capsys, "train", *flags, "--run.directory", str(tmp_path / "run"))
    assert f"name the tokenizer of {narrow} with --data.tokenizer" in message
    sparse = write_model(tmp_path / "sparse", attention="selected")
    message = refused(capsys, "sparsify", str(sparse), str(tmp_path / "fourth"), *arguments(dense, tmp_path)[2:])
    assert "sparse has no dense layer to make sparse: all are of the type selected" in message
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    message = refused(capsys, "sparsify", str(dense), str(tmp_path / "full"), *arguments(dense, tmp_path)[2:])
    assert "full exists already; give a new folder" in message
    message = refused(capsys, "sparsify", str(dense), "/proc/x", *arguments(dense, tmp_path)[2:])
    assert "cannot write /proc/x/steps: No such file or directory; give another OUT" in message


def test_what_sparsify_holds_out_evaluate_does_too(dense):
    """Of a sparsified folder, which does not tell what it was trained on."""
    given = sparsify.SparsifyArguments(source=str(dense), output="out", data=("text:books",))
    assert given.text["validation_fraction"] == DataConfig().only("text:books").validation_fraction
