"""Tests of caption tables: Parquet, CSV and JSON lines, with unusable rows and unreadable files."""

import json
from math import inf
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.adapters.further import FurtherReading
from clipmill.manifests.errors import UserError
from clipmill.manifests.previous import is_duplicate, is_unlikely
from clipmill.manifests.store import read_rejected_rows
from clipmill.manifests.write import FURTHER
from tests.manifests.conftest import VideoMaker
from tests.manifests.test_further_sources import OWN, Row, add, pseudo, read
from tests.manifests.test_store import reading_of, write


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path / "data", reading_of(tmp_path, ["v", "w"], OWN))
    return tmp_path / "data"


def reasons(reading: FurtherReading) -> list[tuple[int | None, str | None, str]]:
    return [(row["row"], row["source_id"], row["reason"]) for row in reading.reading.rejected.to_pylist()]


def test_rows_that_cannot_be_used_are_rejected_by_reason(data: Path, tmp_path: Path) -> None:
    wrong: list[Row] = [
        {"video": "gone", "text": "a"},
        {"video": None, "text": "a"},
        {"video": "v", "text": " "},
        {"video": "v", "text": None},
        {"video": "v", "text": "a", "begin_s": -1.0},
        {"video": "v", "text": "a", "begin_s": 1e300, "end_s": 1e301},
        {"video": "v", "text": "a", "end_s": float("nan")},
        {"video": "v", "text": "a", "likelihood": float("nan")},
        {"video": "v", "text": "a", "likelihood": 0.5},
        {"video": "gone", "text": "b"},
        {"video": "v", "text": "good", "begin_s": None, "end_s": None},
    ]
    result = read(data, pseudo(tmp_path / "p.parquet", wrong))
    assert result.reading.captions["text"].to_pylist() == ["good"]
    assert result.reading.captions["end_s"].to_pylist() == [inf]
    assert result.reading.num_captions_lost == 2
    assert sorted(reasons(result), key=str) == sorted(
        [
            (None, "gone", "missing_file"),
            (1, None, "empty_id"),
            (2, "v", "empty_caption"),
            (3, "v", "empty_caption"),
            *((row, "v", "bad_time") for row in (4, 5, 6)),
            *((row, "v", "bad_likelihood") for row in (7, 8)),
        ],
        key=str,
    )
    add(data, pseudo(tmp_path / "p.parquet", wrong))
    assert read_rejected_rows(data).filter(pc.equal(read_rejected_rows(data)["dataset"], FURTHER)).num_rows == 9
    add(data, pseudo(tmp_path / "p.parquet", wrong[-1:]))
    assert read_rejected_rows(data).num_rows == 0


