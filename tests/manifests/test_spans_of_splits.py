"""Tests of captions with a different split than their video, and of names of moments and cameras."""

from math import inf
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clipmill.manifests.adapters.folder import read_folder
from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder
from clipmill.manifests.divided_videos import DividedVideos, find_split_videos, read_divided_videos, select_split
from clipmill.manifests.errors import UserError
from clipmill.manifests.schema import REJECTED
from clipmill.manifests.store import captions_path, read_captions, read_videos
from clipmill.manifests.write import WriteResult, write_further_captions, write_manifest
from tests.manifests.conftest import VideoMaker

US = 1_000_000
Span = tuple[str, float, float, str | None]  # video, start, end, split


def reading_of(folder: Path, videos: dict[str, str], spans: list[Span], *, dataset: str = "a") -> Reading:
    builder = ReadingBuilder(dataset)
    rows = {}
    for name, split_of_video in videos.items():
        (folder / f"{name}.mp4").write_bytes(b"video")
        rows[name] = builder.add_video(name, path=folder / f"{name}.mp4", split=split_of_video)
    for number, (name, begin_s, end_s, split) in enumerate(spans):
        row = rows[name]
        assert row is not None
        origin = Origin(folder, "human", number)
        assert builder.add_caption(row, f"{number}", origin, begin_s=begin_s, end_s=end_s, split=split)
    return builder.build()


def write(data: Path, reading: Reading, *, dataset: str = "a") -> WriteResult:
    return write_manifest(data, dataset, reading.videos, reading.captions, reading.rejected)


def digests(data: Path) -> dict[str, str]:
    return {row["video_id"]: row["captions_sha256"] for row in read_videos(data).to_pylist()}


def add_further(data: Path, video: str) -> None:
    """Add a caption for a complete video, from a different source than its dataset."""
    row = {"video_id": video, "begin_s": 0.0, "end_s": inf, "text": "more", "source": "asr", "likelihood": -1.0}
    kinds = {"begin_s": pa.float64(), "end_s": pa.float64(), "text": pa.string(), "likelihood": pa.float32()}
    coded = pa.dictionary(pa.int32(), pa.string())
    table = pa.table({name: pa.array([value], kinds.get(name, coded)) for name, value in row.items()})
    records = {"asr": {"kind": "table", "models": []}}
    write_further_captions(data, table, REJECTED.empty_table(), records=records)


def test_split_group_and_view_of_a_table_are_columns_of_the_captions(make_videos: VideoMaker, tmp_path: Path) -> None:
    folder, data = make_videos("top.mp4", "wrist.mp4", "c.mp4"), tmp_path / "data"
    table = tmp_path / "captions.csv"
    table.write_text(
        "video,start,end,task,split,Moment,camera\n"
        "top,0,5,open,train,1,top\ntop,5,9,close,val,2,top\nwrist,0,5,open,,1,wrist\nc,,,plain,,,\n"
    )
    reading = read_folder(folder, captions=table)
    assert "Moment as group, camera as view, task as text" in reading.notes[0]
    write(data, reading)
    stored = read_captions(data)
    assert stored.column_names[6:] == ["split", "group", "view"]
    assert [tuple(row.values()) for row in stored.select(["split", "group", "view"]).to_pylist()] == [
        (None, "1", "top"),
        ("val", "2", "top"),
        (None, "1", "wrist"),
        (None, None, None),
    ]
    # A second dataset and additional captions do not change them; a dataset without them removes the columns.
    other = reading_of(tmp_path, {"x": "train"}, [("x", 0, 1, None)], dataset="b")
    write(data, other, dataset="b")
    add_further(data, "c")
    again = read_captions(data)
    assert again.column_names[6:] == ["likelihood", "split", "group", "view"]
    assert again["split"].to_pylist() == [None, "val", None, None, None, None]
    table.write_text("video,text\ntop,open\nwrist,open\nc,plain\n")
    write(data, read_folder(folder, captions=table))
    assert read_captions(data).column_names[6:] == ["likelihood"]


def test_names_of_moments_in_parquet_may_be_numbers(make_videos: VideoMaker, tmp_path: Path) -> None:
    table = tmp_path / "captions.parquet"
    columns = {"video": ["a", "a", "a"], "text": ["x", "y", "z"], "group": [3.0, None, 12.0], "view": [0, 1, None]}
    pq.write_table(pa.table(columns), table)
    reading = read_folder(make_videos("a.mp4"), captions=table)
    assert reading.captions["group"].to_pylist() == ["3", None, "12"]
    assert reading.captions["view"].to_pylist() == ["0", "1", None]


