"""OpenAI's own client against the server: completions, chats, errors."""

import asyncio
import copy
import json
import urllib.error
import urllib.request

import openai
import pytest
import torch

from tests.chat_data import write_tokenizer
from tests.serve.servers import MAX_LENGTH, serving
from trifocal import load_model
from trifocal.cli import main
from trifocal.data import make_tokenizer
from trifocal.inference import Sampling
from trifocal.models import save_weights
from trifocal.serve.errors import ApiError
from trifocal.serve.service import Service
from trifocal.testing.small_models import make_model, small_config

PROMPT = "def main():"


def open_request(served, body, path, **headers):
    """The answer to a request, to read."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    return urllib.request.urlopen(urllib.request.Request(served.url + path, data, headers), timeout=30)


def ask(served, body, path="/v1/completions", **headers):
    """Status and content of a request without a client's help."""
    try:
        with open_request(served, body, path, **headers) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_completions_are_those_of_the_engine(served):
    client = served.client()
    tokens = list(PROMPT.encode())
    expected = served.alone(tokens, 20, sampling=Sampling(temperature=0.9, top_k=40, seed=5))
    options = {"model": "tiny", "max_tokens": 20, "temperature": 0.9, "seed": 5, "extra_body": {"top_k": 40}}
    for prompt in (PROMPT, tokens, [PROMPT], [tokens]):
        answer = client.completions.create(prompt=prompt, **options)
        assert answer.choices[0].text == expected
        assert answer.usage.prompt_tokens == len(tokens)
        assert answer.usage.completion_tokens <= 20
    # Several prompts, several samples: sample i of a prompt has the seed behind it.
    counted = served.worker.metrics.prompt_tokens
    answer = client.completions.create(prompt=[PROMPT, "x"], n=2, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == expected
    # Samples share their prompt.
    assert answer.usage.prompt_tokens == len(tokens) + 1
    assert served.worker.metrics.prompt_tokens - counted == len(tokens) + 1
    second = served.alone(tokens, 20, sampling=Sampling(temperature=0.9, top_k=40, seed=6))
    assert answer.choices[1].text == second != expected
    # Without a seed, each call draws its own.
    unseeded = {name: value for name, value in options.items() if name != "seed"}
    texts = {client.completions.create(prompt=PROMPT, **unseeded).choices[0].text for _ in range(3)}
    assert len(texts) == 3

    async def streamed():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as asynchronous:
            usage = {"include_usage": True}
            stream = await asynchronous.completions.create(prompt=PROMPT, stream=True, stream_options=usage, **options)
            events = [event async for event in stream]
        return events, "".join(event.choices[0].text for event in events if event.choices)

    events, text = asyncio.run(streamed())
    assert text == expected and len(events) > 5 and len({event.id for event in events}) == 1
    assert events[-2].choices[0].finish_reason == "length" and events[-1].usage.completion_tokens == 20


def test_tokens_that_were_in_the_caches_are_counted(decoder):
    """Whole pieces of 16 of an earlier prompt, once for each prompt and not for each of its answers."""
    options = {"model": "tiny", "max_tokens": 2, "n": 2}

    def cached(usage):
        return usage.prompt_tokens_details.cached_tokens

    with serving(decoder, spare_rows=8) as served, served.client() as client:
        first, other = "the same beginning of both prompts ", "x" * 20
        for prompt, expected in (
            (first, 0), (first + "and more", 32), (first, 32), ([first, other], 32), (other, 16), ([first, other], 48),
        ):  # fmt: skip
            assert cached(client.completions.create(prompt=prompt, **options).usage) == expected, prompt
        stream = client.completions.create(prompt=first, stream=True, stream_options={"include_usage": True}, **options)
        assert [cached(event.usage) for event in stream if event.usage is not None] == [32]
        assert cached(client.completions.create(prompt=first, echo=True, **options).usage) == 32
        answer = client.completions.create(prompt=first, echo=True, logprobs=1, **options)
        assert cached(answer.usage) == 0, "a scored prompt goes through the model whole"


def test_a_stream_is_ascii_whatever_its_text(served):
    """Some clients take U+2028 for the end of a line, and some know no charset."""
    body = {"prompt": "x", "max_tokens": 80, "stream": True, "ignore_eos": True}
    with open_request(served, body, "/v1/completions") as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        content = answer.read()
    # Random bytes are rarely characters.
    assert content.isascii() and b"\\ufffd" in content


def test_scores_are_those_of_the_model(served):
    """With the prompt repeated, as evaluation harnesses ask."""
    options = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "logprobs": 3, "echo": True}
    whole = served.client().completions.create(max_tokens=4, **options).choices[0]
    assert whole.logprobs is not None and whole.text.startswith(PROMPT)
    tokens = [*PROMPT.encode(), *(ord(t) if len(t) == 1 else int(t[9:]) for t in whole.logprobs.tokens[len(PROMPT) :])]
    assert len(tokens) == len(PROMPT) + 4
    with torch.no_grad():
        log_p = copy.deepcopy(served.decoder).double()(torch.tensor([tokens]))[0].log_softmax(-1)
        plain = served.decoder(torch.tensor([tokens]))[0].log_softmax(-1)
    # Logits of this model are up to 20 and ill conditioned: a plain pass in float32 errs by about 1e-4.
    error = 4 * float((plain - log_p).abs().max())
    assert error < 1e-3
    assert whole.logprobs.token_logprobs[0] is None and whole.logprobs.top_logprobs[0] is None
    for i, (own, top) in enumerate(zip(whole.logprobs.token_logprobs, whole.logprobs.top_logprobs, strict=True)):
        if i:
            assert own == pytest.approx(float(log_p[i - 1, tokens[i]]), abs=error)
            assert sorted(top.values())[-3:] == pytest.approx(sorted(log_p[i - 1].topk(3).values.tolist()), abs=error)
            assert own in top.values()
    assert whole.logprobs.text_offset[: len(PROMPT) + 1] == list(range(len(PROMPT) + 1))
    # Without new tokens, several prompts, each with its own text; and as a stream.
    two = served.client().completions.create(max_tokens=0, **options | {"prompt": [PROMPT, "x"], "n": 2}).choices
    assert [choice.text for choice in two] == [PROMPT, PROMPT, "x", "x"]
    none = served.client().completions.create(max_tokens=0, **options)
    assert none.choices[0].text == PROMPT and none.usage.completion_tokens == 0
    assert none.choices[0].logprobs.token_logprobs == whole.logprobs.token_logprobs[: len(PROMPT)]
    events = list(served.client().completions.create(max_tokens=4, stream=True, **options))
    assert "".join(event.choices[0].text for event in events) == whole.text
    parts = [value for event in events for value in event.choices[0].logprobs.token_logprobs]
    assert parts == whole.logprobs.token_logprobs


