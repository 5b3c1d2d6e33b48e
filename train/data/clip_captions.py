"""From captions that can be shown to clips: distinct spans of videos, each with all its captions. Arrays only."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.caption_choice import CaptionChoice, Sources, caption_choice, smallest
from train.data.usable_captions import UsableCaptions


@dataclass(frozen=True)
class Spans:
    """Clips in order of videos and time; one entry of each array a clip, its number is the clip_id.

    Attributes:
        begin_us, end_us: the span in its video.
        first_chunk, last_chunk: the chunks that hold it, places in the chunk table.
    """

    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    first_chunk: NDArray[Any]
    last_chunk: NDArray[Any]

    def __len__(self) -> int:
        return len(self.begin_us)


@dataclass(frozen=True)
class ClipCaptions:
    """Clips and their captions: 24 bytes a clip, 8 to 28 a caption.

    Attributes:
        choice: of a place in the array below.
        caption: [P] the captions, places in the arrays that were given; a clip's own in one row, source by source.
    """

    spans: Spans
    choice: CaptionChoice
    caption: NDArray[Any]


def group_captions(usable: UsableCaptions, *, rank: NDArray[np.int16], sources: Sources) -> ClipCaptions:
    """Captions of one span become one clip.

    Args:
        rank: of the source of each caption that `usable` speaks of places of; those with -1 are left out.
    """
    used = np.flatnonzero(rank[usable.caption] >= 0)
    # The first chunk says which video it is; a stable sort leaves captions of one source in the order of their ids.
    own_rank = rank[usable.caption[used]]
    keys = (own_rank, usable.end_us[used], usable.begin_us[used], usable.first_chunk[used])
    order = np.lexsort(keys)
    used, own_rank = used[order], own_rank[order]
    begin_us, end_us, first_chunk = usable.begin_us[used], usable.end_us[used], usable.first_chunk[used]
    is_new = np.ones(len(used), bool)
    is_new[1:] = (np.diff(begin_us) != 0) | (np.diff(end_us) != 0) | (np.diff(first_chunk) != 0)
    clip = np.cumsum(is_new) - 1
    spans = _spans(usable, used[is_new])
    choice = caption_choice(clip, own_rank, num_clips=len(spans), weights=sources.weights)
    return ClipCaptions(spans, choice, smallest(usable.caption[used]))


def one_by_one(usable: UsableCaptions, *, rank: NDArray[np.int16], sources: Sources) -> ClipCaptions:
    """As `group_captions`, but a clip for each caption, whether others have its span or not."""
    used = np.flatnonzero(rank[usable.caption] >= 0)
    used = used[np.lexsort((usable.end_us[used], usable.begin_us[used], usable.first_chunk[used]))]
    own_rank = rank[usable.caption[used]]
    choice = caption_choice(np.arange(len(used)), own_rank, num_clips=len(used), weights=sources.weights)
    return ClipCaptions(_spans(usable, used), choice, smallest(usable.caption[used]))


def _spans(usable: UsableCaptions, which: NDArray[np.int64]) -> Spans:
    return Spans(
        begin_us=usable.begin_us[which],
        end_us=usable.end_us[which],
        first_chunk=smallest(usable.first_chunk[which]),
        last_chunk=smallest(usable.last_chunk[which]),
    )
