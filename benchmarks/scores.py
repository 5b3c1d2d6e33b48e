"""Scores of chunks: their cost compared with encoding, and their values compared with plain calls of libraries.

    python -m benchmarks.scores [VIDEOS] [--rounds 3] [--json FILE]

Each video becomes a separate data folder, made with the default recipe and audio. In each round, `prep chunk` and
`prep scores` take turns, and make their columns again with one worker. The cost is the CPU time of making the shards as
the commands report it, with ffmpeg, and without imports and plans. Figures are medians. Target: scores cost at most a
fifth of encoding.

The libraries are called plainly on the same chunk files, in one process, and read every frame:

    PySceneDetect   detect(file, ContentDetector(), backend="pyav")
    ImageHash       phash of the middle frame as a PIL image; PyAV decodes the file up to this frame
    OpenCV          for every frame: variance of the Laplacian, mean luma, fraction of black frames, and DIS optical
                    flow to the frame 0.1 s later at the same small size, without pairs across cuts
    ffmpeg          blackdetect, freezedetect and cropdetect, in one command
    webrtcvad       all windows of the audio, with the same settings

`ours` computes all scores of a chunk at once, in the same process. Figures are CPU milliseconds per chunk, medians over
the rounds. Agreement covers all chunks for which both values are known. Cuts in the first half second of a chunk, which
PySceneDetect omits by design, are not compared.
"""

import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import imagehash
import numpy as np
import webrtcvad
from imageio_ffmpeg import get_ffmpeg_exe
from scenedetect import ContentDetector, detect

from benchmarks.encoding import forget_column
from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report
from clipmill.prep.core.chunk_content import ChunkContent, read_chunk
from clipmill.prep.scores.measures import (
    BLACK_LEVEL,
    BLACK_PIXELS,
    MIN_SHOT_FRAMES,
    NEIGHBOUR_STEP_S,
    full_luma,
    optical_flow,
    small_luma,
)
from clipmill.prep.scores.score import score_chunk
from clipmill.shards.reader import Variant

ENGINE = ("--engine", "processes", "--workers", "1", "--json")
THRESHOLD = 27.0
OURS = "ours, all scores"
_FREEZE = "0.002"  # mean difference; keyframes change a still picture by more than the default, 0.001


@dataclass(frozen=True)
class Sample:
    """Chunk, with a video file of it for the libraries."""

    key: str
    chunk: ChunkContent
    path: Path


def synthetic_videos(folder: Path) -> Path:
    """Make a video of three seconds, and return the folder of the video."""
    run_measured(prep_command("manifest", "synthetic", "--videos", "1", "--minutes", "0.05", "--data", folder))
    return next(folder.rglob("*.mp4")).parent


def find_videos(folder: Path) -> list[Path]:
    """Return the paths of the videos in a folder."""
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".csv")


def cost_rows(folder: Path, videos: list[Path], *, num_rounds: int) -> list[dict[str, object]]:
    """Return table rows with the cost of both columns, for each video and for all videos."""
    taken: dict[tuple[str, str], list[float]] = {}
    counts: dict[str, int] = {}
    for video in videos:
        data, source = folder / video.stem, folder / f"{video.stem}-source"
        source.mkdir()
        (source / video.name).symlink_to(video.resolve())
        run_measured(prep_command("manifest", "folder", source, "--data", data))
    for number in range(num_rounds):
        for video in videos[number % len(videos) :] + videos[: number % len(videos)]:
            data = folder / video.stem
            for column in ("scores", "video"):
                forget_column(data, column)
            for column, words in (("video", ("chunk", "--len", "15s", "--audio", "keep")), ("scores", ("scores",))):
                summary = json.loads(run_measured(prep_command(*words, "--data", data, *ENGINE)).stdout)
                taken.setdefault((video.stem, column), []).append(summary["cpu_s"])
                counts[video.stem] = summary["num_chunks"]
            print(f"round {number + 1}, {video.name}", file=sys.stderr, flush=True)

    def row(name: str, stems: list[str]) -> dict[str, object]:
        num_chunks = sum(counts[stem] for stem in stems)
        rounds = [
            tuple(sum(taken[stem, column][number] for stem in stems) for column in ("video", "scores"))
            for number in range(num_rounds)
        ]
        encode, score = (statistics.median(values) for values in zip(*rounds, strict=True))
        return {
            "video": name,
            "chunks": num_chunks,
            "prep chunk, CPU s per chunk": encode / num_chunks,
            "prep scores, CPU s per chunk": score / num_chunks,
            "scores / chunk": statistics.median(scored / encoded for encoded, scored in rounds),
        }

    return [*(row(video.name, [video.stem]) for video in videos), row("all", [video.stem for video in videos])]


