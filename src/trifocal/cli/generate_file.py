"""`trifocal generate --prompts FILE --output OUT.jsonl`: many prompts at a time.

Lines of the output begin with the `index` of their prompt and come as sequences end. `--append` reads which are there.
"""

import codecs
import json
import sys
import time
from collections.abc import Collection, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from trifocal.cli.generate_model import GenerateArguments, load
from trifocal.cli.output import writing
from trifocal.cli.threads import Threads
from trifocal.errors import UserError
from trifocal.inference import Completion, Engine
from trifocal.inference.prompts import memory_errors
from trifocal.paths import parse_json, read_file, user_path
from trifocal.train.config.check import choose_device

# Seconds between lines of progress.
_INTERVAL_SECONDS = 10.0
_BEGIN = b'{"index": '


class PromptLine(NamedTuple):
    """One line of a file of prompts: its place, for messages, and its keys; `prompt` is the text to continue."""

    name: str
    content: dict[str, Any]


def generate_file(options: GenerateArguments, path: Path) -> int:
    """Continue every prompt of a file; returns 1 if sequences ended because the model's output was not finite, or 0."""
    source, output = user_path(options.prompts, "--prompts"), user_path(options.output, "--output")
    prompts = read_prompts(source)
    written: set[tuple[int, int]] = set()
    if output.exists():
        if not output.is_file():
            raise UserError(f"{output} is no regular file; choose another --output")
        if output.samefile(source):
            raise UserError(f"--output {output} is the file of the prompts; choose another")
        if not options.append:
            raise UserError(f"{output} exists; add --append to continue it, or choose another --output")
        written = read_written(output, prompts)
    # A prompt that has some of its samples makes all of them again, with the same tokens.
    left = [n for n in range(len(prompts)) if any((n, sample) not in written for sample in range(options.samples))]
    if len(left) < len(prompts):
        print(f"{output} has the texts of {len(prompts) - len(left):,} prompts", file=sys.stderr)
    return _generate(options, path, output, prompts, left, written) if left else 0


def _generate(
    options: GenerateArguments,
    path: Path,
    output: Path,
    prompts: Sequence[PromptLine],
    left: Sequence[int],
    written: Collection[tuple[int, int]],
) -> int:
    threads = Threads(choose_device(options.device))
    loaded = load(options, path, [(prompts[number].name, prompts[number].content["prompt"]) for number in left])
    requests = [
        loaded.request(options, index, prompts[number].name, number=number) for index, number in enumerate(left)
    ]
    number_of = {id(request): number for request, number in zip(requests, left, strict=True)}
    broken, tokens, done = [], 0, 0
    begin = said = time.monotonic()

    def progress() -> str:
        rate = tokens / (time.monotonic() - begin)
        return f"{done:,} of {len(requests) * options.samples:,} sequences, {tokens:,} tokens, {rate:,.0f} tokens/s"

    with memory_errors(loaded.model.device), _open(output, append=options.append) as file:
        for update in Engine(loaded.model, loaded.tokenizer).run(requests):
            tokens += update.token is not None
            threads.say()
            if (completion := update.completion) is not None:
                done += 1
                number = number_of[id(update.request)]
                if (number, completion.sample) not in written:
                    write_line(file, output, _content(options, number, prompts[number], completion))
                if completion.finish_reason == "error":
                    broken.append(update.request.name)
            if time.monotonic() - said > _INTERVAL_SECONDS:
                said = time.monotonic()
                print(progress(), file=sys.stderr, flush=True)
    print(f"{output}: {progress()}", file=sys.stderr)
    for name in broken:
        print(f"{name}: the model's output is not finite; its text ends there", file=sys.stderr)
    return int(bool(broken))


def read_prompts(path: Path) -> list[PromptLine]:
    """Read a file of prompts: `{"prompt": TEXT}` a line, whose other keys are kept; or, in a `.txt`, a text a line."""
    content = read_file(path).removeprefix(codecs.BOM_UTF8)
    plain = path.suffix.lower() == ".txt"
    if not content.strip():
        expected = "a prompt a line" if plain else 'a line for each prompt, {"prompt": TEXT}'
        raise UserError(f"{path} is empty; expected {expected}")
    lines = []
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        name = f"{path} line {number}"
        if plain:
            if line.strip():
                lines.append(PromptLine(name, {"prompt": _decode(line, name).removesuffix("\r")}))
            continue
        value = _parse(line, name)
        prompt = value.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f'{name} has no "prompt" with a text: {_short(line)}')
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UserError(f"{name} has half of a surrogate pair, which is no character: {_short(line)}")
        lines.append(PromptLine(name, value))
    return lines


def read_written(path: Path, prompts: Sequence[PromptLine]) -> set[tuple[int, int]]:
    """Index and sample of every line of an output; a last line that is not whole, after a full disk, is cut off."""
    found = set()
    texts = dict(enumerate(line.content["prompt"] for line in prompts))
    try:
        with path.open("r+b") as file:
            for number, line in enumerate(file, start=1):
                name = f"{path} line {number}"
                if not line.endswith(b"\n") and line[: len(_BEGIN)] == _BEGIN[: len(line)]:
                    file.truncate(path.stat().st_size - len(line))
                    break
                value = _parse(line, name)
                index, sample = value.get("index"), value.get("sample", 0)
                if (
                    not isinstance(index, int)
                    or not isinstance(sample, int)
                    or value.get("prompt") != texts.get(index, "")
                ):
                    raise UserError(f"{name} continues none of the prompts; choose another --output: {_short(line)}")
                found.add((index, sample))
    except OSError as error:
        raise UserError(f"cannot continue {path}: {error.strerror}") from error
    return found


def _open(path: Path, *, append: bool) -> FileIO:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab" if append else "xb", buffering=0)


def write_line(file: FileIO, path: Path, content: dict[str, Any]) -> None:
    """Write one line of an output."""
    # Characters that no UTF-8 has become escapes.
    left = memoryview((json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
    with writing(path, "; --append continues it"):
        while left:
            left = left[file.write(left) :]


def _content(options: GenerateArguments, index: int, line: PromptLine, completion: Completion) -> dict[str, Any]:
    # First, and not a key of the prompt's line.
    content = {"index": index} | line.content | {"index": index}
    content |= {"text": completion.text, "tokens": completion.tokens, "finish_reason": completion.finish_reason}
    if options.samples > 1:
        content["sample"] = completion.sample
    if options.logprobs:
        content["log_probabilities"] = completion.log_probabilities
    return content


def _decode(line: bytes, name: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeError as error:
        raise UserError(f"{name} is not UTF-8 text") from error


def _parse(line: bytes, name: str) -> dict[str, Any]:
    text = _decode(line, name)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UserError(f"{name} is not JSON: {_short(line)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} must hold a JSON object, got {_short(line)}")
    return value


def _short(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:59] + "…")
