"""Random draw of sources: a container, one to three traits that a file can combine, and their parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from random import Random
from typing import Any

from tests.torture.numbered_pictures import MAX_NUMBER
from tests.torture.source_containers import CONTAINERS, TRACKS, Container
from tests.torture.source_files import Source

_SIZES = ((128, 96), (160, 96), (96, 128), (144, 112), (192, 112))
# Traits of one group exclude each other, because a file cannot have both, or because the behaviour of players is
# undefined.
_GROUPS: dict[str, tuple[str, ...]] = {
    "clock": ("gap", "restart", "mdhd", "head", "dropped-tail"),
    "end": ("tail", "fragments", "mdhd", "restart"),
    "sound": ("lead", "lag", "restart", "head", "tail"),
    "picture": ("crop", "size", "change-aspect", "change-colors"),
    "pixels": ("aspect", "size", "change-aspect"),
    "direction": ("turn", "mirror"),
    "tracks": (*TRACKS, "aspect", "head", "tail", "mdhd", "fragments", "crop", "restart", "size"),
    "changes": ("size", "change-aspect", "change-colors", "restart", "gap"),
}
_HOURS_S = 5000


def draw_source(random: Random, container: str) -> Source:
    """Draw a source in a container, with one to three traits."""
    kind = CONTAINERS[container]
    fps = Fraction(random.choice(kind.rates))
    codec = random.choice(kind.codecs)
    traits = _draw_traits(random, kind, codec)
    num_frames = min(MAX_NUMBER, max(20, round(float(fps) * random.uniform(3, 5.5))))
    begins_s = [Fraction(number) / fps for number in range(num_frames)]
    options: dict[str, Any] = {}
    if "vfr" in traits:
        lengths = [Fraction(random.choice((1, 1, 1, 2, 3))) for _ in range(num_frames)]
        if container != "avi":
            lengths = [length * Fraction(random.choice(("1", "1", "1/2", "3/4"))) for length in lengths]
        begins_s = [begin / fps for begin in accumulate(lengths[:-1], initial=Fraction(0))]
        options["vfr"] = True
    width, height = random.choice(_SIZES)
    reordered = random.choice((0, 2)) if codec in ("libx264", "mpeg2video") and container != "flv" else 0
    gop = random.choice((5, 12, 25, 250))
    place = random.randrange(num_frames // 4, num_frames * 3 // 4)
    for trait in traits:
        if trait != "vfr":
            options[trait] = _PARAMETERS[trait](random, _Draft(codec, fps, begins_s, place, (width, height)))
    if gap := options.get("gap"):
        begins_s = [begin + (gap["seconds"] if number >= gap["frame"] else 0) for number, begin in enumerate(begins_s)]
    has_sound = bool({"lead", "lag"} & options.keys()) or random.random() < 0.5
    if container in ("avi",) and {"vfr", "gap"} & options.keys():
        has_sound = False
    return Source(
        container=container,
        codec=codec,
        fps=fps,
        num_frames=num_frames,
        begins_s=tuple(begins_s),
        width=width,
        height=height,
        # The decoding times of an encoder with B-frames start before the last decoding times of the previous encoder.
        num_reordered=0 if {"fragments", "size", "change-aspect", "change-colors"} & options.keys() else reordered,
        gop=gop,
        has_sound=has_sound,
        options=options,
    )


@dataclass(frozen=True)
class _Draft:
    """Properties that are drawn before the parameters of a trait."""

    codec: str
    fps: Fraction
    begins_s: Sequence[Fraction]
    place: int
    size: tuple[int, int]


def _draw_traits(random: Random, kind: Container, codec: str) -> list[str]:
    possible = [trait for trait in kind.traits if _is_possible(trait, kind, codec)]
    drawn: list[str] = []
    for trait in random.sample(possible, len(possible)):
        excluded = {name for group in _GROUPS.values() if trait in group for name in group}
        if not excluded & set(drawn):
            drawn.append(trait)
    # One, two and three traits are equally frequent.
    return sorted(drawn[: random.choice((1, 2, 3))])


def _is_possible(trait: str, kind: Container, codec: str) -> bool:
    if trait == "size":
        return codec in ("libvpx", "libvpx-vp9", "mpeg2video", "mpeg1video") or kind.format == "mpegts"
    if trait in ("aspect", "change-aspect") and codec == "mpeg1video":
        return False  # MPEG-1 has few ratios
    if trait == "change-colors":
        return codec == "libx264"
    if trait == "aspect":
        return codec != "flv"
    return True


def _seconds(*choices: str) -> Callable[[Random, _Draft], Fraction]:
    return lambda random, _: Fraction(random.choice(choices))


def _aspects(random: Random, draft: _Draft) -> Fraction:
    if draft.codec == "mpeg2video":  # MPEG-2 has only the display ratios 4:3 and 16:9
        return Fraction(random.choice(("4/3", "16/9"))) / Fraction(*draft.size)
    return Fraction(random.choice(("4/3", "2", "3/4", "16/11")))


def _change_of_aspect(random: Random, draft: _Draft) -> dict[str, Any]:
    size = Fraction(*draft.size)
    ratios = [Fraction(4, 3) / size, Fraction(16, 9) / size]
    random.shuffle(ratios)
    return {"frame": draft.place, "before": ratios[0], "after": ratios[1]}


def _change_of_size(random: Random, draft: _Draft) -> dict[str, Any]:
    sizes = [size for size in _SIZES if size != draft.size]
    return {"frame": draft.place, "size": random.choice(sizes)}


def _gap(random: Random, draft: _Draft) -> dict[str, Any]:
    seconds = Fraction(random.choice(("3/10", "3/2", "4", "11", "13")))
    # Use complete frames, because an AVI cannot express other durations.
    return {"frame": draft.place, "seconds": Fraction(math.ceil(seconds * draft.fps)) / draft.fps}


def _crop(random: Random, draft: _Draft) -> tuple[int, int, int, int]:
    across = random.choice(((0, 0), (16, 32), (48, 16)))
    down = random.choice(((32, 32), (16, 48)) if across == (0, 0) else ((0, 0), (16, 16)))
    return across[0], down[0], across[1], down[1]


def _draw_dropped(random: Random, draft: _Draft) -> int:
    return random.randrange(1, math.ceil(float(draft.fps)))


_PARAMETERS: dict[str, Callable[[Random, _Draft], Any]] = {
    "offset": _seconds("7/5", "37", str(_HOURS_S)),
    "gap": _gap,
    "lead": _seconds("3/100", "1/5", "1", "3/2"),
    "lag": _seconds("1/5", "1"),
    "restart": lambda _, draft: draft.place,
    "head": lambda _, draft: draft.begins_s[draft.place // 2],
    # End within a frame, because an edit is rounded to milliseconds.
    "tail": lambda _, draft: (draft.begins_s[draft.place] + draft.begins_s[draft.place + 1]) / 2,
    "mdhd": _seconds("1/3", "2/3"),
    "fragments": lambda *_: True,
    "crop": _crop,
    "turn": lambda random, _: random.choice((90, 180, 270)),
    "mirror": lambda random, _: random.choice(("hflip", "vflip")),
    "aspect": _aspects,
    "size": _change_of_size,
    "change-aspect": _change_of_aspect,
    "change-colors": lambda _, draft: {"frame": draft.place},
    "dropped-tail": _draw_dropped,
    "two-videos": lambda *_: True,
    "default-second": lambda *_: True,
    "still-first": lambda *_: True,
}
