"""Damaged video files: intact parts are captioned, damaged files are reported, and the other files are processed."""

import random
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from clipmill.manifests.errors import UserError
from clipmill.prep.synthetic import FrameNumberVideo, read_frame_number
from clipmill.train.data.frame_sampling import US_PER_S, Sampling
from clipmill.train.tasks.caption.video_windows import (
    Caption,
    CaptionedWindow,
    VideoEnd,
    WindowClip,
    caption_videos,
    find_videos,
    shown_name,
)

SIZE_PX = 64


def write(path: Path, *, num_frames: int = 60, codec: str = "libx264", gop: int = 10) -> bytes:
    FrameNumberVideo(
        num_frames=num_frames, fps=Fraction(10), width=SIZE_PX, height=SIZE_PX, codec=codec, gop=gop
    ).write(path)
    return path.read_bytes()


def remux(content: Path, target: Path, **options: str) -> bytes:
    with av.open(str(content)) as source, av.open(str(target), "w", options=options) as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                container.mux(packet)
    return target.read_bytes()


def first_numbers(clips: list[WindowClip]) -> list[Caption]:
    """Return the number of the first frame of each clip as its caption."""
    return [Caption(str(read_frame_number(clip.video[0][: SIZE_PX**2].reshape(SIZE_PX, SIZE_PX)))) for clip in clips]


def captions(*videos: Path, batch: int = 4) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    """Return the captions of each video, and its failure, if any."""
    texts_by_video: dict[str, list[str]] = {video.name: [] for video in videos}
    ends: dict[str, str | None] = {}
    events = caption_videos(
        videos, first_numbers, sampling=Sampling(num_frames=2), size_px=SIZE_PX, length_us=US_PER_S, batch=batch
    )
    for event in events:
        if isinstance(event, VideoEnd):
            ends[event.video.name] = event.failure
        else:
            assert event.video.name not in ends
            texts_by_video[event.video.name].append(event.caption)
    return texts_by_video, ends


