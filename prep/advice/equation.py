"""The longest chunk length for which the disk keeps up with training.

    B x rho x T <= S_r x delta        (AVION, arXiv 2309.16669, equation 3)

B is the batch size in clips, rho the bytes per second of video, T the chunk length in seconds, S_r the read speed of
the disk in bytes per second, and delta the time of a training step in seconds without waiting for data. The equation
applies to loaders that read a whole chunk for each clip. For a loader that reads only the packets of a clip, replace
rho x T by the bytes per clip; these do not depend on the chunk length.
"""

from dataclasses import dataclass
from typing import Any

from manifests.quoting import counted


@dataclass(frozen=True, kw_only=True)
class Load:
    """What training requires from the disk.

    Attributes:
        batch: B, clips per step.
        step_s: delta, seconds per step.
        read_bytes_per_s: S_r.
        video_bytes_per_s: rho.
        chunk_s: T of the existing chunks.
        clip_bytes: bytes read per clip if only its packets are read.
    """

    batch: int
    step_s: float
    read_bytes_per_s: float
    video_bytes_per_s: float
    chunk_s: float
    clip_bytes: float

    @property
    def readable_bytes(self) -> float:
        """Bytes that the disk can deliver during one step."""
        return self.read_bytes_per_s * self.step_s

    @property
    def chunk_bytes(self) -> float:
        return self.video_bytes_per_s * self.chunk_s

    @property
    def longest_chunk_s(self) -> float:
        """T for which reading whole chunks takes exactly as long as the step."""
        return self.readable_bytes / (self.batch * self.video_bytes_per_s)

    @property
    def whole_headroom(self) -> float:
        """Number of times that a batch of whole chunks of the present length can be read during one step."""
        return self.readable_bytes / (self.batch * self.chunk_bytes)

    @property
    def packets_headroom(self) -> float:
        """Number of times that the packets of a batch can be read during one step."""
        return self.readable_bytes / (self.batch * self.clip_bytes)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Descriptions of where the figures come from."""

    read_speed: str
    bitrate: str
    clip_bytes: str
    step: str


def advice_text(load: Load, origin: Origin) -> str:
    """Return the figures with their origin, and the conclusions."""
    return "\n".join(
        [
            f"step          {load.step_s:.3g} s, {counted(load.batch, 'clip')}  ({origin.step})",
            f"read speed    {_bytes(load.read_bytes_per_s)}/s  ({origin.read_speed})",
            f"bitrate       {_bytes(load.video_bytes_per_s)} per second of video  ({origin.bitrate})",
            f"clip          {_bytes(load.clip_bytes)} of packets, {load.clip_bytes / load.chunk_bytes:.0%} of its chunk"
            f"  ({origin.clip_bytes})",
            "",
            f"Reading whole chunks: {_bytes(load.batch * load.chunk_bytes)} per step; the disk delivers "
            f"{_bytes(load.readable_bytes)} in that time.",
            f"  The longest chunk that the disk can sustain is {load.longest_chunk_s:.3g} s. {_whole_chunks(load)}",
            f"Reading only packets, as train does: {_bytes(load.batch * load.clip_bytes)} per step, with any chunk "
            "length.",
            f"  {_packets(load)}",
        ]
    )


def advice_values(load: Load, origin: Origin) -> dict[str, Any]:
    """Return the figures and conclusions as JSON values."""
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


def _whole_chunks(load: Load) -> str:
    if load.whole_headroom >= 1:
        return f"{load.chunk_s:g} s is fine: the disk delivers {load.whole_headroom:.1f} times the required data."
    return f"{load.chunk_s:g} s is too long: reading takes {1 / load.whole_headroom:.1f} times as long as the step."


def _packets(load: Load) -> str:
    if load.packets_headroom >= 1:
        return f"The disk delivers {load.packets_headroom:.1f} times the required data."
    return (
        f"Reading takes {1 / load.packets_headroom:.1f} times as long as the step: use a lower bitrate, a faster disk, "
        "or enough memory to cache the shards."
    )


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
