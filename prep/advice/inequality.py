"""Whether a disk or a bucket keeps up with training: one inequality, for each way of reading a clip.

    B x b <= S_r x delta                  b = rho x T for whole chunks: AVION, arXiv 2309.16669, equation 3

B is the batch size in clips, b the bytes that are read of a clip, rho the bytes per second of video, T the chunk length
in seconds, S_r the read speed of the disk in bytes per second, and delta the time of a training step in seconds without
waiting for data. The bytes of a clip's packets, or of a segment of latents, do not depend on the chunk length.

If N nodes read one disk, B is the batch of all of them, and S_r is what the disk delivers to all of them together. One
node alone measures at most that, and perhaps only what its network link lets through: S_r is between the speed that
one node measures and N times that speed.

A bucket answers many requests at once, each after tens of milliseconds:

    requests in flight = requests per second x latency        (Little's law: Little 1961, Operations Research 9)
    reading ranges:           E x C x b / N  bytes per node   for E epochs of C clips
    whole tars into a cache:  D              bytes per node, if the cache holds them; less from E = N x D / (C x b) on
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from clipmill.manifests.formatting import count_noun, size_text
from clipmill.prep.advice.reads import READERS

_SOURCE = "AVION, arXiv:2309.16669, equation 3"
_USD_PER_GET = 0.40e-6  # S3 Standard in us-east-1
_GETS_PER_S = 5_500  # that S3 serves at least for each prefix
WHOLE = "whole chunks"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What training requires from a disk or a bucket.

    Attributes:
        batch: B, clips per step, of all nodes together.
        step_s: delta.
        read_bytes_per_s: S_r, as one node measures it or as given for all of them.
        video_bytes_per_s, chunk_s: rho, of latents for their column, and T.
        clip_bytes: b by what is read of a clip: packets, latents.
        num_nodes, gpus_per_node: the cluster; all of its nodes read the disk.
        is_total: whether S_r is known to be what all nodes get together; else it was measured by one of them.
    """

    batch: int
    step_s: float
    read_bytes_per_s: float
    video_bytes_per_s: float
    chunk_s: float
    clip_bytes: Mapping[str, float]
    num_nodes: int = 1
    gpus_per_node: int = 1
    is_total: bool = True

    @property
    def readable_bytes(self) -> float:
        """Bytes that the disk can deliver during one step."""
        return self.read_bytes_per_s * self.step_s

    @property
    def longest_chunk_s(self) -> float:
        """T for which reading whole chunks takes exactly as long as the step."""
        return self.readable_bytes / (self.batch * self.video_bytes_per_s)

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def clips_per_s(self) -> float:
        return self.batch / self.step_s

    @cached_property
    def ways(self) -> dict[str, float]:
        """Bytes per clip by what is read of it."""
        return {WHOLE: self.video_bytes_per_s * self.chunk_s, **self.clip_bytes}

    def headroom(self, way: str) -> float:
        """Number of times that a batch can be read during one step."""
        return self.readable_bytes / (self.batch * self.ways[way])


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What training asks of a bucket.

    Attributes:
        latency_s: of a request for a range of a clip.
        requests_per_clip: ranges, after short gaps were closed.
        set_bytes, num_shards: of all tars of the variant.
        clips_per_epoch: C.
    """

    load: Load
    latency_s: float
    requests_per_clip: float
    set_bytes: float
    num_shards: int
    clips_per_epoch: int

    def values(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        load, found = self.load, {"latency_s": self.latency_s, "set_bytes": self.set_bytes}
        found |= {"num_shards": self.num_shards, "clips_per_epoch": self.clips_per_epoch}
        if "packets" not in load.clip_bytes:  # train fetches whole tars of other columns
            return found | {"fetch_s": self.set_bytes / load.read_bytes_per_s}
        per_s, per_epoch = load.clips_per_s * self.requests_per_clip, self.clips_per_epoch * self.requests_per_clip
        return found | {
            "requests_per_clip": self.requests_per_clip,
            "requests_per_s": per_s,
            "requests_in_flight": per_s * self.latency_s,
            "requests_in_flight_per_gpu": per_s * self.latency_s / load.num_gpus,
            "requests_per_epoch": per_epoch,
            "usd_per_epoch": per_epoch * _USD_PER_GET,
            "epochs_until_cache_pays": load.num_nodes
            * self.set_bytes
            / (self.clips_per_epoch * load.clip_bytes["packets"]),
        }

    def lines(self) -> Iterator[str]:
        """Yield what training asks of the bucket."""
        load, found = self.load, self.values()
        tars = f"{size_text(self.set_bytes)} in {count_noun(self.num_shards, 'request')} on each node"
        if "fetch_s" in found:
            yield (
                f"whole tars of latents are fetched into a cache: {tars}, which takes {found['fetch_s']:,.0f} s; an "
                f"epoch of {count_noun(self.clips_per_epoch, 'clip')} takes "
                f"{self.clips_per_epoch / load.clips_per_s:,.0f}"
                f" s. With a --cache-size below that, they are fetched again in each epoch"
            )
            return
        each, limit = found["requests_in_flight_per_gpu"], ""
        if found["requests_per_s"] > _GETS_PER_S:
            limit = f", more than the {_GETS_PER_S:,}/s that S3 promises per prefix: expect 503 answers and retries"
        yield f"requests      {found['requests_per_s']:,.0f}/s, {self.requests_per_clip:.2f} per clip{limit}"
        yield (
            f"in flight     {found['requests_per_s']:,.0f}/s x {self.latency_s * 1000:.0f} ms = "
            f"{found['requests_in_flight']:.1f} (Little's law), {each:.1f} per GPU; a process of train keeps up to "
            f"{READERS}: {'enough' if each <= READERS else 'not enough, use a closer bucket or more processes'}"
        )
        yield (
            f"cost          {found['requests_per_epoch']:,.0f} requests per epoch of "
            f"{count_noun(self.clips_per_epoch, 'clip')}, USD {found['usd_per_epoch']:.2g} at USD 0.40 per million"
        )
        yield f"local cache   {tars}; transfers less than ranges from {found['epochs_until_cache_pays']:.1f} epochs on"


def advice_values(load: Load) -> dict[str, Any]:
    """Return the figures and conclusions as JSON values."""
    values: dict[str, Any] = {
        "batch": load.batch,
        "step_s": load.step_s,
        "read_bytes_per_s": load.read_bytes_per_s,
        "video_bytes_per_s": load.video_bytes_per_s,
        "chunk_s": load.chunk_s,
        "nodes": load.num_nodes,
        "gpus_per_node": load.gpus_per_node,
        "is_read_speed_of_all_nodes": load.is_total,
        "longest_chunk_s": load.longest_chunk_s,
        "clips_per_s_per_gpu": load.clips_per_s / load.num_gpus,
    }
    for way, clip_bytes in load.ways.items():
        values[way.replace(" ", "_")] = {
            "bytes_per_clip": clip_bytes,
            "bytes_per_step": load.batch * clip_bytes,
            "bytes_per_s": load.clips_per_s * clip_bytes,
            "bytes_per_s_per_node": load.clips_per_s * clip_bytes / load.num_nodes,
            "bytes_per_s_per_gpu": load.clips_per_s * clip_bytes / load.num_gpus,
            "headroom": load.headroom(way),
            "is_fine": load.headroom(way) >= 1,
        }
    return values


def advice_text(load: Load, origin: Mapping[str, str], *, storage: str = "disk") -> str:
    """Return the figures with their origin, and the conclusions.

    Args:
        origin: where step, read speed, bitrate and clips come from, in words.
        storage: "disk" or "bucket".
    """
    lines = [f"step          {load.step_s:.3g} s, {count_noun(load.batch, 'clip')}  ({origin['step']})"]
    if load.num_gpus > 1:
        lines.append(
            f"cluster       {count_noun(load.num_nodes, 'node')} with {count_noun(load.gpus_per_node, 'GPU')} "
            "each; per GPU "
            f"{load.batch / load.num_gpus:g} clips, {load.clips_per_s / load.num_gpus:.3g} clips/s"
        )
    lines += [
        f"read speed    {size_text(load.read_bytes_per_s)}/s  ({origin['read_speed']})",
        f"bitrate       {size_text(load.video_bytes_per_s)}/s  ({origin['bitrate']})",
        f"clips         {origin['clips']}",
        "",
        f"B x b <= S_r x delta: what a step reads, and the {size_text(load.readable_bytes)} that the {storage} "
        "delivers in its time",
    ]
    for way, clip_bytes in load.ways.items():
        lines.append(
            f"{way:<13} {load.batch:,} x {size_text(clip_bytes)} = {size_text(load.batch * clip_bytes)}, "
            f"{size_text(load.clips_per_s * clip_bytes / load.num_nodes)}/s per node: {_verdict(load, way)}"
        )
    return "\n".join(lines)


def _verdict(load: Load, way: str) -> str:
    """Whether storage is enough, with three answers where one of several nodes measured it."""
    headroom, nodes = load.headroom(way), count_noun(load.num_nodes, "node")
    longest = ""
    if way == WHOLE:
        longest = f"; the longest chunk that it sustains is {load.longest_chunk_s:.3g} s ({_SOURCE})"
    if headroom >= 1:
        least = "" if load.is_total else f", even if {nodes} together get only what this node measured"
        return f"fine, {headroom:.1f} times as much is delivered{least}{longest}"
    if load.is_total or headroom * load.num_nodes < 1:
        return f"too much, reading takes {1 / headroom:.1f} times as long as the step{longest}"
    needed = size_text(load.clips_per_s * load.ways[way])
    return f"fine only if {nodes} together get {needed}/s: give their speed with --read-speed{longest}"
