"""Implementation of `train embed`: embed the clips and captions of a split with all processes, and store the result.

Clips are divided into parts with a fixed number of batches, and captions into parts with a fixed number of texts.
Therefore neither the number of processes nor an interruption changes the batches or the resulting bytes. Each process
publishes its parts in OUT/parts. Once all parts exist, rank 0 joins them into the files that
`clipmill.train.search.folder` describes.

Shape suffixes: N embedded clips, M captions.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import file_digest
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.publish import publish_atomically, publish_bytes, publish_checked_json, remove_temporaries
from clipmill.train.data.batch import Batch, BatchRing, Sample, to_device
from clipmill.train.data.caption_rows import NoCaptions
from clipmill.train.data.chunks import ClipReader, clip_query
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.data.producers.captioned_clips import ALL_CAPTIONS, open_captioned_clips
from clipmill.train.data.producers.chunk_clips import open_chunk_clips
from clipmill.train.data.query import open_folder
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.features import tower_of
from clipmill.train.evaluation.runner import describe_clip
from clipmill.train.inference import LoadedModel
from clipmill.train.models.dual_encoder import DualEncoder
from clipmill.train.run.environment import installed_version
from clipmill.train.run.folder import data_facts, hold_folder
from clipmill.train.run.parts import PLAN, begin_parts, missing_parts, share_parts
from clipmill.train.run.tracking import Progress
from clipmill.train.search.folder import (
    CAPTION_SCHEMA,
    CAPTIONS,
    CLIP_SCHEMA,
    CLIPS,
    FAILURES,
    FORMAT,
    PARTS,
    RECORD,
    TEXT,
    VIDEO,
    read_folder_record,
    require_complete_files,
    require_same_work,
)
from clipmill.train.search.request import EmbedRequest, FeatureKind

_ROWS_PER_GROUP = 1 << 16


@dataclass(frozen=True)
class EmbeddingPart:
    """A range of clips or captions whose embeddings are published as one file."""

    kind: Literal["video", "text"]
    begin: int
    end: int

    def path(self, folder: Path) -> Path:
        """Return the path of the part's file. The file exists once the part is finished."""
        return folder / PARTS / f"{self.kind}-{self.begin:012d}.npz"


def num_captions(samples: Samples[ClipReader]) -> int:
    """Return the total number of captions of all clips."""
    return 0 if samples.table.captions is None else samples.table.captions.num_entries


def publish_part(path: Path, rows: NDArray[np.float32], **arrays: NDArray[Any]) -> None:
    """Publish the embeddings of a finished part, with additional named arrays, as an npz file."""
    with publish_atomically(path) as temporary:
        np.savez(temporary, allow_pickle=False, rows=rows, **arrays)


def publish_folder(
    out: Path, parts: Sequence[EmbeddingPart], samples: Samples[ClipReader], *, plan: Mapping[str, Any]
) -> dict[str, Any]:
    """Join the parts into the files of the folder. embed.json is written last; then the parts are removed.

    Args:
        plan: Description of the work. Its entries are included in embed.json.

    Returns:
        The content of embed.json.

    Raises:
        FailedWork: No clip could be decoded.
    """
    sample_N, failures, shape = _read_outcomes([part for part in parts if part.kind == "video"], out)
    if not len(sample_N):
        reason = f"; the first failure: {failures[0]['detail']}" if failures else ""
        raise FailedWork(f"none of {count_noun(len(samples), 'clip')} could be decoded{reason}")
    names = [VIDEO, CLIPS]
    _join(out, [part for part in parts if part.kind == "video"], out / VIDEO, shape=(len(sample_N), *shape))
    row_of_sample = np.full(len(samples), -1)
    row_of_sample[sample_N] = np.arange(len(sample_N))
    _write_table(out / CLIPS, _clip_tables(samples, sample_N), schema=CLIP_SCHEMA)
    if samples.table.captions is not None:
        names += [CAPTIONS]
        _write_table(out / CAPTIONS, _caption_tables(samples, row_of_sample), schema=CAPTION_SCHEMA)
    if text_parts := [part for part in parts if part.kind == "text"]:
        names += [TEXT]
        with np.load(text_parts[0].path(out)) as arrays:
            width = arrays["rows"].shape[1]
        _join(out, text_parts, out / TEXT, shape=(num_captions(samples), width))
    if failures:
        names += [FAILURES]
        publish_bytes(out / FAILURES, "".join(json.dumps(failure) + "\n" for failure in failures).encode())
    record = {
        "format": FORMAT,
        **plan,
        "num_clips": len(sample_N),
        "num_captions": num_captions(samples),
        "num_failed": len(failures),
        "shape": [len(sample_N), *shape],
        "files": {name: _size_and_checksum(out / name) for name in names},
    }
    publish_checked_json(out / RECORD, record)
    shutil.rmtree(out / PARTS)
    return record


