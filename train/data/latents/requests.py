"""Requests for samples of latents, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SegmentRequests:
    """Samples to load; one entry of each array per request.

    Attributes:
        sample: number in the set, which is the clip_id.
        position: in the sample order.
        chunk: index in the records.
        address: where the latents begin in the mapped tars.
        num_frames: number of frames; fewer than in a full segment for a tail.
        caption_id: of the caption; None in a set without captions.
        text_address: where its embedding begins; None without stored embeddings.
        label: the class, in a labelled set.
    """

    sample: NDArray[np.int64]
    position: NDArray[np.int64]
    chunk: NDArray[np.int64]
    address: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    caption_id: NDArray[np.int64] | None
    text_address: NDArray[np.int64] | None
    label: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.position)

    def take(self, rows: Sequence[int]) -> "SegmentRequests":
        """Some of the requests."""
        chosen = np.array(rows, dtype=np.int64)
        arrays: dict[str, Any] = {name: None if array is None else array[chosen] for name, array in vars(self).items()}
        return SegmentRequests(**arrays)


def join(parts: Sequence[SegmentRequests]) -> SegmentRequests:
    """Concatenate requests of one set."""
    arrays = {name: [vars(part)[name] for part in parts] for name in vars(parts[0])}
    joined: dict[str, Any] = {name: None if some[0] is None else np.concatenate(some) for name, some in arrays.items()}
    return SegmentRequests(**joined)