@pytest.mark.parametrize("to", ["selected", "mix"])
def test_a_converted_chat_model_answers(tmp_path, to):
    """As the dense one where its blocks cover the chat; the second question goes on behind the first one's tokens."""
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path / "dense")))
    changes = {"attention": "dense", "num_heads": 2, "num_layers": 4, "vocab_size": tokenizer.vocab_size}
    dense = make_model(small_config(**changes), torch.device("cpu")).eval()
    save_weights(dense, tmp_path / "dense", max_position_embeddings=MAX_LENGTH)
    sizes = {"compression-block-size": 4, "compression-stride": 2, "selection-block-size": 8, "window-size": 96}
    words = [word for name, value in sizes.items() for word in (f"--geometry.{name}", str(value))]
    sparse = str(tmp_path / "sparse")
    assert main(["convert", str(tmp_path / "dense"), sparse, "--to", to, "--chooser", "index", *words]) == 0
    options = {"model": "tiny", "temperature": 0, "max_completion_tokens": 8}
    answers = []
    for decoder in (load_model(sparse).eval(), dense):
        with serving(decoder, tokenizer, chats=True, spare_rows=4) as served, served.client() as client:
            chat, found = [{"role": "user", "content": "Hi"}], []
            for _ in range(2):
                answer = client.chat.completions.create(messages=chat, **options)
                found.append(answer.choices[0].message.content)
                chat += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "So?"}]
            assert answer.usage.prompt_tokens_details.cached_tokens >= 16
            answers.append(found)
    assert answers[0] == answers[1] and all(answers[0])


