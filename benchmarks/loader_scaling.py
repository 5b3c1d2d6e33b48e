"""Loading clips with an increasing number of workers: latency and throughput by decoding path and chunk length.

    python -m benchmarks.loader_scaling [VIDEOS] [--workers 1 2 ...] [--kinds threads processes]
        [--decode plain filter packets] [--lengths 5 15 60] [--clips 1024] [--num-videos N] [--rounds N] [--json FILE]

The table has the rows of AVION's figure 5: a pool of M workers samples clips of 4 frames, RandomResizedCrop to 224 px.
By default, M doubles from 1 to the number of cores. A worker is a thread of one loader, as in training, or a process
with a loader of one thread. The decoding paths:

    plain      decode the complete chunk, then crop the frames of the clip (the standard pipeline in figure 5)
    filter     the crop is a filter in libav's graph (Fused DecodeCrop)
    packets    decode only the packets that the frames need, crop planes (the default of training)

`latency ms` is the time that a worker takes for a clip (5a), `clips/s a worker` the throughput per worker (5b), and
`clips/s` the throughput of the pool (5c), in wall time for --clips clips, as medians over the rounds. `/ plain`
compares clips/s with the same number and kind of workers and the same length. `CPU ms` is the CPU time per clip, which
other programs affect less.

The videos last one minute, or as long as the longest of --lengths. They are generated unless VIDEOS are given. Each
chunk length is a data folder with the same videos.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.decode_peers.chunk_sets import OWN, RECIPES, write_captions
from benchmarks.decode_peers.clip_set import data_folder
from benchmarks.decode_peers.pieces import PIECE_S, pieces_of
from benchmarks.measure import prep_command, run_measured
from benchmarks.peer_process import PeerProcess
from benchmarks.report import parser_for, print_report
from benchmarks.timing import turns
from clipmill.prep.video.ffmpeg import find_ffmpeg

SHORTEST_VIDEO_S, CLIP_S = 60, 4.0
DECODE = ("plain", "filter", "packets")
KINDS = ("threads", "processes")


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, help="folder of videos (default: generated videos)")
    parser.add_argument("--workers", type=int, nargs="+", default=powers_of_two(len(os.sched_getaffinity(0))))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--decode", nargs="+", choices=DECODE, default=list(DECODE))
    parser.add_argument("--lengths", type=int, nargs="+", default=[5, 15, 60], help="chunk lengths in seconds")
    parser.add_argument("--clips", type=int, default=1024, help="number of clips per turn (default 1024)")
    parser.add_argument("--num-videos", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_data(folder, videos=arguments.videos, num_videos=arguments.num_videos, lengths=arguments.lengths)
        taken: dict[Case, list[Taken]] = {}
        # A single process with a loader of one thread is the same as a single thread.
        pools = [pool for pool in product(arguments.kinds, arguments.workers) if pool != ("processes", 1)]
        for decode, (kind, num_workers) in product(arguments.decode, pools):
            pool = Pool(folder, kind=kind, num_workers=num_workers, decode=decode)
            for _, length in turns([str(one) for one in arguments.lengths], arguments.rounds):
                case = Case(int(length), decode, kind, num_workers)
                taken.setdefault(case, []).append(pool.load(f"{length}s", num_clips=arguments.clips))
            pool.end()
    title = f"{arguments.clips:,} clips of 4 frames, median of {arguments.rounds} rounds"
    print_report(title, rows_of(taken), notes=[], json_path=arguments.json)


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most`."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


@dataclass(frozen=True, order=True)
class Case:
    """Pool, decoding path and chunk length of a table row."""

    length_s: int
    decode: str
    kind: str
    num_workers: int


@dataclass(frozen=True)
class Taken:
    """Clips per second of wall time of the pool, and CPU seconds per clip."""

    clips_per_s: float
    cpu_s: float


class Pool:
    """Workers that load clips at the same time: threads of one process, or processes."""

    def __init__(self, folder: Path, *, kind: str, num_workers: int, decode: str) -> None:
        num_processes, num_threads = (1, num_workers) if kind == "threads" else (num_workers, 1)
        words = (folder, "--threads", str(num_threads), "--decode", decode)
        module = "benchmarks.decode_peers.loader_threads"
        self._peers = [PeerProcess(Path(sys.executable), module, *words, folder=folder) for _ in range(num_processes)]

    def load(self, name: str, *, num_clips: int) -> Taken:
        """Load about `num_clips` clips from a data folder, divided among the processes."""
        share = -(-num_clips // len(self._peers))
        with ThreadPoolExecutor(len(self._peers)) as asking:
            answers = list(asking.map(lambda peer: peer.ask("load", set=name, at_least=share), self._peers))
        cpu_s = sum(one["cpu_s"] for one in answers) / sum(one["num_clips"] for one in answers)
        return Taken(sum(one["num_clips"] / one["wall_s"] for one in answers), cpu_s)

    def end(self) -> None:
        """End the processes."""
        for peer in self._peers:
            peer.end()


def rows_of(taken: dict[Case, list[Taken]]) -> list[dict[str, object]]:
    """Return the table rows, in order of length, decoding path and workers."""
    speeds = {case: statistics.median(one.clips_per_s for one in its) for case, its in taken.items()}
    rows: list[dict[str, object]] = []
    for case in sorted(taken, key=lambda case: (case.length_s, DECODE.index(case.decode), case.kind, case.num_workers)):
        plain = speeds.get(Case(case.length_s, "plain", case.kind, case.num_workers))
        rows.append(
            {
                "chunks": f"{case.length_s} s",
                "decode": case.decode,
                "workers": f"{case.num_workers} {case.kind}",
                "latency ms": 1000 * case.num_workers / speeds[case],
                "clips/s a worker": speeds[case] / case.num_workers,
                "clips/s": speeds[case],
                "/ plain": None if plain is None else speeds[case] / plain,
                "CPU ms": 1000 * statistics.median(one.cpu_s for one in taken[case]),
            }
        )
    return rows


def make_data(folder: Path, *, videos: Path | None, num_videos: int, lengths: list[int]) -> None:
    """Make a data folder with the same videos for each chunk length."""
    program, pieces, minutes = find_ffmpeg().path, folder / "pieces", folder / "videos"
    per_video = -(-max(SHORTEST_VIDEO_S, *lengths) // PIECE_S)
    pieces.mkdir()
    minutes.mkdir()
    pieces_of(videos, pieces, num_pieces=per_video * num_videos, program=program)
    files = sorted(pieces.iterdir())
    for number in range(len(files) // per_video):
        parts = files[number * per_video :][:per_video]
        listed = folder / "parts.txt"
        listed.write_text("".join(f"file '{path}'\n" for path in parts))
        joined = [program, "-v", "error", "-f", "concat", "-safe", "0", "-i", str(listed), "-c", "copy"]
        subprocess.run([*joined, str(minutes / f"{number:03d}.mp4")], check=True)
    captions = folder / "captions.csv"
    begins_s = [CLIP_S * number for number in range(int(per_video * PIECE_S / CLIP_S) - 1)]
    spans = [(number, begin_s, CLIP_S) for number in range(len(list(minutes.iterdir()))) for begin_s in begins_s]
    write_captions(captions, spans)
    for length in lengths:
        data = data_folder(folder, f"{length}s")
        run_measured(prep_command("manifest", "folder", minutes, "--captions", captions, "--data", data))
        words: list[str | Path] = ["--len", f"{length}s", "--data", data, "--engine", "processes", *RECIPES[OWN]]
        run_measured(prep_command("chunk", *words))


if __name__ == "__main__":
    main()
