"""Frames of three cameras at given times, from a dataset that LeRobot wrote: clipmill compared with LeRobot's reader.

    python -m benchmarks.views [VIDEOS] [--json FILE]

LeRobot encodes pieces of 15 s, one per camera, as episodes of a dataset: AV1, a keyframe every second frame, CRF 30.
Without LeRobot (`make lerobot`), ffmpeg encodes the pieces in the same way, and the rows of LeRobot are missing. A
sample is a random step of an episode: two frames 0.1 s apart from each of the three cameras, RGB, 640 x 480.

    clipmill, as they are       `prep index`, then `read_clips` with one worker
    clipmill, balanced, fast    the same after `prep chunk --recipe balanced` or `--recipe fast`
    torchcodec, kept open       a decoder per file, in approximate mode: `get_frames_played_at`
    PyAV, kept open             a container per file: seek, and decode up to the last frame
    LeRobotDataset              with the backends torchcodec and PyAV, and `delta_timestamps`

Each variant is a process with one thread. The variants take turns in every round. Figures are samples per CPU second of
the process, medians over the rounds, and ratios are medians of the ratios within each round. A frame is compared in 16
parts with the same frame decoded in order by PyAV: `difference` is the largest difference between the means of a part,
on a scale of 255.

Targets: 3 times the rate of LeRobotDataset (its faster backend) after re-encoding, and 1.2 times without re-encoding.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode_peers.figures import ratio
from benchmarks.decode_peers.pieces import PIECE_S, pieces_of
from benchmarks.decode_peers.torchcodec_reader import links_to_libraries
from benchmarks.environment import REPOSITORY
from benchmarks.measure import prep_command, run_measured
from benchmarks.peer_process import PEERS_PYTHON, NotInstalled, PeerProcess
from benchmarks.report import parser_for, print_report
from benchmarks.timing import turns
from benchmarks.view_peers import CAMERAS, DATASET, FPS, HEIGHT, OFFSETS_S, OPENERS, WIDTH
from clipmill.prep.video.ffmpeg import find_ffmpeg

AT_LEAST_S = 0.5
LEROBOT_PYTHON = REPOSITORY / ".venv-lerobot" / "bin" / "python"
LEROBOT = ("LeRobotDataset, torchcodec", "LeRobotDataset, PyAV")
_DATA = {"index": ("index",), "balanced": ("chunk",), "fast": ("chunk", "--recipe", "fast")}
_AS_LEROBOT = (
    "-vf",
    f"scale={WIDTH}:{HEIGHT},setsar=1",
    "-c:v",
    "libsvtav1",
    "-g",
    "2",
    "-crf",
    "30",
    "-pix_fmt",
    "yuv420p",
)


def write_dataset(folder: Path, *, program: str) -> list[list[tuple[Path, float]]]:
    """Write the dataset; return, for each episode, each camera's file and the start of the episode in it (seconds)."""
    pieces = sorted((folder / "pieces").iterdir())
    episodes = [pieces[at : at + len(CAMERAS)] for at in range(0, len(pieces), len(CAMERAS))]
    if LEROBOT_PYTHON.exists():
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "hf"),
            "PYTHONPATH": str(REPOSITORY),
        }
        write: list[str | Path] = [LEROBOT_PYTHON, "-P", "-m", "benchmarks.view_peers", "write", folder]
        subprocess.run(write, check=True, env=environment, stdout=sys.stderr)
        place = "videos/observation.images.{}/chunk-000/file-000.mp4"
        files = [folder / DATASET / place.format(camera) for camera in CAMERAS]
        return [[(file, float(number * PIECE_S)) for file in files] for number in range(len(episodes))]
    (folder / DATASET).mkdir()
    for piece in pieces:
        command: list[str | Path] = [
            program,
            "-v",
            "error",
            "-nostdin",
            "-i",
            piece,
            *_AS_LEROBOT,
            folder / DATASET / piece.name,
        ]
        subprocess.run(command, check=True)
    return [[(folder / DATASET / piece.name, 0.0) for piece in pieces] for pieces in episodes]


def write_samples(folder: Path, episodes: list[list[tuple[Path, float]]], *, num_samples: int) -> None:
    """Draw steps from the episodes, and write samples.json."""
    from clipmill.manifests.store import read_videos

    videos = read_videos(folder / "index").to_pylist()
    id_of = {Path(video["path"]).resolve(): video["video_id"] for video in videos}
    random, samples = np.random.default_rng(0), []
    for _ in range(num_samples):
        episode = int(random.integers(len(episodes)))
        step = int(random.integers(round(-OFFSETS_S[0] * FPS), PIECE_S * FPS))
        views = []
        for path, begin_s in episodes[episode]:
            time_s = [begin_s + step / FPS + offset for offset in OFFSETS_S]
            shown_s = [moment + 0.25 / FPS for moment in time_s]  # within the frame, even after rounding
            span = {"video_id": id_of[path.resolve()], "begin_s": begin_s, "end_s": begin_s + PIECE_S}
            views.append({"path": str(path), "time_s": time_s, "shown_s": shown_s, **span})
        samples.append({"step": episode * PIECE_S * FPS + step, "views": views})
    (folder / "samples.json").write_text(json.dumps(samples))


