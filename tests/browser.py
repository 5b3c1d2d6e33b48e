"""Pages in a real browser, Chromium: what it complains about, and what is wrong for an eye or a keyboard."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from scripts.pages.browser import Browser, Tab, chromium
from scripts.pages.problems import problems

needs_chromium = pytest.mark.skipif(chromium() is None, reason="Chromium is not installed")


@dataclass(frozen=True)
class Opened:
    """A page as a browser shows it.

    Attributes:
        messages: of its console.
        overflow_px: by how much it is wider than the window.
        problems: messages, overflow, and whatever else `scripts.pages.problems` finds.
    """

    messages: list[str]
    overflow_px: int
    num_canvases: int
    problems: list[str]


def open_page(page: Path, *, width_px: int, is_dark: bool = False) -> Opened:
    """Open a page in a window of a width, and look at it."""
    with show_page(page, width_px=width_px, is_dark=is_dark) as tab:
        overflow_px = tab.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        num_canvases = tab.value("document.querySelectorAll('canvas').length")
        return Opened(tab.messages, overflow_px, num_canvases, problems(tab))


@contextmanager
def show_page(page: Path, *, width_px: int = 1400, is_dark: bool = False) -> Iterator[Tab]:
    """A page in a browser that all tests of a process share."""
    with _browser().page(page, width_px=width_px, is_dark=is_dark) as tab:
        yield tab


@cache
def _browser() -> Browser:
    browser = Browser()
    atexit.register(browser.close)
    return browser
