"""Tests of LeRobot datasets: episodes, cameras, tasks, splits and labels; unusable episodes and metadata.

`tests/lerobot_folder.py` creates them; `test_lerobot_reader.py` compares them with LeRobot itself.
"""

import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pyarrow.parquet as pq
import pytest

from clipmill.manifests.adapters.lerobot import read_lerobot
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.errors import UserError
from clipmill.prep.synthetic import read_frame_number
from tests.lerobot_folder import (
    CAMERAS,
    EPISODES,
    edit_episodes,
    edit_info,
    frame_number,
    read_info,
    write_lerobot,
    write_table,
)
from tests.manifests.test_labelled_adapters import reasons
from tests.prep.running import prep_here

FILE = "meta/episodes/chunk-000/file-000.parquet"
FRAMES = "data/chunk-000/file-000.parquet"


@pytest.fixture(scope="module")
def made_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lerobot(tmp_path_factory.mktemp("lerobot") / "v3")


@pytest.fixture
def folder(made_dataset: Path, tmp_path: Path) -> Path:
    """Return a copy of the dataset that a test may change."""
    return Path(shutil.copytree(made_dataset, tmp_path / "v3"))


def captions(reading: Reading, view: str = "top") -> list[tuple[Any, ...]]:
    """Return the episode, text and split of the captions of a camera."""
    split_of = dict(zip(*(reading.videos[name].to_pylist() for name in ("video_id", "split")), strict=True))
    rows = (row for row in reading.captions.to_pylist() if row["view"] == view)
    return [(int(row["group"][-6:]), row["text"], row.get("split") or split_of[row["video_id"]]) for row in rows]


