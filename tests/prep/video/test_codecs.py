"""Tests of every codec and GOP layout: chunks decode, and the packet table selects the fewest packets for a decoder."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest
from av.packet import Packet

from clipmill.prep.synthetic import read_frame_number
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.reader import Variant
from tests.prep.running import chunk, manifest
from tests.tiers import nightly_beyond

NUM_FRAMES = 75  # two chunks and a tail of 15 frames
COMBINATIONS = [
    ("h264", "comb"),
    ("h264", "star"),
    ("h264", "closed"),
    ("h264", "intra"),
    ("hevc", "comb"),
    ("hevc", "star"),
    ("hevc", "closed"),
    ("hevc", "intra"),
    ("av1", "closed"),
    ("av1", "intra"),
    ("vp9", "closed"),
    ("vp9", "intra"),
    ("mjpeg", "intra"),
]
# Each codec once, and each kind of GOP except one, which differs from another by one frame.
EVERY_DAY = [("h264", "comb"), ("hevc", "star"), ("av1", "closed"), ("vp9", "intra"), ("mjpeg", "intra")]


@dataclass(frozen=True)
class Chunk:
    """Chunk with its row in the index."""

    content: bytes
    row: dict[str, Any]

    def needed_packets(self, frame: int) -> list[int]:
        """Return the rows of the packet table that decoding `frame` needs: key frame, references, and the frame."""
        table = self.row
        target = table["packet_frame"].index(frame)
        key = max(n for n in range(target + 1) if table["packet_flags"][n] & PACKET_KEY)
        return [n for n in range(key, target) if table["packet_flags"][n] & PACKET_REFERENCE] + [target]

    def decode(self, rows: list[int]) -> dict[int, np.ndarray]:
        """Decode only the given packets; return a map from presentation index to image."""
        # libav's own AV1 decoder works only with hardware.
        context = av.CodecContext.create({"av1": "libdav1d"}.get(self.row["codec"], self.row["codec"]), "r")
        context.extradata = self.row["extradata"] or None
        context.thread_count = 1
        pictures: dict[int, np.ndarray] = {}
        for row in rows:
            begin = self.row["packet_offset"][row]
            packet = Packet(self.content[begin : begin + self.row["packet_size"][row]])
            packet.pts, packet.time_base = self.row["packet_frame"][row], Fraction(1, 30)
            pictures |= {frame.pts: frame.to_ndarray() for frame in context.decode(packet)}
        return pictures | {frame.pts: frame.to_ndarray() for frame in context.decode(None)}


@pytest.fixture(scope="module")
def make_chunks(tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]) -> Callable[..., list]:
    folder = tmp_path_factory.mktemp("codecs")
    write_video(folder / "videos/v.mp4", seconds=NUM_FRAMES / 30)
    manifest(folder / "data", folder / "videos")

    def make(codec: str, gop: str) -> list[Chunk]:
        summary = chunk(folder / "data", "--len", "1s", "--codec", codec, "--gop", gop)
        assert summary["num_encoded"] == 3
        variant = Variant.open(folder / "data", variant=summary["variant"])
        [shard] = variant.shards()
        table: pa.Table = shard.index
        return [Chunk(shard.read(n, "mp4"), row) for n, row in enumerate(table.to_pylist())]

    return make


@pytest.mark.parametrize(("codec", "gop"), nightly_beyond(EVERY_DAY, COMBINATIONS))
def test_a_frame_decodes_from_its_packets_alone(codec: str, gop: str, make_chunks: Callable[..., list[Chunk]]) -> None:
    chunks = make_chunks(codec, gop)
    assert [chunk.row["num_frames"] for chunk in chunks] == [30, 30, 15]
    choose = Random(f"{codec} {gop}")
    for number, chunk_ in enumerate(chunks):
        row = chunk_.row
        with av.open(BytesIO(chunk_.content), "r") as container:
            sequential = dict(enumerate(container.decode(video=0)))
            assert row["codec"] == container.streams.video[0].codec_context.codec.canonical_name
        assert len(sequential) == row["num_frames"] == len(row["packet_frame"])
        numbers = [read_frame_number(frame.to_ndarray(format="gray")) for frame in sequential.values()]
        assert numbers == list(range(30 * number, 30 * number + len(numbers)))
        keys = [n for n, flags in enumerate(row["packet_flags"]) if flags & PACKET_KEY]
        assert keys[0] == 0
        # In a closed GOP, frames after a key frame in decoding order also follow it in presentation order.
        for key in keys:
            assert min(row["packet_frame"][key:]) == row["packet_frame"][key]
        if gop == "intra":
            assert len(keys) == len(numbers)
        if gop == "comb":
            references = [row["packet_frame"][n] for n, f in enumerate(row["packet_flags"]) if f & PACKET_REFERENCE]
            assert len(keys) == 1
            assert references == {30: [0, 16, 29], 15: [0, 14]}[len(numbers)]
        if gop == "star":
            assert [row["packet_frame"][key] for key in keys] == list(range(0, len(numbers), 16))
            assert max(len(chunk_.needed_packets(frame)) for frame in range(len(numbers))) <= 3
            references = [row["packet_frame"][n] for n, f in enumerate(row["packet_flags"]) if f & PACKET_REFERENCE]
            assert len(references) <= 2 * len(keys), "a B-frame is a reference"
        for frame in {0, len(numbers) - 1, *choose.sample(range(len(numbers)), 6)}:
            picture = chunk_.decode(chunk_.needed_packets(frame))[frame]
            assert np.array_equal(picture, sequential[frame].to_ndarray()), frame


def test_rate_control_preset_and_size_reach_the_encoder(
    make_chunks: Callable[..., list[Chunk]], tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]
) -> None:
    folder = tmp_path_factory.mktemp("rates")
    write_video(folder / "videos/v.mp4", seconds=4)
    manifest(folder / "data", folder / "videos")
    sizes = {}
    for settings in (
        ("--crf", 15),
        ("--crf", 45),
        ("--bitrate", "20k"),
        ("--bitrate", "100k"),
        ("--short-side", 64),
        ("--preset", "slow"),
    ):
        summary = chunk(folder / "data", "--len", "2s", *settings)
        variant = Variant.open(folder / "data", variant=summary["variant"])
        sizes[settings] = sum(len(sample["mp4"]) for sample in variant.iterate())
        shown = json.loads(next(variant.iterate())["json"])
        assert (shown["width"], shown["height"]) == ((86, 64) if "--short-side" in settings else (160, 120))
    assert sizes["--crf", 15] > sizes["--crf", 45]
    assert sizes["--bitrate", "20k"] < sizes["--bitrate", "100k"]
    assert len(set(sizes.values())) == 6
