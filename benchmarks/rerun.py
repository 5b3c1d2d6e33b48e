"""Wall time and memory of `prep chunk` if every shard is committed and no source has changed.

    python -m benchmarks.rerun [--chunks N] [--runs N] [--json FILE]

First, a data folder with this number of chunks is generated without encoding. Manifest, probes, layout, commits and
shards are real, but the payloads of the shards are tiny. Then the complete command runs, checks every source file and
every committed file, and must find nothing to do. There are two shapes: long videos of 40 chunks, and videos of one
chunk.

`wall s` is the median time from the start of Python to its exit (target: under 10 s, aim: 3 s), and `peak MB` the peak
resident memory of the command, including shared libraries.
"""

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.made_data import commit_everything, make_videos
from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report
from clipmill.prep.video.column import Recipe, resolve
from clipmill.prep.video.ffmpeg import find_ffmpeg

LONG_CHUNKS = 40


def measure_shape(data: Path, *, num_videos: int, chunks_per_video: int, num_runs: int) -> dict[str, object]:
    """Create a data folder, run `prep chunk` in it repeatedly, and return a table row."""
    recipe = resolve(Recipe(), ffmpeg_version=find_ffmpeg().version)
    make_videos(data, num_videos=num_videos, chunks_per_video=chunks_per_video, recipe=recipe)
    num_shards = commit_everything(data, recipe=recipe)
    command = prep_command("chunk", "--len", "15s", "--data", data, "--json")
    usages = [run_measured(command) for _ in range(num_runs)]
    for usage in usages:
        summary = json.loads(usage.stdout)
        if summary["num_shards_made"] or summary["num_chunks"] != num_videos * chunks_per_video:
            raise RuntimeError(f"expected nothing to do: {usage.stdout}")
    return {
        "videos": num_videos,
        "chunks": num_videos * chunks_per_video,
        "shards": num_shards,
        "wall s": statistics.median(usage.wall_s for usage in usages),
        "CPU s": statistics.median(usage.cpu_s for usage in usages),
        "peak MB": max(usage.peak_bytes for usage in usages) // 1_000_000,
    }


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--chunks", type=int, default=100_000, help="total number of chunks (default 100000)")
    parser.add_argument("--runs", type=int, default=3, help="number of runs of the command (default 3)")
    arguments = parser.parse_args()
    rows = []
    for chunks_per_video in (LONG_CHUNKS, 1):
        num_videos = max(1, arguments.chunks // chunks_per_video)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(
                measure_shape(
                    Path(folder) / "data",
                    num_videos=num_videos,
                    chunks_per_video=chunks_per_video,
                    num_runs=arguments.runs,
                )
            )
    notes = [f"Median of {arguments.runs} runs. Target: under 10 s, aim: 3 s."]
    print_report("prep chunk with nothing to do", rows, notes=notes, json_path=arguments.json)


if __name__ == "__main__":
    main()
