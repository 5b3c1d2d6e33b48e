"""Packet tables of a shard, which tell readers which bytes of a chunk they need to decode given frames."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.shards.format import PACKET_KEY, PACKET_RECOVERY, PACKET_REFERENCE
from clipmill.shards.index import extensions_of

_PACKET_COLUMNS = ("packet_offset", "packet_size", "packet_frame", "packet_flags", "packet_crc32")
_PAYLOAD_COLUMNS = ("offset", "size", "crc32")  # suffixes of the first member's columns
_SOURCE_COLUMNS = ("source_offset", "source_bytes", "time_rate", "frame_time", "timeline")
_US_PER_S = 1_000_000
_DTYPES = [np.dtype(code) for code in ("<i4", "<u4", "<u4", "<i4", "u1", "<u4", "<u8", "<u8", "<u4")]


@dataclass(frozen=True)
class PacketTable:
    """The packets of one chunk in decode order; each array has one entry per packet.

    Attributes:
        offset, size: Byte range of the packet in the mp4 payload; for a packet in a source file, the offset is relative
            to `SourceFrames.offset`.
        frame: Presentation index of the frame in the packet.
        flags: Bits PACKET_KEY, PACKET_REFERENCE and PACKET_RECOVERY (clipmill.shards.format).
        crc32: CRC-32 of the packet's bytes.
    """

    offset: NDArray[np.uint32]
    size: NDArray[np.uint32]
    frame: NDArray[np.int32]
    flags: NDArray[np.uint8]
    crc32: NDArray[np.uint32]

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """Positions of the keyframe packets in the table."""
        return np.flatnonzero(self.flags & PACKET_KEY)

    @property
    def has_closed_gops(self) -> bool:
        """True if the first packet is a keyframe, and all GOPs are closed.

        A GOP is closed if none of its frames is displayed before its keyframe.
        """
        if not len(self.keys) or self.keys[0]:
            return False
        return bool((np.minimum.reduceat(self.frame, self.keys) == self.frame[self.keys]).all())

    @property
    def has_recovery_points(self) -> bool:
        """True if a keyframe is not an IDR picture. A decoder that starts there lacks frames that it does not need."""
        return bool((self.flags & PACKET_RECOVERY).any())

    def packets_for(self, frames: Iterable[int]) -> list[int]:
        """Return the positions of the packets that `frames` need in a chunk with closed GOPs, in ascending order.

        A frame needs its own packet, and all reference packets from the keyframe of its GOP up to that packet.

        Raises:
            ValueError: A frame is not in the table, or no keyframe packet precedes it.
        """
        # Use plain lists: for a few hundred packets, the overhead of NumPy calls exceeds the cost of a Python loop.
        frame_of = self.frame.tolist()
        position_of = dict(zip(frame_of, range(len(frame_of)), strict=True))
        distinct_frames = sorted(set(frames))
        for frame in distinct_frames:
            if frame not in position_of or (len(position_of) < len(frame_of) and frame_of.count(frame) > 1):
                raise ValueError(f"frame {frame} occurs {frame_of.count(frame)} times in the packet table")
        positions = sorted([position_of[frame] for frame in distinct_frames])
        keys, flags = self.keys.tolist(), self.flags.tobytes()
        packets: list[int] = []
        start = 0
        for position in positions:
            gop = bisect_right(keys, position) - 1
            if gop < 0:
                raise ValueError(f"no keyframe packet precedes the packet of frame {self.frame[position]}")
            start = max(start, keys[gop])
            # The reference packets of the GOP up to the previous position have already been added.
            packets += [packet for packet in range(start, position) if flags[packet] & PACKET_REFERENCE]
            packets.append(position)
            start = position + 1
        return packets

    def packet_runs_for(self, frames: Iterable[int]) -> list[list[int]]:
        """Return the positions of the packets that `frames` need in a chunk whose GOPs may be open, divided into runs.

        Each run begins at a keyframe and is decoded independently, because a decoder that skips to a keyframe that is
        not an IDR picture outputs frames in the wrong order. A leading frame follows a keyframe in decode order but is
        displayed before it, and may depend on the previous GOP. A run omits the leading frames of its first keyframe,
        because no other frame depends on them.

        Raises:
            ValueError: The table lacks a frame, or the keyframe that a frame depends on.
        """
        frame_of, flags, keys = self.frame.tolist(), self.flags.tolist(), self.keys.tolist()
        position_of = {frame: position for position, frame in enumerate(frame_of)}
        distinct_frames = set(frames)
        if missing := distinct_frames - position_of.keys():
            raise ValueError(f"frame {min(missing)} is not in the packet table")
        positions = sorted(position_of[frame] for frame in distinct_frames)
        gops = [bisect_right(keys, position) - 1 for position in positions]
        # If leading frames of a GOP are needed, decoding begins at the previous GOP.
        leading_gops = {
            gop
            for position, gop in zip(positions, gops, strict=True)
            if frame_of[position] < frame_of[keys[max(gop, 0)]]
        }
        runs: list[list[int]] = []
        start, key_frame = 0, -1  # position at which decoding continues, and the frame of the run's first keyframe
        for position, gop in zip(positions, gops, strict=True):
            first_gop = gop - (gop in leading_gops)
            if first_gop < 0:
                raise ValueError(f"no keyframe packet precedes the packet of frame {frame_of[position]}")
            if keys[first_gop] >= start:
                start, key_frame = keys[first_gop], frame_of[keys[first_gop]]
                runs.append([])
            runs[-1] += [
                packet
                for packet in range(start, position)
                if flags[packet] & PACKET_REFERENCE and frame_of[packet] >= key_frame
            ]
            runs[-1].append(position)
            start = position + 1
        return runs


@dataclass(frozen=True)
class SourceFrames:
    """The frames of a chunk whose packets are in a source file.

    Attributes:
        offset: Offset in the source file, in bytes, to which packet offsets are relative.
        size_bytes: Size of the source file.
        rate: Time units per second.
        times: Start of each frame by presentation index, in units of 1 / `rate` seconds from time 0 of the video,
            ascending. A hidden frame has the time of the next displayed frame.
        timeline: Crop and orientation of the frames (`clipmill.shards.timeline.model.Timeline.to_json`).
    """

    offset: int
    size_bytes: int
    rate: int
    times: list[int]
    timeline: str

    def frame_at(self, numerator: int, denominator: int) -> int:
        """Return the index of the frame displayed at numerator / denominator microseconds; 0 before the first frame."""
        return max(0, bisect_right(self.times, numerator * self.rate // (denominator * _US_PER_S)) - 1)

    def begin_us(self, frame: int) -> Fraction:
        """Return the exact time at which a frame begins, in microseconds."""
        return Fraction(self.times[frame] * _US_PER_S, self.rate)


class PacketTables:
    """The packet tables and decoding parameters of all chunks in an index.

    Thousands of these objects are open at the same time. Each takes about 1 kB, because it stores little more than a
    reference to the content of the index and the offsets of its columns. As Arrow objects, the columns would take
    27 kB.

    Args:
        index: Table whose columns are views of `content`.
        content: Bytes of the index file. The object keeps a reference to these bytes.

    Raises:
        ValueError: The lists of a packet table differ in length, or a column has the wrong type.
        KeyError: The index lacks a column.
    """

    def __init__(self, index: pa.Table, content: pa.Buffer) -> None:
        self._content = content
        row_offsets = index["packet_offset"].chunk(0).offsets.to_numpy()  # first packet of each row, and the end
        # `values` ignores the slice offset of a list array and `offsets` includes it, so `offsets` can index `values`.
        values = [index[name].chunk(0).values.to_numpy() for name in _PACKET_COLUMNS]
        for name in _PACKET_COLUMNS[1:]:
            if not np.array_equal(index[name].chunk(0).offsets.to_numpy(), row_offsets):
                raise ValueError(f"the lists in {name} and packet_offset differ in length")
        extension = extensions_of(index)[0]
        columns = [row_offsets, *values, *(index[f"{extension}_{name}"].to_numpy() for name in _PAYLOAD_COLUMNS)]
        if wrong_types := [
            column.dtype.str for column, dtype in zip(columns, _DTYPES, strict=True) if column.dtype != dtype
        ]:
            raise ValueError(f"columns of the packet tables have the wrong types: {', '.join(wrong_types)}")
        column_offsets = [column.ctypes.data - content.address if len(column) else 0 for column in columns]
        self._column_offsets = array("q", column_offsets)  # in bytes, relative to the start of the content
        has_sources = _SOURCE_COLUMNS[0] in index.column_names
        self._sources: pa.Table | None = index.select(_SOURCE_COLUMNS) if has_sources else None
        streams = list(zip(index["codec"].to_pylist(), index["extradata"].to_pylist(), strict=True))
        # A stream is a codec and its extradata. `prep chunk` makes only one or two, because a variant has one recipe.
        self._streams = _share_streams(tuple(dict.fromkeys(streams)))
        indices = {stream: index for index, stream in enumerate(self._streams)}
        row_bytes = bytes(indices[stream] for stream in streams) if len(indices) < 256 else None
        self._row_streams: Sequence[int] | None = row_bytes or [indices[stream] for stream in streams]
        # Compute `PacketTable.has_closed_gops` of all chunks in one pass, which is far faster than one call per chunk.
        flags, frame = values[3], values[2]
        first, end = row_offsets[0], row_offsets[-1]
        has_packets = row_offsets[1:] > row_offsets[:-1]
        row_starts = row_offsets[:-1][has_packets]
        gop_starts = np.union1d(np.flatnonzero(flags & PACKET_KEY), row_starts)
        gop_starts = gop_starts[(gop_starts >= first) & (gop_starts < end)]
        has_closed_gops = np.zeros(len(has_packets), np.bool_)
        if len(row_starts):
            begins_with_key = flags[gop_starts] & PACKET_KEY != 0
            is_closed = begins_with_key & (np.minimum.reduceat(frame[:end], gop_starts) == frame[gop_starts])
            has_closed_gops[has_packets] = np.logical_and.reduceat(is_closed, np.searchsorted(gop_starts, row_starts))
        self._has_closed_gops: bytes | None = None if has_closed_gops.all() else has_closed_gops.tobytes()
        if len(self._streams) == 1:
            self._row_streams = None

    def packet_table(self, row: int) -> PacketTable:
        """Return the packet table of a chunk."""
        first, end = self._values(0, row, 2).tolist()
        return PacketTable(*(self._values(column, first, end - first) for column in range(1, 6)))

    def source(self, row: int) -> SourceFrames | None:
        """Return the frames of a chunk if its packets are in a source file; None if they are in the tar."""
        if self._sources is None:
            return None
        return SourceFrames(*(self._sources[name][row].as_py() for name in _SOURCE_COLUMNS))

    def has_closed_gops(self, row: int) -> bool:
        """Return `PacketTable.has_closed_gops` of a chunk."""
        return self._has_closed_gops is None or bool(self._has_closed_gops[row])

    def payload(self, row: int) -> tuple[int, int]:
        """Return the offset and size, in bytes, of a chunk's mp4 file in the tar."""
        return int(self._values(6, row, 1)[0]), int(self._values(7, row, 1)[0])

    def payload_crc32(self, row: int) -> int:
        """Return the CRC-32 of a chunk's mp4 file."""
        return int(self._values(8, row, 1)[0])

    def stream(self, row: int) -> tuple[str, bytes]:
        """Return the codec and extradata of a chunk."""
        return self._streams[0 if self._row_streams is None else self._row_streams[row]]

    def _values(self, column: int, start: int, count: int) -> NDArray[Any]:
        dtype = _DTYPES[column]
        return np.frombuffer(self._content, dtype, count, self._column_offsets[column] + start * dtype.itemsize)


@lru_cache(maxsize=1024)
def _share_streams(streams: tuple[tuple[str, bytes], ...]) -> tuple[tuple[str, bytes], ...]:
    """Return `streams`, or an equal object from an earlier call, so that all indexes share one object."""
    return streams
