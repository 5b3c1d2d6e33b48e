"""Tests of caption tables in the dialects that programs and people write, and of the notes about them."""

import json
from math import inf
from pathlib import Path

import pytest

from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.adapters.table_formats import NAMES, SECONDARY_NAMES, line_numbers
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker

Rows = list[tuple[str, float, float, str]]
WANTED: Rows = [("a", 1.5, 62.0, "Überfahrt, kurz"), ("b", 0.0, inf, "whole")]


def captions(reading: Reading) -> Rows:
    names = dict(zip(*(reading.videos[name].to_pylist() for name in ("video_id", "source_id")), strict=True))
    rows = reading.captions.to_pylist()
    return [(names[row["video_id"]], row["begin_s"], row["end_s"], row["text"]) for row in rows]


@pytest.mark.parametrize(
    ("name", "encoding", "text", "notes"),
    [
        ("c.csv", "utf-8-sig", 'video,begin_s,end_s,text\na,1.5,62,"Überfahrt, kurz"\nb,,,whole\n', []),
        (
            "c.csv",
            "cp1252",
            "Video;Start;Ende;End;Caption\r\na;1,5;x;62,0;Überfahrt, kurz\r\nb;;;;whole\r\n",
            [
                "c.csv: read as Windows-1252 (Latin-1) instead of UTF-8",
                "c.csv: the cells are separated by semicolons",
                "c.csv: read Start as begin_s, End as end_s, Caption as text",
                "c.csv: ignored Ende",
            ],
        ),
        (
            "c.tsv",
            "utf-16",
            "File Name\tt_start\tt_end\tSentence\na.mp4\t00:00:01.5\t0:01:02\tÜberfahrt, kurz\nb.mp4\t\t\twhole\n",
            [
                "c.tsv: read as UTF-16 instead of UTF-8",
                "c.tsv: the cells are separated by tabs",
                "c.tsv: read File Name as video, t_start as begin_s, t_end as end_s, Sentence as text",
            ],
        ),
        (
            "c.txt",
            "utf-16-le",
            "path|begin|stop|description\na|00:01,500|01:02|Überfahrt, kurz\nb|||whole\n",
            [
                "c.txt: read as UTF-16 instead of UTF-8",
                "c.txt: the cells are separated by vertical bars",
                "c.txt: read path as video, begin as begin_s, stop as end_s, description as text",
            ],
        ),
        (
            "c.jsonl",
            "utf-8",
            json.dumps({"video": "a", "start": "00:00:01.5", "end": 62, "caption": "Überfahrt, kurz", "fps": 3})
            + "\n"
            + json.dumps({"video": "b", "caption": "whole"}),
            ["c.jsonl: read start as begin_s, end as end_s, caption as text", "c.jsonl: ignored fps", None],
        ),
    ],
)
def test_a_table_is_read_in_the_dialect_that_it_has_and_what_was_taken_is_said(
    make_videos: VideoMaker, tmp_path: Path, name: str, encoding: str, text: str, notes: list[str | None]
) -> None:
    (tmp_path / name).write_bytes(text.encode(encoding))
    reading = read_folder(make_videos("a.mp4", "b.mp4"), captions=tmp_path / name)
    assert captions(reading) == WANTED and not reading.rejected.num_rows
    expected = [note if note is not None else "c.jsonl: read caption as text" for note in notes]
    assert list(reading.notes) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a;0;1;"never closed\nb;0;1;lost\nb;0;1;lost\n', "line 2: .* line 4 would belong"),
        ('a;0;1;whole\na;0;1;"never closed\nb;0;1;lost\nb;0;1;"of another cell"\n', "line 3: .* line 5 would belong"),
        ('"a;0;1;never closed\nb;0;1;lost\n', "line 2: .* line 3 would belong"),
        ('a;0;1;whole\na;0;1;"never closed', "line 3: unexpected end of data"),
    ],
)
def test_a_quotation_mark_that_is_not_closed_swallows_no_rows(
    make_videos: VideoMaker, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "c.csv").write_text(f"video;begin_s;end_s;text\n{text}")
    with pytest.raises(UserError, match=message):
        read_folder(make_videos("a.mp4", "b.mp4"), captions=tmp_path / "c.csv")


