"""Exact search in embeddings on disk, compared with faiss's IndexFlatIP, which holds the embeddings in memory.

    python -m benchmarks.search [--rows 1000000 10000000] [--width 256] [--rounds 3] [--folder DIR] [--json FILE]

Both find the best 10 of random unit vectors for 1 and for 16 queries, and must find the same rows. `make peers`
installs faiss; without faiss, its rows in the table are empty. The variants take turns. A turn is a new process, which
opens the embeddings and then searches three times. `open s` is the time in which faiss copies the file into its index,
`first s` the time of the first search, and `search s` the median of the other searches over all rounds, all in wall
time. `CPU s` is the same median for the CPU time of the process on all cores, and `/ faiss` the median of the ratios of
CPU times within each round. Peak memory is resident memory; clipmill's memory does not grow with the file.

`train search` is the complete command with a query by example: it starts Python, searches, and reads the captions of
the results. The data need 4 bytes per value on the disk, and are deleted at the end. If the free memory is smaller than
the file, clipmill reads from the disk. If it is smaller than 1.4 times the file, faiss is omitted.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import run_measured
from benchmarks.peer_process import PEERS_PYTHON, NotInstalled, PeerProcess
from benchmarks.report import parser_for, print_report
from clipmill.manifests.publish import publish_checked_json
from clipmill.train.search.folder import CLIP_SCHEMA, CLIPS, FORMAT, RECORD, VIDEO

WAYS = {"clipmill": Path(sys.executable), "faiss": PEERS_PYTHON}
COMMAND = "train search"
QUERIES = (1, 16)
SEARCHES = 3
_BLOCK = 1 << 16
_SPARE = 1.4  # free memory that faiss needs, as a multiple of the file size


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--rows", type=int, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder for the data (default: the system's temporary folder)")
    arguments = parser.parse_args()
    rows = []
    for num_rows in arguments.rows:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            folder = Path(name)
            write_embeddings(folder, num_rows, width=arguments.width)
            rows += race(folder, num_rows, num_rounds=arguments.rounds)
    print_report(
        f"Exact search, width {arguments.width}, best 10",
        rows,
        notes=["All variants that ran found the same rows. Target: memory that does not grow with the file."],
        json_path=arguments.json,
    )


def write_embeddings(folder: Path, num_rows: int, *, width: int) -> None:
    """Write a folder with random vectors as `train embed` does, and queries."""
    rng = np.random.default_rng(0)
    matrix = np.lib.format.open_memmap(folder / VIDEO, mode="w+", dtype=np.float32, shape=(num_rows, width))
    with pq.ParquetWriter(folder / CLIPS, CLIP_SCHEMA) as clips:
        for begin in range(0, num_rows, _BLOCK):
            count = min(_BLOCK, num_rows - begin)
            matrix[begin : begin + count] = unit(rng.standard_normal((count, width), dtype=np.float32))
            clips.write_table(pa.table(list(columns(begin, count)), schema=CLIP_SCHEMA))
    matrix.flush()
    np.save(folder / "queries.npy", unit(rng.standard_normal((max(QUERIES), width), dtype=np.float32)))
    files = {name: {"size_bytes": (folder / name).stat().st_size} for name in (VIDEO, CLIPS)}
    record = {"format": FORMAT, "num_clips": num_rows, "features": "embedding", "files": files, "weights": {}}
    publish_checked_json(folder / RECORD, record)


def unit(rows: np.ndarray) -> np.ndarray:
    """Divide rows by their norms."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def columns(begin: int, count: int) -> Iterator[Any]:
    """Yield the columns of `count` rows of clips.parquet, with four clips per chunk and four chunks per video."""
    numbers = range(begin, begin + count)
    videos = [f"video-{number // 16:08d}" for number in numbers]
    yield np.arange(begin, begin + count)
    yield [f"{video}_{number // 4 % 4 * 15000:09d}" for video, number in zip(videos, numbers, strict=True)]
    yield videos
    yield [f"/videos/{video}.mp4" for video in videos]
    yield np.arange(begin, begin + count) % 16 * 3.75
    yield np.arange(begin, begin + count) % 16 * 3.75 + 3.75
    yield [f"someone does the thing of number {number}" for number in numbers]
    yield np.arange(begin, begin + count)


