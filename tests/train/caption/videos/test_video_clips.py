"""Clips of video files: they show the frames that are on screen at the moments that an evaluation samples."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from clipmill.prep.synthetic import FrameNumberVideo, read_frame_number
from clipmill.shards.reader import Variant
from clipmill.train.data.clip_frames import ClipShape, Rectangle, centre_square, make_clip, rgb_frames
from clipmill.train.data.decoders import ChunkDecoder, read_chunk
from clipmill.train.data.frame_sampling import US_PER_S, ChunkTimes, Sampling, frame_indices, moments_of
from clipmill.train.tasks.caption.video_windows import WindowClip, read_timing, shown_square, window_clips
from tests.prep.numbered import frame_times_s
from tests.prep.running import chunk, manifest

FPS = Fraction(10)
SIZE_PX = 64
UNIFORM = Sampling(num_frames=4)


def video(
    folder: Path, name: str = "v.mp4", *, num_frames: int = 35, width: int = 96, height: int = 96, **how: Any
) -> Path:
    path = folder / name
    FrameNumberVideo(num_frames=num_frames, fps=FPS, width=width, height=height, **how).write(path)
    return path


def clips(path: Path, sampling: Sampling = UNIFORM, *, size_px: int = SIZE_PX, length_s: float = 1) -> list[WindowClip]:
    return list(window_clips(path, sampling, size_px=size_px, length_us=round(length_s * US_PER_S)))


def numbers(clip: WindowClip, *, size_px: int = SIZE_PX) -> list[int | None]:
    return [read_frame_number(luma(picture, size_px)) for picture in clip.video]


def luma(picture: NDArray[np.uint8], size_px: int = SIZE_PX) -> NDArray[np.uint8]:
    return picture[: size_px * size_px].reshape(size_px, size_px)


def due(clip: WindowClip, times_s: NDArray[np.float64], sampling: Sampling = UNIFORM) -> list[int]:
    """Return the frame on screen at each moment, computed from the encoded times."""
    window = clip.window
    moments = moments_of(window.begin_us, window.end_us, sampling, fps_num=10, fps_den=1, rng=None)
    due_s = np.array(moments.numerators) / moments.denominator / US_PER_S
    return np.maximum(np.searchsorted(times_s, due_s + 1e-9, side="right") - 1, 0).tolist()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("plain.mp4", {}),
        ("later.mp4", {"start_offset_s": 1.0}),
        ("varies.mkv", {"variable_rate": True, "start_offset_s": 0.5}),
        ("open.mp4", {"open_gop": True, "gop": 8}),
        ("ten-bit.mp4", {"pixel_format": "yuv420p10le"}),
        ("old.avi", {"codec": "mpeg4"}),
        ("stream.ts", {}),
        ("odd.mkv", {"pixel_format": "yuv444p", "width": 97, "height": 97}),
        ("turned.mp4", {"rotation_degrees": 90}),
        ("upside-down.mp4", {"rotation_degrees": 180}),
        ("turned-back.mp4", {"rotation_degrees": 270}),
    ],
)
def test_windows_show_the_frames_on_screen(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    result = clips(video(tmp_path, name, **how))
    timing = {key: how[key] for key in ("variable_rate", "start_offset_s") if key in how}
    times_s = frame_times_s(35, fps=FPS, **timing)
    times_s -= times_s[0]  # a player starts at the first frame
    assert [numbers(clip) for clip in result] == [due(clip, times_s) for clip in result]
    assert result[0].window.begin_us == 0
    assert all(before.window.end_us == after.window.begin_us for before, after in pairwise(result))
    last_s = times_s[-1] + 0.1
    assert result[-1].window.end_us / US_PER_S == pytest.approx(last_s, abs=0.11)


@pytest.mark.parametrize(
    ("name", "duration", "end_s"),
    [
        ("grid.avi", 1, 1.1),  # the last frame lasts one step of the grid, however many frames are omitted
        ("long.mp4", 4, 1.4),
        ("gap.mkv", 0, 1.2),  # without durations, the last frame lasts as long as the previous frame
    ],
)
def test_a_video_with_frames_left_out_ends_with_its_last_frame(
    tmp_path: Path, name: str, duration: int, end_s: float
) -> None:
    whole = video(tmp_path, "whole.avi", num_frames=11, codec="mjpeg", pixel_format="yuvj420p")
    with av.open(str(whole)) as source, av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        stream.time_base = 1 / FPS
        packets = [packet for packet in source.demux(video=0) if packet.size]
        for number in (0, 3, 7, 8, 10):
            packet = packets[number]
            packet.pts = packet.dts = number
            packet.stream, packet.duration, packet.time_base = stream, duration, 1 / FPS
            container.mux(packet)
    facts = read_timing(tmp_path / name)
    assert (facts.last_us, facts.end_us) == pytest.approx((1e6, end_s * 1e6), abs=2)
    if name.endswith("avi"):
        assert clips(tmp_path / name, length_s=10)[0].window.end_us == facts.end_us


@pytest.mark.parametrize("rule", ["stride", "lavila"])
def test_rules_that_count_frames_count_those_of_the_file(tmp_path: Path, rule: str) -> None:
    sampling = Sampling(num_frames=4, rule=rule, stride=2)  # type: ignore[arg-type]
    result = clips(video(tmp_path), sampling)
    assert [numbers(clip) for clip in result] == [due(clip, np.arange(35) / 10, sampling) for clip in result]
    assert numbers(result[1]) == ([11, 13, 15, 17] if rule == "stride" else numbers(result[1]))


def test_a_window_with_few_frames_repeats_them(tmp_path: Path) -> None:
    [clip] = clips(video(tmp_path, num_frames=2), length_s=10)
    assert numbers(clip) == [0, 0, 1, 1]


def test_a_wide_picture_is_cut_in_its_middle(tmp_path: Path) -> None:
    wide = luma(clips(video(tmp_path, num_frames=3, width=192, height=96))[0].video[0])
    square = luma(clips(video(tmp_path, "s.mp4", num_frames=3))[0].video[0])
    assert wide.shape == square.shape and wide.std() > 0


def test_pixels_that_are_not_square_are_cut_as_they_are_shown() -> None:
    assert shown_square(720, 576, aspect=Fraction(64, 45)) == Rectangle(157, 0, 405, 576)  # 1024 x 576 on the screen
    assert shown_square(100, 400, aspect=Fraction(2)) == Rectangle(0, 100, 100, 200)
    for width, height in ((97, 64), (64, 97), (1, 5)):
        assert shown_square(width, height, aspect=Fraction(1)) == centre_square(width, height)


def test_a_longer_sound_track_changes_nothing(tmp_path: Path) -> None:
    silent, loud = video(tmp_path, "silent.mkv"), tmp_path / "loud.mkv"
    with av.open(str(silent)) as source, av.open(str(loud), "w") as target:
        sound = target.add_stream("pcm_s16le", rate=8000)
        pictures = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None or packet.size:
                packet.stream = pictures
                target.mux(packet)
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 8000 * 8), np.int16), format="s16", layout="mono")
        samples.sample_rate = 8000
        target.mux(sound.encode(samples))
        target.mux(sound.encode(None))
    with av.open(str(loud)) as container:
        assert container.duration == pytest.approx(8_000_000, rel=0.01)
    result = clips(loud)
    assert [clip.window for clip in result] == [clip.window for clip in clips(silent)]
    assert [numbers(clip) for clip in result] == [numbers(clip) for clip in clips(silent)]


def test_white_of_a_gif_is_white(tmp_path: Path) -> None:
    path = tmp_path / "white.gif"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("gif", rate=10)
        stream.width = stream.height = 32
        stream.pix_fmt = "rgb8"
        for _ in range(5):
            picture = np.full((32, 32, 3), 255, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="rgb8")))
        container.mux(stream.encode(None))
    [clip] = clips(path, size_px=16)
    [*_, picture] = rgb_frames(clip.video, clip.colour, size_px=16)
    assert picture.min() >= 250  # a limited range would give 235


def test_a_file_and_its_shard_show_nearly_the_same(tmp_path: Path) -> None:
    """A moving image is chunked by `prep chunk` and compared with the same windows of the source file."""
    source = tmp_path / "videos/v.mp4"
    write_moving(source, num_frames=60)
    manifest(tmp_path / "data", tmp_path / "videos")
    summary = chunk(tmp_path / "data", "--len", "2s", "--fps", "10", "--short-side", "128")
    [shard] = Variant.open(tmp_path / "data", variant=summary["variant"]).shards()
    shape = ClipShape(sampling=UNIFORM, size_px=64)
    for row, clip in enumerate(clips(source, length_s=2)):
        times = ChunkTimes(start_ms=2000 * row, num_frames=20, fps_num=10, fps_den=1)
        assert shard.index["start_ms"][row].as_py() == times.start_ms
        window = clip.window
        places = frame_indices(window.begin_us, window.end_us, UNIFORM, [times], rng=None)
        content = read_chunk(shard, row, {place.frame for place in places}, rule="packets", key="v")
        frames = ChunkDecoder().decode(content)
        stored = make_clip([frames[place.frame] for place in places], shape, rng=None, in_graph=False, key="v")
        assert stored.colour == clip.colour
        apart = np.abs(stored.video.astype(int) - clip.video.astype(int))
        assert apart.mean() < 3 and np.percentile(apart, 99) < 20
        earlier = np.roll(clip.video, 1, axis=0)
        assert np.abs(stored.video.astype(int) - earlier.astype(int)).mean() > 3 * apart.mean()


def write_moving(path: Path, *, num_frames: int) -> None:
    """Write a video of a bright disc that crosses a wide, coloured frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[:144, :256]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"crf": "10"})
        stream.width, stream.height, stream.pix_fmt = 256, 144, "yuv420p"
        for number in range(num_frames):
            centre = 70 + (number * 9) % 120
            disc = (x - centre) ** 2 + (y - 72) ** 2 < 1200
            picture = np.stack([x // 2, y, np.full_like(x, 90)], -1).astype(np.uint8)
            picture[disc] = (250, 240, 60)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
