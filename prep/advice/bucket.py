"""What training from object storage needs: requests in flight, read-ahead, requests that cost money, a local cache.

    requests in flight = requests per second x latency        (Little's law: Little 1961, Operations Research 9)

A bucket answers many requests at once, each after tens of milliseconds. What one reader gets is therefore limited by
how many requests it has in flight, and read-ahead has to keep that many clips under way.

    reading ranges:           E x C x b / N  bytes per node
    whole tars into a cache:  D              bytes per node, if the cache holds them

E epochs, C clips per epoch of all nodes, b bytes per clip, N nodes, D bytes of all tars. Each node reads all shards in
the course of the epochs, since the order of samples is shuffled over the whole set. The cache is less to transfer from
E = N x D / (C x b) epochs on.
"""

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

from clipmill.manifests.quoting import counted
from clipmill.manifests.storage.objects import Objects
from clipmill.prep.advice.equation import Load, bytes_text

GAP_BYTES = 1 << 18  # train reads a gap up to this size along, rather than send another request
READERS = 32  # threads by which a process of train reads clips ahead
_MAX_THREADS = 128
_NUM_LATENCIES, _READING_S, _MAX_READ_BYTES = 24, 3.0, 1 << 30
_USD_PER_GET = 0.40e-6  # S3 Standard in us-east-1
_GETS_PER_S = 5_500  # that S3 serves at least for each prefix

Read = tuple[str, tuple[tuple[int, int], ...]]  # key of a tar, and ranges (offset, size) of one clip in it


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A bucket as one node sees it.

    Attributes:
        latency_s, slow_latency_s: median and 95th percentile of the time of a request, one at a time.
        bytes_per_s: of `num_reads` clips that `num_threads` threads read.
    """

    latency_s: float
    slow_latency_s: float
    bytes_per_s: float
    num_reads: int
    num_threads: int


def measure(objects: Objects, reads: Sequence[Read], *, num_processes: int) -> Measured:
    """Read clips one after another, and then for a few seconds as `num_processes` of train would read them together.

    Raises:
        OSError: an object cannot be read; see `Objects`.
    """
    turns = cycle(reads)
    taken_s = [_timed(objects, *next(turns)) for _ in range(_NUM_LATENCIES + 1)]
    taken_s = sorted(taken_s[1:])  # the first request opens the connection
    num_threads = min(READERS * num_processes, _MAX_THREADS)
    lock = threading.Lock()
    counts: list[int] = []
    began_s = time.perf_counter()

    def read_on() -> None:
        while time.perf_counter() - began_s < _READING_S and sum(counts) < _MAX_READ_BYTES:
            with lock:
                key, ranges = next(turns)
            num_bytes = sum(map(len, objects.read_ranges(key, ranges)))
            counts.append(num_bytes)

    with ThreadPoolExecutor(num_threads) as pool:
        for running in [pool.submit(read_on) for _ in range(num_threads)]:
            running.result()
    return Measured(
        latency_s=median(taken_s),
        slow_latency_s=taken_s[math.ceil(0.95 * len(taken_s)) - 1],
        bytes_per_s=sum(counts) / (time.perf_counter() - began_s),
        num_reads=len(counts),
        num_threads=num_threads,
    )


@dataclass(frozen=True, kw_only=True)
class BucketLoad:
    """What training asks of a bucket.

    Attributes:
        latency_s: of a request for a range of a clip.
        requests_per_clip: ranges, after gaps up to `GAP_BYTES` were closed.
        set_bytes, num_shards: of all tars of the variant.
        clips_per_epoch: C.
        reads_ranges: whether train reads ranges of clips, as of video; of other columns it fetches whole tars.
    """

    load: Load
    latency_s: float
    requests_per_clip: float
    set_bytes: int
    num_shards: int
    clips_per_epoch: int
    reads_ranges: bool

    @property
    def requests_per_s(self) -> float:
        return self.load.clips_per_s * self.requests_per_clip

    @property
    def requests_in_flight(self) -> float:
        """Little's law: all nodes together."""
        return self.requests_per_s * self.latency_s

    @property
    def clips_ahead(self) -> int:
        """Clips that each GPU's process must have under way, at least one."""
        return max(1, math.ceil(self.load.clips_per_s * self.latency_s / self.load.num_gpus))

    @property
    def requests_per_epoch(self) -> float:
        return self.clips_per_epoch * self.requests_per_clip

    @property
    def epochs_until_cache_pays(self) -> float:
        """Epochs after which whole tars in a cache on every node are fewer bytes than ranges of clips."""
        return self.load.num_nodes * self.set_bytes / (self.clips_per_epoch * self.load.clip_bytes)