def test_a_split_changes_the_digest_of_its_video_only(tmp_path: Path) -> None:
    data = tmp_path / "data"
    videos = {"a": "train", "b": "train"}
    write(data, reading_of(tmp_path, videos, [("a", 0, 5, None), ("b", 0, 5, None)]))
    before = digests(data)
    write(data, reading_of(tmp_path, videos, [("a", 0, 5, "val"), ("b", 0, 5, "train")]))
    after = digests(data)
    assert after["a"] != before["a"] and after["b"] == before["b"]
    assert read_captions(data)["caption_id"].to_pylist() == [0, 1], "the caption must keep its ID"


def owner(video_split: str, spans: list[Span], at_s: float) -> str:
    """Return the split of a moment of a video by checking every caption."""
    splits = {split or video_split for _, begin_s, end_s, split in spans if begin_s <= at_s < end_s}
    return next((name for name in ("test", "val") if name in splits), min(splits, default=video_split))


@pytest.mark.parametrize("seed", range(6))
def test_every_second_belongs_to_one_split(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    videos = {f"v{number}": str(rng.choice(["train", "val"])) for number in range(6)}
    spans: list[Span] = []
    for name in videos:
        for _ in range(int(rng.integers(0, 7))):
            begin_s = int(rng.integers(0, 40)) / 2
            end_s = inf if rng.random() < 0.1 else begin_s + int(rng.integers(1, 20)) / 2
            split = None if name in ("v0", "v1") else rng.choice(["train", "val", "test", ""], p=[0.2, 0.2, 0.2, 0.4])
            spans.append((name, begin_s, end_s, str(split) if split else None))
    write(tmp_path / "data", reading_of(tmp_path, videos, spans))
    divided = read_divided_videos(tmp_path / "data")
    assert divided is not None
    names = list(videos)
    mixed = {name for name, *_, split in spans if split not in (None, videos[name])}
    assert {names[row] for row in divided.video.tolist()} == mixed
    # Check every half second with both readers.
    row, begin_us = np.repeat(np.arange(6), 80), np.tile(np.arange(80) * US // 2, 6)
    for split in ("train", "val", "test"):
        expected = [
            names[video] not in mixed
            or owner(videos[names[video]], [span for span in spans if span[0] == names[video]], at / US) == split
            for video, at in zip(row.tolist(), begin_us.tolist(), strict=True)
        ]
        shown = divided.is_entirely_in(split, video=row, begin_us=begin_us, end_us=begin_us + US // 2)
        assert shown.tolist() == expected
        parts = divided.split_parts(split, video=row, begin_us=begin_us, end_us=begin_us + US // 2)
        assert parts.span.tolist() == np.flatnonzero(expected).tolist()
        # Long spans lose the same half seconds, and also single half seconds, which are too short.
        marks = ["".join(map(str, video.astype(int))) for video in np.split(np.array(expected), len(names))]
        num_kept = sum(len(run) for video in marks for run in video.split("0") if len(run) > 1)
        whole = np.full(len(names), 40 * US)
        long = divided.split_parts(split, video=np.arange(len(names)), begin_us=np.zeros_like(whole), end_us=whole)
        assert (long.end_us - long.begin_us).sum() == num_kept * US // 2


def test_a_split_of_captions_has_the_videos_and_the_captions_that_show_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    spans: list[Span] = [("a", 0, 5, None), ("a", 5, 9, "val"), ("b", 0, inf, None), ("c", 0, 2, "train")]
    write(data, reading_of(tmp_path, {"a": "train", "b": "train", "c": "val"}, spans))
    ids_by_split = {}
    for split in ("train", "val"):
        ids, divided = find_split_videos(data, split)
        texts = select_split(read_captions(data), data, split)["text"].to_pylist()
        ids_by_split[split] = ids.to_pylist(), texts, None if divided is None else sorted(set(divided.video.tolist()))
    assert ids_by_split["train"] == (["a", "b", "c"], ["0", "2", "3"], [0, 2])
    assert ids_by_split["val"] == (["a", "c"], ["1"], [0, 1])
    before = read_divided_videos(data)
    add_further(data, "c")
    after = read_divided_videos(data)
    assert before is not None and after is not None
    assert (before.end_us.tolist(), before.split.tolist()) == (after.end_us.tolist(), after.split.tolist())
    with pytest.raises(UserError, match="no videos of split 'test'") as caught:
        find_split_videos(data, "test")
    assert "train, val" in str(caught.value.hint)


def test_nothing_is_read_for_captions_without_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data", reading_of(tmp_path, {"a": "train"}, [("a", 0, 5, None)]))
    monkeypatch.setattr("clipmill.manifests.caption_spans.StoredCaptions.verify", lambda _: pytest.fail("read"))
    monkeypatch.setattr("clipmill.manifests.caption_spans.StoredCaptions.blocks", lambda _: pytest.fail("read"))
    assert read_divided_videos(tmp_path / "data") is None
    assert "split" not in pq.read_schema(captions_path(tmp_path / "data")).names
    assert isinstance(DividedVideos, type)
