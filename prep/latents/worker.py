"""Making one shard of the `latents` column in a worker.

Latents of unchanged chunks are copied from the old shard; all other chunks are decoded and encoded. A failed chunk is
recorded in the commit and does not affect the others.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.prep.core.chunk_input import OldSamples, seconds_of
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.shard_result import Heartbeat, ShardResult, cpu_s, stopped, system_errors_as_results
from clipmill.prep.engines import worker_threads
from clipmill.prep.latents.batches import PicturesOfChunk, encoded_chunks
from clipmill.prep.latents.chunk_reader import ChunkReader, Following
from clipmill.prep.latents.frames import generator
from clipmill.prep.latents.pieces import pieces_in_order
from clipmill.prep.latents.recipe import LATENTS, LatentsRecipe
from clipmill.prep.latents.sample import (
    as_stored,
    extension_of,
    is_finite,
    latents_sample,
)
from clipmill.prep.latents.vae import Device, Encoder, open_encoder
from clipmill.prep.latents.weights import find_vae
from clipmill.shards.commits import Commit, Failure, write_commit
from clipmill.shards.damage import Damaged
from clipmill.shards.format import LATENTS_FIELDS
from clipmill.shards.writer import Sample, ShardWriter


@dataclass(frozen=True)
class LatentsTask:
    """Input of a worker: paths and small values only.

    Attributes:
        video_dir: folder of the `video` variant to encode.
        video_commits: commit of the shard with the chunks, as planned, and those of the shards in `following`.
        following: the next chunks of a VAE of videos (clipmill.prep.latents.borders).
        old_commits: Commits of the column with samples of unchanged chunks.
        batch: batch size of the model, in frames; a VAE of videos encodes one segment at least.
        num_threads: number of the model's threads, and of chunks decoded in parallel; None for what the engine has
            assigned to the worker.
        rows: the chunks to encode, as rows of the shard; None for all.
    """

    variant_dir: Path
    shard_id: int
    plan_fingerprint: str
    recipe: LatentsRecipe
    video_dir: Path
    video_commits: Mapping[int, Commit]
    following: Following
    old_commits: tuple[Commit, ...]
    device: Device
    batch: int
    num_threads: int | None
    rows: tuple[int, ...] | None


def make_latents(task: LatentsTask) -> ShardResult:
    """Make, publish and commit one shard."""
    try:
        found = find_vae(task.recipe.vae.source)
        if found.sha256 != task.recipe.vae.sha256:
            message = f"the weights of {found.name} on this node differ from those of the plan"
            return stopped(task, FailureCode.MODEL_UNAVAILABLE, message)
        encoder = open_encoder(task.recipe, found, device=task.device, num_threads=_threads(task))
        return system_errors_as_results(partial(_make, encoder=encoder), task)
    except UserError as error:
        return stopped(task, FailureCode.MODEL_UNAVAILABLE, str(error))


def _make(task: LatentsTask, *, encoder: Encoder) -> ShardResult:
    begin_cpu_s = cpu_s()
    try:
        chunks = ChunkReader(
            task.video_dir,
            task.shard_id,
            commits=task.video_commits,
            following=task.following,
            recipe=task.recipe,
        )
    except (Damaged, FileNotFoundError) as error:
        return stopped(task, FailureCode.CHUNK_DAMAGED, f"the chunks cannot be read: {error}")
    fingerprints = chunks.fingerprints
    old = OldSamples(task.variant_dir, task.old_commits, fields=LATENTS_FIELDS, wanted=fingerprints)
    wanted: Sequence[int] = range(len(fingerprints)) if task.rows is None else task.rows
    if task.recipe.latent_frames is not None:
        wanted = [row for row in wanted if chunks.segments(row).lengths]
    missing = [row for row in wanted if fingerprints[row] not in old]
    made = _make_samples(chunks, missing, task=task, encoder=encoder)
    failures: list[Failure] = []
    encoded_s, files = 0.0, None
    writer = ShardWriter(
        task.variant_dir, shard_id=task.shard_id, extensions=[extension_of(task.recipe.settings)], fields=LATENTS_FIELDS
    )
    with Heartbeat(task.variant_dir, task.shard_id, num_chunks=len(wanted)) as beat, writer:
        for row in wanted:
            fingerprint = fingerprints[row]
            outcome = old.sample(fingerprint, chunks.video.index, row) if fingerprint in old else next(made)
            if isinstance(outcome, Failure):
                failures.append(outcome)
                continue
            writer.add(outcome)
            beat.show(writer.num_samples)
            if fingerprint not in old:
                encoded_s += float(seconds_of(chunks.video.index, row))
        num_chunks = writer.num_samples
        if num_chunks:
            content = hashlib.sha256(task.plan_fingerprint.encode())
            content.update(" ".join(failure.key or "" for failure in failures).encode())
            files = writer.publish(content.hexdigest())
    commit = Commit(
        column=LATENTS,
        shard_id=task.shard_id,
        split=task.video_commits[task.shard_id].split,
        plan_fingerprint=task.plan_fingerprint,
        files=files,
        failures=tuple(failures),
    )
    write_commit(task.variant_dir, commit)
    return ShardResult(
        task.shard_id,
        num_chunks=num_chunks,
        num_reused=len(wanted) - len(missing),
        num_bytes=files.tar_bytes if files else 0,
        failures=commit.failures,
        encoded_s=encoded_s,
        cpu_s=cpu_s() - begin_cpu_s,
    )


def _threads(task: LatentsTask) -> int:
    return worker_threads() if task.num_threads is None else task.num_threads


def _make_samples(
    chunks: ChunkReader, rows: list[int], *, task: LatentsTask, encoder: Encoder
) -> Iterator[Sample | Failure]:
    """Yield the samples of the chunks in `rows` of the video shard, in order, or a failure for each that fails."""
    recipe, settings, index = task.recipe, task.recipe.settings, chunks.video.index
    keys, is_video = index["key"], recipe.latent_frames is not None

    def encode(parts: list[PicturesOfChunk[int, Any]]) -> NDArray[np.float32]:
        noise = None
        if settings.posterior == "sample":
            # The noise is drawn frame by frame or segment by segment, so that it does not depend on the batch.
            unit = "segment" if is_video else "frame"
            draws = [
                generator(settings.seed, chunks.contents[part.chunk], f"{unit} {number}")
                for part in parts
                for number in range(part.first, part.first + len(part.pictures))
            ]
            noise = np.stack([draw.standard_normal(recipe.unit_shape, dtype=np.float32) for draw in draws])
        return encoder.encode([part.pictures for part in parts], noise=noise)

    pieces = pieces_in_order(rows, read=chunks.read, num_threads=_threads(task))
    for done in encoded_chunks(
        pieces,
        resized=partial(encoder.resized, size=settings.size),
        encode=encode,
        batch=recipe.units_per_batch(task.batch),
    ):
        row, failure = done.chunk, done.failure
        if done.latents is not None:
            stored = as_stored(done.latents, dtype=settings.dtype)
            if is_finite(stored):
                yield latents_sample(chunks, row, stored, recipe=recipe)
                continue
            message = f"the latents contain non-finite values in {settings.dtype}"
            failure = SourceFailure(FailureCode.NOT_FINITE, message)
        code, message = (failure.code, failure.message) if failure else (FailureCode.FRAMES_DIFFER, "no frames")
        yield Failure(index["video_id"][row].as_py(), keys[row].as_py(), str(code), message)
