"""Chromium under control: runs a script in a page as it is, in real time, and hears what the browser complains about.

It speaks the DevTools protocol through a pipe: JSON messages, each ended by a zero byte.
"""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.browser import _CHROMIUM

_LIMIT_S = 60
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")


@dataclass(frozen=True)
class Ran:
    """What a script returned, and the warnings and errors on the console."""

    returned: Any
    messages: list[str]


class Chromium:
    """A running browser; see `chromium`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._unread = 0, b""
        self._events: list[dict[str, Any]] = []

    def run(self, page: Path, script: str, *, width_px: int, is_dark: bool = False) -> Ran:
        """Open a page in a window of a width, and run the body of an async function in it."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable", session)
        size = {"width": width_px, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._ask("Emulation.setEmulatedMedia", session, features=[scheme])
        self._events.clear()
        self._ask("Page.navigate", session, url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())
        function = f"(async () => {{ {script} }})()"
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self._ask("Runtime.evaluate", session, expression=function, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        self._ask("Target.closeTarget", targetId=target)
        return Ran(found["result"].get("value"), [text for event in self._events if (text := _complaint(event))])

    def close(self) -> None:
        """End the browser."""
        self._ask("Browser.close")

    def _ask(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {} if session is None else {"sessionId": session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def _message(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + _LIMIT_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._from, 1 << 16)
            assert part, "Chromium has ended"
            self._unread += part
        text, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(text))


def _complaint(event: dict[str, Any]) -> str:
    """Return the text of an event if it is a warning or an error."""
    of = event.get("params", {})
    if event.get("method") == "Log.entryAdded" and of["entry"]["level"] in ("warning", "error"):
        return f"{of['entry']['text']} {of['entry'].get('url', '')}"
    if event.get("method") == "Runtime.exceptionThrown":
        return str(of["exceptionDetails"])
    if event.get("method") == "Runtime.consoleAPICalled" and of["type"] in ("warning", "error", "assert"):
        return " ".join(str(one.get("value", one.get("description"))) for one in of["args"])
    return ""


@contextmanager
def chromium(home: Path) -> Iterator[Chromium]:
    """Start the browser with an own profile in `home`, and end it."""
    assert _CHROMIUM is not None
    commands, answers = os.pipe(), os.pipe()

    def take_pipes() -> None:
        command, answer = os.dup(commands[0]), os.dup(answers[1])
        os.dup2(command, 3)
        os.dup2(answer, 4)

    profile = home / "profile"
    with subprocess.Popen(
        [_CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        env={**os.environ, "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(3, 4),
        preexec_fn=take_pipes,
    ) as process:
        os.close(commands[0])
        os.close(answers[1])
        browser = Chromium(commands[1], answers[0])
        try:
            yield browser
            browser.close()
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait(timeout=30)
            os.close(commands[1])
            os.close(answers[0])
            shutil.rmtree(profile, ignore_errors=True)
