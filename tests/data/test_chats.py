"""Chats: the answers that a template marks, rows that never divide a chat, and the same from every kind of file."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

from tests.chat_data import MARKED, PLAIN, make_chats, write_tokenizer
from tests.data import loaders
from tests.data.loaders import same, take
from trifocal.data import make_tokenizer
from trifocal.data.sources.chats import BadChat, read_chat
from trifocal.data.tokenizers import ByteTokenizer
from trifocal.errors import UserError

LENGTH = 320
CHATS = make_chats(60)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The chats in four files of JSON lines."""
    return f"jsonl:{write_lines(tmp_path_factory.mktemp('lines'))}#messages"


def write_lines(folder, chats=CHATS):
    for part in range(4):
        text = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats[part::4])
        (folder / f"{part}.jsonl").write_text(text)
    return folder


def open_loader(source, tokenizer, *, length=LENGTH, **settings):
    settings = {"shuffle_sequences": 4, "shuffle_documents": 8, "vocab_size": tokenizer.vocab_size} | settings
    return loaders.open_loader(source, length, 2, tokenizer=tokenizer, **settings)


# A template without special tokens, and a tokenizer that joins the space of the prompt to the answer's first letter.
SPACED = MARKED.replace("assistant\n", "assistant ").replace("<|im_end|>", "\n").replace("<|im_start|>", "")


@pytest.mark.parametrize(("template", "merges"), [(MARKED, ()), (SPACED, (("Ġ", "Ã"), ("Ċ", "Ċ")))])
def test_tokens_and_answers_are_those_of_transformers(tmp_path, template, merges):
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path, template, merges)
    ours, theirs = make_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for chat in CHATS[:8]:
        encoded = theirs.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_special_tokens=False
        )
        tokens, answers = ours.encode_chat(chat)
        assert tokens.tolist() == encoded["input_ids"]
        assert answers.tolist() == [bool(mark) for mark in encoded["assistant_masks"]]
        assert 0 < answers.sum() < len(answers)


def test_threads_share_a_template(tokenizer):
    """The loaders of training and of validation do."""
    expected = [tokenizer.encode_chat(chat).answers.tolist() for chat in CHATS]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda chat: tokenizer.encode_chat(chat).answers.tolist(), CHATS * 10))
    finally:
        sys.setswitchinterval(interval)
    assert found == expected * 10


def test_answers_of_a_template_without_marks(tmp_path, tokenizer):
    plain = make_tokenizer(str(write_tokenizer(tmp_path, PLAIN)))
    for chat in CHATS[:8]:
        tokens, answers = plain.encode_chat(chat)
        assert tokens.tolist() == tokenizer.encode_chat(chat).tokens.tolist()
        # Up to the next message: the line's end behind <|im_end|> too.
        said = "".join(message["content"] + "\n" for message in chat if message["role"] == "assistant")
        assert plain.decode(tokens[answers]) == said


def test_a_template_that_writes_answers_anew_is_refused(tmp_path):
    again = PLAIN.replace("message.content + '<|im_end|>'", "('?' if loop.last else '') + message.content")
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path, again)))
    one, two = (next(chat for chat in CHATS if len(chat) == length) for length in (2, 4))
    assert tokenizer.encode_chat(one).answers.any()
    with pytest.raises(BadChat, match=r"writes message 1 differently when .* marks around them$"):
        tokenizer.encode_chat(two)


def test_tokenizers_without_a_template(tmp_path):
    advice = r"has no chat template; set data\.tokenizer to a folder that has one, such as the model's own"
    with pytest.raises(UserError, match=f"tokenizer bytes {advice}"):
        ByteTokenizer().encode_chat(CHATS[0])
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path, "")))
    with pytest.raises(UserError, match=advice):
        tokenizer.encode_chat(CHATS[0])
    # A prompt is of a model whose tokenizer is given.
    with pytest.raises(UserError, match=r"has no chat template$"):
        tokenizer.encode_prompt(CHATS[0])


