"""clipmill: read the packets of a clip from the shard or the source, verify and decode them, and crop YUV planes.

`--as rgb` converts the planes to RGB on the CPU; `--as frames` does not crop.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.decode_peers.clip_set import MIN_AREA, SIZE_PX, Clip, chunk_path, data_folder
from benchmarks.decode_peers.frame_check import ChunkFrames, num_wrong_luma, num_wrong_rgb
from benchmarks.decode_peers.server import Reader, serve
from clipmill.shards.decoding import SourceFile
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.train.data.clip_frames import ClipBuilder, ClipShape, Rectangle, as_yuv420, crop_clip, indices_of
from clipmill.train.data.decoders import ChunkBytes, ChunkDecoder, read_chunk
from clipmill.train.data.frame_sampling import Sampling

if TYPE_CHECKING:
    import av


class FrameReader:
    """Reader that returns the decoded frames of a clip, by frame index."""

    def __init__(self, folder: Path, name: str) -> None:
        self.chunks = chunks_of(folder, name)
        self.decoder = ChunkDecoder()
        self._sources = {chunk: SourceFile(str(chunk_path(folder, name, chunk))) for chunk in self.chunks}

    def read(self, clip: Clip) -> "dict[int, av.VideoFrame]":
        """See `Reader.read`."""
        return self.decoder.decode(self.read_bytes(clip))

    def read_bytes(self, clip: Clip) -> ChunkBytes:
        """Read the packets of a clip."""
        shard, row = self.chunks[clip.chunk]
        return read_chunk(
            shard, row, clip.frames, rule="packets", key=str(clip.chunk), source=lambda: self._sources[clip.chunk]
        )

    def num_wrong(self, clip: Clip, found: "dict[int, av.VideoFrame]", frames: ChunkFrames) -> int:
        """See `Reader.num_wrong`."""
        return num_wrong_luma(clip, found, frames)


class PacketReader:
    """Reader with the code path of training: uint8 [T, SIZE_PX * SIZE_PX * 3 / 2], or RGB [T, SIZE_PX, SIZE_PX, 3]."""

    def __init__(self, folder: Path, name: str, *, rgb: bool) -> None:
        self._frames = FrameReader(folder, name)
        # The sampling is not used, because the clip determines its frames.
        self._shape = ClipShape(sampling=Sampling(num_frames=1), size_px=SIZE_PX, min_crop_area=MIN_AREA, rgb=rgb)

    def read(self, clip: Clip) -> np.ndarray:
        """See `Reader.read`."""
        rng, num_frames = np.random.default_rng(clip.seed), len(clip.frames)
        builder = ClipBuilder(self._shape, num_frames=num_frames, rng=rng, key=str(clip.chunk))
        position_of = indices_of(clip.frames)
        content = self._frames.read_bytes(clip)
        self._frames.decoder.decode_each(content, lambda frame, picture: builder.add(picture, position_of[frame]))
        return builder.clip().video

    def num_wrong(self, clip: Clip, found: np.ndarray, frames: ChunkFrames) -> int:
        """See `Reader.num_wrong`. YUV planes must be identical to the planes of the sequentially decoded frame."""
        if self._shape.rgb:
            return num_wrong_rgb(clip, found, frames)
        asked = [as_yuv420(frames.decoded[number]) for number in clip.frames]
        wanted = crop_clip(asked, rectangle_of(clip), size_px=SIZE_PX)
        return int((found != wanted).any(1).sum())


def chunks_of(folder: Path, name: str) -> dict[int, tuple[CommittedShard, int]]:
    """Return the shard and the row of every chunk in a set."""
    chunks = {}
    for shard in Variant.open(data_folder(folder, name)).shards():
        for row, video_id in enumerate(shard.index["video_id"].to_pylist()):
            chunks[int(video_id)] = (shard, row)
    return chunks


def rectangle_of(clip: Clip) -> Rectangle:
    """Return the crop rectangle of the clip."""
    return Rectangle(clip.left, clip.top, clip.width, clip.height)


def main() -> None:
    """Respond to requests, with the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--as", choices=["planes", "rgb", "frames"], default="planes", dest="form")
    form = parser.parse_known_args()[0].form

    def open_reader(folder: Path, name: str) -> Reader:
        if form == "frames":
            return FrameReader(folder, name)
        if form == "rgb":
            import torch

            torch.set_num_threads(1)
        return PacketReader(folder, name, rgb=form == "rgb")

    serve(open_reader)


if __name__ == "__main__":
    main()
