"""How long chunks may be for the disk to keep up with training: AVION's equation 3, and what reading packets changes.

    B x rho x T <= S_r x delta        (AVION, arXiv 2309.16669, equation 3)

B clips a step, rho bytes of a second of video, T seconds of a chunk, S_r bytes a second from the disk, delta seconds a
step takes without waiting for data. It is about loaders that read a chunk whole for each clip. A loader that reads only
the packets that a clip needs has its bytes for a clip in place of rho x T, whatever the length of the chunks.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Load:
    """What training asks of the disk.

    Attributes:
        batch: B, clips of a step.
        step_s: delta, seconds.
        read_bytes_per_s: S_r.
        video_bytes_per_s: rho.
        chunk_s: T of the chunks that are there.
        clip_bytes: read for one clip when only its packets are.
    """

    batch: int
    step_s: float
    read_bytes_per_s: float
    video_bytes_per_s: float
    chunk_s: float
    clip_bytes: float

    @property
    def readable_bytes(self) -> float:
        """What the disk gives while one step runs."""
        return self.read_bytes_per_s * self.step_s

    @property
    def chunk_bytes(self) -> float:
        return self.video_bytes_per_s * self.chunk_s

    @property
    def longest_chunk_s(self) -> float:
        """T at which reading chunks whole takes as long as the step."""
        return self.readable_bytes / (self.batch * self.video_bytes_per_s)

    @property
    def whole_headroom(self) -> float:
        """How many times the present chunks could be read whole within a step."""
        return self.readable_bytes / (self.batch * self.chunk_bytes)

    @property
    def packets_headroom(self) -> float:
        """How many times a step's clips could be read within a step, by their packets alone."""
        return self.readable_bytes / (self.batch * self.clip_bytes)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the figures come from, in words."""

    read_speed: str
    bitrate: str
    clip_bytes: str
    step: str


def advice_text(load: Load, origin: Origin) -> str:
    """Figures with their origin, then what follows from them."""
    return "\n".join(
        [
            f"step          {load.step_s:.3g} s, {load.batch} clips  ({origin.step})",
            f"read speed    {_bytes(load.read_bytes_per_s)}/s  ({origin.read_speed})",
            f"bitrate       {_bytes(load.video_bytes_per_s)} a second of video  ({origin.bitrate})",
            f"clip          {_bytes(load.clip_bytes)} of packets, {load.chunk_bytes / load.clip_bytes:.1f} times less "
            f"than its chunk  ({origin.clip_bytes})",
            "",
            f"chunks read whole: {_bytes(load.batch * load.chunk_bytes)} a step; the disk gives "
            f"{_bytes(load.readable_bytes)} in that time.",
            f"  The longest chunk that it can feed is {load.longest_chunk_s:.3g} s: {_judged(load)}",
            f"packets alone, as train reads: {_bytes(load.batch * load.clip_bytes)} a step, at any length of chunk.",
            f"  {_packets_judged(load)}",
        ]
    )


def advice_values(load: Load, origin: Origin) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "batch": load.batch,
        "step_s": load.step_s,
        "read_bytes_per_s": load.read_bytes_per_s,
        "video_bytes_per_s": load.video_bytes_per_s,
        "chunk_s": load.chunk_s,
        "clip_bytes": load.clip_bytes,
        "whole_chunks": {
            "bytes_per_step": load.batch * load.chunk_bytes,
            "longest_chunk_s": load.longest_chunk_s,
            "is_current_length_fine": load.whole_headroom >= 1,
            "headroom": load.whole_headroom,
        },
        "packets": {
            "bytes_per_step": load.batch * load.clip_bytes,
            "is_fine": load.packets_headroom >= 1,
            "headroom": load.packets_headroom,
        },
        "origin": {
            "read_speed": origin.read_speed,
            "bitrate": origin.bitrate,
            "clip_bytes": origin.clip_bytes,
            "step": origin.step,
        },
    }


def _judged(load: Load) -> str:
    if load.whole_headroom >= 1:
        return f"{load.chunk_s:g} s is fine, with {load.whole_headroom:.1f} times what is needed."
    return f"{load.chunk_s:g} s is too long, reading takes {1 / load.whole_headroom:.1f} times as long as the step."


def _packets_judged(load: Load) -> str:
    if load.packets_headroom >= 1:
        return f"The disk gives {load.packets_headroom:.1f} times what is needed."
    return (
        f"Reading takes {1 / load.packets_headroom:.1f} times as long as the step: it needs a lower bitrate, a faster "
        "disk, or memory that holds the shards."
    )


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
