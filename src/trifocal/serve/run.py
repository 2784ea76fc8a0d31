"""Serving an application until a signal."""

import errno
import os
import signal
import socket
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from trifocal.errors import UserError

_MOST_HEADER_BYTES = 2**16


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that wait for clients, on one port: `localhost` and `::` have both families where the machine has them.

    Raises:
        UserError: If the address is taken or not this machine's.
    """
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
    except (OSError, OverflowError, UnicodeError) as error:
        for listener in found:
            listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from error
    return found


class _Server(uvicorn.Server):
    """Ends the process at once at a second Ctrl-C: Python cannot end while the engine's thread is inside of PyTorch."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)


def make_server(app: Starlette, *, drain_seconds: int, keep_alive_seconds: int) -> uvicorn.Server:
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
        timeout_keep_alive=keep_alive_seconds,
    )
    return _Server(config)


def run_server(app: Starlette, listeners: list[socket.socket], *, drain_seconds: int, keep_alive_seconds: int) -> None:
    """Serve until SIGTERM or SIGINT, then finish what has begun.

    Args:
        app: The application.
        listeners: Where clients come.
        drain_seconds: Requests that take longer than this after the signal are cut off; a second SIGINT ends the
            process with status 130.
        keep_alive_seconds: Connections without a request for this long are closed.
    """
    # The server raises the signal again at its end, which must not end the process a second time.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        make_server(app, drain_seconds=drain_seconds, keep_alive_seconds=keep_alive_seconds).run(sockets=listeners)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
