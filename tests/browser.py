"""Pages in a real browser, Chromium: what it complains about, and whether a page is wider than its window."""

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Driven:
    """What a page did under a script: complaints of the browser, and by width what the script returned."""

    messages: list[str]
    returned: dict[int, Any]


def driven(page: Path, script: str, *, widths_px: Sequence[int]) -> Driven:
    """Run the body of an async function in a page under its own policy, which also allows this one script.

    It is run in a frame of each width. `overflow()` in it tells by how much the page is wider than its frame.
    """
    script = f"""addEventListener("load", async () => {{
      const overflow = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;
      let found; try {{ found = await (async () => {{ {script} }})(); }} catch (error) {{ found = String(error); }}
      parent.postMessage([Number(name), found], "*");
    }});"""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text, num_policies = re.subn(r"script-src ", f"script-src 'sha256-{digest}' ", page.read_text(), count=1)
    assert num_policies == 1
    frames = "".join(
        f'<iframe name="{width}" src="driven.html" style="width: {width}px; height: 900px"></iframe>'
        for width in widths_px
    )
    collect = f"""const found = {{}}; addEventListener("message", (event) => {{
      found[event.data[0]] = event.data[1];
      if (Object.keys(found).length === {len(widths_px)}) document.title = JSON.stringify(found);
    }});"""
    pages = {
        "driven.html": text.replace("</body>", f"<script>{script}</script></body>"),
        "driver.html": f"<!doctype html><title></title><body><script>{collect}</script>{frames}</body>",
    }
    for name, content in pages.items():
        (page.parent / name).write_text(content)
    ran = _run(page.parent / "driver.html", max(widths_px) + 40)
    for name in pages:
        (page.parent / name).unlink()
    found = re.search(r"<title>(\{.*?)</title>", ran.stdout, re.DOTALL)
    assert found, f"the script did not end: {ran.stderr[-2000:]}"
    returned = {int(width): value for width, value in json.loads(html.unescape(found[1])).items()}
    return Driven([line for line in ran.stderr.splitlines() if "CONSOLE" in line], returned)


def _run(page: Path, width_px: int) -> "subprocess.CompletedProcess[str]":
    assert _CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--enable-logging=stderr"]
    command = [_CHROMIUM, *flags, f"--window-size={width_px},900", "--dump-dom", page.resolve().as_uri()]
    home = {**os.environ, "HOME": str(page.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=home, check=True)
