"""Only the required frames are encoded; skipping the other frames does not change the latents."""

from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest

from clipmill.prep.core.chunk_content import ChunkContent
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.latents.frames import frames_on_screen
from clipmill.prep.video.span_task import read_chunk
from clipmill.shards.reader import Variant
from tests.prep.running import chunk, manifest


@pytest.mark.parametrize(
    ("num_frames", "chunk_fps", "fps", "expected"),
    [
        (30, "30", "4", [0, 7, 15, 22]),
        (31, "30", "4", [0, 7, 15, 22, 30]),
        (1, "30", "4", [0]),
        (8, "30", "4", [0, 7]),
        (10, "10", "10", list(range(10))),
        (60, "30000/1001", "30000/1001", list(range(60))),
        (60, "30000/1001", "1", [0, 29, 59]),
        (3, "1", "3", [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (450, "30", "1/5", [0, 150, 300]),
    ],
)
def test_a_moment_shows_the_frame_that_is_on_screen(
    num_frames: int, chunk_fps: str, fps: str, expected: list[int]
) -> None:
    assert frames_on_screen(num_frames, chunk_fps=Fraction(chunk_fps), fps=Fraction(fps)) == expected


@pytest.mark.parametrize("settings", [(), ("--gop", "intra"), ("--codec", "hevc"), ("--codec", "vp9")])
def test_skipping_frames_that_nobody_wants_changes_no_pixel(
    write_video: Callable[..., Path], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    write_video(tmp_path / "videos" / "a.mp4", seconds=2)
    manifest(tmp_path / "data", tmp_path / "videos")
    chunk(tmp_path / "data", "--len", "2s", "--short-side", "96", *settings)
    shard = Variant.open(tmp_path / "data").shards()[0]
    content = shard.read(0, "mp4")
    with av.open(BytesIO(content), "r") as container:
        everything = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    facts = read_chunk(content, fps=Fraction(30))
    stored = ChunkContent(content, 60, Fraction(30), facts.packet_frame, facts.packet_flags)
    for numbers in ([0], [59], [3, 4, 31], frames_on_screen(60, chunk_fps=Fraction(30), fps=Fraction(4))):
        pictures = [frame.to_ndarray(format="rgb24") for frame in stored.frames(numbers)]
        assert len(pictures) == len(numbers)
        assert all(np.array_equal(frame, everything[number]) for frame, number in zip(pictures, numbers, strict=True))
    with pytest.raises(SourceFailure) as caught:
        list(stored.frames([59, 60]))
    assert caught.value.code == FailureCode.FRAMES_DIFFER and "frame 60" in caught.value.message
