"""Reading and decoding of chunks, either from individual packets, or from a complete file through its container.

If the decoder does not output a requested frame, loading fails instead of using another frame.
"""

import io
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from clipmill.manifests.errors import Inaccessible, StorageRefused, UserError
from clipmill.shards.decoding import DamagedPacket, PacketDecoder, SourceFile, read_packets, read_source_packets
from clipmill.shards.opening import CONTAINERS, NO_PROTOCOLS, Damaged
from clipmill.shards.reader import CommittedShard
from clipmill.train.data.outcomes import SampleFailed

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.stream import VideoStream

    from clipmill.shards.timeline.pictures import UprightFilter


# "packets" decodes individual packets. For comparisons, "plain" and "filter" decode complete files, and "filter" also
# crops and resizes in libav's filter graph.
DecodeRule = Literal["packets", "filter", "plain"]


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of a chunk, read for decoding.

    Attributes:
        key: Key of the chunk.
        frames: Presentation indices of the frames to decode.
        codec: Name of the codec in libav.
        extradata: Codec headers.
        packets: Presentation index and bytes of each packet, in decode order; None if the chunk is decoded through its
            container.
        file: Bytes of the complete mp4 file if the chunk is decoded through its container; otherwise empty.
        timeline: Crop and orientation of frames from a source file (`SourceFrames.timeline`); empty for other chunks.
        is_strict: See `PacketDecoder.decode`.
    """

    key: str
    frames: frozenset[int]
    codec: str
    extradata: bytes
    packets: list[tuple[int, memoryview]] | None
    file: bytes = b""
    timeline: str = ""
    is_strict: bool = True

    @property
    def size_bytes(self) -> int:
        return len(self.file) + sum(len(packet) for _, packet in self.packets or ())


def read_chunk(
    shard: CommittedShard,
    row: int,
    frames: Collection[int],
    *,
    rule: DecodeRule,
    key: str,
    source: Callable[[], SourceFile] | None = None,
) -> ChunkBytes:
    """Read and verify the bytes that are needed to decode `frames` of a chunk.

    Only packets are read if the rule is "packets" and the GOPs are closed, or if the packets are in a source file.
    Otherwise the complete file is read.

    Args:
        row: Row of the chunk in the shard.
        frames: Presentation indices of the frames to decode.
        key: Key of the chunk, for errors.
        source: Function that returns the source file; required for chunks whose packets are in a source file.

    Raises:
        SampleFailed: The chunk cannot be read, or its bytes do not match their checksum.
        UserError: The bucket rejects the credentials.
    """
    try:
        tables = shard.packet_tables
        is_closed, in_source = tables.has_closed_gops(row), tables.source(row)
        packets, file, is_strict = None, b"", True
        if in_source is not None:
            assert source is not None, "the source file is needed"
            table = tables.packet_table(row)
            packets = read_source_packets(source(), in_source, table, frames, is_closed=is_closed)
            is_strict = not table.has_recovery_points
        elif rule == "packets" and is_closed:
            table = tables.packet_table(row)
            packets = read_packets(shard, tables.payload(row), table, table.packets_for(frames))
        codec, extradata = tables.stream(row)
        if packets is None:
            file = shard.read_range(*tables.payload(row))
            if zlib.crc32(file) != tables.payload_crc32(row):
                raise DamagedPacket(f"the chunk's bytes in {shard.tar_name} do not match their checksum")
        return ChunkBytes(
            key=key,
            frames=frozenset(frames),
            codec=codec,
            extradata=extradata,
            packets=packets,
            file=file,
            timeline="" if in_source is None else in_source.timeline,
            is_strict=is_strict,
        )
    # Rejected credentials affect all chunks and end the run, but access to a single source file may also be denied.
    except UserError as error:
        if isinstance(error, StorageRefused) and not error.denies_bucket:
            raise SampleFailed(key, reason="shard_unreadable", detail=str(error)) from error
        raise
    except (OSError, Damaged, Inaccessible) as error:
        if isinstance(error, Inaccessible) and isinstance(error.cause, UserError):
            raise error.cause from error
        raise SampleFailed(key, reason="shard_unreadable", detail=str(error)) from error
    except DamagedPacket as error:
        raise SampleFailed(key, reason="checksum", detail=str(error)) from error
    except ValueError as error:
        raise SampleFailed(key, reason="undecodable", detail=str(error)) from error


ChunkFrames = dict[int, "av.VideoFrame"]  # frames of one chunk, by presentation index

# Open files only as one of these containers and without protocols, so that a file cannot make libav open other files.
_OPTIONS = {"format_whitelist": CONTAINERS, "protocol_whitelist": NO_PROTOCOLS}
# Maximum number of pixels in a frame, twice as many as in 8K video. A decoder allocates frames of any size that a file
# declares, even if the file is small.
MAX_PIXELS = 1 << 26


class PlainVideo:
    """First video stream of a file in memory, decoded through the file's container.

    Frames are numbered in presentation order.

    Args:
        content: Bytes of the complete file.

    Attributes:
        pts: Timestamps of all frames, ascending, in units of `time_base`.
        time_base: Unit of the timestamps, seconds, exact.
        end_pts: End of the last frame, in units of `time_base`. The last frame is assumed to be as long as the median
            frame.
        width, height: Resolution of the frames, in pixels.

    Raises:
        av.FFmpegError: The file cannot be opened or read.
        ValueError: The file may be truncated, has no video stream or no frames, or has frames that are too large; or a
            packet has no timestamp.
    """

    def __init__(self, content: bytes) -> None:
        from clipmill.shards.timeline.truncation import require_complete  # imported late: packets do not need it

        self._content = content
        with self._open() as (container, stream):
            require_complete(content, format_name=container.format.name)
            self.time_base = stream.time_base or Fraction(1)
            self.width, self.height = stream.width, stream.height
            times: list[int] = []
            key_times: list[int] = []
            for packet in container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                if packet.pts is None:
                    raise ValueError("a packet has no timestamp")
                times.append(packet.pts)
                if packet.is_keyframe:
                    key_times.append(packet.pts)
        if not times:
            raise ValueError("the file has no frames")
        self.pts = sorted(times)
        self._key_pts = sorted(key_times)
        gaps = sorted(later - earlier for earlier, later in pairwise(self.pts))
        self.end_pts = self.pts[-1] + (gaps[len(gaps) // 2] if gaps else 1)

    def decode(self, frames: Collection[int]) -> "dict[int, av.VideoFrame]":
        """Decode frames, and return the intact frames by their indices.

        Raises:
            av.FFmpegError: The decoder rejects the file.
        """
        intact_frames: dict[int, av.VideoFrame] = {}
        with self._open() as (container, stream):
            decoder = container.decode(stream)
            last_pts: int | None = None  # timestamp of the last frame that was output
            for index in sorted(set(frames)):
                if not 0 <= index < len(self.pts):
                    continue
                target = self.pts[index]
                key_frame = bisect_right(self._key_pts, target) - 1
                # Seek only to a key frame after the last frame; otherwise it is faster to continue decoding.
                if key_frame > 0 and (last_pts is None or self._key_pts[key_frame] > last_pts):
                    container.seek(self._key_pts[key_frame], stream=stream)
                    decoder = container.decode(stream)
                for frame in decoder:
                    if frame.pts is None:
                        continue
                    last_pts = frame.pts
                    if last_pts == target and not frame.is_corrupt:
                        intact_frames[index] = frame
                    if last_pts >= target:
                        break
        return intact_frames

    @contextmanager
    def _open(self) -> "Iterator[tuple[InputContainer, VideoStream]]":
        import av

        content = io.BytesIO(self._content)
        with av.open(content, mode="r", options=_OPTIONS, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise ValueError("the file has no video stream")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise ValueError("there is no decoder for the video's codec")
            if stream.width * stream.height > MAX_PIXELS:
                raise ValueError(f"frames of {stream.width} x {stream.height} are larger than {MAX_PIXELS:,} pixels")
            # The decoder also checks the limit, because packets may declare a larger resolution than the header.
            stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
            stream.codec_context.thread_count = 1  # the loader's threads already use all cores
            yield container, stream


class ChunkDecoder:
    """Decoder of chunks, from packets or through the container. Thread-safe: each thread uses its own decoder."""

    def __init__(self) -> None:
        self._local = threading.local()

    def decode(self, content: ChunkBytes) -> ChunkFrames:
        """Return the frames of `content`; see `decode_each`."""
        frames: ChunkFrames = {}
        self.decode_each(content, frames.__setitem__)
        return frames

    def decode_each(self, content: ChunkBytes, handle_frame: "Callable[[int, av.VideoFrame], None]") -> None:
        """Call `handle_frame` with each frame of `content` and its presentation index, as soon as it is decoded.

        Raises:
            SampleFailed: The chunk cannot be decoded, or the decoder does not output a requested frame.
        """
        import av

        missing = set(content.frames)
        upright = self._shape_filter(content.timeline) if content.timeline else None

        def handle_requested(index: int, frame: av.VideoFrame) -> None:
            if index in missing:
                handle_frame(index, frame if upright is None else upright.apply(frame))
                missing.discard(index)

        try:
            if content.packets is None:
                for index, frame in PlainVideo(content.file).decode(content.frames).items():
                    handle_requested(index, frame)
            else:
                if not hasattr(self._local, "decoder"):
                    self._local.decoder = PacketDecoder()
                decoder: PacketDecoder = self._local.decoder
                for index, frame in decoder.decode(
                    codec=content.codec,
                    extradata=content.extradata,
                    packets=content.packets,
                    is_strict=content.is_strict,
                ):
                    handle_requested(index, frame)
        except (av.FFmpegError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise SampleFailed(content.key, reason="undecodable", detail=detail) from error
        require_frames(missing, key=content.key)

    def _shape_filter(self, timeline_json: str) -> "UprightFilter":
        """Return the filter that crops and rotates the frames of a source file.

        Each thread keeps its last filter, because building a filter is slow.
        """
        if getattr(self._local, "timeline", None) != timeline_json:
            from clipmill.shards.timeline.model import Timeline
            from clipmill.shards.timeline.pictures import UprightFilter

            timeline = Timeline.from_json(timeline_json)
            self._local.timeline = timeline_json
            self._local.upright = UprightFilter(timeline.shape, aspect=timeline.aspects[0][1])
        upright: UprightFilter = self._local.upright
        return upright


def require_frames(missing: Collection[int], *, key: str) -> None:
    """Raise SampleFailed if any frames are missing from the decoder's output."""
    if missing:
        detail = f"the decoder does not output frames {sorted(missing)}"
        raise SampleFailed(key, reason="frame_missing", detail=detail)
