"""`read_clips`: the frames on screen at given times, equal to PyAV's frames, in the requested order."""

import io
import tarfile
from collections.abc import Iterable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest
import torch
from av.video.stream import VideoStream
from numpy.typing import NDArray

from clipmill import Batches, open_clips, read_clips
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.keys import split_key
from clipmill.prep.synthetic import read_frame_number
from tests.train.tiny_data import VARIANT, video_sample, write_captions, write_shard

HEIGHT, WIDTH = 48, 64
NTSC = Fraction(30000, 1001)
SMALL: dict[str, Any] = {"batch": 4, "size_px": (HEIGHT, WIDTH), "workers": 2, "rgb": False}
Frames = list[tuple[Fraction, NDArray[np.uint8]]]  # start in the video in seconds, and planes


def encode(num_frames: int, *, fps: Fraction, seed: int) -> bytes:
    """Encode an mp4 in which all frames differ."""
    content, rng = io.BytesIO(), np.random.default_rng(seed)
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"g": "8", "bf": "2", "preset": "ultrafast"})
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for _ in range(num_frames):
            # Frames are made as planes, because converting RGB would start threads, and a fork of this process would
            # wait for them forever.
            planes = [rng.integers(60, 190, (HEIGHT // 8, WIDTH // 8), np.uint8) for _ in range(3)]
            sides = (8, 4, 4)
            blocks = [plane.repeat(side, 0).repeat(side, 1) for plane, side in zip(planes, sides, strict=True)]
            picture = np.concatenate([plane.reshape(-1) for plane in blocks]).reshape(-1, WIDTH)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="yuv420p")))
        container.mux(stream.encode(None))
    return content.getvalue()


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cameras with different rates; the second chunk of `torn` is missing."""
    data_dir = tmp_path_factory.mktemp("recordings")
    spans = [("slow", Fraction(10), 0, 20), ("slow", Fraction(10), 2000, 15), ("ntsc", NTSC, 0, 50)]
    spans += [("torn", Fraction(10), 0, 10), ("torn", Fraction(10), 2000, 10)]
    samples = [
        video_sample(name, start_ms, encode(count, fps=fps, seed=number), fps=fps)
        for number, (name, fps, start_ms, count) in enumerate(spans)
    ]
    write_shard(data_dir, 0, samples, split="train")
    write_captions(data_dir, {"slow": "train", "ntsc": "val", "torn": "train", "unmade": "train"}, [])
    return data_dir


@pytest.fixture(scope="module")
def frames_of_video(recordings: Path) -> dict[str, Frames]:
    """All frames by video, decoded by PyAV."""
    frames: dict[str, Frames] = {}
    for path in sorted((recordings / "video" / VARIANT).glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".mp4"):
                    video_id, start_ms = split_key(member.name.removesuffix(".mp4"))
                    content = io.BytesIO(tar.extractfile(member).read())  # type: ignore[union-attr]
                    with av.open(content, "r") as container:
                        for frame in container.decode(video=0):
                            begin_s = Fraction(start_ms, 1000) + Fraction(frame.pts or 0) * (frame.time_base or 0)
                            planes = frame.to_ndarray(format="yuv420p").reshape(-1)
                            frames.setdefault(video_id, []).append((begin_s, planes.astype(np.uint8)))
    return {name: sorted(its, key=lambda frame: frame[0]) for name, its in frames.items()}


def open_batches(recordings: Path, table: Any, **changes: Any) -> Batches:
    return read_clips(recordings, table, **{**SMALL, **changes})


def on_screen(frames: Frames, time_s: float) -> tuple[float, NDArray[np.uint8]]:
    """Return the last frame that starts at most 0.1 ms after the time, or else the first frame."""
    begins = [begin_s for begin_s, _ in frames]
    number = max(0, sum(begin_s <= time_s + 1e-4 for begin_s in begins) - 1)
    return float(begins[number]), frames[number][1]


def rows_in_order(clips: Iterable[dict[str, Any]]) -> dict[int, tuple[Any, Any, Any]]:
    return {
        row: (batch["video"][i], batch["time_s"][i], batch["is_padded"][i])
        for batch in clips
        for i, row in enumerate(batch["row"].tolist())
    }


def test_frames_are_those_that_pyav_shows_at_the_times(recordings: Path, frames_of_video: dict[str, Frames]) -> None:
    rng = np.random.default_rng(0)
    offsets_s = (0.07, -0.2, 0.0, 0.07)
    videos = ["slow"] * 20 + ["ntsc"] * 20
    times_s = np.concatenate([rng.uniform(0.2, 3.4, 20), rng.uniform(0.2, 1.59, 20)])
    table = pa.table({"video_id": videos, "time_s": times_s})
    with open_batches(recordings, table, offsets_s=offsets_s) as clips:
        shown = rows_in_order(clips)
    assert sorted(shown) == list(range(40))
    for row, (video, time_s, is_padded) in shown.items():
        for at, offset_s in enumerate(offsets_s):
            begin_s, planes = on_screen(frames_of_video[videos[row]], float(times_s[row]) + offset_s)
            assert np.array_equal(video[at].numpy(), planes), (row, at)
            assert time_s[at].item() == pytest.approx(begin_s, abs=1e-9)
        assert not is_padded.any()


def test_rounded_times_of_frames_show_these_frames(recordings: Path, frames_of_video: dict[str, Frames]) -> None:
    exact_s = [begin_s for begin_s, _ in frames_of_video["ntsc"]]
    exact_N = np.array(exact_s, np.float64)
    for times_s in (exact_N.astype(np.float32), exact_N.round(4), exact_N):
        with open_batches(recordings, {"video_id": ["ntsc"] * 50, "time_s": times_s}, shuffle=False, batch=50) as clips:
            [batch] = clips
        assert np.allclose(batch["time_s"][:, 0], exact_N, rtol=0, atol=1e-9)
        assert np.array_equal(batch["video"][:, 0], np.stack([planes for _, planes in frames_of_video["ntsc"]]))


def test_offsets_out_of_an_episode_show_its_first_and_last_frame(recordings: Path) -> None:
    # LeRobot's rule: frame indices are clamped to the episode, and the mask marks the indices that were outside.
    fps, episodes, steps = 10, [(0, 12), (12, 35)], (-3, -1, 0, 2)
    frames = [(frame, *episode) for episode in episodes for frame in range(*episode)]
    table = {
        "video_id": ["slow"] * 35,
        "time_s": np.array([frame / fps for frame, _, _ in frames], np.float32),
        "begin_s": [begin / fps for _, begin, _ in frames],
        "end_s": [end / fps for _, _, end in frames],
    }
    with open_batches(recordings, table, offsets_s=[step / fps for step in steps], shuffle=False, batch=35) as clips:
        [batch] = clips
    asked = np.array([[frame + step for step in steps] for frame, _, _ in frames])
    begin, end = np.array(frames)[:, 1:2], np.array(frames)[:, 2:3]
    assert np.allclose(batch["time_s"] * fps, np.clip(asked, begin, end - 1))
    assert np.array_equal(batch["is_padded"], (asked < begin) | (asked >= end))
    del table["begin_s"], table["end_s"]
    with open_batches(recordings, table, offsets_s=(-9, 9), shuffle=False, batch=35) as clips:
        [batch] = clips
    assert batch["time_s"].tolist() == [[0.0, 3.4]] * 35 and batch["is_padded"].all()


def test_rows_are_shuffled_shared_by_ranks_and_resumed(recordings: Path) -> None:
    table: dict[str, Any] = {"video_id": ["slow"] * 30, "time_s": np.arange(30) / 10, "state": np.arange(30) * 2.0}
    with open_batches(recordings, table, seed=3) as clips:
        whole = [batch["row"].tolist() for batch in islice(clips, 5)]
        state = clips.state_dict()
        rest = [batch["row"].tolist() for batch in clips]
    assert len({row for batch in whole for row in batch}) == 20 and whole[0] != sorted(whole[0])
    with open_batches(recordings, table, seed=3) as clips:
        clips.load_state_dict(state)
        assert [batch["row"].tolist() for batch in islice(clips, 2)] == rest[:2]
        [batch] = islice(clips, 1)
        joined = table["state"][batch["row"].numpy()]
        assert np.allclose(joined, 20 * batch["time_s"][:, 0])
    ranks = [open_batches(recordings, table, shuffle=False, rank=rank, world=2) for rank in range(2)]
    assert sorted(row for clips in ranks for batch in clips for row in batch["row"].tolist()) == list(range(30))
    with (
        open_batches(recordings, table | {"time_s": np.arange(30) / 10 + 0.05}, seed=3) as clips,
        pytest.raises(UserError),
    ):
        clips.load_state_dict(state)


def test_frames_are_rgb_squares_or_model_input(recordings: Path, frames_of_video: dict[str, Frames]) -> None:
    table = {"key": ["slow_000002000"], "time_s": [2.0]}
    frame = av.VideoFrame.from_ndarray(on_screen(frames_of_video["slow"], 2.0)[1].reshape(-1, WIDTH), format="yuv420p")
    rgb = frame.to_ndarray(format="rgb24", threads=1).astype(int)
    with open_batches(recordings, table, rgb=True, shuffle=False) as clips:
        [batch] = clips
    assert batch["video"].shape == (1, 1, HEIGHT, WIDTH, 3) and "colour" not in batch
    # Pixels in the middle of the blocks are compared, because swscale does not interpolate chroma.
    assert np.abs(batch["video"][0, 0].numpy() - rgb)[3::8, 3::8].max() <= 4
    with open_batches(recordings, table, size_px=48, rgb=True, shuffle=False, device=None) as clips:
        [square] = clips
    assert np.abs(square["video"][0, 0, :, 2:-2].astype(int) - batch["video"][0, 0, :, 10:54].numpy()).max() <= 1
    mean = {"pixel_mean": (0.5, 0.5, 0.5), "pixel_std": (0.5, 0.5, 0.5)}
    with open_batches(recordings, table, size_px=48, shuffle=False, **mean) as clips:
        [model_input] = clips
    assert model_input["video"].shape == (1, 3, 1, 48, 48) and model_input["video"].dtype == torch.float32


def test_several_cameras_are_read_by_their_columns(recordings: Path) -> None:
    table = {
        **{"video_id.top": ["slow"] * 8, "time_s.top": np.arange(8) / 10 + 1, "begin_s.top": [1.0] * 8},
        **{"video_id.wrist": ["ntsc"] * 8, "time_s": np.arange(8) / 10},
    }
    how: dict[str, Any] = {"offsets_s": (-0.1, 0.0), "seed": 5}
    with open_batches(recordings, table, views=("top", "wrist"), **how) as clips:
        both = rows_in_order(clips)
    assert sorted(both) == list(range(8)) and both[0][0].shape == (2, 2, HEIGHT * WIDTH * 3 // 2)
    for view, names in enumerate((("video_id.top", "time_s.top", "begin_s.top"), ("video_id.wrist", "time_s"))):
        with open_batches(recordings, {name.partition(".")[0]: table[name] for name in names}, **how) as clips:
            for row, alone in rows_in_order(clips).items():
                assert all(torch.equal(of_both[view], its) for of_both, its in zip(both[row], alone, strict=True))
    with pytest.raises(UserError, match="the table has only the columns"):
        open_batches(recordings, {"video_id.top": ["slow"], "time_s": [0.0]}, views=("top", "wrist"), batch=1)


def test_rows_without_a_chunk_or_outside_of_the_video_fail_by_name(recordings: Path) -> None:
    times_s = [0.5, 1.5, 2.5, 99.0]
    with open_batches(recordings, {"video_id": ["torn"] * 4, "time_s": times_s}, shuffle=False) as clips:
        shown = rows_in_order(clips)
        assert sorted(shown) == [0, 2]
        assert [(failure.position, failure.reason) for failure in clips.failures] == [
            (1, "chunk_missing"),
            (3, "chunk_missing"),
        ]
        assert "1.500 s" in clips.failures[0].detail and "time_s of row 3 is 99" in clips.failures[1].detail
    table = {"video_id": ["torn"] * 4, "time_s": times_s}
    with open_batches(recordings, table, shuffle=False, max_failures=1) as clips, pytest.raises(FailedWork):
        list(clips)


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        ({"video_id": ["slow", "x", "y"], "time_s": [0, 0, 0]}, {}, r"2 of 3 rows \(row 1: x, row 2: y\) refer"),
        ({"video_id": ["unmade"], "time_s": [0]}, {}, r"1 of 1 row \(row 0: unmade\) refer to videos without chunks"),
        ({"video_id": ["slow"]}, {}, "the table has only the columns video_id"),
        (
            {"video_id": ["slow"], "time_s": [0], "begin_s": [2], "end_s": [1]},
            {},
            "end_s of row 0 .* not after begin_s",
        ),
        ({"video_id": [], "time_s": []}, {}, "the table has no rows"),
        ({"video_id": ["slow"], "time_s": [float("nan")]}, {}, "time_s of row 0 of the table is nan"),
        ({"video_id": ["slow"], "time_s": ["soon"]}, {}, "the column time_s"),
        ({"key": ["slow"], "time_s": [0]}, {}, "'slow' is not a chunk key"),
        ({"video_id": ["slow", "slow"], "time_s": [0]}, {}, "is not a table"),
        ("table.csv", {}, "is not a table"),
        (None, {"offsets_s": ()}, "offsets_s is"),
        (None, {"offsets_s": 0.1}, "offsets_s is 0.1"),
        (None, {"offsets_s": (float("inf"),)}, "offsets_s is"),
        (None, {"size_px": (48, 63)}, "size_px is"),
        (None, {"size_px": "48"}, "size_px is '48'"),
        (None, {"pixel_mean": (0.5, 0.5, 0.5), "pixel_std": (0.5, 0.5, 0.5)}, "pixel_mean needs square frames"),
        (None, {"batch": 2}, "batch=2 is larger than the data, which contain 1 sample"),
        (None, {"crop": "all"}, "crop is 'all'"),
    ],
)
def test_what_does_not_fit_is_refused(recordings: Path, table: Any, changes: dict[str, Any], words: str) -> None:
    table = {"video_id": ["slow"], "time_s": [0.0]} if table is None else table
    with pytest.raises(UserError, match=words):
        open_batches(recordings, table, **{"batch": 1, **changes})


def test_batches_of_all_kinds_have_the_times_of_their_frames(data_dir: Path) -> None:
    how: dict[str, Any] = {"batch": 4, "num_frames": 3, "size_px": 64, "crop": "centre", "workers": 1, "rgb": False}
    several = {"clips": 2, "crops": 3, "shuffle": False}
    for views, shape in ((how, (4, 3)), (how | several, (4, 6, 3))):
        with open_clips(data_dir, **views) as clips:
            batch = next(iter(clips))
        frames = batch["video"].flatten(0, -2)[:, : 64 * 64].reshape(-1, 64, 64).numpy()
        assert batch["time_s"].shape == batch["video"].shape[:-1] == shape and batch["time_s"].dtype == torch.float64
        assert (batch["time_s"] * 10).round().flatten().tolist() == list(map(read_frame_number, frames))
