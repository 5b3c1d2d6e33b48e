"""Source videos in a bucket against the same files on a disk: requests, bytes, CPU and wall time.

    python -m benchmarks.remote_sources [VIDEOS] [--probes FILE ...] [--latencies-ms MS ...] [--copies N] [--rounds N]
        [--settings FLAG ...] [--json FILE]

A real S3 server (moto) runs on this machine, behind a proxy that delays every answer by each of the latencies, and
counts requests and bytes. The variants take turns within a round.

    probe       what one source costs, by its container: read from the bucket, and locally
    plan        `prep plan` of every video, `--copies` times under different names, nothing known of them
    replan      the same again: nothing has changed
    chunk       `prep chunk` of every video once, with two workers

`/ size` is the bytes fetched over the bytes of the sources. CPU seconds are those of the command and its processes,
without the server and the proxy, and medians of the rounds like wall seconds. The server of moto is slow (some
milliseconds a request, one process), and it shares the cores with the command.

Without VIDEOS, synthetic ones are generated.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from benchmarks.measure import Usage, prep_command, run_measured
from benchmarks.report import parser_for, print_report
from manifests.storage.objects import open_objects
from prep.sources.probe import probe
from prep.sources.remote import objects_of
from prep.synthetic.frame_numbers import write_frame_number_video
from tests.object_storage.faults import Faults, faulty
from tests.object_storage.server import s3_server

NUM_WORKERS = 2
QUICK = ("--preset", "ultrafast", "--short-side", "96", "--len", "2s")


@dataclass
class Turns:
    """Figures of one step of one variant, over the rounds."""

    usages: list[Usage] = field(default_factory=list)
    num_requests: int = 0
    num_bytes: int = 0

    def row(self, step: str, variant: str, *, source_bytes: int) -> dict[str, object]:
        is_remote = variant != "local"
        return {
            "step": step,
            "sources": variant,
            "wall s": statistics.median(usage.wall_s for usage in self.usages),
            "CPU s": statistics.median(usage.cpu_s for usage in self.usages),
            "requests": self.num_requests if is_remote else None,
            "MB": self.num_bytes / 1e6 if is_remote else None,
            "/ size": self.num_bytes / source_bytes if is_remote else None,
        }


def probe_rows(videos: list[Path], bucket: str, proxy: Faults) -> list[dict[str, object]]:
    """Return the cost of one probe of each video."""
    rows = []
    for path in videos:
        url = f"{bucket}/probes/{path.name}"
        open_objects(f"{bucket}/probes").write(path.name, path)
        objects_of(url)[0].info(objects_of(url)[1])  # the connection is open
        proxy.set()
        begin_s = time.process_time()
        there = probe(url)
        middle_s = time.process_time()
        here = probe(path)
        end_s = time.process_time()
        if here != there:
            raise RuntimeError(f"the probes of {path} differ: {here}, {there}")
        seen = proxy.seen()
        rows.append(
            {
                "source": path.name,
                "MB": path.stat().st_size / 1e6,
                "requests": len(seen.requests),
                "MB read": seen.num_bytes / 1e6,
                "/ size": seen.num_bytes / path.stat().st_size,
                "CPU ms": 1000 * (middle_s - begin_s),
                "CPU ms, local": 1000 * (end_s - middle_s),
            }
        )
    return rows


@contextmanager
def bucket_behind_proxy() -> Iterator[tuple[str, Faults]]:
    """Yield the address of an empty bucket and the proxy through which this process and its children reach it."""
    with s3_server() as server, faulty(server.port) as proxy:
        before = dict(os.environ)
        os.environ.update(server.environment(endpoint=proxy.endpoint))
        try:
            yield server.make_bucket("benchmark"), proxy
        finally:
            os.environ.clear()
            os.environ.update(before)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="*", type=Path, help="video files (default: two synthetic ones)")
    parser.add_argument("--probes", nargs="*", type=Path, default=[], help="further video files, which are only probed")
    parser.add_argument("--latencies-ms", nargs="+", type=int, default=[0, 50], help="delays of answers (default 0 50)")
    parser.add_argument("--copies", type=int, default=100, help="names of each video for the plan (default 100)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default 3)")
    parser.add_argument("--settings", nargs="+", default=QUICK, help=f"of prep chunk (default {' '.join(QUICK)})")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bucket_behind_proxy() as (bucket, proxy):
        here = Path(folder)
        videos = arguments.videos or made_videos(here / "made")
        places = uploaded(videos, bucket, folder=here, num_copies=arguments.copies)
        num_bytes = {name: sum(path.stat().st_size for path in (here / name).iterdir()) for name in ("once", "often")}
        probes = probe_rows([*videos, *arguments.probes], bucket, proxy)
        variants = {"local": 0, **{f"bucket, {ms} ms": ms for ms in arguments.latencies_ms}}
        turns: dict[tuple[str, str], Turns] = {}
        for number in range(arguments.rounds):
            for variant, latency_ms in variants.items():
                where = "local" if variant == "local" else "bucket"
                for step, usage, seen in run_steps(
                    here / f"{number}-{variant}", places[where], proxy, latency_ms / 1000, arguments.settings
                ):
                    turn = turns.setdefault((step, variant), Turns())
                    turn.usages.append(usage)
                    turn.num_requests, turn.num_bytes = seen
        sizes = {"plan": num_bytes["often"], "replan": num_bytes["often"], "chunk": num_bytes["once"]}
        rows = [
            turn.row(step, variant, source_bytes=sizes[step])
            for (step, variant), turn in sorted(turns.items(), key=lambda item: list(sizes).index(item[0][0]))
        ]
        notes = [
            f"Medians of {arguments.rounds} rounds. plan: {len(videos) * arguments.copies} videos of "
            f"{num_bytes['often'] / 1e6:,.0f} MB; chunk: {len(videos)} of {num_bytes['once'] / 1e6:,.0f} MB, "
            f"{' '.join(arguments.settings)}."
        ]
        print_report("Remote sources", rows, notes=notes, json_path=arguments.json, further={"One probe": probes})


def made_videos(folder: Path) -> list[Path]:
    """Write two synthetic videos."""
    paths = [folder / "made.mp4", folder / "made.mkv"]
    for path in paths:
        write_frame_number_video(path, num_frames=120, fps=Fraction(30), width=160, height=120)
    return paths


def uploaded(videos: list[Path], bucket: str, *, folder: Path, num_copies: int) -> dict[str, dict[str, str]]:
    """Put the videos into the bucket and into a folder, once, and often under different names; return the places."""
    objects = open_objects(bucket)
    for name in ("once", "often"):
        (folder / name).mkdir()
    for path in videos:
        objects.write(f"once/{path.name}", path)
        shutil.copyfile(path, folder / "once" / path.name)
        for number in range(num_copies):
            copy = folder / "often" / f"{path.stem}-{number}{path.suffix}"
            os.link(folder / "once" / path.name, copy)
            objects.write(f"often/{copy.name}", path)
    return {
        "local": {name: str(folder / name) for name in ("once", "often")},
        "bucket": {name: f"{bucket}/{name}" for name in ("once", "often")},
    }


def run_steps(
    data: Path, places: dict[str, str], proxy: Faults, latency_s: float, settings: list[str]
) -> Iterator[tuple[str, Usage, tuple[int, int]]]:
    """Yield (step, usage, (requests, bytes)) of each command."""

    def measured(step: str, *command: str) -> tuple[str, Usage, tuple[int, int]]:
        proxy.set(latency_s=latency_s)
        usage = run_measured(prep_command(*command))
        seen = proxy.seen()
        return step, usage, (len(seen.requests), seen.num_bytes)

    for name in ("often", "once"):
        run_measured(prep_command("manifest", "folder", places[name], "--data", str(data / name)))
    yield measured("plan", "plan", "--data", str(data / "often"))
    yield measured("replan", "plan", "--data", str(data / "often"))
    engine = ("--engine", "processes", "--workers", str(NUM_WORKERS))
    yield measured("chunk", "chunk", *settings, *engine, "--data", str(data / "once"))
    shutil.rmtree(data)


if __name__ == "__main__":
    main()
