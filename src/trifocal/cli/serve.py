"""`trifocal serve`: a trained model behind the interface of OpenAI's completions."""

import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Literal

import torch

from trifocal.cli.flags import ModelArguments, parse_arguments
from trifocal.cli.threads import Threads
from trifocal.data import Tokenizer
from trifocal.data.sources.chats import BadChat
from trifocal.errors import UserError
from trifocal.inference import CachedModel, Engine
from trifocal.inference.prompts import MAX_SEQUENCES, make_cached_model, memory_errors
from trifocal.paths import user_path
from trifocal.train.checkpoint.pretrained import DEMO_FOLDER, Pretrained, open_pretrained, pretrained_path
from trifocal.train.config.check import choose_device

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

_KEY = "TRIFOCAL_API_KEY"
# Size of the caches, unless the user gives the number of sequences.
_CPU_CACHE_BYTES = 2 * 2**30
_CHUNK_TOKENS = {"cuda": 1024, "cpu": 256}
_UNKNOWN_LENGTH = 4096
_MAX_HEADER_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class ServeArguments(ModelArguments):
    """Serve a trained model to clients of OpenAI's completions, with a page to try it on."""

    name: str = ""
    """Name of the model for clients; by default that of the folder."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in, :: those of IPv6 too."""
    port: int = 8000
    """Port to listen on; 0: any that is free."""
    api_key: str = ""
    """Key that clients must send; by default the variable TRIFOCAL_API_KEY, which lists of processes do not show."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server from a browser, such as https://chat.example.org; "*": any page."""
    max_length: int = 0
    """Tokens of the longest sequence, prompt and answer together; 0: as in training."""
    max_sequences: int = 0
    """Sequences at a time; 0: as memory allows, up to 256, on a CPU up to 16 in caches of 2 GiB."""
    max_waiting: int = 512
    """Sequences that may wait; more are refused with status 429."""
    prefill_chunk_size: int = 0
    """Tokens of prompts between two steps of decoding, which bounds the time between tokens; 0: 1,024, on a CPU 256."""
    prefixes: int = 64
    """Beginnings of prompts that are kept for prompts that begin alike, such as the next turn of a chat, at most; fewer
    where wide windows would take over a quarter of the caches' memory. 0: none."""
    speculate: bool = False
    """Guess the next tokens of up to four sequences from what followed the last ones before: faster for text that
    repeats itself, such as code; a step of several tokens rounds in another way."""
    pictures: bool = False
    """Show on the page which blocks an answer read; the whole model is loaded for the first one. Always for demo."""
    drain_seconds: int = 60
    """Seconds for what has begun, after SIGTERM."""
    keep_alive_seconds: int = 75
    """Seconds after which an idle connection is closed; longer than those of a proxy in front."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the products and caches; "auto": as in training; without a run bf16 on a GPU, and that of the files on a
    CPU; bf16 is fp32 on a CPU without instructions for it."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 0:
                raise UserError(f"--{name.replace('_', '-')} must be at least 0, got {value}")
        if self.port > 65535:
            raise UserError(f"--port may be at most 65535, got {self.port}")


def run(args: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    options: ServeArguments = parse_arguments(ServeArguments, args, prog="trifocal serve")
    try:
        import uvicorn  # noqa: F401 (for `make_server`)

        from trifocal.serve.app import make_app
        from trifocal.serve.pictures import Pictures
        from trifocal.serve.service import Service
        from trifocal.serve.worker import Worker
    except ImportError as error:
        raise UserError("serving needs an extra: pip install 'trifocal[serve]'") from error
    path = pretrained_path(options.path, "RUN_DIR")
    api_key = options.api_key or os.environ.get(_KEY, "")
    listeners = listen(options.host, options.port)
    with contextlib.ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        found = open_pretrained(path, options.checkpoint)
        tokenizer = found.tokenizer()
        model = _load(found, options)
        why_no_chats = _why_no_chats(tokenizer)
        service = Service(
            name=options.name or user_path(options.path, "RUN_DIR").resolve().name,
            tokenizer=tokenizer,
            vocab_size=model.config.vocab_size,
            max_length=model.max_length,
            max_sequences=model.max_sequences,
            max_answers=model.max_sequences + options.max_waiting,
            chats=not why_no_chats,
        )
        pictures = None
        if options.pictures or path == DEMO_FOLDER:
            pictures = Pictures(lambda: found.model().to(model.device), tokenizer, model.dtype)
        engine = Engine(model, tokenizer, speculate=options.speculate)
        if model.device.type == "cuda":
            with memory_errors(model.device):
                engine.warm_up()
        threads = Threads(model.device)
        worker = Worker(engine, model, max_open=service.max_answers, before_step=threads.say)
        host, port = options.host, listeners[0].getsockname()[1]
        if why_no_chats:
            print(f"only completions, no chats: {why_no_chats}", file=sys.stderr)
        if host not in ("127.0.0.1", "::1", "localhost") and not api_key:
            print(f"note: everybody who reaches {host} may use the model; {_KEY} sets a key", file=sys.stderr)
        print(f"{service.name} is served on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        app = make_app(service, worker, pictures, api_key=api_key, allowed_origins=options.allowed_origins)
        run_server(app, listeners, drain_seconds=options.drain_seconds, keep_alive_seconds=options.keep_alive_seconds)
    return 0


def _load(found: Pretrained, options: ServeArguments) -> CachedModel:
    """The model with as many caches as are asked for and fit."""
    device = choose_device(options.device)
    length = options.max_length or found.sequence_length() or _UNKNOWN_LENGTH
    return make_cached_model(
        found.model,
        found.config(),
        {"auto": found.dtype(device), "fp32": torch.float32, "bf16": torch.bfloat16}[options.precision],
        device,
        what=f"sequences of {length:,} tokens",
        remedy="lower --max-length",
        max_length=length,
        sequences=options.max_sequences or MAX_SEQUENCES[device.type],
        # Programs of the user want the memory too.
        max_bytes=_CPU_CACHE_BYTES if device.type == "cpu" and not options.max_sequences else None,
        prefill_chunk_size=options.prefill_chunk_size or _CHUNK_TOKENS[device.type],
        spare_rows=options.prefixes,
        record_chunks=device.type == "cuda",
    )


def _why_no_chats(tokenizer: Tokenizer) -> str:
    """Why the tokenizer cannot write chats; empty if it can."""
    try:
        tokenizer.encode_prompt([{"role": "user", "content": "Hello"}])
    except UserError as error:
        return str(error)
    except BadChat:
        # It wants other messages, a system prompt for example.
        pass
    return ""


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that wait for clients, on one port; `localhost` and `::` have both families if the machine has them."""
    found: list[socket.socket] = []
    try:
        for address in ("127.0.0.1", "::1") if host == "localhost" else (host,):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            both = address == "::" and socket.has_dualstack_ipv6()
            try:
                listener = socket.create_server((address, port), family=family, backlog=1024, dualstack_ipv6=both)
            except OSError as error:
                if found and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue
                raise
            found.append(listener)
            port = listener.getsockname()[1]
    except (OSError, UnicodeError) as error:
        for listener in found:
            listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from error
    return found


def make_server(app: "Starlette", *, drain_seconds: int, keep_alive_seconds: int) -> "uvicorn.Server":
    """A server that has not begun; it closes connections that have had no request for `keep_alive_seconds`."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit and sig == signal.SIGINT:
                # Python cannot end while the engine's thread is inside of PyTorch.
                os._exit(128 + sig)
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_graceful_shutdown=drain_seconds,
        timeout_keep_alive=keep_alive_seconds,
    )
    return Server(config)


def run_server(
    app: "Starlette", listeners: list[socket.socket], *, drain_seconds: int, keep_alive_seconds: int
) -> None:
    """Serve until SIGTERM or SIGINT, then finish what has begun, in `drain_seconds`; a second SIGINT ends at once."""
    # The server raises the signal again at its end, which must not end the process a second time.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        make_server(app, drain_seconds=drain_seconds, keep_alive_seconds=keep_alive_seconds).run(sockets=listeners)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
