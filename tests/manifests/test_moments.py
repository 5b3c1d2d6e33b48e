"""Tests of DiDeMo and ActivityNet Captions, on rows in their published forms."""

from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.adapters.clips import read_msrvtt
from clipmill.manifests.adapters.timed_captions import moment_of, read_activitynet, read_didemo
from clipmill.manifests.errors import UserError
from clipmill.manifests.store import read_captions
from clipmill.manifests.write import write_manifest
from tests.manifests.conftest import VideoMaker, of_splits, write_json
from tests.manifests.test_labelled_adapters import reasons, rows


def didemo_entry(video: str, text: str, *times: list[int], num_segments: int = 6) -> dict[str, Any]:
    link = f"https://x/video_download.gne?id={len(text)}"
    return {
        **{"num_segments": num_segments, "description": text, "dl_link": link},
        **{"times": list(times), "video": video, "annotation_id": len(text)},
    }


@pytest.mark.parametrize(
    ("times", "interval"),
    [
        ([[2, 2]], (10.0, 15.0)),
        ([[1, 1], [1, 4], [1, 4], [2, 4]], (5.0, 25.0)),
        ([[0, 0], [4, 4], [4, 4], [0, 0]], (0.0, 5.0)),
        ([[4, 4], [0, 0], [4, 4], [0, 0]], (20.0, 25.0)),
        ([[5, 5], [0, 5], [0, 5]], (0.0, 30.0)),
    ],
)
def test_a_moment_is_what_most_annotators_marked(times: list[list[int]], interval: tuple[float, float]) -> None:
    assert moment_of(times) == interval


@pytest.mark.parametrize(
    ("times", "num_segments"),
    [
        (None, 6),
        ([], 6),
        ([[1]], 6),
        ([[1, 2], None], 6),
        ([[2, 1]], 6),
        ([[-1, 1]], 6),
        ([[5, 5]], 5),  # beyond the end of the video
        ([[True, 1]], 6),
        ([[0.0, 1]], 6),
        ([[0, 1]], 7),
        ([[0, 1]], "6"),
    ],
)
def test_moments_that_are_none_are_refused(times: object, num_segments: object) -> None:
    with pytest.raises(ValueError, match=r"times are|num_segments is"):
        moment_of(times, num_segments=num_segments)


def test_didemo_finds_the_files_of_its_download_scripts(make_videos: VideoMaker, tmp_path: Path) -> None:
    entries = [
        didemo_entry("12@N01_1_a.mov", "as it was uploaded", [0, 0]),
        didemo_entry("12@N01_2_b.m4v", "with another extension", [1, 1]),
        didemo_entry("12@N01_3_c.avi", "with an extension added", [2, 3]),
        didemo_entry("12@N01_4_d.", "without extension", [3, 3]),
        didemo_entry("12@N01_5_e.3gp", "of a telephone", [4, 4], num_segments=5),
        didemo_entry("12@N01_6_f.mts", "gone", [4, 4]),
    ]
    files = ("1_a.mov", "2_b.mp4", "3_c.avi.mp4", "4_d..mp4", "5_e.3gp")
    path = write_json(tmp_path / "test_data.json", entries)
    reading = read_didemo(make_videos(*(f"12@N01_{name}" for name in files)), annotations=[path])
    assert [row[1:4] for row in rows(reading)] == [
        (0.0, 5.0, "as it was uploaded"),
        (5.0, 10.0, "with another extension"),
        (10.0, 20.0, "with an extension added"),
        (15.0, 20.0, "without extension"),
        (20.0, 25.0, "of a telephone"),
    ]
    assert of_splits(reading) == {"test": [f"12@N01_{name}" for name in ("1_a", "2_b", "3_c", "4_d", "5_e")]}
    assert reasons(reading) == {"missing_file": 1}


def test_two_names_of_a_video_are_one_video_of_didemo(make_videos: VideoMaker, tmp_path: Path) -> None:
    entries = [
        didemo_entry("1_a.mov", "first", [0, 0]),
        didemo_entry("1_b.mov", "another video", [1, 1]),
        didemo_entry("1_a.mp4", "second", [1, 1]),
    ]
    path, listed = write_json(tmp_path / "val_data.json", entries), tmp_path / "val_list.txt"
    videos = make_videos("1_a.mov.mp4", "1_a.mp4.mp4", "1_b.mov")
    reading = read_didemo(videos, annotations=[path])
    assert of_splits(reading) == {"val": ["1_a", "1_b"]}
    assert [row[3] for row in rows(reading)] == ["first", "another video", "second"]
    # The lists of retrieval code contain one of the two names.
    listed.write_text("1_a.mov\r\n\n1_b.mov\n1_c.mov\n")
    reading = read_didemo(videos, annotations=[path, listed])
    assert [row[3] for row in rows(reading)] == ["first", "another video"]
    assert reading.num_rows_used == {str(path): 2, str(listed): 2}
    # A list restricts only its own split.
    train = write_json(tmp_path / "train_data.json", [didemo_entry("1_c.mov", "third", [0, 0])])
    reading = read_didemo(make_videos("1_c.mov"), annotations=[listed, path, train])
    assert of_splits(reading) == {"val": ["1_a", "1_b"], "train": ["1_c"]}


def test_damaged_entries_of_didemo_are_rejected_rows(make_videos: VideoMaker, tmp_path: Path) -> None:
    good = didemo_entry("1_a.mov", "good", [0, 0])
    without = [{key: value for key, value in good.items() if key != name} for name in good]
    entries = [good, *without, None, "1_a.mov", didemo_entry("1_a.mov", "late", [6, 6]), {**good, "description": 7}]
    path = write_json(tmp_path / "train_data.json", entries)
    reading = read_didemo(make_videos("1_a.mov"), annotations=[path])
    # An entry without num_segments, dl_link or annotation_id is valid.
    assert [row[3] for row in rows(reading)] == ["good"] * 4
    assert reasons(reading) == {"malformed_row": 5, "bad_time": 2}


