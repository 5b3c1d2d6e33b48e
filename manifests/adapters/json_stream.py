"""Read large JSON files incrementally, one entry at a time.

The decoder of the standard library parses a sliding window of the file, which always contains the complete current
entry. This is as fast as parsing the complete file, but needs memory only for the largest entry.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from clipmill.manifests.adapters.annotations import not_utf8_error, open_annotations
from clipmill.manifests.errors import UserError

_WINDOW_CHARS = 1 << 22
# An error within this distance from the end of the window may be due to truncation. Any other error is a syntax error.
_NEAR_END_CHARS = 64
ObjectHook = Callable[[list[tuple[str, Any]]], Any]


def array_items(path: Path, *, hook: ObjectHook | None = None) -> Iterator[Any]:
    """Iterate over the items of a file that contains one JSON array.

    Args:
        hook: `object_pairs_hook` of the parser. A ValueError from this function is reported as an error in the file.

    Raises:
        UserError: The file cannot be read, or is not a JSON array. The message contains the number of the line.
    """
    with open_annotations(path, encoding="utf-8-sig") as file:
        window = _Window(path, file, hook=hook)
        window.expect("[", expected="a list")
        while window.has_next("]"):
            yield window.value()
        window.expect_end()


def object_items(
    path: Path, *, nested_key: str | None = None, hook: ObjectHook | None = None
) -> Iterator[tuple[str, Any]]:
    """Iterate over the (key, value) pairs of a file that contains one JSON object.

    Args:
        nested_key: Key whose value is read entry by entry. With nested_key="videos", the file
            `{"version": 1, "videos": {"a": ..., "b": ...}}` yields the keys `version`, `a` and `b`. If the value is a
            list, the key `videos` is yielded with each item.
        hook: `object_pairs_hook` of the parser. A ValueError from this function is reported as an error in the file.

    Raises:
        UserError: The file cannot be read, or is not a JSON object. The message contains the number of the line.
    """
    with open_annotations(path, encoding="utf-8-sig") as file:
        window = _Window(path, file, hook=hook)
        window.expect("{", expected="an object")
        while window.has_next("}"):
            key = window.key()
            if key == nested_key and window.peek() == "{":
                window.expect("{", expected="an object")
                while window.has_next("}"):
                    yield window.key(), window.value()
            elif key == nested_key and window.peek() == "[":
                window.expect("[", expected="a list")
                while window.has_next("]"):
                    yield key, window.value()
            else:
                yield key, window.value()
        window.expect_end()


class _Window:
    """Part of the file that is being parsed. `_text[_position:]` has not been consumed yet."""

    def __init__(self, path: Path, file: IO[str], *, hook: ObjectHook | None) -> None:
        self._path, self._file = path, file
        self._decode = json.JSONDecoder(object_pairs_hook=hook).raw_decode
        self._text, self._position, self._line = "", 0, 1
        self._at_file_end = False
        self._opened = ""

    def peek(self) -> str:
        """Return the next character that is not whitespace, or "" at the end of the file."""
        while True:
            text, position, end = self._text, self._position, len(self._text)
            while position < end and text[position] in " \t\r\n":
                position += 1
            self._position = position
            if position < end or not self._grow():
                return text[position : position + 1]

    def expect(self, character: str, *, expected: str) -> None:
        """Consume an opening bracket or a colon."""
        if self.peek() != character:
            raise self._error(f"expected {expected}")
        self._position += 1
        self._opened = character

    def has_next(self, closing: str) -> bool:
        """Consume the comma before the next entry and return True, or consume the closing bracket and return False."""
        character = self.peek()
        is_first, self._opened = bool(self._opened), ""
        if character == closing:
            self._position += 1
            return False
        if is_first:
            return True
        if character != ",":
            raise self._error(f"expected , or {closing}")
        self._position += 1
        return True

    def key(self) -> str:
        """Parse the key of an entry, and the colon after it."""
        key = self.value() if self.peek() == '"' else None
        if key is None:
            raise self._error("expected a key in quotes")
        self.expect(":", expected="a colon")
        self._opened = ""
        return str(key)

    def value(self) -> Any:
        """Parse the next value."""
        self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._position)
            except json.JSONDecodeError as error:
                is_near_end = error.pos >= len(self._text) - _NEAR_END_CHARS or error.msg.startswith("Unterminated")
                if not (is_near_end and self._grow()):
                    self._position = min(error.pos, len(self._text))
                    raise self._error(error.msg) from error
            except RecursionError as error:
                raise self._error("nested too deeply") from error
            except ValueError as error:
                # The hook has raised this error, or an integer has more digits than Python converts.
                raise self._error(str(error)) from error
            else:
                # A number at the end of the window may continue beyond the window.
                if end < len(self._text) or not self._grow():
                    self._position = end
                    return value

    def expect_end(self) -> None:
        """Raise UserError unless only whitespace remains."""
        if self.peek():
            raise self._error("expected the end of the file")

    def _grow(self) -> bool:
        """Read more of the file, at least as much as the unconsumed part; return False at the end of the file.

        The amount grows with the window, so that a long entry is not parsed too often.
        """
        if self._at_file_end:
            return False
        try:
            text = self._file.read(max(_WINDOW_CHARS, len(self._text) - self._position))
        except UnicodeDecodeError as error:
            raise not_utf8_error(self._path, error) from error
        if not text:
            self._at_file_end = True
            return False
        self._line += self._text.count("\n", 0, self._position)
        self._text, self._position = self._text[self._position :] + text, 0
        return True

    def _error(self, message: str) -> UserError:
        line = self._line + self._text.count("\n", 0, self._position)
        excerpt = self._text[self._position : self._position + 20]
        return UserError(
            f"{self._path}, line {line}: {message}, found {excerpt!r}"
            if excerpt
            else f"{self._path} is truncated: {message}",
            hint="use a complete and valid JSON file",
        )
