"""CPU time, wall time and memory of the commands that read all shards, for 1 and 10 million chunks.

    python -m benchmarks.plan [--chunks N ...] [--runs N] [--with-short] [--folder DIR] [--json FILE]

First, a data folder with this number of chunks is made without encoding: manifest, probes, layout, commits and their
table are real, and source files are empty. One shard for each number of chunks is real. The tars of the other shards
have only the right length, and their indexes are links (`benchmarks.made_data`). Then complete commands run:

    plan, nothing committed    prep plan, before any shard is committed
    first chunk                prep chunk, which writes only the merged table
    plan                       prep plan, with everything committed
    chunk                      prep chunk with nothing to do: everything is checked, nothing is made
    part                       the same with --part 1/2, which looks for sources whose probing the parts share
    status                     prep status
    gc                         prep gc --dry-run
    quick check                existence, sizes and times of all files of the shards, as plan, status and gc check them
    records                    prep chunk without the table of commits, which reads every record

`wall s` is the time from the start of Python to its exit, and `peak MB` the peak resident memory of the command,
including shared libraries. Figures are medians of the runs, which alternate between the phases. The videos have 40
chunks; --with-short also measures videos of one chunk.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.made_data import COLUMN, commit_everything, make_videos
from benchmarks.measure import Usage, prep_command, run_measured
from benchmarks.report import parser_for, print_report
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.settings import ResolvedRecipe
from clipmill.shards.dataset import variant_dir
from clipmill.shards.format import COMMIT_TABLE_FILE

LONG_CHUNKS = 40
_QUICK_CHECK = """
import sys
from pathlib import Path
from clipmill.prep.core.plan import problems_of
from clipmill.shards.reader import Variant
assert not problems_of(Variant.open(Path(sys.argv[1])))
"""


def plan_new(data: Path, *, num_chunks: int) -> Usage:
    """Run `prep plan` with nothing committed."""
    usage = run_measured(prep_command("plan", "--data", data, "--json"))
    _require(json.loads(usage.stdout)["chunks"] == {"new": num_chunks}, usage)
    return usage


def phases(data: Path, *, recipe: ResolvedRecipe, num_chunks: int) -> dict[str, Callable[[], Usage]]:
    """Return functions that run each phase with everything committed, by name."""

    def plan() -> Usage:
        usage = run_measured(prep_command("plan", "--data", data, "--json"))
        _require(json.loads(usage.stdout)["chunks"] == {"current": num_chunks}, usage)
        return usage

    def chunk(*flags: str) -> Usage:
        usage = run_measured(prep_command("chunk", "--len", "15s", "--data", data, "--json", *flags))
        summary = json.loads(usage.stdout)
        _require((summary["num_shards_made"], summary["num_chunks"]) == (0, num_chunks), usage)
        return usage

    def status() -> Usage:
        usage = run_measured(prep_command("status", "--data", data, "--json"))
        [variant] = json.loads(usage.stdout)["columns"][COLUMN]["variants"]
        _require(variant["num_samples"] == num_chunks and round(variant["hours"] * 240) == num_chunks, usage)
        return usage

    def gc() -> Usage:
        usage = run_measured(prep_command("gc", "--dry-run", "--data", data, "--json"))
        found = json.loads(usage.stdout)
        _require(not (found["items"] or found["unknown"] or found["kept_because"]), usage)
        return usage

    def quick_check() -> Usage:
        return run_measured([sys.executable, "-c", _QUICK_CHECK, str(data)])

    def records() -> Usage:
        (variant_dir(data, COLUMN, recipe.variant) / COMMIT_TABLE_FILE).unlink(missing_ok=True)
        return chunk()  # writes the table again

    return {
        "plan": plan,
        "chunk": chunk,
        "part": partial(chunk, "--part", "1/2"),
        "status": status,
        "gc": gc,
        "quick check": quick_check,
        "records": records,
    }


def measure_shape(
    data: Path, *, num_videos: int, chunks_per_video: int, num_runs: int, recipe: ResolvedRecipe
) -> list[dict[str, object]]:
    """Measure a data folder before and after everything is committed, and return table rows."""
    num_chunks = num_videos * chunks_per_video
    make_videos(data, num_videos=num_videos, chunks_per_video=chunks_per_video, recipe=recipe)
    usages = {"plan, nothing committed": [plan_new(data, num_chunks=num_chunks) for _ in range(num_runs)]}
    num_shards = commit_everything(data, recipe=recipe, num_real_shards=1)
    committed = phases(data, recipe=recipe, num_chunks=num_chunks)
    usages["first chunk"] = [committed["chunk"]()]
    usages |= {name: [] for name in committed}
    for _ in range(num_runs):
        for name, run in committed.items():
            usages[name].append(run())
    return [
        {
            "videos": num_videos,
            "chunks": num_chunks,
            "shards": num_shards,
            "phase": name,
            "CPU s": statistics.median(usage.cpu_s for usage in found),
            "wall s": statistics.median(usage.wall_s for usage in found),
            "peak MB": max(usage.peak_bytes for usage in found) // 1_000_000,
        }
        for name, found in usages.items()
    ]


def _require(is_expected: bool, usage: Usage) -> None:
    if not is_expected:
        raise RuntimeError(f"unexpected result: {usage.stdout[:2000]}")


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[1_000_000, 10_000_000], help="numbers of chunks (default 10^6, 10^7)"
    )
    parser.add_argument("--runs", type=int, default=3, help="number of runs of each phase (default 3)")
    parser.add_argument(
        "--with-short", action=argparse.BooleanOptionalAction, default=False, help="also videos of one chunk"
    )
    parser.add_argument("--folder", type=Path, help="folder for the data (default: a temporary folder)")
    arguments = parser.parse_args()
    recipe = resolve(Recipe(), ffmpeg_version=find_ffmpeg().version)
    rows = []
    for num_chunks in arguments.chunks:
        for chunks_per_video in (LONG_CHUNKS, 1) if arguments.with_short else (LONG_CHUNKS,):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                rows += measure_shape(
                    Path(folder) / "data",
                    num_videos=max(1, num_chunks // chunks_per_video),
                    chunks_per_video=chunks_per_video,
                    num_runs=arguments.runs,
                    recipe=recipe,
                )
    notes = [
        "Target: chunk with nothing to do in under 30 s for 10 million chunks. Commits are generated, not encoded."
    ]
    print_report("Commands on millions of chunks", rows, notes=notes, json_path=arguments.json)


if __name__ == "__main__":
    main()