def test_sources_that_cannot_be_named_in_a_condition_are_rejected(data: Path, tmp_path: Path) -> None:
    names = ("a=b,c @*\n", "two words", "a\n", " a", "x@y", "x@1f2e3d4", "x@1F2E3D4C", "x@y@1f2e3d4c", "*")
    good = ("été_2.en-GB", "captioner@1f2e3d4c")
    lines = [{"video": "v", "text": "a", "source": name} for name in (*names, *good)]
    (table := tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = read(data, table)
    assert reasons(result) == [(row, "v", "bad_source") for row in range(len(names))]
    assert result.reading.rejected["detail"][0].as_py() == (
        "source is 'a=b,c @*\\n', expected letters, digits, '.', '-' and '_': use --source NAME"
    )
    assert list(result.records) == result.reading.captions["source"].to_pylist() == list(good)
    assert read(data, table, source="mine").reading.captions.num_rows == len(lines)


def test_text_tables_have_the_same_columns_and_names_of_videos(data: Path, tmp_path: Path) -> None:
    lines = [
        {"video": "v", "text": "by id", "begin_s": "1", "end_s": 2.5, "likelihood": "-0.5"},
        {"video": "a-w.mp4", "text": "by file name", "source": "others"},
        {"video": "v", "text": 3},
        {"video": "v", "text": "a", "begin_s": "soon"},
        {"video": "v", "text": "a", "likelihood": True},
        ["a list"],
        {"video": "v", "text": "\ud800"},
    ]
    jsonl, csv = tmp_path / "t.jsonl", tmp_path / "t.csv"
    jsonl.write_text(
        "".join(f"{json.dumps({'source': 'mine', **line} if isinstance(line, dict) else line)}\n" for line in lines)
    )
    csv.write_text(
        "video,text,begin_s,end_s,source,likelihood\nv,by id,1,2.5,mine,-0.5\na-w.mp4,by file name,,,others,\n"
    )
    result = read(data, jsonl)
    assert result.reading.captions.to_pylist() == read(data, csv).reading.captions.to_pylist()
    assert [tuple(row.values()) for row in result.reading.captions.to_pylist()] == [
        ("v", 1.0, 2.5, "by id", "mine", -0.5),
        ("w", 0.0, inf, "by file name", "others", None),
    ]
    assert [reason for _, _, reason in reasons(result)] == [
        *("malformed_row", "bad_time", "bad_likelihood", "malformed_row", "malformed_row")
    ]
    assert result.records == {name: {"kind": "table", "models": []} for name in ("mine", "others")}


def test_parquet_columns_may_have_other_types_of_the_same_meaning(data: Path, tmp_path: Path) -> None:
    columns = {
        "video": pa.array(["v", "w"]).dictionary_encode(),
        "text": pa.array(["a", "b"], pa.large_string()),
        "source": pa.array(["s", "s"]).dictionary_encode(),
        "begin_s": pa.array([1, 2], pa.int32()),
        "end_s": pa.array([2.5, 3], pa.float32()),
        "likelihood": pa.nulls(2),
        "sample": pa.array([{"any": 1}, None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert [tuple(row.values()) for row in read(data, tmp_path / "t.parquet").reading.captions.to_pylist()] == [
        ("v", 1.0, 2.5, "a", "s", None),
        ("w", 2.0, 3.0, "b", "s", None),
    ]


def test_tables_that_cannot_be_read_are_named(data: Path, tmp_path: Path) -> None:
    good = pseudo(tmp_path / "good.parquet", [{"video": "v", "text": "a"}] * 50)
    content = bytearray(good.read_bytes())
    cut, flipped = tmp_path / "cut.parquet", tmp_path / "flipped.parquet"
    cut.write_bytes(content[: len(content) // 2])
    content[20:60] = b"\xff" * 40
    flipped.write_bytes(content)
    columns, metadata, other = (tmp_path / f"{name}.parquet" for name in ("columns", "meta", "other"))
    pq.write_table(pa.table({"video": ["v"], "words": ["a"]}), columns)
    for path, value in ((metadata, "{"), (other, '{"kind": "scores"}')):
        pq.write_table(pa.table({"video": ["v"], "text": ["a"], "source": ["s"]}, metadata={"clipmill": value}), path)
    latin = pa.StringArray.from_buffers(1, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xe9"))
    pq.write_table(pa.table({"video": ["v"], "text": latin, "source": ["s"]}), encoding := tmp_path / "latin.parquet")
    for path, message in (
        (encoding, "cannot be read as Parquet: .*UTF8"),
        (cut, "cannot be read as Parquet"),
        (flipped, "cannot be read as Parquet"),
        (columns, r"has no column for text \(its columns: video, words\)"),
        (metadata, "is not JSON"),
        (other, "does not have the kind pseudo-captions"),
        (tmp_path, "it is a folder, not a file"),
        (tmp_path / "none.parquet", "No such file"),
        (tmp_path / "none.csv", "No such file"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read(data, path)
        assert path.name in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("num_lines", [1, 2000])
def test_a_damaged_utf8_text_is_named_with_its_line(data: Path, tmp_path: Path, num_lines: int) -> None:
    for name in ("t.csv", "t.jsonl"):
        content = "video,text,source\n" + "v,é,s\n" * num_lines + "v,caf"
        (tmp_path / name).write_bytes(content.encode() + b"\xe9,s\n")
        with pytest.raises(UserError, match=rf"{name}, line {num_lines + 2}: not UTF-8 \(invalid continuation byte\)"):
            read(data, tmp_path / name)


def test_two_columns_of_the_same_name_are_refused(data: Path, tmp_path: Path, make_videos: VideoMaker) -> None:
    csv, parquet, jsonl = (tmp_path / f"t.{suffix}" for suffix in ("csv", "parquet", "jsonl"))
    csv.write_text("video,text,text,source\nv,a,b,s\n")
    columns = [("video", "v"), ("text", "a"), ("text", "b"), ("source", "s")]
    pq.write_table(pa.table([[value] for _, value in columns], names=[name for name, _ in columns]), parquet)
    for path in (csv, parquet):
        with pytest.raises(UserError, match=f"^{path} has two columns named text") as caught:
            read(data, path)
        assert caught.value.hint == "rename or remove one of them"
    with pytest.raises(UserError, match=f"^{csv} has two columns named text"):
        read_folder(make_videos("v.mp4"), captions=csv)
    # In JSON lines, only one row is wrong. Columns without a name, as spreadsheets write them, are ignored.
    jsonl.write_text(
        '{"video": "v", "text": "a", "text": "b", "source": "s"}\n{"video": "v", "text": "c", "source": "s"}\n'
    )
    result = read(data, jsonl)
    assert reasons(result) == [(0, None, "malformed_row")] and result.reading.captions["text"].to_pylist() == ["c"]
    assert "two values for 'text'" in result.reading.rejected["detail"][0].as_py()
    csv.write_text("video,text,source,,\nv,a,s,,\n")
    assert read(data, csv).reading.captions["text"].to_pylist() == ["a"]


def test_unlikely_captions_and_duplicates_of_a_clip_are_found(data: Path, tmp_path: Path) -> None:
    rows: list[Row] = [
        {"video": "v", "text": "A dog  runs", "likelihood": -2.0},
        {"video": "v", "text": "a dog runs", "likelihood": -1.0},
        {"video": "v", "text": "a DOG\u00a0runs\n", "likelihood": -1.0},
        {"video": "v", "text": "a dog runs", "end_s": 2.0},
        {"video": "w", "text": "a dog runs"},
        {"video": "v", "text": "a dog", "likelihood": None},
        {"video": "v", "text": "A DOG", "likelihood": -9.0},
        {"video": "v", "text": "a dog runs", "source": "others"},
    ]
    captions = read(data, pseudo(tmp_path / "p.parquet", rows)).reading.captions
    assert is_duplicate(captions).nonzero()[0].tolist() == [0, 2, 5]
    assert is_unlikely(captions, min_likelihood=-1.0).nonzero()[0].tolist() == [0, 6]
    assert is_duplicate(captions.slice(0, 0)).tolist() == []
