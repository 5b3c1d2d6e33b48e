"""Peak memory of the processes of `prep chunk`, which must not grow with the duration of the videos.

    python -m benchmarks.memory [--minutes M ...] [--json FILE]

The complete command (processes engine, one worker) encodes a synthetic video of each duration to one shard. The process
tree is sampled ten times per second. The kernel reports the peak resident memory of each process, so peaks between two
samples are not missed. Shared libraries are counted in every process that uses them.

`driver MB` is the memory of the command itself, `worker MB` of the process that makes the shard, and `ffmpeg MB` of the
largest encoder pass (passes run one at a time). `together MB` is the sum of the three. A worker keeps only the index of
the shard and the frame times of one span, so its memory grows by a few kilobytes per chunk.
"""

import tempfile
from pathlib import Path

from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report
from benchmarks.tree import Process, run_watched


def role_of(process: Process) -> str:
    """Return driver, worker or ffmpeg; other for the helper processes of multiprocessing."""
    words = " ".join(process.command)
    if "-progress" in process.command:
        return "ffmpeg"
    if "multiprocessing.spawn" in words:
        return "worker"
    return "driver" if "clipmill.prep.cli" in words else "other"


def measure_length(folder: Path, *, minutes: float) -> dict[str, object]:
    """Encode a video of the given duration, and return a table row."""
    data = folder / "data"
    run_measured(prep_command("manifest", "synthetic", "--videos", "1", "--minutes", str(minutes), "--data", data))
    watched = run_watched(prep_command("chunk", "--data", data, "--engine", "processes", "--workers", "1"))
    peaks = {"driver": 0, "worker": 0, "ffmpeg": 0}
    for process in watched.processes:
        role = role_of(process)
        if role in peaks:
            peaks[role] = max(peaks[role], process.peak_bytes)
    return {
        "minutes": minutes,
        "shard MB": sum(path.stat().st_size for path in data.glob("video/*/*.tar")) / 1e6,
        **{f"{role} MB": peak / 1e6 for role, peak in peaks.items()},
        "together MB": sum(peaks.values()) / 1e6,
    }


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument(
        "--minutes", type=float, nargs="+", default=[2, 10, 40], help="lengths of the videos (default 2 10 40)"
    )
    arguments = parser.parse_args()
    rows = []
    for minutes in arguments.minutes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure_length(Path(folder), minutes=minutes))
    notes = ["Target: memory does not grow with the length."]
    print_report("Peak memory of prep chunk", rows, notes=notes, json_path=arguments.json)


if __name__ == "__main__":
    main()
