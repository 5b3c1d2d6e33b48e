"""Survey data folders, and choose task, preset, batch size and number of steps for a first run.

The survey reads only small files of a data folder: the files that list columns, splits, chunks, captions and labels.
"""

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import is_model_source
from clipmill.manifests.divided_videos import DividedVideos, read_divided_videos
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, size_text
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.store import manifest_dir, num_captions_of, open_captions, read_videos
from clipmill.shards.columns import COLUMNS, LATENTS, TEXT, VIDEO, command_for, how_to_make, how_to_repair
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.format import DATASET_FILE
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from clipmill.train.config.shards import data_folder_error, kind_of
from clipmill.train.data.classes import class_labels, proposed_label
from clipmill.train.data.data_folder import ChunkTable, chunk_table, index_in, open_data_folder, rows_of
from clipmill.train.quickstart.request import OFFERED_TASKS
from clipmill.train.registry import DEFAULT, find_task, tasks
from clipmill.train.spec import FirstRun

_HELD_OUT_SPLITS = ("val", "validation", "test")  # names of splits for evaluations, in order of preference


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    """Facts about a split. Its chunks are from the current variant of the column `video`.

    Attributes:
        num_videos: Number of videos that have chunks.
        num_chunks: Number of chunks.
        hours: Total length of the chunks in hours.
        num_captions: Number of captions of these videos.
        num_without: Number of videos whose chunks have not been made yet or could not be made.
        sources: Sources of the captions.
    """

    num_videos: int
    num_chunks: int
    hours: float
    num_captions: int
    num_without: int = 0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Facts about the content of a data folder.

    Attributes:
        address: Path or URL of the data folder, as the user wrote it.
        columns: Current variant of each column, keyed by column name.
        splits: Splits in order of decreasing size, keyed by name.
        chunk_s: Median length of a chunk, in seconds.
        labels: Labels of the captions that can be used as classes, with `--label`.
    """

    address: str
    columns: dict[str, str]
    splits: dict[str, SplitFacts]
    chunk_s: float
    labels: tuple[str, ...]


def survey(address: str) -> Survey:
    """Survey a data folder at a path or in object storage.

    Raises:
        UserError: The data folder does not exist or has no video chunks, or its manifest is empty.
    """
    if not kind_of(address).has_manifest:
        raise data_folder_error(address, "but train quickstart reads the manifest of a data folder")
    if not is_remote(address):
        _require_folder(Path(address))
    folder = open_data_folder(address, cache=None, column=None)
    videos = read_videos(folder.path)
    if not videos.num_rows:
        raise UserError(
            f"the manifest of {address} has no videos",
            hint=f"add videos with prep manifest folder VIDEOS --data {shlex.quote(address)}, and run prep "
            f"{command_for(VIDEO)}",
        )
    columns = {name: variant for name in COLUMNS if (variant := current_variant(folder.path, name)) is not None}
    if VIDEO in columns and folder.tars is not None:
        folder.tars.files.copy_column(VIDEO)
    if VIDEO not in columns or not variant_dir(folder.path, VIDEO, columns[VIDEO]).is_dir():
        other_columns = [name for name in columns if name != VIDEO]
        hint = f"make the chunks: {how_to_make(VIDEO, address, columns.get(VIDEO, ''))}"
        if LATENTS in columns:
            hint += f"; or train on the latents: {_latents_command(address, folder.path, has_text=TEXT in columns)}"
        raise UserError(
            f"{address} has no video chunks{', only ' if other_columns else ''}{', '.join(other_columns)}", hint=hint
        )
    video_ids = videos["video_id"].combine_chunks()
    try:
        table, _ = chunk_table(Variant.open(folder.path, tars=folder.tars).require_complete(), video_ids)
    except (Damaged, OSError) as error:
        raise UserError(str(error), hint=how_to_repair()) from error
    if not len(table):
        raise UserError(
            f"no chunk of {address} belongs to a video in its manifest",
            hint=f"make the chunks: {how_to_make(VIDEO, address, columns[VIDEO])}",
        )
    divided_videos = read_divided_videos(folder.path)
    divided_splits = divided_videos.splits if divided_videos else ()
    names = list(dict.fromkeys([*pc.unique(videos["split"]).to_pylist(), *divided_splits]))
    codes: NDArray[np.int64] = index_in(videos["split"].combine_chunks(), pa.array(names))
    has_chunks = np.bincount(table.video_row, minlength=len(codes)) > 0
    captions, labels = _captions(folder.path, video_ids, codes, has_chunks, names=names)
    return Survey(
        address=address,
        columns=columns,
        splits=_splits(names, codes, has_chunks, table, captions, divided_videos=divided_videos),
        chunk_s=float(np.median(_seconds(table))),
        labels=labels,
    )


def split_to_train(surveys: Sequence[Survey]) -> str:
    """Return the split to train on: `train`, or the only split that has chunks in all data folders.

    Raises:
        UserError: There is no such split, or there are several such splits.
    """
    names = [{name for name, split in data.splits.items() if split.num_chunks} for data in surveys]
    common_names = sorted(set.intersection(*names))
    if "train" in common_names:
        return "train"
    if len(common_names) == 1:
        return common_names[0]
    pairs = zip(surveys, names, strict=True)
    splits_by_folder = "; ".join(f"{data.address} has {', '.join(sorted(splits))}" for data, splits in pairs)
    raise UserError(
        f"there is no split 'train' with chunks in each data folder: {splits_by_folder}",
        hint=f"use --split to select the split to train on: train {DEFAULT} --shards DATA --split NAME",
    )


def split_to_evaluate(surveys: Sequence[Survey], *, training_split: str) -> str | None:
    """Return a split, other than the training split, that has chunks in each folder; None if there is no such split."""
    names = [
        name
        for name in surveys[0].splits
        if name != training_split and all(name in data.splits and data.splits[name].num_chunks for data in surveys)
    ]
    ranks = {name: rank for rank, name in enumerate(_HELD_OUT_SPLITS)}
    return min(names, key=lambda name: ranks.get(name, len(ranks)), default=None)


def describe(data: Survey) -> list[str]:
    """Return lines of text that describe a data folder."""
    chunks = sum(split.num_chunks for split in data.splits.values())
    length = duration_text(3600 * sum(split.hours for split in data.splits.values()))
    labels = f"; labels: {', '.join(data.labels)}" if data.labels else ""
    lines = [f"{data.address}: {count_noun(chunks, 'chunk')} of {data.chunk_s:.3g} s (median), {length}{labels}"]
    lines += [
        f"split {name}: {count_noun(split.num_videos, 'video')}, {count_noun(split.num_chunks, 'chunk')}, "
        + f"{duration_text(3600 * split.hours)}, "
        + (count_noun(split.num_captions, "caption") if split.num_captions else "no captions")
        + (" from models" if split.sources and all(map(is_model_source, split.sources)) else "")
        + (f"; {count_noun(split.num_without, 'video')} without chunks" if split.num_without else "")
        for name, split in data.splits.items()
    ]
    other_columns = [name for name in data.columns if name != VIDEO]
    return [*lines, f"other columns: {', '.join(other_columns)}"] if other_columns else lines


def _require_folder(path: Path) -> None:
    make = f"prep manifest folder VIDEOS --data data; then {how_to_make(VIDEO, 'data')}"
    if not path.exists():
        raise UserError(f"there is no folder {path}", hint=f"make a data folder: {make}")
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a data folder", hint=f"make a data folder: {make}")
    if not manifest_dir(path).is_dir() and not (path / DATASET_FILE).exists():
        if not any(path.iterdir()):
            raise UserError(f"{path} is empty", hint=f"make a data folder from a folder of videos: {make}")
        make = make.replace("VIDEOS", shlex.quote(str(path)))
        raise UserError(
            f"{path} is not a data folder: it has no manifest",
            hint=f"make a data folder from its videos, if it contains any: {make}",
        )


def _latents_command(address: str, data_dir: Path, *, has_text: bool) -> str:
    """Return the command for a first run on latents."""
    has_captions = bool(num_captions_of(data_dir))
    for task in tasks():
        recipe = task.first_run
        if recipe is not None and recipe.latents_flags and recipe.needs_captions == has_captions:
            flags = recipe.latents_flags
            if recipe.no_text_flags and not has_text:
                flags = f"{flags} {recipe.no_text_flags}"
            return f"train {task.name} --shards {shlex.quote(address)} {flags}"
    raise AssertionError("no task reads latents")


def _seconds(table: ChunkTable) -> NDArray[np.float64]:
    """Return the length of each chunk in seconds."""
    seconds: NDArray[np.float64] = table.num_frames.astype(np.float64) * table.fps_den / table.fps_num
    return seconds


def _captions(
    data_dir: Path,
    video_ids: pa.Array,
    codes: NDArray[np.int64],
    has_chunks: NDArray[np.bool_],
    *,
    names: Sequence[str],
) -> tuple[dict[int, Counter[str]], tuple[str, ...]]:
    """Return caption counts of the videos that have chunks, keyed by split and source, and the names of the labels."""
    counts = defaultdict[int, Counter[str]](Counter)
    with open_captions(data_dir, dictionary_columns=("video_id",)) as file:
        labels = class_labels(file.schema_arrow)
        columns = [name for name in ("video_id", "source", "split") if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=columns)
            row, source = rows_of(table["video_id"], video_ids), table["source"].combine_chunks().dictionary_encode()
            sources = source.dictionary.to_pylist()
            is_counted = (row >= 0) & has_chunks[row]
            code = codes[row]
            if "split" in columns:
                caption_code = rows_of(table["split"], pa.array(names))
                code = np.where(caption_code < 0, code, caption_code)
            pairs = code[is_counted] * len(sources) + source.indices.to_numpy()[is_counted]
            for pair, count in zip(*(array.tolist() for array in np.unique(pairs, return_counts=True)), strict=True):
                counts[pair // len(sources)][sources[pair % len(sources)]] += count
    return counts, labels


def _splits(
    names: Sequence[str],
    codes: NDArray[np.int64],
    has_chunks: NDArray[np.bool_],
    table: ChunkTable,
    captions: Mapping[int, Counter[str]],
    *,
    divided_videos: DividedVideos | None,
) -> dict[str, SplitFacts]:
    video, chunk_code, seconds = table.video_row, codes[table.video_row], _seconds(table)
    if divided_videos is not None:
        is_divided, parts_of_splits = np.isin(video, divided_videos.video), []
        begin_us, end_us = table.start_ms * 1000, table.end_us
        for code, name in enumerate(names):
            rows = np.flatnonzero(is_divided | (chunk_code == code))
            parts = divided_videos.split_parts(name, video=video[rows], begin_us=begin_us[rows], end_us=end_us[rows])
            seconds = (parts.end_us - parts.begin_us) / 1e6
            parts_of_splits.append((video[rows][parts.span], np.full(len(seconds), code), seconds))
        video, chunk_code, seconds = (np.concatenate(arrays) for arrays in zip(*parts_of_splits, strict=True))
    splits = {
        name: SplitFacts(
            num_videos=len(np.unique(video[chunk_code == code])),
            num_without=int((~has_chunks[codes == code]).sum()),
            num_chunks=int((chunk_code == code).sum()),
            hours=float(seconds[chunk_code == code].sum()) / 3600,
            num_captions=captions[code].total(),
            sources=tuple(sorted(captions[code])),
        )
        for code, name in enumerate(names)
    }
    return dict(sorted(splits.items(), key=lambda item: -item[1].num_chunks))


EPOCHS = 30  # number of epochs, similar to the presets for synthetic videos
_MIN_STEPS = 200  # minimum number of steps if the time limit allows them
_FEWEST_STEPS = 20  # minimum number of steps in any case, even if the time limit allows fewer
NUM_CHECKPOINTS = 4
_MAX_FIRST_BATCH = 256  # maximum batch size on a GPU in the first trial
_MIN_GPU_BYTES = 8 * 10**9  # a ViT-B/16 with a text tower, gradients and AdamW's moments takes 2.4 GB without clips
MINUTES = {"cpu": 10.0, "cuda": 60.0}


def first_run_of(task: str) -> FirstRun:
    """Return the recipe for a first run of a task that quickstart offers."""
    recipe = find_task(task).first_run
    assert recipe is not None
    return recipe


def task_without_captions() -> str:
    """Return the first task whose samples need no captions."""
    return next(name for name in OFFERED_TASKS if not first_run_of(name).needs_captions)


@dataclass(frozen=True)
class Choice:
    """Chosen value, and the reason for the choice."""

    value: str
    reason: str


def choose_task(surveys: Sequence[Survey], *, split: str, requested: str | None) -> Choice:
    """Return the task to train.

    Args:
        surveys: Data folders.
        split: Split to train on.
        requested: Value of --task; None to choose a task for the data.

    Raises:
        UserError: The requested task needs captions, but a data folder has none.
    """
    uncaptioned_folders = [data.address for data in surveys if not data.splits[split].num_captions]
    num_captions = sum(data.splits[split].num_captions for data in surveys)
    if requested is None:
        if not uncaptioned_folders:
            return Choice(DEFAULT, count_noun(num_captions, "caption"))
        reason = (
            "no captions"
            if len(uncaptioned_folders) == len(surveys)
            else f"no captions in {', '.join(uncaptioned_folders)}"
        )
        task = task_without_captions()
        return Choice(task, f"{reason}, and train {task} needs none")
    if uncaptioned_folders and first_run_of(requested).needs_captions:
        raise UserError(
            f"split {split!r} of {uncaptioned_folders[0]} has no captions, but train {requested} needs them",
            hint="add a table of captions with prep manifest folder VIDEOS --captions captions.csv --data "
            f"{uncaptioned_folders[0]}, or use --task {task_without_captions()}",
        )
    return Choice(requested, "--task")


def choose_label(surveys: Sequence[Survey], *, requested: str | None) -> str:
    """Return the label to train on.

    Args:
        surveys: Data folders.
        requested: Value of --label; None for the only label.

    Raises:
        UserError: The requested label is not in all data folders. Or no label was requested, and the data folders share
            no label or several labels.
    """
    labels = [name for name in surveys[0].labels if all(name in data.labels for data in surveys)]
    if requested is not None and requested in labels:
        return requested
    if requested is not None:
        raise UserError(
            f"the captions have no label {requested!r}",
            hint=f"use one of the labels: {', '.join(labels)}; see docs/classification.md"
            if labels
            else "use data with labels (docs/classification.md), or a different --task",
        )
    if not labels:
        raise UserError(
            "the captions have no labels, but this task needs labels",
            hint="use data with labels (docs/classification.md), or a different --task",
        )
    if len(labels) > 1:
        raise UserError(
            f"the captions have several labels: {', '.join(labels)}", hint=f"use --label {proposed_label(labels)}"
        )
    return labels[0]


def choose_preset(task: str, *, gpu_bytes: Sequence[int]) -> Choice:
    """Return the preset for a task.

    Args:
        task: Name of the task.
        gpu_bytes: Memory of each GPU in bytes; empty for training on a CPU.
    """
    recipe = first_run_of(task)
    if not gpu_bytes:
        return Choice(recipe.cpu_preset, "small enough for a CPU")
    if recipe.gpu_preset is None:
        return Choice(recipe.cpu_preset, f"larger presets of train {task} need additional files")
    if min(gpu_bytes) < _MIN_GPU_BYTES:
        return Choice(recipe.cpu_preset, f"{recipe.gpu_preset} needs a GPU with {size_text(_MIN_GPU_BYTES)}")
    subject = "a GPU has" if len(gpu_bytes) == 1 else f"{len(gpu_bytes)} GPUs have at least"
    return Choice(recipe.gpu_preset, f"{subject} {size_text(min(gpu_bytes))} of memory")


def first_batch(preset: int, *, num_samples: int, on_gpu: bool) -> int:
    """Return the batch size to try first: a power of two, up to the preset's batch size and half of the samples.

    On a GPU, the batch size is at most `_MAX_FIRST_BATCH`.
    """
    limit = min(preset, max(2, num_samples // 2), _MAX_FIRST_BATCH if on_gpu else preset)
    return 1 << (limit.bit_length() - 1)


@dataclass(frozen=True)
class Length:
    """Number of steps and epochs to train, and the reason for the number of steps."""

    steps: int
    epochs: float
    reason: str


def choose_length(num_samples: int, *, batch: int, step_s: float, other_s: float, minutes: float) -> Length:
    """Return the number of steps for `EPOCHS` epochs, but at least `_MIN_STEPS`.

    If the time limit requires it, the number is smaller, but never below `_FEWEST_STEPS`.

    Args:
        num_samples: Number of samples per epoch.
        batch: Batch size over all processes.
        step_s: Time per step, in seconds.
        other_s: Time for the start (including the first step) and for the checkpoints, in seconds.
        minutes: Time limit of the complete run.
    """
    steps = math.ceil(EPOCHS * num_samples / batch)
    reason = f"{EPOCHS} epochs"
    if steps < _MIN_STEPS:
        steps, reason = _MIN_STEPS, "the fewest steps that show learning"
    max_steps = int((60 * minutes - other_s) / step_s)
    if max_steps < _FEWEST_STEPS:
        steps, reason = _FEWEST_STEPS, f"the minimum, although --minutes {minutes:g} allows fewer"
    elif steps > max_steps:
        steps, reason = max_steps, f"the most that --minutes {minutes:g} allows"
    epochs = steps * batch / num_samples
    return Length(steps, epochs, reason)


@dataclass(frozen=True, kw_only=True)
class ExpectedTime:
    """Expected time of a run in seconds, with its range."""

    seconds: float
    least_s: float
    most_s: float


_SPREAD = (0.85, 1.15)  # range of the time on a quiet machine, relative to the estimate
_BUSY_SPREAD = (0.5, 2.0)  # range if other processes use the same cores: they may end, or need more CPU time


def is_busy(load: float, *, cores: float) -> bool:
    """Return True if other processes need most of the cores; the load average includes this process."""
    return load - 1 > 0.75 * cores


def expected_time(
    steps: int, *, step_times: Sequence[float], start_s: float, checkpoints_s: float, num_processes: int, busy: bool
) -> ExpectedTime:
    """Estimate the time of a run from the times of a few of its steps.

    The range covers the means of several sections of these steps, and is at least as wide as `_SPREAD`.

    Args:
        steps: Number of steps of the run.
        step_times: Times of one or more steps, in seconds.
        start_s: Time from the start of the run to the end of its first step, in seconds.
        checkpoints_s: Time for all checkpoints, in seconds.
        num_processes: Number of processes. Several processes widen the range, because averaging their gradients takes
            time that was not measured.
        busy: True if other processes are using the machine.
    """
    mean, size = fmean(step_times), max(1, len(step_times) // 4)
    means = [fmean(step_times[start : start + size]) for start in range(0, len(step_times) - size + 1, size)]
    low, high = _BUSY_SPREAD if busy else _SPREAD
    communication = 1.0 if num_processes == 1 else 1.5
    num_later_steps, other_s = max(0, steps - 1), start_s + checkpoints_s
    return ExpectedTime(
        seconds=other_s + num_later_steps * mean,
        least_s=low * other_s + num_later_steps * min(*means, low * mean),
        most_s=high * other_s + num_later_steps * max(*means, high * mean) * communication,
    )
