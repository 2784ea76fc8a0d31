"""Text that comes token by token: whole characters, and nothing of a stop string."""

import random
from typing import Any

from trifocal.data import make_tokenizer
from trifocal.inference import TextStream

TOKENIZER = make_tokenizer("bytes")


def test_a_stop_string_ends_the_text_before_it() -> None:
    stream = TextStream(TOKENIZER, [], ["END", "stop"])
    # What may be its beginning is held back until it is not.
    assert [stream.add(byte) for byte in b"aENxEND"] == ["a", "", "", "ENx", "", "", ""]
    assert stream.stopped and stream.end() == ""


def test_the_beginning_of_a_stop_string_comes_out_at_the_end() -> None:
    stream = TextStream(TOKENIZER, [], ["END"])
    assert [stream.add(byte) for byte in b"aEN"] == ["a", "", ""]
    assert not stream.stopped and stream.end() == "EN"


def test_any_text_is_cut_at_its_first_stop_string() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("ab☃") for _ in range(rng.randint(0, 12)))
        stops = ["".join(rng.choice("ab☃") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        stream = TextStream(TOKENIZER, [ord("a")], stops)
        parts = []
        for byte in text.encode():
            parts.append(stream.add(byte))
            if stream.stopped:
                break
        parts.append(stream.end())
        # The string that is whole first ends the text; of several, the one that begins first.
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        expected = text
        if ends:
            known = text[: min(ends)]
            expected = text[: min(known.find(stop) for stop in stops if stop in known)]
        assert "".join(parts) == expected, (text, stops)
        assert stream.stopped == bool(ends)


def test_a_token_does_not_wait_for_a_long_stop_string() -> None:
    class Stop(str):
        looks = 0

        def __getitem__(self, key: Any) -> str:
            Stop.looks += 1
            return super().__getitem__(key)

        def startswith(self, *arguments: Any) -> bool:
            Stop.looks += 1
            return super().startswith(*arguments)

    stream = TextStream(TOKENIZER, [], [Stop("ab" * 1000), Stop("b" * 1000)])
    # Held back: the last 50 characters, then none, then one.
    text = "x" * 200 + "ab" * 25 + "x" * 200 + "a"
    assert "".join([stream.add(ord(character)) for character in text]) + stream.end() == text
    assert Stop.looks <= 5 * len(text)
