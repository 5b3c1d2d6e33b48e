"""Loading latents: the LatentLoader beside the way it began from, other libraries, a mapped file, and plain memcpy.

    python -m benchmarks.latents [--quick] [--values normal|ar1] [--json FILE]

Every way loads the same set: 5000 segments of 20 x 4 x 32 x 32 float16 and the text embedding of the segment's video,
one of 100, in its own format (`make peers` installs what the others need; a way that is not installed is left empty):

    LatentLoader      clipmill's columns: 1700 chunks of 15 s in tars, three segments each, two in the last of a video;
                      every epoch but the first of a process, in which records are compared with their checksums
      first visits    the same, each epoch as the first one: with these comparisons
    seed, N workers   Zarr, Blosc with zstd, one segment a chunk, worker processes, shared memory, queues
    webdataset        tars with one sample a segment, shuffle buffer of 300, in the loading process
    litdata           its chunks, StreamingDataLoader without worker processes
    MDS               mosaicml-streaming's shards on the local disk, DataLoader without worker processes
    npy memmap        one mapped file, a batch gathered by NumPy into a new array: no tars, no keys, no resuming
    memcpy            the same bytes, segment by segment, into a ring of buffers: the floor

Each way is a process that stays alive. Before anything is timed it loads an epoch whose bytes are compared with the
set's: every segment once, with its text. Then the ways take turns, whose order turns from round to round; a turn is as
many whole epochs as half a second holds. All is shuffled and in memory; the time holds the making of the order. Nothing
is done with a batch. Figures are medians over the rounds; ratios are medians of the ratios within each round: `/ seed`
over the better of the seed's two (target for the LatentLoader: at least 8 at batch 1, 10 at batch 32), `/ memcpy` over
memcpy (target: at least 0.70, aim: 0.90).

Then the anonymous memory of a LatentLoader's process after an epoch (target: under 300 MB whatever the size), for that
set and for larger ones, whose tars are hard links to those of the first; `imports` is what Python had before the loader
was made, torch above all. Last, how long 1000 jumps to random positions below a billion take (target: under 1 ms).
"""

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.latent_peers.latent_data import write_columns
from benchmarks.latent_peers.segment_set import SEGMENT_BYTES, digest, make_segment_set, open_segment_set
from benchmarks.measure import run_measured
from benchmarks.report import parser_for, print_report
from benchmarks.way_process import PEERS_PYTHON, NotInstalled, WayProcess

OURS, FIRST_VISITS, MEMCPY = "LatentLoader", "LatentLoader, first visits", "memcpy"
SEEDS = ("seed, 1 worker", "seed, 2 workers")
AT_LEAST_S = 0.5  # of a turn
Rates = dict[str, list[float]]  # segments a second by the name of the way, one a round


@dataclass(frozen=True)
class Entry:
    """A way's program in benchmarks.latent_peers, and the Python that has what it needs."""

    module: str
    words: tuple[str, ...] = ()
    python: Path = Path(sys.executable)


WAYS = {
    OURS: Entry("latent_loader"),
    FIRST_VISITS: Entry("latent_loader", ("--first-visits",)),
    SEEDS[0]: Entry("seed_zarr", ("--workers", "1"), PEERS_PYTHON),
    SEEDS[1]: Entry("seed_zarr", ("--workers", "2"), PEERS_PYTHON),
    "webdataset": Entry("tar_webdataset"),
    "litdata": Entry("litdata_chunks", (), PEERS_PYTHON),
    "MDS": Entry("mds_shards", (), PEERS_PYTHON),
    "npy memmap": Entry("npy_memmap"),
    MEMCPY: Entry("memcpy"),
}


def start_ways(names: list[str], folder: Path, *, stack: ExitStack) -> tuple[dict[str, WayProcess], dict[str, str]]:
    """Starts the ways and has each make its format; gives those that run, and why others do not."""
    running, missing = {}, {}
    for name in names:
        entry = WAYS[name]
        try:
            running[name] = WayProcess(
                entry.python,
                f"benchmarks.latent_peers.{entry.module}",
                folder / "set",
                folder / entry.module,
                *entry.words,
                folder=folder / "set",
            )
        except NotInstalled as error:
            missing[name] = str(error)
            continue
        stack.callback(running[name].end)
    for name in list(running):
        _progress(f"{name}: making its format")
        try:
            running[name].ask("make")
        except NotInstalled as error:
            missing[name] = str(error)
            del running[name]
    return running, missing


