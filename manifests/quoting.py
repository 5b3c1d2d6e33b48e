"""Formatting of counts and of untrusted texts: values and names in messages, short and on one line; texts in pages."""

import re
import reprlib

MAX_VALUE_CHARS = 80
MAX_LINE_CHARS = 240
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_VALUE_CHARS


# Control characters except white space, line separators, surrogates, and what overrides the writing direction. The
# joiners of emoji and the marks of right-to-left scripts are parts of texts.
_HIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def count_noun(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun in the right form: 1 chunk, 1,000 chunks."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def quote_value(value: object) -> str:
    """Return `repr(value)`, shortened to about 80 characters, for any value from a JSON file or a pickle.

    Unlike `repr` it neither recurses without limit nor fails on an integer of thousands of digits.
    """
    try:
        return f"{_repr.repr(value):.{MAX_VALUE_CHARS}}"
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def escape_invisible(text: str) -> str:
    """Return a text or a whole page with the characters that a reader would not see, or be misled by, as escapes."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def on_one_line(text: str, *, max_chars: int = MAX_LINE_CHARS) -> str:
    """Format `text` for a terminal: collapse white space, escape unprintable characters, and truncate."""
    flat = " ".join(text[: 4 * max_chars].split())
    # An unprintable character may move the cursor, change colours or reverse the writing direction.
    escaped = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in flat)
    return escaped if len(escaped) <= max_chars else f"{escaped[: max_chars - 3]}..."