def activitynet_entry(duration: float, *sentences: tuple[float, float, str]) -> dict[str, Any]:
    return {
        "duration": duration,
        "timestamps": [[begin, end] for begin, end, _ in sentences],
        "sentences": [text for _, _, text in sentences],
    }


def test_activitynet_keeps_sentences_times_and_order(make_videos: VideoMaker, tmp_path: Path) -> None:
    videos = make_videos("v_one.mp4", "two.mkv")
    train = {"v_one": activitynet_entry(82.73, (40.5, 82.8, " Later."), (0.83, 19.86, "First."), (0, 82.73, "All."))}
    first = {
        "v_two": activitynet_entry(10.0, (0, 4, "A."), (4, 9.5, "B.")),
        "v_gone": activitynet_entry(5, (0, 5, "x")),
    }
    second = {"v_two": activitynet_entry(10.0, (1, 2, "C."))}
    paths = [
        write_json(tmp_path / name, content)
        for name, content in {"train.json": train, "val_1.json": first, "val_2.json": second}.items()
    ]
    reading = read_activitynet(videos, annotations=paths)
    assert rows(reading) == [
        ("v_one", 40.5, 82.8, "Later.", "human"),  # ends a few hundredths of a second after the video
        ("v_one", 0.83, 19.86, "First.", "human"),
        ("v_one", 0.0, 82.73, "All.", "human"),
        ("v_two", 0.0, 4.0, "A.", "human"),
        ("v_two", 4.0, 9.5, "B.", "human"),
        ("v_two", 1.0, 2.0, "C.", "human-2"),
    ]
    assert of_splits(reading) == {"train": ["v_one"], "val": ["v_two"]}
    assert reasons(reading) == {"missing_file": 1}


def test_a_paragraph_can_be_put_together_from_the_manifest(make_videos: VideoMaker, tmp_path: Path) -> None:
    paragraphs = {f"v_{name}": [f"{name} {n}." for n in (3, 1, 2)] for name in "cab"}
    content = {
        name: activitynet_entry(30.0, *((20.0 - n, 30.0, text) for n, text in enumerate(sentences)))
        for name, sentences in paragraphs.items()
    }
    path, data = write_json(tmp_path / "val_1.json", content), tmp_path / "data"
    # The video v_a is added later than the others.
    for names in (("v_b.mp4", "v_c.mp4"), ("v_a.mp4",)):
        reading = read_activitynet(make_videos(*names), annotations=[path])
        write_manifest(data, "activitynet", reading.videos, reading.captions, reading.rejected, num_captions_lost=0)
    captions = read_captions(data).sort_by("caption_id").to_pylist()
    joined = {name: [row["text"] for row in captions if row["video_id"] == name] for name in paragraphs}
    assert joined == paragraphs


def test_damaged_entries_of_activitynet_are_rejected_rows(make_videos: VideoMaker, tmp_path: Path) -> None:
    good = activitynet_entry(10.0, (0, 5, "good"))
    content = {
        "v_a": good,
        "v_b": activitynet_entry(
            10.0, (10, 11, "after the end"), (5, 4, "reversed"), (-1, 4, "early"), (0, 4, " "), (1, 2, "kept")
        ),
        "v_c": {**good, "sentences": ["one", "two"]},
        "v_d": {"duration": 10.0, "sentences": ["one"]},
        "v_e": {**good, "duration": "long"},
        "v_f": {**good, "timestamps": [[1]]},
        "v_g": {**good, "timestamps": [["x", None]]},
        "v_h": {"timestamps": [[0, 5]], "sentences": ["no duration"]},
        "v_i": None,
        "": good,
    }
    path = write_json(tmp_path / "train.json", content)
    reading = read_activitynet(make_videos(*(f"v_{letter}.mp4" for letter in "abcdefghi")), annotations=[path])
    assert [row[3] for row in rows(reading)] == ["good", "kept", "no duration"]
    assert reasons(reading) == {"bad_time": 6, "empty_caption": 1, "malformed_row": 3, "empty_id": 1}


@pytest.mark.parametrize("reader", [read_msrvtt, read_didemo, read_activitynet])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'\xff\xfe{"a": 1}', "not UTF-8"),
        ("[]".encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "nested too deeply|expected an object"),
        (b'{"v_a": {"duration": 1, "sent', "line 1: Unterminated|expected a list"),
        (b'["' + b"x" * 9_000_000, "line 1: Unterminated|expected an object"),
        (b"", "expected"),
    ],
    ids=["not UTF-8", "UTF-16", "deep", "truncated", "a huge line without an end", "empty"],
)
def test_files_that_are_not_json_are_refused_by_name(
    make_videos: VideoMaker, tmp_path: Path, reader: Any, content: bytes, message: str
) -> None:
    path = tmp_path / "train_data.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        reader(make_videos("v_a.mp4"), annotations=[path])
    assert str(path) in str(caught.value)


def test_entries_longer_than_the_part_of_a_file_that_is_read_at_once(make_videos: VideoMaker, tmp_path: Path) -> None:
    long = "x" * 5_000_000
    path = write_json(
        tmp_path / "train_data.json", [didemo_entry("a.mp4", text, [0, 0]) for text in ("one", long, "two")]
    )
    assert read_didemo(make_videos("a.mp4"), annotations=[path]).captions["text"].to_pylist() == ["one", long, "two"]
