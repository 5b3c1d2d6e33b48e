"""The packet tables of a shard as arrays: which bytes of a chunk must be fed to a decoder to get some of its frames."""

from collections.abc import Iterable
from dataclasses import dataclass

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

    def needed_for(self, frames: Iterable[int]) -> NDArray[np.int64]:
        """Packets that give `frames` of a chunk whose GOPs are closed: ascending positions in decode order.

        From the key packet of each frame's GOP on: every reference packet before the frame's own, and its own.

        Raises:
            ValueError: a frame is not in the table, or no key packet comes before it.
        """
        wanted = np.unique(np.fromiter(frames, np.int64))
        places = np.flatnonzero(np.isin(self.frame, wanted))
        if len(places) != len(wanted):
            raise ValueError(f"of frames {wanted.tolist()} the packet table has {self.frame[places].tolist()}")
        keys = np.flatnonzero(self.flags & PACKET_KEY)
        gops = np.searchsorted(keys, places, side="right") - 1
        if len(gops) and gops[0] < 0:
            raise ValueError(f"no key packet before that of frame {self.frame[places[0]]}")
        is_needed = np.zeros(len(self.frame), bool)
        # Places ascend, so the last place of a GOP reaches furthest.
        last_of_gop = np.append(gops[1:] != gops[:-1], True)[: len(gops)]
        for key, last in zip(keys[gops[last_of_gop]].tolist(), places[last_of_gop].tolist(), strict=True):
            is_needed[key:last] = self.flags[key:last] & PACKET_REFERENCE
        is_needed[places] = True
        return np.flatnonzero(is_needed)


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
