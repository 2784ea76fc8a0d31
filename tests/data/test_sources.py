"""Documents from files, and the messages if files cannot be read."""

import errno
import gzip
import json
import os
import platform
import re
import sysconfig
from pathlib import Path

import pytest

from tests.data.loaders import open_loader
from trifocal.cli import main
from trifocal.data import make_tokenizer
from trifocal.data.data_config import parse_source
from trifocal.data.sources.base import BadDocuments, Document
from trifocal.data.sources.builtin import BuiltinSource
from trifocal.data.sources.text import JsonlSource, TextSource
from trifocal.data.stream import in_validation
from trifocal.errors import UserError


def read_all(source):
    return [document for shard in range(len(source.shards)) for document, _ in source.read(shard, None)]


def check_cursors(source):
    """From every cursor on come the very documents that came after it."""
    for shard in range(len(source.shards)):
        whole = list(source.read(shard, None))
        for index, (_, cursor) in enumerate(whole):
            assert list(source.read(shard, cursor)) == whole[index + 1 :]


def first_error(source, **settings):
    """The message of the error up to the first batch: one line."""
    with pytest.raises(UserError) as info, open_loader(source, **settings) as loader:
        next(loader)
    message = str(info.value)
    assert "\n" not in message
    return message


def test_builtin_is_the_standard_library_without_its_tests():
    source = BuiltinSource()
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = {document.id: document.text for document in read_all(source)}
    assert documents["json/decoder.py"] == (root / "json" / "decoder.py").read_bytes().decode()
    assert len(documents) > 300 and sum(map(len, documents.values())) > 5_000_000
    assert not [name for name in documents if {"test", "tests", "site-packages"} & set(name.split("/"))]
    again = BuiltinSource()
    assert (again.shards, again.fingerprint) == (source.shards, source.fingerprint)
    assert source.name == f"builtin of Python {platform.python_version()}"
    ((_, cursor),) = source.read(0, None)
    assert list(source.read(0, cursor)) == []


def test_builtin_leaves_out_what_is_not_utf8(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "b.py").write_text("pass\n")
    (tmp_path / "empty.py").write_text("")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict.fromkeys(("stdlib", "purelib", "platlib"), str(tmp_path)))
    # With any setting: nobody chose these files.
    bad = BadDocuments("stop")
    assert read_all(BuiltinSource(bad=bad)) == [Document("b.py", "pass\n")]
    assert len(bad.skipped) == 1 and "a.py is not UTF-8: byte 5 is 0xe9" in bad.first


@pytest.mark.parametrize("document_bytes", [64, 1000, 1 << 16])
def test_a_long_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, texts, document_bytes):
    text = "\n".join(texts(60)) + "\r\nlast ☃"
    (tmp_path / "a.txt").write_bytes(text.encode())
    source = TextSource(str(tmp_path / "a.txt"), document_bytes=document_bytes)
    documents = read_all(source)
    assert "".join(document.text for document in documents) == text
    assert len({document.id for document in documents}) == len(documents)
    if document_bytes > len(text.encode()):
        assert [document.id for document in documents] == ["a.txt"]
    else:
        assert len(documents) > 1
        for document in documents[:-1]:
            assert len(document.text.encode()) <= document_bytes
        # Lines are shorter than the limit here (but for a few at 64), so every cut is at one's end.
        if document_bytes == 1000:
            assert all(document.text.endswith("\n") for document in documents[:-1])
    check_cursors(source)


def test_a_text_without_lines_is_cut_between_characters(tmp_path):
    for text in ("é" * 500, *("x" * shift + "𝄞" * 500 for shift in range(4))):
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        source = TextSource(str(tmp_path / "a.txt"), document_bytes=64)
        assert "".join(document.text for document in read_all(source)) == text
    check_cursors(source)


