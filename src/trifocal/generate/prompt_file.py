"""Files of prompts and of what was made of them: a JSON object a line, in the same order.

An output that was interrupted goes on behind its last whole line. How it is made lies in a file beside it.
"""

import codecs
import contextlib
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trifocal.errors import UserError
from trifocal.generate.request import Completion
from trifocal.runlog.whole_files import write_whole

_WRITTEN = ("text", "tokens", "finish_reason", "sample", "log_probabilities")


@dataclass(frozen=True)
class PromptLine:
    """One line of a file of prompts.

    Attributes:
        name: File and number of the line, for messages.
        content: Everything in it; goes into the output too.
    """

    name: str
    content: dict[str, Any]

    @property
    def prompt(self) -> str:
        """The text to continue."""
        prompt: str = self.content["prompt"]
        return prompt


def read_prompts(path: Path) -> list[PromptLine]:
    """Read a file of prompts: `{"prompt": TEXT}` a line; other keys are kept for the output.

    Raises:
        UserError: If the file cannot be read or has no line, or a line is broken; names it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the prompts {path}: {error.strerror}") from error
    content = content.removeprefix(codecs.BOM_UTF8)
    if not content.strip():
        raise UserError(f'{path} is empty; a line for each prompt is expected, {{"prompt": TEXT}}')
    lines = []
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        name = f"{path} line {number}"
        value = _parse(line, name)
        prompt = value.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f'{name} has no "prompt" with a text: {_short(line)}')
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UserError(f"{name} has half of a surrogate pair, which is no character: {_short(line)}")
        lines.append(PromptLine(name, value))
    return lines


def count_finished(path: Path, prompts: Sequence[PromptLine], samples: int) -> int:
    """Lines that an output already has, after a torn last one was cut off; 0 if there is no output.

    Args:
        path: The output.
        prompts: Those that it is made of.
        samples: Lines for each prompt.

    Raises:
        UserError: If the output is of other prompts, or something else that must not be lost, or cannot be read.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path} is a device or a pipe; choose a file as --output")
        whole = file.read()
        end = whole.rfind(b"\n") + 1
        lines = whole[:end].split(b"\n")[:-1]
        expected = [prompt for prompt in prompts for _ in range(samples)]
        if len(lines) > len(expected):
            raise UserError(f"{path} has {len(lines)} lines, more than the prompts give; choose another --output")
        for number, (line, prompt) in enumerate(zip(lines, expected, strict=False), start=1):
            name = f"{path} line {number}"
            if _parse(line, name).get("prompt") != prompt.prompt:
                raise UserError(f"{name} is of another prompt than {prompt.name}; choose another --output")
        torn, begun = whole[end:], b""
        if len(lines) < len(expected):
            begun = _beginning(expected[len(lines)].content)
        if torn and not (begun and (torn.startswith(begun) or begun.startswith(torn))):
            raise UserError(f"{path} ends with {_short(torn)}, which is not of the prompts; choose another --output")
        file.truncate(end)
    return len(lines)


def settings_file(output: Path) -> Path:
    """The file beside an output that says how it is made."""
    return output.with_name(f"{output.name}.settings.json")


def write_settings(output: Path, settings: Mapping[str, Any]) -> None:
    """Keep how an output is made; values as JSON has them.

    Raises:
        UserError: If it cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(settings_file(output), json.dumps(settings, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {settings_file(output)}: {error.strerror}") from error


def check_settings(output: Path, settings: Mapping[str, Any]) -> None:
    """See that an output goes on as it was begun: its lines would not belong together otherwise.

    Raises:
        UserError: If it was made otherwise, or that is not known; names the difference.
    """
    kept = settings_file(output)
    try:
        begun = _parse(kept.read_bytes(), str(kept))
    except OSError as error:
        raise UserError(f"{output} cannot go on without {kept}: {error.strerror}; choose another --output") from error
    others = [f"{name} {begun.get(name)}" for name, value in settings.items() if begun.get(name) != value]
    if others:
        raise UserError(f"{output} was begun with {', '.join(others)}: go on with that, or choose another --output")


class OrderedWriter:
    """Writes completions as lines in the order of the prompts, each as soon as those before it are there.

    Args:
        file: Where to.
        prompts: In order.
        samples: Lines for each prompt.
        finished: Lines that are written already.
        log_probabilities: Whether lines have them.
    """

    def __init__(
        self, file: TextIO, prompts: Sequence[PromptLine], samples: int, finished: int, *, log_probabilities: bool
    ) -> None:
        self._file, self._prompts, self._samples = file, prompts, samples
        self._log_probabilities = log_probabilities
        self._next = finished
        self._kept: dict[int, str] = {}

    def add(self, number: int, completion: Completion) -> None:
        """Take a completion of prompt `number`, counted from 0; one that is written already is dropped."""
        line = number * self._samples + completion.sample
        if line < self._next:
            return
        self._kept[line] = json.dumps(self._content(number, completion), ensure_ascii=False)
        while self._next in self._kept:
            self._file.write(self._kept.pop(self._next) + "\n")
            self._file.flush()
            self._next += 1

    def _content(self, number: int, completion: Completion) -> dict[str, Any]:
        content = self._prompts[number].content | {
            "text": completion.text,
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
        }
        if self._samples > 1:
            content["sample"] = completion.sample
        if self._log_probabilities:
            content["log_probabilities"] = completion.log_probabilities
        return content


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[TextIO]:
    """An output to append to; characters that no UTF-8 has become escapes.

    Raises:
        UserError: If it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    with file:
        yield file


def _parse(line: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeError as error:
        raise UserError(f"{name} is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {_short(line)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} must hold a JSON object, got {_short(line)}")
    return value


def _beginning(content: dict[str, Any]) -> bytes:
    """How the line of a prompt begins, whatever is made of it."""
    own = dict(itertools.takewhile(lambda pair: pair[0] not in _WRITTEN, content.items()))
    return json.dumps(own, ensure_ascii=False)[:-1].encode("utf-8", "backslashreplace")


def _short(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:59] + "…")
