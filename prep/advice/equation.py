"""The longest chunk length for which the disk keeps up with training, and what each node and GPU of a cluster reads.

    B x rho x T <= S_r x delta        (AVION, arXiv 2309.16669, equation 3)

B is the batch size in clips, rho the bytes per second of video, T the chunk length in seconds, S_r the read speed of
the disk in bytes per second, and delta the time of a training step in seconds without waiting for data. The equation
applies to loaders that read a whole chunk for each clip. For a loader that reads only the packets of a clip, replace
rho x T by the bytes per clip; these do not depend on the chunk length.

If N nodes read one disk, B is the batch of all of them, and S_r is what the disk delivers to all of them together. One
node alone measures at most that, and perhaps only what its network link lets through: S_r is between the speed that
one node measures and N times that speed.
"""

from dataclasses import dataclass
from typing import Any

from clipmill.manifests.quoting import counted

_SOURCE = "AVION, arXiv:2309.16669, equation 3"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What training requires from the disk.

    Attributes:
        batch: B, clips per step, of all nodes together.
        step_s: delta, seconds per step.
        read_bytes_per_s: S_r, as one node measures it or as given for all of them.
        video_bytes_per_s: rho; of latents for their column.
        chunk_s: T of the existing chunks.
        clip_bytes: bytes read per clip if only its packets, or its frames of latents, are read.
        num_nodes, gpus_per_node: the cluster; all of its nodes read the disk.
        is_total: whether S_r is known to be what all nodes get together; else it was measured by one of them.
    """

    batch: int
    step_s: float
    read_bytes_per_s: float
    video_bytes_per_s: float
    chunk_s: float
    clip_bytes: float
    num_nodes: int = 1
    gpus_per_node: int = 1
    is_total: bool = True

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

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def clips_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def packets_bytes_per_s(self) -> float:
        """Bytes per second that all nodes read together."""
        return self.clips_per_s * self.clip_bytes

    @property
    def whole_bytes_per_s(self) -> float:
        """Bytes per second of all nodes together if they read whole chunks."""
        return self.clips_per_s * self.chunk_bytes


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Descriptions of where the figures come from."""

    read_speed: str
    bitrate: str
    clip_bytes: str
    step: str