def test_the_prompt_of_an_answer_is_that_of_transformers(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path))
    for chat in CHATS[:5]:
        expected = theirs.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode_prompt(chat[:-1]).tolist() == expected


def test_rows_hold_whole_chats_and_learn_their_answers(lines, tokenizer):
    """Each document of a row is a chat from its first token on, and each answer is learned once an epoch."""
    chats = {f"{part}.jsonl:{i + 1}": chat for part in range(4) for i, chat in enumerate(CHATS[part::4])}
    seen = dict.fromkeys(chats, 0)
    with open_loader(lines, tokenizer, validation_fraction=0.0) as loader:
        batches = take(loader, 12)
    answer_bytes = 0
    for tokens, targets, borders, ids, *_ in batches:
        # Two rows of one chat each have no border inside.
        edges = [0, LENGTH, 2 * LENGTH] if borders is None else borders.tolist()
        tokens, targets = tokens.flatten(), targets.flatten()
        for first, end, name in zip(edges, edges[1:], ids, strict=False):
            seen[name] += 1
            expected, answers = map(torch.from_numpy, tokenizer.encode_chat(chats[name]))
            length = len(expected)
            assert torch.equal(tokens[first : first + length], expected.long())
            learned = targets[first : first + length - 1]
            assert torch.equal(learned, torch.where(answers[1:], expected[1:].long(), -100))
            # The rest of a row.
            assert (tokens[first + length : end] == tokenizer.separator).all()
            assert (targets[first + length - 1 : end] == -100).all()
            assert end - first == length or end % LENGTH == 0
            contents = [m["content"] for m in chats[name] if m["role"] == "assistant"]
            answer_bytes += sum(len(content.encode()) for content in contents)
    assert min(seen.values()) >= 1 and max(seen.values()) - min(seen.values()) <= 1
    # The divisor of bits per byte: the special token that ends an answer has no bytes.
    assert sum(tokenizer.count_bytes(batch.targets[batch.targets >= 0].numpy()) for batch in batches) == answer_bytes


def test_a_resume_repeats_the_uninterrupted_run(lines, tokenizer):
    with open_loader(lines, tokenizer) as loader:
        whole, states = [], []
        for _ in range(30):
            states.append(json.loads(json.dumps(loader.state_dict())))
            whole.append(next(loader))
    assert min(whole[-1].epochs) >= 1
    for at in (1, 11, 29):
        with open_loader(lines, tokenizer) as loader:
            loader.load_state_dict(states[at])
            assert all(map(same, take(loader, min(3, 30 - at)), whole[at:]))


def test_chats_keep_their_targets_beside_texts(tmp_path, lines, tokenizer):
    (tmp_path / "a.txt").write_text("plain text " * 2000)
    with open_loader((f"text:{tmp_path}/a.txt", lines), tokenizer, weights=(2, 1)) as loader:
        batches = take(loader, 9)
    rows = [pair for batch in batches for pair in zip(batch.tokens, batch.targets, strict=True)]
    chats = [(tokens, targets) for tokens, targets in rows if (tokens == tokenizer.encode("<|im_start|>")[0]).any()]
    texts = [targets for tokens, targets in rows if not any(torch.equal(tokens, chat) for chat, _ in chats)]
    assert (len(texts), len(chats)) == (12, 6)
    # A text learns every token but its last, a chat its answers.
    assert all((targets >= 0).sum() >= LENGTH - 2 for targets in texts)
    with open_loader(lines, tokenizer) as loader:
        alone = [pair for batch in take(loader, 3) for pair in zip(batch.tokens, batch.targets, strict=True)]
    for found, expected in zip(chats, alone, strict=True):
        assert all(map(torch.equal, found, expected))


