"""Text that comes token by token: whole characters, and nothing of a stop string."""

import random

from trifocal.data import make_tokenizer
from trifocal.inference.text_stream import TextStream

TOKENIZER = make_tokenizer("bytes")


def test_any_text_is_cut_at_its_first_stop_string():
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
