"""Implementation of `train caption-chunks`: caption the chunks (short videos in shards) of a split, in all processes.

A clip is a chunk or a segment of a chunk. The clips are divided into parts with a fixed number of batches. Therefore
neither the number of processes nor an interruption affects the batches or the bytes of the table. `prep manifest
captions` reads this table. The files are:

    OUT.parquet         one row per caption: video, begin_s, end_s, text, source, likelihood, sample
    OUT.failures.jsonl  clips that could not be read or decoded, and have no row
    OUT.parts/          unfinished work: the finished parts, and plan.json, which describes the work

`source` is the name of the weights and the first 8 digits of their hash. `likelihood` is the mean log probability per
token (clipmill.train.tasks.caption.decoding). `sample` is the index of the caption among the captions of its clip. The
schema metadata contain a JSON object under the key `clipmill`: `kind`, `weights`, `weights_sha256`, `video_variant`,
`chunks_sha256`, `settings`, and the numbers of clips, captions, empty captions (which have no row) and failed clips.
The table is published last.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.caption_table import METADATA_KEY, PSEUDO_CAPTIONS, SCHEMA, write_pseudo_captions
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.publish import parse_json, publish_atomically, publish_bytes, remove_temporaries, target_of
from clipmill.train.data.batch import BatchRing, Sample
from clipmill.train.data.chunks import ClipReader, clip_query
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.producers.chunk_clips import open_chunk_clips
from clipmill.train.data.query import open_folder
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import World
from clipmill.train.run.environment import installed_version
from clipmill.train.run.folder import hold_folder
from clipmill.train.run.parts import PLAN, begin_parts, differences, missing_parts, share_parts
from clipmill.train.run.tracking import Progress
from clipmill.train.tasks.caption.spec import ChunkCaptionsRequest, ChunkDecoding, fit_decoding
from clipmill.train.tasks.caption.video_captions import TrainedCaptioner, open_captioner
from clipmill.train.tasks.caption.video_windows import parse_length_us
from clipmill.train.weights.source import Say

_FAILED = b"failed"
_SUFFIX = ".parquet"
_ROWS_PER_GROUP = 1 << 16
_COUNTS = ("num_clips", "num_captions", "num_empty", "num_failed")


@dataclass(frozen=True)
class CaptionPart:
    """A range of clips whose captions are published as one file."""

    begin: int
    end: int

    def path(self, out: Path) -> Path:
        """Return the path of the finished part."""
        return parts_path(out) / f"{self.begin:012d}{_SUFFIX}"


def require_table_path(out: Path) -> None:
    """Raise a UserError if `out` is not the path of a Parquet file."""
    if out.suffix != _SUFFIX:
        raise UserError(
            f"--out {out} does not end in {_SUFFIX}", hint=f"use a Parquet file: {out}{_SUFFIX}", flags=("--out",)
        )


def parts_path(out: Path) -> Path:
    """Return the path of the folder for unfinished work."""
    return out.with_suffix(".parts")


def failures_path(out: Path) -> Path:
    """Return the path of the list of failed clips."""
    return out.with_suffix(".failures.jsonl")


def read_record(out: Path) -> dict[str, Any] | None:
    """Return the metadata of a finished table; None if there is no table.

    Raises:
        UserError: The file is not a table of `train caption-chunks`.
    """
    if not out.exists():
        return None
    try:
        record = parse_json((pq.read_schema(out).metadata or {})[METADATA_KEY])
        if not isinstance(record, dict) or record["kind"] != PSEUDO_CAPTIONS:
            raise ValueError(f"not a table of {PSEUDO_CAPTIONS}")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{out} exists already, and is not a table of train caption-chunks", hint=_OUT_HINT) from error
    return record


_OUT_HINT = "use a different --out"


def require_same_work(existing_plan: Mapping[str, Any], plan: Mapping[str, Any], *, path: Path) -> None:
    """Raise a UserError that lists the differences if `path` does not contain the requested captions."""
    if changes := differences(existing_plan, plan):
        raise UserError(
            f"{path} does not contain the requested captions: {changes}",
            hint="use a different --out, or remove the existing output first",
        )


def publish_table(out: Path, parts: Sequence[CaptionPart], *, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Join the parts, and publish the list of failures and then the table.

    Returns:
        The metadata of the table.

    Raises:
        FailedWork: No clip could be decoded.
    """
    failures: list[dict[str, Any]] = []
    num_captions = 0
    for part in parts:
        with pq.ParquetFile(part.path(out)) as file:
            failures += json.loads(file.schema_arrow.metadata[_FAILED])
            num_captions += file.metadata.num_rows
    num_clips = parts[-1].end
    if len(failures) == num_clips:
        raise FailedWork(f"no clip could be decoded ({num_clips:,} failed); the first failure: {failures[0]['detail']}")
    if failures:
        publish_bytes(failures_path(out), "".join(json.dumps(failure) + "\n" for failure in failures).encode())
    num_empty = (num_clips - len(failures)) * plan["settings"].get("num_samples", 1) - num_captions
    counts = (num_clips, num_captions, num_empty, len(failures))
    record = {**plan, **dict(zip(_COUNTS, counts, strict=True))}
    write_pseudo_captions(out, _groups(parts, out), record=record)
    return record


