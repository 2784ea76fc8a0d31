"""The page in a real browser."""

import json
import urllib.error
import urllib.request

import pytest
import torch

from tests.chat_data import write_tokenizer
from tests.report.browser import Browser, find
from tests.serve.servers import serving
from trifocal.data import make_tokenizer
from trifocal.inference import Sampling
from trifocal.testing.small_models import make_model, small_config

PROMPT = "def <b>main</b>():"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find() or pytest.skip("no Chromium is installed")
    with Browser(executable, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def text_of(browser, selector):
    return str(browser.evaluate(f"document.querySelector('{selector}').textContent"))


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (390, "light"), (1280, "light")])
def test_a_completion_by_keyboard(served, browser, width, theme, tmp_path):
    """Focus is in the prompt; markup stays text; the picture shows what the model chooses."""
    browser.requests.clear()
    browser.problems.clear()
    browser.open(served.url, width=width, theme=theme)
    assert "has no chat template" in text_of(browser, "#about") and text_of(browser, "h1") == "tiny"
    browser.evaluate("document.getElementById('temperature').value = 0; document.getElementById('length').value = 40")
    browser.call("Input.insertText", text=PROMPT)
    browser.press("Enter", control=True)
    browser.wait_for("document.documentElement.dataset.answers === '1'")
    expected = served.alone(list(PROMPT.encode()), 40, sampling=Sampling(temperature=0))
    assert text_of(browser, ".turn") == PROMPT + expected
    assert "40 tokens," in text_of(browser, "#rate")
    assert browser.evaluate("document.querySelector('.turn b')") is None
    assert not browser.evaluate("document.getElementById('picture').hidden")
    # The last token's row: blocks of the last layer, in both groups.
    query = len(PROMPT) + 40 - 2
    shown = browser.evaluate("JSON.stringify([picture.selected.at(-1).at(-1), picture.queries.at(-1)])")
    chosen, reading = json.loads(shown)
    assert reading == query and all(0 in blocks and query // 8 in blocks for blocks in chosen)
    assert text_of(browser, "#which").startswith(f"40 of 40: {len({*chosen[0], *chosen[1]} - {-1})} of ")
    for _ in range(10):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.id") == "token":
            break
    assert browser.evaluate("document.activeElement.id") == "token"
    browser.press("Home")
    assert text_of(browser, "#which").startswith("1 of 40: ")
    assert text_of(browser, "#read") == PROMPT
    painted = "(() => { const c = document.getElementById('map'); return c.getContext('2d').getImageData(0, 0, c.width,"
    assert browser.evaluate(painted + " c.height).data.some((value) => value > 0); })()")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than its screen"
    assert browser.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (theme == "dark")
    assert browser.problems == [] and {url.split("/")[2] for url in browser.requests} == {served.url.split("/")[2]}


def test_a_chat_of_two_turns_and_stop(browser, tmp_path):
    tokenizer = make_tokenizer(str(write_tokenizer(tmp_path)))
    decoder = make_model(small_config(vocab_size=tokenizer.vocab_size), torch.device("cpu"), torch.float32).eval()
    with serving(decoder, tokenizer, chats=True, max_length=4000, max_sequences=1) as served:
        browser.open(served.url)
        browser.evaluate(
            "document.getElementById('temperature').value = 0; document.getElementById('length').value = 9"
        )
        messages, answers = [], []
        for turn in range(2):
            browser.call("Input.insertText", text=f"Hi {turn}")
            browser.press("Enter", "\r")
            browser.wait_for(f"document.documentElement.dataset.answers === '{turn + 1}'")
            messages.append({"role": "user", "content": f"Hi {turn}"})
            prompt = tokenizer.encode_prompt(messages).tolist()
            answers.append(served.alone(prompt, 9, sampling=Sampling(temperature=0)))
            messages.append({"role": "assistant", "content": answers[-1]})
        shown = json.loads(
            browser.evaluate("JSON.stringify([...document.querySelectorAll('.turn')].map((t) => t.textContent))")
        )
        assert shown == ["Hi 0", answers[0], "Hi 1", answers[1]]
        browser.evaluate("document.getElementById('length').value = 3000")
        browser.call("Input.insertText", text="On and on")
        browser.press("Enter", "\r")
        browser.wait_for("document.querySelector('.turn:last-child').textContent.length > 2")
        browser.press("Escape")
        browser.wait_for("document.documentElement.dataset.answers === '3'")
        assert served.all_free() and not browser.evaluate("document.getElementById('picture').hidden")
        # What the server refuses is said.
        browser.evaluate("document.getElementById('length').value = 100000")
        browser.call("Input.insertText", text="More")
        browser.press("Enter", "\r")
        browser.wait_for("document.querySelector('.turn.error') !== null")
        assert "of the 4,000 tokens that fit" in text_of(browser, ".turn.error")
        # It is no part of the chat: there it would be refused again with what comes next. Nor is a running answer that
        # "New" has ended.
        assert browser.evaluate("[messages.length, document.getElementById('prompt').value].join()") == "6,More"
        browser.evaluate("document.getElementById('length').value = 3000")
        browser.press("Enter", "\r")
        browser.wait_for("document.querySelector('.turn:last-child').textContent.length > 2")
        browser.evaluate("document.getElementById('new').click(); document.getElementById('length').value = 9")
        browser.call("Input.insertText", text="Hi 0")
        browser.press("Enter", "\r")
        browser.wait_for("messages.length === 2 && running === null")
        assert text_of(browser, ".turn:last-child") == answers[0]
        # The browser lets a value between two steps of its field through.
        browser.evaluate("document.getElementById('temperature').value = 0.75")
        browser.call("Input.insertText", text="Hi")
        browser.evaluate("document.getElementById('send').click()")
        browser.wait_for("messages.length === 4")


def test_the_picture_has_a_window_for_the_layers_that_have_one():
    config = small_config(vocab_size=257, num_layers=3, layer_types=("nsa", "dense", "selected"))
    mixed = make_model(config, torch.device("cpu"), torch.float32).eval()
    with serving(mixed) as served:
        answer = served.client().completions.create(model="tiny", prompt="x", max_tokens=3)
        with urllib.request.urlopen(f"{served.url}/attention/{answer.id}") as reply:
            picture = json.load(reply)
    assert (picture["layers"], picture["windows"]) == ([0, 2], [config.geometry.window_size, 0])
