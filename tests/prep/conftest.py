from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from clipmill.prep.synthetic import FrameNumberVideo
from tests.prep.sets import made_set, prep, shard_set

__all__ = ["made_set", "prep", "shard_set", "write_video"]


@pytest.fixture(scope="session")
def write_video() -> Callable[..., Path]:
    """Writes a small video whose frames read `first_number` and on; 30 fps."""

    def write(path: Path, *, seconds: float = 4, first_number: int = 0) -> Path:
        frames = round(seconds * 30)
        FrameNumberVideo(num_frames=frames, fps=Fraction(30), width=160, height=120, first_number=first_number).write(
            path
        )
        return path

    return write