@pytest.mark.parametrize("cell", [r'"a \"q\" b"', '"a" b', r'"a \"q\", b"', '"a"b"', '"a" "b"'])
def test_a_cell_with_text_beyond_its_quotation_marks_is_refused(
    make_videos: VideoMaker, tmp_path: Path, cell: str
) -> None:
    (tmp_path / "c.csv").write_text(f"video,text,split\na,whole,val\na,{cell},val\nb,whole,val\n")
    with pytest.raises(UserError, match=r"c\.csv, line 3: ',' expected after '\"'") as caught:
        read_folder(make_videos("a.mp4", "b.mp4"), captions=tmp_path / "c.csv")
    assert '""stop""' in (caught.value.hint or "")


def test_a_cell_between_quotation_marks_may_have_lines(make_videos: VideoMaker, tmp_path: Path) -> None:
    text = 'video,begin_s,end_s,text\na,0,1,"a sign\nsays ""stop"""\nb,0,1,he said "so"\nb,1,2,a \\"q\\" b\n'
    (tmp_path / "c.csv").write_text(text)
    reading = read_folder(make_videos("a.mp4", "b.mp4"), captions=tmp_path / "c.csv")
    assert [text for *_, text in captions(reading)] == ['a sign\nsays "stop"', 'he said "so"', r"a \"q\" b"]


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_header_may_be_longer_than_a_cell_of_csv(make_videos: VideoMaker, tmp_path: Path, separator: str) -> None:
    header, row = separator.join(["c"] * 200_000), separator.join(["x"] * 200_000)
    (tmp_path / "c.csv").write_text(f"video{separator}text{separator}{header}\na{separator}one{separator}{row}\n")
    with pytest.raises(UserError, match="two columns named c"):
        read_folder(make_videos("a.mp4"), captions=tmp_path / "c.csv")
    (tmp_path / "c.csv").write_text(f"{'c' * 200_000}\na{separator}one\n")
    with pytest.raises(UserError, match="no column for video and text; its first line is: ccc"):
        read_folder(make_videos("a.mp4"), captions=tmp_path / "c.csv")


@pytest.mark.parametrize("first", ["sep=;\r\n", "\nSEP=;\n", '"sep=;"\n', "\ufeffsep=;\n"])
def test_a_line_that_names_the_separator_for_excel_is_no_header(
    make_videos: VideoMaker, tmp_path: Path, first: str
) -> None:
    table = tmp_path / "c.csv"
    table.write_text(f'{first}video;begin_s;text\na;1,5;"one, two"\nb;x;three\n', newline="")
    reading = read_folder(make_videos("a.mp4", "b.mp4"), captions=table)
    assert captions(reading) == [("a", 1.5, inf, "one, two")]
    assert reading.notes == ("c.csv: the cells are separated by semicolons",)
    [row] = reading.rejected["row"].to_pylist()
    assert line_numbers(table, [row]) == {row: 3 + first.count("\n")}
    for below, what in (("video;text\na;b\n", "the next line is: video;text"), ("", "there is no other line")):
        table.write_text(f"sep=|\n{below}")
        with pytest.raises(UserError, match=f"declares vertical bars as separators, but {what}"):
            read_folder(make_videos("a.mp4", "b.mp4"), captions=table)


