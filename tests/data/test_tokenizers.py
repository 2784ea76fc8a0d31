"""Tokenizers: there and back, byte counts, and the messages if there is none."""

import json

import numpy as np
import pytest

from tests.chat_data import write_llama_tokenizer, write_tokenizer
from trifocal.data import make_tokenizer
from trifocal.errors import UserError

TEXT = "Hello wörld, ☃ and 𝄞.\n\tdef f(x): return x\n" * 3


@pytest.fixture(params=["ByteLevel", "Metaspace"])
def tokenizer_file(request, tmp_path):
    """A small vocabulary trained on the spot, of the kind of GPT-2 or of Llama."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=request.param == "Metaspace"))
    alphabet = []
    special = ["<|endoftext|>"]
    if request.param == "ByteLevel":
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.ByteFallback(),
                tokenizers.decoders.Fuse(),
                tokenizers.decoders.Metaspace(prepend_scheme="never"),
            ]
        )
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["Hello world, this is some text to learn from. def f(x): return x"], trainer)
    if request.param == "Metaspace":
        # Bytes are ordinary tokens: only the separator is special.
        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] == special[0]]
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_bytes_there_and_back():
    tokenizer = make_tokenizer("bytes")
    ids = tokenizer.encode(TEXT)
    assert ids.tolist() == list(TEXT.encode())
    assert tokenizer.decode([*ids, tokenizer.separator]) == TEXT
    assert (tokenizer.vocab_size, tokenizer.separator) == (257, 256)
    assert tokenizer.decode([0xE2, 0x98]) == "�"
    assert tokenizer.count_bytes(np.array([[1, 255, 256], [-100, 0, 256]])) == 3


def test_bytes_with_further_tokens_are_no_plain_bytes(tmp_path):
    pytest.importorskip("tokenizers")
    make_tokenizer("bytes").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 257, "content": "<|user|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = make_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 258 and tokenizer.encode("a<|user|>").tolist() == [97, 257]


def test_a_tokenizer_file_there_and_back(tokenizer_file):
    tokenizer = make_tokenizer(str(tokenizer_file))
    ids = tokenizer.encode(TEXT)
    # Neither the cutting nor the padding that the file asks for.
    assert len(ids) > 64
    assert tokenizer.decode([*ids, tokenizer.separator]) == TEXT
    assert ids.max() < tokenizer.vocab_size and tokenizer.separator < tokenizer.vocab_size
    assert tokenizer.count_bytes([*ids.tolist(), tokenizer.separator, -100]) == len(TEXT.encode())
    assert make_tokenizer(str(tokenizer_file.parent)).encode(TEXT).tolist() == ids.tolist()


def test_added_tokens_have_the_bytes_of_their_text(tokenizer_file):
    content = json.loads(tokenizer_file.read_text())
    first = max(content["model"]["vocab"].values()) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] += [
        {"id": first + number, "content": text, **plain} for number, text in enumerate(("naïve", "☃☃", "  "))
    ]
    tokenizer_file.write_text(json.dumps(content))
    tokenizer = make_tokenizer(str(tokenizer_file))
    ids = tokenizer.encode("a☃☃  naïve ☃")
    assert {first, first + 1, first + 2} <= set(ids.tolist())
    assert tokenizer.count_bytes(ids) == len("a☃☃  naïve ☃".encode())


CHATML = "<|im_start|>user\nWho is it?<|im_end|>\n<|endoftext|>the end"
PROMPTS = ("the dog on a mat", " two  spaces", "\u2603 snow", "", CHATML, "a</s>b", "<s>the")


@pytest.mark.parametrize("kind", ["Llama", "ChatML", "bytes"])
def test_prompts_are_those_of_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    make = {"Llama": write_llama_tokenizer, "ChatML": write_tokenizer, "bytes": make_tokenizer("bytes").save}
    make[kind](tmp_path)
    tokenizer, theirs = make_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in PROMPTS:
        assert tokenizer.encode_prompt(text).tolist() == theirs(text)["input_ids"], text
    # Documents begin as prompts do, and only the training ends them.
    [document, empty] = tokenizer.encode_batch(["the <|endoftext|></s>", ""])
    assert document.tolist()[:2] == tokenizer.encode_prompt("the").tolist()[:2] and len(empty) == 0
    assert document.tolist() == [*([1] if kind == "Llama" else []), *tokenizer.encode("the <|endoftext|></s>").tolist()]
    assert tokenizer.separator not in document


def test_the_ends_of_an_answer_are_those_of_the_model(tmp_path):
    write_tokenizer(tmp_path)
    assert make_tokenizer(str(tmp_path)).ends == (256,)
    (tmp_path / "config.json").write_text('{"eos_token_id": [258], "bos_token_id": 7, "pad_token_id": null}')
    tokenizer = make_tokenizer(str(tmp_path))
    assert tokenizer.ends == (256, 258) and tokenizer.generation == {"eos_token_id": [258], "bos_token_id": 7}
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [258, 256], "temperature": 0.6, "_from_model_config": true}'
    )
    tokenizer = make_tokenizer(str(tmp_path))
    assert tokenizer.ends == (256, 258) and tokenizer.generation["temperature"] == 0.6
    assert tokenizer.generation["bos_token_id"] == 7 and "_from_model_config" not in tokenizer.generation
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "<|im_end|>"}')
    with pytest.raises(UserError, match=r"eos_token_id in generation_config\.json must be token ids, got \['<\|im_end"):
        make_tokenizer(str(tmp_path))


def test_the_text_of_a_token_has_its_leading_space(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = make_tokenizer(str(write_llama_tokenizer(tmp_path)))
    tokens = tokenizer.encode_prompt("the a dog on").tolist()
    assert "".join(tokenizer.token_text(token, begins=place == 1) for place, token in enumerate(tokens)) == (
        "<s>the a dog on"
    )
    assert tokenizer.token_text(tokens[1]) == " the" and "\ufffd" in tokenizer.token_text(3 + 0xE2)


def test_separators_by_name(tokenizer_file):
    given = make_tokenizer(str(tokenizer_file), separator="e")
    assert given.separator != make_tokenizer(str(tokenizer_file)).separator
    assert given.fingerprint != make_tokenizer(str(tokenizer_file)).fingerprint
    with pytest.raises(UserError, match=r"has no token '<x>'; name the token .* in data\.separator"):
        make_tokenizer(str(tokenizer_file), separator="<x>")
    tokenizer_file.write_text(tokenizer_file.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(UserError, match=r"has none of <\|endoftext\|>, .* data\.separator"):
        make_tokenizer(str(tokenizer_file))
    assert make_tokenizer(str(tokenizer_file), separator="<|other|>").separator == 0


def test_a_folder_without_and_a_file_that_is_none(tmp_path):
    with pytest.raises(UserError, match=r"no such file; give the path of a tokenizer\.json"):
        make_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(UserError, match=r"is not a tokenizer\.json: "):
        make_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match=r"tokenizer no/such\.json: no such file"):
        make_tokenizer("no/such.json")
    with pytest.raises(UserError, match="tokenizer bytes has its own"):
        make_tokenizer("bytes", separator="x")
    with pytest.raises(UserError, match=r"^data\.tokenizer .* has a NUL character"):
        make_tokenizer("a\0b")


@pytest.mark.parametrize(
    ("content", "given", "read"),
    [
        ("<new>", 4_000_000_000, 3),
        ("<eos>", 1, 2),
        ("<eos>", 2, None),
        ("<new>", 3, None),
        # The library leaves it out.
        ("", 2, None),
    ],
)
def test_an_added_token_has_the_id_of_its_file(tmp_path, content, given, read):
    """The library counts on where an id is not the next one; the model would be asked for other tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a")).save(str(path))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": given, "content": content, **plain}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens": added}))
    if read is None:
        assert make_tokenizer(str(path)).vocab_size == max(given + 1, 3)
        return
    with pytest.raises(UserError) as caught:
        make_tokenizer(str(path))
    assert str(caught.value).startswith(f"tokenizer {path}: the added token {content!r} has the id {given:,}, but the")
    assert f"reads it as {read:,}; added tokens must follow" in str(caught.value)


