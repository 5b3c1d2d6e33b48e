"""LeRobot datasets of the versions 3.0 and 2.1 whose frames show their numbers, in the layout that LeRobot writes.

LeRobot is not needed. `tests/manifests/test_lerobot_reader.py` reads such a dataset by LeRobot itself.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.prep.synthetic import TICKS_PER_FRAME, VideoTrack, draw_frame_number, encode_video

FPS, WIDTH, HEIGHT = 10, 64, 48
CAMERAS = ("observation.images.top", "observation.images.wrist")
PATHS = {
    "v3.0": {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    },
    "v2.1": {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    },
}


@dataclass(frozen=True)
class Episode:
    """An episode: the task of each of its frames, and further columns of its metadata."""

    tasks: Sequence[str]
    columns: Mapping[str, Any] = field(default_factory=dict)


EPISODES = (
    Episode(["pick up the cube"] * 12, {"success": True, "operator": "ann", "reward": 0.5}),
    Episode(["open the drawer"] * 15, {"success": False, "operator": "ben", "reward": 1.0}),
    Episode(["open the drawer"] * 7 + ["close the drawer"] * 9, {"success": True, "operator": "ann", "reward": 2.0}),
    Episode(["pick up the cube"] * 11, {"success": False, "operator": "ben", "reward": 0.25}),
)


def frame_number(camera: int, episode: int, frame: int) -> int:
    """Return the number that a frame shows."""
    return camera * 10_000 + episode * 1000 + frame


def write_lerobot(
    root: Path,
    *,
    version: str = "v3.0",
    episodes: Sequence[Episode] = EPISODES,
    splits: Mapping[str, str] | None = None,
    episodes_per_file: int = 3,
    track: VideoTrack | None = None,
) -> Path:
    """Write a dataset whose video files have `episodes_per_file` episodes, or one with version 2.1."""
    (root / "meta").mkdir(parents=True)
    names = list(dict.fromkeys(task for episode in episodes for task in episode.tasks))
    lengths = [len(episode.tasks) for episode in episodes]
    edit_info(
        root,
        codebase_version=version,
        fps=FPS,
        features=_features(),
        total_episodes=len(episodes),
        total_frames=sum(lengths),
        total_tasks=len(names),
        chunks_size=1000,
        robot_type="arm",
        **({"total_chunks": 1, "total_videos": len(episodes) * len(CAMERAS)} if version == "v2.1" else {}),
        splits=splits or {"train": f"0:{len(episodes) - 1}", "val": f"{len(episodes) - 1}:{len(episodes)}"},
        **PATHS[version],
    )
    rows, tables = [], []
    borders = list(pairwise(accumulate(lengths, initial=0)))
    for index, (episode, (first, behind)) in enumerate(zip(episodes, borders, strict=True)):
        tasks = list(dict.fromkeys(episode.tasks))
        rows.append({"episode_index": index, "tasks": tasks, "length": behind - first, **episode.columns})
        tables.append(_frames(index, [names.index(task) for task in episode.tasks], first=first))
    size = episodes_per_file if version == "v3.0" else 1
    for file, begin in enumerate(range(0, len(episodes), size)):
        group = range(begin, min(begin + size, len(episodes)))
        places = {"chunk_index": 0, "file_index": file, "episode_chunk": 0, "episode_index": file}
        for camera, key in enumerate(CAMERAS):
            numbers = [frame_number(camera, index, frame) for index in group for frame in range(lengths[index])]
            write_numbers(root / PATHS[version]["video_path"].format(video_key=key, **places), numbers, track=track)
            ends = accumulate((lengths[index] for index in group), initial=0)
            for index, (first, behind) in zip(group, pairwise(ends), strict=True):
                if version == "v3.0":
                    values = (0, file, first / FPS, behind / FPS)
                    fields = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
                    rows[index] |= {f"videos/{key}/{name}": value for name, value in zip(fields, values, strict=True)}
        if version == "v2.1":
            write_table(root / PATHS[version]["data_path"].format(**places), tables[file])
    if version == "v2.1":
        _write_lines(root / "meta/episodes.jsonl", rows)
        _write_lines(root / "meta/tasks.jsonl", [{"task_index": at, "task": name} for at, name in enumerate(names)])
        stats = [{"episode_index": index, "stats": _stats(episode)} for index, episode in enumerate(episodes)]
        _write_lines(root / "meta/episodes_stats.jsonl", stats)
        return root
    for row, episode, (first, behind) in zip(rows, episodes, borders, strict=True):
        row |= {"data/chunk_index": 0, "data/file_index": 0, "dataset_from_index": first, "dataset_to_index": behind}
        row |= {
            f"stats/{name}/{key}": value for name, values in _stats(episode).items() for key, value in values.items()
        }
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
    write_table(root / "meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(rows))
    write_table(root / "data/chunk-000/file-000.parquet", pa.concat_tables(tables))
    # As pandas writes it: the tasks are the index.
    tasks = pa.table({"task_index": list(range(len(names))), "__index_level_0__": names})
    columns: list[dict[str, str | None]] = []
    columns.append({"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"})
    columns.append({"name": None, "field_name": "__index_level_0__", "pandas_type": "object", "numpy_type": "str"})
    pandas = {
        "index_columns": ["__index_level_0__"],
        "column_indexes": [],
        "columns": [{**column, "metadata": None} for column in columns],
        "pandas_version": "3.0.0",
    }
    write_table(root / "meta/tasks.parquet", tasks.replace_schema_metadata({"pandas": json.dumps(pandas)}))
    return root


def edit_info(root: Path, **values: Any) -> None:
    """Change values in meta/info.json."""
    path = root / "meta/info.json"
    path.write_text(json.dumps((read_info(root) if path.exists() else {}) | values, indent=4))


def read_info(root: Path) -> dict[str, Any]:
    """Return meta/info.json."""
    info: dict[str, Any] = json.loads((root / "meta/info.json").read_text())
    return info


def edit_episodes(root: Path, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the rows of the metadata of episodes (version 3)."""
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path, partitioning=None).to_pylist()
    edit(rows)
    write_table(path, pa.Table.from_pylist(rows))


