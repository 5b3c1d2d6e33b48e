"""Tests of annotation files with values that no annotator writes: a row or the complete file is rejected by name."""

import errno
import gzip
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.adapters.clips import read_msrvtt, read_something_something, read_vatex
from clipmill.manifests.adapters.ego4d import read_ego4d
from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.adapters.timed_captions import read_activitynet, read_didemo
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker

DEEP = "[" * 100_000
LONG_INTEGER = "9" * 5000
HUGE_INTEGER = "9" * 400
# Shallow enough for JSON's decoder, but too deep for a message that quotes the complete value.
NESTED = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (DEEP, "malformed_row"),
        (f'{{"video": "a", "text": {LONG_INTEGER}}}', "malformed_row"),
        (f'{{"video": "a", "text": {HUGE_INTEGER}}}', "malformed_row"),
        (f'{{"video": "a", "text": {NESTED}}}', "malformed_row"),
        (f'{{"video": {NESTED}, "text": "x"}}', "malformed_row"),
        (f'{{"video": "a", "text": "x", "begin_s": {HUGE_INTEGER}}}', "bad_time"),
        (f'{{"video": "a", "text": "x", "begin_s": {NESTED}}}', "bad_time"),
        ('{"video": "a", "text": "x", "end_s": NaN}', "bad_time"),
        ('{"video": "a", "text": "x", "end_s": true}', "bad_time"),
        (f'{{"video": "a", "text": "x", "source": {NESTED}}}', "malformed_row"),
        ('{"video": "a", "text": "x", "source": "\\ud800"}', "malformed_row"),
        (f'{{"video": "a", "text": "x", "split": {NESTED}}}', "bad_split"),
        ('{"video": "a", "text": "x", "split": "\\ud800"}', "bad_split"),
        ('{"video": "\\ud800", "text": "x"}', "malformed_row"),
    ],
)
def test_one_bad_line_of_json_does_not_stop_the_others(
    make_videos: VideoMaker, tmp_path: Path, line: str, reason: str
) -> None:
    table = tmp_path / "captions.jsonl"
    good = '{"video": "a", "text": "good"}'
    table.write_text(f"{good}\n{line}\n{good}\n")
    reading = read_folder(make_videos("a.mp4"), captions=table)
    assert reading.captions["text"].to_pylist() == ["good", "good"]
    (row,) = reading.rejected.to_pylist()
    assert row["reason"] == reason
    assert len(row["detail"]) < 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, "nested too deeply"),
        ("[" + DEEP, "nested too deeply"),
        (f"[{LONG_INTEGER}]", "line 1"),
        ("[\x00", "line 1"),
    ],
)
def test_json_that_cannot_be_decoded_names_file_and_line(
    make_videos: VideoMaker, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "vatex.json"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_vatex(make_videos("a.mp4"), annotations=[path])
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_values_of_any_kind_in_vatex_and_ego4d_are_rejected_rows(make_videos: VideoMaker, tmp_path: Path) -> None:
    videos, vatex, ego4d = make_videos("a.mp4"), tmp_path / "vatex.json", tmp_path / "narration.json"
    vatex.write_text(f'[{{"videoID": "a", "enCap": ["good", {HUGE_INTEGER}, {NESTED}]}}, {NESTED}]')
    reading = read_vatex(videos, annotations=[vatex])
    assert (reading.captions.num_rows, reading.rejected.num_rows) == (1, 3)
    points = [f'{{"narration_text": "x", "timestamp_sec": {time}}}' for time in (1, 2, HUGE_INTEGER, "1e308", NESTED)]
    ego4d.write_text(f'{{"videos": {{"a": {{"narration_pass_1": {{"narrations": [{", ".join(points)}]}}}}}}}}')
    reading = read_ego4d(videos, annotations=[ego4d])
    assert reading.captions["begin_s"].to_pylist() == [0.5, 1.5]
    assert reading.rejected["reason"].to_pylist() == ["bad_time"] * 3


# Rows of a file of each dataset, in which each value is replaced or omitted in turn.
PUBLISHED: dict[Callable[..., Reading], Any] = {
    read_msrvtt: {
        "videos": [{"video_id": "a", "category": 1, "split": "train"}],
        "sentences": [{"video_id": "a", "caption": "good"}],
    },
    read_didemo: [{"video": "a.mov", "description": "good", "times": [[0, 0]], "num_segments": 6}],
    read_activitynet: {"a": {"duration": 5.0, "timestamps": [[0, 1]], "sentences": ["good"]}},
    read_something_something: [{"id": "a", "label": "good", "template": "Poking [x]", "placeholders": ["good"]}],
}
LEFT_OUT = "null, left out"
OTHER_VALUES = ("null", "true", "-1", "NaN", "Infinity", HUGE_INTEGER, '""', '"\\ud800"', "[]", "{}", NESTED, LEFT_OUT)


def damaged_texts(value: Any, other: str) -> Iterator[str]:
    """Yield JSON texts of `value` in which one value, at any depth below the first, is `other`."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        keys = value if isinstance(value, dict) else range(len(value))
        for text in [other, *(damaged_texts(below, other) if isinstance(below, dict | list) else ())]:
            parts = {name: text if name == key else json.dumps(value[name]) for name in keys}
            parts = {name: part for name, part in parts.items() if part != LEFT_OUT}
            if isinstance(value, dict):
                yield "{" + ", ".join(f"{json.dumps(name)}: {part}" for name, part in parts.items()) + "}"
            else:
                yield "[" + ", ".join(parts.values()) + "]"


@pytest.mark.parametrize("reader", PUBLISHED)
@pytest.mark.parametrize("other", OTHER_VALUES, ids=lambda text: text[:8])
def test_any_value_in_place_of_another_is_a_rejected_row_or_refused(
    make_videos: VideoMaker, tmp_path: Path, reader: Callable[..., Reading], other: str
) -> None:
    videos, path = make_videos("a.mp4"), tmp_path / "train_data.json"
    for text in damaged_texts(PUBLISHED[reader], other):
        path.write_text(text)
        try:
            reading = reader(videos, annotations=[path])
        except UserError as error:
            assert str(path) in str(error)
        else:
            reading.captions.validate(full=True)
            assert set(reading.captions["text"].to_pylist()) <= {"good"}
            assert all(len(row["detail"]) < 400 for row in reading.rejected.to_pylist())


def test_values_of_any_kind_in_a_pickled_list_are_rejected_rows(make_videos: VideoMaker, tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    output = io.BytesIO()
    # The pickler is recursive, so the bytes of the nested list are written manually.
    output.write(b"\x80\x04(" + pickle.dumps(("a", 0.0, 1.0, "good"), 4)[2:-1])
    output.write(b"]" * 100_000 + b"a" * 99_999)
    for row in (("a", 10**400, 1.0, "x"), ("a", 0.0, 10**5000, "x"), ("a", 0.0, 1.0, 10**5000)):
        output.write(pickle.dumps(row, 4)[2:-1])
    output.write(b"l.")
    path = tmp_path / "ego4d_train.pkl"
    path.write_bytes(output.getvalue())
    reading = read_ego4d(make_videos("a.mp4"), annotations=[path])
    assert reading.captions["text"].to_pylist() == ["good"]
    assert reading.rejected["reason"].to_pylist() == ["malformed_row", "bad_time", "bad_time", "malformed_row"]


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"video,text\na,one\n"),
        gzip.compress(b"video,text\na,one\n")[:-5],
        b"\xff\xfe" + "video,text\n".encode("utf-16-le")[:-1],
        b"\xff\xfe" + b"\x00\xd8" * 20,
        b"\0" * 4096,
    ],
    ids=["gzip", "broken gzip", "cut UTF-16", "lone surrogates", "zeros"],
)
@pytest.mark.parametrize("name", ["c.csv", "c.jsonl"])
def test_what_is_no_text_is_refused_by_name(make_videos: VideoMaker, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_folder(make_videos("a.mp4"), captions=tmp_path / name)
    assert name in str(caught.value) and caught.value.hint


def test_a_file_without_line_ends_does_not_fill_the_memory(
    make_videos: VideoMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipmill.manifests.adapters.annotations._MAX_LINE_CHARS", 1000)
    (tmp_path / "c.csv").write_text("video,text\na," + "x" * 2000)
    with pytest.raises(UserError, match="line 2: the line has more than 1,000 characters"):
        read_folder(make_videos("a.mp4"), captions=tmp_path / "c.csv")


@pytest.mark.parametrize("name", ["captions.csv", "captions.jsonl", "vatex.json", "list.pkl"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_disk_that_fails_while_a_file_is_read_is_an_error_with_its_path(
    make_videos: VideoMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    path, videos = tmp_path / name, make_videos("a.mp4")
    path.write_text(json.dumps([{"videoID": "a", "enCap": ["x"]}]))
    opened = Path.open

    def failing(self: Path, *arguments: Any, **options: Any) -> Any:
        file = opened(self, *arguments, **options)
        if self != path:
            return file
        broken = io.BytesIO() if "b" in file.mode else io.StringIO()

        def fail(*_: Any) -> Any:
            raise OSError(number, os.strerror(number))

        broken.read = broken.readline = broken.readinto = fail  # type: ignore[method-assign,union-attr,assignment]
        return broken

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(UserError, match=rf"cannot read .*{name}: {os.strerror(number)}"):
        if name.endswith((".csv", ".jsonl")):
            read_folder(videos, captions=path)
        elif name.endswith(".json"):
            read_vatex(videos, annotations=[path])
        else:
            read_ego4d(videos, annotations=[path])
