"""Rows against the documents that they are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trifocal.data import Batch, DataConfig, make_loader, make_tokenizer

SEPARATOR = 256


def write_texts(folder: Path, texts: list[str]) -> str:
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return f"text:{folder}"


def segments(batch: Batch) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Document, tokens and targets between each two borders."""
    rows, length = batch.tokens.shape
    borders = range(0, rows * length + 1, length) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    tokens, targets = batch.tokens.numpy().reshape(-1), batch.targets.numpy().reshape(-1)
    assert len(batch.document_ids) == len(borders) - 1
    return [
        (name, tokens[begin:end], targets[begin:end])
        for name, begin, end in zip(batch.document_ids, borders, borders[1:], strict=False)
    ]


@pytest.mark.parametrize(("sequence_length", "batch_size"), [(1, 3), (7, 1), (64, 4), (1000, 2)])
def test_every_token_of_every_document_once_an_epoch_and_in_order(
    tmp_path: Path, texts: Callable[..., list[str]], sequence_length: int, batch_size: int
) -> None:
    documents = texts(40)
    config = DataConfig(source=write_texts(tmp_path, documents), validation_fraction=0.0, shuffle_sequences=1)
    expected = {f"{number:03}.txt": [*text.encode(), SEPARATOR] for number, text in enumerate(documents) if text}
    total = sum(map(len, expected.values()))
    stream: list[tuple[str, int, int]] = []
    with make_loader(
        config,
        tokenizer=make_tokenizer("bytes"),
        sequence_length=sequence_length,
        batch_size=batch_size,
        vocab_size=257,
    ) as loader:
        index = 0
        while len(stream) < 3 * total:
            batch = next(loader)
            assert batch.sample_index == index
            index += batch_size
            assert batch.epoch == len(stream) // total
            for name, tokens, targets in segments(batch):
                stream += zip([name] * len(tokens), tokens.tolist(), targets.tolist(), strict=True)
    orders = []
    for epoch in range(3):
        got: dict[str, list[int]] = defaultdict(list)
        for name, token, target in stream[epoch * total : (epoch + 1) * total]:
            # The target is the document's next token, wherever a row ends; nothing follows the separator.
            whole = expected[name]
            at = len(got[name])
            assert target == (whole[at + 1] if at + 1 < len(whole) else -100)
            got[name].append(token)
        assert got == expected
        orders.append(list(got))
    assert orders[0] != orders[1] != orders[2] != sorted(orders[0])


def test_borders_are_row_heads_and_separators(tmp_path: Path, texts: Callable[..., list[str]]) -> None:
    config = DataConfig(source=write_texts(tmp_path, texts(40)), validation_fraction=0.0)
    kinds = set()
    with make_loader(
        config, tokenizer=make_tokenizer("bytes"), sequence_length=96, batch_size=2, vocab_size=257
    ) as loader:
        for _ in range(60):
            batch = next(loader)
            flat = batch.tokens.reshape(-1)
            expected = {0, 96, 192}
            inside = [i + 1 for i in range(192) if flat[i] == SEPARATOR and (i + 1) % 96]
            kinds.add(bool(inside))
            if batch.cu_seqlens is None:
                assert not inside
            else:
                assert batch.cu_seqlens.dtype.is_signed and batch.cu_seqlens.itemsize == 4
                assert batch.cu_seqlens.tolist() == sorted(expected | set(inside))
    assert kinds == {True, False}


def test_same_seed_same_order_other_seed_other_order(tmp_path: Path, texts: Callable[..., list[str]]) -> None:
    source = write_texts(tmp_path, texts(40))

    def order(seed: int) -> tuple[str, ...]:
        with make_loader(
            DataConfig(source=source, seed=seed, shuffle_sequences=1),
            tokenizer=make_tokenizer("bytes"),
            sequence_length=512,
            batch_size=4,
            vocab_size=257,
        ) as loader:
            return next(loader).document_ids

    assert order(1) == order(1) != order(2)


def test_documents_of_one_file_are_shuffled_in_blocks(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text("".join(f'{{"text": "{i:04}"}}\n' for i in range(64)))
    config = DataConfig(source=f"jsonl:{tmp_path}", shuffle_documents=16, shuffle_sequences=1, validation_fraction=0.0)
    with make_loader(
        config, tokenizer=make_tokenizer("bytes"), sequence_length=5, batch_size=64, vocab_size=257
    ) as loader:
        numbers = [int(name.rpartition(":")[2]) for name in next(loader).document_ids]
    blocks = [numbers[i : i + 16] for i in range(0, 64, 16)]
    for number, block in enumerate(blocks):
        assert sorted(block) == list(range(16 * number + 1, 16 * number + 17)) != block
    # Each block has an order of its own.
    assert len({tuple(np.argsort(block)) for block in blocks}) == 4


def test_train_and_validation_share_no_text(tmp_path: Path, texts: Callable[..., list[str]]) -> None:
    documents = texts(400, longest=10)
    # Twice under other names: copies must fall on the same side.
    source = write_texts(tmp_path, documents + documents)
    seen = {}
    for split in ("train", "validation"):
        with make_loader(
            DataConfig(source=source, validation_fraction=0.2, shuffle_sequences=1),
            tokenizer=make_tokenizer("bytes"),
            sequence_length=256,
            batch_size=8,
            vocab_size=257,
            split=split,
        ) as loader:
            seen[split] = set()
            for batch in loader:
                if batch.epoch:
                    break
                seen[split] |= {int(name.removesuffix(".txt")) % 400 for name in batch.document_ids}
    assert not seen["train"] & seen["validation"]
    assert len(seen["train"] | seen["validation"]) == 400
    # 400 draws of probability 0.2: within five standard deviations.
    assert abs(len(seen["validation"]) - 80) < 40
