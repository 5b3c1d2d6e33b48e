"""Program of the readers of `benchmarks.views`. Each reader runs in a separate process, with its library.

    write FOLDER      write the dataset of `benchmarks.views` with LeRobot
    read WAY FOLDER   respond to requests (benchmarks.peer_process)

    {"do": "check"}                      mean pixels of the first samples: {"means": [[...], ...]}
    {"do": "time", "at_least_s": 0.5}    read complete passes over the samples: {"num_samples": ..., "cpu_s": ...}

A sample has [V, T] RGB frames, for each camera and offset, at the stored resolution. FOLDER contains samples.json: for
each sample, its step in the dataset, and for each camera, its file and the times of its frames in seconds.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_process import answer_requests

Read = Callable[[Sequence[dict[str, Any]]], list[np.ndarray]]  # samples -> frames [V, T, H, W, 3] or [V, T, 3, H, W]
CAMERAS = ("front", "left", "right")
FPS, WIDTH, HEIGHT, OFFSETS_S = 30, 640, 480, (-0.1, 0.0)
DATASET = "dataset"
_NUM_CHECKED = 8


def write_dataset(folder: Path, episodes: Sequence[Sequence[Path]]) -> None:
    """Write the pieces of each episode, one per camera, as a dataset with LeRobot's default encoding."""
    import av
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    camera = {"dtype": "video", "shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channels"]}
    state = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
    features = {**{f"observation.images.{name}": camera for name in CAMERAS}, "observation.state": state}
    dataset = LeRobotDataset.create("bench/views", fps=FPS, features=features, root=folder / DATASET, use_videos=True)
    for pieces in episodes:
        containers = [av.open(str(piece)) for piece in pieces]
        for pictures in zip(*(container.decode(video=0) for container in containers), strict=True):
            images = [picture.to_ndarray(format="rgb24", width=WIDTH, height=HEIGHT) for picture in pictures]
            named = {f"observation.images.{name}": image for name, image in zip(CAMERAS, images, strict=True)}
            dataset.add_frame({**named, "observation.state": np.zeros(2, np.float32), "task": "move"})
        dataset.save_episode()
    dataset.finalize()


def open_lerobot(folder: Path, backend: str) -> Read:
    """Return a reader with LeRobotDataset, which returns float32 [T, 3, H, W] for each camera."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    torch.set_num_threads(1)
    names = [f"observation.images.{name}" for name in CAMERAS]
    deltas = {name: list(OFFSETS_S) for name in names}
    dataset = LeRobotDataset(
        "bench/views", root=folder / DATASET, delta_timestamps=deltas, video_backend=backend, tolerance_s=0.01
    )

    def read(samples: Sequence[dict[str, Any]]) -> list[np.ndarray]:
        items = [dataset[sample["step"]] for sample in samples]
        return [np.stack([item[name].numpy() for name in names]) for item in items]

    return read


def open_torchcodec(folder: Path, _: str) -> Read:
    """Return a reader that keeps a decoder per file open, in approximate mode, and reads a camera's frames at once."""
    import torch
    from torchcodec.decoders import VideoDecoder

    torch.set_num_threads(1)

    @cache
    def decoder_of(path: str) -> Any:
        try:
            return VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="approximate")
        except RuntimeError as error:
            raise ImportError("torchcodec finds no shared libraries of ffmpeg") from error

    def read(samples: Sequence[dict[str, Any]]) -> list[np.ndarray]:
        return [
            np.stack([decoder_of(view["path"]).get_frames_played_at(view["shown_s"]).data.numpy() for view in views])
            for views in (sample["views"] for sample in samples)
        ]

    return read


