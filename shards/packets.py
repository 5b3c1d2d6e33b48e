"""The packet tables of a shard as arrays: which bytes of a chunk to feed to a decoder to get given frames."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.format import PACKET_KEY, PACKET_REFERENCE


@dataclass(frozen=True)
class PacketTable:
    """The packets of one chunk in decode order; each array has one entry per packet.

    Attributes:
        offset, size: byte range of the packet in the mp4 payload.
        frame: presentation index of the frame in the packet.
        flags: PACKET_KEY and PACKET_REFERENCE of shards.format.
        crc32: CRC-32 of the packet's bytes.
    """

    offset: NDArray[np.uint32]
    size: NDArray[np.uint32]
    frame: NDArray[np.int32]
    flags: NDArray[np.uint8]
    crc32: NDArray[np.uint32]

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """Positions of the keyframe packets."""
        return np.flatnonzero(self.flags & PACKET_KEY)

    @property
    def has_closed_gops(self) -> bool:
        """True if all GOPs are closed: no frame that follows a keyframe in decode order is presented before it."""
        if not len(self.keys) or self.keys[0]:
            return False
        return bool((np.minimum.reduceat(self.frame, self.keys) == self.frame[self.keys]).all())

    def needed_for(self, frames: Iterable[int]) -> list[int]:
        """Return the packets that `frames` of a chunk with closed GOPs need: ascending positions in decode order.

        For each frame these are the reference packets from its GOP's keyframe up to the frame's own packet, and that
        packet.

        Raises:
            ValueError: a frame is not in the table, or no keyframe packet precedes it.
        """
        # Plain lists: for a few hundred packets, the overhead of NumPy calls exceeds the cost of a Python loop.
        frame_of = self.frame.tolist()
        position_of = dict(zip(frame_of, range(len(frame_of)), strict=True))
        wanted = sorted(set(frames))
        for frame in wanted:
            if frame not in position_of or (len(position_of) < len(frame_of) and frame_of.count(frame) > 1):
                raise ValueError(f"frame {frame} occurs {frame_of.count(frame)} times in the packet table")
        positions = sorted([position_of[frame] for frame in wanted])
        keys, flags = self.keys.tolist(), self.flags.tobytes()
        needed: list[int] = []
        begin = 0
        for position in positions:
            gop = bisect_right(keys, position) - 1
            if gop < 0:
                raise ValueError(f"no keyframe packet precedes the packet of frame {self.frame[position]}")
            begin = max(begin, keys[gop])
            # The GOP's reference packets up to the previous position have already been added.
            needed += [at for at in range(begin, position) if flags[at] & PACKET_REFERENCE]
            needed.append(position)
            begin = position + 1
        return needed


class PacketTables:
    """The packet tables of all chunks of one index, as zero-copy views, with each chunk's decoding parameters."""

    def __init__(self, index: pa.Table) -> None:
        offset = index["packet_offset"].chunk(0)
        self._first = offset.offsets.to_numpy()
        names = ("packet_offset", "packet_size", "packet_frame", "packet_flags", "packet_crc32")
        # `values` ignores a list array's slice offset and `offsets` includes it, so the two are consistent.
        self._values = [index[name].chunk(0).values.to_numpy() for name in names]
        for name in names[1:]:
            if not np.array_equal(index[name].chunk(0).offsets.to_numpy(), self._first):
                raise ValueError(f"{name} and packet_offset differ in length")
        self._payload_offset, self._payload_size = (index[f"mp4_{name}"].to_numpy() for name in ("offset", "size"))
        streams = list(zip(index["codec"].to_pylist(), index["extradata"].to_pylist(), strict=True))
        self._streams = list(dict.fromkeys(streams))  # one or two: a shard's chunks are encoded with one recipe
        number_of = {stream: number for number, stream in enumerate(self._streams)}
        self._stream = np.array([number_of[stream] for stream in streams], np.int32)
        self._has_closed_gops = self._closed_rows()

    def of_row(self, row: int) -> PacketTable:
        """Return the packet table of one chunk."""
        packets = slice(int(self._first[row]), int(self._first[row + 1]))
        return PacketTable(*(values[packets] for values in self._values))

    def has_closed_gops(self, row: int) -> bool:
        """Return `PacketTable.has_closed_gops` for one chunk."""
        return bool(self._has_closed_gops[row])

    def payload(self, row: int) -> tuple[int, int]:
        """Return (offset, size) in bytes of a chunk's mp4 file in the tar."""
        return int(self._payload_offset[row]), int(self._payload_size[row])

    def stream(self, row: int) -> tuple[str, bytes]:
        """Return the codec and extradata of a chunk."""
        return self._streams[self._stream[row]]

    def _closed_rows(self) -> NDArray[np.bool_]:
        """`PacketTable.has_closed_gops` of every chunk, vectorized: one call per chunk would be far slower."""
        _, _, frame, flags, _ = self._values
        has_packets = self._first[1:] > self._first[:-1]
        row_begins = self._first[:-1][has_packets]
        begins = np.union1d(np.flatnonzero(flags & PACKET_KEY), row_begins)
        begins = begins[(begins >= self._first[0]) & (begins < self._first[-1])]
        closed = np.zeros(len(has_packets), np.bool_)
        if len(row_begins):
            is_whole = (flags[begins] & PACKET_KEY != 0) & (
                np.minimum.reduceat(frame[: self._first[-1]], begins) == frame[begins]
            )
            closed[has_packets] = np.logical_and.reduceat(is_whole, np.searchsorted(begins, row_begins))
        return closed
