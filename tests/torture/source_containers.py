"""Containers of `sources`, and the traits that a source in each of them may have."""

from dataclasses import dataclass

_RATES = ("10", "12", "15", "24000/1001", "25", "30", "30000/1001", "50", "60")
_MPEG_RATES = ("24000/1001", "25", "30000/1001", "30", "50")


@dataclass(frozen=True)
class Container:
    """Container, and the traits that a source in it may have.

    Attributes:
        format: Name of libav's muxer.
        codecs: Video codecs.
        sound: Audio codec.
        traits: Names of the traits in `source_draws`.
        tick_s: Resolution of its timestamps in seconds.
    """

    format: str
    codecs: tuple[str, ...]
    sound: str
    traits: tuple[str, ...]
    tick_s: float
    rates: tuple[str, ...] = _RATES


_TIMED = ("offset", "gap", "vfr", "lead", "lag")
_EDITED = ("head", "tail", "mdhd", "fragments", "crop", "turn", "mirror", "aspect")
TRACKS = ("two-videos", "default-second", "still-first")
CONTAINERS = {
    "mp4": Container(
        "mp4", ("libx264", "libx264", "mpeg4", "libvpx-vp9"), "aac", (*_TIMED, *_EDITED, *TRACKS), 1 / 12800
    ),
    "mov": Container("mov", ("libx264", "mjpeg"), "aac", (*_TIMED, *_EDITED, *TRACKS), 1 / 12800),
    "mkv": Container(
        "matroska",
        ("libx264", "libx264", "libvpx-vp9", "mpeg4"),
        "aac",
        (*_TIMED, "crop", "turn", "aspect", "size", *TRACKS),
        1e-3,
    ),
    "webm": Container(
        "webm", ("libvpx", "libvpx-vp9"), "libopus", (*_TIMED, "restart", "size", "crop", "aspect"), 1e-3
    ),
    "ts": Container(
        "mpegts",
        ("libx264", "libx264", "mpeg2video"),
        "mp2",
        (*_TIMED, "restart", "aspect", "size", "change-aspect", "change-colors", "two-videos"),
        1 / 90000,
        _MPEG_RATES,
    ),
    "mpg": Container(
        "vob",
        ("mpeg2video", "mpeg1video"),
        "mp2",
        ("offset", "gap", "lead", "lag", "restart", "aspect", "size", "change-aspect"),
        1 / 90000,
        _MPEG_RATES,
    ),
    "avi": Container("avi", ("mpeg4", "mjpeg"), "mp2", ("vfr", "gap", "dropped-tail", "aspect"), 1e-6),
    "flv": Container("flv", ("libx264", "flv"), "libmp3lame", (*_TIMED, "restart", "aspect"), 1e-3),
}
