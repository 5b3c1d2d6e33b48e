"""A terminal that tests can read."""

import io
import re
import sys

import pytest

from clipmill.manifests import progress

_PIECES = re.compile(r"\n|\r|\x1b\[[?\d;]*[A-Za-z]|[^\n\r\x1b]+")


class Screen(io.StringIO):
    """A terminal that remembers everything that is written to it."""

    def isatty(self) -> bool:
        return True

    def left(self) -> str:
        """What can be read on it now."""
        lines, row = [""], 0
        column = 0
        for piece in _PIECES.findall(self.getvalue()):
            if piece == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif piece == "\r":
                column = 0
            elif piece == "\x1b[2K":
                lines[row] = ""
            elif piece == "\x1b[1A":
                row -= 1
            elif not piece.startswith("\x1b"):
                lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
                column += len(piece)
        return "\n".join(lines[: row + 1] if not any(lines[row + 1 :]) else lines)

    @property
    def has_cursor(self) -> bool:
        return self.getvalue().rfind("\x1b[?25h") >= self.getvalue().rfind("\x1b[?25l")


def open_screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Both output streams as one terminal; called in tests and not a fixture: pytest replaces them between the two."""
    both = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", both)
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(progress, "_REDRAW_S", 0.01)
    return both
