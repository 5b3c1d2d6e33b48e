"""The packet tables of a shard as arrays: which bytes of a chunk must be fed to a decoder to get some of its frames."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.format import PACKET_KEY, PACKET_REFERENCE


@dataclass(frozen=True)
class PacketTable:
    """The packets of one chunk in decode order; one entry of each array a packet.

    Attributes:
        offset, size: of its bytes in the mp4 payload.
        frame: presentation index of the frame that it holds.
        flags: PACKET_KEY and PACKET_REFERENCE of shards.format.
        crc32: of its bytes.
    """

    offset: NDArray[np.uint32]
    size: NDArray[np.uint32]
    frame: NDArray[np.int32]
    flags: NDArray[np.uint8]
    crc32: NDArray[np.uint32]

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """Positions of the key packets."""
        return np.flatnonzero(self.flags & PACKET_KEY)

    @property
    def has_closed_gops(self) -> bool:
        """Whether decoding can begin at every key packet: no frame after one in decode order is shown before it."""
        if not len(self.keys) or self.keys[0]:
            return False
        return bool((np.minimum.reduceat(self.frame, self.keys) == self.frame[self.keys]).all())

    def needed_for(self, frames: Iterable[int]) -> list[int]:
        """Packets that give `frames` of a chunk whose GOPs are closed: ascending positions in decode order.

        From the key packet of each frame's GOP on: every reference packet before the frame's own, and its own.

        Raises:
            ValueError: a frame is not in the table, or no key packet comes before it.
        """
        places = self._places_of(sorted(set(frames)))
        gops = (np.searchsorted(self.keys, places, side="right") - 1).tolist()
        needed: list[int] = []
        begin = 0
        for place, gop in zip(places, gops, strict=True):
            if gop < 0:
                raise ValueError(f"no key packet before that of frame {self.frame[place]}")
            begin = max(begin, int(self.keys[gop]))
            # Within a GOP the references up to the last place are there already.
            needed += [
                begin + at for at, flags in enumerate(self.flags[begin:place].tolist()) if flags & PACKET_REFERENCE
            ]
            needed.append(place)
            begin = place + 1
        return needed

    def _places_of(self, frames: list[int]) -> list[int]:
        """Positions of frames, ascending."""
        order = np.argsort(self.frame, kind="stable")
        begins, ends = (np.searchsorted(self.frame[order], frames, side=side) for side in ("left", "right"))
        for frame, num in zip(frames, (ends - begins).tolist(), strict=True):
            if num != 1:
                raise ValueError(f"the packet table has frame {frame} {num} times")
        return np.sort(order[begins]).tolist()


class PacketTables:
    """The packet tables of all chunks of one index, as views of it."""

    def __init__(self, index: pa.Table) -> None:
        offset = index["packet_offset"].chunk(0)
        self._first = offset.offsets.to_numpy()
        names = ("packet_offset", "packet_size", "packet_frame", "packet_flags", "packet_crc32")
        # `values` ignores where a list array begins; `offsets` do not, so that both fit together.
        self._values = [index[name].chunk(0).values.to_numpy() for name in names]
        for name in names[1:]:
            if not np.array_equal(index[name].chunk(0).offsets.to_numpy(), self._first):
                raise ValueError(f"{name} and packet_offset differ in length")

    def of_row(self, row: int) -> PacketTable:
        """The table of one chunk."""
        packets = slice(int(self._first[row]), int(self._first[row + 1]))
        return PacketTable(*(values[packets] for values in self._values))
