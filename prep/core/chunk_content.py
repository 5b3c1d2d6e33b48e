"""Read a chunk, and decode selected frames.

A chunk is an MP4 file in a tar or, if `prep index` made it, a range of packets in the source file of the video.
"""

import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from io import BytesIO
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import Inaccessible
from clipmill.manifests.store import VIDEOS_FILE, manifest_dir, read_videos
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.shards.columns import SOURCE_MEMBER
from clipmill.shards.decoding import DamagedPacket, PacketDecoder, SourceFile, read_source_packets
from clipmill.shards.format import PACKET_REFERENCE
from clipmill.shards.opening import Damaged
from clipmill.shards.packets import SourceFrames
from clipmill.shards.reader import CommittedShard
from clipmill.shards.timeline.model import US_PER_S, Timeline
from clipmill.shards.timeline.pictures import UprightFilter

if TYPE_CHECKING:
    from av.video.frame import VideoFrame


def frame_rate(index: pa.Table, row: int) -> Fraction:
    """Return the frame rate of a chunk."""
    return Fraction(index["fps_num"][row].as_py(), index["fps_den"][row].as_py())


@dataclass(frozen=True)
class ChunkContent:
    """Bytes of a chunk, and the values of its index row that decoding needs.

    Attributes:
        mp4: Content of the MP4 file; empty if the packets of the chunk are in its source file.
        num_frames: Number of frames.
        fps: Frames per second.
        packet_frame: Frame index of each packet, in decoding order (clipmill.shards.format.VIDEO_FIELDS).
        packet_flags: Flags of each packet, in decoding order.
    """

    mp4: bytes
    num_frames: int
    fps: Fraction
    packet_frame: list[int]
    packet_flags: list[int]

    def frames(self, indices: Sequence[int]) -> "Iterator[VideoFrame]":
        """Decode selected frames, and yield them in presentation order.

        Only the selected frames, and the frames that the packet table marks as references, are decoded.

        Args:
            indices: Indices of the frames, in ascending order.

        Raises:
            SourceFailure: decode_errors if the chunk cannot be decoded or a selected frame is damaged; frames_differ
                if the decoder does not return a selected frame.
        """
        import av
        import av.error

        remaining_indices = iter(indices)
        target = next(remaining_indices, None)
        selected_indices = set(indices)
        try:
            with av.open(BytesIO(self.mp4), "r", format="mp4") as container:
                stream = container.streams.video[0]
                stream.codec_context.thread_count = 1  # callers decode several chunks in parallel
                frames_per_tick = (stream.time_base or Fraction(0)) * self.fps
                packet_index = 0
                for packet in container.demux(stream):
                    # Skip packets that no selected frame depends on.
                    if packet.size:
                        is_reference = self.packet_flags[packet_index] & PACKET_REFERENCE
                        is_needed = is_reference or self.packet_frame[packet_index] in selected_indices
                        packet_index += 1
                        if not is_needed:
                            continue
                    for frame in packet.decode():
                        if target is not None and frame.pts is not None and frame.pts * frames_per_tick == target:
                            if frame.is_corrupt:
                                raise SourceFailure(FailureCode.DECODE_ERRORS, f"frame {target} is damaged")
                            yield frame
                            target = next(remaining_indices, None)
                    if target is None:
                        return
        except (av.error.FFmpegError, IndexError) as error:
            raise SourceFailure(FailureCode.DECODE_ERRORS, f"the chunk cannot be decoded: {error}") from None
        if target is not None:
            raise SourceFailure(FailureCode.FRAMES_DIFFER, f"the decoder did not return frame {target}")


