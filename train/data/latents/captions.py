"""Which captions a segment can be shown with: those of its video whose span overlaps it and that are embedded.

Everything is arrays: a pair of segment and caption takes four bytes, a caption twelve, a segment eight.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.store import open_captions
from train.data.caption_choice import smallest
from train.data.chunk_table import rows_of
from train.data.clips import US_PER_S
from train.data.latents.records import LatentRecords
from train.data.latents.segments import Segments, times_us
from train.data.latents.text_rows import TextRows

_BLOCK = 1 << 16  # captions, or pairs, that are worked on at a time


@dataclass(frozen=True)
class SegmentCaptions:
    """The segments that have captions, and their captions.

    Attributes:
        segment: [S] numbers of the segments, ascending.
        first_pair: [S + 1] where the captions of each begin in `pair_caption`.
        pair_caption: [P] places in the two arrays below; within a segment the lowest id comes first.
        caption_id, address: [C] the captions, ascending by id, and where their embeddings lie in the mapped tars.
        num_captions: captions of the split in the manifest.
        num_not_embedded: those of them that the text column does not have.
        num_not_shown: embedded captions that overlap no segment.
    """

    segment: NDArray[np.int64]
    first_pair: NDArray[np.int64]
    pair_caption: NDArray[np.int32]
    caption_id: NDArray[np.int64]
    address: NDArray[np.int64]
    num_captions: int
    num_not_embedded: int
    num_not_shown: int


def pair_captions(
    data_dir: Path, *, records: LatentRecords, segments: Segments, text: TextRows, video_ids: pa.Array
) -> SegmentCaptions:
    """Reads the captions of the videos `video_ids` and finds the segments of each.

    Raises:
        UserError: the text column has a caption under another video than the manifest.
    """
    span = _Spans(records, segments)
    none = np.empty(0, np.int64)
    parts: list[dict[str, NDArray[np.int64]]] = [{"id": none, "address": none, "first": none, "last": none}]
    num_captions = num_embedded = 0
    for caption_id, video_row, begin_s, end_s in _captions(data_dir, video_ids):
        row_of_text = find_embedded(caption_id, text, video_row=video_row, video_ids=video_ids)
        embedded = row_of_text >= 0
        first, last = span.overlapped(video_row=video_row, begin_s=begin_s, end_s=end_s)
        used = embedded & (last > first)
        address = text.address[row_of_text[used]]
        parts.append({"id": caption_id[used], "address": address, "first": first[used], "last": last[used]})
        num_captions += len(caption_id)
        num_embedded += int(embedded.sum())
    joined = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    counts, pair_caption = _pairs(joined["first"], joined["last"], num_segments=len(segments))
    segment = np.flatnonzero(counts)
    return SegmentCaptions(
        segment=smallest(segment),
        first_pair=smallest(np.concatenate([[0], np.cumsum(counts[segment])])),
        pair_caption=pair_caption,
        caption_id=smallest(joined["id"]),
        address=joined["address"],
        num_captions=num_captions,
        num_not_embedded=num_captions - num_embedded,
        num_not_shown=num_embedded - len(joined["id"]),
    )


def _captions(
    data_dir: Path, video_ids: pa.Array
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]]:
    """Id, row of the video, begin and end of the captions of `video_ids`, in blocks, ascending by id."""
    with open_captions(data_dir) as file:
        for batch in file.iter_batches(_BLOCK, columns=["caption_id", "video_id", "begin_s", "end_s"]):
            video_row = rows_of(pa.chunked_array([batch["video_id"]]), video_ids)
            rows = np.flatnonzero(video_row >= 0)
            caption_id, begin_s, end_s = (batch[name].to_numpy()[rows] for name in ("caption_id", "begin_s", "end_s"))
            yield caption_id, video_row[rows], begin_s, end_s


def find_embedded(
    caption_id: NDArray[np.int64], text: TextRows, *, video_row: NDArray[np.int64], video_ids: pa.Array
) -> NDArray[np.int64]:
    """For each caption its place in `text`, -1 where it has none."""
    place = np.minimum(np.searchsorted(text.caption_id, caption_id), len(text.caption_id) - 1)
    found = text.caption_id[place] == caption_id
    strange = np.flatnonzero(found & (text.video_row[place] != video_row))
    if len(strange):
        at = int(strange[0])
        theirs = int(text.video_row[place[at]])
        other = repr(video_ids[theirs].as_py()) if theirs >= 0 else "a video that is not of this split"
        raise UserError(
            f"caption {caption_id[at]} is of video {video_ids[int(video_row[at])].as_py()!r} in the manifest, and of "
            f"{other} in the text column: they are not of the same data set",
            hint="run prep text again, or bring the text column that belongs to this manifest",
        )
    return np.where(found, place, -1)


class _Spans:
    """Finds the segments that a span of a video overlaps; video and time are searched as one number."""

    def __init__(self, records: LatentRecords, segments: Segments) -> None:
        numbers = np.arange(len(segments))
        self._begins, self._ends = times_us(records, segments, numbers)
        self._step = int(self._ends.max(initial=0)) + 2  # more than any time of a video
        before = records.video_row[segments.chunk_of(numbers)] * np.int64(self._step)
        self._begins += before
        self._ends += before

    def overlapped(
        self, *, video_row: NDArray[np.int64], begin_s: NDArray[np.float64], end_s: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each span the first segment of its video that overlaps it and the one after the last."""
        step = self._step
        # NaN is no time: such a span is empty.
        begin = np.clip(np.nan_to_num(np.rint(begin_s * US_PER_S), nan=step), 0, step - 1).astype(np.int64)
        end = np.clip(np.nan_to_num(np.rint(end_s * US_PER_S), nan=0, posinf=step), 0, step - 1).astype(np.int64)
        first = np.searchsorted(self._ends, video_row * step + begin, side="right")
        last = np.searchsorted(self._begins, video_row * step + end, side="left")
        return first, np.where(end > begin, last, first)


def _pairs(
    first: NDArray[np.int64], last: NDArray[np.int64], *, num_segments: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Captions of each segment: how many, and which, segment after segment and ascending within each."""
    steps = np.bincount(first, minlength=num_segments + 1) - np.bincount(last, minlength=num_segments + 1)
    counts = np.cumsum(steps)[:num_segments]
    pair_caption = np.empty(int((last - first).sum()), np.int32)
    where = np.concatenate([[0], np.cumsum(counts)])
    for block in _blocks(first, last):
        widths = last[block] - first[block]
        caption = np.repeat(block, widths)
        within = np.arange(len(caption)) - np.repeat(np.cumsum(widths) - widths, widths)
        segment = np.repeat(first[block], widths) + within
        order = np.argsort(segment, kind="stable")
        segment = segment[order]
        begins = np.flatnonzero(np.r_[True, segment[1:] != segment[:-1]])
        run = np.diff(np.r_[begins, len(segment)])
        place = where[segment] + np.arange(len(segment)) - np.repeat(begins, run)
        pair_caption[place] = caption[order]
        where[segment[begins]] += run
    return counts, pair_caption


def _blocks(first: NDArray[np.int64], last: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Captions in their order, in blocks of a bounded number of pairs."""
    total = np.cumsum(last - first)
    begin = 0
    while begin < len(first):
        before = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, before + _BLOCK, side="right")))
        yield np.arange(begin, end)
        begin = end
