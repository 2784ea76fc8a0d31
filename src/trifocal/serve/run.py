"""Serving an application until a signal."""

import os
import signal
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from trifocal.errors import UserError

_MOST_HEADER_BYTES = 2**16


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for clients.

    Raises:
        UserError: If the address is taken or not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from error


class _Server(uvicorn.Server):
    """Ends the process at once at a second Ctrl-C: Python cannot end while the engine's thread is inside of PyTorch."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)


def make_server(app: Starlette, *, drain_seconds: int) -> uvicorn.Server:
    """A server that has not begun; arguments as of `run_server`."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        timeout_graceful_shutdown=drain_seconds,
    )
    return _Server(config)


def run_server(app: Starlette, listener: socket.socket, *, drain_seconds: int) -> None:
    """Serve until SIGTERM or SIGINT, then finish what has begun.

    Args:
        app: The application.
        listener: Where clients come.
        drain_seconds: Requests that take longer than this after the signal are cut off; a second SIGINT ends the
            process with status 130.
    """
    # The server raises the signal again at its end, which must not end the process a second time.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        make_server(app, drain_seconds=drain_seconds).run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