def open_ways(folder: Path, stack: ExitStack) -> tuple[dict[str, PeerProcess], dict[str, str]]:
    """Start the process of each variant; return the processes, and the reasons why others are missing, by name."""
    libraries = links_to_libraries(PEERS_PYTHON, folder / "libraries")
    lerobot_libraries = links_to_libraries(LEROBOT_PYTHON, folder / "libraries of LeRobot")
    ways, missing = {}, {}
    for name in OPENERS:
        python, searched = Path(sys.executable), ""
        if name in LEROBOT:
            python, searched = LEROBOT_PYTHON, str(lerobot_libraries)
        elif not name.startswith("clipmill"):
            python, searched = PEERS_PYTHON, str(libraries)
        environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
        if "torchcodec" in name:
            environment["LD_LIBRARY_PATH"] = searched
        try:
            way = PeerProcess(
                python, "benchmarks.view_peers", "read", name, folder, folder=folder, environment=environment
            )
            stack.callback(way.end)
            way.ask("check")
            ways[name] = way
        except NotInstalled as error:
            missing[name] = str(error)
    return ways, missing


def measure(ways: dict[str, PeerProcess], *, num_rounds: int) -> dict[str, list[float]]:
    """Return the samples per CPU second of each variant, one per round."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _, name in turns(list(ways), num_rounds):
        turn = ways[name].ask("time", at_least_s=AT_LEAST_S)
        rates[name].append(turn["num_samples"] / turn["cpu_s"])
        print(f"{name}: {rates[name][-1]:.1f}", file=sys.stderr, flush=True)
    return rates


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", nargs="?", type=Path, metavar="VIDEOS", help="folder of videos to cut pieces from")
    parser.add_argument("--episodes", type=int, default=4, help="number of episodes of 15 s (default 4)")
    parser.add_argument("--samples", type=int, default=64, help="number of samples per pass (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each variant (default 5)")
    return parser


def main() -> None:
    """Run the benchmark and print its tables."""
    arguments = _parser().parse_args()
    program = find_ffmpeg().path
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "pieces").mkdir()
        num_pieces = arguments.episodes * len(CAMERAS)
        names = pieces_of(arguments.videos, folder / "pieces", num_pieces=num_pieces, program=program)
        episodes = write_dataset(folder, program=program)
        sizes = {"index": sum(path.stat().st_size for path in {path for views in episodes for path, _ in views})}
        for data, words in _DATA.items():
            run_measured(prep_command("manifest", "folder", folder / DATASET, "--data", folder / data))
            command, *flags = words
            run_measured(prep_command(command, *flags, "--data", folder / data, "--engine", "processes"))
            tars = (folder / data / "video").glob("*/*.tar")
            sizes.setdefault(data, sum(path.stat().st_size for path in tars))
        write_samples(folder, episodes, num_samples=arguments.samples)
        ways, missing = open_ways(folder, stack)
        means: dict[str, Any] = {name: np.array(way.ask("check")["means"]) for name, way in ways.items()}
        exact = "PyAV, kept open" if "PyAV, kept open" in means else "clipmill, as they are"
        differences = {name: float(np.abs(values - means[exact]).max()) for name, values in means.items()}
        rates = measure(ways, num_rounds=arguments.rounds)
    lerobot = [max(of_round) for of_round in zip(*(rates[name] for name in LEROBOT if name in rates), strict=True)]
    rows: list[dict[str, object]] = []
    for way in OPENERS:
        values = rates.get(way, [])
        rows.append(
            {
                "way": way,
                "samples/CPU s": round(statistics.median(values), 1) if values else "not installed",
                "lowest": round(min(values), 1) if values else None,
                "highest": round(max(values), 1) if values else None,
                "/ LeRobotDataset": ratio(values, lerobot),
                "/ torchcodec": ratio(values, rates.get("torchcodec, kept open", [])),
                "MB": round(sizes.get(OPENERS[way][1], sizes["index"]) / 1e6, 1),
                "difference": round(differences[way], 2) if way in differences else None,
            }
        )
    notes = [
        f"{arguments.episodes} episodes of three pieces ({', '.join(names)}), {arguments.samples} samples per pass, "
        f"{arguments.rounds} rounds.",
        *(f"{way} is not installed: {why}" for way, why in missing.items()),
    ]
    print_report("Frames of three cameras", rows, notes=notes, json_path=arguments.json)


if __name__ == "__main__":
    main()
