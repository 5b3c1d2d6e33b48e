"""Hundreds of random clips from frame-numbered videos with every codec: the delivered frames are the requested ones."""

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from clipmill.prep.synthetic import FrameNumberVideo, read_frame_number
from clipmill.shards.reader import CommittedShard, Variant
from clipmill.train.data.clip_frames import ClipShape, Rectangle, crop_clip, make_clip
from clipmill.train.data.decoders import ChunkDecoder, ChunkFrames, DecodeRule, read_chunk
from clipmill.train.data.frame_sampling import ChunkTimes, Sampling, frame_indices, moments_of
from tests.prep.running import chunk, manifest

NUM_FRAMES = 100  # three chunks of 30 frames and a last chunk of 10
FPS = Fraction(30000, 1001)
SIZE_PX = 96
NUM_CLIPS = 100
CODECS = [  # the quality keeps the numbers readable
    ("h264", "comb", "12"),
    ("h264", "star", "12"),
    ("h264", "closed", "12"),
    ("h264", "intra", "12"),
    ("hevc", "star", "12"),
    ("hevc", "closed", "12"),
    ("av1", "closed", "20"),
    ("vp9", "closed", "15"),
    ("mjpeg", "intra", "3"),
]
NIGHTLY = [("h264", "star", "12"), ("h264", "closed", "12"), ("hevc", "closed", "12")]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codecs")
    FrameNumberVideo(num_frames=NUM_FRAMES, fps=FPS, width=SIZE_PX, height=SIZE_PX).write(folder / "videos/v.mp4")
    manifest(folder / "data", folder / "videos")
    return folder / "data"


@pytest.fixture(
    scope="module",
    params=[pytest.param(codec, marks=pytest.mark.nightly) if codec in NIGHTLY else codec for codec in CODECS],
    ids="-".join,
)
def shard(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[CommittedShard]:
    codec, gop, crf = request.param
    # At 29.97 frames per second, 1.001 s hold 30 frames, so chunk boundaries are not round times.
    settings = ["--len", "1001ms", "--fps", "30000/1001", "--short-side", str(SIZE_PX)]
    settings += [] if gop == "intra" else ["--keyint", "12"]
    summary = chunk(data_dir, *settings, "--codec", codec, "--gop", gop, "--crf", crf)
    [shard] = Variant.open(data_dir, variant=summary["variant"]).shards()
    assert shard.index["num_frames"].to_pylist() == [30, 30, 30, 10]
    yield shard


DECODER = ChunkDecoder()


def decode(shard: CommittedShard, row: int, frames: set[int], rule: DecodeRule = "packets") -> ChunkFrames:
    return DECODER.decode(read_chunk(shard, row, frames, rule=rule, key="v"))


def chunks_of(shard: CommittedShard) -> list[ChunkTimes]:
    return [
        ChunkTimes(
            start_ms=row["start_ms"], num_frames=row["num_frames"], fps_num=row["fps_num"], fps_den=row["fps_den"]
        )
        for row in shard.index.to_pylist()
    ]


def test_random_clips_show_the_frames_that_were_asked_for(shard: CommittedShard) -> None:
    """The numbers in the pixels survive sampling, packets, crop and resize, also across chunk boundaries."""
    chunks = chunks_of(shard)
    assert all(shard.packet_tables.packet_table(row).has_closed_gops for row in range(len(chunks)))
    rng = np.random.default_rng(0)
    end_us = int(chunks[-1].end_us)
    for number in range(NUM_CLIPS):
        begin_us = int(rng.integers(end_us - 1))
        span_us = int(rng.integers(1, end_us - begin_us + 1))
        sampling = Sampling(num_frames=int(rng.choice([1, 4, 16])), rule=("uniform", "stride", "lavila")[number % 3])
        clip_rng = None if number % 4 == 0 else np.random.default_rng(number)
        places = frame_indices(begin_us, begin_us + span_us, sampling, chunks, rng=clip_rng)
        frames_by_chunk: dict[int, set[int]] = {}
        for place in places:
            frames_by_chunk.setdefault(place.chunk, set()).add(place.frame)
        frames = {row: decode(shard, row, which) for row, which in frames_by_chunk.items()}
        shape = ClipShape(sampling=sampling, size_px=SIZE_PX, min_crop_area=1.0)
        pictures = [frames[place.chunk][place.frame] for place in places]
        clip = make_clip(pictures, shape, rng=clip_rng, in_graph=False, key="v")
        shown = [read_frame_number(picture[: SIZE_PX**2].reshape(SIZE_PX, SIZE_PX)) for picture in clip.video]
        assert shown == [30 * place.chunk + place.frame for place in places]
        expected = _frames_by_exact_time(begin_us, begin_us + span_us, sampling, number)
        assert shown == expected, (begin_us, span_us, sampling)


def _frames_by_exact_time(begin_us: int, end_us: int, sampling: Sampling, number: int) -> list[int]:
    """Return the video frames on screen at the sampled moments, computed with fractions.

    Chunk starts are stored in whole milliseconds.
    """
    rng = None if number % 4 == 0 else np.random.default_rng(number)
    moments = moments_of(begin_us, end_us, sampling, fps_num=FPS.numerator, fps_den=FPS.denominator, rng=rng)
    return [int(Fraction(time, moments.denominator) * FPS / 1_000_000) for time in moments.numerators]


def test_packets_give_the_very_pixels_of_sequential_decoding(shard: CommittedShard) -> None:
    rng = np.random.default_rng(1)
    for row, num_frames in enumerate(shard.index["num_frames"].to_pylist()):
        sequential = decoded_in_sequence(shard.read(row, "mp4"))
        assert len(sequential) == num_frames
        for _ in range(12):
            frames = rng.choice(num_frames, size=4)
            frames_decoded = decode(shard, row, set(frames.tolist()))
            assert frames_decoded.keys() == set(frames.tolist())
            for frame, picture in frames_decoded.items():
                assert np.array_equal(picture.to_ndarray(), sequential[frame])


def test_by_packets_and_by_container_come_the_same_planes(shard: CommittedShard) -> None:
    """The clip has the resolution of the chunk, so nothing is resized."""
    whole = Rectangle(0, 0, SIZE_PX, SIZE_PX)
    ways = [decode(shard, 1, {3, 17, 29}), decode(shard, 1, {3, 17, 29}, "plain")]
    by_packets, plain = (
        crop_clip([decoding[frame] for frame in (3, 17, 29)], whole, size_px=SIZE_PX) for decoding in ways
    )
    assert np.array_equal(by_packets, plain)


@cache
def decoded_in_sequence(content: bytes) -> list[NDArray[np.uint8]]:
    with av.open(BytesIO(content), "r") as container:
        container.streams.video[0].codec_context.thread_count = 1
        return [np.asarray(frame.to_ndarray()) for frame in container.decode(video=0)]
