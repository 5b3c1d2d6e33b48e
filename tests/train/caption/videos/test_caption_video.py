"""`train caption-video` from the command line, with a briefly trained captioner."""

import json
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.further_sources import is_source_name, source_name
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.train.inference import load_model
from clipmill.train.tasks.caption.video_captions import open_captioner
from tests.train.running import train


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two videos, of 3 and 5 seconds, and a file that is not a video."""
    folder = tmp_path_factory.mktemp("films")
    for name, num_frames in (("a.mp4", 30), ("deep/b.mkv", 50)):
        FrameNumberVideo(num_frames=num_frames, fps=Fraction(10), width=64, height=48).write(folder / name)
    (folder / "notes.txt").write_text("no video")
    return folder


def test_lines_are_printed_for_each_window(
    captioner_run: Path, films: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("caption-video", captioner_run, films, "--len", "2s") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    times = ["0.00-2.00 s", "2.00-3.00 s", "0.00-2.00 s", "2.00-4.00 s", "4.00-5.00 s"]
    assert [(row[0], row[1]) for row in rows] == [
        (str(films / name), time) for name, time in zip(["a.mp4"] * 2 + ["deep/b.mkv"] * 3, times, strict=True)
    ]
    assert all(row[2] == " ".join(row[2].split()) for row in rows)


def test_a_file_has_the_same_whatever_the_batch(captioner_run: Path, films: Path, tmp_path: Path) -> None:
    common = ("caption-video", captioner_run, films, "--len", "1s")
    assert train(*common, "--out", tmp_path / "new/c.json", "--batch", 1) == 0
    assert train(*common, "--out", tmp_path / "c.json", "--batch", 5) == 0
    objects = [json.loads(path.read_bytes()) for path in (tmp_path / "new/c.json", tmp_path / "c.json")]
    kept = [
        [(caption["video"], caption["begin_s"], caption["end_s"], caption["text"]) for caption in captions_in_file]
        for captions_in_file in objects
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 8
    assert [caption[1:3] for caption in kept[0]] == [(n, n + 1.0) for n in (0, 1, 2, 0, 1, 2, 3, 4)]
    assert {caption["source"] for caption in objects[0]} == {f"run@{load_model(captioner_run).identity[:8]}"}
    assert max(caption["likelihood"] for caption in objects[0]) < 0


def test_subtitles_of_several_videos_are_files_in_a_folder(
    captioner_run: Path, films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draws = ("--decoding.method", "sample", "--decoding.min-tokens", 2)
    common = ("caption-video", captioner_run, films, "--len", "1s", *draws)
    assert train(*common, "--out", tmp_path / "srt", "--format", "srt") == 0
    assert sorted(path.name for path in (tmp_path / "srt").iterdir()) == ["a.srt", "b.srt"]
    assert train("caption-video", captioner_run, films / "a.mp4", *common[3:], "--out", tmp_path / "a.srt") == 0
    assert (tmp_path / "a.srt").read_bytes() == (tmp_path / "srt/a.srt").read_bytes()
    (tmp_path / "videos").mkdir()
    for path in (films / "a.mp4", tmp_path / "a.srt"):
        shutil.copy(path, tmp_path / "videos")
    captions = read_folder(tmp_path / "videos", subtitles=True).captions.to_pylist()
    assert [(caption["begin_s"], caption["end_s"]) for caption in captions] == [(n, n + 1.0) for n in range(3)]
    assert train(*common, "--out", tmp_path / "all.srt") == 2
    assert "use a folder" in capsys.readouterr().err


def test_a_damaged_video_is_named_and_the_others_are_written(
    captioner_run: Path, films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.mp4").write_bytes((films / "a.mp4").read_bytes()[:2000])
    for out in ("c.json", "srt"):
        flags = ("--out", tmp_path / out, "--format", Path(out).suffix[1:] or "srt")
        assert train("caption-video", captioner_run, tmp_path / "bad.mp4", films / "a.mp4", *flags) == 1
        error = capsys.readouterr().err
        assert f"{tmp_path / 'bad.mp4'}: no video stream (streams: none)" in error
        assert "failed: 1 of 2 videos could not be read to the end" in error
    assert [caption["video"] for caption in json.loads((tmp_path / "c.json").read_bytes())] == [str(films / "a.mp4")]
    assert [path.name for path in (tmp_path / "srt").iterdir()] == ["a.srt"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["{films}/none.mp4"], "there is no "),
        (["{films}", "--len", "10"], '--len "10" is not a length'),
        (["{films}", "--batch", "0"], "--batch 0 is less than 1"),
        (["{films}", "--out", "c.txt"], "without --out, lines of text are printed"),
        (["{films}", "--format", "json"], "--format json applies only to files"),
        (["{films}", "--out", "{films}", "--format", "json"], "is a folder"),
        (["{films}", "--out", "{films}/notes.txt/c.json"], "cannot be created"),
        (["{films}", "--decoding.top-k", "3"], "--decoding.top-k 3 has no effect"),
    ],
)
def test_mistakes_are_named(
    captioner_run: Path, films: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert train("caption-video", captioner_run, *(flag.format(films=films) for flag in flags)) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_another_task_has_no_captions(films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("caption-video", tmp_path, films) == 2
    assert "there is no run" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--decoding.max-tokens", "--decoding.min-tokens"])
def test_a_limit_beyond_the_context_is_refused(
    captioner_run: Path, films: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = {"--decoding.max-tokens": 13, "--decoding.min-tokens": 12}[flag]
    for command in (("caption-video", captioner_run, films), ("eval", "caption", captioner_run)):
        assert train(*command, flag, limit) == 2
        assert f"{flag} is {limit}, but the decoder's context has 12 tokens" in capsys.readouterr().err
    assert train("caption-video", captioner_run, films / "a.mp4", flag, limit - 1) == 0


def test_a_run_with_any_name_is_a_source_that_can_be_added(captioner_run: Path) -> None:
    captioner = open_captioner(str(captioner_run), device="cpu")
    assert captioner.source == f"{captioner_run.name}@{captioner.weights_sha256[:8]}"
    for name, expected in (("my run, 2", "my-run-2"), ("a@b=c", "a-b-c"), ("été_1.0", "été_1.0")):
        source = replace(captioner, name=name).source
        assert source_name(source) == expected and is_source_name(expected)
