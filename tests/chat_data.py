"""A tokenizer with a chat template, and chats, made on the spot."""

from pathlib import Path
from typing import Any

import numpy as np

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


def write_tokenizer(folder: Path, template: str = MARKED, merges: tuple[tuple[str, str], ...] = ()) -> Path:
    """Bytes with the given merges, in a folder that transformers wrote."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in merges)]
    model = tokenizers.models.BPE({word: i for i, word in enumerate(words)}, list(merges))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    fast.chat_template = template or None
    fast.save_pretrained(folder)
    return folder


def make_chats(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
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
