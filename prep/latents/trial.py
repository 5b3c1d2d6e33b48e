"""A trial of the VAE: what encoding a few frames costs on this machine, for the estimate of a plan."""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, range_text, size_text
from clipmill.manifests.progress import Activity
from clipmill.prep.core.chunk_columns import ChunksPlan
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.engines.choice import count_gpus, num_cores
from clipmill.prep.latents.chunk_reader import read_chunk_video
from clipmill.prep.latents.pieces import PIECES_AHEAD, cut
from clipmill.prep.latents.recipe import Encoding
from clipmill.prep.latents.vae import Device, open_encoder
from clipmill.prep.latents.weights import vae_folder
from clipmill.shards.opening import Damaged

_SPREAD = 1.3  # chunks and machines vary; one chunk says little about the others
_SECOND = 1 / 3600
_CPU_FRAMES, _GPU_FRAMES = 2, 16


@dataclass(frozen=True)
class FrameCost:
    """Cost of a frame: decoding, resizing and the VAE, with one thread on a CPU, or with one GPU.

    Attributes:
        num_workers: number of cores or GPUs of this machine.
        segment_bytes: the most memory that a worker takes to encode one segment, libraries, weights and, on a CPU, the
            segments that are decoded ahead included; None for a VAE of images.
    """

    device: Device
    frame_s: float
    num_workers: int
    segment_bytes: int | None = None

    def hours(self, num_frames: int) -> tuple[float, float]:
        """Return the least and the most hours that encoding takes on this machine."""
        hours = num_frames * self.frame_s / 3600 / self.num_workers
        load = os.getloadavg()[0] if self.device == "cpu" else 0.0
        least, most = hours / _SPREAD, hours * _SPREAD * (self.num_workers + load) / self.num_workers
        return max(least, _SECOND), max(most, _SECOND)


def run_trial(plan: ChunksPlan, *, num_gpus: int | None = None) -> FrameCost | None:
    """Encode a few frames or a segment of a chunk; None if chunks or model cannot be read, which the run reports.

    Args:
        num_gpus: number of GPUs of this machine; None to count them.
    """
    encoding = Encoding.of(plan.recipe)
    settings, is_video = encoding.settings, encoding.is_video
    try:
        with Activity("encoding a few frames for the estimate"):
            num_gpus = count_gpus() if num_gpus is None else num_gpus
            device: Device = "cuda" if num_gpus else "cpu"
            encoding = replace(encoding, vae=replace(encoding.vae, directory=vae_folder(settings.vae)))
            encoder = open_encoder(encoding, device=device, num_threads=1)
            crops = next(_crops(plan, encoding))[: _GPU_FRAMES if num_gpus else _CPU_FRAMES]
            num_frames = encoding.segment_frames if is_video else len(crops)
            noise = np.zeros((len(crops), *encoding.unit_shape), np.float32)
            noise_or_none = noise if settings.posterior == "sample" else None
            pictures = encoder.resized(crops, size=settings.size)
            if not is_video:  # of a segment, the first frames set up memory and kernels
                encoder.encode([pictures[:1]], noise=None)
            begin_s = time.monotonic()
            decoded: list[NDArray[np.uint8]] = list(islice(_crops(plan, encoding), 1))
            decode_s = (time.monotonic() - begin_s) / (num_frames if is_video else len(decoded[0]))
            begin_s = time.monotonic()
            encoder.encode([encoder.resized(crops, size=settings.size)], noise=noise_or_none)
            encode_s = (time.monotonic() - begin_s) / num_frames
    except (UserError, SourceFailure, Damaged, MemoryError, OSError, StopIteration):
        return None
    waiting_bytes = 0 if num_gpus else PIECES_AHEAD * crops.nbytes
    segment_bytes = encoder.peak_bytes + waiting_bytes if is_video else None
    return FrameCost(device, decode_s + encode_s, num_gpus or num_cores(), segment_bytes)


def _crops(plan: ChunksPlan, encoding: Encoding) -> Iterator[NDArray[np.uint8]]:
    for shard in plan.shards:
        if shard.has_work:
            chunks, rows = plan.chunks(shard.shard_id), plan.chunk_shards[shard.shard_id].rows
            for row in range(len(chunks)) if rows is None else rows:
                yield from cut(read_chunk_video(chunks[row], encoding))


def time_lines(trial: FrameCost | None, *, num_frames: int) -> list[str]:
    """Return how long encoding takes, in words."""
    if trial is None:
        return ["         how long it takes is unknown: the model or the chunks cannot be read here"]
    noun = "GPU" if trial.device == "cuda" else "core"
    where = f"{count_noun(trial.num_workers, noun)} of this machine"
    hours = range_text(*(duration_text(3600 * hours) for hours in trial.hours(num_frames)))
    note = "" if trial.device == "cuda" else "; a GPU is many times faster"
    lines = [f"         at most {hours} on the {where} ({1 / trial.frame_s:,.1f} frames/s per {noun}{note})"]
    if trial.segment_bytes is not None:
        what = "GPU memory" if trial.device == "cuda" else "memory"
        lines.append(f"         {size_text(trial.segment_bytes)} of {what} per worker to encode one segment at a time")
    return lines


def time_values(trial: FrameCost | None, *, num_frames: int) -> dict[str, Any]:
    """Return how long encoding takes as JSON values; empty without a trial."""
    if trial is None:
        return {}
    return {"trial": asdict(trial), "wall_hours_range": list(trial.hours(num_frames))}
