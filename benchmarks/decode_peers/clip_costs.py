"""Breakdown of the cost of reading a clip with clipmill: CPU microseconds of each step.

    {"do": "costs", "set": "own", "kind": "..."}     {"the clip path": 5400.0, "libavcodec": 4900.0, ...}

The clip path is timed as training uses it. The steps are timed separately on the same clip; cropping and resizing
alternate with the steps of the decoder, as in the clip path. The remaining time is the overhead of the clip path.
Figures are means over the clips.
"""

import argparse
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.decode_peers.clip_set import SIZE_PX, Clip, read_clips
from benchmarks.decode_peers.libavcodec_floor import ReadyClips
from benchmarks.decode_peers.packet_clips import FrameReader, PacketReader, rectangle_of
from benchmarks.peer_process import answer_requests
from clipmill.train.data.clip_frames import CroppedPlanes, indices_of

WHOLE, DECODE, RESIZE = "the clip path", "libavcodec", "crop and resize"
PLAN, READ, COMPARE, WRAP = "which packets", "read", "checksums", "packet objects"
_Result = TypeVar("_Result")


class Costs:
    """Timer of the steps for a set of chunks."""

    def __init__(self, folder: Path, name: str) -> None:
        self._reader, self._ready = PacketReader(folder, name, rgb=False), ReadyClips(folder, name)
        self._frames = FrameReader(folder, name)

    def measure(self, clips: list[Clip]) -> dict[str, float]:
        """Return the mean CPU microseconds per clip of each step."""
        for clip in clips:
            self._ready.make_ready(clip)
            self._reader.read(clip)
        spent_s = dict.fromkeys((WHOLE, DECODE, RESIZE, PLAN, READ, COMPARE, WRAP), 0.0)
        for clip in clips:
            self._time_steps(clip, spent_s)
        # The time of reading includes the times of two steps that are also timed separately.
        spent_s[READ] -= spent_s[PLAN] + spent_s[COMPARE]
        return {step: 1e6 * seconds / len(clips) for step, seconds in spent_s.items()}

    def _time_steps(self, clip: Clip, spent_s: dict[str, float]) -> None:
        import av

        def timed(step: str, work: Callable[[], _Result]) -> _Result:
            begin_s = time.process_time()
            result = work()
            spent_s[step] += time.process_time() - begin_s
            return result

        shard, row = self._frames.chunks[clip.chunk]
        table = shard.packet_tables.packet_table(row)
        timed(WHOLE, lambda: self._reader.read(clip))
        timed(DECODE, lambda: self._ready.read(clip))
        crop, position_of = (
            CroppedPlanes(len(clip.frames), rectangle_of(clip), size_px=SIZE_PX),
            indices_of(clip.frames),
        )

        def resize(frame: int, picture: av.VideoFrame) -> None:
            timed(RESIZE, lambda: crop.add(picture, position_of[frame]))

        self._frames.decoder.decode_each(self._frames.read_bytes(clip), resize)
        packets = timed(READ, lambda: self._frames.read_bytes(clip).packets or [])
        timed(PLAN, lambda: table.packets_for(clip.frames))
        timed(COMPARE, lambda: [zlib.crc32(content) for _, content in packets])
        timed(WRAP, lambda: [av.Packet(content) for _, content in packets])  # type: ignore[arg-type]


def main() -> None:
    """Answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    clips = read_clips(folder)
    costs_by_set: dict[str, Costs] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        name = request["set"]
        if name not in costs_by_set:
            costs_by_set[name] = Costs(folder, name)
        return costs_by_set[name].measure(clips[request["kind"]])

    answer_requests(answer)


if __name__ == "__main__":
    main()
