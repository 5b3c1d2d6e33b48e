"""`prep manifest KIND`: what is wanted. Each command reads one kind of data set into the manifest."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from manifests.adapters.reading import Reading
from manifests.errors import UserError
from manifests.place import check_data_dir
from manifests.store import Written, read_manifest, write_manifest
from manifests.table_files import DamagedManifest
from prep.data_folder import writing

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

    The table has the columns video and text, and where wanted begin_s, end_s, source and split.

    Example: prep manifest folder VIDEOS --captions captions.csv

    Parameters
    ----------
    directory
        Folder of the videos.
    """
    from manifests.adapters.folder import read_folder

    name = dataset or "folder"
    _write(
        lambda: read_folder(directory, captions=captions, dataset=name, skip=data),
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
        CSVs with the columns label, youtube_id, time_start, time_end, split; or lists of lines `path label`.
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
    reading = read()
    if not reading.videos.num_rows:
        raise UserError(
            f"no usable video for the data set {dataset}{_reasons_in(reading)}",
            hint="do the names of the files fit the annotations? The manifest is left as it was",
        )
    data.mkdir(parents=True, exist_ok=True)
    with writing(data):
        written = write_manifest(
            data,
            dataset,
            reading.videos,
            reading.captions,
            reading.rejected,
            num_captions_lost=reading.num_captions_lost,
        )
    sys.stdout.write((_as_json(written) if as_json else _as_text(written)) + "\n")


def _check_existing(data: Path) -> None:
    """Complains about a manifest of another format before the work rather than after it."""
    if (data / "manifest" / "manifest.json").exists():
        with suppress(DamagedManifest):  # the write repairs it, or says why it cannot
            read_manifest(data)


def _reasons_in(reading: Reading) -> str:
    counts = reading.rejected["reason"].value_counts().to_pylist()
    return "".join(f"; {entry['values']}: {entry['counts']}" for entry in counts)


def _as_text(written: Written) -> str:
    changes = f"{written.num_videos_added} new"
    if written.num_videos_removed:
        changes += f", {written.num_videos_removed} gone"
    lines = [
        f"{written.dataset}: {written.num_videos} videos ({changes}), "
        f"{written.num_captions} captions ({written.num_captions_added} new)"
    ]
    if written.num_rejected:
        total = sum(written.num_rejected.values())
        lines.append(f"rejected: {total} rows, and {written.num_captions_lost} captions of videos that cannot be had")
        lines += [f"  {reason}: {count}" for reason, count in sorted(written.num_rejected.items())]
        lines.append(f"listed in {written.folder / 'rejected.parquet'}")
    lines.append(f"manifest: {written.folder}")
    return "\n".join(lines)


def _as_json(written: Written) -> str:
    return json.dumps(
        {
            "dataset": written.dataset,
            "num_videos": written.num_videos,
            "num_videos_added": written.num_videos_added,
            "num_videos_removed": written.num_videos_removed,
            "num_captions": written.num_captions,
            "num_captions_added": written.num_captions_added,
            "num_captions_lost": written.num_captions_lost,
            "num_rejected": written.num_rejected,
            "manifest": os.fspath(written.folder),
        },
        indent=1,
        sort_keys=True,
    )


def _progress(text: str) -> None:
    """Shows a line that the next one replaces; nothing when standard error is no terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