def advice_text(load: Load, origin: Origin, *, storage: str = "disk", column: str = "video") -> str:
    """Return the figures with their origin, and the conclusions; `storage` is "disk" or "bucket"."""
    of_clip = "packets" if column == "video" else "latents"
    cluster = []
    if load.num_gpus > 1:
        cluster = [
            f"cluster       {counted(load.num_nodes, 'node')} with {counted(load.gpus_per_node, 'GPU')} each, "
            f"{load.batch / load.num_gpus:g} clips per GPU"
        ]
    return "\n".join(
        [
            f"step          {load.step_s:.3g} s, {counted(load.batch, 'clip')}  ({origin.step})",
            *cluster,
            f"read speed    {bytes_text(load.read_bytes_per_s)}/s  ({origin.read_speed})",
            f"bitrate       {bytes_text(load.video_bytes_per_s)} per second of {column}  ({origin.bitrate})",
            f"clip          {bytes_text(load.clip_bytes)} of {of_clip}, {load.clip_bytes / load.chunk_bytes:.0%} of "
            f"its chunk  ({origin.clip_bytes})",
            "",
            f"Reading whole chunks: {bytes_text(load.batch * load.chunk_bytes)} per step; the {storage} delivers "
            f"{bytes_text(load.readable_bytes)} in that time.",
            f"  {_inequality(load)}",
            f"  {_together(load)}he longest chunk that the {storage} can sustain is {load.longest_chunk_s:.3g} s. "
            f"{_whole_chunks(load, storage)}",
            f"Reading only {of_clip}, as train does: {bytes_text(load.batch * load.clip_bytes)} per step, with any "
            "chunk length.",
            f"  {_packets(load, storage) if load.is_total else _packets_of_nodes(load, storage)}",
            *_readers(load, of_clip),
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
        "nodes": load.num_nodes,
        "gpus_per_node": load.gpus_per_node,
        "is_read_speed_of_all_nodes": load.is_total,
        "whole_chunks": {
            "bytes_per_step": load.batch * load.chunk_bytes,
            "bytes_per_s": load.whole_bytes_per_s,
            "longest_chunk_s": load.longest_chunk_s,
            "is_current_length_fine": load.whole_headroom >= 1,
            "headroom": load.whole_headroom,
        },
        "packets": {
            "bytes_per_step": load.batch * load.clip_bytes,
            "bytes_per_s": load.packets_bytes_per_s,
            "bytes_per_s_per_node": load.packets_bytes_per_s / load.num_nodes,
            "bytes_per_s_per_gpu": load.packets_bytes_per_s / load.num_gpus,
            "clips_per_s_per_gpu": load.clips_per_s / load.num_gpus,
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


def _inequality(load: Load) -> str:
    holds = "holds" if load.whole_headroom >= 1 else "does not hold"
    return (
        f"B x rho x T <= S_r x delta: {load.batch:,} x {bytes_text(load.video_bytes_per_s)}/s x {load.chunk_s:g} s <= "
        f"{bytes_text(load.read_bytes_per_s)}/s x {load.step_s:.3g} s {holds} ({_SOURCE})."
    )


def _whole_chunks(load: Load, storage: str) -> str:
    if load.whole_headroom >= 1:
        return f"{load.chunk_s:g} s is fine: the {storage} delivers {load.whole_headroom:.1f} times the required data."
    return f"{load.chunk_s:g} s is too long: reading takes {1 / load.whole_headroom:.1f} times as long as the step."


def _packets(load: Load, storage: str) -> str:
    if load.packets_headroom >= 1:
        return f"The {storage} delivers {load.packets_headroom:.1f} times the required data."
    faster = "a faster disk, or enough memory to cache the shards"
    if storage == "bucket":
        faster = "nodes closer to the bucket, or a local cache of whole tars"
    return f"Reading takes {1 / load.packets_headroom:.1f} times as long as the step: use a lower bitrate, {faster}."


def _together(load: Load) -> str:
    """Begin of a sentence about storage that one of several nodes measured, up to its "T"."""
    return "T" if load.is_total else f"If {counted(load.num_nodes, 'node')} together get no more than that, t"


def _packets_of_nodes(load: Load, storage: str) -> str:
    """Whether storage that one of several nodes measured is enough for all of them."""
    needed, measured, most = load.packets_bytes_per_s, load.read_bytes_per_s, load.read_bytes_per_s * load.num_nodes
    nodes = counted(load.num_nodes, "node")
    if needed <= measured:
        return f"Enough for {nodes}, even if the {storage} delivers to all of them only what this node measured."
    if needed <= most:
        return (
            f"Enough only if the {storage} delivers at least {bytes_text(needed)}/s to {nodes} together. This node "
            f"measured {bytes_text(measured)}/s alone: give the speed for all of them with --read-speed."
        )
    return (
        f"Not enough: {nodes} get at most {load.num_nodes} times what this node measured, {bytes_text(most)}/s; they "
        f"need {bytes_text(needed)}/s."
    )


def _readers(load: Load, of_clip: str) -> list[str]:
    """What each reader of a cluster reads."""
    if load.num_gpus == 1:
        return []
    needed, nodes = load.packets_bytes_per_s, counted(load.num_nodes, "node")
    return [
        f"Per reader, reading only {of_clip}: each GPU {load.clips_per_s / load.num_gpus:.3g} clips/s and "
        f"{bytes_text(needed / load.num_gpus)}/s, each node {bytes_text(needed / load.num_nodes)}/s, {nodes} together "
        f"{bytes_text(needed)}/s (whole chunks: {bytes_text(load.whole_bytes_per_s)}/s)."
    ]


def bytes_text(count: float) -> str:
    """Return a number of bytes with its unit: 1.5 MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