def read_samples(folder: Path, videos: list[Path]) -> list[Sample]:
    """Return all chunks of the data folders, and write each chunk to a file."""
    samples = []
    for video in videos:
        for shard in Variant.open(folder / video.stem).shards():
            for number, row in enumerate(shard.index.to_pylist()):
                path = folder / f"{row['key']}.mp4"
                path.write_bytes(shard.read(number, "mp4"))
                chunk = read_chunk(shard, number)
                samples.append(Sample(row["key"], chunk, path))
    return samples


def scenedetect_cuts(sample: Sample) -> dict[str, Any]:
    """Return the first frames of new shots, found by PySceneDetect."""
    scenes = detect(str(sample.path), ContentDetector(threshold=THRESHOLD), backend="pyav")
    return {"cuts": [begin.frame_num for begin, _ in scenes[1:]]}


def imagehash_phash(sample: Sample) -> dict[str, Any]:
    """Return the phash of the middle frame, computed by ImageHash."""
    with av.open(str(sample.path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        for number, frame in enumerate(container.decode(video=0)):
            if number == sample.chunk.num_frames // 2:
                return {"phash": int(str(imagehash.phash(frame.to_image())), 16)}
    return {}


def opencv_scores(sample: Sample) -> dict[str, Any]:
    """Return the scores that OpenCV computes from every frame."""
    gap = max(1, round(NEIGHBOUR_STEP_S * sample.chunk.fps))
    sharp, luma_means, black, speeds = [], [], [], []
    small: list[np.ndarray] = []
    with av.open(str(sample.path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        for frame in container.decode(video=0):
            luma = full_luma(frame)
            sharp.append(float(cv2.Laplacian(luma, cv2.CV_64F).var()))
            luma_means.append(float(luma.mean()) / 255)
            black.append(float((luma <= BLACK_LEVEL).mean() >= BLACK_PIXELS))
            small.append(small_luma(luma))
            if len(small) > gap:
                flow = optical_flow(small[-1 - gap], small[-1])
                length = 0.0 if flow is None else float(np.hypot(flow[..., 0], flow[..., 1]).mean())
                speeds.append(length * float(sample.chunk.fps) / gap / small[-1].shape[0])
    values: dict[str, Any] = {name: float(np.mean(of)) for name, of in (("sharpness", sharp), ("black", black))}
    return {**values, "brightness": float(np.mean(luma_means)), "speeds": speeds}


def mean_speed(speeds: list[float], cuts: list[int], *, fps: Fraction) -> float | None:
    """Return the mean speed over the pairs of frames that no cut separates."""
    gap = max(1, round(NEIGHBOUR_STEP_S * fps))
    kept = [speed for frame, speed in enumerate(speeds) if not any(frame < cut <= frame + gap for cut in cuts)]
    return float(np.mean(kept)) if kept else None


def ffmpeg_detectors(sample: Sample) -> dict[str, Any]:
    """Return the fractions that blackdetect, freezedetect and cropdetect of ffmpeg report."""
    filters = f"blackdetect=d=0.001,freezedetect=n={_FREEZE}:d=1,cropdetect=24:2:0"
    command = [get_ffmpeg_exe(), "-hide_banner", "-nostats", "-threads", "1", "-i", str(sample.path), "-an"]
    command += ["-vf", filters, "-f", "null", "-"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stderr
    duration_s = float(sample.chunk.num_frames / sample.chunk.fps)
    size = re.search(r", (\d+)x(\d+)", text)
    crops = re.findall(r"crop=(-?\d+):(-?\d+)", text)
    frozen_s = sum(float(value) for value in re.findall(r"freeze_duration: ([\d.]+)", text))
    starts = re.findall(r"freeze_start: ([\d.]+)", text)
    if len(starts) > len(re.findall(r"freeze_end", text)):
        frozen_s += duration_s - float(starts[-1])  # the last freeze lasts to the end
    black_s = sum(float(value) for value in re.findall(r"black_duration:([\d.]+)", text))
    found: dict[str, Any] = {"black (ffmpeg)": black_s / duration_s, "frozen": frozen_s / duration_s}
    if size and crops and int(crops[-1][0]) > 0:
        (width, height), (crop_width, crop_height) = map(int, size.groups()), map(int, crops[-1])
        found["letterbox"] = 1 - crop_width * crop_height / (width * height)
    return found


def webrtcvad_share(sample: Sample) -> dict[str, Any]:
    """Return the fraction of windows that webrtcvad classifies as speech."""
    samples = bytearray()
    with av.open(str(sample.path)) as container:
        if not container.streams.audio:
            return {}
        resampler = av.AudioResampler(format="s16", layout="mono", rate=16_000)
        for frame in [*container.decode(audio=0), None]:
            for resampled in resampler.resample(frame):
                samples += resampled.to_ndarray().tobytes()
    vad = webrtcvad.Vad(3)
    windows = [vad.is_speech(bytes(samples[at : at + 960]), 16_000) for at in range(0, len(samples) - 959, 960)]
    return {"speech": float(np.mean(windows))} if windows else {}


def our_scores(sample: Sample) -> dict[str, Any]:
    """Return all scores of clipmill, with cuts as frame numbers."""
    scores = score_chunk(sample.chunk, cut_threshold=THRESHOLD)
    frames = [round(time_s * sample.chunk.fps) for time_s in scores["cut_times_s"]]
    return {
        **scores,
        "cuts": [frame for frame in frames if frame >= MIN_SHOT_FRAMES],
        "black (ffmpeg)": scores["black"],
    }


WAYS: dict[str, Callable[[Sample], dict[str, Any]]] = {
    OURS: our_scores,
    "PySceneDetect": scenedetect_cuts,
    "ImageHash": imagehash_phash,
    "OpenCV": opencv_scores,
    "ffmpeg's detectors": ffmpeg_detectors,
    "webrtcvad": webrtcvad_share,
}


def cpu_s() -> float:
    """Return the CPU time of this process and of the children that it has waited for, in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def run_ways(
    samples: list[Sample], *, num_rounds: int
) -> tuple[list[dict[str, object]], dict[str, dict[str, dict[str, Any]]]]:
    """Return the table rows of CPU times, and the values by variant and key."""
    cv2.setNumThreads(1)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    values: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in WAYS}
    for number in range(num_rounds):
        names = list(WAYS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin_s = cpu_s()
            values[name] = {sample.key: WAYS[name](sample) for sample in samples}
            taken[name].append(1000 * (cpu_s() - begin_s) / len(samples))
            print(f"round {number + 1}, {name}: {taken[name][-1]:.0f} ms", file=sys.stderr, flush=True)
    taken["the libraries together"] = [
        sum(taken[name][number] for name in WAYS if name != OURS) for number in range(num_rounds)
    ]
    return [
        {
            "way": name,
            "CPU ms per chunk": statistics.median(own),
            "/ ours": statistics.median(other / ours for other, ours in zip(own, taken[OURS], strict=True)),
        }
        for name, own in taken.items()
    ], values


def agreement_rows(samples: list[Sample], values: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, object]]:
    """Return table rows about the agreement of the values with the values of the libraries."""
    rows = []
    ours = values[OURS]
    for sample in samples:
        looks = values["OpenCV"][sample.key]
        cuts = [round(time_s * sample.chunk.fps) for time_s in ours[sample.key]["cut_times_s"]]
        looks["motion"] = mean_speed(looks.pop("speeds"), cuts, fps=sample.chunk.fps)
    for way, by_key in values.items():
        names = [] if way == OURS else list(dict.fromkeys(name for found in by_key.values() for name in found))
        for name in names:
            pairs = [
                (ours[key][name], found[name])
                for key, found in by_key.items()
                if found.get(name) is not None and ours[key].get(name) is not None
            ]
            rows.append({"score": name, "library": way, "chunks": len(pairs), **_agreement(name, pairs)})
    return rows


def _agreement(name: str, pairs: list[tuple[Any, Any]]) -> dict[str, object]:
    if name == "cuts":
        both = sum(len({*own} & {*other}) for own, other in pairs)
        only = sum(len({*own} - {*other}) for own, other in pairs), sum(len({*other} - {*own}) for own, other in pairs)
        return {"agreement": f"{both} cuts the same, {only[0]} only ours, {only[1]} only theirs"}
    if name == "phash":
        return {"agreement": f"{sum(own == other for own, other in pairs)} of {len(pairs)} equal"}
    own, other = np.array(pairs, np.float64).T
    if name in ("motion", "sharpness"):
        ratio = np.abs(own / np.maximum(other, 1e-9) - 1)
        text = f"median difference {100 * float(np.median(ratio)):.1f} %"
        more = f", correlation {float(np.corrcoef(own, other)[0, 1]):.3f}" if len(own) > 2 else ""
        return {"agreement": text + more}
    difference = np.abs(own - other)
    return {"agreement": f"median difference {float(np.median(difference)):.4f}, largest {float(difference.max()):.3f}"}


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", type=Path, nargs="?", help="folder of videos (default: a short synthetic video)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        videos = find_videos(arguments.videos or synthetic_videos(Path(name) / "synthetic"))
        costs = cost_rows(Path(name), videos, num_rounds=arguments.rounds)
        samples = read_samples(Path(name), videos)
        rows, values = run_ways(samples, num_rounds=arguments.rounds)
    print_report(
        "Scores of chunks",
        costs,
        notes=[
            f"{arguments.rounds} rounds. Target: at most 0.20.",
            "freezedetect with n=0.002, d=1; the last crop of cropdetect. webrtcvad classifies tones and noise as"
            " speech; ours does not.",
        ],
        json_path=arguments.json,
        further={"All scores against the libraries run plainly": rows, "Agreement": agreement_rows(samples, values)},
    )


if __name__ == "__main__":
    main()
