from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.prep.video.encode import chunks_of, num_chunks_of, num_output_frames, span_of


@pytest.mark.parametrize(
    ("num_frames", "tail", "chunks"),
    [
        (1, "keep", [1]),
        (1, "drop", []),
        (1, "merge", [1]),
        (10, "keep", [10]),
        (10, "merge", [10]),
        (25, "keep", [10, 10, 5]),
        (25, "drop", [10, 10]),
        (25, "merge", [10, 15]),
        (30, "keep", [10, 10, 10]),
    ],
)
def test_tails(num_frames: int, tail: str, chunks: list[int]) -> None:
    assert chunks_of(num_frames, chunk_frames=10, tail=tail) == chunks


@settings(deadline=None)
@given(
    num_frames=st.integers(1, 3000), chunk_frames=st.integers(1, 50), tail=st.sampled_from(["keep", "drop", "merge"])
)
def test_spans_cover_the_chunks_once_and_never_move(num_frames: int, chunk_frames: int, tail: str) -> None:
    chunks = chunks_of(num_frames, chunk_frames=chunk_frames, tail=tail)
    assert num_chunks_of(np.array([num_frames]), chunk_frames=chunk_frames, tail=tail).tolist() == [len(chunks)]
    assert sum(chunks) == (num_frames - num_frames % chunk_frames if tail == "drop" else num_frames)
    spans = [span_of(chunks, index=index, span_chunks=7) for index in range(-(-len(chunks) // 7))]
    assert [frames for span in spans for frames in span.chunk_frames] == chunks
    assert [span.is_last for span in spans] == [False] * (len(spans) - 1) + [True] * bool(spans)
    # The spans of a longer video start at the same frames.
    assert [span.first_frame for span in spans] == [7 * chunk_frames * index for index in range(len(spans))]
    starts = [start for span in spans for start in span.chunk_starts()]
    assert starts == [chunk_frames * n for n in range(len(chunks))]
    assert all(span.num_frames == sum(span.chunk_frames) for span in spans)


@pytest.mark.parametrize(
    ("end_s", "fps", "frames"),
    [(0.001, "30", 1), (1.0, "30", 30), (60.06, "30000/1001", 1800), (0.05, "30", 2), (10.02, "25", 250)],
)
def test_output_frames(end_s: float, fps: str, frames: int) -> None:
    assert num_output_frames(np.array([end_s]), fps=Fraction(fps)).tolist() == [frames]
