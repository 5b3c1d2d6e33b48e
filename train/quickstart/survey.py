"""What a data folder has to train on: columns, splits, chunks, captions and labels. It reads the small files only."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import is_of_model
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.store import manifest_dir, num_captions_of, open_captions, read_videos
from clipmill.shards.columns import COLUMNS, LATENTS, TEXT, VIDEO, command_for, how_to_make, how_to_repair
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.format import DATASET_FILE
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant
from clipmill.train.config.shards import kind_of
from clipmill.train.data.chunk_table import ChunkTable, chunk_table, rows_of
from clipmill.train.data.classes import class_labels
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.registry import DEFAULT, tasks

_HELD_OUT = ("val", "validation", "test")  # in the order in which evaluations prefer them


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    """A split of a data folder; its chunks are those of the current variant of the `video` column.

    Attributes:
        num_videos, num_captions: videos that have chunks, and their captions.
        num_without: videos that have none: not made yet, or failed.
        sources: sources of its captions.
    """

    num_videos: int
    num_chunks: int
    hours: float
    num_captions: int
    num_without: int = 0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A data folder.

    Attributes:
        columns: current variant of each column.
        splits: by name, the largest first.
        chunk_s: median length of a chunk, in seconds.
        labels: labels of the captions that can be classes, as `--label` names them.
    """

    address: str
    columns: dict[str, str]
    splits: dict[str, SplitFacts]
    chunk_s: float
    labels: tuple[str, ...]


def survey(address: str) -> Survey:
    """Look at a data folder, a path or the address of one in object storage.

    Raises:
        UserError: there is no such data folder, its manifest is empty, or it has no chunks of video.
    """
    if not kind_of(address).has_manifest:
        raise UserError(
            f"{address} names tar files, and train quickstart looks at the manifest of a data folder",
            hint="name the data folder that prep made",
        )
    if not is_remote(address):
        _require_folder(Path(address))
    folder = open_data_folder(address, cache=None, column=None)
    videos = read_videos(folder.path)
    if not videos.num_rows:
        raise UserError(
            f"the manifest of {address} has no videos",
            hint=f"add some: prep manifest folder VIDEOS --data {shlex.quote(address)}; then prep {command_for(VIDEO)}",
        )
    columns = {name: variant for name in COLUMNS if (variant := current_variant(folder.path, name)) is not None}
    if VIDEO in columns and folder.tars is not None:
        folder.tars.files.copy_column(VIDEO)
    if VIDEO not in columns or not variant_dir(folder.path, VIDEO, columns[VIDEO]).is_dir():
        others = [name for name in columns if name != VIDEO]
        hint = f"make them: {how_to_make(VIDEO, address)}"
        if LATENTS in columns:
            hint += f"; or train on what there is: {_on_latents(address, folder.path, has_text=TEXT in columns)}"
        raise UserError(
            f"{address} has no chunks of video{'; it has ' if others else ''}{', '.join(others)}", hint=hint
        )
    video_ids = videos["video_id"].combine_chunks()
    try:
        table, _ = chunk_table(Variant.open(folder.path, tars=folder.tars).require_complete(), video_ids)
    except (Damaged, OSError) as error:
        raise UserError(str(error), hint=how_to_repair(VIDEO)) from error
    if not len(table):
        raise UserError(
            f"no chunk of {address} is of a video of its manifest",
            hint=f"make them: {how_to_make(VIDEO, address)}",
        )
    coded = videos["split"].combine_chunks().dictionary_encode()
    codes: NDArray[np.int64] = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    is_made = np.bincount(table.video_row, minlength=len(codes)) > 0
    captions, labels = _captions(folder.path, video_ids, codes, is_made)
    return Survey(
        address=address,
        columns=columns,
        splits=_splits(coded.dictionary.to_pylist(), codes, is_made, table, captions),
        chunk_s=float(np.median(_seconds(table))),
        labels=labels,
    )


def split_to_train(surveys: Sequence[Survey]) -> str:
    """The split to train on: `train`, or the only one that has chunks in all data folders.

    Raises:
        UserError: there is none, or the choice is not clear.
    """
    names = [{name for name, one in its.splits.items() if one.num_chunks} for its in surveys]
    common = sorted(set.intersection(*names))
    if "train" in common:
        return "train"
    if len(common) == 1:
        return common[0]
    have = "; ".join(f"{one.address} has {', '.join(sorted(its))}" for one, its in zip(surveys, names, strict=True))
    raise UserError(
        f"no split 'train' has chunks in each data folder: {have}",
        hint=f"name the split to train on: train {DEFAULT} --shards DATA --split NAME",
    )


