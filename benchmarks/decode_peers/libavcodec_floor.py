"""Bare libavcodec: packets preloaded in memory are fed to a codec context, and the frames are discarded.

It uses the packets that the clips need and clipmill's contexts, without everything around them.
"""

from pathlib import Path
from typing import Any

from benchmarks.decode_peers.clip_set import Clip
from benchmarks.decode_peers.frame_check import ChunkFrames, num_wrong_luma
from benchmarks.decode_peers.packet_clips import chunks_of
from benchmarks.decode_peers.server import serve
from clipmill.shards.decoding import read_packets


class ReadyClips:
    """Preloaded packets of each clip, and one codec context per extradata."""

    def __init__(self, folder: Path, name: str) -> None:
        self._chunks = chunks_of(folder, name)
        self._contexts: dict[tuple[str, bytes], Any] = {}
        self._ready: dict[Clip, tuple[Any, list[Any]]] = {}

    def make_ready(self, clip: Clip) -> None:
        """Read the clip's packets."""
        import av

        shard, row = self._chunks[clip.chunk]
        codec, extradata = shard.index["codec"][row].as_py(), shard.index["extradata"][row].as_py()
        if (codec, extradata) not in self._contexts:
            context = self._contexts[codec, extradata] = av.CodecContext.create(codec, "r")
            context.thread_count = 1
            context.extradata = extradata or None
        packets = []
        table = shard.packet_tables.of_row(row)
        payload, needed = shard.packet_tables.payload(row), table.needed_for(clip.frames)
        for frame, content in read_packets(shard, payload, table, needed):
            packet = av.Packet(content)  # type: ignore[arg-type]  # any buffer will do
            packet.pts = frame
            packets.append(packet)
        self._ready[clip] = self._contexts[codec, extradata], packets

    def read(self, clip: Clip) -> dict[int, Any]:
        """Decode all frames of the clip's packets, by frame index."""
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
