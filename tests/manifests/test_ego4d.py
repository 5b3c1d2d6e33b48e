"""Tests of Ego4D: the interval rule, omitted narrations, and pickles that must not execute code."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.adapters.ego4d import read_ego4d
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.errors import UserError
from tests.manifests.conftest import VideoMaker


def narrations(*times_s: Any, text: str = "#C C does {}") -> dict[str, Any]:
    rows = [
        {"narration_text": text.format(n), "timestamp_sec": time_s, "timestamp_frame": 3}
        for n, time_s in enumerate(times_s)
    ]
    return {"narrations": rows, "summaries": []}


def save(path: Path, videos: dict[str, Any], *, older_form: bool = False) -> Path:
    path.write_text(json.dumps(videos if older_form else {"version": "v2", "date": {"day": 1}, "videos": videos}))
    return path


def intervals(reading: Reading) -> list[tuple[str, float, float]]:
    return [(row["video_id"], row["begin_s"], row["end_s"]) for row in reading.captions.to_pylist()]


def reasons(reading: Reading) -> dict[str, int]:
    return {entry["values"]: entry["counts"] for entry in reading.rejected["reason"].value_counts().to_pylist()}


@pytest.mark.parametrize("older_form", [False, True])
def test_points_become_intervals_by_the_rule_of_egovlp(
    make_videos: VideoMaker, tmp_path: Path, older_form: bool
) -> None:
    videos = {
        "a": {"narration_pass_1": narrations(1.0, 3.0, 9.0), "status": "complete"},  # beta 4
        "b": {"narration_pass_1": narrations(0.5, 2.5), "status": "complete"},  # beta 2
    }
    path = save(tmp_path / "narration.json", videos, older_form=older_form)
    reading = read_ego4d(make_videos("a.mp4", "x/b.mp4"), annotations=[path])
    # alpha is 3, so the half lengths are 4 / 6 and 2 / 6; a start before 0 becomes 0.
    long, short = 4 / 6, 2 / 6
    assert intervals(reading) == [
        ("a", 1 - long, 1 + long),
        ("a", 3 - long, 3 + long),
        ("a", 9 - long, 9 + long),
        ("b", pytest.approx(0.5 - short), 0.5 + short),
        ("b", 2.5 - short, 2.5 + short),
    ]
    assert reading.videos["split"].to_pylist() == ["train", "train"]
    assert reading.captions["text"].to_pylist()[0] == "#C C does 0"


def test_gaps_are_those_within_a_pass_and_passes_are_sources(make_videos: VideoMaker, tmp_path: Path) -> None:
    videos = {"a": {"narration_pass_1": narrations(0.0, 4.0), "narration_pass_2": narrations(9.0, 1.0)}}
    reading = read_ego4d(make_videos("a.mp4"), annotations=[save(tmp_path / "n.json", videos)])
    assert intervals(reading) == [("a", 0.0, 0.5), ("a", 3.5, 4.5), ("a", 8.5, 9.5), ("a", 0.5, 1.5)]
    assert reading.captions["source"].to_pylist() == ["narration_pass_1"] * 2 + ["narration_pass_2"] * 2


def test_a_video_without_a_file_counts_for_alpha_and_is_listed_once(make_videos: VideoMaker, tmp_path: Path) -> None:
    videos = {"a": {"narration_pass_1": narrations(1.0, 3.0)}, "gone": {"narration_pass_1": narrations(1.0, 7.0)}}
    path = save(tmp_path / "n.json", videos)
    few = read_ego4d(make_videos("a.mp4", folder="few"), annotations=[path])
    assert reasons(few) == {"missing_file": 1}
    assert few.num_captions_lost == 2
    full = read_ego4d(make_videos("a.mp4", "gone.mp4", folder="all"), annotations=[path])
    assert intervals(few) == intervals(full)[:2]


def test_narrations_that_cannot_be_used_are_listed(make_videos: VideoMaker, tmp_path: Path) -> None:
    good = narrations(1.0, 3.0, 5.0)
    bad = [
        {"narration_text": "#unsure", "timestamp_sec": 2.0},
        {"narration_text": "#C C lifts #Unsure", "timestamp_sec": 2.0},
        {"narration_text": " ", "timestamp_sec": 2.0},
        {"narration_text": None, "timestamp_sec": 2.0},
        {"narration_text": "x", "timestamp_sec": float("nan")},
        {"narration_text": "x", "timestamp_sec": -1},
        {"narration_text": "x", "timestamp_sec": "3"},
        {"narration_text": "x"},
        "x",
    ]
    good["narrations"] += bad
    videos = {
        "a": {"narration_pass_1": good},
        "one": {"narration_pass_1": narrations(4.0)},
        "none": {"status": "redacted"},
    }
    reading = read_ego4d(make_videos("a.mp4", "one.mp4", "none.mp4"), annotations=[save(tmp_path / "n.json", videos)])
    assert reading.captions.num_rows == 3
    assert reasons(reading) == {
        "unsure": 2,
        "empty_caption": 1,
        "malformed_row": 2,
        "bad_time": 4,
        "no_interval": 1,
        "redacted": 1,
    }


def test_a_video_that_comes_twice_in_the_file_is_taken_once(make_videos: VideoMaker, tmp_path: Path) -> None:
    entry = json.dumps({"narration_pass_1": narrations(1.0, 3.0)})
    path = tmp_path / "n.json"
    path.write_text(f'{{"videos": {{"a": {entry}, "a": {entry}}}}}')
    reading = read_ego4d(make_videos("a.mp4"), annotations=[path])
    assert reading.captions.num_rows == 2
    assert reasons(reading) == {"duplicate_id": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no narrations"),
        ("[]", "line 1"),
        ('{"videos": {"a": {"status": "x"}\n,}}', "line 2"),
        ("", "is truncated"),
    ],
)
def test_a_file_that_is_not_of_the_form_is_a_users_error(
    make_videos: VideoMaker, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "n.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_ego4d(make_videos("a.mp4"), annotations=[path])


def test_a_pickled_list_is_read_with_its_own_intervals(make_videos: VideoMaker, tmp_path: Path) -> None:
    rows = [
        ("a", 1.5, 2.5, "#C C walks"),
        ("b", 0, 3, ["one", "two"]),
        ("gone", 0.0, 1.0, ["lost", "lost"]),
        ("a", 2.0, 1.0, "backwards"),
        ("a", None, 1.0, "no time"),
        ("a", 1.0, 2.0),
        (7, 1.0, 2.0, "number"),
    ]
    path = tmp_path / "ego4d_val.pkl"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(rows, protocol=protocol))
        reading = read_ego4d(make_videos("a.mp4", "b.mp4"), annotations=[path])
        assert [tuple(row.values()) for row in reading.captions.to_pylist()] == [
            ("a", 1.5, 2.5, "#C C walks", "ego4d_val"),
            ("b", 0.0, 3.0, "one", "ego4d_val"),
            ("b", 0.0, 3.0, "two", "ego4d_val"),
        ]
        assert reading.videos["split"].to_pylist() == ["val", "val"]
        assert reasons(reading) == {"missing_file": 1, "bad_time": 2, "malformed_row": 1, "empty_id": 1}
        assert reading.num_captions_lost == 2


def test_a_list_of_the_narrator_has_scores_behind(make_videos: VideoMaker, tmp_path: Path) -> None:
    rows = [("a", 1.5, 2.5, ["#C C walks", "#C C runs"], [0.5, 1.25]), ("a", 3.0, 4.0, ["#C C sits"], [2.0])]
    path = tmp_path / "ego4d_train.narrator_1.return_2.pkl"
    path.write_bytes(pickle.dumps(rows))
    reading = read_ego4d(make_videos("a.mp4"), annotations=[path])
    assert reading.captions["text"].to_pylist() == ["#C C walks", "#C C runs", "#C C sits"]
    assert set(reading.captions["source"].to_pylist()) == {"ego4d_train.narrator_1.return_2"}
    assert reasons(reading) == {}


class _Bomb:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_would_run_code_does_not(make_videos: VideoMaker, tmp_path: Path, protocol: int) -> None:
    bomb = tmp_path / "exploded"
    path = tmp_path / "evil.pkl"
    path.write_bytes(pickle.dumps([("a", 0.0, 1.0, _Bomb(bomb))], protocol=protocol))
    with pytest.raises(UserError, match="is rejected, because it references") as caught:
        read_ego4d(make_videos("a.mp4"), annotations=[path])
    assert not bomb.exists()
    assert any(name in str(caught.value) for name in ("pathlib.", "getattr"))


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cposix\nsystem\n(S'true'\ntR.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        b"(i__builtin__\neval\n.",
        b"\x80\x02Porg\n.",
        b"Psomething\n.",
        b"not a pickle",
        b"",
        pickle.dumps([("a", 0.0, 1.0, "x")] * 100)[:-40],
    ],
)
def test_forged_and_broken_pickles_are_users_errors(make_videos: VideoMaker, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "evil.pkl"
    path.write_bytes(content)
    with pytest.raises(UserError):
        read_ego4d(make_videos("a.mp4"), annotations=[path])


def listing_of(*narrations: tuple[float, str, str]) -> dict[str, Any]:
    """Return a video in the form of all_narrations_redacted.json, version 2: times, texts and passes."""
    rows = [
        {"text": text, "time": time_s, "_annotation_uid": uid, "is_summary": False, "_clip_time_start": 0}
        for time_s, text, uid in narrations
    ]
    return {"narrations": rows, "summaries": [{"text": "#summary C cooks", "start_time": 0, "end_time": 300}]}


def test_the_narrations_of_version_2_are_those_of_narration_json(make_videos: VideoMaker, tmp_path: Path) -> None:
    folder = make_videos("a.mp4", "b.mp4")
    first, second = [(1.0, "#C C one", "u"), (3.0, "#C C two", "u")], [(9.0, "#C C three", "v"), (2.0, "#Unsure", "v")]
    new = {"a": listing_of(first[0], second[0], first[1], second[1]), "b": listing_of((0.5, "x", "w"), (2.5, "y", "w"))}
    reading = read_ego4d(folder, annotations=[save(tmp_path / "all_narrations_redacted.json", new)])
    passes = {
        name: {"narrations": [{"narration_text": text, "timestamp_sec": time_s} for time_s, text, _ in rows]}
        for name, rows in (("narration_pass_1", first), ("narration_pass_2", second))
    }
    old = {"a": passes, "b": {"narration_pass_1": narrations(0.5, 2.5)}}
    expected = read_ego4d(folder, annotations=[save(tmp_path / "narration.json", old)])
    assert intervals(reading) == intervals(expected) and reasons(reading) == reasons(expected) == {"unsure": 1}
    assert reading.captions["source"].to_pylist() == expected.captions["source"].to_pylist()
    assert reading.captions["text"].to_pylist()[:3] == ["#C C one", "#C C two", "#C C three"]


def test_splits_are_those_of_ego4d_json_and_no_evaluated_video_is_trained_on(
    make_videos: VideoMaker, tmp_path: Path
) -> None:
    splits: dict[str, dict[str, str | None]] = {
        "plain": {"split_em": None, "split_fho": None},
        "train": {"split_em": "train", "split_av": None},
        "val": {"split_em": "train", "split_fho": "val"},
        "multi": {"split_fho": "multi", "split_em": "train"},
        "test": {"split_em": "val", "split_av": "test"},
    }
    metadata = {
        "version": "2.1",
        "videos": [{"video_uid": uid, "duration_sec": 9.0, **of_video} for uid, of_video in splits.items()],
        "clips": [{"clip_uid": "c", "video_uid": "plain"}],
    }
    (meta := tmp_path / "ego4d.json").write_text(json.dumps(metadata))
    folder = make_videos(*(f"{uid}.mp4" for uid in (*splits, "unknown")))
    text = save(
        tmp_path / "all.json", {uid: listing_of((1.0, "x", "u"), (3.0, "y", "u")) for uid in (*splits, "unknown")}
    )
    for annotations in ([text, meta], [meta, text]):
        reading = read_ego4d(folder, annotations=annotations)
        split_by_uid = dict(zip(*(reading.videos[name].to_pylist() for name in ("source_id", "split")), strict=True))
        expected = {uid: uid if uid in ("val", "test") else "train" for uid in split_by_uid} | {"multi": "val"}
        assert split_by_uid == expected and reading.captions.num_rows == 12
        assert reading.notes == ("ego4d.json: no split found for 1 video",)
        assert reading.num_rows_used == {str(text): 12, str(meta): 5}
    with pytest.raises(UserError, match=r"the annotation files contain splits, but no narrations: .*ego4d\.json"):
        read_ego4d(folder, annotations=[meta])
