"""Parquet on disk: rows, places, and files that are damaged or of another kind."""

import hashlib
import io
import subprocess
import sys

import pytest

from tests import warm
from tests.children import environment, wait_for_end
from tests.data.loaders import open_loader
from trifocal.data.sources import parquet
from trifocal.data.sources.base import BadDocuments, Document
from trifocal.data.sources.parquet import ParquetSource
from trifocal.errors import UserError

pytest.importorskip("pyarrow")
import pyarrow
import pyarrow.parquet


def open_source(path, field="text", bad=None):
    return ParquetSource.from_path(f"parquet:{path}#{field}", str(path), field, bad)


def error_of(path, field="text"):
    with pytest.raises(UserError) as info, open_loader(f"parquet:{path}#{field}") as loader:
        next(loader)
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize("rows", [7, 1000])
def test_every_row_once_and_from_every_place(write_parquet, texts, rows):
    content = [*texts(50)]
    content[0] = content[7] = content[31] = content[49] = None
    content[8] = content[32] = ""
    path = write_parquet("a.parquet", content, field="body", rows=rows)
    source = open_source(path, "body", bad=BadDocuments("skip"))
    whole = list(source.read(0, None))
    assert [document for document, _ in whole] == [
        Document(f"a.parquet#{row}", text) for row, text in enumerate(content) if text
    ]
    for index, (_, cursor) in enumerate(whole):
        assert list(source.read(0, cursor)) == whole[index + 1 :]


def test_more_rows_in_a_group_than_are_decoded_at_once(write_parquet):
    source = open_source(write_parquet("a.parquet", [f"{i}" for i in range(5000)], rows=5000))
    whole = list(source.read(0, None))
    assert [document.text for document, _ in whole] == [f"{i}" for i in range(5000)]
    for index in (0, 1022, 1023, 1024, 1025, 3000, 4998):
        assert next(source.read(0, whole[index][1])) == whole[index + 1]


def test_other_string_types(tmp_path):
    for number, kind in enumerate([pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(["one", "two", "one"]).cast(kind)}), path)
        assert [document.text for document, _ in open_source(path).read(0, None)] == ["one", "two", "one"]


def test_a_missing_field_names_those_there_are(write_parquet):
    path = write_parquet("a.parquet", ["x"], field="content")
    assert f"{path} has no field 'text'; its fields are id, content" in error_of(path)
    assert f"{path}: field 'id' must hold strings or lists of messages, got int64" in error_of(path, "id")


def test_a_field_beside_one_of_the_same_path(tmp_path):
    """Parquet selects columns by their path: both come, in the file's order."""
    table = pyarrow.table({"meta": [{"text": "inside", "n": 1}], "meta.text": ["beside"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    source = ParquetSource.from_path("parquet", str(tmp_path), "meta.text")
    assert [document.text for document, _ in source.read(0, None)] == ["beside"]


def test_files_that_are_broken(write_parquet, texts, tmp_path):
    assert f"no .parquet file in folder {tmp_path}" in error_of(tmp_path)
    path = write_parquet("a.parquet", texts(100))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"{path} is not a readable parquet file: " in error_of(path)
    # The footer is fine, the first pages are not.
    path.write_bytes(whole[:4] + b"\xff" * 200 + whole[204:])
    assert f"{path}: row group 0 cannot be read: " in error_of(path)


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.parquet"
    broken = pyarrow.array([b"fine", b"caf\xe9"]).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), path)
    assert f"{path}: row 1: field 'text' is not UTF-8 at byte 3; " in error_of(path)
    bad = BadDocuments("skip")
    assert [document.text for document, _ in open_source(path, bad=bad).read(0, None)] == ["fine"]
    assert bad.first == f"{path}: row 1: field 'text' is not UTF-8 at byte 3"


class CountedFile(io.BytesIO):
    """Counts the bytes that are read."""

    def read(self, size=-1):
        content = super().read(size)
        self.count = getattr(self, "count", 0) + len(content)
        return content


def test_going_on_reads_the_footer_and_the_present_row_group(write_parquet, monkeypatch):
    texts = ["".join(hashlib.sha256(f"{i} {j}".encode()).hexdigest() for j in range(20)) for i in range(800)]
    content = write_parquet("a.parquet", texts).read_bytes()
    opened = []

    def open_address(address):
        assert address == "hf://a.parquet"
        opened.append(CountedFile(content))
        return opened[-1]

    monkeypatch.setattr(parquet, "open_address", open_address)
    source = ParquetSource("a", {"a.parquet": "hf://a.parquet"}, "text", "")
    whole = list(source.read(0, None))
    assert next(source.read(0, whole[500][1])) == whole[501]
    assert opened[1].count < opened[0].count / 3


BOMB = """
import re, sys
from trifocal.data.sources.parquet import ParquetSource
source = ParquetSource.from_path("parquet:bomb", sys.argv[1], "text")
for number, _ in zip(range(5), source.read(0, None), strict=False):
    pass
print(number, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def test_a_small_file_of_20_gb_of_text_is_read_in_small_parts(tmp_path):
    path = tmp_path / "a.parquet"
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000), ["a" * 20_000_000])
    pyarrow.parquet.write_table(
        pyarrow.table({"text": column}), path, compression="brotli", store_schema=False,
        dictionary_pagesize_limit=1 << 30,
    )  # fmt: skip
    assert path.stat().st_size < 1000
    with (tmp_path / "out").open("wb") as out:
        command = [sys.executable, "-c", BOMB, str(path)]
        process = warm.popen(command, stdout=out, stderr=subprocess.DEVNULL, env=environment())
    assert wait_for_end(process, 120) == 0
    number, kilobytes = map(int, (tmp_path / "out").read_text().split())
    assert number == 4 and kilobytes < 1_500_000
