"""Formatting for messages: counts, and untrusted values and names (short, on one line, without control characters)."""

import reprlib

MAX_VALUE_CHARS = 80
MAX_LINE_CHARS = 240
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_VALUE_CHARS


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the right form: 1 chunk, 1,000 chunks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def quoted(value: object) -> str:
    """Return `repr(value)`, shortened to about 80 characters, for any value from a JSON file or a pickle.

    Unlike `repr` it neither recurses without limit nor fails on an integer of thousands of digits.
    """
    try:
        return f"{_repr.repr(value):.{MAX_VALUE_CHARS}}"
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def on_one_line(text: str, *, max_chars: int = MAX_LINE_CHARS) -> str:
    """Format `text` for a terminal: collapse white space, escape unprintable characters, and truncate."""
    flat = " ".join(text[: 4 * max_chars].split())
    # An unprintable character may move the cursor, change colours or reverse the writing direction.
    escaped = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in flat)
    return escaped if len(escaped) <= max_chars else f"{escaped[: max_chars - 3]}..."
