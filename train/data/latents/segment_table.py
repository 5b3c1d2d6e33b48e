"""Tables of latent segments: the chunks that have latents, and the captions or labels of their segments."""

import hashlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import CaptionSpans
from clipmill.manifests.divided_videos import DividedVideos, find_split_videos, is_in_splits
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import num_captions_of, read_captions, read_videos
from clipmill.shards.columns import TEXT
from clipmill.shards.reader import Variant
from clipmill.train.data.caption_rows import SplitCaptions, captions_of_split, digest_used_texts
from clipmill.train.data.captions import RowCaptions, choice_from_entries, same_text, smallest_integers
from clipmill.train.data.chunks import require_same_manifest
from clipmill.train.data.classes import ClassList, labelled_rows
from clipmill.train.data.data_folder import Selection, rows_of
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.data.latents.segments import (
    DEFAULT_SEGMENT,
    FrameShape,
    LatentRecords,
    SegmentQuery,
    Segments,
    StoredLatents,
    divide,
    read_records,
    seconds_of,
    times_us,
)
from clipmill.train.data.mapped_tars import MappedTars
from clipmill.train.data.node_cache import open_shared
from clipmill.train.data.samples import SampleTable
from clipmill.train.data.stored_text import TextMembers, TextRows, read_text_rows


def read_latents(latents: Variant, data_dir: Path, *, split: str, maps: MappedTars) -> StoredLatents:
    """Return the chunks of a split that have latents.

    Args:
        latents: Variant of the latents.
        maps: Maps of the tars of the latents, possibly followed by other tars.

    Raises:
        UserError: There are no latents, or a file is damaged.
    """
    maps.require_files()
    video_ids, divided = find_split_videos(data_dir, split)
    records = read_records(
        latents,
        starts=maps.starts[: latents.num_shards],
        video_ids=video_ids,
        known_ids=read_videos(data_dir)["video_id"].combine_chunks(),
    )
    if records is None:
        raise _missing_data_error(latents, data_dir, video_ids, split=split)
    return StoredLatents(video_ids, records, divided)


