"""Cost of opening a training set, by number of chunks: CPU time and memory of one rank and of eight ranks.

    python -m benchmarks.open [--chunks 10000 10000000] [--chunks-per-video 1] [--captions 35000000] [--json FILE]

The data are generated without videos (benchmarks.open_data): 240 chunks per shard, and ten chunks per video unless
--chunks-per-video is given. Each rank is a process that opens the training set, computes its fingerprint, describes it,
and looks up the first positions of the order. `first` is a rank that finds an empty cache, and computes the data that
all ranks of the machine share. `next` opens the same set afterwards. `8 ranks` open it at the same time with an empty
cache; the figures are the sums over these ranks.

CPU time is the time of opening, without imports. `private` is the anonymous memory with the set open, and `peak` its
maximum while the set is opened, sampled every 50 ms; both without the memory of imports. `PSS` and `USS` (from
smaps_rollup, without imports) include pages of mapped files: PSS divides a page among the processes that map it, and
USS counts only pages that a single process has touched. The kernel reclaims such pages when memory is short. `merge` is
the cost of writing the merged table from indexes, `merge, one part` of writing the last of its parts and verifying the
others, and `indexes` of opening the set without a merged table.
"""

import argparse
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import REPOSITORY
from benchmarks.report import parser_for, print_report

NUM_RANKS = 8
SETS = ("chunks", "captions", "labels", "latents", "latents with captions")
_OF_SMAPS = {"PSS MB": ("Pss",), "USS MB": ("Private_Clean", "Private_Dirty")}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--chunks", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--chunks-per-video", type=int, default=10)
    parser.add_argument("--captions", type=int, help="number of captions; default: 3.5 per chunk")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--ranks", type=int, default=NUM_RANKS)
    parser.add_argument(
        "--indexes-up-to", type=int, default=10**6, help="maximum number of chunks with indexes (default 10^6)"
    )
    parser.add_argument("--folder", type=Path, help="folder for the data (default: the system's temporary folder)")
    parser.add_argument("--rank", nargs=2, metavar=("FOLDER", "SET"), help=argparse.SUPPRESS)
    parser.add_argument("--merge", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        open_as_rank(Path(arguments.rank[0]), arguments.rank[1])
        return
    if arguments.merge:
        merge(arguments.merge)
        return
    rows: list[dict[str, object]] = []
    for num_chunks in arguments.chunks:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            rows += measure(Path(name), num_chunks, arguments)
    print_report(
        "Opening a training set",
        rows,
        notes=["Targets at 10 million chunks: 10 CPU s, and 300 MB of private memory for eight ranks together."],
        json_path=arguments.json,
    )


def measure(folder: Path, num_chunks: int, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Return the table rows for a number of chunks."""
    from benchmarks.open_data import write_column, write_manifest_of

    data, has_indexes = folder / "data", num_chunks <= arguments.indexes_up_to
    num_captions = arguments.captions or num_chunks * 7 // 2
    shape = {"num_chunks": num_chunks, "chunks_per_video": arguments.chunks_per_video}
    write_manifest_of(data, num_captions=num_captions, **shape)
    for column in ("video", "latents"):
        write_column(data, column, has_indexes=has_indexes and column == "video", **shape)
    rows: list[dict[str, object]] = []

    def add(name: str, ranks: str, figures: dict[str, Any]) -> None:
        load = round(os.getloadavg()[0])
        rows.append(
            {"chunks": num_chunks, "captions": num_captions, "set": name, "ranks": ranks, **figures, "load": load}
        )
        print(rows[-1], file=sys.stderr, flush=True)

    for name in arguments.sets:
        add(name, "first", run_ranks(data, name, 1, cache=folder / "cache"))
        add(name, "next", run_ranks(data, name, 1, cache=folder / "cache"))
        shutil.rmtree(folder / "cache", ignore_errors=True)
        add(name, str(arguments.ranks), run_ranks(data, name, arguments.ranks, cache=folder / "cache"))
        shutil.rmtree(folder / "cache", ignore_errors=True)
    if has_indexes:
        parts = [*data.glob("video/*/chunks.arrow"), *data.glob("video/*/*/chunks.arrow")]
        for path in parts:
            path.unlink()
        add("chunks", "first, indexes", run_ranks(data, "chunks", 1, cache=folder / "cache"))
        add("chunks", "merge", run_merge(data))
        parts[-1].unlink()
        add("chunks", "merge, one part", run_merge(data))
    return rows


def run_merge(data: Path) -> dict[str, Any]:
    """Write the missing parts of the merged table in a new process, and return the cost."""
    command = [sys.executable, "-m", "benchmarks.open", "--merge", str(data)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    figures: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return figures


def run_ranks(data: Path, name: str, num_ranks: int, *, cache: Path) -> dict[str, Any]:
    """Open a set in several processes at once, and return the cost of all processes together."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.open", "--rank", str(data), name]
    ranks = [
        subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(num_ranks)
    ]
    for rank in ranks:
        _reply(rank)  # its imports are done
    begin = [_memory(rank.pid) for rank in ranks]
    for rank in ranks:
        _say(rank)
    peak = 0.0
    while not all(map(_is_ready, ranks)):
        peak = max(peak, sum(_anonymous_mb(rank.pid) for rank in ranks))
        time.sleep(0.05)
    found = [_reply(rank) for rank in ranks]
    end = [_memory(rank.pid) for rank in ranks]
    for rank in ranks:
        _say(rank)
        rank.wait()
    first = sum(one["anonymous MB"] for one in begin)
    extra = {key: round(sum(one[key] for one in end) - sum(one[key] for one in begin)) for key in _OF_SMAPS}
    return {
        "CPU s": round(sum(one["cpu_s"] for one in found), 2),
        "of one": round(max(one["cpu_s"] for one in found), 2),
        "private MB": round(sum(one["anonymous MB"] for one in end) - first),
        "peak MB": round(peak - first),
        **extra,
        "cache MB": sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) >> 20,
        "samples": found[0]["samples"],
    }


