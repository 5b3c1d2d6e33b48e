"""Which parts of a video are captioned: exact arithmetic on whole microseconds, no I/O."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from manifests.errors import UserError
from train.data.frame_sampling import US_PER_S

_LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>s|ms)", re.ASCII)
_SHORTEST_US, _LONGEST_US = US_PER_S // 10, 3600 * US_PER_S
# A rest shorter than this part of a window joins the window before it.
_JOINS = Fraction(1, 4)


@dataclass(frozen=True)
class Window:
    """A span [begin_us, end_us) of a video, counted from the container's start as players do."""

    begin_us: int
    end_us: int


def windows_of(video_us: int, *, length_us: int) -> Iterator[Window]:
    """The windows of a video that lasts `video_us`: one behind the other, from its begin to its end.

    What is left at the end is a shorter window; less than a quarter of a window joins the one before instead. A video
    shorter than a window is one.
    """
    full, rest = divmod(video_us, length_us)
    if full and rest < _JOINS * length_us:
        full, rest = full - 1, rest + length_us
    yield from (Window(number * length_us, (number + 1) * length_us) for number in range(full))
    if rest:
        yield Window(full * length_us, full * length_us + rest)


def length_us(length: str) -> int:
    """Microseconds of a length as `10s` or `500ms`.

    Raises:
        UserError: it is none, or too short or long for a caption.
    """
    match = _LENGTH.fullmatch(length)
    if match is None:
        raise UserError(f'--len "{length}" is not a length', hint="write a number with its unit: 10s or 500ms")
    found_us = round(Fraction(match["number"]) * (1000 if match["unit"] == "ms" else US_PER_S))
    if not _SHORTEST_US <= found_us <= _LONGEST_US:
        raise UserError(f"--len {length} does not work", hint="give 100ms to 3600s; 10s is what most captions are of")
    return found_us