def _read_outcomes(
    parts: Sequence[EmbeddingPart], out: Path
) -> tuple[NDArray[np.int64], list[dict[str, Any]], tuple[int, ...]]:
    """Return the indices of the decoded samples in ascending order, the failures, and the shape of one embedding."""
    sample_N: list[NDArray[np.int64]] = []
    failures: list[dict[str, Any]] = []
    shape: tuple[int, ...] = ()
    for part in parts:
        with np.load(part.path(out)) as arrays:
            sample_N.append(arrays["sample"])
            failures += json.loads(arrays["failed"].tobytes())
        if len(sample_N[-1]) and not shape:
            with np.load(part.path(out)) as arrays:
                shape = arrays["rows"].shape[1:]
    return np.concatenate(sample_N), failures, shape


def _join(out: Path, parts: Iterable[EmbeddingPart], path: Path, *, shape: tuple[int, ...]) -> None:
    """Write the rows of all parts into one npy file."""
    with publish_atomically(path) as temporary, temporary.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        npy_format.write_array_header_1_0(cast(BinaryIO, file), header)
        for part in parts:
            with np.load(part.path(out)) as arrays:
                file.write(np.ascontiguousarray(arrays["rows"], "<f4").data)


def _write_table(path: Path, tables: Iterable[pa.Table], *, schema: pa.Schema) -> None:
    with publish_atomically(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=_ROWS_PER_GROUP)


def _clip_tables(samples: Samples[ClipReader], sample_N: NDArray[np.int64]) -> Iterator[pa.Table]:
    paths = samples.reader.chunks.source_paths
    for begin in range(0, len(sample_N), _ROWS_PER_GROUP):
        rows = sample_N[begin : begin + _ROWS_PER_GROUP]
        texts: Any = pa.nulls(len(rows), pa.string())
        captions: Any = pa.nulls(len(rows), pa.int64())
        if samples.table.captions is not None:
            captions = samples.captions.rows.choice.first_entries(rows)
            texts = samples.captions.texts(captions)
        columns = [np.arange(begin, begin + len(rows)), *_location_columns(samples, rows, paths=paths), texts, captions]
        yield pa.table(columns, schema=CLIP_SCHEMA)


def _caption_tables(samples: Samples[ClipReader], row_of_sample: NDArray[np.int64]) -> Iterator[pa.Table]:
    clip_M, paths = samples.captions.rows.choice.clip_of_entry, samples.reader.chunks.source_paths
    for begin in range(0, len(clip_M), _ROWS_PER_GROUP):
        clips = clip_M[begin : begin + _ROWS_PER_GROUP]
        entries = np.arange(begin, begin + len(clips))
        rows = row_of_sample[clips]
        row = pa.array(rows, mask=rows < 0)
        locations = _location_columns(samples, clips, paths=paths)
        yield pa.table([entries, *locations, samples.captions.texts(entries), row], schema=CAPTION_SCHEMA)


def _location_columns(samples: Samples[ClipReader], rows: NDArray[np.int64], *, paths: pa.Array) -> list[Any]:
    """Return five columns: key, video, path, and start and end in seconds of each clip."""
    chunks, first_chunks = samples.reader.chunks, samples.table.first_part[rows]
    begin_us, end_us = samples.span_us(rows)
    video_row = pa.array(chunks.table.video_row[first_chunks])
    videos = chunks.video_ids.take(video_row).cast(pa.string())
    starts = chunks.table.start_ms[first_chunks].tolist()
    keys = [chunk_key(video, start) for video, start in zip(videos.to_pylist(), starts, strict=True)]
    return [keys, videos, paths.take(video_row), begin_us / 1e6, end_us / 1e6]


