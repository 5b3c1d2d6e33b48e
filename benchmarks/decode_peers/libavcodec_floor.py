"""Bare libavcodec: packets in memory are sent to a codec context, and the frames are discarded.

The packets of the clips and the codec contexts are the same as in clipmill; everything else is omitted.
"""

from pathlib import Path
from typing import Any

from benchmarks.decode_peers.clip_set import Clip
from benchmarks.decode_peers.frame_check import ChunkFrames, num_wrong_luma
from benchmarks.decode_peers.packet_clips import FrameReader
from benchmarks.decode_peers.server import serve


class ReadyClips:
    """Reader with the packets of each clip in memory, and one codec context per extradata."""

    def __init__(self, folder: Path, name: str) -> None:
        self._frames = FrameReader(folder, name)
        self._contexts: dict[tuple[str, bytes], Any] = {}
        self._ready: dict[Clip, tuple[Any, list[Any]]] = {}

    def make_ready(self, clip: Clip) -> None:
        """Read the packets of a clip into memory."""
        import av

        content = self._frames.read_bytes(clip)
        codec, extradata = content.codec, content.extradata
        if (codec, extradata) not in self._contexts:
            context = self._contexts[codec, extradata] = av.CodecContext.create(codec, "r")
            context.thread_count = 1
            context.extradata = extradata or None
        packets = []
        for frame, data in content.packets or ():
            packet = av.Packet(data)  # type: ignore[arg-type]  # PyAV accepts any buffer
            packet.pts = frame
            packets.append(packet)
        self._ready[clip] = self._contexts[codec, extradata], packets

    def read(self, clip: Clip) -> dict[int, Any]:
        """Decode all frames in the packets of a clip, and return them by frame index."""
        if clip not in self._ready:
            self.make_ready(clip)
        context, packets = self._ready[clip]
        frames = [frame for packet in packets for frame in context.decode(packet)]
        frames += context.decode(None)
        context.flush_buffers()
        return {frame.pts: frame for frame in frames}

    def num_wrong(self, clip: Clip, found: dict[int, Any], frames: ChunkFrames) -> int:
        """See `Reader.num_wrong`."""
        return num_wrong_luma(clip, found, frames)


if __name__ == "__main__":
    serve(ReadyClips)
