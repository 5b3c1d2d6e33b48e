"""Read LeRobot datasets, versions 3 and 2, which contain robot episodes recorded by one or more cameras.

    meta/info.json          version, frames per second, features (a camera has the dtype `video`), splits as ranges of
                            episodes, path templates
    meta/episodes/*/*       version 3, Parquet: one row per episode, with the tasks, statistics of the frames, and for
                            each camera the file and the span [from_timestamp, to_timestamp) in it
    meta/episodes.jsonl     version 2: one line per episode; each camera has one file per episode
    meta/tasks.*            the tasks by `task_index`
    data/                   states, actions, times and tasks of individual frames, which are not copied

A caption belongs to a span of an episode in the recording of one camera. The text is the task, the group is the name of
the episode, and the view is the short name of the camera. All other columns of the episodes become labels. An episode
with several tasks is divided where the task of its frames changes. The caption of an episode without a task is the
name of the episode, so that the episode keeps its split.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.manifests.adapters.annotations import (
    TEST,
    TRAIN,
    VAL,
    Reason,
    UnusableRow,
    find_split,
    json_rows,
    open_annotations,
)
from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder, escape_unencodable
from clipmill.manifests.adapters.video_files import require_directory
from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line, quote_value
from clipmill.manifests.publish import parse_json
from clipmill.manifests.storage.urls import Location, mask_secrets

DATASET = "lerobot"
SOURCE = "task"
NAME_SOURCE = "episode"  # source of captions that are names of episodes
_FRAME_COLUMNS = ("episode_index", "timestamp", "task_index")
_NOT_LABELS = re.compile(r"episode_index|tasks|task_index|length|dataset_(from|to)_index|(data|videos|meta|stats)/.*")
_FIELD = re.compile(r"\{(video_key|chunk_index|file_index|episode_chunk|episode_index)(?::0?(\d)d)?\}")
_RANGE = re.compile(r"\s*(\d{1,9})?\s*:\s*(\d{1,9})?\s*")
_COPY_AGAIN = "copy the dataset again; after an interrupted recording, complete it with LeRobotDataset.finalize()"


@dataclass(frozen=True)
class _Span:
    """Time span in a video file. The path of the file is relative to the folder of the dataset."""

    file: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class _Episode:
    """Metadata of an episode.

    Attributes:
        row: 0-based index of the episode in the metadata.
        index: `episode_index`.
        split: Split that contains the episode; None if no split contains it.
        tasks: Distinct non-empty tasks of the episode.
        data_file: File with the states and actions, relative to the folder of the dataset.
        spans: Span of the episode by camera, except for cameras whose file or times are missing.
        labels: Labels, by column name.
    """

    row: int
    index: int
    split: str | None
    tasks: Sequence[str]
    data_file: str
    spans: Mapping[str, _Span]
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"episode_{self.index:06d}"


@dataclass(frozen=True)
class _Dataset:
    """Content of meta/info.json.

    Attributes:
        root: Folder of the dataset.
        is_v3: True for version 3, False for version 2.
        views: Short names of the cameras, by name of the feature.
        success_features: Names of the frame features that record whether the robot was successful.
        splits: Ranges of episodes with their splits. Held-out splits come first.
        video_path, data_path: Templates for paths relative to `root`.
        num_per_folder: Number of episodes in a folder (version 2).
    """

    root: Path
    is_v3: bool
    fps: float
    num_episodes: object
    views: Mapping[str, str]
    success_features: Sequence[str]
    splits: Sequence[tuple[range, str]]
    video_path: str
    data_path: str
    num_per_folder: int

    @property
    def annotations(self) -> Path:
        return self.root / "meta" / ("episodes" if self.is_v3 else "episodes.jsonl")


def read_lerobot(directory: Location, *, dataset: str = DATASET) -> Reading:
    """Read a LeRobot dataset.

    Raises:
        UserError: The folder is in a bucket, is not a LeRobot dataset of version 2 or 3, or has no camera with videos,
            or the metadata cannot be read.
    """
    notes: list[str] = []
    info = _open_dataset(directory, notes)
    episodes: dict[int, _Episode] = {}
    faults: list[tuple[int, UnusableRow]] = []
    for row, (values, fault) in enumerate(_metadata_rows(info)):
        try:
            if fault is not None:
                raise UnusableRow(Reason.MALFORMED_ROW, fault)
            episode = _episode(info, row, values)
            if episode.index in episodes:
                raise UnusableRow(Reason.DUPLICATE_ID, f"an earlier row is also {episode.name}")
            episodes[episode.index] = episode
        except UnusableRow as error:
            faults.append((row, error))
    tasks = _tasks_by_time(info, episodes.values(), notes)
    labels = sorted({name for episode in episodes.values() for name in episode.labels})
    builder = ReadingBuilder(dataset, labels=dict.fromkeys(labels, pa.string()))
    for note in (*notes, *_unusual_properties(info, episodes.values())):
        builder.note(note)
    builder.begin_annotations(info.annotations)
    for row, rejection in faults:
        builder.reject(rejection.reason, file=str(info.annotations), row=row, detail=rejection.detail)
    # The prefix distinguishes several datasets in one data folder, whose cameras and episodes may have the same names.
    prefix = "" if dataset == DATASET else f"{dataset}_"
    for camera in info.views:
        episodes_of_file: dict[str, list[_Episode]] = {}
        for episode in episodes.values():
            if camera in episode.spans:
                episodes_of_file.setdefault(episode.spans[camera].file, []).append(episode)
            else:
                detail = f"{episode.name} has no file or no times for the camera {camera}"
                builder.reject(Reason.MALFORMED_ROW, file=str(info.annotations), row=episode.row, detail=detail)
        for file, group in episodes_of_file.items():
            _add_file(builder, info, file, group, camera=camera, tasks=tasks, prefix=prefix)
    return builder.build()


def _add_file(
    builder: ReadingBuilder,
    info: _Dataset,
    file: str,
    episodes: Sequence[_Episode],
    *,
    camera: str,
    tasks: Mapping[int, Sequence[tuple[float, str]]],
    prefix: str,
) -> None:
    """Add a video file of a camera, and the captions of the episodes in it.

    Args:
        file: Path relative to the folder of the dataset.
        tasks: Tasks of each episode, with their starts in seconds from the start of the episode.
        prefix: Prefix for names that may also occur in other datasets.
    """
    path, name, origin_file = info.root / file, PurePosixPath(file), info.annotations
    source_id = f"{prefix}{info.views[camera]}_{f'{name.parent.name}_' if info.is_v3 else ''}{name.stem}"
    splits = {episode.split or TRAIN for episode in episodes}
    video, detail = None, f"no such file: {file}"
    if path.exists():
        split = splits.pop() if len(splits) == 1 else TRAIN
        video, detail = builder.add_video(source_id, path=path, split=split), "the video was rejected"
    if video is None:
        builder.count_lost_captions(
            source_id, file=origin_file, num_captions=len(episodes), detail=detail, row=episodes[0].row
        )
        return
    # Name of the overlapped episode, by index of the rejected episode. An overlap of up to half a frame is allowed.
    # Usually, the later episode is rejected. If one episode is held out and the other is for training, the episode for
    # training is rejected, because training would use held-out frames.
    overlaps: dict[int, str] = {}
    last: _Episode | None = None
    for episode in sorted(episodes, key=lambda episode: episode.spans[camera].begin_s):
        if last is None or episode.spans[camera].begin_s >= last.spans[camera].end_s - 0.5 / info.fps:
            last = episode
        elif (last.split or TRAIN) == TRAIN != (episode.split or TRAIN):
            overlaps[last.index], last = episode.name, episode
        else:
            overlaps[episode.index] = last.name
    for episode in episodes:
        if episode.index in overlaps:
            detail = f"{episode.name} overlaps {overlaps[episode.index]} in {file}"
            builder.reject(Reason.BAD_TIME, file=str(origin_file), row=episode.row, source_id=source_id, detail=detail)
            continue
        span, parts = episode.spans[camera], tasks[episode.index]
        ends_s = [*(span.begin_s + begin_s for begin_s, _ in parts[1:]), span.end_s]
        for (begin_s, task), end_s in zip(parts, ends_s, strict=True):
            builder.add_caption(
                video,
                task or episode.name,
                Origin(origin_file, SOURCE if task else NAME_SOURCE, episode.row),
                begin_s=span.begin_s + begin_s,
                end_s=end_s,
                split=episode.split or TRAIN,
                group=f"{prefix}{episode.name}",
                view=info.views[camera],
                labels=episode.labels,
            )


def _open_dataset(directory: Location, notes: list[str]) -> _Dataset:
    """Read and validate meta/info.json. Notes for the user are appended to `notes`."""
    if isinstance(directory, str):
        problem = f"{mask_secrets(directory)} is not a local folder, and LeRobot datasets in buckets are not read"
        raise UserError(problem, hint="copy the dataset to a local folder first")
    require_directory(directory)
    path = directory.resolve() / "meta" / "info.json"
    if not path.exists():
        raise UserError(
            f"{directory} is not a LeRobot dataset: it has no meta/info.json",
            hint="use the folder that contains meta, data and videos",
        )
    try:
        with open_annotations(path, "rb") as file:
            info = parse_json(file.read())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", hint="copy the file again") from error

    def require(name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            content = info if name == "the content" else info.get(name)
            raise UserError(f"{path}: {name} is {quote_value(content)}, expected {expected}", hint="correct the file")

    require("the content", isinstance(info, dict), "an object")
    version = re.fullmatch(r"v?([23])\.\d+", str(info.get("codebase_version")))
    require("codebase_version", version is not None, "v3.0, v2.1 or v2.0; LeRobot's scripts convert older datasets")
    fps, features, splits = info.get("fps"), info.get("features"), info.get("splits") or {}
    num_per_folder = _to_integer(info.get("chunks_size", 1000))
    require("fps", isinstance(fps, int | float) and 0 < fps < inf, "a number above 0")
    require("chunks_size", bool(num_per_folder), "an integer of 1 or more")
    require("splits", isinstance(splits, dict), "an object")
    is_valid = isinstance(features, dict) and all(isinstance(feature, dict) for feature in features.values())
    require("features", is_valid, "an object of objects")
    views = _views(features, fps=fps, directory=directory, notes=notes)
    templates = {name: info.get(name) or "" for name in ("video_path", "data_path")}
    for name, template in templates.items():
        is_valid = isinstance(template, str) and not set("{}") & set(_FIELD.sub("", template))
        paths = [PurePosixPath(_fill(template, video_key=camera)) for camera in views] if is_valid else []
        is_inside = all(not path.is_absolute() and ".." not in path.parts for path in paths)
        require(name, is_valid and is_inside, "a template for paths in the dataset")
    ranges = [_split_range(path, name, value) for name, value in splits.items()]
    return _Dataset(
        root=directory.resolve(),
        is_v3=version is not None and version[1] == "3",
        fps=fps,
        num_episodes=info.get("total_episodes"),
        views=views,
        success_features=[name for name in features if features[name].get("dtype") == "bool" and "success" in name],
        splits=sorted(ranges, key=lambda item: (TEST, VAL, TRAIN).index(item[1])),
        num_per_folder=num_per_folder or 1,
        **templates,
    )


def _views(
    features: Mapping[str, Mapping[str, Any]], *, fps: float, directory: Path, notes: list[str]
) -> dict[str, str]:
    """Return the short names of the cameras that have videos, by name of the feature."""
    cameras: list[str] = []
    for name, feature in features.items():
        facts = [_get_nested(feature, "info"), _get_nested(feature, "video_info")]
        is_depth = any(_get_nested(info, key) for info in facts for key in ("is_depth_map", "video.is_depth_map"))
        if feature.get("dtype") == "image":
            notes.append(f"the frames of {on_one_line(name)} are images in Parquet files, which are not read")
        elif feature.get("dtype") == "video" and is_depth:
            notes.append(f"the frames of {on_one_line(name)} are depth maps, which are not read")
        elif feature.get("dtype") == "video":
            cameras.append(name)
            if (rate := _get_nested(facts[0], "video.fps")) not in (None, fps):
                notes.append(
                    f"{on_one_line(name)} has {quote_value(rate)} frames per second, but the dataset has {fps}"
                )
    if not cameras:
        raise UserError(
            "; ".join((f"{directory} contains no camera videos", *notes)),
            hint="convert images to videos with `lerobot-edit-dataset --operation.type convert_image_to_video`",
        )
    views = [name.removeprefix("observation.").removeprefix("images.") for name in cameras]
    return dict(zip(cameras, views if len(set(views)) == len(views) else cameras, strict=True))


def _split_range(path: Path, name: str, value: object) -> tuple[range, str]:
    """Parse a split in meta/info.json, such as "train": "0:40"."""
    split = find_split(name)
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if split is None or match is None:
        raise UserError(
            f"{path}: splits contains {quote_value(name)}: {quote_value(value)}, expected train, val or test, each "
            'with a range of episodes such as "0:40"',
            hint="correct the file; episodes outside of all splits belong to train",
        )
    return range(int(match[1] or 0), int(match[2] or 10**9)), split


def _fill(template: str, **values: int | str) -> str:
    """Fill in the fields of a path template. Fields without a value become 0."""
    return _FIELD.sub(lambda match: str(values.get(match[1], 0)).zfill(int(match[2] or 0)), template)


def _metadata_rows(info: _Dataset) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the metadata of each episode, including the maxima of success features, and a fault or None."""
    maxima = {f"stats/{name}/max": name for name in info.success_features}
    if info.is_v3:
        files = sorted(info.annotations.glob("*/*.parquet"))
        if not files:
            raise UserError(f"{info.annotations} contains no Parquet files", hint=_COPY_AGAIN)
        for path in files:
            names = _parquet_columns(path)
            required = [name for camera in info.views for name in _span_columns(camera)]
            if missing := [name for name in required if name not in names]:
                raise UserError(f"{path} has no column {', '.join(missing)}", hint=_COPY_AGAIN)
            columns = [name for name in names if not name.startswith("stats/") or name in maxima]
            yield from ((values, None) for values in _read_parquet(path, columns).to_pylist())
        return
    statistics = info.root / "meta" / "episodes_stats.jsonl"
    success: dict[str, dict[str, Any]] = {}
    for row in json_rows(statistics) if maxima and statistics.exists() else ():
        values = {column: _get_nested(row.values, "stats", name, "max") for column, name in maxima.items()}
        success[str(row.values.get("episode_index"))] = values
    for row in json_rows(info.annotations):
        yield row.values | success.get(str(row.values.get("episode_index")), {}), row.fault


