import pytest

from clipmill.manifests.errors import UserError
from clipmill.train.tasks.caption.video_windows import parse_length_us, windows_of


@pytest.mark.parametrize(
    ("video_us", "ends"),
    [
        (100, [100]),  # exactly one window
        (300, [100, 200, 300]),
        (301, [100, 200, 301]),  # the remainder is too short for its own window
        (324, [100, 200, 324]),
        (325, [100, 200, 300, 325]),
        (399, [100, 200, 300, 399]),
        (7, [7]),  # shorter than a window, and there is no window to join
        (0, []),
    ],
)
def test_windows_lie_one_behind_the_other(video_us: int, ends: list[int]) -> None:
    windows = list(windows_of(video_us, length_us=100))
    assert [window.end_us for window in windows] == ends
    assert [window.begin_us for window in windows] == [0, *ends][: len(ends)]


def test_lengths_have_units() -> None:
    assert [parse_length_us(length) for length in ("10s", "2.5s", "500ms")] == [10_000_000, 2_500_000, 500_000]
    for wrong in ("10", "10m", "s", "-1s", "1e3s", "0s", "99ms", "3601s", "\u0661s"):
        with pytest.raises(UserError, match="--len"):
            parse_length_us(wrong)
