"""Tests of subtitles and speech recognition output next to the videos of a folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.adapters.subtitles import Cue, UnreadableFile, decode_text, read_cues, read_segments
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker

SRT = """1
00:00:01,000 --> 00:00:02,500
<i>A door</i>
opens.

2
00:00:02.5 --> 00:00:04 X1:10 X2:20
{\\an8}I <3 you{\\i0}

3
1:02:03,004 --> 100:00:00,000
a paragraph

with an empty line
4
00:00:05,000 -> 00:00:06,000
1984


5

00:00:05,500 --> 00:00:07,000
<font color="#fff">overlaps</font> a --> b
"""
VTT = """WEBVTT - a title
Kind: captions

STYLE
::cue { color: papayawhip }

REGION
id:fred

the first one
00:01.000 --> 00:02.000 line:0 position:20% align:start
<v.loud Roger Bingham>Fish &amp; <c.yellow>chips</c></v>

NOTE this is not a caption
neither is this

00:00:02.000 --> 01:00:03.500
<00:00:02.200>We <00:00:02.800><lang en>are</lang>&nbsp;here&lrm;
"""


def cues(text: str) -> list[tuple[float, float, object]]:
    cue_list = list(read_cues(text))
    assert [cue.index for cue in cue_list] == list(range(len(cue_list))) and not any(cue.fault for cue in cue_list)
    return [(cue.begin_s, cue.end_s, cue.text) for cue in cue_list]


def captions(reading: Reading) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in reading.captions.to_pylist()]


def rejected_rows(reading: Reading) -> list[tuple[str, int | None, str]]:
    return [(Path(row["file"]).name, row["row"], row["reason"]) for row in reading.rejected.to_pylist()]


def test_srt_in_the_forms_that_players_accept() -> None:
    assert cues(SRT) == [
        (1.0, 2.5, "A door opens."),
        (2.5, 4.0, "I <3 you"),
        (3723.004, 360000.0, "a paragraph with an empty line"),
        (5.0, 6.0, "1984"),
        (5.5, 7.0, "overlaps a --> b"),
    ]
    assert cues(SRT.replace("\n", "\r\n")) == cues(SRT) == cues(SRT.replace("\n", "\r"))


def test_srt_without_numbers_keeps_texts_that_are_numbers() -> None:
    times = [f"00:00:0{n},000 --> 00:00:0{n + 1},000" for n in range(3)]
    text = f"{times[0]}\n1984\n\n{times[1]}\nin\n1985\n\n{times[2]}\n1986"
    assert [cue[2] for cue in cues(text)] == ["1984", "in 1985", "1986"]


def test_vtt_without_its_header_names_comments_styles_and_settings() -> None:
    assert cues(VTT) == [(1.0, 2.0, "Fish & chips"), (2.0, 3603.5, "We are here")]


@pytest.mark.parametrize(
    ("times", "fault"),
    [
        ("00:00:02,000 --> 00:00:01,000", "end_s is 1.0, expected a time after begin_s, 2.0"),
        ("00:00:01,000 --> 00:00:01,000", "end_s is 1.0, expected a time after begin_s, 1.0"),
        ("-00:00:01,000 --> 00:00:02,000", "begin_s is -1.0"),
        ("00:00:61,000 --> 00:02:00,000", "minutes and seconds must be below 60"),
        ("00:61:00,000 --> 02:00:00,000", "minutes and seconds must be below 60"),
        ("00:00:01,000 --> 00:00:xx,000", "the times are '00:00:01,000 --> 00:00:xx,000'"),
        ("00:00:xx,000 --> 00:00:03,000", "the times are '00:00:xx,000 --> 00:00:03,000'"),
        ("soon --> later", "the times are 'soon --> later'"),
        ("--> 00:00:02,000", "the times are"),
        ("00:00:01,000 -->", "the times are"),
    ],
)
def test_a_cue_with_wrong_times_is_a_fault_and_does_not_spoil_its_neighbours(times: str, fault: str) -> None:
    good = ["00:00:00,000 --> 00:00:01,000", "00:00:08,000 --> 00:00:09,000"]
    cue_list = list(read_cues(f"1\n{good[0]}\nbefore\n\n2\n{times}\nspoilt\n\n3\n{good[1]}\nafter\n"))
    assert [cue.text for cue in cue_list if cue.fault is None] == ["before", "after"]
    reason, detail = cue_list[1].fault or ("", "")
    assert reason == "bad_time" and fault in detail


@pytest.mark.parametrize("times", ["00:bad --> 00:03.000", "bad --> 00:03.000", "00:02.000 --> bad"])
@pytest.mark.parametrize("name", ["", "a name\n"])
def test_a_vtt_cue_with_malformed_times_is_a_fault(times: str, name: str) -> None:
    text = (
        f"WEBVTT a --> b\n\n00:00.000 --> 00:01.000\nbefore\n\n{name}{times}\nspoilt\n\n00:08.000 --> 00:09.000\nafter"
    )
    cue_list = list(read_cues(text))
    assert [cue.text for cue in cue_list if cue.fault is None] == ["before", "after"]
    assert cue_list[1].fault == ("bad_time", f"the times are {times!r}")


def test_malformed_times_right_after_the_text_of_an_srt_cue_are_a_fault_and_arrows_in_it_are_text() -> None:
    text = "00:00:00,000 --> 00:00:01,000\nfrom a --> b\nand 3:1 --> 2\n00:00:xx,000 --> 00:00:03,000\nspoilt\n"
    assert [cue.text for cue in read_cues(text) if cue.fault is None] == ["from a --> b and 3:1 --> 2"]
    assert [cue.index for cue in read_cues(text) if cue.fault is not None] == [1]


def test_a_text_without_cues_is_unreadable() -> None:
    for text in ("", "WEBVTT\n", "just words -> and arrows\n"):
        with pytest.raises(UnreadableFile, match="no cues"):
            list(read_cues(text))


@pytest.mark.parametrize(
    ("encoding", "note"),
    [
        ("utf-8", None),
        ("utf-8-sig", None),
        ("utf-16", None),
        ("utf-16-le", "UTF-16 without a byte order mark"),
        ("utf-16-be", "UTF-16 without a byte order mark"),
        ("latin-1", "Windows-1252 (Latin-1)"),
        ("cp1252", "Windows-1252 (Latin-1)"),
    ],
)
def test_encodings_are_detected(encoding: str, note: str | None) -> None:
    text = SRT.replace("door", "café ü")
    assert decode_text(text.encode(encoding)) == (text, note)


def test_bytes_that_are_not_text_are_unreadable() -> None:
    for content in (b"\x89PNG\0\0abc", b"\xff\xfea", b"\xef\xbb\xbf\xff"):
        with pytest.raises(UnreadableFile):
            decode_text(content)


def test_segments_of_whisper_and_of_others_in_its_form() -> None:
    openai = {"id": 0, "seek": 0, "start": 0.0, "end": 2, "text": " Hi.", "tokens": [1], "avg_logprob": -0.25}
    whisperx = {"start": 1.5, "end": 2.5, "text": "Hi.", "words": [{"word": "Hi.", "start": 1.5}], "speaker": "A"}
    assert list(read_segments({"text": "", "segments": [openai], "language": "en"}) or ()) == [
        Cue(0, 0.0, 2.0, "Hi.", -0.25)
    ]
    for content in ({"segments": [whisperx], "word_segments": []}, [whisperx]):
        assert list(read_segments(content) or ()) == [Cue(0, 1.5, 2.5, "Hi.", None)]
    for other in ({"title": "a"}, [1], [], {"segments": {"a": 1}}, "segments", [{"start": 1}]):
        assert read_segments(other) is None


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        ({"start": 1, "end": 2, "text": "a", "avg_logprob": float("nan")}, "bad_likelihood"),
        ({"start": 1, "end": 2, "text": "a", "avg_logprob": 0.5}, "bad_likelihood"),
        ({"start": 1, "end": 2, "text": "a", "avg_logprob": [1]}, "bad_likelihood"),
        ({"start": None, "end": 2, "text": "a"}, "bad_time"),
        ({"end": 2, "text": "a"}, "bad_time"),
        ({"start": 2, "end": 1, "text": "a"}, "bad_time"),
        ({"start": 2, "end": 10**400, "text": "a"}, "bad_time"),
        ({"start": 2, "end": float("inf"), "text": "a"}, "bad_time"),
        ("words", "malformed_row"),
    ],
)
def test_a_segment_with_wrong_values_is_a_fault(segment: object, reason: str) -> None:
    cues = list(read_segments({"segments": [segment]}) or ())
    assert [cue.fault and cue.fault[0] for cue in cues] == [reason]


def test_a_folder_is_read_with_the_files_beside_its_videos(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4", "b.c.mp4", "val/a.mkv", "d.mp4", "d.webm", "e.mp4", "f.mp4")
    cue_text = "1\n00:00:00,000 --> 00:00:01,000\n{}\n"
    (folder / "a.srt").write_text(cue_text.format("plain"))
    (folder / "a.en.SRT").write_text(cue_text.format("english"))
    (folder / "a.pt-BR.vtt").write_text("WEBVTT\n\n00:00.000 --> 00:01.000\nportuguese\n")
    (folder / "b.c.srt").write_bytes(cue_text.format("naïve").encode("latin-1"))
    (folder / "val" / "a.srt").write_text(
        cue_text.format("") + cue_text.format("of val") + cue_text.format("x").replace("01,", "00,")
    )
    segments = [{"start": 0, "end": 1, "text": " said  this", "avg_logprob": -0.5}]
    (folder / "e.json").write_text(json.dumps({"segments": segments}))
    (folder / "e.srt").write_text(cue_text.format("said this"))
    (folder / "d.srt").write_text(cue_text.format("whose?"))
    (folder / "gone.srt").write_text(cue_text.format("lost"))
    (folder / "f.srt").write_text("nothing")
    (folder / "f.json").write_text('{"duration": 3}')
    reading = read_folder(folder, subtitles=True)
    assert captions(reading) == [
        ("a", 0.0, 1.0, "english", "subtitles-en", None),
        ("a", 0.0, 1.0, "plain", "subtitles", None),
        ("a", 0.0, 1.0, "portuguese", "subtitles-pt-BR", None),
        ("b_c-b476cc5a2c", 0.0, 1.0, "naïve", "subtitles", None),
        ("e", 0.0, 1.0, "said this", "asr", -0.5),
        ("val_a-f148df9ac0", 0.0, 1.0, "of val", "subtitles", None),
    ]
    assert sorted(rejected_rows(reading), key=str) == [
        ("a.srt", 0, "empty_caption"),
        ("a.srt", 2, "bad_time"),
        ("d.srt", None, "ambiguous_video"),
        ("f.srt", None, "unreadable"),
        ("gone.srt", None, "missing_file"),
    ]
    assert reading.notes == (
        "read 1 file as Windows-1252 (Latin-1) instead of UTF-8: b.c.srt",
        "ignored 1 file with the same words as a previous file of the video: e.srt",
        "ignored 1 file without output of speech recognition: f.json",
    )


def test_files_that_are_no_files_and_hostile_texts_do_no_harm(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4", "b.mp4", "c.mp4")
    os.mkfifo(folder / "a.srt")
    (folder / "b.srt").symlink_to("nowhere")
    number = "9" * 5000
    timings = (f"{number[:50]}:00:00,000 --> 00:00:01,000", ":" * 200_000, "00:00:01,000 --> 00:00:02,000")
    (folder / "c.srt").write_text("\n".join((*timings, f"&#{number}; {'<a' * 100_000}")))
    (folder / "c.json").write_text("[" * 100_000)
    reading = read_folder(folder, subtitles=True)
    assert sorted(rejected_rows(reading), key=str) == [
        ("a.srt", None, "unreadable"),
        ("b.srt", None, "unreadable"),
        ("c.json", None, "unreadable"),
        ("c.srt", 0, "bad_time"),
    ]
    assert [row[1:3] for row in captions(reading)] == [(1.0, 2.0)]


def test_without_the_flag_subtitles_are_mentioned_and_not_read(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4")
    assert read_folder(folder).notes == ()
    (folder / "a.srt").write_text(SRT)
    (folder / "a.json").write_text("{}")
    reading = read_folder(folder)
    assert reading.captions.num_rows == 0 and "likelihood" not in reading.captions.column_names
    assert reading.notes == ("ignored 1 subtitle file (.srt, .vtt); --subtitles reads such files",)


def test_the_output_of_speech_recognition_that_is_not_read_is_counted(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4", "b.mp4", "c.mp4", "d.mp4")
    segment = {"start": 0, "end": 1, "text": "a"}
    (folder / "a.en.json").write_text(json.dumps({"text": "a " * 10_000, "segments": [segment], "language": "en"}))
    (folder / "b.json").write_text(json.dumps([segment], indent=1))
    (folder / "c.json").write_text('{"title": "a film"}')
    (folder / "other.json").write_text(json.dumps([segment]))
    os.mkfifo(folder / "d.json")
    assert read_folder(folder).notes == (
        "ignored 2 files from speech recognition (.json); --subtitles reads such files",
    )
    (folder / "a.srt").write_text(SRT)
    assert read_folder(folder).notes == (
        "ignored 1 subtitle file (.srt, .vtt) and 2 files from speech recognition (.json); "
        "--subtitles reads such files",
    )


def test_a_folder_without_subtitles_is_an_error_if_they_are_asked_for(make_videos: VideoMaker) -> None:
    folder = make_videos("a.mp4")
    (folder / "a.json").write_text('{"title": "a film"}')
    with pytest.raises(UserError, match="no subtitles next to the videos"):
        read_folder(folder, subtitles=True)


def test_a_table_and_subtitles_together_with_likelihoods(make_videos: VideoMaker, tmp_path: Path) -> None:
    folder, table = make_videos("a.mp4"), tmp_path / "captions.csv"
    (folder / "a.srt").write_text(SRT)
    table.write_text("video,text,likelihood\na,one,-0.5\na,two,\na,three,nan\na,four,1\n")
    reading = read_folder(folder, captions=table, subtitles=True)
    assert reading.captions["likelihood"].to_pylist() == [-0.5, None, *[None] * 5]
    assert rejected_rows(reading) == [("captions.csv", 2, "bad_likelihood"), ("captions.csv", 3, "bad_likelihood")]


def test_a_long_film_is_read(make_videos: VideoMaker) -> None:
    folder, times = make_videos("film.mkv"), [(n // 3600, n // 60 % 60, n % 60) for n in range(10_000)]
    (folder / "film.srt").write_text(
        "".join(
            f"{n}\n{h:02d}:{m:02d}:{s:02d},000 --> {h:02d}:{m:02d}:{s:02d},900\nline {n}\n\n"
            for n, (h, m, s) in enumerate(times, start=1)
        )
    )
    reading = read_folder(folder, subtitles=True)
    assert (reading.captions.num_rows, reading.rejected.num_rows) == (10_000, 0)
    assert reading.captions["begin_s"].to_pylist() == [float(n) for n in range(10_000)]
    assert list(reading.num_rows_used.values()) == [10_000]