def test_a_column_with_the_documented_name_is_taken_before_others(make_videos: VideoMaker, tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("caption,video,text,file\nno,a,yes,b\n")
    reading = read_folder(make_videos("a.mp4", "b.mp4"), captions=tmp_path / "c.csv")
    assert captions(reading) == [("a", 0.0, inf, "yes")]
    assert reading.notes == ("c.csv: ignored caption, file",)


@pytest.mark.parametrize(
    ("header", "row", "times", "notes"),
    [
        ("video,start_ms,end_ms,text", "a,1500,62000,t", (1.5, 62.0), ["start_ms as begin_s, from milliseconds"]),
        ("video,Start Frame,end_frame,FPS,text", "a,30,90,30,t", (1.0, 3.0), ["Start Frame as begin_s, from frames"]),
        (
            "video,start_frame,end_frame,fps,text",
            "a,30,90,30000/1001,t",
            (30 / (30000 / 1001), 90 / (30000 / 1001)),
            [],
        ),
        ("video,begin_s,begin_ms,end,end_frame,fps,text", "a,1,5,2,9,3,t", (1.0, 2.0), ["begin_ms, end_frame, fps"]),
        ("video,begin_ms,text", "a,,t", (0.0, inf), []),
    ],
)
def test_times_in_other_units_become_seconds(
    make_videos: VideoMaker, tmp_path: Path, header: str, row: str, times: tuple[float, float], notes: list[str]
) -> None:
    (tmp_path / "c.csv").write_text(f"{header}\n{row}\n")
    reading = read_folder(make_videos("a.mp4"), captions=tmp_path / "c.csv")
    assert captions(reading) == [("a", *times, "t")]
    assert all(note in " ".join(reading.notes) for note in notes)


def test_frames_need_a_frame_rate(make_videos: VideoMaker, tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("video,start_frame,text\na,30,t\n")
    with pytest.raises(UserError, match="start_frame cannot be converted to seconds") as refused:
        read_folder(make_videos("a.mp4"), captions=tmp_path / "c.csv")
    assert "a column fps" in (refused.value.hint or "")
    (tmp_path / "c.csv").write_text(
        "video,start_frame,fps,text\na,30,0,t\na,x,30,t\na,30,,t\na,30,30/0,t\na,30,1/2/3,t\n"
    )
    reading = read_folder(make_videos("a.mp4"), captions=tmp_path / "c.csv")
    assert reading.rejected["reason"].to_pylist() == ["bad_fps", "bad_time", "bad_fps", "bad_fps", "bad_fps"]
    details = reading.rejected["detail"].to_pylist()
    assert "fps is '0', expected a frame rate" in details[0] and "'x (frames)'" in details[1]


def test_rows_are_found_on_the_lines_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text('\nvideo;text\n\na;"two\nlines"\nb;one\n')
    assert line_numbers(tmp_path / "c.csv", [0, 1, 7]) == {0: 4, 1: 6}
    (tmp_path / "c.jsonl").write_text('{"video": "a"}\n\n{"video": "b"}\n')
    assert line_numbers(tmp_path / "c.jsonl", [0, 1]) == {0: 1, 1: 3}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("file,path,text", "file and path could both be the column video"),
        ("video,caption,sentence", "caption and sentence could both be the column text"),
        ("video:text", "no column for video and text; its first line is: video:text"),
        ("a,a cat", "no column for video and text"),
    ],
)
def test_a_header_that_is_unclear_is_refused(
    make_videos: VideoMaker, tmp_path: Path, header: str, message: str
) -> None:
    (tmp_path / "c.csv").write_text(f"{header}\na,b,c\n")
    with pytest.raises(UserError, match=message) as caught:
        read_folder(make_videos("a.mp4"), captions=tmp_path / "c.csv")
    assert caught.value.hint


@pytest.mark.parametrize("time", ["1:60", "1:75:00", "00:00:1e1", "1:2:3:4", "-00:01", "1,5", "one"])
def test_a_time_that_no_clock_shows_is_rejected(make_videos: VideoMaker, tmp_path: Path, time: str) -> None:
    (tmp_path / "c.csv").write_text(f'video,end_s,text\na,"{time}",x\na,9,y\n')
    reading = read_folder(make_videos("a.mp4"), captions=tmp_path / "c.csv")
    assert captions(reading) == [("a", 0.0, 9.0, "y")]
    assert reading.rejected["reason"].to_pylist() == ["bad_time"]


def test_a_video_that_is_not_found_is_listed_with_the_nearest_name(make_videos: VideoMaker, tmp_path: Path) -> None:
    folder = make_videos("kitchen_01.mp4", "Garden.mp4", "sub/long name.mp4")
    (tmp_path / "c.csv").write_text("video,text\nkitchen_01,x\nkitchen_02,x\ngardens,x\nlong_name,x\nzzz,x\n")
    rejected = read_folder(folder, captions=tmp_path / "c.csv").rejected.to_pylist()
    assert {row["source_id"]: row["detail"] for row in rejected} == {
        "kitchen_02": "no matching video file (similar name: kitchen_01.mp4); captions lost: 1",
        "gardens": "no matching video file (similar name: Garden.mp4); captions lost: 1",
        "long_name": "no matching video file (similar name: sub/long name.mp4); captions lost: 1",
        "zzz": "no matching video file; captions lost: 1",
    }


def test_tables_may_have_german_headers(make_videos: VideoMaker, tmp_path: Path) -> None:
    table = tmp_path / "c.csv"
    table.write_text("Datei;Von;Bis;Beschreibung\na;1,5;62;Überfahrt, kurz\nb;;;whole\n")
    reading = read_folder(make_videos("a.mp4", "b.mp4"), captions=table)
    assert captions(reading) == WANTED
    assert "c.csv: read Datei as video, Von as begin_s, Bis as end_s, Beschreibung as text" in reading.notes


def test_all_names_of_columns_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()
    for name in NAMES:
        others = ", ".join(f"`{other}`" for other in (*NAMES[name], *SECONDARY_NAMES.get(name, ())))
        assert not others or f"| `{name}` | {others} |" in text
