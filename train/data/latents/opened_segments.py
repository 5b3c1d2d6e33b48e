"""What opening a set of latents computes: chunks, segments, and the captions or labels they have."""

import shlex
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_videos
from clipmill.shards.reader import Variant
from clipmill.train.data.caption_choice import CaptionChoice, Sources
from clipmill.train.data.chunks import evenly_of_each, videos_of_split
from clipmill.train.data.latents.captions import SegmentCaptions, pair_captions
from clipmill.train.data.latents.labels import SegmentLabels, label_segments
from clipmill.train.data.latents.segment_query import SegmentQuery
from clipmill.train.data.latents.segments import (
    DEFAULT_SEGMENT,
    FrameShape,
    LatentRecords,
    Segments,
    cut,
    frames_of,
    read_records,
    seconds_of,
)
from clipmill.train.data.mapped_tars import MappedTars
from clipmill.train.data.selection import ChunkRows, Selection
from clipmill.train.data.stored_text import TextMembers, TextRows, read_text_rows

# Segments alone, with embeddings that prep text has stored, or with the texts of captions.


@dataclass(frozen=True)
class OpenedSegments:
    """What opening a set computes.

    Attributes:
        kept: rows of the samples among the segments that are shown; None for all of them.
        where: the expression of --where as a part of a fingerprint.
        remarks: how much it selects.
    """

    video_ids: pa.Array
    records: LatentRecords
    segments: Segments
    text: TextMembers | None
    captions: SegmentCaptions | None
    labels: SegmentLabels | None
    kept: NDArray[np.int64] | None
    where: str
    remarks: list[str]


OPENED_TYPES = (
    OpenedSegments,
    LatentRecords,
    FrameShape,
    Segments,
    TextMembers,
    SegmentCaptions,
    CaptionChoice,
    Sources,
    SegmentLabels,
)


def open_segment_set(
    query: SegmentQuery,
    *,
    latents: Variant,
    text_variant: Variant | None,
    tars: MappedTars,
    depends_on: tuple[object, ...],
) -> OpenedSegments:
    """Find the samples of a split.

    Args:
        tars: those of `latents` and then of `text_variant`.
        depends_on: what the result depends on (clipmill.train.data.node_cache).

    Raises:
        UserError: there is nothing to show, the columns do not belong together, or a file is damaged.
    """
    data_dir, split, segment, classes = query.data_dir, query.split, query.segment, query.classes
    tars.require_files()
    video_ids = videos_of_split(data_dir, split)
    num_latents = latents.num_shards
    records = read_records(
        latents,
        starts=tars.starts[:num_latents],
        video_ids=video_ids,
        known_ids=read_videos(data_dir)["video_id"].combine_chunks(),
    )
    if records is None:
        raise _nothing_of(latents, data_dir, video_ids, split=split)
    selection = Selection(
        query.where,
        data_dir,
        split=split,
        chunks=ChunkRows(video_ids, records.video_row, records.start_ms),
        has_captions=query.captions != "none" or bool(classes),
        depends_on=depends_on,
    )
    records = records if selection.chunks is None else records.take(selection.rows)
    num_frames = frames_of(segment, records.shape)
    _check_crops(latents, records.shape, segment=segment, num_frames=num_frames)
    segments = cut(records, num_frames=num_frames, tails=query.tails)
    text: TextMembers | None = None
    its_captions: SegmentCaptions | None = None
    if query.captions != "none":
        rows: TextRows | None = None
        if text_variant is not None:
            if not text_variant.num_shards:
                raise _nothing_of(text_variant, data_dir, video_ids, split=split)
            text, rows = read_text_rows(text_variant, starts=tars.starts[num_latents:], video_ids=video_ids)
            if not (text.video_row >= 0).any():
                raise _nothing_of(text_variant, data_dir, video_ids, split=split)
        its_captions = pair_captions(
            data_dir,
            split=split,
            records=records,
            segments=segments,
            text=rows,
            video_ids=video_ids,
            wanted_sources=query.sources,
            selection=selection,
        )
    labels: SegmentLabels | None = None
    if classes:
        labels = label_segments(
            data_dir,
            records=records,
            segments=segments,
            video_ids=video_ids,
            classes=classes,
            selection=selection,
        )
    shown = None if labels is None else labels.segment
    shown = its_captions.segment if its_captions is not None else shown
    kept: NDArray[np.int64] | None = None
    if query.max_segments is not None:
        numbers = np.arange(len(segments)) if shown is None else shown.astype(np.int64)
        videos = records.video_row[segments.chunk_of(numbers)].astype(np.int64)
        kept = evenly_of_each(videos, at_most=query.max_segments)
    return OpenedSegments(
        video_ids, records, segments, text, its_captions, labels, kept, selection.text, selection.remarks()
    )


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