def _size_and_checksum(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size_bytes": path.stat().st_size, "sha256": file_digest(file, "sha256").hexdigest()}


_BATCHES_PER_PART = 4
_TEXTS_PER_PART = 4096


@dataclass(frozen=True, kw_only=True)
class EmbeddingWork:
    """The clips and captions to embed, and the model that embeds them.

    Attributes:
        samples: Clips, with their captions.
        features: Kind of features to store.
        has_text: True if captions are also embedded.
        batch: Number of clips per forward pass.
        plan: Everything that affects the embeddings, with descriptions, as a JSON-serialisable dict.
    """

    model: LoadedModel
    samples: Samples[ClipReader]
    features: FeatureKind
    has_text: bool
    batch: int
    plan: dict[str, Any]

    @property
    def parts(self) -> list[EmbeddingPart]:
        """All parts, ordered by row. A part with tokens holds only one batch of clips."""
        clips = self.batch * (1 if self.features == "tokens" else _BATCHES_PER_PART)
        return [
            *_parts("video", len(self.samples), size=clips),
            *(_parts("text", num_captions(self.samples), size=_TEXTS_PER_PART) if self.has_text else ()),
        ]


def _parts(kind: Literal["video", "text"], count: int, *, size: int) -> list[EmbeddingPart]:
    return [EmbeddingPart(kind, begin, min(begin + size, count)) for begin in range(0, count, size)]


def open_work(model: LoadedModel, request: EmbedRequest, *, weights: str) -> EmbeddingWork:
    """Open the clips to embed, and describe the work.

    Args:
        request: Flags of the command; `shards` must be set.
        weights: Weights as the user specified them.

    Raises:
        UserError: The data have no clips for the request, or the model cannot compute the requested features.
    """
    assert request.shards is not None
    has_embedding = isinstance(model.model, DualEncoder)
    features = request.features or ("embedding" if has_embedding else "pooled")
    settings = replace(model.settings, shards=request.shards, where=request.where)
    if settings.reads_latents:
        raise UserError(
            f"{weights} takes latents, but train embed reads pixels", hint="use weights trained with --input pixels"
        )
    if features == "embedding" and not has_embedding:
        raise UserError(
            f"{weights} is not a dual encoder, so it cannot compute embeddings",
            hint="use --features pooled or --features tokens",
        )
    samples = _open_samples(model, settings, request)
    return EmbeddingWork(
        model=model,
        samples=samples,
        features=features,
        has_text=features == "embedding" and model.has_text and samples.table.captions is not None,
        batch=request.batch,
        plan={
            "clipmill": installed_version("clipmill"),
            "weights": {
                "identity": model.identity,
                # A search may run in a different folder, so record an absolute path.
                "source": str(Path(weights).resolve()) if Path(weights).exists() else weights,
                "description": model.description,
            },
            "data": {
                "fingerprint": samples.fingerprint,
                "video_variant": samples.reader.chunks.variant_name,
                "split": request.split,
                "clips": request.clips,
                "shards": data_facts(request.shards, None)["shards"],
                "description": f"{samples.describe()}; {samples.variant_name}",
            },
            "clip": {
                **{name: getattr(settings, name) for name in ("num_frames", "sampling", "stride", "size_px", "decode")},
                "description": describe_clip(settings, samples),
            },
            "features": features,
            "batch": request.batch,
            "precision": model.opened.trained.precision.name,
        },
    )


def _open_samples(model: LoadedModel, settings: Any, request: EmbedRequest) -> Samples[ClipReader]:
    folder = open_folder(settings, reason="embeddings have a row for each clip of a data folder")
    loading = LoaderSettings(
        batch=request.batch,
        num_threads=request.workers,
        num_ahead=request.batch * settings.batches_ahead,
        seed=0,
        pin=model.device.type == "cuda",
    )
    query = clip_query(settings, folder, split=request.split, loading=loading)
    if request.clips == "chunks":
        return open_chunk_clips(query)
    try:
        return open_captioned_clips(query, captions=getattr(settings, "captions", ALL_CAPTIONS))
    except NoCaptions as error:
        error.add_hint("or embed complete chunks, which do not need captions: --clips chunks")
        raise


def embed(work: EmbeddingWork, out: Path, *, world: World, progress: Progress) -> dict[str, Any]:
    """Embed the missing parts in `out`, and publish the folder. All ranks must call this function.

    Returns:
        The content of embed.json.

    Raises:
        UserError: The folder contains files from other work, is damaged, or is being written by another process.
        FailedWork: No clip could be decoded, or an embedding is not finite.
    """
    with ExitStack() as stack:
        record = world.first(lambda: _prepare_folder(work, out, stack=stack))
        if record is not None:
            progress.say(f"nothing to do: {out} is finished")
            return record
        parts = work.parts
        progress.say(f"data: {work.plan['data']['description']}")
        progress.say(f"weights: {work.plan['weights']['description']}")
        unfinished_parts = missing_parts(parts, out, world=world, progress=progress)
        _embed_parts(work, unfinished_parts, out, world=world, progress=progress)
        return world.first(lambda: publish_folder(out, parts, work.samples, plan=work.plan))


def _prepare_folder(work: EmbeddingWork, out: Path, *, stack: ExitStack) -> dict[str, Any] | None:
    """Lock and prepare the folder; return the content of embed.json if the folder is finished."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file (--out)", hint="use another --out", flags=("--out",))
    plan = out / PARTS / PLAN
    record = read_folder_record(out)
    if record is None and not plan.is_file() and out.is_dir() and any(path.name != PARTS for path in out.iterdir()):
        raise UserError(f"{out} exists already", hint="use another --out")
    out.mkdir(parents=True, exist_ok=True)
    stack.enter_context(hold_folder(out, work="embeds"))
    if record is not None:
        require_same_work(record, work.plan, path=out)
        require_complete_files(out, record)
        shutil.rmtree(out / PARTS, ignore_errors=True)
        return record
    begin_parts(out / PARTS, work.plan, require_same=lambda old: require_same_work(old, work.plan, path=out))
    remove_temporaries(out)
    return None


def _embed_parts(
    work: EmbeddingWork, parts: Sequence[EmbeddingPart], out: Path, *, world: World, progress: Progress
) -> None:
    """Embed this rank's share of the parts. The loader's threads read ahead across part boundaries."""
    parts_of_rank = parts[world.rank :: world.size]
    clips = (part for part in parts_of_rank if part.kind == "video")
    outcomes = work.samples.outcomes(index for part in clips for index in range(part.begin, part.end))
    ring = BatchRing(work.batch, pin=work.model.device.type == "cuda")

    def embed_part(part: EmbeddingPart) -> int:
        if part.kind == "video":
            return _embed_clips(work, part, outcomes, ring, out=out)
        # Encode each distinct text of a part once, so that equal texts have equal rows.
        texts = work.samples.captions.texts(np.arange(part.begin, part.end))
        row_of_text = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        rows = work.model.encode_text(list(row_of_text)).cpu().numpy()
        embeddings: NDArray[np.float32] = rows[[row_of_text[text] for text in texts]]
        if not np.isfinite(embeddings).all():
            raise FailedWork("caption embeddings are not finite: the weights have diverged")
        publish_part(part.path(out), embeddings)
        return 0

    share_parts(parts, embed_part, world=world, progress=progress)


def _embed_clips(
    work: EmbeddingWork, part: EmbeddingPart, outcomes: Iterator[Sample | FailedSample], ring: BatchRing, *, out: Path
) -> int:
    """Embed and publish the clips of a part; return the number of clips that could not be read or decoded."""
    rows, samples, failures = [], [], []
    for begin in range(part.begin, part.end, work.batch):
        loaded = list(islice(outcomes, min(work.batch, part.end - begin)))
        failures += [sample for sample in loaded if isinstance(sample, FailedSample)]
        clips = [sample for sample in loaded if not isinstance(sample, FailedSample)]
        if clips:
            rows.append(_embed_batch(work, ring.collate(clips)))
            samples += [clip["position"] for clip in clips]
    video = np.concatenate(rows) if rows else np.empty((0, 0), np.float32)
    if num_bad := int((~np.isfinite(video).all(axis=tuple(range(1, video.ndim)))).sum()):
        raise FailedWork(f"{num_bad} of {len(video)} embeddings are not finite: the weights have diverged")
    text = json.dumps([asdict(failure) for failure in failures]).encode()
    publish_part(part.path(out), video, sample=np.array(samples, np.int64), failed=np.frombuffer(text, np.uint8))
    return len(failures)


@torch.no_grad()
def _embed_batch(work: EmbeddingWork, batch: Batch) -> NDArray[np.float32]:
    model = work.model
    if work.features == "pooled":
        with model.opened.trained.precision.autocast():
            features = model.opened.spec.features
            assert features is not None
            clips = features.inputs(model.opened.task)(to_device(batch, model.device))
            rows = tower_of(model.model).features(clips).float()
    else:
        rows = model.encode_video(batch, tokens=work.features == "tokens")
    return rows.cpu().numpy()