def test_every_kind_of_file_gives_the_same_rows(tmp_path, lines, tokenizer):
    """Parquet gives every message the keys of all, with nulls."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    pytest.importorskip("datasets")
    columns = tmp_path / "parquet"
    columns.mkdir()
    kind = pyarrow.list_(pyarrow.struct([(name, pyarrow.string()) for name in ("role", "content", "name")]))
    for part in range(4):
        table = pyarrow.table({"id": list(range(15)), "messages": pyarrow.array(CHATS[part::4], kind)})
        parquet.write_table(table, columns / f"{part}.parquet", row_group_size=4)
    found = []
    for source in (lines, f"parquet:{columns}#messages", f"hf:{columns}#messages"):
        with (
            # A block of documents is the whole file: cursors, which order blocks, differ.
            open_loader(source, tokenizer, shuffle_documents=15) as loader,
            open_loader(source, tokenizer, split="validation", shuffle_documents=15) as held_out,
        ):
            found.append([b[:2] for b in [*take(loader, 5), *take(held_out, 2)]])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def test_long_chats_are_cut_and_those_without_an_answer_left_out(tmp_path, tokenizer):
    ask, answer = ({"role": role, "content": "x" * 20} for role in ("user", "assistant"))
    long_answer, late_answer = {"role": "assistant", "content": "y" * 100}, {"role": "user", "content": "x" * 100}
    chats = [[ask, answer], [ask, long_answer], [late_answer, answer], [ask, {"role": "assistant", "content": "z"}]]
    write_lines(tmp_path, chats)
    source = f"jsonl:{tmp_path}#messages"
    with open_loader(source, tokenizer, length=96, validation_fraction=0.0, shuffle_sequences=1) as loader:
        batches = take(loader, 4)
        bad = loader.bad_documents
    names = {name for batch in batches for name in batch.document_ids}
    assert names == {"0.jsonl:1", "1.jsonl:1", "3.jsonl:1"}
    rows = [row for batch in batches for row in batch.tokens]
    whole = torch.from_numpy(tokenizer.encode_chat(chats[1]).tokens).long()
    assert any(torch.equal(row, whole[:96]) for row in rows)
    assert len(bad.skipped) == 1
    assert bad.first == "2.jsonl:1: no answer begins within train.sequence_length, 96 tokens"


QUESTION = {"role": "user", "content": "x"}
BROKEN = [
    ([], r"expected a list of messages, got an empty one"),
    ([1], r"message 0 is no object with a role and a content"),
    ([QUESTION], r"no message has the role assistant"),
    ([QUESTION, {"role": "asistant", "content": "x"}], r"message 1 has the unknown role 'asistant'; .* is assistant$"),
    ([{"role": "user", "content": 5}], r"the content of message 0 must be a string, got int"),
]


@pytest.mark.parametrize(("messages", "reason"), BROKEN)
def test_broken_chats(messages, reason):
    with pytest.raises(BadChat, match=reason):
        read_chat(messages)


def test_a_call_of_a_tool_needs_no_content_and_nulls_are_left_out():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "id": None}]}
    assert read_chat([{**QUESTION, "name": None}, call])[1] == {"role": "assistant", "tool_calls": [{"name": "f"}]}


def test_broken_chats_stop_the_run_or_are_counted(tmp_path):
    """By the record's check, and by the template's."""
    strict = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tool first') }}{% endif %}" + MARKED
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path / "tokenizer", strict)))
    file, broken = tmp_path / "a.jsonl", ([QUESTION], [{"role": "tool", "content": "x"}, *CHATS[1]])
    source = f"jsonl:{file}#messages"
    for chat, says in zip(broken, ("holds no chat: no message has the role", "the chat: no tool first"), strict=True):
        file.write_text(json.dumps({"messages": chat}) + "\n")
        with open_loader(source, tokenizer, validation_fraction=0.0) as loader:
            with pytest.raises(UserError, match=rf"a\.jsonl:1: .*{says}.*; data\.on_bad_document") as caught:
                next(loader)
            assert "\n" not in str(caught.value)
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (*CHATS[:8], *broken)))
    with open_loader(source, tokenizer, on_bad_document="skip", validation_fraction=0.0) as loader:
        take(loader, 6)
        assert len(loader.bad_documents.skipped) == 2
