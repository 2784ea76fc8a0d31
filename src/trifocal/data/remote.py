"""A file on an HTTP server, read by ranges."""

from __future__ import annotations

import email.utils
import http.client
import io
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from typing import Any

from trifocal._version import __version__
from trifocal.data.retry import Activity, DataError, TransientError
from trifocal.errors import UserError

# What passes by itself: request timeout, too early, too many requests; and every 5xx.
_TRANSIENT_STATUS = {408, 425, 429}


class HttpClient:
    """Range requests, one at a time, that another thread can break off.

    Args:
        timeout_seconds: A connection silent for this long has failed.
        activity: Told what is requested, and asked whether to go on.
        authorization: Value of that header; never sent on to where a server redirects.
    """

    def __init__(self, timeout_seconds: float, activity: Activity, authorization: str | None = None) -> None:
        self._timeout = timeout_seconds
        self._activity = activity
        self._authorization = authorization
        self._socket: socket.socket | None = None
        client = self

        class Plain(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                client._socket = self.sock

        class Secure(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                client._socket = self.sock

        class PlainHandler(urllib.request.HTTPHandler):
            def http_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(Plain, req)

        class SecureHandler(urllib.request.HTTPSHandler):
            def https_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(Secure, req, context=ssl.create_default_context())

        self._opener = urllib.request.build_opener(PlainHandler, SecureHandler)

    def get(self, url: str, begin: int, end: int) -> tuple[bytes, int]:
        """Bytes `[begin, end)` of a URL, and the size of the whole.

        Raises:
            TransientError: If the failure may pass.
            UserError: If it will not.
            Stopped: If the loader is being closed.
        """
        self._activity.check()
        self._activity.text = f"waiting for {url}"
        request = urllib.request.Request(url)
        request.add_header("Range", f"bytes={begin}-{end - 1}")
        request.add_header("Accept-Encoding", "identity")
        request.add_header("User-Agent", f"trifocal/{__version__}")
        if self._authorization is not None:
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                whole = _whole_size(response, url)
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise _status_error(error, url) from error
        except (OSError, http.client.HTTPException) as error:
            raise _connection_error(error, url) from error
        finally:
            self._socket = None
        if len(body) != min(end, whole) - begin:
            raise TransientError(f"{url}: the server sent {len(body)} bytes instead of {end - begin}")
        return body, whole

    def abort(self) -> None:
        """Break off the request under way, if any: its thread gets a `TransientError`."""
        connection = self._socket
        if connection is not None:
            try:
                # Not SSLSocket.shutdown, which would take the connection apart under the thread that reads it.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
            except OSError:
                return  # Already closed: nothing is under way.


def _whole_size(response: Any, url: str) -> int:
    match = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range", ""))
    if response.status != 206 or match is None:
        raise UserError(f"{url}: the server does not serve parts of files; download it and read it by its path")
    return int(match[1])


def _status_error(error: urllib.error.HTTPError, url: str) -> Exception:
    message = f"{url}: HTTP {error.code} {error.reason}"
    if error.code in _TRANSIENT_STATUS or error.code >= 500:
        return TransientError(message, _retry_after(error.headers.get("Retry-After")))
    hint = {401: "; it needs a login", 403: "; access is refused", 404: "; check the address"}
    return UserError(f"{message}{hint.get(error.code, '')}")


def _connection_error(error: Exception, url: str) -> Exception:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return UserError(f"{url}: the server's certificate is not valid: {reason.verify_message}")
    if isinstance(reason, TimeoutError):
        return TransientError(f"{url}: silent for longer than data.request_timeout_seconds")
    if isinstance(reason, http.client.IncompleteRead):
        return TransientError(
            f"{url}: the connection was cut after {len(reason.partial)} bytes, {reason.expected} too early"
        )
    return TransientError(f"{url}: {type(reason).__name__}: {reason}")


def _retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header, which gives them or a date."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


class HttpFile(io.RawIOBase):
    """A file at a URL that can be read anywhere; each read is one request.

    Args:
        client: Makes the requests.
        url: `http://` or `https://`.
        size: Its size in bytes where it is known already, else it is asked for.
    """

    def __init__(self, client: HttpClient, url: str, size: int | None = None) -> None:
        self._client = client
        self._url = url
        self._position = 0
        self.size = client.get(url, 0, 1)[1] if size is None else size

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The next byte's offset."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset; costs nothing."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Bytes from here on, by one request.

        Raises:
            TransientError: If the failure may pass.
            UserError: If it will not.
        """
        left = max(self.size - self._position, 0)
        count = left if size is None or size < 0 else min(size, left)
        if count == 0:
            return b""
        body, whole = self._client.get(self._url, self._position, self._position + count)
        if whole != self.size:
            raise DataError(f"{self._url} changed while it was read: {self.size} bytes before, {whole} now")
        self._position += count
        return body