def test_chats_by_the_template(tmp_path):
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path)))
    decoder = make_model(small_config(vocab_size=tokenizer.vocab_size), torch.device("cpu"), torch.float32).eval()
    messages = [{"role": "user", "content": "Hi"}]
    with serving(decoder, tokenizer, chats=True) as served, served.client() as client:
        prompt = tokenizer.encode_prompt(messages).tolist()
        expected = served.alone(prompt, 12, sampling=Sampling(temperature=0))
        options = {"model": "tiny", "temperature": 0, "max_completion_tokens": 12}
        for content in ("Hi", [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]):
            chat = [{"role": "user", "content": content}]
            answer = client.chat.completions.create(messages=chat, logprobs=True, top_logprobs=2, **options)
            assert answer.choices[0].message.content == expected and answer.choices[0].message.role == "assistant"
            assert answer.usage.prompt_tokens == len(prompt)
            scores = answer.choices[0].logprobs
            assert len(scores.content) == 12
            # Greedy: the drawn one is the likeliest.
            assert all(score.top_logprobs[0].logprob == score.logprob for score in scores.content)
        drawn = client.chat.completions.create(
            messages=messages, logprobs=True, top_logprobs=2, seed=0, **options | {"temperature": 1.5}
        )
        own = [(score, score.top_logprobs) for score in drawn.choices[0].logprobs.content]
        assert any(score.logprob < best.logprob for score, (best, _) in own)
        assert all(score.logprob == top.logprob for score, tops in own for top in tops if top.token == score.token)
        events = list(client.chat.completions.create(messages=messages, stream=True, **options))
        assert events[0].choices[0].delta.role == "assistant"
        assert "".join(event.choices[0].delta.content or "" for event in events) == expected
        assert events[-1].choices[0].finish_reason == "length"
        # Without a number of tokens, the answer takes all the room.
        del options["max_completion_tokens"]
        whole = client.chat.completions.create(messages=messages, **options, extra_body={"ignore_eos": True})
        assert whole.usage.total_tokens == MAX_LENGTH
        for chat, reason in (
            ([{"role": "judge", "content": "x"}], "message 0 has the unknown role 'judge'"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts of the type text"),
            ("Hi", "expected a list of messages, got str"),
            ([{"role": "user", "content": "\ud800"}], "the tokenizer cannot encode the text"),
        ):
            status, content = ask(served, {"messages": chat}, "/v1/chat/completions")
            assert status == 400 and reason in content["error"]["message"]
        # Too deep for the reader of JSON up to Python 3.11, from 3.12 on for what reads the messages.
        deep = b'{"messages": [{"role": "user", "content": "x", "more": ' + b"[" * 1400 + b"]" * 1400 + b"}]}"
        status, content = ask(served, deep, "/v1/chat/completions")
        assert (status, content["error"]["message"]) == (400, "the body is nested too deeply")
        for more in ({}, {"logprobs": False}):
            body = {"messages": messages, "top_logprobs": 2, "max_tokens": 1} | more
            status, content = ask(served, body, "/v1/chat/completions")
            assert (status, content["error"]["message"]) == (400, "top_logprobs needs logprobs = true")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"prompt": "x" "n": 1}', 400, "the body is no JSON: Expecting ',' delimiter: line 1 column 16"),
        (b'{"temperature": NaN}', 400, "the body is no JSON: NaN"),
        (b"[" * 100_000, 400, "the body is nested too deeply"),
        (b" " * (2**23 + 1), 413, "the body may have 8,388,608 bytes"),
        ({"prompt": "x", "model": "gpt-4"}, 404, "there is no model gpt-4; tiny is served"),
        ({"prompt": "x", "model": ""}, 404, "there is no model ''; tiny is served"),
        ({"prompt": "x", "": 1}, 400, "the parameter '' is not supported; leave it out"),
        ({"prompt": "x", "\ud800": 1}, 400, "the parameter \\ud800 is not supported"),
        (b'{"metadata": ' + b"[" * 900 + b"]" * 900 + b', "prompt": ""}', 400, "the prompt is empty"),
    ],
)
def test_bad_requests(served, body, status, message):
    got, content = ask(served, body)
    assert (got, content["error"]["message"][: len(message)]) == (status, message)
    assert set(content["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": None}, "prompt", "prompt must be a text"),
        ({"prompt": [1, "x"]}, "prompt", "prompt must be a text"),
        ({"prompt": ["x", [1, -1]]}, "prompt", "tokens of a prompt must be from 0 to 256"),
        ({"prompt": [2**70]}, "prompt", "a prompt must be whole numbers"),
        ({"prompt": ["x"] * 300, "n": 2}, "prompt", "600 answers were asked for; at most 504 may be"),
        ({"temperature": "hot"}, "temperature", "temperature must be a finite number, got 'hot'"),
        ({"seed": -(2**63), "temperature": -1}, "temperature", "temperature must be at least 0, got -1.0"),
        ({"max_tokens": 96}, None, "the prompt takes 1 of the 96 tokens that fit, and 96 new ones"),
        ({"prompt": "x" * 2000}, None, "the prompt has 2,000 characters, more than the 96 tokens that fit can have"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
        ({"n": 5}, "n", "n must be from 1 to 4, got 5"),
        ({"stop": [""]}, "stop", "stop must be a text or a list of at most 32"),
        ({"stop": ["x"] * 33}, "stop", "stop must be a text or a list of at most 32"),
        ({"stop": ["x" * 600, "y" * 600]}, "stop", "stop must be a text or a list of at most 32"),
        ({"logprobs": 50}, "logprobs", "logprobs must be from 0 to 20, got 50"),
        ({"n": 2, "best_of": 1}, "best_of", "the parameter best_of is not supported"),
        ({"temprature": 1}, "temprature", "the parameter temprature is not supported; the nearest valid one is temp"),
        ({"min_tokens": 2}, "min_tokens", "the parameter min_tokens is not supported; leave it out"),
        ({"stream_options": {"x": True}}, "stream_options.x", "the parameter stream_options.x is not supported"),
    ],
)
def test_what_is_refused_is_named(body, param, message):
    service = Service("tiny", make_tokenizer("bytes"), 257, MAX_LENGTH, 4, 504, chats=False)
    with pytest.raises(ApiError) as caught:
        service.read({"prompt": "x", **body}, chat=False)
    error = caught.value.body["error"]
    assert (caught.value.status, error["param"], error["message"][: len(message)]) == (400, param, message)