def test_folders_and_globs(tmp_path):
    for name in ("b.txt", "a/c.txt", "a/d.md", "a/e.rst", ".git/f.txt", "a/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert TextSource(str(tmp_path)).shards == ["a/c.txt", "a/d.md", "b.txt"]
    assert TextSource(f"{tmp_path}/**/*.txt").shards == ["a/c.txt", "b.txt"]
    assert TextSource(f"{tmp_path}/a/*").shards == ["c.txt", "d.md", "e.rst"]
    # Moved data are the same data.
    moved = tmp_path.with_name("moved")
    before = TextSource(str(tmp_path)).fingerprint
    tmp_path.rename(moved)
    assert TextSource(str(moved)).fingerprint == before
    moved.rename(tmp_path)


def test_jsonl_reads_the_field(tmp_path):
    records = [{"body": "one ☃", "id": 1}, {"body": ""}, {"body": "two\nlines"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n  \n" + '{"body": "last"}')
    source = JsonlSource(str(path), "body")
    assert read_all(source) == [
        Document("a.jsonl:1", "one ☃"),
        Document("a.jsonl:3", "two\nlines"),
        Document("a.jsonl:6", "last"),
    ]
    check_cursors(source)


def test_a_nested_field_of_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"a": {"b": {"text": "deep"}}}, {"a.b.text": "flat", "a": {"b": {"text": "deep"}}}, {"a": {"b": "x"}}]
    path.write_text("\n".join(map(json.dumps, records)))
    bad = BadDocuments("skip")
    documents = read_all(JsonlSource(str(path), "a.b.text", bad=bad))
    assert [document.text for document in documents] == ["deep", "flat"]
    assert bad.first == f"{path}:3: no field 'a.b.text'; it has 'a'"


def test_kind_path_and_field_of_a_source(tmp_path, monkeypatch):
    """A name may have a number sign."""
    monkeypatch.chdir(tmp_path)
    assert parse_source("builtin") == ("builtin", "", "text")
    assert parse_source("hf:owner/name:config#messages") == ("hf", "owner/name:config", "messages")
    assert parse_source("text:a#b.txt") == ("text", "a#b.txt", "text")
    assert parse_source("jsonl:c#.jsonl") == ("jsonl", "c", ".jsonl")
    (tmp_path / "c#.jsonl").touch()
    assert parse_source("jsonl:c#.jsonl") == ("jsonl", "c#.jsonl", "text")
    assert parse_source("jsonl:c#.jsonl#body") == ("jsonl", "c#.jsonl", "body")


def test_a_file_may_begin_with_a_byte_order_mark(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone \ufefftwo", encoding="utf-8")
    assert read_all(TextSource(str(tmp_path))) == [Document("a.txt", "one \ufefftwo")]
    (tmp_path / "b.py").write_text("\ufeffpass", encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict.fromkeys(("stdlib", "purelib", "platlib"), str(tmp_path)))
    assert read_all(BuiltinSource()) == [Document("b.py", "pass")]
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "one"}\r\n{"text": "\ufefftwo"}\r\n'.encode())
    source = JsonlSource(str(path), "text")
    documents, cursors = zip(*source.read(0, None), strict=True)
    assert documents == (Document("a.jsonl:1", "one"), Document("a.jsonl:2", "\ufefftwo"))
    assert [document for document, _ in source.read(0, cursors[0])] == [documents[1]]
    path.write_bytes(b"\xef\xbb\xbf\n")
    assert not list(source.read(0, None))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("builtn", "unknown data.source 'builtn'; the nearest is builtin (known: synthetic, recall, needle, builtin"),
        ("text", "data.source 'text' lacks its path; write text:PATH"),
        ("synthetic:5", "synthetic takes no path"),
        ("jsonl:a.jsonl#", "empty field after #"),
        ("text:/no/such/file.txt", "no such file or folder: /no/such/file.txt"),
        ("jsonl:/no/such/*.jsonl", "no file matches /no/such/*.jsonl"),
        ("text:/dev/zero", "/dev/zero is no regular file"),
        ("text:a\0b.txt", "has a NUL character"),
        ("text:~nobody-of-this-name/a.txt", "~nobody-of-this-name/a.txt"),
        ("text:configs", ".toml); a glob such as configs/**/*.* reads"),
    ],
)
def test_bad_sources(source, message):
    assert message in first_error(source)


