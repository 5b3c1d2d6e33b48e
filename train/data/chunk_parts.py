"""Parts of chunks that belong to a split, for videos whose captions belong to several splits."""

from contextlib import suppress
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.formatting import count_noun
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.data.outcomes import SampleFailed


@dataclass(frozen=True)
class ChunkParts:
    """Parts of chunks that belong to a split, in whole frames (clipmill.manifests.divided_videos).

    Attributes:
        chunk: Row of the chunk of each part, ascending.
        begin_us, end_us: Span of each part in the video, microseconds.
        num_trimmed: Number of chunks that are trimmed or omitted.
        lost_us: Total length of what is omitted, microseconds.
    """

    chunk: NDArray[np.int64]
    begin_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    num_trimmed: int = 0
    lost_us: int = 0

    def remarks(self) -> list[str]:
        """Return a remark about what is omitted; empty if nothing is."""
        if not self.num_trimmed:
            return []
        of_chunks = f"{self.lost_us / US_PER_S:,.1f} s of {count_noun(self.num_trimmed, 'chunk')}"
        return [f"{of_chunks} left out, which belong to other splits"]


def parts_of_split(chunk_set: ChunkSet, chunks: NDArray[np.int64]) -> ChunkParts:
    """Return the parts of some chunks of a set, as rows of its table, that belong to its split."""
    table, divided = chunk_set.table, chunk_set.divided
    start_us, end_us = table.start_ms[chunks] * 1000, table.end_us_of(chunks)
    if divided is None:
        return ChunkParts(chunks, start_us, end_us)
    parts = divided.parts_of(chunk_set.split, video=table.video_row[chunks], begin_us=start_us, end_us=end_us)
    chunk, begin_us = chunks[parts.span], parts.begin_us.copy()
    for number in np.flatnonzero(begin_us > start_us[parts.span]).tolist():
        # The frame that is on screen when a part begins may have appeared in another split.
        at_us, last_us = int(begin_us[number]), int(parts.end_us[number])
        with suppress(SampleFailed):  # reading the chunk reports it
            times = chunk_set.times(int(chunk[number]))
            frame = times.frame_at(at_us, 1)
            if times.frame_begin_us(frame) < at_us:
                is_last = frame >= times.frame_at(last_us - 1, 1)
                begin_us[number] = last_us if is_last else ceil(times.frame_begin_us(frame + 1))
    has_frames = begin_us < parts.end_us
    kept_us = np.bincount(parts.span, weights=(parts.end_us - parts.begin_us) * has_frames, minlength=len(chunks))
    lost_us = end_us - start_us - kept_us.astype(np.int64)
    return ChunkParts(
        chunk[has_frames],
        begin_us[has_frames],
        parts.end_us[has_frames],
        num_trimmed=int(np.count_nonzero(lost_us)),
        lost_us=int(lost_us.sum()),
    )
