"""Loading latents: the LatentLoader compared with its predecessor, other libraries, a mapped file, and memcpy.

    python -m benchmarks.latents [--quick] [--values normal|ar1] [--json FILE]

Every loader reads the same dataset in its own format: 5000 segments of 20 x 4 x 32 x 32 float16, with the text
embedding of the segment's video, which is one of 100. `make peers` installs the other libraries; the rows of missing
libraries are empty.

    LatentLoader      clipmill's columns: 1700 chunks of 15 s in tars, three segments each, two in the last of a video;
                      all epochs after the first, which verifies the checksums of the records
      first visits    the same, but every epoch verifies the checksums
    seed, N workers   Zarr, Blosc with zstd, one segment per Zarr chunk, worker processes, shared memory, queues
    seed, chunks of 8 the same with 2 workers and eight segments per Zarr chunk
    webdataset        tars with one sample per segment, shuffle buffer of 300, in the loading process
    litdata           litdata's chunks, StreamingDataLoader without worker processes
    MDS               mosaicml-streaming's shards on the local disk, DataLoader without worker processes
    npy memmap        one memory-mapped file; NumPy gathers batches into a new array: no tars, no keys, no resuming
    memcpy            the same bytes, copied segment by segment into a ring of buffers: the lower bound

Each loader is a persistent process. Before the timing, it loads an epoch, whose bytes are compared with the dataset:
every segment once, with its text. The loaders then take turns, in an order that rotates from round to round. A turn
consists of as many complete epochs as fit into half a second. All data are in memory. The time includes shuffling, and
nothing is done with the batches. Figures are medians over the rounds. Ratios are medians of the ratios within each
round: `/ seed` is relative to the better of the two seed rows (target for the LatentLoader: at least 8 at batch 1, 10
at batch 32), `/ memcpy` is relative to memcpy (target: at least 0.70, aim: 0.90).

A second table has the anonymous memory of a LatentLoader's process after an epoch (target: under 300 MB for any size),
for this dataset and for larger datasets, whose tars are hard links to the first tars. `imports` is the memory before
the loader is created, which is mainly torch's. A third table has the time of 1000 seeks to random positions below a
billion (target: under 1 ms).
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
from benchmarks.peer_process import PEERS_PYTHON, NotInstalled, PeerProcess
from benchmarks.report import parser_for, print_report

OURS, FIRST_VISITS, MEMCPY = "LatentLoader", "LatentLoader, first visits", "memcpy"
VIDEO = "LatentLoader, video VAE"
SEEDS = ("seed, 1 worker", "seed, 2 workers")
SEED_CHUNKS = "seed, chunks of 8"
AT_LEAST_S = 0.5  # duration of a turn
Rates = dict[str, list[float]]  # segments per second by loader, one value per round


@dataclass(frozen=True)
class Entry:
    """Program of a loader in benchmarks.latent_peers, and the Python interpreter that has its packages."""

    module: str
    words: tuple[str, ...] = ()
    python: Path = Path(sys.executable)

    @property
    def folder(self) -> str:
        """Name of the folder with the dataset in the loader's format. Loaders with the same format share it."""
        options = [word for word in ("--video", "--chunk") if word in self.words]
        return "".join([self.module, *options])


VARIANTS = {
    OURS: Entry("latent_loader"),
    FIRST_VISITS: Entry("latent_loader", ("--first-visits",)),
    VIDEO: Entry("latent_loader", ("--video",)),
    SEEDS[0]: Entry("seed_zarr", ("--workers", "1"), PEERS_PYTHON),
    SEEDS[1]: Entry("seed_zarr", ("--workers", "2"), PEERS_PYTHON),
    SEED_CHUNKS: Entry("seed_zarr", ("--workers", "2", "--chunk", "8"), PEERS_PYTHON),
    "webdataset": Entry("tar_webdataset"),
    "litdata": Entry("litdata_chunks", (), PEERS_PYTHON),
    "MDS": Entry("mds_shards", (), PEERS_PYTHON),
    "npy memmap": Entry("npy_memmap"),
    MEMCPY: Entry("memcpy"),
}