def read_chunk(video: CommittedShard, row: int) -> ChunkContent:
    """Read the content of a chunk.

    Raises:
        SourceFailure: chunk_damaged if the chunk cannot be read, or does not match its committed checksum.
    """
    if SOURCE_MEMBER in video.extensions:  # packets are read from the source file when frames are decoded
        source = video.packet_tables.source(row)
        assert source is not None, "the index does not refer to a source file"
        start_ms, fields = video.index["start_ms"][row].as_py(), content_fields(video.index, row)
        fps = fields["fps"]
        moments_us = [start_ms * 1000 + (2 * index + 1) * US_PER_S / (2 * fps) for index in range(fields["num_frames"])]
        shown_frames = [source.frame_at(*moment.as_integer_ratio()) for moment in moments_us]
        # Replace each source frame in the packet table with the first frame of the chunk that shows it.
        frame_flags = dict(zip(fields["packet_frame"], fields["packet_flags"], strict=True))
        first_index = {frame: index for index, frame in reversed(list(enumerate(shown_frames)))}
        indices = sorted(first_index.values())
        flags = [frame_flags[shown_frames[index]] for index in indices]
        fields |= {"packet_frame": indices, "packet_flags": flags}
        return SourceContent(b"", **fields, video=video, row=row, source=source, shown_frames=shown_frames)
    try:
        content = video.read(row, "mp4")
    except (Damaged, OSError) as error:
        raise SourceFailure(FailureCode.CHUNK_DAMAGED, f"the chunk cannot be read: {error}") from None
    if zlib.crc32(content) != video.index["mp4_crc32"][row].as_py():
        message = f"the content of the chunk in {video.tar_path.name} differs from the commit"
        raise SourceFailure(FailureCode.CHUNK_DAMAGED, message)
    return ChunkContent(content, **content_fields(video.index, row))


def content_fields(index: pa.Table, row: int) -> dict[str, Any]:
    """Return the attributes of a `ChunkContent` that are read from the index row."""
    fields = {name: index[name][row].as_py() for name in ("num_frames", "packet_frame", "packet_flags")}
    return {**fields, "fps": frame_rate(index, row)}


@dataclass(frozen=True)
class SourceContent(ChunkContent):
    """Content of a chunk whose packets are in its source file.

    Attributes:
        video: Shard of `video` that contains the chunk.
        row: Row of the chunk in this shard.
        source: Frames of the source file.
        shown_frames: Presentation index of the source frame that each frame of the chunk shows.
    """

    video: CommittedShard
    row: int
    source: SourceFrames
    shown_frames: list[int]

    def frames(self, indices: Sequence[int]) -> "Iterator[VideoFrame]":
        """Decode selected frames, and yield them in presentation order.

        Args:
            indices: Indices of the frames, in ascending order.

        Raises:
            SourceFailure: chunk_damaged if the source file has changed or cannot be read; decode_errors if its packets
                cannot be decoded; frames_differ if the decoder does not return a selected frame.
        """
        import av.error

        tables, source_indices = self.video.packet_tables, [self.shown_frames[index] for index in indices]
        table, video_id = tables.packet_table(self.row), self.video.index["video_id"][self.row].as_py()
        is_closed = tables.has_closed_gops(self.row)
        timeline = Timeline.from_json(self.source.timeline)
        upright_filter = UprightFilter(timeline.shape, aspect=timeline.aspects[0][1])
        counts = Counter(source_indices)  # several frames of the chunk may show the same source frame
        try:
            source_file = SourceFile(source_location(self.video.index_path, video_id))
            packets = read_source_packets(source_file, self.source, table, counts, is_closed=is_closed)
            codec, extradata = tables.stream(self.row)
            frames = PacketDecoder().decode(
                codec=codec, extradata=extradata, packets=packets, is_strict=not table.has_recovery_points
            )
            for index, frame in frames:
                if index in counts:
                    yield from repeat(upright_filter.apply(frame), counts.pop(index))
        except (DamagedPacket, Damaged, OSError, Inaccessible, KeyError) as error:
            raise SourceFailure(FailureCode.CHUNK_DAMAGED, f"the source cannot be read: {error}") from None
        except (av.error.FFmpegError, ValueError) as error:
            raise SourceFailure(FailureCode.DECODE_ERRORS, f"the chunk cannot be decoded: {error}") from None
        if counts:
            raise SourceFailure(FailureCode.FRAMES_DIFFER, f"the decoder did not return frame {min(counts)}")


def source_location(index_path: Path, video_id: str) -> str:
    """Return the path or URL of a video's source file, as recorded in the manifest.

    Args:
        index_path: Path of an index in the data folder of the manifest.
        video_id: ID of the video.

    Raises:
        KeyError: The video is not in the manifest.
    """
    data_dir = next(folder for folder in index_path.parents if (folder / "manifest").is_dir())
    state = (manifest_dir(data_dir) / VIDEOS_FILE).stat()
    videos = _read_source_paths(data_dir, state.st_mtime_ns, os.getpid())
    row = pc.index(videos["video_id"], video_id).as_py()
    if row < 0:
        raise KeyError(f"video {video_id} is not in the manifest")
    return str(videos["path"][row].as_py())


@lru_cache(maxsize=1)
def _read_source_paths(data_dir: Path, _mtime_ns: int, _process: int) -> pa.Table:
    return read_videos(data_dir, columns=["video_id", "path"])
