"""Experiment: chunks of `--recipe fast` (MJPEG) decoded on the GPU by nvJPEG, compared with the loader.

    CPU     threads read, verify, decode, crop and resize planes; the batch is copied; augmentation converts to RGB
    nvJPEG  threads read and verify packets; torchvision decodes them on the GPU; crop, resize and normalisation follow

Both start from the same visits and end with the model's input on the device. nvJPEG returns RGB of whole frames. In
a dry run, torchvision's CPU decoder replaces it.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from benchmarks.gpu.feeding_data import repeat_chunks
from benchmarks.gpu.feeding_mjpeg import make_mjpeg, mjpeg_variant
from benchmarks.gpu.feeding_threads import ratio
from benchmarks.gpu.parts import Result, Setup, Target
from train.augment.pictures import to_model_input
from train.data.chunk_clips import ChunkClips
from train.data.decoding.clip import ClipShape
from train.data.decoding.pictures import Rectangle, rectangle_of
from train.data.frame_sampling import Sampling
from train.data.loader import LoaderSettings, SampleRequest
from train.data.order import SampleOrder
from train.data.prefetch import prefetch
from train.weights.conversion import CLIP_MEAN, CLIP_STD

_GOAL = 2.0
_NUM_FRAMES, _BATCHES_AHEAD, _SEED = 4, 2, 0
_SHRINKS_MUCH = 2  # scale factor from which the CPU variant resizes with area interpolation


@dataclass(frozen=True)
class _ReadClip:
    """The verified packets of a clip, and the crop rectangle of its frames."""

    packets: list[torch.Tensor]
    rectangle: Rectangle


def measure_nvjpeg(setup: Setup) -> Result:
    """Measure the clips per second of both variants, from the page cache to the model's input."""
    data, origin = _mjpeg_folder(setup)
    threads = 2 if setup.is_dry_run else len(os.sched_getaffinity(0))
    size_px, batch = (32, 4) if setup.is_dry_run else (224, 128)
    rounds, seconds = (1, 0.1) if setup.is_dry_run else (3, 2.0)
    loading = LoaderSettings(
        batch=batch,
        num_threads=threads,
        num_ahead=batch * _BATCHES_AHEAD,
        seed=_SEED,
        pin=setup.device.type == "cuda",
    )
    shape = ClipShape(sampling=Sampling(num_frames=_NUM_FRAMES), size_px=size_px)
    samples = ChunkClips(data, split="train", shape=shape, loading=loading)
    variants: dict[str, Callable[[], Generator[torch.Tensor, None, None]]] = {
        "CPU": lambda: _by_cpu(samples, setup, size_px=size_px),
        "nvJPEG": lambda: _by_nvjpeg(samples, loading, setup, size_px=size_px),
    }
    difference = _difference(*(variant() for variant in variants.values()))
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        for name in list(variants)[:: 1 if turn % 2 == 0 else -1]:
            rates[name].append(_clips_per_s(variants[name](), setup, seconds=seconds))
    gain = ratio(rates["nvJPEG"], rates["CPU"])
    rows = [
        {"way": name, "threads": threads, "batch": batch, "clips/s": round(median(rates[name]))}
        | {"lowest": round(min(rates[name])), "highest": round(max(rates[name]))}
        | {"/ CPU": round(ratio(rates[name], rates["CPU"]), 2)}
        for name in variants
    ]
    return Result(
        rows=rows,
        notes=[
            f"{origin}; {_NUM_FRAMES} frames, {size_px} px; worth adopting at {_GOAL:g} times the CPU's rate or more",
            f"the inputs of both variants differ by {difference:.3f} standard deviations on average: chroma is resized "
            "differently, and the conversion to RGB precedes the resize",
        ],
        targets=[Target(what="nvJPEG / CPU, whole path", figure=gain, goal=_GOAL)],
    )


def _mjpeg_folder(setup: Setup) -> tuple[Any, str]:
    target = setup.scratch / "mjpeg-repeated"
    num_copies = 2 if setup.is_dry_run else 20
    if (variant := mjpeg_variant(setup.data)) is not None:
        return repeat_chunks(setup.data, target, num_copies=num_copies, variant=variant), f"chunks of {variant}"
    num_chunks, max_frames = (2, 12) if setup.is_dry_run else (8, 450)
    made = make_mjpeg(setup.data, setup.scratch / "mjpeg", num_chunks=num_chunks, max_frames=max_frames)
    return repeat_chunks(made, target, num_copies=num_copies), "MJPEG encoded from the folder's chunks"


def _by_cpu(samples: ChunkClips, setup: Setup, *, size_px: int) -> Generator[torch.Tensor, None, None]:
    with closing(prefetch(samples.batches(position=0, max_failures=0), setup.device)) as batches:
        for loaded in batches:
            batch = loaded.batch
            yield to_model_input(batch["video"], batch["colour"], size_px=size_px, mean=CLIP_MEAN, std=CLIP_STD)