def start_variants(
    names: list[str], folder: Path, *, stack: ExitStack
) -> tuple[dict[str, PeerProcess], dict[str, str]]:
    """Start the loaders, and let each write the dataset in its format.

    Returns:
        The running loaders by name, and the reason why each other loader is missing.
    """
    running, missing = {}, {}
    for name in names:
        entry = VARIANTS[name]
        try:
            running[name] = PeerProcess(
                entry.python,
                f"benchmarks.latent_peers.{entry.module}",
                folder / "set",
                folder / entry.folder,
                *entry.words,
                folder=folder / "set",
            )
        except NotInstalled as error:
            missing[name] = str(error)
            continue
        stack.callback(running[name].end)
    for name in list(running):
        _progress(f"{name}: writing the dataset in its format")
        try:
            running[name].ask("make")
        except NotInstalled as error:
            missing[name] = str(error)
            del running[name]
    return running, missing


def race(
    variants: dict[str, PeerProcess], *, batch: int, num_rounds: int, at_least_s: float, wanted: tuple[int, str]
) -> Rates:
    """Check the output of each loader with a batch size, and then time the loaders in turns.

    Raises:
        RuntimeError: The output of a loader differs from the dataset.
    """
    for name, variant in variants.items():
        variant.ask("open", batch=batch)
        found = variant.ask("check")
        if (found["num_distinct"], found["digest"]) != wanted:
            raise RuntimeError(f"{name}, batch {batch}: loaded {found}, but the dataset has {wanted}")
    rates: Rates = {name: [] for name in variants}
    for number in range(num_rounds):
        names = list(variants)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            turn = variants[name].ask("time", at_least_s=at_least_s)
            rates[name].append(turn["num_segments"] / turn["seconds"])
            _progress(f"batch {batch}, round {number + 1}, {name}: {rates[name][-1]:,.0f} segments/s")
    for variant in variants.values():
        variant.ask("close")
    return rates


def rows_of(batch: int, rates: Rates, names: list[str]) -> list[dict[str, object]]:
    """Return a table row for each loader, including missing loaders."""
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
    """Return table rows with the memory of loaders for several sizes, and with the time of seeks for the last size."""
    segments = open_segment_set(folder / "set")
    memory_rows, jumps = [], {}
    for num_copies in copies:
        _progress(f"memory: {num_copies} times the dataset")
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
    parser.add_argument("--segments", type=int, default=5000, help="number of segments (default 5000)")
    parser.add_argument("--videos", type=int, default=100, help="number of videos (default 100)")
    parser.add_argument(
        "--values",
        choices=["normal", "ar1"],
        default="normal",
        help="normal: independent frames; ar1: correlated frames",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256], help="batch sizes (default 1 32 256)")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each loader (default 5)")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT", help="only these"
    )
    parser.add_argument(
        "--copies",
        type=int,
        nargs="+",
        default=[1, 8, 64],
        help="sizes for the memory measurement, in copies of the dataset (default 1 8 64)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the dataset, one round: rough figures within a minute"
    )
    return parser


def main() -> None:
    """Run the benchmark and print its tables."""
    arguments = _parser().parse_args()
    if arguments.quick:
        arguments.segments, arguments.videos, arguments.rounds = 500, 10, 1
        arguments.batches, arguments.copies = [1, 32], [1, 8]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        _progress("making the dataset")
        make_segment_set(
            folder / "set",
            num_segments=arguments.segments,
            num_videos=arguments.videos,
            values=arguments.values,
        )
        segments = open_segment_set(folder / "set")
        wanted = digest([(segments.latents, segments.text[segments.video_of_segment])])
        variants, missing = start_variants(arguments.variants, folder, stack=stack)
        for batch in arguments.batches:
            rates = race(variants, batch=batch, num_rounds=arguments.rounds, at_least_s=AT_LEAST_S, wanted=wanted)
            rows += rows_of(batch, rates, arguments.variants)
        memory_rows, jump_rows = measure_costs(folder, copies=arguments.copies)
    notes = [
        f"{arguments.segments:,} segments of {arguments.videos} videos, values {arguments.values}, "
        f"{arguments.rounds} rounds; the output of each variant was compared with the dataset.",
        *(f"{name} is not installed: {why}" for name, why in missing.items()),
    ]
    further = {"Anonymous memory of a LatentLoader's process": memory_rows, "Jumps": jump_rows}
    print_report("Loading latents", rows, notes=notes, json_path=arguments.json, further=further)


if __name__ == "__main__":
    main()
