"""Tests of the keys of chunks, the contents of their members, and access by other programs."""

import json
import subprocess
import tarfile
from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import pytest
import webdataset as wds

from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.shards.reader import Variant
from clipmill.shards.verify import verify_shard
from tests.prep.numbered import frame_numbers
from tests.prep.running import chunk, manifest, prep_here

QUICK = ("--preset", "ultrafast")
CAPTIONS = """video,text,begin_s,end_s
long,starts in the first and ends in the third,1.5,4.25
long,a moment of the second,2.5,2.6
long,ends where the second begins,0.5,2
long,for ever,,
short,"two words, é, 視",0,1
"""


def samples(data: Path) -> dict[str, dict[str, Any]]:
    """Return the samples of the current variant by key, with decoded json."""
    return {
        sample["__key__"]: {**sample, "json": json.loads(sample["json"])} for sample in Variant.open(data).iterate()
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]) -> Path:
    """Create chunks of 2 s from three videos: 5 s and 1.5 s with captions, and one in val without captions."""
    folder = tmp_path_factory.mktemp("contents")
    write_video(folder / "videos/long.mp4", seconds=5)
    write_video(folder / "videos/short.mp4", seconds=1.5)
    write_video(folder / "videos/val/a.b c.mp4", seconds=4, first_number=1000)
    (folder / "captions.csv").write_text(CAPTIONS)
    manifest(folder / "data", folder / "videos", "--captions", folder / "captions.csv")
    chunk(folder / "data", "--len", "2s", *QUICK)
    return folder / "data"


def test_keys_times_and_tails(data: Path) -> None:
    samples_read = samples(data)
    other = next(key for key in samples_read if key.startswith("val_a_b_c-")).partition("_0")[0]
    assert sorted(samples_read) == sorted(
        [f"long_{ms:09d}" for ms in (0, 2000, 4000)] + ["short_000000000", f"{other}_000000000", f"{other}_000002000"]
    )
    for key, sample in samples_read.items():
        description = sample["json"]
        assert description["key"] == key and description["fps"] == [30, 1]
        assert description["video_id"] == key.rpartition("_")[0]
        begin, end = description["begin_s"], description["end_s"]
        assert begin[0] / begin[1] == int(key[-9:]) / 1000
        assert end[0] / end[1] - begin[0] / begin[1] == description["num_frames"] / 30
        assert description["num_source_frames"] == description["num_frames"] == len(frame_numbers(sample["mp4"]))
        assert description["is_tail"] == (description["num_frames"] != 60)
    tail = samples_read["long_000004000"]["json"]
    assert (tail["begin_s"], tail["end_s"], tail["num_frames"]) == ([4, 1], [5, 1], 30)
    assert samples_read["short_000000000"]["json"]["end_s"] == [3, 2]
    assert frame_numbers(samples_read[f"{other}_000002000"]["mp4"]) == list(range(1060, 1120))
    assert samples_read[f"{other}_000002000"]["json"]["source_id"] == "val/a.b c"
    assert {sample["json"]["split"] for key, sample in samples_read.items() if key.startswith("val")} == {"val"}
    assert {shard.split for shard in Variant.open(data).shards()} == {"train", "val"}


def test_captions_are_with_every_chunk_that_they_touch(data: Path) -> None:
    samples_read = samples(data)
    texts = {key: [caption["text"] for caption in sample["json"]["captions"]] for key, sample in samples_read.items()}
    crossing, moment, border, always = (line.split(",")[1] for line in CAPTIONS.splitlines()[1:5])
    assert texts["long_000000000"] == [always, border, crossing]
    assert texts["long_000002000"] == [always, crossing, moment]
    assert texts["long_000004000"] == [always, crossing]
    assert texts["short_000000000"] == ["two words, é, 視"]
    for key, sample in samples_read.items():
        assert sample["txt"].decode().split("\n") == (texts[key] or [""])
    [always_on] = [
        caption for caption in samples_read["long_000004000"]["json"]["captions"] if caption["text"] == always
    ]
    assert always_on["end_s"] is None and always_on["begin_s"] == 0
    ids = {c["text"]: c["caption_id"] for sample in samples_read.values() for c in sample["json"]["captions"]}
    assert sorted(ids.values()) == list(range(5))


@pytest.mark.parametrize(
    ("tail", "frames"),
    [
        ("drop", {"long": [60, 60], "val": [60, 60]}),
        ("merge", {"long": [60, 90], "short": [45], "val": [60, 60]}),
    ],
)
def test_tails_are_dropped_or_merged(
    tail: str, frames: dict[str, list[int]], tmp_path: Path, data: Path, write_video: Callable[..., Path]
) -> None:
    other_data = tmp_path / "data"
    manifest(other_data, data.parent / "videos")
    summary = chunk(other_data, "--len", "2s", "--tail", tail, *QUICK)
    frames_by_key: dict[str, list[int]] = {}
    for key, sample in sorted(samples(other_data).items()):
        frames_by_key.setdefault(key.split("_")[0], []).append(len(frame_numbers(sample["mp4"])))
    assert frames_by_key == frames
    assert tail == "drop" or not {"num_left_out", "left_out_s"} & summary.keys()


