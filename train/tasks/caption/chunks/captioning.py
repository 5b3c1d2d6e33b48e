"""Caption the chunks of a split with a trained captioner, by all processes, resumable.

The clips are divided into parts of a fixed number of batches, so that neither the number of processes nor an
interruption changes any batch, and with it the bytes of the table.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.caption_table import PSEUDO_CAPTIONS, SCHEMA
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.publish import remove_temporaries, target_of
from clipmill.train.data.batch import BatchRing, Sample
from clipmill.train.data.chunks import ChunkSet, clip_query
from clipmill.train.data.clip_reader import ClipReader
from clipmill.train.data.inputs import open_folder
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.producers.chunk_clips import open_chunk_clips
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import World
from clipmill.train.run.environment import installed_version
from clipmill.train.run.folder import held_folder
from clipmill.train.run.parts import PLAN, begin_parts, missing_parts, share_parts
from clipmill.train.run.tracking import Progress
from clipmill.train.tasks.caption.chunks.request import ChunkCaptionsRequest, ChunkDecoding
from clipmill.train.tasks.caption.chunks.table import (
    CaptionPart,
    failures_path,
    parts_path,
    publish_part,
    publish_table,
    read_record,
    require_same_work,
)
from clipmill.train.tasks.caption.settings import fit_decoding
from clipmill.train.tasks.caption.videos.clips import length_us
from clipmill.train.tasks.caption.videos.run import TrainedCaptioner, open_captioner
from clipmill.train.weights.source import Say

_BATCHES_PER_PART = 4


@dataclass(frozen=True, kw_only=True)
class CaptionWork:
    """What is to be captioned.

    Attributes:
        batch: number of clips that the model gets at once.
        plan: what the captions depend on, as plain values; the table's metadata begins with it.
    """

    captioner: TrainedCaptioner
    samples: Samples[ClipReader]
    decoding: ChunkDecoding
    batch: int
    plan: dict[str, Any]

    @property
    def parts(self) -> list[CaptionPart]:
        """All parts, in the order of the clips."""
        size, count = self.batch * _BATCHES_PER_PART, len(self.samples)
        return [CaptionPart(begin, min(begin + size, count)) for begin in range(0, count, size)]


def open_work(weights: str, request: ChunkCaptionsRequest, *, say: Say) -> CaptionWork:
    """Open the captioner and the clips.

    Raises:
        UserError: there are no such weights or no such clips, or a setting does not fit them.
    """
    segment_us = None if request.segment is None else length_us(request.segment, flag="--segment")
    captioner = open_captioner(weights, overrides=request.shown, device=request.device, say=say)
    settings = replace(captioner.trained.settings, shards=request.shards, where=request.where)
    decoding = fit_decoding(request.decoding.effective(), captioner.task.decoder.context_length)
    folder = open_folder(settings, reason="train caption-chunks captions the chunks of a data folder")
    samples = open_chunk_clips(
        clip_query(
            settings,
            folder,
            split=request.split,
            loading=LoaderSettings(
                batch=request.batch,
                num_threads=request.workers,
                num_ahead=request.batch * settings.batches_ahead,
                seed=0,
                pin=captioner.trained.device.type == "cuda",
            ),
        ),
        segment_us=segment_us,
    )
    say(f"data: {samples.describe()}; {samples.variant_name}")
    say(f"weights: {captioner.source}: {captioner.trained.weights}")
    plan = {
        "kind": PSEUDO_CAPTIONS,
        "weights": captioner.name,
        "weights_sha256": captioner.weights_sha256,
        "video_variant": samples.reader.chunks.variant_name,
        "chunks_sha256": _chunks_sha256(samples.reader.chunks),
        "settings": {
            "split": request.split,
            "where": request.where,
            "segment_us": segment_us,
            **{name: getattr(settings, name) for name in ("num_frames", "sampling", "stride", "size_px", "decode")},
            **{name: value for name, value in vars(decoding).items() if value is not None},
            "batch": request.batch,
            "precision": captioner.trained.precision.name,
            "clipmill": installed_version("clipmill"),
        },
    }
    return CaptionWork(captioner=captioner, samples=samples, decoding=decoding, batch=request.batch, plan=plan)


def _chunks_sha256(chunks: ChunkSet) -> str:
    """Hash of which chunks are selected, and of their bytes; not of captions, which the tars contain as well."""
    table, rows = chunks.table, chunks.selection.rows
    digest = hashlib.sha256("\n".join(chunks.video_ids.to_pylist()).encode())
    for array in (table.video_row, table.start_ms, table.num_frames):
        digest.update(array[rows].astype(np.int64).tobytes())
    digest.update(table.crc32[rows].astype(np.uint32).tobytes())
    return digest.hexdigest()


def caption(work: CaptionWork, out: Path, *, world: World, progress: Progress) -> dict[str, Any]:
    """Caption what is missing, and publish the table; all ranks call it.

    Returns:
        The metadata of the table.

    Raises:
        UserError: the table has other captions, or another process writes it.
        FailedWork: no clip could be decoded, or a likelihood is not finite.
    """
    with ExitStack() as held:
        finished = world.first(lambda: _begin(work, out, held=held))
        if finished is not None:
            progress.say(f"nothing to do: {out} is finished")
            return finished
        parts = work.parts
        missing = missing_parts(parts, out, world=world, progress=progress)
        own = missing[world.rank :: world.size]
        outcomes = work.samples.outcomes(number for part in own for number in range(part.begin, part.end))
        ring = BatchRing(work.batch, pin=work.captioner.trained.device.type == "cuda")
        make = partial(_caption_part, work, outcomes=outcomes, ring=ring, out=out)
        share_parts(missing, make, world=world, progress=progress)
        return world.first(lambda: _finish(work, parts, out))


def _begin(work: CaptionWork, out: Path, *, held: ExitStack) -> dict[str, Any] | None:
    """Lock and prepare the folder of parts; return the metadata of a finished table."""
    parts, record = parts_path(out), read_record(out)
    if record is not None:
        require_same_work(record, work.plan, path=out)
        if not parts.exists():
            return record
    elif (
        parts.is_dir() and not (parts / PLAN).is_file() and any(target_of(one.name) != PLAN for one in parts.iterdir())
    ):
        raise UserError(f"{parts}, where unfinished work would be, exists already", hint="use another --out")
    try:
        parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be made: {error.strerror}", hint="use another --out", flags=("--out",)
        ) from error
    held.enter_context(held_folder(parts, work="captions chunks"))
    if record is not None:
        shutil.rmtree(parts)
        return record
    begin_parts(parts, work.plan, require_same=lambda old: require_same_work(old, work.plan, path=parts))
    remove_temporaries(out.parent, of=lambda name: name in (out.name, failures_path(out).name))
    return None


def _finish(work: CaptionWork, parts: Sequence[CaptionPart], out: Path) -> dict[str, Any]:
    record = publish_table(out, parts, plan=work.plan)
    shutil.rmtree(parts_path(out))
    return record


def _caption_part(
    work: CaptionWork, part: CaptionPart, *, outcomes: Iterator[Sample | FailedSample], ring: BatchRing, out: Path
) -> int:
    """Caption and publish a part; return the number of clips that failed."""
    tables, failed = [SCHEMA.empty_table()], []
    for begin in range(part.begin, part.end, work.batch):
        loaded = list(islice(outcomes, min(work.batch, part.end - begin)))
        failed += [one for one in loaded if isinstance(one, FailedSample)]
        if clips := [one for one in loaded if not isinstance(one, FailedSample)]:
            tables.append(_caption_rows(work, clips, ring))
    publish_part(part.path(out), pa.concat_tables(tables), failed=failed)
    return len(failed)


def _caption_rows(work: CaptionWork, clips: Sequence[Sample], ring: BatchRing) -> pa.Table:
    """The rows of a batch of clips."""
    samples, chunks, count = work.samples, work.samples.reader.chunks, work.decoding.num_samples or 1
    rows = np.array([clip["position"] for clip in clips])
    begin_us, end_us = samples.span_us(rows)
    numbers = [
        draw_number(clip["key"], begin_us=begins_us, sample=sample)
        for clip, begins_us in zip(clips, begin_us.tolist(), strict=True)
        for sample in range(count)
    ]
    texts, likelihoods = work.captioner.captions(
        ring.collate(clips), work.decoding, samples=numbers, rows_per_video=count
    )
    if not np.isfinite(likelihoods).all():
        raise FailedWork("likelihoods of captions are not finite: the weights have diverged")
    videos = chunks.video_ids.take(pa.array(chunks.table.video_row[samples.table.first_part[rows]])).cast(pa.string())
    table = pa.table(
        [
            np.repeat(videos.to_numpy(zero_copy_only=False), count),
            np.repeat(begin_us / 1e6, count),
            np.repeat(end_us / 1e6, count),
            texts,
            [work.captioner.source] * len(texts),
            likelihoods,
            np.tile(np.arange(count, dtype=np.int16), len(clips)),
        ],
        schema=SCHEMA,
    )
    return table.filter(pc.not_equal(table["text"], ""))


def draw_number(key: str, *, begin_us: int, sample: int) -> int:
    """The 64-bit number by which the random numbers of a caption are drawn, with the seed.

    Args:
        key: of the chunk.
        begin_us: of the clip in its video.
        sample: number of the caption among those of its clip.
    """
    digest = hashlib.blake2b(f"{key} {begin_us} {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
