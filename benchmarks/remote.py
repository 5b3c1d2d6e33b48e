"""Training data in object storage compared with a local folder: clips and latents per second, requests, bytes.

    python -m benchmarks.remote VIDEOS [--pieces N] [--rounds N] [--latency S] [--json FILE]

Pieces of VIDEOS are encoded with `prep chunk`, and their latents with a tiny VAE. A local S3 server (moto) has a copy
of the folder, and a proxy in front of the server delays every response. Both are separate processes, whose CPU time is
reported separately, because they compete with the loader for a small number of cores. The loaders of `train
dual-encoder` take turns, and all of them load the same samples in a turn. `/ local` is the ratio of samples per second
of wall time, and `/ local, CPU` the ratio of samples per second of the loader's CPU time: medians over the rounds. The
target of `/ local` is at least 0.8.

Clips: 4 frames of 224 px, one decoding thread, so that a core remains for the server. Latents: segments of 5 s with
stored text. The cache of `by range` has room only for the text. `first epoch` starts every turn with an empty cache,
and `from the cache` with a full cache. An epoch from a full cache is very short, so a turn has a hundred epochs.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.decode_peers.chunk_sets import OWN, make_set, write_captions
from benchmarks.decode_peers.clip_set import data_folder
from benchmarks.decode_peers.pieces import pieces_of
from benchmarks.latent_peers.latent_data import write_columns
from benchmarks.latent_peers.segment_set import make_segment_set, open_segment_set
from benchmarks.report import parser_for, print_report
from benchmarks.timing import turns
from clipmill.manifests.storage.objects import Objects
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.shards.marks import keep_marks
from clipmill.train.data.data_folder import DataFolder, open_data_folder
from clipmill.train.data.latents.segments import SegmentQuery
from clipmill.train.data.loader import LoaderSettings, TrainingSet
from clipmill.train.data.mapped_tars import RemoteMaps
from clipmill.train.data.prefetch import prefetch
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.remote import RemoteTars
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import open_attention
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask
from tests.object_storage.faults import Faults, faulty
from tests.object_storage.server import S3Server, s3_server
from tests.object_storage.upload import upload

CPU = torch.device("cpu")
NUM_FRAMES, SIZE_PX, BATCH = 4, 224, 16
CLIP_S, CLIPS_PER_PIECE, STEP_S = 4.0, 60, 0.18  # spans that overlap, so that a folder has many samples
NUM_COPIES, SEGMENTS_PER_VIDEO = 4, 50
WHOLE = "100GB"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Way:
    """Set of samples, and the measurements of its turns.

    Attributes:
        open: Function that opens the samples of a turn, and the objects that the samples are read from.
        reopens: True if every turn opens the samples again.
    """

    open: Callable[[], tuple[TrainingSet, Objects | None]]
    reopens: bool = False
    opened: tuple[TrainingSet, Objects | None] | None = None
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    server_s: list[float] = field(default_factory=list)
    num_requests: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def take_turn(self, position: int, num_batches: int) -> None:
        """Load batches, and append the measurements, without the time of opening the samples."""
        if self.opened is None or self.reopens:
            self.opened = self.open()
        samples, objects = self.opened
        before = (0, 0) if objects is None else (objects.num_requests, objects.num_bytes)
        began_s = time.perf_counter(), time.process_time(), _children_s()
        with closing(prefetch(samples.batches(position=position, max_failures=0), CPU)) as batches:
            for _ in islice(batches, num_batches):
                pass
        ended_s = time.perf_counter(), time.process_time(), _children_s()
        for taken, begin, end in zip((self.wall_s, self.cpu_s, self.server_s), began_s, ended_s, strict=True):
            taken.append(end - begin)
        after = (0, 0) if objects is None else (objects.num_requests, objects.num_bytes)
        self.num_requests.append(after[0] - before[0])
        self.num_bytes.append(after[1] - before[1])


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, help="folder of videos (default: generated videos)")
    parser.add_argument("--pieces", type=int, default=20)
    parser.add_argument("--batches", type=int, default=40, help=f"batches of {BATCH} clips per turn (default 40)")
    parser.add_argument("--segments", type=int, default=1600, help="segments of latents, one turn (default 1600)")
    parser.add_argument("--cached-epochs", type=int, default=100, help="epochs per turn with local data (default 100)")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds until a response (default 0.05)")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as scratch,
        s3_server() as server,
        faulty(server.port) as proxy,
        patch.dict("os.environ", server.environment()),
        keep_marks(),  # marks of readers must be removed while the server runs
    ):
        folder = Path(scratch)
        proxy.set(latency_s=arguments.latency)
        shown_ms = f"{1000 * arguments.latency:.0f} ms"
        clips, latents = (
            _make_clips(folder, arguments.videos, arguments.pieces),
            _make_latents(folder, arguments.segments),
        )
        bucket = server.make_bucket("benchmark")
        upload(clips, f"{bucket}/clips")
        upload(latents, f"{bucket}/latents")
        ways, starts = _clip_ways(clips, f"{bucket}/clips", folder, server, proxy, shown_ms)
        num_batches = arguments.batches
        rows = _measure("clips", ways, num_batches=num_batches, batch=BATCH, num_rounds=arguments.rounds)
        ways, more = _latent_ways(latents, f"{bucket}/latents", folder, server, proxy, shown_ms)
        num_batches = arguments.segments // BATCH
        rows += _measure("latents", ways, num_batches=num_batches, batch=BATCH, num_rounds=arguments.rounds)
        # An epoch of local data is too short to be measured.
        ways = _cached_ways(latents, f"{bucket}/latents", folder, proxy, shown_ms)
        num_batches *= arguments.cached_epochs
        rows += _measure("latents again", ways, num_batches=num_batches, batch=BATCH, num_rounds=arguments.rounds)
    title = f"{arguments.pieces} chunks, {arguments.segments} segments, median of {arguments.rounds} rounds"
    print_report(title, rows, notes=[], further={"Opening": starts + more}, json_path=arguments.json)


def _make_clips(folder: Path, videos: Path | None, num_pieces: int) -> Path:
    program, pieces, captions = find_ffmpeg().path, folder / "pieces", folder / "captions.csv"
    pieces.mkdir()
    pieces_of(videos, pieces, num_pieces=num_pieces, program=program)
    begins_s = [STEP_S * number for number in range(CLIPS_PER_PIECE)]
    write_captions(captions, [(piece, begin, CLIP_S) for piece in range(num_pieces) for begin in begins_s])
    make_set(OWN, pieces=pieces, captions=captions, folder=folder, program=program)
    return data_folder(folder, OWN)


def _make_latents(folder: Path, num_segments: int) -> Path:
    num_own = max(1, num_segments // NUM_COPIES)
    num_videos = max(1, num_own // SEGMENTS_PER_VIDEO)
    make_segment_set(folder / "segments", num_segments=num_own, num_videos=num_videos, values="normal")
    data = folder / "latents"
    data.mkdir()
    write_columns(data, open_segment_set(folder / "segments"), num_copies=NUM_COPIES)
    return data


def _connect_to(endpoint: str) -> None:
    """Let clients that are opened from now on connect to an endpoint."""
    os.environ["AWS_ENDPOINT_URL"] = endpoint


def _clip_ways(
    local: Path, remote: str, folder: Path, server: S3Server, proxy: Faults, shown_ms: str
) -> tuple[dict[str, Way], list[dict[str, Any]]]:
    def opened(shards: str, endpoint: str, name: str) -> tuple[TrainingSet, Objects | None]:
        _connect_to(endpoint)
        cache = folder / "cache" / name
        settings = DualEncoderSettings(
            shards=shards, cache=cache, batch=BATCH, num_frames=NUM_FRAMES, size_px=SIZE_PX, workers=1, model="tiny"
        )
        task = DualEncoderTask(settings, attention=open_attention("auto", device_type="cpu"), device=CPU)
        samples = task.training_set(World())
        tars = samples.reader.chunks.tars  # type: ignore[union-attr]
        return samples, None if tars is None else tars.objects

    ways = {
        "local": Way(lambda: opened(str(local), server.endpoint, "local")),
        "S3, 0 ms": Way(lambda: opened(remote, server.endpoint, "near")),
        f"S3, {shown_ms}": Way(lambda: opened(remote, proxy.endpoint, "far")),
    }
    return ways, [_start("clips, S3, 0 ms", ways["S3, 0 ms"])]


def _latent_ways(
    local: Path, remote: str, folder: Path, server: S3Server, proxy: Faults, shown_ms: str
) -> tuple[dict[str, Way], list[dict[str, Any]]]:
    def opened(endpoint: str, name: str, size: str, *, is_empty: bool = False) -> tuple[TrainingSet, Objects | None]:
        _connect_to(endpoint)
        cache = folder / "cache" / f"latents-{name}"
        if is_empty:
            shutil.rmtree(cache / "objects", ignore_errors=True)
            (cache / "objects").mkdir(parents=True, exist_ok=True)
        return _open_latents(remote, cache, size)

    text = sum(path.stat().st_size for path in local.glob("text/*/*.tar"))
    ways = {
        "local": Way(lambda: (_latents(DataFolder(local)), None)),
        "S3, 0 ms, by range": Way(lambda: opened(server.endpoint, "near", f"{text}B")),
        f"S3, {shown_ms}, by range": Way(lambda: opened(proxy.endpoint, "far", f"{text}B")),
        f"S3, {shown_ms}, first epoch": Way(
            lambda: opened(proxy.endpoint, "first", WHOLE, is_empty=True), reopens=True
        ),
    }
    return ways, [_start("latents, S3, 0 ms", ways["S3, 0 ms, by range"])]


def _cached_ways(local: Path, remote: str, folder: Path, proxy: Faults, shown_ms: str) -> dict[str, Way]:
    _connect_to(proxy.endpoint)
    ways = {
        "local": Way(lambda: (_latents(DataFolder(local)), None)),
        f"S3, {shown_ms}, from the cache": Way(lambda: _open_latents(remote, folder / "cache" / "cached", WHOLE)),
    }
    _fill_cache(ways[f"S3, {shown_ms}, from the cache"])
    return ways


def _latents(folder: DataFolder) -> Samples[Any]:
    return open_latent_segments(
        SegmentQuery(folder.path, split="train", tars=folder.tars, loading=LoaderSettings(batch=BATCH))
    )


def _open_latents(remote: str, cache: Path, size: str) -> tuple[TrainingSet, Objects | None]:
    found = open_data_folder(remote, cache=cache, cache_size=size, column="latents")
    assert isinstance(found.tars, RemoteTars)
    return _latents(found), found.tars.objects


def _start(name: str, way: Way) -> dict[str, Any]:
    """Open a set with an empty cache, and return a table row with requests and bytes."""
    way.opened = way.open()
    objects = way.opened[1]
    assert objects is not None
    return {"way": name, "requests": objects.num_requests, "MB": objects.num_bytes / 1e6}


def _fill_cache(way: Way) -> None:
    way.opened = way.open()
    samples = way.opened[0]
    assert isinstance(samples, Samples)
    tars = samples.reader.segments.maps
    assert isinstance(tars, RemoteMaps)
    for number in range(len(tars.starts)):
        tars.fetch(number, waits=True)


def _measure(kind: str, ways: dict[str, Way], *, num_batches: int, batch: int, num_rounds: int) -> list[dict[str, Any]]:
    for way in ways.values():
        way.take_turn(0, num_batches)  # fills the page cache, verifies checksums and allocates memory
        for taken in (way.wall_s, way.cpu_s, way.server_s, way.num_requests, way.num_bytes):
            taken.clear()
    for number, name in turns(list(ways), num_rounds):
        ways[name].take_turn(number * num_batches * batch, num_batches)
    num, local, rows = num_batches * batch, ways["local"], []
    for name, way in ways.items():
        ratios, cpu_ratios = (
            [one / other for one, other in zip(ones, others, strict=True)]
            for ones, others in ((local.wall_s, way.wall_s), (local.cpu_s, way.cpu_s))
        )
        rows.append(
            {
                "way": f"{kind}, {name}",
                "samples/s": num / statistics.median(way.wall_s),
                "/ local": statistics.median(ratios),
                "/ local, CPU": statistics.median(cpu_ratios),
                "CPU ms a sample": 1000 * statistics.median(way.cpu_s) / num,
                "server's": 1000 * statistics.median(way.server_s) / num,
                "requests a sample": statistics.median(way.num_requests) / num,
                "kB a sample": statistics.median(way.num_bytes) / num / 1000,
            }
        )
    return rows


def _children_s() -> float:
    """Return the CPU time of the server and the proxy so far, in seconds."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    return sum(int(one) for pair in ticks for one in pair) / _TICKS


if __name__ == "__main__":
    main()