def race(folder: Path, num_rows: int, *, num_rounds: int) -> list[dict[str, object]]:
    """Return the table rows for a file.

    Raises:
        RuntimeError: The variants find different rows.
    """
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in (*WAYS, COMMAND)}
    for number in range(num_rounds):
        names = list(turns)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found = command_turn(folder) if name == COMMAND else turn(folder, name)
            if found is not None:
                turns[name].append(found)
                figures = {key: round(value, 2) for key, value in found.items() if isinstance(value, float)}
                print(f"{num_rows:,} rows, round {number + 1}, {name}: {figures}", file=sys.stderr, flush=True)
    rows = []
    for count in QUERIES:
        if len({json.dumps(one[f"rows {count}"]) for name in WAYS for one in turns[name]}) > 1:
            raise RuntimeError(f"{count} queries in {num_rows:,} rows: the variants find different rows")
        for name in WAYS:
            rows.append(row_of(name, turns, num_rows=num_rows, count=count))
    command = turns[COMMAND]
    return [
        *rows,
        {
            "rows": num_rows,
            "variant": f"{COMMAND}, the whole command",
            "queries": 1,
            "open s": None,
            "first s": None,
            "search s": statistics.median(one["seconds"] for one in command),
            "CPU s": statistics.median(one["cpu_s"] for one in command),
            "/ faiss": None,
            "peak MB": round(max(one["peak_bytes"] for one in command) / 1e6),
        },
    ]


def turn(folder: Path, name: str) -> dict[str, Any] | None:
    """Open the embeddings in a new process, and search; return None if faiss is missing, or memory is too small."""
    if name == "faiss" and available_bytes() < _SPARE * (folder / VIDEO).stat().st_size:
        return None
    try:
        peer = PeerProcess(WAYS[name], "benchmarks.search_peers", folder, name, folder=folder)
    except NotInstalled:
        return None
    try:
        found: dict[str, Any] = {"open": peer.ask("open")["seconds"]}
        for count in QUERIES:
            answers = [peer.ask("search", queries=count) for _ in range(SEARCHES)]
            found |= {
                f"rows {count}": answers[0]["rows"],
                f"first {count}": answers[0]["seconds"],
                f"seconds {count}": statistics.median(one["seconds"] for one in answers[1:]),
                f"cpu {count}": statistics.median(one["cpu_s"] for one in answers[1:]),
            }
        return {**found, **peer.ask("memory")}
    except NotInstalled:
        return None
    finally:
        peer.end()


def available_bytes() -> int:
    """Return the memory that a process could allocate without swapping, in bytes."""
    (line,) = (one for one in Path("/proc/meminfo").read_text().splitlines() if one.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])


def command_turn(folder: Path) -> dict[str, Any]:
    """Run `train search` with a query by example."""
    usage = run_measured([sys.executable, "-m", "clipmill.train.cli", "search", str(folder), "--like", "0", "--json"])
    assert len(json.loads(usage.stdout)["results"][0]["found"]) == 10
    return {"seconds": usage.wall_s, "cpu_s": usage.cpu_s, "peak_bytes": usage.peak_bytes}


def row_of(name: str, turns: dict[str, list[dict[str, Any]]], *, num_rows: int, count: int) -> dict[str, object]:
    """Return the table row of a variant and a number of queries; without figures if the variant did not run."""

    def median(key: str) -> float | None:
        return statistics.median(one[key] for one in turns[name]) if turns[name] else None

    pairs = zip(turns[name], turns["faiss"], strict=False)
    ratios = [one[f"cpu {count}"] / other[f"cpu {count}"] for one, other in pairs]
    return {
        "rows": num_rows,
        "variant": name,
        "queries": count,
        "open s": median("open") if name == "faiss" else None,
        "first s": median(f"first {count}"),
        "search s": median(f"seconds {count}"),
        "CPU s": median(f"cpu {count}"),
        "/ faiss": statistics.median(ratios) if ratios else None,
        "peak MB": round(max(one["peak_bytes"] for one in turns[name]) / 1e6) if turns[name] else None,
    }


if __name__ == "__main__":
    main()