def open_pyav(folder: Path, _: str) -> Read:
    """Return a reader that keeps files open, and decodes from the keyframe before the first frame to the last frame."""
    import av

    @cache
    def container_of(path: str) -> Any:
        container = av.open(path)
        container.streams.video[0].codec_context.thread_count = 1
        return container

    def pictures(view: dict[str, Any]) -> np.ndarray:
        container = container_of(view["path"])
        stream, due, found = container.streams.video[0], list(view["time_s"]), []
        container.seek(round(due[0] / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            while due and frame.time > due[0] - 0.5 / FPS:
                found.append(frame.to_ndarray(format="rgb24"))
                due.pop(0)
            if not due:
                break
        return np.stack(found)

    return lambda samples: [np.stack([pictures(view) for view in sample["views"]]) for sample in samples]


def open_clipmill(folder: Path, data: str) -> Read:
    """Return a reader that reads all samples with `read_clips` and one worker."""
    import pyarrow as pa
    import torch

    from clipmill import read_clips

    torch.set_num_threads(1)
    opened: dict[int, Any] = {}

    def read(samples: Sequence[dict[str, Any]]) -> list[np.ndarray]:
        if len(samples) not in opened:
            columns: dict[str, list[Any]] = {}
            for sample in samples:
                for camera, view in zip(CAMERAS, sample["views"], strict=True):
                    for name in ("video_id", "begin_s", "end_s"):
                        columns.setdefault(f"{name}.{camera}", []).append(view[name])
                    columns.setdefault(f"time_s.{camera}", []).append(view["time_s"][-1])
            opened[len(samples)] = read_clips(
                folder / data,
                pa.table(columns),
                offsets_s=OFFSETS_S,
                views=CAMERAS,
                size_px=(HEIGHT, WIDTH),
                batch=min(16, len(samples)),
                shuffle=False,
                workers=1,
            )
        return [video.numpy() for batch in opened[len(samples)] for video in batch["video"]]

    return read


OPENERS: dict[str, tuple[Callable[[Path, str], Read], str]] = {
    "clipmill, as they are": (open_clipmill, "index"),
    "clipmill, balanced": (open_clipmill, "balanced"),
    "clipmill, fast": (open_clipmill, "fast"),
    "torchcodec, kept open": (open_torchcodec, ""),
    "PyAV, kept open": (open_pyav, ""),
    "LeRobotDataset, torchcodec": (open_lerobot, "torchcodec"),
    "LeRobotDataset, PyAV": (open_lerobot, "pyav"),
}


def main() -> None:
    """Write the dataset, or respond to requests."""
    do, *words = sys.argv[1:]
    if do == "write":
        folder = Path(words[0])
        pieces = sorted((folder / "pieces").iterdir())
        write_dataset(folder, [pieces[at : at + len(CAMERAS)] for at in range(0, len(pieces), len(CAMERAS))])
        return
    (open_reader, option), folder = OPENERS[words[0]], Path(words[1])
    samples = json.loads((folder / "samples.json").read_text())
    readers: list[Read] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if not readers:
            readers.append(open_reader(folder, option))
        read = readers[0]
        if request["do"] == "check":
            return {"means": [_means(pictures) for pictures in read(samples[:_NUM_CHECKED])]}
        num_samples, begin_s, begin_cpu_s = 0, time.perf_counter(), time.process_time()
        while not num_samples or time.perf_counter() - begin_s < request["at_least_s"]:
            num_samples += len(read(samples))
        return {"num_samples": num_samples, "cpu_s": time.process_time() - begin_cpu_s}

    answer_requests(answer)


def _means(pictures: np.ndarray) -> list[float]:
    """Return the means of the 4 x 4 parts of each frame, on a scale of 255."""
    values = pictures * 255.0 if pictures.dtype == np.float32 else pictures.astype(np.float64)
    if values.shape[2] == 3:
        values = np.moveaxis(values, 2, 4)
    height, width = values.shape[2] // 4 * 4, values.shape[3] // 4 * 4
    parts = values[:, :, :height, :width].reshape(*values.shape[:2], 4, height // 4, 4, width // 4, 3)
    return [float(mean) for mean in parts.mean((3, 5, 6)).ravel()]


if __name__ == "__main__":
    main()
