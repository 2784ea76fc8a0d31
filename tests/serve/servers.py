"""Servers of tiny models, in this process."""

import contextlib
import threading
import time
from dataclasses import dataclass, field

import uvicorn
from openai import OpenAI

from trifocal.cli.serve import listen, make_server
from trifocal.data import Tokenizer, make_tokenizer
from trifocal.inference import CachedModel, Engine, Request
from trifocal.models import DecoderLM
from trifocal.serve.app import make_app
from trifocal.serve.pictures import Pictures
from trifocal.serve.service import Service
from trifocal.serve.worker import Worker

MAX_LENGTH = 96
SEQUENCES = 4


@dataclass
class Served:
    """A server that runs.

    Attributes:
        url: Its address.
        model: The model of its engine.
        worker: Its worker.
        server: What runs it.
        decoder: The model behind it.
        tokenizer: Its tokenizer.
        opened: Its clients. The garbage collector would find the sockets of one before the client that closes them.
    """

    url: str
    model: CachedModel
    worker: Worker
    server: uvicorn.Server
    decoder: DecoderLM
    tokenizer: Tokenizer
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def client(self, **options):
        """A client that does not repeat what fails; it is closed behind the server."""
        options = {"api_key": "none", "max_retries": 0} | options
        return self.opened.enter_context(OpenAI(base_url=f"{self.url}/v1", **options))

    def alone(self, prompt, max_new_tokens, **options):
        """The text of one request on an engine without other requests."""
        request = Request(
            prompt=prompt, max_new_tokens=max_new_tokens, stop_tokens=(self.tokenizer.separator,), **options
        )
        return Engine(caches(self.decoder, 1), self.tokenizer).complete([request])[0].text

    def all_free(self):
        """Whether every page and row is free or keeps a prompt; waits a little for the step that frees them."""
        model, kept = self.model, self.worker._engine._prefixes._kept
        for _ in range(200):
            pages = {page for sequence in kept.values() for page in sequence.table.pages}
            if model.pages.num_free + len(pages) == model.pages.num_pages and (
                model.num_free_rows + len(kept) == model.max_sequences + model.spare_rows
            ):
                return True
            time.sleep(0.01)
        return False


def caches(decoder, max_sequences, **options):
    """Small caches, in which prompts go in several pieces, padded as on a GPU."""
    options = {"max_length": MAX_LENGTH, "page_size": 8, "prefill_chunk_size": 16, "record_chunks": True} | options
    return CachedModel(decoder, max_sequences=max_sequences, **options)


@contextlib.contextmanager
def serving(
    decoder,
    tokenizer=None,
    *,
    max_waiting=500,
    api_key="",
    allowed_origins=(),
    chats=False,
    max_sequences=SEQUENCES,
    name="tiny",
    **options,
):
    """A server in a thread."""
    tokenizer = tokenizer or make_tokenizer("bytes")
    model = caches(decoder, max_sequences, **options)
    most = max_sequences + max_waiting
    service = Service(name, tokenizer, decoder.config.vocab_size, model.max_length, max_sequences, most, chats)
    worker = Worker(Engine(model, tokenizer), model, max_open=most)
    pictures = Pictures(lambda: decoder, tokenizer, model.dtype)
    app = make_app(service, worker, pictures, api_key=api_key, allowed_origins=allowed_origins)
    [listener] = listen("127.0.0.1", 0)
    with listener:
        server = make_server(app, drain_seconds=20, keep_alive_seconds=75)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", model, worker, server, decoder, tokenizer)
        try:
            yield served
        finally:
            server.should_exit = True
            thread.join()
            served.opened.close()
