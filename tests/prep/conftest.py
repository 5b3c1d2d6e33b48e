from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.prep.video.plan_report import EncodeTrials
from tests.prep.sets import made_set, prep, shard_set

__all__ = ["made_set", "prep", "shard_set", "write_video"]


# Files whose plans encode parts of videos to estimate the cost.
WITH_TRIALS = ("test_estimate.py",)


@pytest.fixture(scope="module", autouse=True)
def _no_trials(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let plans estimate with averages only, because a trial takes longer than the rest of a plan."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in WITH_TRIALS:
            patch.setattr("clipmill.prep.video.plan_report.run_trials", lambda *_: EncodeTrials())
        yield


@pytest.fixture(scope="session")
def write_video() -> Callable[..., Path]:
    """Return a function that writes a small video at 30 fps whose frames are numbered from `first_number`."""
    known: dict[tuple[int, int], bytes] = {}  # by number of frames and first number

    def write(path: Path, *, seconds: float = 4, first_number: int = 0) -> Path:
        frames = round(seconds * 30)
        if (content := known.get((frames, first_number))) is None:
            video = FrameNumberVideo(
                num_frames=frames, fps=Fraction(30), width=160, height=120, first_number=first_number
            )
            video.write(path)
            known[frames, first_number] = path.read_bytes()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # do not change other links to the file
            path.write_bytes(content)
        return path

    return write