def bucket_text(needs: BucketLoad) -> str:
    """Return what training asks of the bucket, and the conclusions."""
    return _ranges_text(needs) if needs.reads_ranges else _tars_text(needs)


def _tars_text(needs: BucketLoad) -> str:
    load = needs.load
    epoch_s = needs.clips_per_epoch / load.clips_per_s
    fetch_s = needs.set_bytes / load.read_bytes_per_s
    return "\n".join(
        [
            f"train fetches whole tars of this column into a cache: {bytes_text(needs.set_bytes)} in "
            f"{counted(needs.num_shards, 'request')} on each of {counted(load.num_nodes, 'node')}, once if "
            f"--cache-size is at least {bytes_text(needs.set_bytes)}, else again in each epoch.",
            f"  Fetching them takes {fetch_s:,.0f} s, an epoch of {counted(needs.clips_per_epoch, 'clip')} takes "
            f"{epoch_s:,.0f} s: "
            + ("the first epoch does not wait." if fetch_s <= epoch_s else "the first epoch waits for the bucket."),
        ]
    )


def _ranges_text(needs: BucketLoad) -> str:
    load = needs.load
    per_process = needs.requests_in_flight / load.num_gpus
    enough = "enough" if per_process <= READERS else "not enough, so use a closer bucket, or more processes"
    limit = "" if needs.requests_per_s <= _GETS_PER_S else "; more than S3 promises, so expect 503 answers and retries"
    return "\n".join(
        [
            f"Requests: {needs.requests_per_clip:.2f} per clip, {needs.requests_per_s:,.0f}/s in all (S3 serves at "
            f"least {_GETS_PER_S:,}/s per prefix{limit}).",
            f"  Requests in flight = rate x latency (Little's law): {needs.requests_per_s:,.0f}/s x "
            f"{needs.latency_s * 1000:.0f} ms = {needs.requests_in_flight:.1f} in all, {per_process:.1f} per GPU. "
            f"A process of train keeps up to {READERS} in flight: {enough}.",
            f"  Read-ahead: at least {counted(needs.clips_ahead, 'clip')} per GPU.",
            f"  Cost: {needs.requests_per_epoch:,.0f} requests per epoch of {counted(needs.clips_per_epoch, 'clip')}, "
            f"USD {needs.requests_per_epoch * _USD_PER_GET:.2g} at USD 0.40 per million (S3 Standard, us-east-1; "
            "traffic to another region or out of the cloud costs extra).",
            f"Local cache: whole tars are {bytes_text(needs.set_bytes)} in {counted(needs.num_shards, 'request')} on "
            f"each of {counted(load.num_nodes, 'node')}; ranges are "
            f"{bytes_text(needs.clips_per_epoch * load.clip_bytes / load.num_nodes)} per node and epoch.",
            f"  A cache of {bytes_text(needs.set_bytes)} on each node transfers less from "
            f"{needs.epochs_until_cache_pays:.1f} epochs on.",
        ]
    )


def bucket_values(needs: BucketLoad) -> dict[str, Any]:
    """Return the same as JSON values."""
    if not needs.reads_ranges:
        return {"latency_s": needs.latency_s, "set_bytes": needs.set_bytes, "num_shards": needs.num_shards}
    return {
        "latency_s": needs.latency_s,
        "requests_per_clip": needs.requests_per_clip,
        "requests_per_s": needs.requests_per_s,
        "requests_in_flight": needs.requests_in_flight,
        "requests_in_flight_per_gpu": needs.requests_in_flight / needs.load.num_gpus,
        "clips_ahead_per_gpu": needs.clips_ahead,
        "requests_per_epoch": needs.requests_per_epoch,
        "usd_per_epoch": needs.requests_per_epoch * _USD_PER_GET,
        "set_bytes": needs.set_bytes,
        "clips_per_epoch": needs.clips_per_epoch,
        "epochs_until_cache_pays": needs.epochs_until_cache_pays,
    }


def _timed(objects: Objects, key: str, ranges: Sequence[tuple[int, int]]) -> float:
    """Seconds for one request."""
    began_s = time.perf_counter()
    objects.read_ranges(key, ranges[:1])
    return time.perf_counter() - began_s
