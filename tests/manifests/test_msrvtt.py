"""Tests of MSR-VTT on rows in its published form: official splits, and 1k-A."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.adapters.clips import read_msrvtt
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker, of_splits, write_json
from tests.manifests.test_labelled_adapters import reasons, rows


def info_file(path: Path, videos: dict[str, str], *, num_captions: int = 2, **more: Any) -> Path:
    """Write a file of MSR-VTT: videos with their splits, and captions `<video> <n>`."""
    entries = [
        {"category": number, "url": f"https://x/watch?v={name}", "video_id": name, "start time": 137.72}
        | {"end time": 149.44, "split": split, "id": number}
        for number, (name, split) in enumerate(videos.items())
    ]
    sentences = [
        {"caption": f"{name} {n}", "video_id": name, "sen_id": n} for name in videos for n in range(num_captions)
    ]
    return write_json(path, {"info": {"year": "2016"}, "videos": entries, "sentences": sentences, **more})


@pytest.fixture
def msrvtt(make_videos: VideoMaker, tmp_path: Path) -> tuple[Path, Path]:
    """Create a folder of eight videos, and the JSON file with their captions."""
    splits = {f"video{n}": split for n, split in enumerate(["train"] * 3 + ["validate"] + ["test"] * 4)}
    return make_videos(*(f"TrainValVideo/{name}.mp4" for name in splits)), info_file(tmp_path / "data.json", splits)


def pairs_file(path: Path, *video_ids: str) -> Path:
    lines = [f"ret{n},msr{name[5:]},{name},the pair of {name}" for n, name in enumerate(video_ids)]
    path.write_text("\n".join(["key,vid_key,video_id,sentence", *lines]) + "\n")
    return path


def list_file(path: Path, *video_ids: str) -> Path:
    path.write_text("\n".join(["video_id", *video_ids]) + "\n")
    return path


def test_msrvtt_has_its_own_splits_and_captions_of_whole_clips(msrvtt: tuple[Path, Path]) -> None:
    videos, info = msrvtt
    reading = read_msrvtt(videos, annotations=[info])
    assert rows(reading)[2:4] == [
        ("video1", 0.0, inf, "video1 0", "human", 1),
        ("video1", 0.0, inf, "video1 1", "human", 1),
    ]
    assert {split: len(names) for split, names in of_splits(reading).items()} == {"train": 3, "val": 1, "test": 4}
    assert (reading.captions.num_rows, reading.rejected.num_rows) == (16, 0)


def test_the_split_1ka_has_one_caption_for_each_test_video(msrvtt: tuple[Path, Path], tmp_path: Path) -> None:
    videos, info = msrvtt
    pairs = pairs_file(tmp_path / "MSRVTT_JSFUSION_test.csv", "video6", "video4")
    train = list_file(tmp_path / "MSRVTT_train.9k.csv", "video0", "video3", "video5")
    for annotations in ([info, train, pairs], [pairs, info, train]):
        reading = read_msrvtt(videos, annotations=annotations)
        assert of_splits(reading) == {"test": ["video6", "video4"], "train": ["video0", "video3", "video5"]}
        assert [row[3] for row in rows(reading) if row[0] in ("video6", "video4")] == [
            "the pair of video6",
            "the pair of video4",
        ]
        assert (reading.captions.num_rows, reading.rejected.num_rows) == (8, 0)
        # The category of a pair comes from the JSON file.
        assert [row[5] for row in rows(reading)[:2]] == [6, 4]
        assert reading.num_rows_used == {str(pairs): 2, str(train): 3, str(info): 6}


def test_pairs_are_enough_for_a_test_without_training(msrvtt: tuple[Path, Path], tmp_path: Path) -> None:
    pairs = pairs_file(tmp_path / "MSRVTT_JSFUSION_test.csv", "video6", "video4", "video99")
    reading = read_msrvtt(msrvtt[0], annotations=[pairs])
    assert of_splits(reading) == {"test": ["video6", "video4"]}
    assert (reading.captions.num_rows, reasons(reading)) == (2, {"missing_file": 1})
    assert reading.captions["label_category"].to_pylist() == [None, None]


def test_csvs_without_what_they_need_say_what_to_add(msrvtt: tuple[Path, Path], tmp_path: Path) -> None:
    videos, info = msrvtt
    pairs = pairs_file(tmp_path / "MSRVTT_JSFUSION_test.csv", "video6")
    train = list_file(tmp_path / "MSRVTT_train.9k.csv", "video0")
    with pytest.raises(UserError, match="no CSV file lists videos") as caught:
        read_msrvtt(videos, annotations=[info, pairs])
    assert "MSRVTT_train.9k.csv" in (caught.value.hint or "")
    with pytest.raises(UserError, match=r"train.9k.csv lists videos without captions"):
        read_msrvtt(videos, annotations=[train, pairs])


@pytest.mark.parametrize("make", [pairs_file, list_file])
def test_a_csv_whose_name_has_no_split_is_refused(msrvtt: tuple[Path, Path], tmp_path: Path, make: Any) -> None:
    videos, info = msrvtt
    with pytest.raises(UserError, match=r"list\.csv does not contain the split") as caught:
        read_msrvtt(videos, annotations=[info, make(tmp_path / "list.csv", "video6")])
    assert "rename the file" in str(caught.value.hint)


def test_a_listed_video_that_is_tested_or_has_no_captions_is_rejected(
    msrvtt: tuple[Path, Path], tmp_path: Path
) -> None:
    videos, info = msrvtt
    pairs = pairs_file(tmp_path / "MSRVTT_JSFUSION_test.csv", "video6")
    train = list_file(tmp_path / "MSRVTT_train.9k.csv", "video0", "video6", "video0", "video77")
    reading = read_msrvtt(videos, annotations=[info, train, pairs])
    assert of_splits(reading) == {"test": ["video6"], "train": ["video0"]}
    assert [row[3] for row in rows(reading)] == ["the pair of video6", "video0 0", "video0 1"]
    assert reasons(reading) == {"bad_split": 1, "empty_caption": 1}
    assert reading.rejected["row"].to_pylist() == [1, 3]


def test_damaged_entries_of_msrvtt_are_rejected_rows(make_videos: VideoMaker, tmp_path: Path) -> None:
    path = info_file(tmp_path / "data.json", {"video0": "train", "video1": "holdout", "video2": "test"})
    content = json.loads(path.read_text())
    content["videos"][2]["category"] = "music"
    content["videos"] += [{"id": 3}, "video4", {"video_id": "video5", "split": "validate"}]
    content["sentences"] += [
        *(None, {"caption": "no video"}, {"video_id": 5, "caption": "a number"}),
        {"video_id": "video6", "caption": "not among the videos"},
        *({"video_id": "video5"}, {"video_id": "video5", "caption": " "}),
        {"video_id": "video5", "caption": "\ud800"},
        {"video_id": "video5", "caption": "good", "extra": [1]},
    ]
    reading = read_msrvtt(make_videos(*(f"video{n}.mp4" for n in range(7))), annotations=[write_json(path, content)])
    assert [row[3] for row in rows(reading)] == ["video0 0", "video0 1", "good"]
    assert rows(reading)[-1][5] is None
    assert reasons(reading) == {"malformed_row": 8, "bad_split": 1, "bad_label": 1, "empty_caption": 1}
    assert "caption is missing" in reading.rejected["detail"].to_pylist()
    # Two captions for each of two videos, and one for a video that the file does not describe.
    assert reading.num_captions_lost == 5


@pytest.mark.parametrize(
    "content", [{}, {"videos": [], "sentences": {}}, {"annotations": [{"image_id": "video0", "caption": "x"}]}]
)
def test_another_form_of_msrvtt_is_refused_by_name(make_videos: VideoMaker, tmp_path: Path, content: Any) -> None:
    path = write_json(tmp_path / "MSR_VTT.json", content)
    with pytest.raises(UserError, match=r"MSR_VTT\.json does not have the lists videos and sentences"):
        read_msrvtt(make_videos("video0.mp4"), annotations=[path])


def test_rows_of_csvs_are_rejected_and_other_csvs_refused(make_videos: VideoMaker, tmp_path: Path) -> None:
    pairs, videos = tmp_path / "MSRVTT_JSFUSION_test.csv", make_videos("video1.mp4", "caf\u00e9.mp4")
    pairs.write_text(
        'key,vid_key,video_id,sentence\nret0,msr1,video1,"a man, a dog"\nret1,msr2,video1,a man, a dog\n'
        "ret2,msr3,,no video\n"
        "ret3,msr4,cafe\u0301,\u4e00\u4e2a\u4eba\n",
        encoding="utf-8-sig",
    )
    reading = read_msrvtt(videos, annotations=[pairs])
    assert [row[3] for row in rows(reading)] == ["a man, a dog", "\u4e00\u4e2a\u4eba"]
    assert reasons(reading) == {"malformed_row": 1, "empty_id": 1}
    pairs.write_text("key;vid_key;video_id;sentence\nret0;msr1;video1;x\n")
    with pytest.raises(UserError, match="has no column video_id"):
        read_msrvtt(videos, annotations=[pairs])
    pairs.write_bytes("video_id,sentence\nvideo1,caf\u00e9\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"MSRVTT_JSFUSION_test\.csv, after line 1: not UTF-8|not UTF-8"):
        read_msrvtt(videos, annotations=[pairs])