def race(
    ways: dict[str, WayProcess], *, batch: int, num_rounds: int, at_least_s: float, wanted: tuple[int, str]
) -> Rates:
    """Checks each way at one batch size, then lets them take turns.

    Raises:
        RuntimeError: a way does not deliver what the set holds.
    """
    for name, way in ways.items():
        way.ask("open", batch=batch)
        found = way.ask("check")
        if (found["num_distinct"], found["digest"]) != wanted:
            raise RuntimeError(f"{name}, batch {batch}: {found}, the set has {wanted}")
    rates: Rates = {name: [] for name in ways}
    for number in range(num_rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            turn = ways[name].ask("time", at_least_s=at_least_s)
            rates[name].append(turn["num_segments"] / turn["seconds"])
            _progress(f"batch {batch}, round {number + 1}, {name}: {rates[name][-1]:,.0f} segments/s")
    for way in ways.values():
        way.ask("close")
    return rates


def rows_of(batch: int, rates: Rates, names: list[str]) -> list[dict[str, object]]:
    """One row of the table for each way, those that are not installed too."""
    seeds = [max(pair) for pair in zip(*(rates[name] for name in SEEDS if name in rates), strict=True)]

    def ratio(name: str, base: list[float]) -> float | None:
        if name not in rates or not base:
            return None
        return statistics.median(rate / other for rate, other in zip(rates[name], base, strict=True))

    return [
        {
            "batch": batch,
            "way": name,
            "segments/s": round(statistics.median(rates[name])) if name in rates else "not installed",
            "lowest": round(min(rates[name])) if name in rates else None,
            "highest": round(max(rates[name])) if name in rates else None,
            "/ seed": ratio(name, seeds),
            "/ memcpy": ratio(name, rates.get(MEMCPY, [])),
        }
        for name in names
    ]


def measure_costs(folder: Path, *, copies: list[int]) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Memory of loaders of ever larger sets, and the jumps of the last."""
    segments = open_segment_set(folder / "set")
    memory_rows, jumps = [], {}
    for num_copies in copies:
        _progress(f"memory: {num_copies} times the set")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            num_chunks = write_columns(Path(name), segments, num_copies=num_copies)
            usage = run_measured([sys.executable, "-m", "benchmarks.latent_peers.loader_costs", name])
        costs = json.loads(usage.stdout)
        jumps = costs["jumps"]
        memory_rows.append(
            {
                "chunks": num_chunks,
                "segments": costs["num_segments"],
                "latents GB": costs["num_segments"] * SEGMENT_BYTES / 1e9,
                "imports MB": costs["before_bytes"] / 1e6,
                "after MB": costs["after_bytes"] / 1e6,
                "loader MB": (costs["after_bytes"] - costs["before_bytes"]) / 1e6,
            }
        )
    return memory_rows, [
        {"jump": what, "median ms": median, "worst ms": worst} for what, (median, worst) in jumps.items()
    ]


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__ or "")
    parser.add_argument("--segments", type=int, default=5000, help="of the set (default 5000)")
    parser.add_argument("--videos", type=int, default=100, help="of the set (default 100)")
    parser.add_argument("--values", choices=["normal", "ar1"], default="normal", help="ar1: frames resemble each other")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256], help="batch sizes (default 1 32 256)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (default 5)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY", help="only these")
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 8, 64], help="sets for memory (default 1 8 64)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the set, one round: a minute, rough figures")
    return parser


def main() -> None:
    """Runs the benchmark and prints its tables."""
    arguments = _parser().parse_args()
    if arguments.quick:
        arguments.segments, arguments.videos, arguments.rounds = 500, 10, 1
        arguments.batches, arguments.copies = [1, 32], [1, 8]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        _progress("making the set")
        make_segment_set(
            folder / "set",
            num_segments=arguments.segments,
            num_videos=arguments.videos,
            values=arguments.values,
        )
        segments = open_segment_set(folder / "set")
        wanted = digest([(segments.latents, segments.text[segments.video_of_segment])])
        ways, missing = start_ways(arguments.ways, folder, stack=stack)
        for batch in arguments.batches:
            rates = race(ways, batch=batch, num_rounds=arguments.rounds, at_least_s=AT_LEAST_S, wanted=wanted)
            rows += rows_of(batch, rates, arguments.ways)
        memory_rows, jump_rows = measure_costs(folder, copies=arguments.copies)
    notes = [
        f"{arguments.segments:,} segments of {arguments.videos} videos, values {arguments.values}, "
        f"{arguments.rounds} rounds; every way's bytes are those of the set.",
        *(f"{name} is not installed: {why}" for name, why in missing.items()),
    ]
    further = {"Anonymous memory of a LatentLoader's process": memory_rows, "Jumps": jump_rows}
    print_report("Loading latents", rows, notes=notes, json_path=arguments.json, further=further)


if __name__ == "__main__":
    main()
