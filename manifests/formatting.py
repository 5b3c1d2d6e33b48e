"""Format values for messages (sizes, durations, rates, counts, untrusted text); parse sizes, times and bitrates."""

import math
import re
import reprlib
from fractions import Fraction

from clipmill.manifests.errors import UserError

_SIZE_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp])b?|b)", re.ASCII | re.IGNORECASE)
_LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>s|ms)", re.ASCII)
_AGE = re.compile(r"(\d+(?:\.\d+)?)([dh])", re.ASCII)
_BITRATE = re.compile(r"(?P<number>\d+\.?\d*|\.\d+)(?P<unit>[kKM])", re.ASCII)


def short_number(value: float) -> str:
    """Format a number without an exponent: from 100, as an integer; below 100, with up to three significant digits."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size_text(size_bytes: float) -> str:
    """Format a number of bytes in the appropriate decimal unit: 999 bytes, 12.3 MB, 100 GB."""
    power = 0
    while size_bytes >= 999.5 and power < len(_SIZE_UNITS) - 1:
        size_bytes, power = size_bytes / 1000, power + 1
    return f"{short_number(size_bytes) if power else f'{size_bytes:.0f}'} {_SIZE_UNITS[power]}"


def duration_text(seconds: float) -> str:
    """Format a duration in the appropriate unit: 12 s, 3.5 min, 2.0 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:,.1f} h"


def range_text(low: str, high: str) -> str:
    """Join two formatted values into a range. A common unit is written only once: 2 to 3 s, 50 s to 2.0 min."""
    if low == high:
        return low
    number, unit = low.split(" ")
    return f"{number if unit == high.split(' ')[1] else low} to {high}"


def clock(seconds: float, *, decimals: int = 0) -> str:
    """Format a time as media players do: 0:42, 1:02:03.

    Args:
        seconds: Time or duration in seconds.
        decimals: Maximum number of decimal places of the seconds. Trailing zeros are omitted.
    """
    minutes, rest = divmod(round(seconds, decimals), 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{rest:0{decimals + 3 if decimals else 2}.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if decimals else text
    return f"{hours}:{minutes:02d}:{text}" if hours else f"{minutes}:{text}"


def rate_text(per_s: float) -> str:
    """Format a rate per second or per minute: 1,200/s, 1.5/s, 30.0/min."""
    return f"{per_s:,.0f}/s" if per_s >= 10 else f"{per_s:.1f}/s" if per_s >= 1 else f"{per_s * 60:.1f}/min"


def percent(fraction: float | None) -> str:
    """Format a fraction from 0 to 1 as a percentage; return a dash for None."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def parse_size(text: str, *, flag: str) -> int:
    """Parse a size with a decimal unit, such as 100GB or 1.5TB, and return it in bytes.

    Raises:
        UserError: The text is not a positive number with a unit.
    """
    match = _SIZE.fullmatch(text.strip())
    size_bytes = 0 if match is None else int(Fraction(match[1]) * 1000 ** " kmgtp".index((match[2] or " ").lower()))
    if size_bytes <= 0:
        raise UserError(
            f'{flag} "{text}" is not a size', hint=f"use a number with a unit, such as {flag} 100GB", flags=(flag,)
        )
    return size_bytes


def parse_length(text: str, *, flag: str, alternatives: str = "") -> Fraction:
    """Parse a length such as 15s or 500ms, and return the exact number of seconds.

    Args:
        alternatives: End of the hint, which lists other accepted values, such as ", or 81f for frames".

    Raises:
        UserError: The text is not a positive number with a unit.
    """
    match = _LENGTH.fullmatch(text)
    if match is None or Fraction(match["number"]) == 0:
        raise UserError(
            f'{flag} "{text}" is not a length',
            hint=f"use a number above 0 with a unit, such as 15s or 500ms{alternatives}",
            flags=(flag,),
        )
    return Fraction(match["number"]) / (1000 if match["unit"] == "ms" else 1)


def parse_age(text: str, *, flag: str) -> float:
    """Parse an age such as 7d or 12h, and return it in seconds.

    Raises:
        UserError: The text is not a positive number with a unit.
    """
    match = _AGE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise UserError(f'{flag} "{text}" is not an age', hint=f"use days or hours: {flag} 7d or 12h", flags=(flag,))
    return float(match[1]) * (86_400 if match[2] == "d" else 3600)


def parse_bitrate(text: str, *, flag: str) -> int:
    """Parse a bitrate with a suffix as in ffmpeg, such as 800k, 0.8M or 2M, and return it in bits per second.

    Raises:
        UserError: The text is not a bitrate, has no unit, or is not an integral number of bits per second.
    """
    if text.isdecimal() and int(text):
        suggestion = f"{int(text) // 1000}k" if int(text) >= 10_000 else f"{int(text)}k"
        raise UserError(
            f'{flag} "{text}" has no unit', hint=f"use {flag} {suggestion} (bits per second)", flags=(flag,)
        )
    match = _BITRATE.fullmatch(text)
    bits = Fraction(0) if match is None else Fraction(match["number"]) * (10**6 if match["unit"] == "M" else 1000)
    if not bits or bits.denominator != 1:
        raise UserError(
            f'{flag} "{text}" is not a bitrate',
            hint="use a value such as 800k, 0.8M or 2M (bits per second)",
            flags=(flag,),
        )
    return int(bits)


def bitrate_text(bits_per_s: int) -> str:
    """Format a bitrate in its canonical form: whole megabits as 2M, all other bitrates in kilobits as 800k or 1.5k."""
    if bits_per_s % 10**6 == 0:
        return f"{bits_per_s // 10**6}M"
    return f"{bits_per_s // 1000}{f'.{bits_per_s % 1000:03d}'.rstrip('.0')}k"


MAX_VALUE_CHARS = 80
MAX_LINE_CHARS = 240
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = MAX_VALUE_CHARS


# Control characters except tabs and line breaks, Unicode's line and paragraph separators, surrogates, and controls that
# override the writing direction. Emoji joiners and right-to-left marks are not included, because valid text has them.
_HIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def count_noun(number: int, noun: str, plural: str = "") -> str:
    """Format a number together with the singular or plural of a noun: 1 chunk, 1,000 chunks."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def quote_value(value: object) -> str:
    """Format an untrusted value, such as a value from JSON or a pickle, as `repr(value)` with at most 80 characters.

    Unlike `repr`, this function limits the recursion, and does not fail for an integer with thousands of digits.
    """
    try:
        return f"{_repr.repr(value):.{MAX_VALUE_CHARS}}"
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def escape_invisible(text: str) -> str:
    """Escape invisible and misleading characters in text or HTML."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def on_one_line(text: str, *, max_chars: int = MAX_LINE_CHARS) -> str:
    """Format untrusted text as one line: collapse whitespace, escape unprintable characters, and truncate."""
    line = " ".join(text[: 4 * max_chars].split())
    # An unprintable character could move the cursor, change the colors or reverse the writing direction.
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    return escaped if len(escaped) <= max_chars else f"{escaped[: max_chars - 3]}..."
