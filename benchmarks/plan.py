"""Wall time and memory of `prep plan` for a million chunks.

    python -m benchmarks.plan [--chunks N] [--long-only] [--json FILE]

First, a data folder with that many chunks is generated without encoding: real manifest, probes and empty source files,
and for the committed case a layout and a commit for every shard, whose files are real for the first shard and have only
the right length for the others (planning reads only size and modification time). Then the whole command is run once
with nothing committed and once with everything committed. Two shapes: videos of 40 chunks, and as many videos as chunks
(skipped with --long-only; its folder has a million files and takes minutes to create and remove).

`wall s` is from the start of Python to its exit (target: under 60 s, aim: 20 s); `peak MB` is the resident memory of
the command, including shared libraries (target: under 1,000, aim: 300).
"""

import json
import tempfile
from pathlib import Path

from benchmarks.made_data import commit_everything, make_videos
from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report
from prep.video.ffmpeg import find_ffmpeg
from prep.video.recipe import Recipe, ResolvedRecipe, resolve

LONG_CHUNKS = 40


def measure_plan(data: Path, *, num_videos: int, num_chunks: int, committed: bool) -> dict[str, object]:
    """Run `prep plan` once."""
    usage = run_measured(prep_command("plan", "--data", data, "--json"))
    report = json.loads(usage.stdout)
    state = "current" if committed else "new"
    if report["chunks"] != {state: num_chunks}:
        raise RuntimeError(f"all {num_chunks} chunks should be {state}: {report['chunks']}")
    return {
        "videos": num_videos,
        "chunks": num_chunks,
        "shards": report["shards"][state],
        "committed": "all" if committed else "nothing",
        "wall s": usage.wall_s,
        "CPU s": usage.cpu_s,
        "peak MB": usage.peak_bytes // 1_000_000,
    }


def measure_shape(
    data: Path, *, num_videos: int, chunks_per_video: int, recipe: ResolvedRecipe
) -> list[dict[str, object]]:
    """Plan one data folder before and after everything is committed."""
    num_chunks = num_videos * chunks_per_video
    make_videos(data, num_videos=num_videos, chunks_per_video=chunks_per_video, recipe=recipe)
    new = measure_plan(data, num_videos=num_videos, num_chunks=num_chunks, committed=False)
    commit_everything(data, recipe=recipe, num_real_shards=1)
    return [new, measure_plan(data, num_videos=num_videos, num_chunks=num_chunks, committed=True)]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="total number of chunks (default 1000000)")
    parser.add_argument("--long-only", action="store_true", help="omit the shape with one chunk per video")
    arguments = parser.parse_args()
    recipe = resolve(Recipe(), ffmpeg_version=find_ffmpeg().version)
    rows = []
    for chunks_per_video in (LONG_CHUNKS,) if arguments.long_only else (LONG_CHUNKS, 1):
        num_videos = max(1, arguments.chunks // chunks_per_video)
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "data"
            rows += measure_shape(data, num_videos=num_videos, chunks_per_video=chunks_per_video, recipe=recipe)
    notes = ["Targets: under 60 s and 1 GB; aim: 20 s and 300 MB."]
    print_report("prep plan", rows, notes=notes, json_path=arguments.json)


if __name__ == "__main__":
    main()