def _groups(parts: Sequence[CaptionPart], out: Path) -> Iterator[pa.Table]:
    """Yield the rows of all parts as tables of about `_ROWS_PER_GROUP` rows."""
    tables: list[pa.Table] = []
    for part in parts:
        tables.append(pq.read_table(part.path(out), schema=SCHEMA))
        if sum(map(len, tables)) >= _ROWS_PER_GROUP or part is parts[-1]:
            yield pa.concat_tables(tables)
            tables = []


_BATCHES_PER_PART = 4


@dataclass(frozen=True, kw_only=True)
class CaptionWork:
    """Clips to caption, with the captioner and its settings.

    Attributes:
        batch: Number of clips per batch.
        plan: All facts that affect the captions, as JSON-serialisable values, stored in the table's metadata.
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
        UserError: The weights or clips do not exist, or a setting does not fit the weights or the clips.
    """
    segment_us = None if request.segment is None else parse_length_us(request.segment, flag="--segment")
    captioner = open_captioner(weights, overrides=request.shown, device=request.device, say=say)
    settings = replace(captioner.trained.settings, shards=request.shards, where=request.where)
    decoding = fit_decoding(request.decoding.with_defaults(), captioner.task.decoder.context_length)
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
        "chunks_sha256": _chunks_sha256(samples),
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


def _chunks_sha256(samples: Samples[ClipReader]) -> str:
    """Hash the selected chunks and their bytes, but not the captions in the same tars."""
    chunks = samples.reader.chunks
    table, rows = chunks.table, chunks.selection.rows
    digest = hashlib.sha256("\n".join(chunks.video_ids.to_pylist()).encode())
    for array in (table.video_row, table.start_ms, table.num_frames):
        digest.update(array[rows].astype(np.int64).tobytes())
    digest.update(table.crc32[rows].astype(np.uint32).tobytes())
    if chunks.divided is not None:
        digest.update(np.stack(samples.span_us(np.arange(len(samples)))).tobytes())
    return digest.hexdigest()