def write_numbers(path: Path, numbers: Sequence[int], *, track: VideoTrack | None = None) -> None:
    """Write a video whose frames show `numbers`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    track = track or VideoTrack(fps=Fraction(FPS), width=WIDTH, height=HEIGHT, options={"g": "2", "crf": "20"})
    pictures = (draw_frame_number(number, width=track.width, height=track.height) for number in numbers)
    ticks = range(0, TICKS_PER_FRAME * len(numbers), TICKS_PER_FRAME)
    encode_video(path, track, pictures=pictures, ticks=ticks, picture_format="gray")


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _features() -> dict[str, Any]:
    video = {"video.fps": FPS, "video.codec": "h264", "video.is_depth_map": False}
    shape = {"shape": [HEIGHT, WIDTH, 3], "names": ["height", "width", "channels"]}
    cameras = {name: {"dtype": "video", **shape, "info": video} for name in CAMERAS}
    vectors = {
        name: {"dtype": "float32", "shape": [2], "names": ["x", "y"]} for name in ("observation.state", "action")
    }
    scalars = {
        "timestamp": "float32",
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
    }
    single = {name: {"dtype": kind, "shape": [1], "names": None} for name, kind in scalars.items()}
    return {**cameras, **vectors, "next.success": {"dtype": "bool", "shape": [1], "names": None}, **single}


def _frames(index: int, task_indexes: Sequence[int], *, first: int) -> pa.Table:
    """Return the states and actions of an episode; the state of a frame is its episode and its number."""
    frames = np.arange(len(task_indexes))
    pairs = pa.list_(pa.float32(), 2)
    return pa.table(
        {
            "observation.state": pa.array([[index, frame] for frame in frames], pairs),
            "action": pa.array([[0.0, 0.0]] * len(frames), pairs),
            "next.success": [False] * len(frames),
            "timestamp": pa.array(frames / FPS, pa.float32()),
            "frame_index": frames,
            "episode_index": np.full(len(frames), index),
            "index": frames + first,
            "task_index": list(task_indexes),
        }
    )


def _stats(episode: Episode) -> dict[str, dict[str, Any]]:
    has_success = bool(episode.columns.get("success"))
    of_success = {"min": [False], "max": [has_success], "mean": [has_success / len(episode.tasks)], "std": [0.0]}
    of_action = {name: [0.0, 0.0] for name in ("min", "max", "mean", "std")}
    count = {"count": [len(episode.tasks)]}
    return {"action": {**of_action, **count}, "next.success": {**of_success, **count}}