def split_to_evaluate(surveys: Sequence[Survey], *, trained: str) -> str | None:
    """The split that evaluations take: one with chunks in each data folder that is not trained on; None without one."""
    names = [
        name
        for name in surveys[0].splits
        if name != trained and all(name in one.splits and one.splits[name].num_chunks for one in surveys)
    ]
    ranked = sorted(names, key=lambda name: _HELD_OUT.index(name) if name in _HELD_OUT else len(_HELD_OUT))
    return ranked[0] if ranked else None


def describe(one: Survey) -> list[str]:
    """Lines about a data folder."""
    chunks = sum(its.num_chunks for its in one.splits.values())
    length = duration_text(3600 * sum(its.hours for its in one.splits.values()))
    labels = f"; labels: {', '.join(one.labels)}" if one.labels else ""
    lines = [f"{one.address}: {count_noun(chunks, 'chunk')} of {one.chunk_s:.3g} s, {length}{labels}"]
    lines += [
        f"split {name}: {count_noun(its.num_videos, 'video')}, {count_noun(its.num_chunks, 'chunk')}, "
        + f"{duration_text(3600 * its.hours)}, "
        + (count_noun(its.num_captions, "caption") if its.num_captions else "no captions")
        + (" of models" if its.sources and all(map(is_of_model, its.sources)) else "")
        + (f"; {count_noun(its.num_without, 'video')} without chunks" if its.num_without else "")
        for name, its in one.splits.items()
    ]
    others = [name for name in one.columns if name != VIDEO]
    return [*lines, f"other columns: {', '.join(others)}"] if others else lines


def _require_folder(path: Path) -> None:
    make = f"prep manifest folder VIDEOS --data data; then {how_to_make(VIDEO, 'data')}"
    if not path.exists():
        raise UserError(f"there is no folder {path}", hint=f"prep makes a data folder: {make}")
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a data folder", hint=f"prep makes a data folder: {make}")
    if not manifest_dir(path).is_dir() and not (path / DATASET_FILE).exists():
        if not any(path.iterdir()):
            raise UserError(f"{path} is empty", hint=f"prep makes a data folder of a folder of videos: {make}")
        make = make.replace("VIDEOS", shlex.quote(str(path)))
        raise UserError(
            f"{path} is not a data folder: it has no manifest",
            hint=f"if it has videos, prep makes a data folder of them: {make}",
        )


def _on_latents(address: str, data_dir: Path, *, has_text: bool) -> str:
    """A first run on latents."""
    has_captions = bool(num_captions_of(data_dir))
    for task in tasks():
        run = task.first_run
        if run is not None and run.on_latents and run.needs_captions == has_captions:
            flags = run.on_latents if has_text or not run.without_text else f"{run.on_latents} {run.without_text}"
            return f"train {task.name} --shards {shlex.quote(address)} {flags}"
    raise AssertionError("a task reads latents")


def _seconds(table: ChunkTable) -> NDArray[np.float64]:
    found: NDArray[np.float64] = table.num_frames.astype(np.float64) * table.fps_den / table.fps_num
    return found


def _captions(
    data_dir: Path, video_ids: pa.Array, codes: NDArray[np.int64], is_made: NDArray[np.bool_]
) -> tuple[dict[int, Counter[str]], tuple[str, ...]]:
    """Number of captions of each split by their source, of videos that have chunks, and the labels."""
    found = defaultdict[int, Counter[str]](Counter)
    with open_captions(data_dir, coded=("video_id",)) as file:
        labels = class_labels(file.schema_arrow)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["video_id", "source"])
            row, source = rows_of(table["video_id"], video_ids), table["source"].combine_chunks().dictionary_encode()
            names = source.dictionary.to_pylist()
            is_counted = (row >= 0) & is_made[row]
            pairs = codes[row[is_counted]] * len(names) + source.indices.to_numpy()[is_counted]
            for pair, number in zip(*(one.tolist() for one in np.unique(pairs, return_counts=True)), strict=True):
                found[pair // len(names)][names[pair % len(names)]] += number
    return found, labels


def _splits(
    names: Sequence[str],
    codes: NDArray[np.int64],
    is_made: NDArray[np.bool_],
    table: ChunkTable,
    captions: Mapping[int, Counter[str]],
) -> dict[str, SplitFacts]:
    of_chunk, seconds = codes[table.video_row], _seconds(table)
    found = {
        name: SplitFacts(
            num_videos=int(is_made[codes == code].sum()),
            num_without=int((~is_made[codes == code]).sum()),
            num_chunks=int((of_chunk == code).sum()),
            hours=float(seconds[of_chunk == code].sum()) / 3600,
            num_captions=captions[code].total(),
            sources=tuple(sorted(captions[code])),
        )
        for code, name in enumerate(names)
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].num_chunks))
