import json
import re
from pathlib import Path

import pytest

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.train.tasks.caption.spec import VideoFormat
from clipmill.train.tasks.caption.video_captions import WRITERS, format_of, open_sink, srt_time, subtitle_names
from clipmill.train.tasks.caption.video_windows import CaptionedWindow, VideoProgress

CAPTIONS = [
    'a cat, a "dog"; and a bird\'s nest',
    '=HYPERLINK("http://example.org")',
    "+1",
    "@sum",
    "-2 degrees",
    "",
    "<b>bold</b> {\\an8}top 1 --> 2",
    "两只猫在睡觉 🐈",
    "7",
    "<script>alert(1)</script>",
]


def windows(captions: list[str] = CAPTIONS) -> list[CaptionedWindow]:
    return [
        CaptionedWindow(Path("a, b/v.mp4"), number * 2_500_000, (number + 1) * 2_500_000, caption, 99)
        for number, caption in enumerate(captions)
    ]


def test_empty_captions_are_counted_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with VideoProgress(num_videos=1) as progress:
        for window in windows():
            progress.show(window)
    progress.say_done(" in a.srt")
    message = "done: captions of 10 windows of 1 video in a.srt; 1 of 10 captions are empty; "
    assert message in capsys.readouterr().err


def write_captions(path: Path, form: VideoFormat, captions: list[str] = CAPTIONS) -> str:
    with WRITERS[form](path) as write:
        for window in windows(captions):
            write(window)
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


@pytest.mark.parametrize("captions", [CAPTIONS, CAPTIONS[:1], []])
def test_json_reads_back(tmp_path: Path, captions: list[str]) -> None:
    objects = json.loads(write_captions(tmp_path / "c.json", "json", captions))
    assert [caption["text"] for caption in objects] == captions
    assert [(caption["begin_s"], caption["end_s"]) for caption in objects] == [
        (2.5 * n, 2.5 * n + 2.5) for n in range(len(captions))
    ]


def test_srt_is_valid(tmp_path: Path) -> None:
    text = write_captions(tmp_path / "c.srt", "srt")
    assert "\n" not in text.replace("\r\n", "")
    blocks = text.removesuffix("\r\n\r\n").split("\r\n\r\n")
    assert len(blocks) == len(CAPTIONS) - 1  # a window without a caption has no block
    last_end = ""
    for number, block in enumerate(blocks, start=1):
        head, times, caption = block.split("\r\n")  # no blank lines, and one line per caption
        assert head == str(number)
        match = re.fullmatch(r"(\d\d:\d\d:\d\d,\d{3}) --> (\d\d:\d\d:\d\d,\d{3})", times)
        assert match is not None and last_end <= match[1] < match[2]
        last_end = match[2]
        assert not re.search(r"<[/a-z]|\{\\|-->", caption)
    shown = [block.split("\r\n")[2].replace("\u2060", "") for block in blocks]
    assert shown == [caption for caption in CAPTIONS if caption]


def test_times_of_subtitles() -> None:
    assert srt_time(0) == "00:00:00,000"
    assert srt_time(3_661_001_499) == "01:01:01,001"
    assert srt_time(59_999_600) == "00:01:00,000"
    assert srt_time(100 * 3600 * 10**6) == "100:00:00,000"


@pytest.mark.parametrize("form", ["json", "srt"])
def test_what_breaks_off_leaves_the_old_file(tmp_path: Path, form: VideoFormat) -> None:
    path = tmp_path / f"c.{form}"
    path.write_text("old")
    with pytest.raises(RuntimeError), WRITERS[form](path) as write:
        write(windows()[0])
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_formats_are_named_by_suffix() -> None:
    assert format_of(Path("a.SRT"), None) == "srt"
    assert format_of(Path("folder"), "srt") == "srt"
    with pytest.raises(UserError, match="no known format"):
        format_of(Path("captions.txt"), None)
    assert format_of(Path("captions.txt"), "json") == format_of(Path("c.JSON"), "json") == "json"
    with pytest.raises(UserError, match=r"ends in \.json, but --format is srt"):
        format_of(Path("c.json"), "srt")


@pytest.mark.parametrize(
    "out", ["/sys/kernel/c.srt", "/proc/c.json", "/dev/null", "/proc", "/etc/passwd/c.json", "x" * 250 + ".json"]
)
def test_a_place_that_takes_no_files_is_named_before_the_work(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    form: VideoFormat = "json" if out.endswith("json") else "srt"
    with pytest.raises(UserError, match=f"--out {out} ") as error:
        open_sink(Path(out), [Path("a.mp4")], file_format=form)
    assert error.value.hint and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "videos", "existing"),
    [
        ("c.json", ["a", "b"], "c.json"),
        ("a.srt", ["a"], "a.srt"),
        ("a", ["a", "b"], "a/b.srt"),
    ],
)
def test_a_file_that_is_there_is_not_replaced(tmp_path: Path, out: str, videos: list[str], existing: str) -> None:
    path = tmp_path / existing
    path.parent.mkdir(exist_ok=True)
    path.write_text("old")
    form: VideoFormat | None = None if Path(out).suffix else "srt"
    with pytest.raises(UserError, match=f"{path} exists already"):
        open_sink(tmp_path / out, [Path(f"{video}.mp4") for video in videos], file_format=form)
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_a_place_that_goes_away_fails_the_work(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "new/c.json", [Path("a.mp4")], file_format=None)
    (tmp_path / "new").rmdir()
    with pytest.raises(FailedWork, match="captions cannot be written"), sink:
        pass


def test_subtitles_are_called_as_their_videos() -> None:
    names = subtitle_names([Path(name) for name in ("a/x.mp4", "b/y.mp4", "b/x.avi", "c/Y.mp4", "z.mkv", "c/z.mkv")])
    assert names == ["x.mp4.srt", "y.mp4-1.srt", "x.avi.srt", "Y.mp4-2.srt", "z.mkv-1.srt", "z.mkv-2.srt"]
    assert subtitle_names([Path("one.mp4")]) == ["one.srt"]