WHOLE = ["2", "12", "22", "32", "42", "52"]


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_what_is_no_video_is_named_and_the_others_are_done(tmp_path: Path, batch: int) -> None:
    good, last = tmp_path / "a.mp4", tmp_path / "z.mkv"
    content = write(good)
    write(last, num_frames=10)
    bad = {
        "empty.mp4": b"",
        "text.mp4": b"this is no video " * 100,
        "noise.mp4": random.Random(0).randbytes(5000),
        "half.mp4": content[: len(content) // 2],  # the index at the end of the file is missing
        "list.m3u8": b"#EXTM3U\n#EXTINF:1,\n" + str(good).encode() + b"\n",
    }
    for name, its in bad.items():
        (tmp_path / name).write_bytes(its)
    (tmp_path / "folder.mp4").mkdir()
    videos = [good, *(tmp_path / name for name in bad), tmp_path / "folder.mp4", tmp_path / "gone.mp4", last]
    texts_by_video, ends = captions(*videos, batch=batch)
    assert texts_by_video["a.mp4"] == WHOLE and texts_by_video["z.mkv"] == ["2"]
    assert {name for name, failure in ends.items() if failure is None} == {"a.mp4", "z.mkv"}
    assert list(ends) == [video.name for video in videos]
    assert ends["empty.mp4"] == "the file is empty"
    assert ends["gone.mp4"] == "there is no such file"
    assert ends["folder.mp4"] == "not a regular file"
    assert "cannot be opened as a video" in (ends["list.m3u8"] or "")


def test_a_sound_file_holds_no_video(tmp_path: Path) -> None:
    path = tmp_path / "sound.mkv"
    with av.open(str(path), "w") as container:
        sound = container.add_stream("pcm_s16le", rate=8000)
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
        samples.sample_rate = 8000
        container.mux(sound.encode(samples))
        container.mux(sound.encode(None))
    _, ends = captions(path)
    assert ends["sound.mkv"] == "no video stream (streams: audio)"


@pytest.mark.parametrize("name", ["cut.mp4", "cut.mkv"])
def test_whole_windows_before_a_cut_are_good(tmp_path: Path, name: str) -> None:
    write(tmp_path / "whole.mp4")
    options = {"movflags": "+faststart"} if name.endswith("mp4") else {}
    content = remux(tmp_path / "whole.mp4", tmp_path / name, **options)
    pictures = content.index(b"mdat") if name.endswith("mp4") else 0
    (tmp_path / name).write_bytes(content[: pictures + (len(content) - pictures) * 6 // 10])
    texts_by_video, ends = captions(tmp_path / name)
    assert 2 <= len(texts_by_video[name]) <= 4
    assert texts_by_video[name] == WHOLE[: len(texts_by_video[name])]
    assert "the file is cut off: it ends at" in (ends[name] or "")
    assert "its header promises 6.0" in (ends[name] or "")


def test_an_avi_that_is_cut_is_known_by_its_header(tmp_path: Path) -> None:
    """If the index at the end is missing, libav invents a duration."""
    content = write(tmp_path / "whole.avi", codec="mpeg4")
    (tmp_path / "cut.avi").write_bytes(content[: len(content) * 6 // 10])
    # An AVI written to a pipe has no length in its header, and a wrong number of frames.
    piped = bytearray(content)
    piped[4:8] = b"\xff" * 4
    frames = piped.index(b"strh") + 8 + 32
    count = int.from_bytes(piped[frames : frames + 4], "little")
    assert count % 60 == 0
    piped[frames : frames + 4] = (2**30).to_bytes(4, "little")
    (tmp_path / "piped.avi").write_bytes(piped)
    # One file has trailing bytes. The header of the other also counts repeated frames that were omitted at its end.
    (tmp_path / "longer.avi").write_bytes(content + bytes(100))
    repeats = bytearray(content)
    repeats[frames : frames + 4] = (count * 3 // 2).to_bytes(4, "little")
    (tmp_path / "repeats.avi").write_bytes(repeats)
    whole = ("whole.avi", "piped.avi", "longer.avi", "repeats.avi")
    texts_by_video, ends = captions(*(tmp_path / name for name in (*whole, "cut.avi")))
    assert {name: ends[name] for name in whole} == dict.fromkeys(whole)
    assert all(texts_by_video[name] == WHOLE for name in whole)
    assert "its header promises 6.00 s" in (ends["cut.avi"] or "")
    assert (
        2 <= len(texts_by_video["cut.avi"]) <= 4
        and texts_by_video["cut.avi"] == WHOLE[: len(texts_by_video["cut.avi"])]
    )


def test_a_window_that_is_damaged_behind_its_last_moment_has_no_caption(tmp_path: Path) -> None:
    content = bytearray(write(tmp_path / "v.mp4", gop=1))
    with av.open(str(tmp_path / "v.mp4")) as container:
        packets = sorted(
            (packet for packet in container.demux(video=0) if packet.size), key=lambda packet: packet.pts or 0
        )
    # The second window shows its frames at 1.2 and 1.7 s. The frame at 1.9 s is damaged.
    packet = packets[19]
    assert packet.pos is not None
    content[packet.pos + 4 : packet.pos + packet.size] = bytes(packet.size - 4)
    (tmp_path / "v.mp4").write_bytes(content)
    texts_by_video, ends = captions(tmp_path / "v.mp4")
    assert ends["v.mp4"] is not None and texts_by_video["v.mp4"] == ["2"]


def test_a_stream_that_is_cut_ends_earlier(tmp_path: Path) -> None:
    """A transport stream does not store its duration."""
    write(tmp_path / "whole.mp4")
    content = remux(tmp_path / "whole.mp4", tmp_path / "cut.ts")
    (tmp_path / "cut.ts").write_bytes(content[: len(content) * 6 // 10 // 188 * 188])
    texts_by_video, _ = captions(tmp_path / "cut.ts")
    assert 2 <= len(texts_by_video["cut.ts"]) <= 4
    assert texts_by_video["cut.ts"][:-1] == WHOLE[: len(texts_by_video["cut.ts"]) - 1]


def test_a_recording_that_begins_between_key_frames_is_read_from_the_next_one(tmp_path: Path) -> None:
    write(tmp_path / "whole.mp4", gop=20)
    content = remux(tmp_path / "whole.mp4", tmp_path / "late.ts")
    (tmp_path / "late.ts").write_bytes(content[len(content) // 6 // 188 * 188 :])
    texts_by_video, ends = captions(tmp_path / "late.ts")
    assert ends["late.ts"] is None
    assert texts_by_video["late.ts"][0] == "20" and int(texts_by_video["late.ts"][-1]) >= 50


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    content = bytearray(write(tmp_path / "changed.mp4", num_frames=200, gop=50))
    rng = random.Random(0)
    begin, end = content.index(b"mdat"), content.index(b"moov")
    for _ in range(40):
        content[rng.randrange(begin + (end - begin) // 3, end)] ^= 0xFF
    (tmp_path / "changed.mp4").write_bytes(content)
    texts_by_video, ends = captions(tmp_path / "changed.mp4")
    assert ends["changed.mp4"] is not None
    assert texts_by_video["changed.mp4"] == [
        str(number * 10 + 2) for number in range(len(texts_by_video["changed.mp4"]))
    ]
    assert 0 < len(texts_by_video["changed.mp4"]) < 20


def test_times_that_make_no_sense_are_found(tmp_path: Path) -> None:
    write(tmp_path / "whole.mp4", num_frames=20)
    with av.open(str(tmp_path / "whole.mp4")) as source, av.open(str(tmp_path / "far.mkv"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            packet.stream = stream
            if number == 19:
                packet.pts = packet.dts = (packet.pts or 0) + 10**11
            target.mux(packet)
    _, ends = captions(tmp_path / "far.mkv")
    assert "the timestamps jump by " in (ends["far.mkv"] or "") and "at packet 19" in (ends["far.mkv"] or "")


def test_folders_are_searched_by_suffix_and_files_come_once(tmp_path: Path) -> None:
    for name in ("b.MP4", "a.mkv", "notes.txt", ".hidden.mp4", "deeper/c.webm", ".cache/d.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "again.mp4").symlink_to(tmp_path / "a.mkv")
    (tmp_path / "loop.mp4").symlink_to(tmp_path / "loop.mp4")
    videos = find_videos([tmp_path / "notes.txt", tmp_path, tmp_path / "b.MP4"])
    assert [video.relative_to(tmp_path).as_posix() for video in videos] == [
        "notes.txt",
        "a.mkv",
        "b.MP4",
        "loop.mp4",  # fails, and the failure names the file
        "deeper/c.webm",
    ]
    with pytest.raises(UserError, match=r"there is no .*gone"):
        find_videos([tmp_path / "gone"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="contains no videos"):
        find_videos([tmp_path / "empty"])


def test_names_of_any_bytes_can_be_written() -> None:
    assert shown_name(Path("plain ü.mp4")) == "plain ü.mp4"
    assert shown_name(Path("a\x1b[31m\n\udcff.mp4")) == "a\ufffd[31m\ufffd\ufffd.mp4"


def test_captions_become_one_line(tmp_path: Path) -> None:
    write(tmp_path / "v.mp4", num_frames=5)
    events = caption_videos(
        [tmp_path / "v.mp4"],
        lambda clips: [Caption("a\x1b[31m\r\ncat <b>\u2028 and\tdog \x00")] * len(clips),
        sampling=Sampling(num_frames=2),
        size_px=SIZE_PX,
        length_us=US_PER_S,
        batch=1,
    )
    [window, end] = list(events)
    assert isinstance(window, CaptionedWindow) and end == VideoEnd(tmp_path / "v.mp4")
    assert window.caption == "a [31m cat <b> and dog"
