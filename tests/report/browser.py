"""A headless Chromium, driven over its debugging pipe with nothing but the standard library."""

import base64
import json
import os
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find():
    """The path of an installed Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. Collects the messages and the errors of the page."""

    def __init__(self, executable, profile):
        child_reads, self._writes = os.pipe()
        self._reads, child_writes = os.pipe()
        # The pipe speaks on descriptors 3 and 4 of the browser.
        script = f'exec "$0" "$@" 3<&{child_reads} 4>&{child_writes}'
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        command = [executable, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, *command],
            pass_fds=(child_reads, child_writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_reads)
        os.close(child_writes)
        self._buffer = b""
        self._next_id = 0
        self._session = None
        self.problems = []
        self.requests = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send one command and wait for its answer; events on the way are taken in."""
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writes, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._take_in(answer)

    def open(self, page, *, width=1280, height=900, theme="light"):
        """Load a file or an address at a size and in a colour scheme, and wait until it says that it is drawn."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.drawn !== undefined")

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key, text="", *, control=False):
        """Press a key, which may write a text."""
        event = {"key": key, "code": key, "modifiers": 2 * control}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def wait_for(self, expression):
        """Wait until a JavaScript expression is true."""
        deadline = time.time() + 60
        while not self.evaluate(expression):
            if time.time() > deadline:
                raise TimeoutError(f"{expression} did not come true; problems: {self.problems}")
            time.sleep(0.02)

    def screenshot(self, path, *, clip=None):
        """Save the page, or a rectangle of it, as PNG."""
        area = {} if clip is None else {"clip": clip}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **area)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _receive(self):
        while b"\0" not in self._buffer:
            part = os.read(self._reads, 1 << 20)
            if not part:
                raise RuntimeError(f"the browser ended with status {self._process.wait()}")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _take_in(self, event):
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        os.close(self._writes)
        os.close(self._reads)
        self._process.terminate()
        self._process.wait()
