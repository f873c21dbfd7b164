"""A headless Chromium, driven over the pipe of its DevTools protocol, so that no further package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

BINARIES = ("chromium", "chromium-browser", "google-chrome")
MISSING = f"there is none of {', '.join(BINARIES)}: apt-get install chromium"
PHONE, DESK = 390, 1280  # widths in CSS pixels
HEIGHT = 844
# A container has no sandbox of its own and little shared memory; without the others Chromium asks its makers' servers.
ARGUMENTS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip

Scheme = Literal["light", "dark"]


def binary() -> str | None:
    """The path of the browser, if there is one."""
    return next(filter(None, map(shutil.which, BINARIES)), None)


class Browser:
    """A browser with one page open.

    Attributes:
        requests: the addresses that the page has asked for since it was opened.
        errors: what the page has written to its console as a warning or an error, and its uncaught exceptions.
    """

    def __init__(self, process: subprocess.Popen[bytes], to: int, come: int) -> None:
        self.process, self._to, self._come = process, os.fdopen(to, "wb", 0), os.fdopen(come, "rb")
        self._last, self._session, self._received = 0, None, b""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[Self]:
        """Start the browser and end it afterwards.

        Raises:
            FileNotFoundError: there is no browser.
        """
        path = binary()
        if path is None:
            raise FileNotFoundError(MISSING)
        theirs_in, to = os.pipe()
        come, theirs_out = os.pipe()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            # The protocol's pipes are the descriptors 3 and 4.
            script = f'exec "$0" "$@" 13<&{theirs_in} 14>&{theirs_out} 3<&13 4>&14 13<&- 14>&-'
            process = subprocess.Popen(
                ["bash", "-c", script, path, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"],
                pass_fds=(theirs_in, theirs_out),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            os.close(theirs_in)
            os.close(theirs_out)
            browser = None
            try:
                yield (browser := cls(process, to, come))
            finally:
                if browser is not None:
                    browser.call("Browser.close")
                else:
                    process.kill()
                process.wait()

    def open(self, path: Path, width: int = DESK, scheme: Scheme = "light") -> None:
        """Open a file in a window of this width, with a reader's choice of colours, and wait until it is there."""
        self.requests, self.errors, self._loaded = [], [], False
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=HEIGHT, deviceScaleFactor=1, mobile=width == PHONE,
        )  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + 60
        while not self._loaded:
            assert time.monotonic() < deadline, f"{path} does not load"
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, selector: str = "html", height: int | None = None) -> bytes:
        """The first element that fits a selector as PNG, or the strip of ``height`` pixels that begins with it."""
        box = self.evaluate(
            f"(r => ({{x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height}}))"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        if height is not None:
            box |= {"x": 0, "width": self.evaluate("innerWidth"), "height": height}
        data = self.call("Page.captureScreenshot", clip={**box, "scale": 1}, captureBeyondViewport=True)["data"]
        return base64.b64decode(data)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._last, "method": method, "params": parameters, **session}
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message of the browser; what it says of the page is noted."""
        while b"\0" not in self._received:
            block = self._come.raw.read(2**20)
            if not block:
                raise EOFError(f"the browser ended with {self.process.wait()}")
            self._received += block
        text, _, self._received = self._received.partition(b"\0")
        message = json.loads(text)
        event, given = message.get("method"), message.get("params", {})
        if event == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Log.entryAdded" and given["entry"]["level"] in ("warning", "error"):
            self.errors.append(given["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and given["type"] in ("warning", "error"):
            self.errors.append(str(given["args"]))
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(given["exceptionDetails"]))
        return message