def read_text(
    text: Variant, stored: StoredLatents, maps: MappedTars, *, data_dir: Path, split: str, depends_on: Sequence[object]
) -> tuple[TextMembers, TextRows]:
    """Return the members that contain stored texts, and the location of each caption's embedding.

    Args:
        text: Variant of the texts.
        maps: Maps of the tars of the latents, followed by the tars of the texts.
        depends_on: Values that identify everything that affects the result (clipmill.train.data.node_cache).
    """

    def read() -> tuple[TextMembers, TextRows]:
        if not text.num_shards:
            raise _missing_data_error(text, data_dir, stored.video_ids, split=split)
        starts = maps.starts[len(maps.starts) - text.num_shards :]
        members, rows = read_text_rows(text, starts=starts, video_ids=stored.video_ids)
        if not (members.video_row >= 0).any():
            raise _missing_data_error(text, data_dir, stored.video_ids, split=split)
        return members, rows

    return open_shared(
        read,
        depends_on=("text of latents", *depends_on),
        num_rows=text.num_samples + num_captions_of(data_dir),
        types=(TextMembers, TextRows),
        prefix=TEXT,
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
    """Return the table of the segments of the selected chunks, with their captions or labels.

    Args:
        stored_captions: Captions of the manifest; None for segments without captions.
        text: Stored embeddings of the captions; None for captions without embeddings.
        num_frames: Number of frames of a segment.
        manifest: Mark of the manifest when it was opened (`clipmill.train.data.chunks.manifest_mark`).
    """
    chunks = None if selection.chunks is None else selection.rows
    records = stored.records if chunks is None else stored.records.take(chunks)
    segments = divide(records, num_frames=num_frames, tails=query.tails)
    num_left_out, split_remark = 0, None

    def keep(candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        nonlocal num_left_out, split_remark
        if stored.divided is not None:
            candidates, split_remark = _remove_other_splits(
                candidates, records, segments, stored.divided, split=query.split
            )
        if query.max_segments is None:
            return candidates
        videos = records.video_row[segments.chunk_of(candidates)].astype(np.int64)
        segment = candidates[_spread_over_videos(videos, max_per_video=query.max_segments)]
        num_left_out = len(candidates) - len(segment)
        return segment

    captions: RowCaptions | None = None
    label: NDArray[np.int64] | None = None
    remarks: list[str] = []
    if stored_captions is not None:
        is_selected = selection.select_captions()
        require_same_manifest(query.data_dir, manifest)  # all rows must refer to the same manifest
        segment, captions, remarks = pair_captions(
            query,
            stored_captions,
            records=records,
            segments=segments,
            text=text,
            video_ids=stored.video_ids,
            is_selected=is_selected,
            keep=keep,
        )
    elif query.classes:
        labelled_segment, label_NL, remarks = label_segments(
            query.data_dir,
            records=records,
            segments=segments,
            video_ids=stored.video_ids,
            split=query.split,
            classes=query.classes,
            selection=selection,
        )
        segment = keep(labelled_segment)
        label = label_NL[np.searchsorted(labelled_segment, segment)]
    else:
        segment = keep(np.arange(len(segments)))
    require_same_manifest(query.data_dir, manifest)
    chunk = segments.chunk_of(segment)
    frame = ((segment - segments.first_segment[chunk]) * num_frames).astype(np.int32)
    remarks_on_segments = [
        f"{count_noun(len(segment), 'segment')} of {count_noun(num_frames, 'frame')} ({records.shape}) "
        f"in {count_noun(len(records), 'chunk')} of split {query.split!r}"
    ]
    if records.num_unknown:
        remarks_on_segments.append(
            f"{count_noun(records.num_unknown, 'chunk')} of videos that are not in the manifest left out"
        )
    if segments.num_tails:
        treatment = "left out" if query.tails == "drop" else "padded with zeros"
        remarks_on_segments.append(f"{count_noun(segments.num_tails, 'shorter tail')} {treatment}")
    if split_remark:
        remarks.append(split_remark)
    if num_left_out:
        remarks.append(f"{count_noun(num_left_out, 'further segment')} of long videos left out")
    return SampleTable(
        first_part=smallest_integers(chunk if chunks is None else chunks[chunk]),
        frame=frame,
        captions=captions,
        label=label,
        remarks=(*remarks_on_segments, *remarks, *selection.remarks()),
    )


def _spread_over_videos(videos: NDArray[np.int64], *, max_per_video: int) -> NDArray[np.int64]:
    """Return the rows of up to `max_per_video` evenly spaced samples of each video.

    Args:
        videos: Index of each sample's video, ascending.
    """
    _, first, count = np.unique(videos, return_index=True, return_counts=True)
    count, index = np.repeat(count, count), np.arange(len(videos)) - np.repeat(first, count)
    num_taken = np.minimum(count, max_per_video)
    return np.flatnonzero((index + 1) * num_taken // count > index * num_taken // count)


def _remove_other_splits(
    segment: NDArray[np.int64], records: LatentRecords, segments: Segments, divided: DividedVideos, *, split: str
) -> tuple[NDArray[np.int64], str | None]:
    """Return the segments that do not overlap other splits, and a remark on the omitted segments or None."""
    chunk = segments.chunk_of(segment)
    begin_us, end_us = times_us(records, segments, segment)
    is_kept = divided.is_entirely_in(split, video=records.video_row[chunk], begin_us=begin_us, end_us=end_us)
    if is_kept.all():
        return segment, None
    num_lost, num_chunks = int((~is_kept).sum()), len(np.unique(chunk[~is_kept]))
    seconds = float((end_us - begin_us)[~is_kept].sum()) / US_PER_S
    omitted = f"{count_noun(num_lost, 'segment')} ({seconds:,.1f} s of {count_noun(num_chunks, 'chunk')})"
    return segment[is_kept], f"{omitted} left out, because they overlap other splits"


def _missing_data_error(variant: Variant, data_dir: Path, video_ids: pa.Array, *, split: str) -> UserError:
    shards = variant.shards()
    videos = pc.unique(shards[0].index["video_id"])[:3].to_pylist() if shards else []
    column = variant.directory.parent.name
    content = f"contains {', '.join(map(repr, videos))}" if videos else "is empty"
    return UserError(
        f"{variant.directory} has no {column} for any video of split {split!r}: the manifest lists "
        f"{', '.join(map(repr, video_ids[:3].to_pylist()))}, but the column {content}",
        hint=f"run prep {column} --data {shlex.quote(str(data_dir))}, unless the column belongs to another dataset",
    )


def require_uniform_crops(latents: Variant, shape: FrameShape, *, segment: str | None, num_frames: int) -> None:
    """Raise a UserError if the latents have random crops and a segment could contain two different crops."""
    recipe = latents.recipe
    if recipe.get("crop") not in ("random", "exact") or shape.segment_frames:
        return
    crop_segment = str(recipe.get("segment"))
    crop_frames = Fraction(crop_segment[:-1]) if crop_segment.endswith("f") else seconds_of(crop_segment) * shape.fps
    if (crop_frames / num_frames).denominator != 1:
        raise UserError(
            f"segments of {segment or DEFAULT_SEGMENT} would show two crops: in {latents.directory}, the crop changes "
            f"every {crop_segment}",
            hint=f"use segment={crop_segment!r}, a length that divides it, or latents with --crop centre",
        )


_BLOCK = 1 << 16  # number of pairs that are processed at a time


def pair_captions(
    query: SegmentQuery,
    stored: CaptionSpans,
    *,
    records: LatentRecords,
    segments: Segments,
    text: TextRows | None,
    video_ids: pa.Array,
    is_selected: NDArray[np.bool_] | None,
    keep: Callable[[NDArray[np.int64]], NDArray[np.int64]],
) -> tuple[NDArray[np.int64], RowCaptions, list[str]]:
    """Find the segments that each caption of a split overlaps.

    The captions of a segment are all captions of its video that overlap the segment. The result takes 4 bytes per pair
    of a segment and a caption, 8 to 24 bytes per caption, and 12 bytes per segment. If the captions of a segment come
    from several sources, the result takes another 12 bytes per segment and source.

    Args:
        stored: Captions of the manifest.
        text: Stored embeddings; captions without an embedding are omitted. None to use all captions.
        video_ids: IDs of the videos of the split.
        is_selected: Mask of the selected captions; None for all.
        keep: Function that takes the segments with captions, ascending, and returns the segments to use.

    Returns:
        segments: Segments to use, ascending.
        captions: Captions of these segments, grouped by segment and source, with ascending IDs.
        remarks: Remarks for the log.

    Raises:
        UserError: A caption belongs to different videos in the text column and in the manifest, a source is missing, or
            no caption is selected.
    """
    stored.verify()
    split_captions = captions_of_split(
        stored, query.data_dir, split=query.split, video_ids=video_ids, weights=query.sources
    )
    segment_spans = SegmentSpans(records, segments)
    empty = np.empty(0, np.int64)
    parts: list[dict[str, NDArray[Any]]] = [
        dict.fromkeys(("id", "row", "place", "tokens", "rank", "first", "last"), empty)
    ]
    num_embedded = num_selected = 0
    for block in stored.blocks(split_captions.videos):
        video_row = block.video.astype(np.int64)
        overlaps = segment_spans.overlaps(video_row=video_row, begin_s=block.begin_s, end_s=block.end_s)
        video_row, first, last = (np.repeat(array, block.counts) for array in (video_row, *overlaps))
        rank = split_captions.rank_of_code[block.source]
        place, tokens = np.empty(0, np.int64), np.empty(0, np.int32)
        is_used = rank >= 0
        if text is not None:
            row_of_text = text.find(block.caption_id, video_row=video_row, video_ids=video_ids)
            is_used &= row_of_text >= 0
        num_embedded += int(is_used.sum())
        if is_selected is not None:
            is_used &= is_selected[block.row]
        num_selected += int(is_used.sum())
        is_used &= last > first
        if text is not None:
            place = text.place[row_of_text[is_used]]
            tokens = tokens if text.num_tokens is None else text.num_tokens[row_of_text[is_used]]
        part: dict[str, NDArray[Any]] = {
            "id": block.caption_id,
            "row": block.row,
            "rank": rank,
            "first": first,
            "last": last,
        }
        parts.append({"place": place, "tokens": tokens, **{name: array[is_used] for name, array in part.items()}})
    arrays = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    # Sort captions by source and ID, so that ascending indices are also ascending IDs within each source.
    order = np.lexsort((arrays["id"], arrays["rank"]))
    rank, text_row = arrays["rank"][order], arrays["row"][order].astype(np.int32)
    counts, pair_caption = _pairs(arrays["first"][order], arrays["last"][order], num_segments=len(segments))
    captioned_segment = np.flatnonzero(counts)
    segment = keep(captioned_segment)
    if len(segment) < len(captioned_segment):
        is_kept = np.zeros(len(segments), bool)
        is_kept[segment] = True
        pair_caption = pair_caption[np.repeat(is_kept, counts)]
    choice = choice_from_entries(
        np.repeat(np.arange(len(segment)), counts[segment]),
        rank[pair_caption],
        num_clips=len(segment),
        weights=split_captions.sources.weights,
    )
    captions = RowCaptions(
        choice=choice,
        sources=split_captions.sources,
        texts_sha256=_texts_sha256(stored, text_row, rank=rank, split_captions=split_captions),
        caption=pair_caption,
        text_row=text_row,
        same_text=same_text(stored.texts, np.sort(text_row)) if len(text_row) else None,
        caption_id=smallest_integers(arrays["id"][order]),
        place=None if text is None else arrays["place"][order],
        num_tokens=None if text is None or text.num_tokens is None else arrays["tokens"][order],
    )
    num_from_sources = split_captions.num_captions - split_captions.num_other_sources
    num_without = len(segments) - len(captioned_segment)
    remarks = {
        f"{count_noun(num_without, 'segment')} without captions left out": num_without,
        split_captions.sources.describe_omitted(split_captions.num_other_sources): split_captions.num_other_sources,
        f"{count_noun(num_from_sources - num_embedded, 'caption')} without embedding": num_from_sources - num_embedded,
        f"{count_noun(num_embedded - num_selected, 'caption')} not selected": num_embedded - num_selected,
        f"{count_noun(num_selected - len(order), 'caption')} outside all segments": num_selected - len(order),
    }
    return segment, captions, [remark for remark, count in remarks.items() if count]


def _texts_sha256(
    captions: CaptionSpans, rows: NDArray[np.int32], *, rank: NDArray[np.int16], split_captions: SplitCaptions
) -> str:
    """Return a SHA-256 digest of the texts in these rows. It combines the digests of the texts of each source."""
    digests = []
    for code, source_rank in enumerate(split_captions.rank_of_code.tolist()):
        if source_rank >= 0:
            is_used = np.zeros(len(captions.texts), bool)
            is_used[rows[rank == source_rank]] = True
            digests.append(f"{captions.sources[code]} {digest_used_texts(captions.texts, is_used)[0]}")
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


class SegmentSpans:
    """Index for finding the segments that overlap spans of videos. Video and time are combined into a single number.

    Attributes:
        lengths_us: Length of each segment, microseconds, int64 [segments].
    """

    def __init__(self, records: LatentRecords, segments: Segments) -> None:
        indices = np.arange(len(segments))
        self._begins, self._ends = times_us(records, segments, indices)
        self.lengths_us: NDArray[np.int64] = self._ends - self._begins
        self._step = int(self._ends.max(initial=0)) + 2  # larger than any time in a video
        offset = records.video_row[segments.chunk_of(indices)] * np.int64(self._step)
        self._begins += offset
        self._ends += offset

    def overlaps(
        self, *, video_row: NDArray[np.int64], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the segments that overlap each span, as a half-open range: the first index and the end index."""
        begin, end = self._keys(video_row=video_row, begin_s=begin_s, end_s=end_s)
        first = np.searchsorted(self._ends, begin, side="right")
        last = np.searchsorted(self._begins, end, side="left")
        return first, np.where(end > begin, last, first)

    def longest_spans(
        self, *, video_row: NDArray[np.int64], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the span with the longest overlap for each segment, and the length of the overlap in microseconds.

        If several overlaps are equally long, the first span wins. If no span overlaps a segment, the values are -1 and
        0.
        """
        begin, end = self._keys(video_row=video_row, begin_s=begin_s, end_s=end_s)
        first, last = self.overlaps(video_row=video_row, begin_s=begin_s, end_s=end_s)
        widths = np.maximum(last - first, 0)
        span = np.repeat(np.arange(len(first)), widths)
        segment = np.arange(len(span)) - np.repeat(np.cumsum(widths) - widths, widths) + first[span]
        shared_us = np.minimum(end[span], self._ends[segment]) - np.maximum(begin[span], self._begins[segment])
        # The last assignment to a segment wins, so sort by ascending overlap. Sort the first of equal overlaps last.
        order = np.lexsort((-span, shared_us))
        longest = np.full(len(self._begins), -1)
        longest_us = np.zeros(len(self._begins), np.int64)
        longest[segment[order]] = span[order]
        longest_us[segment[order]] = shared_us[order]
        return longest, longest_us

    def _keys(
        self, *, video_row: NDArray[np.int64], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        step = self._step
        # Treat a span with NaN as empty, because NaN is not a time.
        begin = np.clip(np.nan_to_num(np.rint(begin_s * US_PER_S), nan=step), 0, step - 1).astype(np.int64)
        end = np.clip(np.nan_to_num(np.rint(end_s * US_PER_S), nan=0, posinf=step), 0, step - 1).astype(np.int64)
        return video_row * step + begin, video_row * step + end


def _pairs(
    first: NDArray[np.int64], last: NDArray[np.int64], *, num_segments: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the number of captions of each segment, and all captions, grouped by segment and ascending in each group.

    Args:
        first, last: Segments that each caption overlaps, as half-open ranges.
    """
    steps = np.bincount(first, minlength=num_segments + 1) - np.bincount(last, minlength=num_segments + 1)
    counts = np.cumsum(steps)[:num_segments]
    pair_caption = np.empty(int((last - first).sum()), np.int32)
    next_pair = np.concatenate([[0], np.cumsum(counts)])
    for block in _blocks(first, last):
        widths = last[block] - first[block]
        caption = np.repeat(block, widths)
        index_in_range = np.arange(len(caption)) - np.repeat(np.cumsum(widths) - widths, widths)
        segment = np.repeat(first[block], widths) + index_in_range
        order = np.argsort(segment, kind="stable")
        segment = segment[order]
        begins = np.flatnonzero(np.r_[True, segment[1:] != segment[:-1]])
        run = np.diff(np.r_[begins, len(segment)])
        pair_caption[next_pair[segment] + np.arange(len(segment)) - np.repeat(begins, run)] = caption[order]
        next_pair[segment[begins]] += run
    return counts, pair_caption


def _blocks(first: NDArray[np.int64], last: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield captions in order, in blocks with a limited number of pairs."""
    total = np.cumsum(last - first)
    begin = 0
    while begin < len(first):
        num_previous = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, num_previous + _BLOCK, side="right")))
        yield np.arange(begin, end)
        begin = end


def label_segments(
    data_dir: Path,
    *,
    records: LatentRecords,
    segments: Segments,
    video_ids: pa.Array,
    split: str,
    classes: Sequence[ClassList],
    selection: Selection,
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Find the segments that labelled captions of a split overlap.

    A segment gets the label of the labelled caption with the longest overlap; if overlaps are equally long, the lowest
    caption ID wins. Captions without the label are ignored. Segments that no labelled caption overlaps are omitted.

    Returns:
        segments: Segments with at least one of the labels, ascending.
        label: Class of each segment in each class list, int64 [N, L]; -1 without a class.
        remarks: Remarks for the log.

    Raises:
        UserError: The captions lack a label, a caption can have several values for the label, or no caption is
            selected.
    """
    table = read_captions(data_dir)
    video_row = rows_of(table["video_id"], video_ids)
    is_of_split = is_in_splits(table, read_videos(data_dir), [split])
    labelled = labelled_rows(table, is_of_split=is_of_split, classes=classes)
    is_selected = selection.select_captions(table)
    begin_s, end_s = (table[name].to_numpy()[labelled.row] for name in ("begin_s", "end_s"))
    spans = SegmentSpans(records, segments)
    label_NL = np.full((len(segments), len(classes)), -1)
    covered_NL = np.zeros((len(segments), len(classes)))  # fraction of a segment that its caption overlaps
    for column, label_C in enumerate(labelled.label.T):
        is_used_C = label_C >= 0 if is_selected is None else (label_C >= 0) & is_selected[labelled.row]
        rows = np.flatnonzero(is_used_C)
        caption_N, shared_us_N = spans.longest_spans(
            video_row=video_row[labelled.row[rows]], begin_s=begin_s[rows], end_s=end_s[rows]
        )
        has_caption = caption_N >= 0
        label_NL[has_caption, column] = label_C[rows[caption_N[has_caption]]]
        covered_NL[has_caption, column] = shared_us_N[has_caption] / spans.lengths_us[has_caption]
    is_labelled = (label_NL >= 0).any(axis=1)
    segment = np.flatnonzero(is_labelled)
    remarks = [", ".join(names.describe(label) for names, label in zip(classes, label_NL[is_labelled].T, strict=True))]
    if num_without := len(segments) - len(segment):
        remarks.append(f"{count_noun(num_without, 'segment')} without label left out")
    if caption_remarks := labelled.remarks():
        remarks.append(f"captions: {', '.join(caption_remarks)}")
    mean_fraction = float(covered_NL[label_NL >= 0].mean()) if len(segment) else 0.0
    remarks.append(f"the caption that gives the label covers {mean_fraction:.0%} of a segment on average")
    return segment, label_NL[is_labelled], remarks