@pytest.mark.parametrize(
    "more",
    [
        # LiteLLM 1.110: completion, with its own parameters, and as a stream.
        {"max_tokens": 12},
        {"temperature": 0, "top_p": 0.9, "n": 2, "stop": ["."], "max_tokens": 12, "seed": 1},
        {"max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}},
        {"max_tokens": 12, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}},
        # ChatOpenAI of langchain-openai 1.7: invoke, with log-probabilities, and as a stream.
        {"stream": False, "max_completion_tokens": 12, "n": 1, "temperature": 0.0},
        {"stream": False, "max_completion_tokens": 12, "logprobs": True},
        {"stream": True, "max_completion_tokens": 12, "stream_options": {"include_usage": True}},
    ],
)
def test_chats_of_known_clients_are_taken(tmp_path, more):
    """Bodies as LiteLLM and LangChain sent them to a server that recorded them; both read answers with `openai`."""
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path)))
    service = Service("tiny", tokenizer, tokenizer.vocab_size, MAX_LENGTH, 4, 504, chats=True)
    messages = [{"content": "Hi", "role": "user"}]
    call = service.read({"model": "tiny", "messages": messages} | more, chat=True)
    assert [request.max_new_tokens for request in call.requests] == [12]
    assert call.stream == call.include_usage == more.get("stream", False)
    for name, value in (("tools", [{"type": "function"}]), ("response_format", {"type": "json_object"})):
        with pytest.raises(ApiError, match=f"the parameter {name} is not supported"):
            service.read({"model": "tiny", "messages": messages, name: value} | more, chat=True)
    # More characters than tokens of the longest name, <|endoftext|>, could have: it is not tokenized.
    long = [*messages, {"role": "user", "content": "x" * (MAX_LENGTH * len("<|endoftext|>") - 1)}]
    with pytest.raises(ApiError, match="characters, more than the 96 tokens"):
        service.read({"messages": long}, chat=True)


def test_what_asks_for_nothing_is_taken(served):
    body = {"prompt": "x", "max_tokens": 1, "presence_penalty": 0, "suffix": None, "user": "me", "logit_bias": {}}
    body |= {"n": 2, "best_of": 2, "service_tier": "auto", "stop_token_ids": [], "skip_special_tokens": True}
    body |= {"functions": [], "modalities": ["text"], "top_k": -1, "stream_options": {"include_obfuscation": False}}
    # As the class OpenAI of langchain-openai 1.7 sends it.
    body |= {"prompt": ["Once"], "frequency_penalty": 0, "logprobs": None, "seed": None, "top_p": 1}
    assert ask(served, body)[0] == 200
    # A prompt and its answer may fill the caches.
    assert ask(served, {"prompt": "x", "max_completion_tokens": MAX_LENGTH - 1, "top_p": 0})[0] == 200


