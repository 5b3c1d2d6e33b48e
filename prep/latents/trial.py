"""A trial of the VAE: what encoding a few frames costs on this machine, for the estimate of a plan."""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.progress import Activity
from clipmill.manifests.quoting import counted
from clipmill.manifests.units import between, duration_text
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.engines.choice import count_gpus, num_cores
from clipmill.prep.latents.pieces import cut
from clipmill.prep.latents.plan import LatentsPlan
from clipmill.prep.latents.sample import read_chunk_video
from clipmill.prep.latents.vae import Device, open_encoder
from clipmill.shards.damage import Damaged
from clipmill.shards.reader import open_shard

_SPREAD = 1.3  # chunks and machines vary; one chunk says little about the others
_SECOND = 1 / 3600
_CPU_FRAMES, _GPU_FRAMES = 2, 16


@dataclass(frozen=True)
class FrameCost:
    """Cost of a frame: decoding, resizing and the VAE, with one thread on a CPU, or with one GPU.

    Attributes:
        num_workers: number of cores or GPUs of this machine.
    """

    device: Device
    frame_s: float
    num_workers: int

    def hours(self, num_frames: int) -> tuple[float, float]:
        """Return the least and the most hours that encoding takes on this machine."""
        hours = num_frames * self.frame_s / 3600 / self.num_workers
        load = os.getloadavg()[0] if self.device == "cpu" else 0.0
        least, most = hours / _SPREAD, hours * _SPREAD * (self.num_workers + load) / self.num_workers
        return max(least, _SECOND), max(most, _SECOND)


def run_trial(plan: LatentsPlan) -> FrameCost | None:
    """Encode a few frames of a chunk; None if its chunks or the model cannot be read, which the run reports."""
    recipe = plan.recipe
    try:
        with Activity("encoding a few frames for the estimate"):
            num_gpus = count_gpus()
            device: Device = "cuda" if num_gpus else "cpu"
            encoder = open_encoder(recipe.vae, device=device, precision=recipe.settings.precision, num_threads=1)
            crops = next(_crops(plan))[: _GPU_FRAMES if num_gpus else _CPU_FRAMES]
            pictures = encoder.resized(crops, size=recipe.settings.size)
            noise = np.zeros((len(crops), *recipe.frame_shape), np.float32)
            encoder.encode([pictures[:1]], noise=noise[:1])  # the first call sets up memory and kernels
            begin_s = time.monotonic()
            decoded: list[NDArray[np.uint8]] = list(islice(_crops(plan), 1))
            decode_s = (time.monotonic() - begin_s) / len(decoded[0])
            begin_s = time.monotonic()
            encoder.encode([encoder.resized(crops, size=recipe.settings.size)], noise=noise)
            encode_s = (time.monotonic() - begin_s) / len(crops)
    except (UserError, SourceFailure, Damaged, MemoryError, OSError, StopIteration):
        return None
    return FrameCost(device, decode_s + encode_s, num_gpus or num_cores())


def _crops(plan: LatentsPlan) -> Iterator[NDArray[np.uint8]]:
    shard = next(shard for shard in plan.shards if shard.has_work)
    video = open_shard(plan.video_dir, plan.video_commits[shard.shard_id])
    rows = plan.chunk_shards[shard.shard_id].rows
    return cut(read_chunk_video(video, 0 if rows is None else rows[0], settings=plan.recipe.settings))


def time_lines(trial: FrameCost | None, *, num_frames: int) -> list[str]:
    """Return how long encoding takes, in words."""
    if trial is None:
        return ["         how long it takes is unknown: the model or the chunks cannot be read here"]
    noun = "GPU" if trial.device == "cuda" else "core"
    where = f"{counted(trial.num_workers, noun)} of this machine"
    hours = between(*(duration_text(3600 * hours) for hours in trial.hours(num_frames)))
    note = "" if trial.device == "cuda" else "; a GPU is many times faster"
    return [f"         at most {hours} on the {where} ({1 / trial.frame_s:,.1f} frames/s per {noun}{note})"]


def time_values(trial: FrameCost | None, *, num_frames: int) -> dict[str, Any]:
    """Return how long encoding takes as JSON values; empty without a trial."""
    if trial is None:
        return {}
    return {"trial": asdict(trial), "wall_hours_range": list(trial.hours(num_frames))}
