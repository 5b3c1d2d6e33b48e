"""Tests of the reader of caption tables: all shapes of a table give the same captions, in `folder` and `captions`."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.adapters.table_formats import columns_of
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker
from tests.manifests.test_further_sources import add, read
from tests.manifests.test_store import reading_of
from tests.manifests.test_store import write as write_dataset

ROWS = [
    {"video": "a.mp4", "start": 1.5, "duration": 2.5, "caption": "one"},
    {"video": "b.mp4", "start": 0, "duration": None, "caption": "two"},
]
WANTED = [("a", 1.5, 4.0, "one"), ("b", 0.0, inf, "two")]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


def by_index(values: list[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


SHAPES: dict[str, Any] = {
    "rows.json": ROWS,
    "columns.json": COLUMNS,
    "pandas.json": {name: by_index(values) for name, values in COLUMNS.items()},
    "index.json": by_index(ROWS),
    "below.json": {"annotations": [{{"video": "file"}.get(name, name): row[name] for name in row} for row in ROWS]},
    "videos.json": {row["video"]: {name: value for name, value in row.items() if name != "video"} for row in ROWS},
    "lists.json": {row["video"]: [{name: value for name, value in row.items() if name != "video"}] for row in ROWS},
}


def table_of(folder: Path, name: str) -> Path:
    path = folder / name
    if name in SHAPES:
        path.write_text(json.dumps(SHAPES[name], indent=1))
    elif name.startswith("lines"):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        separator = "\t" if name.endswith(".tsv") else ","
        lines = [list(COLUMNS), *(["" if cell is None else str(cell) for cell in row.values()] for row in ROWS)]
        path.write_text("".join(f"{separator.join(line)}\n" for line in lines))
    return path


def captions(reading: Reading) -> list[tuple[str, float, float, str]]:
    return [(row["video_id"], row["begin_s"], row["end_s"], row["text"]) for row in reading.captions.to_pylist()]


def of_table(make_videos: VideoMaker, path: Path) -> Reading:
    return read_folder(make_videos("a.mp4", "b.mp4"), captions=path)


@pytest.mark.parametrize("name", [*SHAPES, "lines.jsonl", "lines.json", "t.parquet", "t.csv", "t.tsv"])
def test_a_table_of_any_shape_is_read_by_both_commands(make_videos: VideoMaker, tmp_path: Path, name: str) -> None:
    path = table_of(tmp_path, name)
    reading = of_table(make_videos, path)
    assert captions(reading) == WANTED and not reading.rejected.num_rows
    assert any("start as begin_s, duration as duration_s, caption as text" in note for note in reading.notes)
    write_dataset(tmp_path / "data", reading_of(tmp_path, ["a", "b"], []))
    result = read(tmp_path / "data", path)
    assert captions(result.reading) == WANTED and not result.reading.rejected.num_rows
    assert set(result.records) == {path.stem}
    assert add(tmp_path / "data", path, source="mine").num_captions == {"mine": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"video": ["a"], "text": ["x", "y"]}, "video has 1 value, text has 2 values"),
        ({"video": ["a"], "text": "x"}, "text is not a list"),
        (
            {"video": {"0": "a"}, "text": {"1": "x"}},
            "rows of the column text differ from the rows of the first",
        ),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(
    make_videos: VideoMaker, tmp_path: Path, content: Any, message: str
) -> None:
    (path := tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        of_table(make_videos, path)


def test_what_is_beside_the_rows_is_left_out_and_named(make_videos: VideoMaker, tmp_path: Path) -> None:
    """Use the form of COCO, and the form of MSR-VTT, whose list of videos has no texts."""
    sentences = [{"video_id": row["video"], "caption": row["caption"], "sen_id": 0} for row in ROWS]
    videos = [{"video_id": row["video"], "split": "train"} for row in ROWS]
    for name in ("annotations", "sentences"):
        content = {"info": {"year": 2016}, "videos": videos, name: sentences, "licenses": []}
        (path := tmp_path / "t.json").write_text(json.dumps(content))
        reading = of_table(make_videos, path)
        assert [text for *_, text in captions(reading)] == ["one", "two"] and not reading.rejected.num_rows
        assert f"t.json: the rows are under '{name}'; not read: 'info', 'videos', 'licenses'" in reading.notes
        assert not any("info" in note and "rows are under" not in note for note in reading.notes)


@pytest.mark.parametrize(
    "content",
    [
        {"info": {}, "images": [{"id": 1}], "annotations": [{"image_id": 1, "caption": "x"}]},
        {"version": "1", "database": {"a": {"annotations": [{"segment": [0, 1], "label": "x"}]}}},
    ],
)
def test_a_file_whose_lists_have_no_rows_is_refused(make_videos: VideoMaker, tmp_path: Path, content: Any) -> None:
    (path := tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a list of rows with a video and a text") as refused:
        of_table(make_videos, path)
    assert "prep manifest --help" in str(refused.value.hint)


def test_keys_that_are_there_twice_are_refused(make_videos: VideoMaker, tmp_path: Path) -> None:
    for text in ('[{"video": "a", "text": "x", "text": "y"}]', '{"a": "x", "a": "y"}'):
        (path := tmp_path / "t.json").write_text(text)
        with pytest.raises(UserError, match=r"two values for .text.|contains the key .a. twice"):
            of_table(make_videos, path)


def test_what_is_no_row_is_rejected_and_named(make_videos: VideoMaker, tmp_path: Path) -> None:
    (path := tmp_path / "t.json").write_text(json.dumps([["a", "x"], {"video": "a", "text": "y"}]))
    reading = of_table(make_videos, path)
    assert [text for *_, text in captions(reading)] == ["y"]
    assert reading.rejected["detail"].to_pylist() == ["not a JSON object: ['a', 'x']"]


LISTS = [
    ("['one', 'two']", ["one", "two"]),
    ("['one' 'two'\n 'three']", ["one", "two", "three"]),  # NumPy
    ('["it\'s \\"1\\"", "\\ud83d\\ude00"]', ['it\'s "1"', "😀"]),  # JSON
    (r"['it\'s', 'a, b',]", ["it's", "a, b"]),
    ("['one']", ["one"]),
    ("[Music]", ["[Music]"]),
    ("[a, b]", ["[a, b]"]),
    ("a ['b'] c", ["a ['b'] c"]),
]


@pytest.mark.parametrize(("cell", "texts"), LISTS)
def test_a_list_in_a_cell_is_several_captions(
    make_videos: VideoMaker, tmp_path: Path, cell: str, texts: list[str]
) -> None:
    (csv := tmp_path / "t.csv").write_text('video,text\na,"' + cell.replace('"', '""') + '"\n')
    reading = of_table(make_videos, csv)
    assert [text for *_, text in captions(reading)] == texts
    assert any("as one caption" in note for note in reading.notes) == (cell == "[a, b]")
    pq.write_table(pa.table({"video": ["a"], "text": [texts]}), parquet := tmp_path / "t.parquet")
    (lines := tmp_path / "t.jsonl").write_text(json.dumps({"video": "a", "text": texts}))
    assert captions(of_table(make_videos, parquet)) == captions(of_table(make_videos, lines)) == captions(reading)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("['one', two]", "malformed_row"),
        ("['one'", "malformed_row"),
        ('["one", 2]', "malformed_row"),
        ("[]", "empty_caption"),
        ("['one', ' ']", "empty_caption"),
    ],
)
def test_a_list_that_is_none_is_rejected_by_row(
    make_videos: VideoMaker, tmp_path: Path, cell: str, reason: str
) -> None:
    (csv := tmp_path / "t.csv").write_text('video,text\nb,x\na,"' + cell.replace('"', '""') + '"\n')
    reading = of_table(make_videos, csv)
    assert reading.rejected["reason"].to_pylist() == [reason] and reading.rejected["row"].to_pylist() == [1]


@pytest.mark.parametrize(
    ("header", "row", "times"),
    [
        ("start,duration", "2,3.5", (2.0, 5.5)),
        ("start,end,duration", "2,5.5,3.55", (2.0, 5.5)),
        ("start,end,duration", "2,,3", (2.0, 5.0)),
        ("start_ms,duration_ms", "2000,500", (2.0, 2.5)),
        ("start_frame,duration_frames,fps", "60,30,30000/1001", (2.002, 3.003)),
        ("Begin Time - hh:mm:ss.ms,Duration - hh:mm:ss.ms", "00:00:02.000,00:01:00.5", (2.0, 62.5)),
        ("duration", "3", (0.0, inf)),
    ],
)
def test_a_duration_gives_the_end(
    make_videos: VideoMaker, tmp_path: Path, header: str, row: str, times: tuple[float, float]
) -> None:
    (path := tmp_path / "t.csv").write_text(f"video,{header},text\na,{row},x\n")
    reading = of_table(make_videos, path)
    assert captions(reading) == [("a", *map(pytest.approx, times), "x")]
    assert any("duration is not used" in note for note in reading.notes) == (header == "duration")


def test_an_end_and_a_duration_that_differ_are_rejected_by_row(make_videos: VideoMaker, tmp_path: Path) -> None:
    (path := tmp_path / "t.csv").write_text("video,start,end,duration,text\na,0,2,2,x\na,0,2,60,y\na,2,,0,z\n")
    reading = of_table(make_videos, path)
    assert [text for *_, text in captions(reading)] == ["x"]
    assert reading.rejected["reason"].to_pylist() == ["bad_time", "bad_time"]
    assert "it ends at 2 s, but its duration implies an end at 60 s" in reading.rejected["detail"][0].as_py()


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ("timestamp", "apply to complete videos"),
        ("clip_start_minutes,end_s", "apply to complete videos"),
        ("start,endOfSpeech", "extend to the ends of their videos"),
        ("Time", "apply to complete videos"),
    ],
)
def test_times_that_are_not_understood_are_refused(
    make_videos: VideoMaker, tmp_path: Path, header: str, what: str
) -> None:
    (path := tmp_path / "t.csv").write_text(f"video,{header},text\na,{'1,' * header.count(',')}2,x\n")
    with pytest.raises(UserError, match=what):
        of_table(make_videos, path)
    others = "begin_s,end_s,upload_time,timestamp"  # the captions have their times, and the other columns are noted
    path.write_text(f"video,{others},text\na,0,1,2,3,x\n")
    assert "t.csv: ignored upload_time, timestamp" in of_table(make_videos, path).notes


def test_labels_are_columns_of_the_captions(make_videos: VideoMaker, tmp_path: Path) -> None:
    rows = [
        {"video": "a", "text": ["one", "uno"], "class": "cat", "Label Size": 3},
        {"video": "a", "text": "again", "class": "cat", "Label Size": 3.0},
        {"video": "a", "begin_s": 1, "end_s": 2, "class": "dog"},
        {"video": "b", "text": "plain"},
        {"video": "b", "class": ["cat", "dog"]},
    ]
    (path := tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    reading = of_table(make_videos, path)
    names = ("text", "source", "begin_s", "label_class", "label_size")
    assert [tuple(row[name] for name in names) for row in reading.captions.to_pylist()] == [
        ("one", "human", 0.0, "cat", "3"),
        ("uno", "human", 0.0, None, None),
        ("again", "human", 0.0, None, None),
        ("dog", "class", 1.0, "dog", None),
        ("plain", "human", 0.0, None, None),
    ]
    assert reading.rejected["reason"].to_pylist() == ["bad_label"]
    (table := tmp_path / "two.csv").write_text("video,class,label\na,x,y\n")
    with pytest.raises(UserError, match="class and label could both be the column label_class"):
        of_table(make_videos, table)


def test_labels_and_splits_of_further_captions_are_said_not_to_be_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", reading_of(tmp_path, ["a"], []))
    (path := tmp_path / "t.csv").write_text("video,text,label,split\na,x,cat,val\na,y,dog,val\n")
    notes = read(tmp_path / "data", path).reading.notes
    assert sum("splits, labels, groups and views are ignored" in note for note in notes) == 1


def test_names_of_labels_have_letters_digits_and_underscores() -> None:
    header = ["video", "Label - Main Verb", "label_noun", "labels"]
    assert columns_of(header) == {
        "video": "video",
        "Label - Main Verb": "label_main_verb",
        "label_noun": "label_noun",
    }


@pytest.mark.parametrize(
    "content",
    [
        '{"video": "a.mp4", "reward": 1}\n{"video": "b.mp4", "reward": 2}',
        '[{"video": "a.mp4", "reward": 1}, {"video": "b.mp4"}]',
    ],
)
def test_a_json_table_without_a_text_is_refused_with_the_keys_that_it_has(
    make_videos: VideoMaker, tmp_path: Path, content: str
) -> None:
    (path := tmp_path / "t.json").write_text(content)
    with pytest.raises(UserError, match=r"has no column for text \(the keys of its first row: video, reward\)"):
        of_table(make_videos, path)


@pytest.mark.parametrize("name", ["task", "instruction", "language_instruction", "Language Instruction"])
def test_instructions_of_robots_are_captions_unless_a_table_has_others(
    make_videos: VideoMaker, tmp_path: Path, name: str
) -> None:
    (path := tmp_path / "t.json").write_text(json.dumps([{"video": "a.mp4", name: "pick up the cup"}]))
    assert of_table(make_videos, path).captions["text"].to_pylist() == ["pick up the cup"]
    path.write_text(json.dumps([{"video": "a.mp4", name: "7", "caption": "a hand lifts a cup"}]))
    assert of_table(make_videos, path).captions["text"].to_pylist() == ["a hand lifts a cup"]


def test_truth_values_are_two_classes_in_every_form(make_videos: VideoMaker, tmp_path: Path) -> None:
    forms = [True, "true", "True", "TRUE", False, "false", "False", "FALSE"]
    rows = [{"video": "a.mp4", "begin_s": n, "text": "x", "label_success": form} for n, form in enumerate(forms)]
    (path := tmp_path / "t.json").write_text(json.dumps(rows))
    assert of_table(make_videos, path).captions["label_success"].to_pylist() == ["true"] * 4 + ["false"] * 4
