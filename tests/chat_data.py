"""A tokenizer with a chat template, and chats, made on the spot."""

import json

import numpy as np
import pytest

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, with marks around the answers."""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same without marks."""


def write_tokenizer(folder, template=MARKED, merges=()):
    """Bytes with the given merges, in a folder that transformers wrote."""
    transformers = pytest.importorskip("transformers")
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in merges)]
    model = tokenizers.models.BPE({word: i for i, word in enumerate(words)}, list(merges))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    fast.chat_template = template or None
    fast.save_pretrained(folder)
    return folder


def write_llama_tokenizer(folder):
    """A vocabulary of the kind of Llama 2: words begin with a space, bytes as a fallback, <s> in front of a text."""
    import tokenizers
    from tokenizers import decoders, normalizers, processors

    words = ["\u2581", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,?!'\n"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a"), ("o", "n"), ("\u2581", "on")]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *map("".join, merges)]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    model = tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(names[:3])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def make_chats(count, seed=0):
    """Chats of one or two turns, some with a system message."""
    random = np.random.default_rng(seed)
    chats = []
    for number in range(count):
        chat = [{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []
        for turn in range(int(random.integers(1, 3))):
            chat.append({"role": "user", "content": f"What is {number} and {turn}?"})
            chat.append({"role": "assistant", "content": "ü" * int(random.integers(1, 12)) + f" {number}"})
        chats.append(chat)
    return chats
