"""Answers of a completion: the prompt as it came, and log-probabilities whose tokens are told apart."""

import asyncio
import json

import pytest

from tests.chat_data import write_llama_tokenizer, write_tokenizer
from trifocal.data import make_tokenizer
from trifocal.inference import Completion, TokenScore, Update
from trifocal.inference.text_stream import TextStream
from trifocal.serve.answers import Answer
from trifocal.serve.app import _AnswerResponse
from trifocal.serve.metrics import Histogram
from trifocal.serve.service import Service

pytest.importorskip("tokenizers")


def answered(tokenizer, body, new, top):
    """The choice of an answer of these new tokens; in each place, `top` are the likeliest."""
    service = Service("tiny", tokenizer, tokenizer.vocab_size, 96, 4, 4, False)
    call = service.read({"max_tokens": len(new), "logprobs": 2, **body}, chat=False)
    answer, [request] = Answer(service, call), call.requests
    score = TokenScore(-1.0, [(token, -0.5 - place) for place, token in enumerate(top)])
    choices, stream = [], TextStream(tokenizer, request.prompt_tensor.tolist())
    for place, token in enumerate(new):
        last = place == len(new) - 1
        completion = Completion(request, 0, new, [], "", "length") if last else None
        scores = [score] * (len(request.prompt) - 1) if place == 0 else []
        choices.append(answer.choice(Update(request, 0, token, score, stream.add(token), completion, scores)))
    return answer.whole(choices)["choices"][0]


def test_tokens_that_begin_with_a_space_are_told_apart(tmp_path):
    tokenizer = make_tokenizer(str(write_llama_tokenizer(tmp_path)))
    with_space, without = tokenizer.encode("the")[0], tokenizer.encode("xthe")[-1]
    # The byte of a letter is another token than the letter.
    letter, byte = tokenizer.encode("xa")[-1], 3 + ord("a")
    for echo in (False, True):
        new = [int(with_space), int(without), int(letter)]
        choice = answered(tokenizer, {"prompt": "a dog", "echo": echo}, new, [int(letter), byte])
        logprobs = choice["logprobs"]
        assert logprobs["tokens"][-3:] == [" the", "the", "a"]
        assert choice["text"] == ("a dog" if echo else "") + " thethea"
        # Each token is where its text is.
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert token == "<s>" or choice["text"][offset:].startswith(token), (token, offset)
        assert "".join(token for token in logprobs["tokens"] if token != "<s>") == choice["text"]
        assert set(logprobs["top_logprobs"][-1]) == {"a", f"token_id:{byte}"}
        assert set(logprobs["top_logprobs"][-3]) == {" the", "a", f"token_id:{byte}"}


def test_a_request_gets_the_settings_of_the_model(tmp_path):
    (write_tokenizer(tmp_path) / "generation_config.json").write_text(
        '{"eos_token_id": [258, 256], "do_sample": true, "temperature": 0.6, "top_p": 0.9, "max_length": 20}'
    )
    tokenizer = make_tokenizer(str(tmp_path))
    service = Service("tiny", tokenizer, tokenizer.vocab_size, 96, 4, 4, False)
    [request] = service.read({"prompt": "x", "top_p": 0.5}, chat=False).requests
    assert request.stop_tokens == (256, 258) and request.max_new_tokens == 16
    assert (request.sampling.temperature, request.sampling.top_p) == (0.6, 0.5)
    [request] = service.read({"prompt": "x", "ignore_eos": True}, chat=False).requests
    assert request.stop_tokens == ()


def test_a_prompt_is_repeated_as_it_came(tmp_path):
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path)))
    prompt = "<|im_start|>user\nHi<|im_end|>\n"
    choice = answered(tokenizer, {"prompt": prompt, "echo": True}, tokenizer.encode("é!").tolist(), [1])
    assert choice["text"] == prompt + "é!"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == "<|im_start|>" and logprobs["text_offset"][:3] == [0, 12, 13]
    # A character of two tokens, and the one behind it.
    assert logprobs["text_offset"][-3:] == [len(prompt), len(prompt), len(prompt) + 1]
    tokens = tokenizer.encode_prompt(prompt).tolist()
    assert answered(tokenizer, {"prompt": tokens, "echo": True}, [0], [1])["text"].startswith("user\nHi\n")


def test_offsets_of_new_tokens_count_the_prompt_as_it_came(tmp_path):
    """Also where the tokenizer writes a character in another way."""
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    tokenizer, prompt = make_tokenizer(str(tmp_path)), "e\u0301x"
    choice = answered(tokenizer, {"prompt": prompt, "echo": True}, tokenizer.encode("ab").tolist(), [1])
    assert choice["logprobs"]["text_offset"][-2:] == [3, 4]


def test_a_stream_says_why_it_ended_also_without_text():
    tokenizer, sent = make_tokenizer("bytes"), []
    service = Service("tiny", tokenizer, tokenizer.vocab_size, 96, 4, 4, False)
    call = service.read({"prompt": "x", "stream": True}, chat=False)
    [request], end = call.requests, tokenizer.separator
    completion = Completion(request, 0, [end], [-1.0], "", "stop")

    class Updates:
        async def get(self):
            return [Update(request, 0, end, TokenScore(-1.0, []), "", completion, [])]

    async def send(message):
        sent.append(message.get("body", b""))

    asyncio.run(_AnswerResponse(None, None, call, Answer(service, call))._stream(Updates(), send))
    assert b'"finish_reason": "stop"' in b"".join(sent)


def test_a_time_is_counted_from_its_bucket_on():
    histogram = Histogram()
    for seconds in (0.004, 0.005, 0.3, 100.0):
        histogram.observe(seconds)
    figures = dict(line.rsplit(" ", 1) for line in histogram.lines("x")[1:])
    found = [int(figures[f'x_bucket{{le="{bound}"}}']) for bound in (0.005, 0.2, 0.5, 60.0, "+Inf")]
    assert found == [2, 2, 3, 3, 4] and figures["x_count"] == "4" and float(figures["x_sum"]) == 100.309