def test_a_path_without_its_kind_gets_a_hint(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("text")
    assert f"for this path write text:{path}" in first_error(str(path))
    path = path.rename(tmp_path / "a.parquet")
    assert f"for this path write parquet:{path}" in first_error(str(path))


def test_a_file_that_goes_away(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("text " * 20)
    with open_loader(f"text:{tmp_path}", validation_fraction=0.0) as loader:
        (tmp_path / "b.txt").unlink()
        with pytest.raises(UserError, match=r"\(b\.txt\) cannot be read: .*No such file"):
            for _ in range(20):
                next(loader)


def test_what_cannot_be_read_in_a_folder_is_named(tmp_path, monkeypatch):
    access, scan = os.access, os.scandir

    def refuse(path):
        if Path(path).name == "forbidden":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    # A root may read all: what the system says is what counts.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "a.txt" and access(path, mode))
    monkeypatch.setattr(os, "scandir", refuse)
    for make, name, reason in (
        (lambda path: path.write_text("text"), "a.txt", "no permission"),
        (os.mkfifo, "b.txt", "no regular file"),
        (lambda path: path.symlink_to("nowhere"), "link", "a link to nothing"),
        (Path.mkdir, "forbidden", "Permission denied"),
    ):
        make(tmp_path / name)
        says = f"{tmp_path / name} cannot be read ({reason}); mend it, or name the others by a glob"
        assert first_error(f"text:{tmp_path}").endswith(says)
        if name != "forbidden":
            assert first_error(f"text:{tmp_path}/*").endswith(says)
            (tmp_path / name).unlink()


def test_a_folder_is_read_through_links_and_says_what_it_leaves_out(tmp_path):
    folder, other = tmp_path / "folder", tmp_path / "other"
    for name in ("a.jsonl", "b.JSONL", "c.jsonl.GZ", "d.jsonl.zst", "e.jsonl.zst", "f.json", "README", ".hidden"):
        folder.mkdir(exist_ok=True)
        line = b'{"text": "' + name.encode() + b'"}\n'
        (folder / name).write_bytes(gzip.compress(line) if name.endswith("GZ") else line)
    other.mkdir()
    (other / "g.jsonl").write_text('{"text": "linked"}')
    for link in ("first", "second"):
        (folder / link).symlink_to(other)
    # Around a circle the walk comes back to where it began.
    (other / "back").symlink_to(folder)
    source = JsonlSource(str(folder), "text")
    assert source.shards == ["a.jsonl", "b.JSONL", "c.jsonl.GZ", "first/g.jsonl"]
    assert [document.text for document in read_all(source)] == ["a.jsonl", "b.JSONL", "c.jsonl.GZ", "linked"]
    assert source.left_out == "2 .zst, 1 .json, 1 without suffix"
    with open_loader(f"jsonl:{folder}") as loader:
        assert loader.describe() == (
            f"jsonl:{folder}#text (fingerprint {loader.fingerprint}): 4 files; left out: {source.left_out}"
        )
    assert re.search(r"no \.parquet file in folder \S+ \(it has 3 \.jsonl, 2 \.zst", first_error(f"parquet:{folder}"))


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    for offset in (0, 5, 700, 1499):
        content = bytearray(b"line of text\n" * 200)[:1500]
        content[offset] = 0xE9
        path.write_bytes(content)
        message = first_error(f"text:{path}", shuffle_documents=10_000)
        assert f"{path} is not UTF-8: byte {offset} is 0xe9" in message
    path.write_bytes("utf-16 from elsewhere".encode("utf-16"))
    assert f"{path} is not UTF-8: byte 0 is 0xff" in first_error(f"text:{path}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "not JSON that can be read: Expecting property name enclosed in double quotes"),
        (b'["a"]', "expected an object with 'text', got list"),
        (b'{"body": "x", "id": 1}', "no field 'text'; it has 'body', 'id'"),
        (b'{"text": 5}', "field 'text' must be a string or a list of messages, got int"),
        (b'{"text": "caf\xe9"}', "not JSON that can be read: 'utf-8' codec can't decode byte 0xe9 in position 13"),
        (b'{"text": "a \\ud800 b"}', "field 'text' holds half a surrogate pair at character 2"),
    ],
)
def test_broken_jsonl_lines(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    assert f"{path}:3: {message}" in first_error(f"jsonl:{path}")


def test_a_password_in_an_address_is_refused_and_written_nowhere(tmp_path, capfd):
    source = "parquet:https://me:hunter2@host/a.parquet?token=hunter2"
    assert (
        main(["train", "configs/showcase.toml", "--data.source", source, "--run.directory", str(tmp_path / "run")]) == 2
    )
    captured = capfd.readouterr()
    assert "data.source is an address" in captured.err and "HF_TOKEN" in captured.err
    assert "hunter2" not in captured.out + captured.err and not (tmp_path / "run").exists()


def test_an_empty_validation_split(tmp_path):
    """Of a text, or because there is no text at all."""
    path = tmp_path / "a.txt"
    path.write_text("a single document")

    def error(fraction, **settings):
        settings |= {"validation_fraction": fraction, "split": "validation"}
        with open_loader(f"text:{path}", **settings) as loader, pytest.raises(UserError) as info:
            next(loader)
        return str(info.value)

    # As many documents as are shuffled at a time are documents, too.
    for fraction, shuffle in ((0.0, 1024), (1e-9, 1024), (0.0, 1)):
        empty = "has no document to validate on (of 1 read); give it more text, or raise data.validation_fraction, now"
        assert f"{empty} {fraction:g}" in error(fraction, shuffle_documents=shuffle)
    path.write_text("")
    assert error(0.05).startswith(f"text:{path} has no document to validate on (of 0 read); give it more text")


def test_compressed_files_are_read_from_any_cursor(tmp_path, texts):
    lines = texts(100)
    records = [json.dumps({"text": text}) for text in lines]
    plain = {"a.txt": "\n".join(lines).encode(), "b.jsonl": "\n".join(records).encode()}
    for name, content in plain.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / "packed").mkdir(exist_ok=True)
        (tmp_path / "packed" / f"{name}.gz").write_bytes(gzip.compress(content))
    for make in (lambda path: TextSource(path, document_bytes=200), lambda path: JsonlSource(path, "text")):
        source = make(str(tmp_path / "packed"))
        name = "a.txt" if isinstance(source, TextSource) else "b.jsonl"
        assert [d.text for d in read_all(source)] == [d.text for d in read_all(make(str(tmp_path / name)))]
        check_cursors(source)


def test_compressed_files_that_are_damaged_or_of_another_kind(tmp_path):
    content = gzip.compress(b"some text\n" * 500)
    changed = content[:30] + b"\xff" * 20 + content[50:]
    for number, broken in enumerate([content[:-20], changed, b"no gzip at all", b""]):
        path = tmp_path / f"{number}.txt.gz"
        path.write_bytes(broken)
        assert f"{path} is a damaged .gz file: " in first_error(f"text:{path}", validation_fraction=0.0)
    (tmp_path / "a.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    says = f"{tmp_path / 'a.txt.zst'}: .zst files are not read; unpack it, or compress it as .gz"
    assert says in first_error(f"text:{tmp_path / 'a.txt.zst'}")


def splits(path, fraction):
    """The documents of training and of validation."""
    source = TextSource(str(path), validation_fraction=fraction)
    documents = read_all(source)
    held_out = [
        in_validation(document.text, fraction) if document.held_out is None else document.held_out
        for document in documents
    ]
    return (
        [document for document, held in zip(documents, held_out, strict=True) if not held],
        [document for document, held in zip(documents, held_out, strict=True) if held],
    )


# 1,200 bytes hold a piece of 64 only with the largest fraction.
@pytest.mark.parametrize(
    ("kind", "size", "fraction"),
    [("lines", 1200, 0.5), ("one line", 20_000, 0.05), ("lines", 1_115_394, 0.01), ("the same word", 1_115_394, 0.01)],
)
def test_of_one_text_file_some_is_held_out(tmp_path, texts, size, kind, fraction):
    """Tiny Shakespeare is one file of 1,115,394 bytes."""
    text = "\n".join(texts(400)) * (size // 30_000 + 1)
    content = "word " * size if kind == "the same word" else text.replace("\n", " " if kind == "one line" else "\n")
    content_bytes = content.encode()[:size].decode(errors="ignore").encode()
    path = tmp_path / "a.txt"
    path.write_bytes(content_bytes)
    train, validation = splits(path, fraction)
    order = sorted(train + validation, key=lambda d: int(d.id.partition("@")[2] or 0))
    assert "".join(document.text for document in order).encode() == content_bytes
    share = sum(len(d.text.encode()) for d in validation) / len(content_bytes)
    # At least the piece that holds the first mark; at most all the marks' pieces, each as long as allowed.
    assert 0 < share <= fraction * 1.5 + 64 / size
    assert splits(path, fraction) == (train, validation)
    if size == 20_000:
        check_cursors(TextSource(str(path), validation_fraction=fraction))


def test_a_piece_is_held_out_for_each_of_its_bytes(tmp_path):
    """Of 127 bytes the one in the middle is marked: the last of the first piece, later ones inside of others."""
    path = tmp_path / "a.txt"
    path.write_text(("x" * 63 + "\n") * 10)
    source = TextSource(str(path), validation_fraction=0.5038, document_bytes=64)
    assert [document.held_out for document in read_all(source)] == [True, False] * 5


def test_a_folder_of_few_short_files_has_a_validation_split(tmp_path, texts):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("\n".join(texts(400, seed=number)))
    train, validation = splits(tmp_path, 0.05)
    assert len(validation) >= 4 and len(train) > 10 * len(validation)


BAD = [b'{"text": null}', b"[", b'{"body": 1}', b'{"text": "\xe9"}', b'{"text": "\\ud800"}', b'{"text": 5}', b'"a"']


def test_bad_documents_are_skipped_and_counted_alike_everywhere(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good = [f"{number} good" for number in range(50)]
    lines = [json.dumps({"text": text}).encode() for text in good]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines[:20] + BAD + lines[20:]))
    column = pyarrow.array([*good[:20], None, None, *good[20:]])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", row_group_size=15)
    (tmp_path / "text").mkdir()
    for number, text in enumerate(good):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    (tmp_path / "text" / "odd.txt").write_bytes(b"caf\xe9")
    for source, bad in (("jsonl:a.jsonl", len(BAD)), ("parquet:a.parquet", 2), ("text:text", 1)):
        kind, _, path = source.partition(":")
        settings = {"validation_fraction": 0.0, "shuffle_documents": 1000, "shuffle_sequences": 1}
        with open_loader(f"{kind}:{tmp_path / path}", 64, on_bad_document="skip", **settings) as loader:
            texts = "".join(make_tokenizer("bytes").decode(next(loader).tokens.reshape(-1).tolist()) for _ in range(40))
            # Through several epochs, and each counts once.
            assert all(text in texts for text in good[:3])
            assert len(loader.bad_documents.skipped) == bad
            assert str(tmp_path) in loader.bad_documents.first
        says = first_error(f"{kind}:{tmp_path / path}", **settings)
        assert 'data.on_bad_document "skip" leaves such documents out' in says


def test_a_line_longer_than_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("trifocal.data.sources.text.MAX_FILE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + json.dumps({"text": "x" * 5000}))
    assert first_error(f"jsonl:{path}").startswith(f"{path}:2: the line has over 1,000 bytes")
