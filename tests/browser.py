"""Headless Chromium, controlled through a pipe: no driver, no port, no other package."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)

#: Chromium reads commands from descriptor 3 and answers on 4. The pipes may have these numbers,
#: so they move first.
START = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def program() -> str | None:
    """Return the path of Chromium, or None; the variable CHROMIUM may name it."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page: `with Browser(folder) as browser: browser.open(path)`. It collects `errors`."""

    def __init__(self, folder: Path, *, width: int = 1100, height: int = 900) -> None:
        (theirs, self._write), (self._read, written) = os.pipe(), os.pipe()
        call = [
            program(),
            *SWITCHES,
            f"--user-data-dir={folder}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs), str(written), *call],
            pass_fds=(theirs, written),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(written)
        self._buffer, self._ids, self._session = b"", itertools.count(1), None
        self._loads = 0
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> "Browser":
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, *, patience: float = 60, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; collect errors that arrive meanwhile."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + patience
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _next(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium does not answer to {waiting_for}")
            part = os.read(self._read, 1 << 16)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        event = json.loads(line)
        name, about = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.errors.append(
                str(about["exceptionDetails"].get("exception", {}).get("description", about))
            )
        elif name == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(str([value.get("value") for value in about["args"]]))
        elif name == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif name == "Page.loadEventFired":
            self._loads += 1
        elif name == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        return event

    def open(self, path: Path) -> None:
        """Load a page, or load it again."""
        before, deadline = self._loads, time.monotonic() + 60
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._loads == before:
            self._next(deadline, "a page")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(
                answer["exceptionDetails"]["exception"].get("description", expression)
            )
        return answer["result"].get("value")

    def until(self, expression: str, patience: float = 20) -> None:
        deadline = time.monotonic() + patience
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never came true: {expression}"
            time.sleep(0.05)

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and whether the user prefers dark colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.evaluate(
            "new Promise((done) => requestAnimationFrame("
            "() => requestAnimationFrame(() => done(1))))"
        )

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        picture = self.call(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=whole,
            **(self._whole() if whole else {}),
        )
        path.write_bytes(base64.b64decode(picture["data"]))

    def _whole(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {
            "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        }
