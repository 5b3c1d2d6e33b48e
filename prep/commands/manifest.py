"""`prep manifest KIND`: what is wanted. Each command reads one kind of data set into the manifest."""

import json as json_module
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from manifests.adapters.reading import Reading, encodable
from manifests.errors import DISK_ERRORS, FailedWork, UserError
from manifests.place import check_data_dir
from manifests.quoting import quoted
from manifests.store import known_files, read_manifest, read_rejected, write_manifest
from manifests.table_files import DamagedManifest
from prep.commands.manifest_text import (
    no_video_text,
    rejected_of,
    unused_files,
    unused_text,
    written_text,
    written_values,
)
from prep.core.data_folder import writing
from prep.core.failure_list import first_rejected

app = App(name="manifest", help="Write down which videos and captions are wanted.")

Data = Annotated[Path, Parameter(name="--data", env_var="CLIPMILL_DATA", help="Data folder.")]
Dataset = Annotated[str | None, Parameter(name="--dataset", help="Name of the data set; by default its kind.")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the summary as JSON.")]
Annotations = Annotated[
    list[Path], Parameter(name="--annotations", consume_multiple=True, negative="", help="Annotation files.")
]


@app.command
def folder(
    directory: Path,
    *,
    captions: Annotated[Path | None, Parameter(help="Table of captions, .csv or .jsonl.")] = None,
    data: Data = Path("data"),
    dataset: Dataset = None,
    json: Json = False,
) -> None:
    """Every video file under a folder, with an optional table of captions.

    The table has the columns video and text, and optionally begin_s, end_s, source and split. Nothing is written if
    none of its rows can be used.

    Example: prep manifest folder VIDEOS --captions captions.csv

    Parameters
    ----------
    directory
        Folder of the videos.
    """
    from manifests.adapters.folder import read_folder

    name = dataset or "folder"
    _write(
        lambda: read_folder(directory, captions=captions, dataset=name, skip=data, known=known_files(data, name)),
        data=data,
        videos=directory,
        dataset=name,
        as_json=json,
    )


@app.command
def vatex(
    directory: Path, *, annotations: Annotations, data: Data = Path("data"), dataset: Dataset = None, json: Json = False
) -> None:
    """VATEX: clips with ten captions each.

    Example: prep manifest vatex VIDEOS --annotations vatex_training_v1.0.json

    Parameters
    ----------
    directory
        Folder of the videos, <videoID>.mp4 or another ending.
    """
    from manifests.adapters.vatex import read_vatex

    name = dataset or "vatex"
    _write(
        lambda: read_vatex(directory, annotations=annotations, dataset=name, skip=data),
        data=data,
        videos=directory,
        dataset=name,
        as_json=json,
    )


@app.command
def ego4d(
    directory: Path, *, annotations: Annotations, data: Data = Path("data"), dataset: Dataset = None, json: Json = False
) -> None:
    """Ego4D narrations: narration.json, or the pickled lists of AVION and LaViLa.

    Narrations of narration.json get intervals by EgoVLP's rule. Pickles may hold plain containers only.

    Example: prep manifest ego4d VIDEOS --annotations narration.json

    Parameters
    ----------
    directory
        Folder of the videos, <video_uid>.mp4.
    """
    from manifests.adapters.ego4d import read_ego4d

    name = dataset or "ego4d"
    _write(
        lambda: read_ego4d(directory, annotations=annotations, dataset=name, skip=data),
        data=data,
        videos=directory,
        dataset=name,
        as_json=json,
    )


@app.command
def epic_kitchens(
    directory: Path, *, annotations: Annotations, data: Data = Path("data"), dataset: Dataset = None, json: Json = False
) -> None:
    """EPIC-KITCHENS-100: narrated actions with verb and noun classes.

    Example: prep manifest epic-kitchens VIDEOS --annotations EPIC_100_train.csv EPIC_100_validation.csv

    Parameters
    ----------
    directory
        Folder of the videos, <video_id>.MP4 at any depth.
    """
    from manifests.adapters.epic_kitchens import read_epic_kitchens

    name = dataset or "epic-kitchens"
    _write(
        lambda: read_epic_kitchens(directory, annotations=annotations, dataset=name, skip=data),
        data=data,
        videos=directory,
        dataset=name,
        as_json=json,
    )


@app.command
def kinetics(
    lists: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    videos: Annotated[Path | None, Parameter(help="Folder of the videos; by default that of the first list.")] = None,
    data: Data = Path("data"),
    dataset: Dataset = None,
    json: Json = False,
) -> None:
    """Kinetics, or lists of clips and their classes.

    Example: prep manifest kinetics train.csv val.csv --videos VIDEOS

    Parameters
    ----------
    lists
        CSVs with the columns label, youtube_id, time_start, time_end, split; or lists whose lines are
        `path label`, `path num_frames label` (AVION) or `path 0 -1` (VideoMAE V2, no label).
    """
    from manifests.adapters.kinetics import read_kinetics

    name = dataset or "kinetics"
    _write(
        lambda: read_kinetics(lists, videos=videos, dataset=name, skip=data),
        data=data,
        videos=lists[0].parent if videos is None else videos,
        dataset=name,
        as_json=json,
    )


@app.command
def synthetic(
    *,
    videos: Annotated[int, Parameter(help="How many videos; every fifth is in val.")] = 24,
    minutes: Annotated[float, Parameter(help="Length of each.")] = 1.0,
    seed: Annotated[int, Parameter(help="Another seed shows other scenes.")] = 0,
    mode: Annotated[
        Literal["shapes", "frame-numbers"],
        Parameter(help="Moving shapes that the captions describe, or frame numbers that a program can read."),
    ] = "shapes",
    out: Annotated[Path | None, Parameter(help="Folder of the videos; by default DATA/synthetic.")] = None,
    data: Data = Path("data"),
    dataset: Dataset = None,
    json: Json = False,
) -> None:
    """Make videos to try things on.

    Example: prep manifest synthetic --videos 24 --minutes 1
    """
    from prep.synthetic.make import Mode, make_synthetic

    if videos < 1:
        raise UserError(f"--videos is {videos}", hint="give 1 or more")
    if not 0 < minutes <= 600:
        raise UserError(f"--minutes is {minutes}", hint="give more than 0 and at most 600")
    name = dataset or "synthetic"
    directory = data / "synthetic" if out is None else out

    def make() -> Reading:
        reading = make_synthetic(
            directory,
            num_videos=videos,
            minutes=minutes,
            seed=seed,
            mode=Mode(mode),
            dataset=name,
            on_video=lambda num_done: _progress(f"made {num_done} of {videos} videos"),
        )
        _progress("")
        return reading

    _write(make, data=data, videos=directory, dataset=name, as_json=json)


def _write(read: Callable[[], Reading], *, data: Path, videos: Path, dataset: str, as_json: bool) -> None:
    check_data_dir(data, videos=videos)
    _check_existing(data)
    if not encodable(dataset):
        raise UserError(f"--dataset is {quoted(dataset)}, which is not Unicode", hint="give another name")
    reading = read()
    if not reading.videos.num_rows:
        message, hint = no_video_text(reading, dataset)
        raise UserError(message, hint=hint)
    if unused_files(reading):
        # Written, it would take the place of captions that are there; their ids would never come back.
        raise FailedWork(unused_text(reading))
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        why = error.strerror or str(error)
        raise UserError(f"cannot make the data folder {data}: {why}", hint="give another one with --data") from error
    with writing(data):
        written = write_manifest(
            data,
            dataset,
            reading.videos,
            reading.captions,
            reading.rejected,
            num_captions_lost=reading.num_captions_lost,
        )
        few = first_rejected(rejected_of(read_rejected(data), dataset)) if written.num_rejected else []
    if as_json:
        print(json_module.dumps(written_values(written, few=few), indent=1, sort_keys=True))
    else:
        print(written_text(written, few=few))


def _check_existing(data: Path) -> None:
    """Complains about a manifest of another format before the work rather than after it."""
    if (data / "manifest" / "manifest.json").exists():
        with suppress(DamagedManifest):  # the write repairs it, or says why it cannot
            read_manifest(data)


def _progress(text: str) -> None:
    """Shows a line that the next one replaces; nothing when standard error is no terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
