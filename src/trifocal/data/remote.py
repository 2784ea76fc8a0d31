"""A file on an HTTP server, read by ranges with the client of `huggingface_hub`."""

from __future__ import annotations

import io
import random
import re
import sys
from typing import Any

from trifocal._version import __version__
from trifocal.data.activity import Activity, DataError
from trifocal.data.data_config import DataConfig
from trifocal.errors import UserError, one_line
from trifocal.masking import mask_text

_RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)
_HINTS = {401: "; it needs a login", 403: "; access is refused", 404: "; check the address"}
# A generator of its own: pauses must not change the run's random state, and must differ between processes.
_random = random.Random()


class HttpClient:
    """Reads parts of files. `huggingface_hub.utils.http_backoff` repeats requests that failed for a while.

    Args:
        config: Number of attempts, pauses and the timeout.
        activity: Notes the request, and has the signal to stop.
        headers: Sent to the server of the URL; after a redirect, `Authorization` is not sent to another server.
    """

    def __init__(self, config: DataConfig, activity: Activity, headers: dict[str, str] | None = None) -> None:
        self._config = config
        self._activity = activity
        self._headers = {"Accept-Encoding": "identity", "User-Agent": f"trifocal/{__version__}", **(headers or {})}

    def get(self, url: str, begin: int, end: int) -> tuple[bytes, int]:
        """Bytes `[begin, end)` of a URL, and the size of the whole.

        Raises:
            DataError: If the server failed at every attempt.
            UserError: If it refuses the request, or cannot serve parts of files.
            Stopped: If the loader is being closed.
        """
        import huggingface_hub.errors
        import huggingface_hub.utils

        self._activity.check()
        config, shown = self._config, mask_text(url)
        self._activity.text = f"waiting for {shown}"
        # huggingface_hub 2 is built on httpx2, 1 on httpx; both may be installed.
        session = huggingface_hub.utils.get_session()
        httpx: Any = sys.modules[type(session).__module__.partition(".")[0]]
        try:
            response = huggingface_hub.utils.http_backoff(
                "GET",
                url,
                max_retries=config.retry_attempts - 1,
                base_wait_time=config.retry_base_seconds * _random.uniform(0.5, 1.0),
                max_wait_time=config.retry_max_seconds,
                retry_on_exceptions=(httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError),
                retry_on_status_codes=_RETRIED_STATUS,
                headers={**self._headers, "Range": f"bytes={begin}-{end - 1}"},
                timeout=config.request_timeout_seconds,
            )
        except huggingface_hub.errors.OfflineModeIsEnabled:
            raise UserError(f"{shown}: the network is switched off (HF_HUB_OFFLINE is set); unset it") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise self._give_up(error, httpx, shown) from error
        status = response.status_code
        match = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if status >= 400:
            raise UserError(f"{shown}: HTTP {status} {response.reason_phrase}{_HINTS.get(status, '')}")
        if status != 206 or match is None:
            raise UserError(f"{shown}: the server does not serve parts of files; download it and read it by its path")
        body, whole = response.content, int(match[1])
        if len(body) != min(end, whole) - begin:
            raise DataError(f"{shown}: the server sent {len(body)} bytes instead of {end - begin}")
        return body, whole

    def _give_up(self, error: Exception, httpx: Any, url: str) -> UserError:
        """The error for the last failed attempt."""
        if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
            return UserError(f"{url} is not a valid URL: {one_line(error)}")
        response = getattr(error, "response", None)
        if response is not None:
            reason = f"HTTP {response.status_code} {response.reason_phrase}"
        elif isinstance(error, httpx.TimeoutException):
            reason = "silent for longer than data.request_timeout_seconds"
        else:
            reason = f"{type(error).__name__}: {one_line(error)}"
        return DataError(f"{url}: gave up after {self._config.retry_attempts} attempts; the last error: {reason}")


class HttpFile(io.RawIOBase):
    """A seekable file at a URL; each read is one request.

    Args:
        client: Makes the requests.
        url: `http://` or `https://`.
        size: Size in bytes; None asks the server.
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
        """Go to an offset, without a request."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Bytes from the present offset on, by one request.

        Raises:
            DataError: If the server failed at every attempt, or the file has changed.
            UserError: If the server refuses.
        """
        left = max(self.size - self._position, 0)
        count = left if size is None or size < 0 else min(size, left)
        if count == 0:
            return b""
        body, whole = self._client.get(self._url, self._position, self._position + count)
        if whole != self.size:
            raise DataError(f"{mask_text(self._url)} changed while it was read: {self.size} bytes before, {whole} now")
        self._position += count
        return body