def _get_nested(value: object, *names: str) -> Any:
    """Return a value in nested JSON objects, or None if the value or one of the objects is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _span_columns(camera: str) -> list[str]:
    return [f"videos/{camera}/{name}" for name in ("chunk_index", "file_index", "from_timestamp", "to_timestamp")]


def _parquet_columns(path: Path) -> list[str]:
    try:
        with open_annotations(path, "rb") as file:
            names: list[str] = pq.read_schema(file).names
            return names
    except pa.ArrowException as error:
        raise UserError(f"{path} cannot be read as Parquet: {error}", hint=_COPY_AGAIN) from error


def _read_parquet(path: Path, columns: Sequence[str], *, filters: Any = None, are_numbers: bool = False) -> pa.Table:
    try:
        table = pq.read_table(path, columns=list(columns), filters=filters, partitioning=None)
        table.validate(full=True)  # raises an error for strings that are not UTF-8
        if are_numbers:
            table = table.cast(pa.schema([(name, pa.float64()) for name in columns]))
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read as Parquet: {error}", hint=_COPY_AGAIN) from error
    return table


def _to_integer(value: object) -> int | None:
    """Return a value as a non-negative integer, or None. (pandas writes 3.0 for 3 if a column has empty cells.)"""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return int(value) if 0 <= value < 10**9 and value == int(value) else None


def _episode(info: _Dataset, row: int, values: Mapping[str, Any]) -> _Episode:
    """Parse the metadata of an episode. Raise UnusableRow if it is malformed."""
    index, length, tasks = (
        _to_integer(values.get("episode_index")),
        _to_integer(values.get("length")),
        values.get("tasks") or [],
    )
    if index is None:
        detail = f"episode_index is {quote_value(values.get('episode_index'))}, expected an integer"
        raise UnusableRow(Reason.MALFORMED_ROW, detail)
    tasks = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise UnusableRow(Reason.MALFORMED_ROW, f"tasks is {quote_value(tasks)}, expected a list of strings")
    location = {"episode_index": index, "episode_chunk": index // info.num_per_folder}
    spans = {}
    for camera in info.views:
        begin_s: Any = 0.0
        end_s: Any = length / info.fps if length else inf
        if info.is_v3:
            *numbers, begin_s, end_s = (values.get(name) for name in _span_columns(camera))
            chunk, file = map(_to_integer, numbers)
            are_times = all(isinstance(time_s, int | float) and isfinite(time_s) for time_s in (begin_s, end_s))
            if chunk is None or file is None or not are_times:
                continue
            location |= {"chunk_index": chunk, "file_index": file}
        spans[camera] = _Span(_fill(info.video_path, video_key=camera, **location), begin_s, end_s)
    location |= {name: _to_integer(values.get(f"data/{name}")) or 0 for name in ("chunk_index", "file_index")}
    # The labels are the success of the robot, and all columns that contain neither file locations nor statistics.
    labels: dict[str, object] = {}
    for name in info.success_features:
        value = values.get(f"stats/{name}/max")
        while isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, bool | int | float):
            labels[name.removeprefix("next.")] = bool(value)
    labels |= {name: value for name, value in values.items() if not _NOT_LABELS.fullmatch(name)}
    texts = {}
    for name, value in labels.items():
        if isinstance(value, float):
            text = "" if isnan(value) else f"{value:.15g}"
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value).strip()
        if text and isinstance(value, str | int | float):
            texts[LABEL_PREFIX + re.sub(r"\W+", "_", name)] = escape_unencodable(text)
    return _Episode(
        row=row,
        index=index,
        split=next((split for episodes, split in info.splits if index in episodes), None),
        tasks=list(dict.fromkeys(task.strip() for task in tasks if task.strip())),
        data_file=_fill(info.data_path, **location),
        spans=spans,
        labels=texts,
    )


def _tasks_by_time(
    info: _Dataset, episodes: Collection[_Episode], notes: list[str]
) -> dict[int, list[tuple[float, str]]]:
    """Return the tasks of each episode, with their starts in seconds from the start of the episode.

    An episode without a task has the task "". Frames are read only for episodes with several tasks. A task whose start
    cannot be read from the frames is omitted.
    """
    tasks = {episode.index: [(0.0, "".join(episode.tasks[:1]))] for episode in episodes}
    episodes_of_file: dict[str, list[_Episode]] = {}
    for episode in episodes:
        if len(episode.tasks) > 1:
            tasks[episode.index] = [(0.0, "")]
            episodes_of_file.setdefault(episode.data_file, []).append(episode)
    names = _task_names(info) if episodes_of_file else {}
    for file, group in episodes_of_file.items():
        if missing := _missing_columns(info, file, _FRAME_COLUMNS):
            episodes_text = f"{count_noun(len(group), 'episode')} with several tasks, such as {group[0].name}"
            notes.append(f"{episodes_text}, get their names as captions: {missing}")
            continue
        filters = [("episode_index", "in", [episode.index for episode in group])]
        frames = _read_parquet(info.root / file, _FRAME_COLUMNS, filters=filters, are_numbers=True)
        index, time_s, task = (frames[name].to_numpy() for name in _FRAME_COLUMNS)  # float64
        for episode in group:
            rows = np.flatnonzero(index == episode.index)
            rows = rows[np.diff(task[rows], prepend=-1) != 0]
            if len(rows):
                runs = [(float(time_s[row]), names.get(float(task[row]), "")) for row in rows]
                tasks[episode.index] = [(0.0, runs[0][1]), *runs[1:]]
    return tasks


def _missing_columns(info: _Dataset, file: str, names: Sequence[str]) -> str | None:
    """Describe which of the columns are missing in a file of frames; return None if none is missing."""
    if not (info.root / file).is_file():
        return f"there is no {file}"
    columns = _parquet_columns(info.root / file)
    missing = [name for name in names if name not in columns]
    return f"{file} has no column {', '.join(missing)}" if missing else None


def _task_names(info: _Dataset) -> dict[float, str]:
    """Return the names of the tasks by `task_index`."""
    path = info.root / "meta" / ("tasks.parquet" if info.is_v3 else "tasks.jsonl")
    if not info.is_v3:
        rows = (row.values for row in json_rows(path))
        return {_to_integer(row.get("task_index")) or 0: str(row.get("task", "")).strip() for row in rows}
    columns = _parquet_columns(path)
    texts = [name for name in columns if name != "task_index"]  # "task", or the index column of a pandas table
    if "task_index" not in columns or len(texts) != 1:
        raise UserError(f"{path} does not have the columns task_index and task", hint=_COPY_AGAIN)
    table = _read_parquet(path, columns)
    numbers, names = table["task_index"].to_pylist(), table[texts[0]].to_pylist()
    return {number: str(name).strip() for number, name in zip(numbers, names, strict=True)}


def _unusual_properties(info: _Dataset, episodes: Collection[_Episode]) -> Iterator[str]:
    """Yield notes for the user about unusual properties of the episodes."""
    if isinstance(info.num_episodes, int) and info.num_episodes != len(episodes):
        yield f"meta/info.json records {info.num_episodes} episodes, but the episode metadata lists {len(episodes):,}"
    kinds: dict[str, list[_Episode]] = {}
    for episode in episodes:
        lengths_s = [span.end_s - span.begin_s for span in episode.spans.values()] or [0.0]
        for text, applies in (
            ("outside of all splits in meta/info.json: the split is train", episode.split is None),
            (f"without a task: the caption is the name, with the source {NAME_SOURCE}", not episode.tasks),
            ("whose cameras have recordings of different lengths", max(lengths_s) > min(lengths_s) + 1 / info.fps),
        ):
            if applies:
                kinds.setdefault(text, []).append(episode)
    for text, group in kinds.items():
        yield f"{count_noun(len(group), 'episode')}, such as {group[0].name}, {text}"
    for episode in list(episodes)[:1]:
        if missing := _missing_columns(info, episode.data_file, _FRAME_COLUMNS[:2]):
            yield f"{missing}: frames cannot be joined with states and actions by time"
