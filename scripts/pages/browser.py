"""Control Chromium without a window through the DevTools protocol over a pipe: no driver, no port, no dependency.

JSON messages that end with a zero byte are written to file descriptor 3 of the browser, and read from its file
descriptor 4. Source: https://chromedevtools.github.io/devtools-protocol.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio")
_MOUSE = "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"
# Program that moves the pipes to the file descriptors of the browser, which may be in use in this process.
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
_TIMEOUT_S = 60.0
_SETTLED_S = 0.3
_MAX_HEIGHT_PX = 16_000  # maximum height of a screenshot in Chromium
_MARGIN_PX = 20  # margin above the first element of a screenshot
_KEYS = {"Home": 36, "Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}


def chromium() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """Running Chromium with a temporary profile.

    Raises:
        RuntimeError: Chromium is not installed, or does not respond.
    """

    def __init__(self) -> None:
        program = chromium()
        if program is None:
            raise RuntimeError("Chromium is not installed")
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = [*_FLAGS, _MOUSE, f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, str(to_read), str(to_write), program, *flags],
            pass_fds=(to_read, to_write),
            env={**os.environ, "HOME": self._profile.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._num_sent = b"", 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and remove its profile."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
            os.close(self._write)
            os.close(self._read)
        self._profile.cleanup()

    @contextmanager
    def page(self, path: Path, *, width_px: int, height_px: int = 900, is_dark: bool = False) -> Iterator["Tab"]:
        """Open a file as a page in a window of the given size, and yield its tab once the page is drawn."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        try:
            for domain in ("Page", "Runtime", "Log"):
                tab.send(f"{domain}.enable")
            tab.resize(width_px, height_px)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
            tab.send("Emulation.setEmulatedMedia", features=[scheme])
            tab.send("Page.navigate", url=path.resolve().as_uri())
            self._wait_for("Page.loadEventFired", session)
            tab.value(f"new Promise((done) => setTimeout(done, {1000 * _SETTLED_S}))")
            yield tab
        finally:
            self.send("Target.closeTarget", targetId=target)
            self._events = [event for event in self._events if event.get("sessionId") != session]

    def send(self, method: str, session: str | None = None, **values: Any) -> Any:
        """Send a command, and return its result. Events that arrive before the result are kept."""
        self._num_sent += 1
        number = self._num_sent
        message = {"id": number, "method": method, "params": values, **({"sessionId": session} if session else {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def events(self, session: str) -> list[dict[str, Any]]:
        """Return the events that a tab has reported so far."""
        return [event for event in self._events if event.get("sessionId") == session]

    def _wait_for(self, method: str, session: str) -> None:
        while not any(event["method"] == method for event in self.events(session)):
            self._events.append(self._next())

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("Chromium does not respond")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


class Tab:
    """Open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **values: Any) -> Any:
        """Send a command for this page."""
        return self._browser.send(method, self._session, **values)

    @property
    def messages(self) -> list[str]:
        """Messages on the console: errors, violations of the content security policy, and output of scripts."""
        found = []
        for event in self._browser.events(self._session):
            values = event["params"]
            if event["method"] == "Log.entryAdded":
                found.append(f"{values['entry']['level']}: {values['entry']['text']}")
            elif event["method"] == "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                found.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
            elif event["method"] == "Runtime.consoleAPICalled":
                texts = (str(one.get("value", one.get("description", ""))) for one in values["args"])
                found.append(f"{values['type']}: {' '.join(texts)}")
        return found

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression or of its promise; raise RuntimeError if it throws."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "error"))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        common = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper()))}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width_px: int, height_px: int) -> None:
        """Set the size of the viewport, which can be as small as a phone's, unlike a window."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width_px, height=height_px, deviceScaleFactor=1, mobile=False
        )

    def screenshot(self, *, begin: str = "body", height_px: int | None = None) -> bytes:
        """Return a screenshot as PNG, from an element to the end of the page, or of the given height."""
        script = f"[innerWidth, document.querySelector({json.dumps(begin)}).getBoundingClientRect().top + scrollY]"
        width, top = self.value(script)
        top = max(0, top - _MARGIN_PX)
        self.resize(width, min(self.value("document.documentElement.scrollHeight"), _MAX_HEIGHT_PX))  # draws all of it
        self.value("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        height = self.value("document.documentElement.scrollHeight") - top
        height = min(height if height_px is None else height_px, _MAX_HEIGHT_PX)
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])
