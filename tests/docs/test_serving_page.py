"""The page about the server: its client runs, and its table has every route."""

import contextlib
import io

import pytest
import torch

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from tests.docs.pages import ROOT, blocks, text_of
from tests.serve.servers import serving
from trifocal.testing.small_models import make_model, small_config

PAGE = ROOT / "docs/serving.md"


def test_the_client_of_the_page_gets_an_answer():
    decoder = make_model(small_config(vocab_size=257), torch.device("cpu"), torch.float32).eval()
    [block] = blocks(PAGE, "py")
    with serving(decoder) as served, contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block.replace("http://127.0.0.1:8000", served.url), "serving.md", "exec"), {})
        assert printed.getvalue()
        for route in served.server.config.app.routes:
            assert f"`{route.path_format}`" in text_of(PAGE) or route.path == "/attention/{name}"