def caption(work: CaptionWork, out: Path, *, world: World, progress: Progress) -> dict[str, Any]:
    """Caption the missing parts, and publish the table. All ranks must call this function.

    Returns:
        The metadata of the table.

    Raises:
        UserError: The table contains other captions, or another command is writing the table.
        FailedWork: No clip could be decoded, or a likelihood is not finite.
    """
    with ExitStack() as stack:
        finished_record = world.first(lambda: _begin(work, out, stack=stack))
        if finished_record is not None:
            progress.say(f"nothing to do: {out} is finished")
            return finished_record
        parts = work.parts
        unfinished_parts = missing_parts(parts, out, world=world, progress=progress)
        local_parts = unfinished_parts[world.rank :: world.size]
        outcomes = work.samples.outcomes(index for part in local_parts for index in range(part.begin, part.end))
        ring = BatchRing(work.batch, pin=work.captioner.trained.device.type == "cuda")
        make = partial(_caption_part, work, outcomes=outcomes, ring=ring, out=out)
        share_parts(unfinished_parts, make, world=world, progress=progress)

        def finish() -> dict[str, Any]:
            record = publish_table(out, parts, plan=work.plan)
            shutil.rmtree(parts_path(out))
            return record

        return world.first(finish)


def _begin(work: CaptionWork, out: Path, *, stack: ExitStack) -> dict[str, Any] | None:
    """Lock and prepare the folder of parts; return the metadata if the table is already finished."""
    parts, record = parts_path(out), read_record(out)
    if record is not None:
        require_same_work(record, work.plan, path=out)
        if not parts.exists():
            return record
    elif (
        parts.is_dir()
        and not (parts / PLAN).is_file()
        and any(target_of(path.name) != PLAN for path in parts.iterdir())
    ):
        raise UserError(
            f"{parts}, the folder for unfinished work, exists already and contains other files",
            hint="use a different --out",
        )
    try:
        parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be created: {error.strerror}", hint="use a different --out", flags=("--out",)
        ) from error
    stack.enter_context(hold_folder(parts, work="captions chunks"))
    if record is not None:
        shutil.rmtree(parts)
        return record
    begin_parts(parts, work.plan, require_same=lambda plan: require_same_work(plan, work.plan, path=parts))
    remove_temporaries(out.parent, matches=lambda name: name in (out.name, failures_path(out).name))
    return None


def _caption_part(
    work: CaptionWork, part: CaptionPart, *, outcomes: Iterator[Sample | FailedSample], ring: BatchRing, out: Path
) -> int:
    """Caption and publish a part, and return the number of failed clips."""
    tables, failures = [SCHEMA.empty_table()], []
    for begin in range(part.begin, part.end, work.batch):
        samples = list(islice(outcomes, min(work.batch, part.end - begin)))
        failures += [sample for sample in samples if isinstance(sample, FailedSample)]
        if clips := [sample for sample in samples if not isinstance(sample, FailedSample)]:
            tables.append(_caption_rows(work, clips, ring))
    lines = json.dumps([asdict(failure) for failure in failures]).encode()
    with publish_atomically(part.path(out)) as temporary:
        pq.write_table(pa.concat_tables(tables).replace_schema_metadata({_FAILED: lines}), temporary)
    return len(failures)


def _caption_rows(work: CaptionWork, clips: Sequence[Sample], ring: BatchRing) -> pa.Table:
    """Caption a batch of clips, and return the rows of the captions."""
    samples, chunks, count = work.samples, work.samples.reader.chunks, work.decoding.num_samples or 1
    rows = np.array([clip["position"] for clip in clips])
    begin_us, end_us = samples.span_us(rows)
    caption_numbers = [
        caption_number(clip["key"], begin_us=clip_begin_us, sample=sample)
        for clip, clip_begin_us in zip(clips, begin_us.tolist(), strict=True)
        for sample in range(count)
    ]
    texts, likelihoods = work.captioner.captions(
        ring.collate(clips), work.decoding, samples=caption_numbers, rows_per_video=count
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


def caption_number(key: str, *, begin_us: int, sample: int) -> int:
    """Return a 64-bit number that identifies a caption. Sampling depends on this number and on the seed.

    Args:
        key: Key of the chunk.
        begin_us: Start of the clip in its video, in microseconds.
        sample: Index of the caption among the captions of its clip.
    """
    digest = hashlib.blake2b(f"{key} {begin_us} {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