def shown_numbers(path: str) -> list[tuple[Fraction, int]]:
    """Return the time in microseconds and the number of each frame of a file, read with PyAV."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        assert stream.time_base is not None
        return [
            (1_000_000 * (frame.pts or 0) * stream.time_base, read_frame_number(frame.to_ndarray(format="rgb24")))
            for frame in container.decode(stream)
        ]


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_each_caption_spans_exactly_the_frames_of_its_episode_and_task(
    version: str, made_dataset: Path, tmp_path: Path
) -> None:
    root = made_dataset if version == "v3.0" else write_lerobot(tmp_path / "v2", version=version)
    reading = read_lerobot(root)
    paths = dict(zip(*(reading.videos[name].to_pylist() for name in ("video_id", "path")), strict=True))
    shown: dict[int, set[int]] = {0: set(), 1: set()}
    for row in reading.captions.to_pylist():
        camera, episode = ("top", "wrist").index(row["view"]), int(row["group"].removeprefix("episode_"))
        begin_us, end_us = (round(row[name] * 1e6) for name in ("begin_s", "end_s"))
        numbers = [number for time_us, number in shown_numbers(paths[row["video_id"]]) if begin_us <= time_us < end_us]
        frames = [frame for frame, task in enumerate(EPISODES[episode].tasks) if task == row["text"]]
        assert numbers == [frame_number(camera, episode, frame) for frame in frames]
        labels = {name.removeprefix("label_"): value for name, value in row.items() if name.startswith("label_")}
        columns = EPISODES[episode].columns
        assert labels == {
            "success": str(columns["success"]).lower(),
            "operator": columns["operator"],
            "reward": f"{columns['reward']:g}",
        }
        shown[camera].update(numbers)
    for camera, all_numbers in shown.items():
        lengths = enumerate(len(episode.tasks) for episode in EPISODES)
        assert all_numbers == {
            frame_number(camera, episode, frame) for episode, length in lengths for frame in range(length)
        }
    assert (
        captions(reading, "wrist")
        == captions(reading, "top")
        == [
            (0, "pick up the cube", "train"),
            (1, "open the drawer", "train"),
            (2, "open the drawer", "train"),
            (2, "close the drawer", "train"),
            (3, "pick up the cube", "val"),
        ]
    )
    assert not reading.notes
    assert not reading.rejected.num_rows
    names = [f"chunk-000_file-{file:03d}" for file in range(2)]
    names = names if version == "v3.0" else [f"episode_{index:06d}" for index in range(4)]
    assert reading.videos["video_id"].to_pylist() == [f"{view}_{name}" for view in ("top", "wrist") for name in names]


def test_success_comes_from_the_frames_if_the_episodes_have_no_such_column(folder: Path) -> None:
    edit_episodes(folder, lambda rows: [row.pop("success") for row in rows])
    labels = read_lerobot(folder).captions["label_success"].to_pylist()
    assert labels[:5] == ["true", "false", "true", "true", "false"]


def test_splits_are_ranges_of_episodes_and_held_out_ones_come_first(folder: Path) -> None:
    edit_info(folder, splits={"train": "0:4", "validation": "1:2", "test": ":1"})
    splits = ["test", "val", "train", "train", "train"]
    assert [split for _, _, split in captions(read_lerobot(folder))] == splits
    edit_info(folder, splits={"train": "0:2"})
    reading = read_lerobot(folder)
    assert {split for _, _, split in captions(reading)} == {"train"}
    assert reading.notes == (
        "2 episodes, such as episode_000002, outside of all splits in meta/info.json: the split is train",
    )


def test_datasets_in_one_data_folder_have_names_of_their_own(made_dataset: Path) -> None:
    first, second = read_lerobot(made_dataset), read_lerobot(made_dataset, dataset="drawers")
    for name in ("video_id", "group"):
        table = lambda reading: reading.videos if name == "video_id" else reading.captions  # noqa: B023, E731
        values = [set(table(reading)[name].to_pylist()) for reading in (first, second)]
        assert values[1] == {f"drawers_{value}" for value in values[0]}


def test_episodes_without_a_task_keep_their_split_under_their_name(folder: Path) -> None:
    edit_episodes(folder, lambda rows: [row.update(tasks=[""]) for row in rows])
    reading = read_lerobot(folder)
    names = [(0, "train"), (1, "train"), (2, "train"), (3, "val")]
    assert captions(reading) == [(index, f"episode_{index:06d}", split) for index, split in names]
    assert set(reading.captions["source"].to_pylist()) == {"episode"}
    assert "4 episodes, such as episode_000000, without a task" in reading.notes[0]


def test_frames_without_times_are_named_and_tell_no_order_of_tasks(folder: Path) -> None:
    write_table(folder / FRAMES, pq.read_table(folder / FRAMES).drop_columns("timestamp"))
    reading = read_lerobot(folder)
    assert captions(reading)[2] == (2, "episode_000002", "train")
    of_tasks, of_frames = reading.notes
    assert "1 episode with several tasks, such as episode_000002" in of_tasks
    assert of_frames == f"{FRAMES} has no column timestamp: frames cannot be joined with states and actions by time"
    shutil.rmtree(folder / "data")
    assert f"there is no {FRAMES}" in read_lerobot(folder).notes[0]


def swap(rows: list[dict[str, Any]]) -> None:
    rows[1]["episode_index"] = 0


def overlap(rows: list[dict[str, Any]]) -> None:
    rows[1][f"videos/{CAMERAS[0]}/from_timestamp"] -= 0.3


def turn(rows: list[dict[str, Any]]) -> None:
    rows[1][f"videos/{CAMERAS[0]}/to_timestamp"] = 0.0


def lose(rows: list[dict[str, Any]]) -> None:
    rows[1][f"videos/{CAMERAS[0]}/file_index"] = None


def go_missing(rows: list[dict[str, Any]]) -> None:
    rows[3][f"videos/{CAMERAS[0]}/file_index"] = 7


@pytest.mark.parametrize(
    ("edit", "reason", "detail"),
    [
        (swap, {"duplicate_id": 1}, "an earlier row is also episode_000000"),
        (
            overlap,
            {"bad_time": 1},
            f"episode_000001 overlaps episode_000000 in videos/{CAMERAS[0]}/chunk-000/file-000.mp4",
        ),
        (turn, {"bad_time": 1}, "end_s is 0.0, expected a time after begin_s, 1.2"),
        (lose, {"malformed_row": 1}, f"episode_000001 has no file or no times for the camera {CAMERAS[0]}"),
        (
            go_missing,
            {"missing_file": 1},
            f"no such file: videos/{CAMERAS[0]}/chunk-000/file-007.mp4; captions lost: 1",
        ),
    ],
)
def test_unusable_episodes_are_rejected_by_name(
    edit: Callable[[list[dict[str, Any]]], None], reason: dict[str, int], detail: str, folder: Path
) -> None:
    edit_episodes(folder, edit)
    reading = read_lerobot(folder)
    assert reasons(reading) == reason
    assert reading.rejected["detail"].to_pylist() == [detail]
    assert len(captions(reading, "wrist")) == (4 if edit is swap else 5)


def test_of_overlapping_episodes_the_held_out_one_stays(folder: Path) -> None:
    edit_info(folder, splits={"train": "0:4", "val": "1:2"})
    edit_episodes(folder, overlap)
    reading = read_lerobot(folder)
    assert [index for index, _, _ in captions(reading)] == [1, 2, 2, 3]
    assert reading.rejected["detail"].to_pylist()[0].startswith("episode_000000 overlaps episode_000001")


def test_cameras_of_other_length_or_rate_are_noted(folder: Path) -> None:
    edit_episodes(folder, lambda rows: rows[2].update({f"videos/{CAMERAS[1]}/to_timestamp": 4.0}))
    features = read_info(folder)["features"]
    features[CAMERAS[1]]["info"]["video.fps"] = 15
    features["observation.depth"] = {"dtype": "video", "info": {"is_depth_map": True}}
    features["observation.image"] = {"dtype": "image"}
    edit_info(folder, features=features)
    assert read_lerobot(folder).notes == (
        f"{CAMERAS[1]} has 15 frames per second, but the dataset has 10",
        "the frames of observation.depth are depth maps, which are not read",
        "the frames of observation.image are images in Parquet files, which are not read",
        "1 episode, such as episode_000002, whose cameras have recordings of different lengths",
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"codebase_version": "v1.6"}, "codebase_version is 'v1.6', expected v3.0, v2.1 or v2.0"),
        ({"fps": 0}, "fps is 0, expected a number above 0"),
        ({"splits": {"train": "0.8"}}, "splits contains 'train': '0.8', expected train, val or test"),
        ({"splits": {"all": "0:4"}}, "splits contains 'all': '0:4', expected train, val or test"),
        ({"video_path": "../{video_key}.mp4"}, "expected a template for paths in the dataset"),
        ({"video_path": "{video_key.__class__}.mp4"}, "expected a template for paths in the dataset"),
        ({"features": {"observation.image": {"dtype": "image"}}}, "contains no camera videos; the frames of"),
        ({"features": []}, "features is [], expected an object of objects"),
    ],
)
def test_unusable_info_is_refused(values: dict[str, Any], message: str, folder: Path) -> None:
    edit_info(folder, **values)
    with pytest.raises(UserError) as error:
        read_lerobot(folder)
    assert message in str(error.value)


def test_metadata_that_cannot_be_read_are_refused(folder: Path) -> None:
    def refusal(place: Path | str = folder) -> str:
        with pytest.raises(UserError) as error:
            read_lerobot(place)
        return f"{error.value}: {error.value.hint}"

    edit_episodes(folder, lambda rows: [row.pop(f"videos/{CAMERAS[0]}/from_timestamp") for row in rows])
    assert f"{FILE} has no column videos/{CAMERAS[0]}/from_timestamp" in refusal()
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:-8])
    assert "cannot be read as Parquet" in refusal()
    assert "LeRobotDataset.finalize()" in refusal()
    (folder / "meta/info.json").write_text('{"fps": 10')
    assert "is not JSON" in refusal()
    (folder / "meta/info.json").unlink()
    assert "is not a LeRobot dataset: it has no meta/info.json" in refusal()
    assert "LeRobot datasets in buckets are not read: copy the dataset to a local folder" in refusal(
        "s3://bucket/lerobot"
    )


def test_lines_that_are_not_episodes_are_rejected(tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "v2", version="v2.1", episodes=EPISODES[:2])
    path = root / "meta/episodes.jsonl"
    path.write_text(path.read_text() + '{"episode_index": -1}\n[]\n{"episode_index": 2, "tasks": 3}\n')
    reading = read_lerobot(root)
    assert reasons(reading) == {"malformed_row": 3}
    assert len(captions(reading)) == 2


def test_command_writes_the_manifest_and_refuses_other_folders(made_dataset: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert (
        "4 videos (4 new), 10 captions (10 new)"
        in prep_here("manifest", "lerobot", made_dataset, "--data", data).stdout
    )
    refused = prep_here("manifest", "lerobot", made_dataset.parent, "--data", data, status=2)
    assert "is not a LeRobot dataset: it has no meta/info.json" in refused.stderr
