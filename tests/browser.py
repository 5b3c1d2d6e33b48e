"""Pages in a real browser, Chromium: what it complains about, and whether a page is wider than its window."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(_CHROMIUM is None, reason="Chromium is not installed")
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
# Measures the page once it is drawn, and tells the page around it. Only a copy without the policy runs it.
_MEASURE = """<script>addEventListener("load", () => setTimeout(() => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  parent.postMessage(`${wide} ${document.querySelectorAll("canvas").length}`, "*");
}, 300));</script></body>"""
# A frame, since a window is at least 500 px wide.
_FRAME = """<!doctype html><body><script>
  addEventListener("message", (event) => { document.documentElement.dataset.measured = event.data; });
</script><iframe src="measured.html" style="width: {width_px}px; height: 900px; border: 0"></iframe></body>"""


@dataclass(frozen=True)
class Opened:
    """A page as a browser shows it; `overflow_px` is by how much it is wider than the window."""

    messages: list[str]
    overflow_px: int
    num_canvases: int


def opened(page: Path, *, width_px: int, scratch: Path) -> Opened:
    """Open a page in a window of a width: as it is for the messages, and a copy without its policy to measure it."""
    assert _CHROMIUM is not None
    messages = [line for line in _run(page, width_px).stderr.splitlines() if "CONSOLE" in line]
    text = _POLICY.sub("", page.read_text()).replace("</body>", _MEASURE)
    (scratch / "measured.html").write_text(text)
    (scratch / "frame.html").write_text(_FRAME.replace("{width_px}", str(width_px)))
    measured = re.search(r'data-measured="(-?\d+) (\d+)"', _run(scratch / "frame.html", width_px).stdout)
    assert measured, "the page was not drawn"
    return Opened(messages, int(measured[1]), int(measured[2]))


def _run(page: Path, width_px: int) -> "subprocess.CompletedProcess[str]":
    assert _CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--enable-logging=stderr"]
    command = [_CHROMIUM, *flags, f"--window-size={width_px},900", "--dump-dom", page.resolve().as_uri()]
    home = {**os.environ, "HOME": str(page.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=home, check=True)
