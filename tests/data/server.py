"""A server of files."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """Serves files by ranges from this machine."""

    def __init__(self, files):
        self.files = files
        self.requests = []
        self.authorizations = []
        self.redirects = {}
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                """Quiet."""

            def do_GET(self):
                owner.answer(self)

            do_HEAD = do_GET

        class Server(ThreadingHTTPServer):
            daemon_threads = False
            block_on_close = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, handler):
        with self._lock:
            self.requests.append(handler.path)
            self.authorizations.append(handler.headers.get("Authorization"))
        if handler.path in self.redirects:
            handler.send_response(302)
            handler.send_header("Location", self.redirects[handler.path])
            handler.end_headers()
            return
        body = self.files.get(handler.path.lstrip("/").partition("?")[0])
        if body is None:
            handler.send_error(404)
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        part = body
        if match is not None:
            first, last = int(match[1]), min(int(match[2]), len(body) - 1)
            part = body[first : last + 1]
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(part)))
        handler.end_headers()
        handler.wfile.write(part)

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
