"""Tests of synthetic videos: every frame shows its number, and captions describe the frames."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from clipmill.prep.synthetic import (
    COLOURS,
    COMBINATIONS,
    HEIGHT,
    MAX_FRAME_NUMBER,
    WIDTH,
    FrameNumberVideo,
    Mode,
    Scene,
    draw_frame_number,
    draw_scenes,
    make_synthetic,
    plan_scenes,
    read_frame_number,
)
from tests.prep.numbered import frame_times_s

NTSC = Fraction(30000, 1001)


def frames_of(path: Path) -> tuple[list[np.ndarray], list[float]]:
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    return [frame.to_ndarray(format="rgb24") for frame in frames], [float(frame.time or 0.0) for frame in frames]


@pytest.mark.parametrize("number", [0, 1, 449, 65_535, MAX_FRAME_NUMBER])
@pytest.mark.parametrize("size", [(32, 16), (33, 17), (320, 240), (288, 512)])
def test_a_frame_number_is_read_from_any_size(number: int, size: tuple[int, int]) -> None:
    picture = draw_frame_number(number, width=size[0], height=size[1])
    assert read_frame_number(picture) == number
    assert read_frame_number(np.stack([picture] * 3, axis=2)) == number


def test_every_wrong_cell_is_noticed() -> None:
    picture = draw_frame_number(1234, width=64, height=32)
    for row in range(4):
        for column in range(8):
            wrong = picture.copy()
            cell = wrong[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8]
            cell[:] = 255 - cell
            with pytest.raises(ValueError, match="check bits"):
                read_frame_number(wrong)


@pytest.mark.parametrize("level", [0, 255])
def test_a_blank_picture_is_no_frame_number(level: int) -> None:
    with pytest.raises(ValueError, match="check bits"):
        read_frame_number(np.full((64, 64), level, np.uint8))


def test_two_frames_blended_into_one_are_noticed() -> None:
    first, second = (draw_frame_number(number, width=64, height=32).astype(int) for number in (7, 8))
    with pytest.raises(ValueError, match="neither black nor white"):
        read_frame_number((first + second) // 2)


@pytest.mark.parametrize("number", [-1, MAX_FRAME_NUMBER + 1])
def test_a_number_that_does_not_fit_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="not in"):
        draw_frame_number(number, width=64, height=32)


@pytest.mark.parametrize(
    "form",
    [
        {"fps": Fraction(30)},
        {"fps": NTSC},
        {"fps": NTSC, "variable_rate": True},
        {"fps": Fraction(25), "start_offset_s": 1.4},
        {"fps": Fraction(30), "pixel_format": "yuv420p10le"},
        {"fps": Fraction(30), "open_gop": True, "gop": 12},
        {"fps": Fraction(30), "width": 161, "height": 91, "pixel_format": "yuv444p"},
        {"fps": Fraction(30), "width": 161, "height": 91, "codec": "mpeg4"},
        {"fps": Fraction(24), "codec": "libx265"},
    ],
    ids=lambda form: " ".join(map(str, form.values())),
)
def test_a_video_has_the_frames_and_times_that_were_asked_for(tmp_path: Path, form: dict[str, Any]) -> None:
    path = tmp_path / "x.mp4"
    FrameNumberVideo(**{"num_frames": 40, "width": 160, "height": 96, "first_number": 500, **form}).write(path)
    pictures, times_s = frames_of(path)
    assert [read_frame_number(picture) for picture in pictures] == list(range(500, 540))
    timing = {name: form[name] for name in ("fps", "start_offset_s", "variable_rate") if name in form}
    assert times_s == pytest.approx(frame_times_s(40, **timing), abs=1e-4)


def test_a_variable_rate_varies_and_keeps_its_mean() -> None:
    times_s = frame_times_s(81, fps=Fraction(30), variable_rate=True)
    assert len(set(np.diff(times_s).round(6))) > 3
    assert times_s[-1] == pytest.approx(80 / 30)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_rotated_video_is_upright_once_a_player_has_turned_it(tmp_path: Path, degrees: int) -> None:
    path = tmp_path / "x.mp4"
    FrameNumberVideo(num_frames=5, fps=Fraction(30), width=160, height=96, rotation_degrees=degrees).write(path)
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    # FFmpeg's display rotation counts counter-clockwise.
    assert all(frame.rotation % 360 == -degrees % 360 for frame in frames)
    pictures = [np.rot90(frame.to_ndarray(format="gray"), -degrees // 90) for frame in frames]
    assert pictures[0].shape == (96, 160)
    assert [read_frame_number(picture) for picture in pictures] == [0, 1, 2, 3, 4]


def test_frame_numbers_survive_scaling_and_strong_compression(tmp_path: Path) -> None:
    path, small = tmp_path / "x.mp4", tmp_path / "small.mp4"
    FrameNumberVideo(num_frames=60, fps=Fraction(30), width=640, height=360).write(path)
    with av.open(str(path)) as source, av.open(str(small), "w") as target:
        stream = target.add_stream("libx264", rate=30, options={"crf": "28", "preset": "veryfast"})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 512, 288, "yuv420p"
        for frame in source.decode(video=0):
            target.mux(stream.encode(frame.reformat(width=512, height=288)))
        target.mux(stream.encode(None))
    assert [read_frame_number(picture) for picture in frames_of(small)[0]] == list(range(60))


def test_scenes_tile_a_video_without_gaps() -> None:
    for number in range(20):
        scenes = plan_scenes(duration_s=60.0, seed=3, split="train", index=number)
        assert scenes[0].begin_s == 0.0
        assert scenes[-1].end_s == 60.0
        assert all(first.end_s == two.begin_s for first, two in pairwise(scenes))
        assert all(3.0 <= scene.end_s - scene.begin_s <= 9.0 for scene in scenes)


def test_few_sentences_are_repeated_before_most_have_come() -> None:
    texts = [scene.text for n in range(5) for scene in plan_scenes(duration_s=60.0, seed=0, split="val", index=n)]
    assert len(set(texts)) == len(texts)
    assert len({f"a {' '.join(combination)}" for combination in COMBINATIONS} & set(texts)) == len(texts)


@pytest.mark.parametrize("colour", COLOURS)
def test_a_shape_has_its_colour_and_moves_as_described(colour: str) -> None:
    scene = Scene(0.0, 3.0, colour, "circle", "moves to the left", (0.0, 0.0))
    frames = list(draw_scenes([scene], fps=Fraction(10), num_frames=30, seed=0))
    centres = []
    for frame in frames:
        picture = av.VideoFrame.from_ndarray(frame, format="yuv420p")
        assert (picture.width, picture.height) == (WIDTH, HEIGHT)
        inside = np.abs(frame[:HEIGHT].astype(int) - COLOURS[colour][0]) == 0
        cb = frame[HEIGHT:].reshape(2, HEIGHT // 2, WIDTH // 2)[0].repeat(2, axis=0).repeat(2, axis=1)
        centres.append(np.nonzero(inside & (cb == COLOURS[colour][1]))[1].mean())
    assert centres[0] - centres[-1] > WIDTH * 0.6
    assert all(first > two for first, two in pairwise(centres))


def test_the_same_settings_make_the_same_bytes_and_more_videos_change_none(tmp_path: Path) -> None:
    few = make_synthetic(tmp_path / "few", num_videos=1, minutes=0.1)
    more = make_synthetic(tmp_path / "more", num_videos=2, minutes=0.1)
    first = few.videos["path"][0].as_py()
    again = more.videos["path"][0].as_py()
    assert Path(first).read_bytes() == Path(again).read_bytes()
    assert more.captions.slice(0, few.captions.num_rows).to_pylist() == few.captions.to_pylist()
    other = make_synthetic(tmp_path / "few", num_videos=1, minutes=0.1, seed=1)
    assert other.videos["video_id"].to_pylist() != few.videos["video_id"].to_pylist()


def test_videos_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    make_synthetic(tmp_path, num_videos=1, minutes=0.05)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    made: list[int] = []
    make_synthetic(tmp_path, num_videos=2, minutes=0.05, on_video=made.append)
    assert made == [2]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_every_fifth_video_is_held_out(tmp_path: Path) -> None:
    reading = make_synthetic(tmp_path, num_videos=5, minutes=0.02)
    assert reading.videos["split"].to_pylist() == ["train"] * 4 + ["val"]


def test_frame_number_captions_name_the_frames_of_their_interval(tmp_path: Path) -> None:
    reading = make_synthetic(tmp_path, num_videos=1, minutes=0.1, mode=Mode.FRAME_NUMBERS)
    rows = [tuple(row.values())[1:4] for row in reading.captions.to_pylist()]
    assert rows == [(0.0, 5.0, "frame numbers from 0 to 149"), (5.0, 6.0, "frame numbers from 150 to 179")]
    pictures, _ = frames_of(Path(reading.videos["path"][0].as_py()))
    assert [read_frame_number(picture) for picture in pictures] == list(range(180))


def test_labels_say_what_the_captions_say(tmp_path: Path) -> None:
    captions = make_synthetic(tmp_path, num_videos=2, minutes=0.1).captions.to_pylist()
    for row in captions:
        assert row["text"] == f"a {row['label_colour']} {row['label_shape']} {row['label_motion']}"
    numbers = make_synthetic(tmp_path, num_videos=1, minutes=0.1, mode=Mode.FRAME_NUMBERS)
    assert not [name for name in numbers.captions.column_names if name.startswith("label_")]
