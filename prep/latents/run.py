"""Driver code of the column `latents`: the resources of workers, the trial that plans use, and report lines."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import islice
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, range_text, size_text
from clipmill.manifests.progress import Activity
from clipmill.prep.core.chunk_plan import ChunkShard, ChunksPlan
from clipmill.prep.core.chunk_work import Workers
from clipmill.prep.core.column import Addition
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.core.plan import disk_use, with_work
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary
from clipmill.prep.engines.choice import count_gpus, num_cores, threads_per_worker
from clipmill.prep.latents.batches import BLOCKS_AHEAD, crop_frames, read_chunk_video
from clipmill.prep.latents.column import LatentsRequest
from clipmill.prep.latents.frames import segments_of
from clipmill.prep.latents.recipe import LATENTS, Encoding, LatentsSettings
from clipmill.prep.latents.vae import Device, open_encoder
from clipmill.prep.latents.weights import vae_folder
from clipmill.prep.latents.worker import EncoderOptions
from clipmill.shards.columns import VIDEO, command_for
from clipmill.shards.opening import Damaged

_WORKER_GB = 3.5  # measured (benchmarks/README.md): 3.0 GB for a batch of 16 with Stable Diffusion's VAE on a CPU
_MARGIN = 1.2
_SPREAD = 1.3  # factor between estimate and limits: chunks and machines vary, and a trial measures only one chunk
_MIN_HOURS = 1 / 3600  # one second
_CPU_FRAMES, _GPU_FRAMES = 2, 16  # number of frames that a trial with an image VAE encodes
_BYTES_PER_NUMBER = 2


def choose_workers(plan: ChunksPlan, request: LatentsRequest) -> Workers:
    """Return the resources and the options of the workers of a run."""
    gpus = request.gpus_per_worker(has_work=bool(with_work(plan.shards)))
    num_threads = threads_per_worker(
        request.workers, gpus_per_worker=gpus, address=request.cluster, execution=request.execution
    )
    return Workers(
        request=request,
        gpus_each=gpus,
        memory_gb=worker_memory_gb(plan, request, on_cpu=not gpus),
        options=EncoderOptions(device="cuda" if gpus else "cpu", batch=request.batch, num_threads=num_threads),
    )


def worker_memory_gb(plan: ChunksPlan, request: LatentsRequest, *, on_cpu: bool) -> float:
    """Return the memory to reserve for a worker on a cluster, in GB.

    For a video VAE on CPUs, a trial on this machine measures the memory that encoding one segment takes. The result is
    this memory times the number of segments in a batch, plus a margin. In all other cases, the result is a constant.
    """
    encoding, has_work = Encoding.from_recipe(plan.recipe), bool(with_work(plan.shards))
    is_reserved = request.cluster is not None and request.execution.task_memory is None
    if is_reserved and on_cpu and has_work and encoding.is_video:
        trial = run_trial(plan, num_gpus=0)
        if trial is not None and trial.segment_bytes is not None:
            return _MARGIN * trial.segment_bytes * encoding.units_per_batch(request.batch) / 1e9
    return _WORKER_GB


@dataclass(frozen=True)
class FrameCost:
    """Measured cost of encoding a frame, on a single CPU thread or a single GPU.

    Attributes:
        frame_s: Time to decode, resize and encode a frame, in seconds.
        num_workers: Number of cores or GPUs of this machine.
        segment_bytes: Peak memory of a worker that encodes a single segment, including libraries, weights and, on a
            CPU, the segments that are decoded ahead; None for an image VAE.
    """

    device: Device
    frame_s: float
    num_workers: int
    segment_bytes: int | None = None

    def hours(self, num_frames: int) -> tuple[float, float]:
        """Return a lower and an upper estimate of the hours that encoding takes on this machine."""
        hours = num_frames * self.frame_s / 3600 / self.num_workers
        load = os.getloadavg()[0] if self.device == "cpu" else 0.0
        lower, upper = hours / _SPREAD, hours * _SPREAD * (self.num_workers + load) / self.num_workers
        return max(lower, _MIN_HOURS), max(upper, _MIN_HOURS)


def run_trial(plan: ChunksPlan, *, num_gpus: int | None = None) -> FrameCost | None:
    """Measure the cost of encoding a few frames, or one segment; return None if the chunk or the model cannot be read.

    The reason is not reported here: the run reports it.

    Args:
        num_gpus: Number of GPUs in this machine; None to count them.
    """
    encoding = Encoding.from_recipe(plan.recipe)
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
            posterior_noise = noise if settings.posterior == "sample" else None
            pictures = encoder.resize(crops, size=settings.size)
            if not is_video:  # warm up memory and kernels; in a segment, the first frames do this
                encoder.encode([pictures[:1]], noise=None)
            # Measure decoding and encoding separately: a complete block is decoded, but only a few frames are encoded.
            begin_s = time.monotonic()
            blocks: list[NDArray[np.uint8]] = list(islice(_crops(plan, encoding), 1))
            decode_s = (time.monotonic() - begin_s) / (num_frames if is_video else len(blocks[0]))
            begin_s = time.monotonic()
            encoder.encode([encoder.resize(crops, size=settings.size)], noise=posterior_noise)
            encode_s = (time.monotonic() - begin_s) / num_frames
    except (UserError, SourceFailure, Damaged, MemoryError, OSError, StopIteration):
        return None
    queue_bytes = 0 if num_gpus else BLOCKS_AHEAD * crops.nbytes
    segment_bytes = encoder.peak_bytes + queue_bytes if is_video else None
    return FrameCost(device, decode_s + encode_s, num_gpus or num_cores(), segment_bytes)


def _crops(plan: ChunksPlan, encoding: Encoding) -> Iterator[NDArray[np.uint8]]:
    for shard in plan.shards:
        if shard.has_work:
            chunks, rows = plan.chunks(shard.shard_id), plan.chunk_shards[shard.shard_id].rows
            for row in range(len(chunks)) if rows is None else rows:
                yield from crop_frames(read_chunk_video(chunks[row], encoding))


def time_lines(trial: FrameCost | None, *, num_frames: int) -> list[str]:
    """Return the lines of a report about the expected duration of encoding."""
    if trial is None:
        return ["         the duration is unknown: the model or the chunks cannot be read here"]
    noun = "GPU" if trial.device == "cuda" else "core"
    hardware = f"{count_noun(trial.num_workers, noun)} of this machine"
    hours = range_text(*(duration_text(3600 * hours) for hours in trial.hours(num_frames)))
    note = "" if trial.device == "cuda" else "; a GPU is many times faster"
    lines = [f"         {hours} on the {hardware} ({1 / trial.frame_s:,.1f} frames/s per {noun}{note})"]
    if trial.segment_bytes is not None:
        memory = "GPU memory" if trial.device == "cuda" else "memory"
        lines.append(
            f"         {size_text(trial.segment_bytes)} of {memory} per worker to encode one segment at a time"
        )
    return lines


@dataclass(frozen=True)
class Coverage:
    """Amount of video that is encoded. For a video VAE, also the amount that is outside of all segments.

    Attributes:
        num_frames: Number of frames to encode; an upper limit, because unchanged chunks of a changed shard are copied.
        num_units: Number of frames, or of segments for a video VAE.
        num_omitted: Number of chunks without a segment, which have no sample.
        omitted_s: Seconds of video outside of all segments, including chunks without a segment.
    """

    num_frames: int
    num_units: int
    num_omitted: int
    omitted_s: Fraction


def measure_coverage(shards: Iterable[ChunkShard], encoding: Encoding) -> Coverage:
    """Return how much of the selected chunks of the shards is encoded."""
    num_frames = num_units = num_omitted = 0
    omitted_s = Fraction(0)
    for length, count in (item for shard in shards for item in shard.lengths.items()):
        segments = segments_of(length, encoding)
        if not encoding.is_video:
            num_frames += count * len(segments.frames)
            continue
        num_units += count * len(segments.lengths)
        num_omitted += 0 if segments.lengths else count
        encoded_s = len(segments.lengths) * encoding.segment_step / encoding.settings.fps_exact
        omitted_s += count * max(Fraction(0), length.seconds - encoded_s)
    if not encoding.is_video:
        return Coverage(num_frames, num_frames, 0, omitted_s)
    return Coverage(num_units * encoding.segment_frames, num_units, num_omitted, omitted_s)


def require_segments(plan: ChunksPlan, request: Request) -> None:
    """Check that at least one chunk is long enough for a segment of a video VAE.

    Raises:
        UserError: All chunks are shorter than a segment.
    """
    encoding = Encoding.from_recipe(plan.recipe)
    lengths = [(length.seconds, length.has_next) for shard in plan.chunk_shards.values() for length in shard.lengths]
    if not encoding.is_video or not lengths or any(shard.num_chunks for shard in plan.chunk_shards.values()):
        return
    settings = encoding.settings
    (longest_s, has_next), fps, step = max(lengths), settings.fps_exact, encoding.vae.frames_step
    # The last segment of a video lacks the frame at its end, because there is no next chunk.
    limit = (int(longest_s * fps) - (not has_next)) // step * step + 1
    remedy = f"make longer chunks: prep {command_for(VIDEO, plan.recipe.values[VIDEO])} --len"
    raise UserError(
        f"no chunk is long enough for a segment: --segment {settings.segment} at {settings.fps} fps is"
        f" {count_noun(encoding.segment_frames, 'frame')} long ({float(encoding.segment_step / fps):g} s and the next"
        f" frame), but the longest chunk is {float(longest_s):g} s long"
        f"{'' if has_next else ', and it is the last chunk of its video'}",
        hint=f"use --segment {limit}f or less, or {remedy}" if limit > step else f"use a higher --fps, or {remedy}",
    )


def estimate(plan: ChunksPlan) -> Addition:
    """Estimate the cost of a plan, and describe how chunks are divided into segments."""
    encoding = Encoding.from_recipe(plan.recipe)
    pending_coverage = measure_coverage(
        (plan.chunk_shards[shard.shard_id] for shard in plan.shards if shard.has_work), encoding
    )
    coverage = measure_coverage(plan.chunk_shards.values(), encoding)
    num_frames = pending_coverage.num_frames
    size_bytes = pending_coverage.num_units * prod(encoding.unit_shape) * _BYTES_PER_NUMBER
    trial = run_trial(plan) if num_frames else None
    added_bytes = (float(size_bytes), float(size_bytes))
    disk = disk_use(plan.data_dir, column=LATENTS, variant=plan.recipe.variant, added_bytes=added_bytes)
    lines: list[str] = []
    if num_frames:
        # "At most", because unchanged chunks of a changed shard are copied, and their number is not known in advance.
        lines.append(f"estimate at most {count_noun(num_frames, 'frame')} to encode, {size_text(size_bytes)}")
        lines += [*time_lines(trial, num_frames=num_frames), *disk.lines()]
    trial_values: dict[str, Any] = {}
    if trial is not None:
        trial_values = {"trial": asdict(trial), "wall_hours_range": list(trial.hours(num_frames))}
    segments = {"num_segments": pending_coverage.num_units, "left_out_s": float(coverage.omitted_s)}
    values = {
        "segments": segments if encoding.is_video else None,
        "estimate": {"num_frames": num_frames, "size_bytes": size_bytes, **trial_values},
        "disk": disk.values(),
    }
    if not encoding.is_video:
        return Addition(lines, values, ())
    settings = encoding.settings
    length = next(iter(plan.chunk_shards.values())).longest_s if plan.chunk_shards else Fraction(0)
    seconds = encoding.segment_step / settings.fps_exact
    segment_lines = [
        f"segments {encoding.segment_frames} frames at {settings.fps} fps, {float(seconds):g} s, become"
        f" {encoding.latent_frames} latent frames; a chunk of {float(length):g} s holds {length // seconds}"
    ]
    segment_lines += [f"         {text}" for text in _omission_texts(coverage, settings)]
    return Addition(lines, values, segment_lines)


def omission_lines(plan: ChunksPlan) -> list[str]:
    """Describe the parts of a plan's videos that are outside of all segments; return [] if there are none."""
    encoding = Encoding.from_recipe(plan.recipe)
    return _omission_texts(measure_coverage(plan.chunk_shards.values(), encoding), encoding.settings)


def _omission_texts(coverage: Coverage, settings: LatentsSettings) -> list[str]:
    """Describe the parts of videos that are outside of all segments; return [] if there are none."""
    texts = []
    if coverage.omitted_s:
        texts.append(
            f"{duration_text(float(coverage.omitted_s))} at the ends of chunks and videos, outside of segments"
        )
    if coverage.num_omitted:
        tail = "; --tail repeat would encode the last chunks of videos" if settings.tail == "drop" else ""
        texts.append(f"{count_noun(coverage.num_omitted, 'chunk')} too short for a segment{tail}")
    return texts


def summary(plan: ChunksPlan, result: Summary, written: Sequence[str]) -> Addition:
    """Describe the VAE of a run, and the parts of all planned videos that are outside of all segments."""
    encoding = Encoding.from_recipe(plan.recipe)
    coverage = measure_coverage(plan.chunk_shards.values(), encoding)
    omitted_values = {"num_chunks": coverage.num_omitted, "seconds": float(coverage.omitted_s)}
    lines = [f"left out {text}" for text in _omission_texts(coverage, encoding.settings)]
    return Addition(lines, {"vae": encoding.settings.vae, "left_out": omitted_values})