def test_webdataset_reads_every_sample_and_pyav_every_frame(data: Path) -> None:
    variant = Variant.open(data)
    tars = [str(shard.tar_path) for shard in variant.shards()]
    assert (variant.directory / "shards.txt").read_text().split() == [Path(tar).name for tar in tars]
    expected = samples(data)
    dataset = wds.WebDataset(tars, shardshuffle=False, nodesplitter=wds.split_by_node)
    seen = {}
    for sample in dataset:
        assert {name for name in sample if not name.startswith("__")} == {"mp4", "json", "txt"}
        assert sample["mp4"] == expected[sample["__key__"]]["mp4"]
        seen[sample["__key__"]] = len(frame_numbers(sample["mp4"]))
    assert seen == {key: sample["json"]["num_frames"] for key, sample in expected.items()}
    for tar in tars:
        with tarfile.open(tar, "r:") as members:
            assert [member.name.partition(".")[2] for member in members][:3] == ["mp4", "json", "txt"]
            assert {(member.mtime, member.uid, member.uname) for member in members.getmembers()} == {(0, 0, "")}
    assert [p for commit in variant.commits.values() for p in verify_shard(variant.directory, commit)] == []


def test_audio_is_kept_on_request_and_dropped_otherwise(tmp_path: Path, write_video: Callable[..., Path]) -> None:
    silent = write_video(tmp_path / "silent.mp4")
    (tmp_path / "videos").mkdir()
    sound = ["-f", "lavfi", "-i", "sine=frequency=440:duration=4"]
    output = ["-c:v", "copy", "-c:a", "aac", str(tmp_path / "videos/sound.mp4")]
    subprocess.run([find_ffmpeg().path, "-v", "error", "-i", str(silent), *sound, *output], check=True)
    silent.rename(tmp_path / "videos/silent.mp4")
    manifest(tmp_path / "data", tmp_path / "videos")
    streams: dict[str, set[str]] = {}
    for audio in ("drop", "keep"):
        settings = ("--data", tmp_path / "data", "--len", "2s", "--audio", audio, *QUICK)
        dropped = "audio    1 of 2 videos have audio, which is omitted; the score `speech` requires --audio keep"
        planned = prep_here("plan", *settings).stdout
        ran = prep_here("chunk", *settings, "--engine", "processes", "--workers", 2)
        again = prep_here("chunk", *settings, "--engine", "processes")
        assert [dropped in text for text in (planned, ran.stderr, again.stderr)] == [*[audio == "drop"] * 2, False]
        assert "2 usable (1 with audio)" in prep_here("status", "--data", tmp_path / "data").stdout
        for key, sample in samples(tmp_path / "data").items():
            assert len(frame_numbers(sample["mp4"])) == 60
            with av.open(BytesIO(sample["mp4"]), "r") as container:
                kinds = {str(stream.type) for stream in container.streams}
                assert streams.setdefault(f"{audio} {key.split('_')[0]}", kinds) == kinds
                if "audio" in kinds:
                    length_s = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
                    assert abs(length_s - 2) < 0.1
    silent_kinds, both = {"video"}, {"audio", "video"}
    assert streams == {
        "drop sound": silent_kinds,
        "drop silent": silent_kinds,
        "keep sound": both,
        "keep silent": silent_kinds,
    }


def test_videos_that_end_in_a_very_short_chunk_are_named_by_the_plan(tmp_path: Path) -> None:
    for name, num_frames in (("lecture", 41), ("exact", 40), ("short", 3), ("half", 30)):
        video = FrameNumberVideo(num_frames=num_frames, fps=Fraction(10), width=64, height=64)
        video.write(tmp_path / "videos" / f"{name}.mp4")
    manifest(data := tmp_path / "data", tmp_path / "videos")
    flags = ("plan", "--data", data, "--len", "2s", "--preset", "ultrafast", "--short-side", 32)
    stdout = prep_here(*flags).stdout
    assert "tails    1 video with a last chunk shorter than 1 s: lecture 0.1 s\n" in stdout
    assert prep_here(*flags, "--json").summary["first_short_tails_s"] == {"lecture": pytest.approx(0.1, abs=0.04)}
    for tail in ("merge", "drop"):
        assert "tails " not in prep_here(*flags, "--tail", tail).stdout