def test_routes_without_a_model(served):
    assert [model.id for model in served.client().models.list()] == ["tiny"]
    assert served.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model org/other; tiny is served"):
        served.client().models.retrieve("org/other")
    assert ask(served, {"messages": []}, "/v1/chat/completions")[1]["error"]["message"] == (
        "tiny has no chat template; use /v1/completions"
    )
    for path, status in (("/v1/embeddings", 404), ("/health", 405)):
        assert ask(served, {}, path)[0] == status
    assert ask(served, b"{}", Content_Type="text/plain")[0] == 415
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(urllib.request.Request(f"{served.url}/health", headers={"X-Long": "x" * 1_000_000}))
    with urllib.request.urlopen(f"{served.url}/health") as answer:
        assert answer.read() == b"ok"
    ask(served, {"prompt": "xyz", "max_tokens": 2})
    with urllib.request.urlopen(f"{served.url}/metrics") as answer:
        figures = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    assert float(figures["trifocal_pages_free"]) <= float(figures["trifocal_pages"]) == served.model.pages.num_pages
    assert float(figures["trifocal_new_tokens_total"]) >= 2 and float(figures["trifocal_prompt_tokens_total"]) >= 3
    assert float(figures['trifocal_time_to_first_token_seconds_bucket{le="+Inf"}']) >= 1


def test_a_key(decoder):
    with serving(decoder, api_key="sesame") as served:
        assert served.client(api_key="sesame").completions.create(model="tiny", prompt="x", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            served.client(api_key="other").models.list()
        with pytest.raises(urllib.error.HTTPError, match="401") as caught:
            open_request(served, {"prompt": "x"}, "/v1/completions")
        assert caught.value.headers["WWW-Authenticate"] == "Bearer"
        caught.value.close()
        body = {"prompt": "x", "max_tokens": 1}
        name = ask(served, body, Authorization="Bearer sesame")[1]["id"]
        for path, key, status in ((name, "other", 401), ("other", "sesame", 404), (name, "sesame", 200)):
            assert ask(served, None, f"/attention/{path}", Authorization=f"Bearer {key}")[0] == status
        for given, status in (("bearer sesame", 200), ("BEARER  sesame", 200), ("Basic sesame", 401), ("sesame", 401)):
            assert ask(served, body, Authorization=given)[0] == status, given


def test_pages_of_allowed_origins_may_ask(decoder):
    """With a key and the headers that OpenAI's client adds; what the server refuses can be read too."""
    allowed = "https://chat.example.org"
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    with serving(decoder, api_key="sesame", allowed_origins=[allowed]) as served:
        for origin, status, shown in ((allowed, 200, allowed), ("https://other.example.org", 400, None)):
            for method, headers, expected in (("OPTIONS", wanted, status), ("POST", {}, 401)):
                request = urllib.request.Request(
                    f"{served.url}/v1/completions", b"", headers | {"Origin": origin}, method=method
                )
                try:
                    answer = urllib.request.urlopen(request)
                except urllib.error.HTTPError as error:
                    answer = error
                with answer:
                    assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (expected, shown)


def test_a_failure_is_told_without_its_reason(decoder, capfd):
    """And the server continues; a lack of memory may pass."""
    with serving(decoder) as served:
        healthy = served.model.step
        for errors, expected in (
            ([RuntimeError("/secret/path")], 500), ([MemoryError("/secret/path")] * 2, 200), ([MemoryError()] * 3, 500),
        ):  # fmt: skip
            left = iter(errors)

            def step(*arguments, left=left):
                for error in left:
                    raise error
                return healthy(*arguments)

            served.model.step = step
            status, content = ask(served, {"prompt": "x", "max_tokens": 4})
            assert status == expected
            if status == 500:
                assert content["error"]["message"] == "the model failed; the server's log says why"
            assert type(errors[0]).__name__ in capfd.readouterr().err
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{served.url}/health")
        assert ask(served, {"prompt": "x", "max_tokens": 4})[0] == 200
        with urllib.request.urlopen(f"{served.url}/health") as answer:
            assert answer.status == 200
        assert served.all_free()
        with torch.no_grad():
            served.model._output.fill_(torch.nan)
        assert "not finite" in ask(served, {"prompt": "x"})[1]["error"]["message"]
        events = served.client().completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="not finite"):
            list(events)
