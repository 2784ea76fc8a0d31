"""Files of prompts and of what was made of them: a JSON object a line, in the same order."""

import codecs
import contextlib
import fcntl
import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from trifocal.errors import UserError
from trifocal.inference.request import Completion
from trifocal.paths import read_small_file

_LIMIT_BYTES = 1 << 30


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
        content = read_small_file(path, _LIMIT_BYTES)
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


@contextlib.contextmanager
def open_output(path: Path, *, append: bool) -> Iterator[FileIO]:
    """An output, locked: a second process that opens it is refused.

    Args:
        path: The file; its folder is made where it is missing.
        append: Go on with a file that exists; it is refused otherwise.

    Raises:
        UserError: If it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no regular file; choose another --output")
        file = path.open("ab" if append else "xb", buffering=0)
    except FileExistsError:
        raise UserError(f"{path} exists; add --append to go on with it, or choose another --output") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path} is being written by another process; choose another --output") from None
        except OSError as error:
            raise UserError(f"cannot lock {path}: {error.strerror}") from error
        yield file


def count_written(path: Path, prompts: Sequence[PromptLine], samples: int) -> list[int]:
    """Number of samples that an output already has of each prompt; a torn last line is cut off.

    Args:
        path: The output, which `open_output` holds.
        prompts: The prompts to count; equal ones count in their order.
        samples: Lines for each prompt.

    Raises:
        UserError: If the output has a line that is no JSON object.
    """
    lines: Counter[str] = Counter()
    with path.open("r+b") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") and line.startswith(b'{"prompt": "'):
                file.truncate(path.stat().st_size - len(line))
                break
            lines[str(_parse(line, f"{path} line {number}").get("prompt"))] += 1
    written = []
    for prompt in prompts:
        written.append(min(lines[prompt.prompt], samples))
        lines[prompt.prompt] -= written[-1]
    return written


class OrderedWriter:
    """Writes completions as lines in the order of the prompts, each as soon as those before it are there.

    Args:
        file: The output, from `open_output`.
        path: Its path, for messages.
        prompts: In order.
        samples: Lines for each prompt.
        written: Number of samples that are there already, for each prompt.
        log_probabilities: Whether lines have them.
    """

    def __init__(
        self,
        file: FileIO,
        path: Path,
        prompts: Sequence[PromptLine],
        samples: int,
        written: Sequence[int],
        *,
        log_probabilities: bool,
    ) -> None:
        self._file, self._path, self._prompts, self._samples = file, path, prompts, samples
        self._log_probabilities = log_probabilities
        self._missing = deque(
            (number, sample) for number, count in enumerate(written) for sample in range(count, samples)
        )
        self._kept: dict[tuple[int, int], bytes] = {}

    def add(self, number: int, completion: Completion) -> None:
        """Take a completion of prompt `number`, counted from 0; one that is written already is not written again.

        Raises:
            UserError: If the output cannot be written.
        """
        line = json.dumps(self._content(number, completion), ensure_ascii=False) + "\n"
        # Characters that no UTF-8 has become escapes.
        self._kept[number, completion.sample] = line.encode("utf-8", "backslashreplace")
        try:
            while self._missing and self._missing[0] in self._kept:
                left = memoryview(self._kept.pop(self._missing.popleft()))
                while left:
                    left = left[self._file.write(left) :]
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}; --append goes on with it") from error

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


def _short(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:59] + "…")