def test_a_vocabulary_without_an_unknown_token(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"known": 0, "<eos>": 1}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = make_tokenizer(str(tmp_path))
    assert tokenizer.encode("known known").tolist() == [0, 0]
    with pytest.raises(UserError, match=r"cannot encode the text: .*without an unknown token must have every word"):
        tokenizer.encode("known unknown")


def test_an_id_of_the_hub(tokenizer_file, monkeypatch):
    """The folder that the hub's library gives for an id is read as any other, with its end token and template."""
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(name, *, allow_patterns):
        asked.append((name, set(allow_patterns)))
        return str(tokenizer_file.parent)

    monkeypatch.setattr(hub, "snapshot_download", download)
    (tokenizer_file.parent / "tokenizer_config.json").write_text('{"eos_token": "e"}')
    (tokenizer_file.parent / "chat_template.jinja").write_text("{{ messages }}")
    found, folder = make_tokenizer("owner/name"), make_tokenizer(str(tokenizer_file.parent))
    files = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert asked == [("owner/name", files)]
    assert (found.name, found.separator_token, found.fingerprint) == ("owner/name", "e", folder.fingerprint)
    assert found.fingerprint != make_tokenizer(str(tokenizer_file), separator="e").fingerprint


def test_gpt2_without_a_hub_is_a_clear_error(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    beginning = "tokenizer gpt2: there is no such file, and "
    with pytest.raises(UserError, match=rf"^{beginning}the hub does not give it \([^.]*\); use bytes, or"):
        make_tokenizer("gpt2")