def _by_nvjpeg(
    samples: ChunkClips, loading: LoaderSettings, setup: Setup, *, size_px: int
) -> Generator[torch.Tensor, None, None]:
    mean, std = (torch.tensor(triple, device=setup.device)[:, None, None, None] for triple in (CLIP_MEAN, CLIP_STD))
    with closing(_read_batches(samples, loading)) as batches:
        for clips in batches:
            frames = _decoded([packet for clip in clips for packet in clip.packets], device=setup.device)
            pictures = [
                _cut(torch.stack(frames[at * _NUM_FRAMES : (at + 1) * _NUM_FRAMES]), clip.rectangle, size_px=size_px)
                for at, clip in enumerate(clips)
            ]
            video_BCTSS = torch.stack(pictures).transpose(1, 2).div_(255)
            yield video_BCTSS.sub_(mean).div_(std)


def _read_batches(samples: ChunkClips, loading: LoaderSettings) -> Generator[list[_ReadClip], None, None]:
    """Yield the packets of batches in training order; threads read ahead."""
    order = SampleOrder(len(samples), loading.seed)
    ahead: deque[list[Future[_ReadClip]]] = deque()

    def read(request: SampleRequest) -> _ReadClip:
        plan = samples.plan(request)
        chunks = samples.chunks
        found = {
            (chunk, frame): packet
            for chunk, frames in plan.by_chunk.items()
            for frame, packet in chunks.read(chunk, frames).packets or ()
        }
        packets = [torch.from_numpy(np.frombuffer(found[place], np.uint8).copy()) for place in plan.frames]
        width, height = jpeg_size(packets[0])
        rectangle = rectangle_of("random", width=width, height=height, min_area=0.5, rng=plan.rng)
        return _ReadClip(packets, rectangle)

    with ThreadPoolExecutor(loading.num_threads) as pool:
        for number in count():
            positions = np.arange(number * loading.batch, (number + 1) * loading.batch)
            requests: Iterator[tuple[int, int]] = zip(order.at(positions).tolist(), positions.tolist(), strict=True)
            ahead.append([pool.submit(read, SampleRequest(sample, at, loading.seed)) for sample, at in requests])
            if len(ahead) > _BATCHES_AHEAD:
                yield [future.result() for future in ahead.popleft()]


def jpeg_size(packet: torch.Tensor) -> tuple[int, int]:
    """Return width and height from a JPEG's frame header (ITU-T T.81, B.2.2).

    Raises:
        ValueError: the packet has no frame header of baseline coding.
    """
    content, at = packet.numpy(), 2
    while at + 9 < len(content):
        marker, length = int(content[at + 1]), int(content[at + 2]) << 8 | int(content[at + 3])
        if marker in (0xC0, 0xC1):
            height, width = (int(content[at + place]) << 8 | int(content[at + place + 1]) for place in (5, 7))
            return width, height
        at += 2 + length
    raise ValueError("not a baseline JPEG packet")


def _decoded(packets: list[torch.Tensor], *, device: torch.device) -> list[torch.Tensor]:
    """Decode each packet to RGB uint8 [3, H, W]."""
    from torchvision.io import ImageReadMode, decode_jpeg

    found: list[torch.Tensor] = decode_jpeg(packets, mode=ImageReadMode.RGB, device=device)
    return found


def _cut(frames_TCHW: torch.Tensor, rectangle: Rectangle, *, size_px: int) -> torch.Tensor:
    """Crop and resize all frames to float32 [T, C, S, S] in 0 to 255."""
    bottom, right = rectangle.top + rectangle.height, rectangle.left + rectangle.width
    cut = frames_TCHW[..., rectangle.top : bottom, rectangle.left : right].float()
    shrinks_much = max(rectangle.width, rectangle.height) >= _SHRINKS_MUCH * size_px
    return interpolate(cut, (size_px, size_px), mode="bilinear", align_corners=False, antialias=shrinks_much)


def _difference(*variants: Generator[torch.Tensor, None, None]) -> float:
    """Return the mean absolute difference of the first batches."""
    found = []
    for variant in variants:
        with closing(variant):
            found.append(next(variant).float().clone())
    return (found[0] - found[1]).abs().mean().item()


def _clips_per_s(variant: Generator[torch.Tensor, None, None], setup: Setup, *, seconds: float) -> float:
    with closing(variant):
        for _ in range(_BATCHES_AHEAD + 1):
            next(variant)
        _wait(setup)
        num_clips, begin_s = 0, time.perf_counter()
        while (wall_s := time.perf_counter() - begin_s) < seconds or not num_clips:
            num_clips += len(next(variant))
            _wait(setup)
        return num_clips / wall_s


def _wait(setup: Setup) -> None:
    if setup.device.type == "cuda":
        torch.cuda.synchronize(setup.device)