def _say(rank: "subprocess.Popen[str]") -> None:
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()


def _reply(rank: "subprocess.Popen[str]") -> dict[str, Any]:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended with {rank.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


def _is_ready(rank: "subprocess.Popen[str]") -> bool:
    """Return True if the rank has opened the set, and waits for its next line."""
    assert rank.stdout is not None
    return bool(select.select([rank.stdout], [], [], 0)[0])


def _memory(pid: int) -> dict[str, float]:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    values = {key: int(value) / 1024 for key, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    found = {key: sum(values[name] for name in names) for key, names in _OF_SMAPS.items()}
    return {**found, "anonymous MB": _anonymous_mb(pid)}


def _anonymous_mb(pid: int) -> float:
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def open_as_rank(data: Path, name: str) -> None:
    """Open a set as a rank does. Start, and later exit, when a line arrives on standard input."""
    import numpy as np

    from clipmill.train.data.chunks import ClipQuery
    from clipmill.train.data.classes import ClassList
    from clipmill.train.data.clip_frames import ClipShape, Views
    from clipmill.train.data.frame_sampling import Sampling
    from clipmill.train.data.latents.segments import SegmentQuery
    from clipmill.train.data.loader import LoaderSettings
    from clipmill.train.data.order import SampleOrder
    from clipmill.train.data.producers.captioned_clips import open_captioned_clips
    from clipmill.train.data.producers.chunk_clips import open_chunk_clips, open_labelled_clips
    from clipmill.train.data.producers.latent_segments import open_latent_segments

    sampling = Sampling(num_frames=4, rule="uniform", stride=4)
    shape = ClipShape(
        sampling=sampling, size_px=224, crop="random", min_crop_area=0.5, simple_fraction=0.875, views=Views()
    )
    loading = LoaderSettings(batch=32, num_threads=2, num_ahead=64, seed=0)
    print(json.dumps({}), flush=True)
    sys.stdin.readline()
    begin_s = time.process_time()
    samples: Any
    if name == "chunks":
        samples = open_chunk_clips(ClipQuery(data, split="train", shape=shape, loading=loading))
    elif name == "captions":
        samples = open_captioned_clips(ClipQuery(data, split="train", shape=shape, loading=loading))
        samples.require_different_texts()
        samples.captions.texts(np.arange(8))
    elif name == "labels":
        classes = ClassList("class", tuple(f"{number:03d}" for number in range(400)))
        samples = open_labelled_clips(ClipQuery(data, split="train", shape=shape, loading=loading), classes=[classes])
    else:
        query = SegmentQuery(data, split="train", captions="none" if name == "latents" else "words")
        samples = open_latent_segments(query)
    print(f"{samples.fingerprint[:16]} {samples.describe()}", file=sys.stderr)
    SampleOrder(samples.num_samples, seed=0).at(np.arange(1024))
    found = {"cpu_s": time.process_time() - begin_s, "samples": samples.num_samples}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


def merge(data: Path) -> None:
    """Write the merged table of `video` from its indexes, and print the cost."""
    import resource

    from clipmill.shards.chunk_table import update_chunk_table
    from clipmill.shards.reader import Variant

    base_mb = _anonymous_mb(os.getpid())
    begin_s = time.process_time()
    assert update_chunk_table(Variant.open(data), column="video"), "the merged table exists already"
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu_s = round(time.process_time() - begin_s, 2)
    figures = {"CPU s": cpu_s, "of one": cpu_s, "private MB": "", "peak MB": round(peak_mb - base_mb)}
    print(json.dumps({**figures, **dict.fromkeys(_OF_SMAPS, ""), "cache MB": 0, "samples": ""}))


if __name__ == "__main__":
    main()
