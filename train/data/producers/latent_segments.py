"""Segments of the latents of a split, with the captions or labels that they have, or alone."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.data_location import resolved_folder
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted
from clipmill.manifests.store import num_captions_of, read_videos
from clipmill.shards.columns import LATENTS, TEXT, VIDEO
from clipmill.shards.dataset import current_variant
from clipmill.shards.merged_table import merged_mark
from clipmill.shards.reader import Variant
from clipmill.train.config.clips import LatentSettings
from clipmill.train.config.shards import names_tars
from clipmill.train.data.caption_choice import CaptionTexts, smallest
from clipmill.train.data.chunks import evenly_of_each, manifest_mark, videos_of_split
from clipmill.train.data.latents.captions import pair_captions
from clipmill.train.data.latents.labels import label_segments
from clipmill.train.data.latents.reader import LatentCaptions, LatentReader
from clipmill.train.data.latents.segment_query import Captions, SegmentQuery
from clipmill.train.data.latents.segments import (
    DEFAULT_SEGMENT,
    FrameShape,
    LatentRecords,
    LatentSegments,
    StoredLatents,
    cut,
    frames_of,
    read_records,
    seconds_of,
)
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.mapped_tars import MappedTars
from clipmill.train.data.node_cache import shared
from clipmill.train.data.query import LATENT_PATCH, DataQuery
from clipmill.train.data.remote_maps import open_maps
from clipmill.train.data.samples import Samples, Source
from clipmill.train.data.selection import ChunkRows, Selection, selection_mark
from clipmill.train.data.stored_text import TextMembers, TextRows, encoder_of, read_text_rows, require_embeddings
from clipmill.train.data.table import RowCaptions, SampleTable, open_fingerprint, open_table

if TYPE_CHECKING:
    from clipmill.train.models.text import Tokenize


def open_latent_segments(
    query: SegmentQuery, *, tokenize: "Tokenize | None" = None, needs_embeddings: bool = False
) -> Samples[LatentReader]:
    """Open the segments of latents of a split, for one rank.

    A sample is a segment of a chunk's latents with one of the captions that overlap it: in training one drawn by a pure
    function of (seed, position), in evaluation the one with the lowest id. clipmill.train.data.batch documents the
    batches.

    Every array is verified against its checksum when it is first needed, so that only the first epoch takes longer. An
    array that does not match is a failed sample (clipmill.train.data.outcomes).

    Memory: 40 bytes per chunk and 8 per segment; with text also 4 per segment with captions, 12 per caption and 4 per
    pair of segment and caption.

    Args:
        tokenize: Makes tokens of captions that are words; without it, batches have ids of captions alone.
        needs_embeddings: Refuse stored texts that are sequences.

    Raises:
        UserError: there is nothing to show, the columns do not belong together, or a tar is missing or truncated.
    """
    data_dir, tars, has_text = query.data_dir, query.tars, query.captions == "stored"
    if not resolved_folder(data_dir).is_dir():
        raise UserError(f"there is no data folder {data_dir}", hint="name one that prep made")
    if tars is not None:
        for column in (LATENTS, TEXT) if has_text else (LATENTS,):
            tars.files.copy_column(column)
    latents = Variant.open(data_dir, column=LATENTS, tars=tars).whole()
    text = Variant.open(data_dir, column=TEXT, tars=tars).whole() if has_text else None
    if text is not None and needs_embeddings:
        require_embeddings(text, data_dir)
    variants = [latents] if text is None else [latents, text]
    maps = open_maps(variants, tars, whole=text)
    marks = [merged_mark(variant.directory, variant.commits) for variant in variants]
    of_split = (query.split, *manifest_mark(data_dir))
    stored = shared(
        lambda: _read_latents(latents, data_dir, split=query.split, maps=maps),
        of=(LATENTS, *of_split, marks[0]),
        num_rows=latents.num_samples,
        types=(StoredLatents, LatentRecords, FrameShape),
        column="latents",
    )
    members, text_rows = (
        (None, None)
        if text is None
        else _read_text(text, stored, maps, data_dir=data_dir, split=query.split, depends_on=(*of_split, *marks))
    )
    records = stored.records
    num_frames = frames_of(query.segment, records.shape)
    _check_crops(latents, records.shape, segment=query.segment, num_frames=num_frames)
    selection = Selection(
        query.where,
        data_dir,
        split=query.split,
        chunks=ChunkRows(stored.video_ids, records.video_row, records.start_ms),
        has_captions=query.captions != "none" or bool(query.classes),
        depends_on=(*of_split, marks[0]),
    )
    settings = (query.captions, query.tails, query.sources, [its.as_json() for its in query.classes])
    where = selection_mark(query.where, data_dir, tars=tars)
    depends_on = (*of_split, *marks, num_frames, *settings, query.max_segments, *where)
    num_rows = latents.num_samples
    if query.captions != "none" or query.classes:
        num_rows += num_captions_of(data_dir)
    table = open_table(
        "segments",
        lambda: _make_table(query, stored, selection, text_rows, num_frames=num_frames),
        depends_on=depends_on,
        num_rows=num_rows,
    )
    maps.want(records.array_place[np.unique(table.first_part)])
    captions = (
        None
        if table.captions is None
        else LatentCaptions(table.captions, partial(CaptionTexts, data_dir), tokenize=tokenize)
    )
    # Arrow would keep the memory that reading indexes and captions took.
    pa.default_memory_pool().release_unused()
    names = [variant.directory.name for variant in variants]

    def identify_chunks() -> list[NDArray[Any]]:
        ids = np.frombuffer("\n".join(stored.video_ids.to_pylist()).encode(), np.uint8)
        return [ids, records.video_row[table.first_part], records.start_ms[table.first_part]]

    has_segments = bool((records.num_frames >= num_frames).any())
    source = Source(
        split=query.split,
        variant_name=" and ".join(names),
        fingerprint=partial(
            open_fingerprint,
            table,
            (*names, selection.text, num_frames, *settings),
            identify_chunks,
            depends_on=depends_on,
            num_rows=num_rows,
        ),
        nothing=(
            f"no segment of split {query.split!r} can be shown",
            "labels of captions come from prep manifest"
            if query.classes and has_segments
            else "use a shorter segment" + (", or data with captions" if query.captions != "none" else ""),
        ),
        alike=_alike(latents, records.shape, text),
        frame_shape=records.shape,
        text_width=None if members is None else members.width,
    )
    segments = LatentSegments(
        records=records,
        video_ids=stored.video_ids,
        maps=maps,
        text=members,
        num_frames=num_frames,
        has_tails=query.tails == "pad",
        made_of=_other_video_variant(latents, data_dir),
    )
    import torch

    loading = replace(query.loading, pin=not query.loading.can_keep and torch.cuda.is_available())
    return Samples(table, LatentReader(segments, table, captions), source, loading, captions=captions)


def open_captions(query: DataQuery) -> Samples[LatentReader]:
    """Open segments with captions; raises UserError like `open_frames`, or if there are no captions."""
    shown: Captions = "stored" if query.has_stored_text else "words"
    segments = replace(_query(query), captions=shown, sources=query.captions.sources)
    return _require_fitting(query, open_latent_segments(segments, tokenize=query.tokenize, needs_embeddings=True))


def open_labels(query: DataQuery) -> Samples[LatentReader]:
    """Open segments with labels; raises UserError like `open_frames`, or if there are no labels."""
    segments = replace(_query(query), captions="none", classes=tuple(query.classes))
    return _require_fitting(query, open_latent_segments(segments))


def open_frames(query: DataQuery) -> Samples[LatentReader]:
    """Open segments alone.

    Raises:
        UserError: there are none, they are not on this machine, or they do not fit the settings.
    """
    return _require_fitting(query, open_latent_segments(replace(_query(query), captions="none")))


def _query(query: DataQuery) -> SegmentQuery:
    settings, loading, views = query.settings, query.loading, query.views
    assert isinstance(settings, LatentSettings)
    if len(views) > 1:
        raise UserError(
            f"{views.num_clips} clips x {views.num_crops} crops apply to frames in pixels, not to latents",
            hint="leave --clips and --crops out with --input latents",
        )
    if names_tars(settings.folder):
        raise UserError(
            f"--input latents cannot be read from {settings.folder}: latents need the index of their tars",
            hint="name the data folder that prep made",
        )
    folder = query.open_folder(column=LATENTS)
    return SegmentQuery(
        folder.path,
        split=query.split,
        segment=settings.segment,
        # Reading takes no decoding threads and no groups.
        loading=LoaderSettings(batch=loading.batch, seed=loading.seed, rank=loading.rank, num_ranks=loading.num_ranks),
        max_segments=None if query.has_all_segments or query.split != settings.split else settings.max_segments,
        where=settings.selection,
        tars=folder.tars,
    )


def _require_fitting(query: DataQuery, samples: Samples[LatentReader]) -> Samples[LatentReader]:
    settings, shape, reader = query.settings, samples.frame_shape, samples.reader
    if settings.num_frames > reader.num_frames:
        raise UserError(
            f"--num-frames {settings.num_frames}: a segment of {reader.segment_s:g}s has {reader.num_frames} frames",
            hint=f"use --num-frames {reader.num_frames} or fewer, or a longer --segment",
        )
    if shape.height != shape.width or shape.height % LATENT_PATCH:
        raise UserError(
            f"latents of {shape.height} x {shape.width} cannot be cut into squares of {LATENT_PATCH}",
            hint=f"make them with a --size that gives an even side: {samples.variant_name}",
        )
    return samples


def _read_latents(latents: Variant, data_dir: Path, *, split: str, maps: MappedTars) -> StoredLatents:
    maps.require_files()
    video_ids = videos_of_split(data_dir, split)
    records = read_records(
        latents,
        starts=maps.starts[: latents.num_shards],
        video_ids=video_ids,
        known_ids=read_videos(data_dir)["video_id"].combine_chunks(),
    )
    if records is None:
        raise _nothing_of(latents, data_dir, video_ids, split=split)
    return StoredLatents(video_ids, records)


def _read_text(
    text: Variant, stored: StoredLatents, maps: MappedTars, *, data_dir: Path, split: str, depends_on: Sequence[object]
) -> tuple[TextMembers, TextRows]:
    """The members and rows of stored texts, whose tars follow those of the latents in `maps`."""

    def read() -> tuple[TextMembers, TextRows]:
        if not text.num_shards:
            raise _nothing_of(text, data_dir, stored.video_ids, split=split)
        starts = maps.starts[len(maps.starts) - text.num_shards :]
        members, rows = read_text_rows(text, starts=starts, video_ids=stored.video_ids)
        if not (members.video_row >= 0).any():
            raise _nothing_of(text, data_dir, stored.video_ids, split=split)
        return members, rows

    return shared(
        read,
        of=("text of latents", *depends_on),
        num_rows=text.num_samples + num_captions_of(data_dir),
        types=(TextMembers, TextRows),
        column=TEXT,
    )


def _make_table(
    query: SegmentQuery, stored: StoredLatents, selection: Selection, text: TextRows | None, *, num_frames: int
) -> SampleTable:
    """The segments of the chunks that are selected, with their captions or labels."""
    chunks = None if selection.chunks is None else selection.rows
    records = stored.records if chunks is None else stored.records.take(chunks)
    segments = cut(records, num_frames=num_frames, tails=query.tails)
    num_left_out = 0

    def keep(shown: NDArray[np.int64]) -> NDArray[np.int64]:
        nonlocal num_left_out
        if query.max_segments is None:
            return shown
        videos = records.video_row[segments.chunk_of(shown)].astype(np.int64)
        kept = shown[evenly_of_each(videos, at_most=query.max_segments)]
        num_left_out = len(shown) - len(kept)
        return kept

    captions: RowCaptions | None = None
    label: NDArray[np.int64] | None = None
    remarks: list[str] = []
    if query.captions != "none":
        segment, captions, remarks = pair_captions(
            query.data_dir,
            split=query.split,
            records=records,
            segments=segments,
            text=text,
            video_ids=stored.video_ids,
            wanted_sources=query.sources,
            selection=selection,
            keep=keep,
        )
    elif query.classes:
        shown, label_NL, remarks = label_segments(
            query.data_dir,
            records=records,
            segments=segments,
            video_ids=stored.video_ids,
            classes=query.classes,
            selection=selection,
        )
        segment = keep(shown)
        label = label_NL[np.searchsorted(shown, segment)]
    else:
        segment = keep(np.arange(len(segments)))
    chunk = segments.chunk_of(segment)
    frame = ((segment - segments.first[chunk]) * num_frames).astype(np.int32)
    described = [
        f"{counted(len(segment), 'segment')} of {counted(num_frames, 'frame')} ({records.shape}) "
        f"in {counted(len(records), 'chunk')} of split {query.split!r}"
    ]
    if records.num_unknown:
        described.append(f"{counted(records.num_unknown, 'chunk')} of videos that the manifest does not name left out")
    if segments.num_tails:
        done = "left out" if query.tails == "drop" else "padded with zeros"
        described.append(f"{counted(segments.num_tails, 'shorter tail')} {done}")
    if num_left_out:
        remarks.append(f"{counted(num_left_out, 'further segment')} of long videos left out")
    return SampleTable(
        first_part=smallest(chunk if chunks is None else chunks[chunk]),
        frame=frame,
        captions=captions,
        label=label,
        remarks=(*described, *remarks, *selection.remarks()),
    )


def _alike(latents: Variant, shape: FrameShape, text: Variant | None) -> dict[str, str]:
    """Shape and VAE of the latents, and the encoder of stored embeddings, which all folders of a mixture share."""
    recipe = latents.recipe
    name, weights = recipe.get("vae"), str(recipe.get("vae_sha256"))[:8]
    scaled = f"(x - {recipe.get('shift_factor') or 0}) * {recipe.get('scaling_factor')}"
    alike = {"latents": str(shape), "VAE": f"{name} {weights}, scaled as {scaled}"}
    return alike if text is None else {**alike, "text embeddings": encoder_of(text)}


def _other_video_variant(latents: Variant, data_dir: Path) -> str:
    made_of, current = latents.recipe.get(VIDEO), current_variant(data_dir, VIDEO)
    if made_of is None or current is None or made_of == current:
        return ""
    return f"made of the chunks of {made_of}, and {current} is the current variant"


def _nothing_of(variant: Variant, data_dir: Path, video_ids: pa.Array, *, split: str) -> UserError:
    shards = variant.shards()
    there = pc.unique(shards[0].index["video_id"])[:3].to_pylist() if shards else []
    column = variant.directory.parent.name
    return UserError(
        f"{variant.directory} has no {column} of any video of split {split!r}: "
        f"the manifest names {', '.join(map(repr, video_ids[:3].to_pylist()))}, "
        f"the column {', '.join(map(repr, there)) or 'nothing'}",
        hint=f"run prep {column} --data {shlex.quote(str(data_dir))}, unless the column is of another dataset",
    )


def _check_crops(latents: Variant, shape: FrameShape, *, segment: str | None, num_frames: int) -> None:
    recipe = latents.recipe
    if recipe.get("crop") not in ("random", "exact") or shape.segment_frames:
        return
    made = str(recipe.get("segment"))
    made_frames = Fraction(made[:-1]) if made.endswith("f") else seconds_of(made) * shape.fps
    if (made_frames / num_frames).denominator != 1:
        raise UserError(
            f"segments of {segment or DEFAULT_SEGMENT} would show two crops: {latents.directory} has a new one every"
            f" {made}",
            hint=f"use segment={made!r} or a whole part of it, or latents with --crop centre",
        )
