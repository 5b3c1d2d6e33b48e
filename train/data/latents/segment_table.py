"""The table of segments of latents: which chunks have latents, and which segments have captions or labels."""

import shlex
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import CaptionSpans
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import num_captions_of, read_videos
from clipmill.shards.columns import TEXT
from clipmill.shards.reader import Variant
from clipmill.train.data.caption_choice import smallest_integers
from clipmill.train.data.chunks import evenly_of_each, require_same_manifest, videos_of_split
from clipmill.train.data.latents.captions import pair_captions
from clipmill.train.data.latents.labels import label_segments
from clipmill.train.data.latents.segment_query import SegmentQuery
from clipmill.train.data.latents.segments import (
    DEFAULT_SEGMENT,
    FrameShape,
    StoredLatents,
    cut,
    read_records,
    seconds_of,
)
from clipmill.train.data.mapped_tars import MappedTars
from clipmill.train.data.node_cache import open_shared
from clipmill.train.data.selection import Selection
from clipmill.train.data.stored_text import TextMembers, TextRows, read_text_rows
from clipmill.train.data.table import RowCaptions, SampleTable


def read_latents(latents: Variant, data_dir: Path, *, split: str, maps: MappedTars) -> StoredLatents:
    """Read which chunks of a split have latents.

    Args:
        maps: Tars of the latents, perhaps followed by others.

    Raises:
        UserError: there are none, or a file is damaged.
    """
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


def read_text(
    text: Variant, stored: StoredLatents, maps: MappedTars, *, data_dir: Path, split: str, depends_on: Sequence[object]
) -> tuple[TextMembers, TextRows]:
    """The members and rows of stored texts, whose tars follow the tars of the latents in `maps`."""

    def read() -> tuple[TextMembers, TextRows]:
        if not text.num_shards:
            raise _nothing_of(text, data_dir, stored.video_ids, split=split)
        starts = maps.starts[len(maps.starts) - text.num_shards :]
        members, rows = read_text_rows(text, starts=starts, video_ids=stored.video_ids)
        if not (members.video_row >= 0).any():
            raise _nothing_of(text, data_dir, stored.video_ids, split=split)
        return members, rows

    return open_shared(
        read,
        of=("text of latents", *depends_on),
        num_rows=text.num_samples + num_captions_of(data_dir),
        types=(TextMembers, TextRows),
        column=TEXT,
    )


def make_segment_table(
    query: SegmentQuery,
    stored: StoredLatents,
    selection: Selection,
    stored_captions: CaptionSpans | None,
    text: TextRows | None,
    *,
    num_frames: int,
    manifest: tuple[object, ...],
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
    if stored_captions is not None:
        selected = selection.of_captions()
        require_same_manifest(query.data_dir, manifest)  # from which both rows and selected rows are read
        segment, captions, remarks = pair_captions(
            query,
            stored_captions,
            records=records,
            segments=segments,
            text=text,
            video_ids=stored.video_ids,
            selected=selected,
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
    require_same_manifest(query.data_dir, manifest)
    chunk = segments.chunk_of(segment)
    frame = ((segment - segments.first[chunk]) * num_frames).astype(np.int32)
    described = [
        f"{count_noun(len(segment), 'segment')} of {count_noun(num_frames, 'frame')} ({records.shape}) "
        f"in {count_noun(len(records), 'chunk')} of split {query.split!r}"
    ]
    if records.num_unknown:
        described.append(
            f"{count_noun(records.num_unknown, 'chunk')} of videos that the manifest does not name left out"
        )
    if segments.num_tails:
        done = "left out" if query.tails == "drop" else "padded with zeros"
        described.append(f"{count_noun(segments.num_tails, 'shorter tail')} {done}")
    if num_left_out:
        remarks.append(f"{count_noun(num_left_out, 'further segment')} of long videos left out")
    return SampleTable(
        first_part=smallest_integers(chunk if chunks is None else chunks[chunk]),
        frame=frame,
        captions=captions,
        label=label,
        remarks=(*described, *remarks, *selection.remarks()),
    )


def _nothing_of(variant: Variant, data_dir: Path, video_ids: pa.Array, *, split: str) -> UserError:
    shards = variant.shards()
    videos = pc.unique(shards[0].index["video_id"])[:3].to_pylist() if shards else []
    column = variant.directory.parent.name
    return UserError(
        f"{variant.directory} has no {column} of any video of split {split!r}: "
        f"the manifest names {', '.join(map(repr, video_ids[:3].to_pylist()))}, "
        f"the column {', '.join(map(repr, videos)) or 'nothing'}",
        hint=f"run prep {column} --data {shlex.quote(str(data_dir))}, unless the column is of another dataset",
    )


def require_whole_crops(latents: Variant, shape: FrameShape, *, segment: str | None, num_frames: int) -> None:
    """Raise a UserError if segments would show two crops of latents with random crops."""
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
