"""Clips with one class each: Kinetics (Kay et al. 2017) and similar lists, and Something-Something v2.

*Kinetics.* A list is the published CSV file with the columns label, youtube_id, time_start, time_end, split. Its videos
are `<youtube_id>_<start as 6 digits>_<end as 6 digits>.<extension>` (trimmed: the label applies to the complete file)
or `<youtube_id>.<extension>` (untrimmed: the label applies from time_start to time_end). A list without a header has
lines such as

    path label               or `path,label`: VideoMAE's lists
    path num_frames label    AVION's lists; num_frames is ignored, because it refers to another copy of the video
    path 0 -1                VideoMAE V2's lists for pre-training: a video without a label
    path start num_frames    in a list with lines of the previous form: a folder of extracted frames; it is rejected

In such a list, the split is derived from the file name of the list. A path may contain spaces and commas, or be quoted:
the reader uses the first interpretation of a line for which the file exists. In published lists, paths begin with a
placeholder folder, `your_path/` (VideoMAE V2) or `dataset_root/` (AVION). The reader removes the placeholder, and the
folders after it that do not exist. The class is also the text of the caption. It is read from the list unchanged, as a
name or a number, so a dataset should not mix lists with numbers and lists with names.

*Something-Something v2* (Goyal et al. 2017) has clips of 174 actions with objects, one action per clip. train.json and
validation.json are lists of {"id": "78687", "label": "holding a cup next to a box", "template": "Holding [something]
next to [something]", "placeholders": ["a cup", "a box"]}. The file names may have the prefix `something-something-v2-`.
The caption is `label`. The class is the template without its brackets, as in labels.json. The videos are files
`<id>.webm`. The split is derived from the file name. test.json lists videos without labels. Their classes are in
test-answers.csv, in lines of the form `<id>;<class>`; each class is also the caption, with the source `class`. If
labels.json is passed, classes that are not among its keys are rejected.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from clipmill.manifests.adapters.annotations import (
    Reason,
    Row,
    find_split,
    parse_seconds,
    read_csv,
    split_in_file_name,
    text_lines,
)
from clipmill.manifests.adapters.json_stream import array_items, object_items
from clipmill.manifests.adapters.reading import (
    AnnotatedVideos,
    Origin,
    Reading,
    ReadingBuilder,
    begin_reading,
    is_encodable,
)
from clipmill.manifests.adapters.video_files import VIDEO_SUFFIXES, Ambiguous, VideoLookup
from clipmill.manifests.formatting import quote_value
from clipmill.manifests.storage.urls import Location

CLASS_SOURCE = "class"
TEMPLATE_SOURCE = "human"
LABELS = {"label_class": pa.string()}
_COLUMNS = ["label", "youtube_id"]
_TWO_NUMBERS = re.compile(r"(?P<count>\d{1,9})[ ,\t]+(?P<label>-?\d{1,9})")
_NUMBERS_LAST = re.compile(rf"(?P<name>.*[^ ,\t])[ ,\t]+(?P<numbers>{_TWO_NUMBERS.pattern})")
_NO_LABEL = "-1"
# Placeholder folders at the start of the paths in the published lists of VideoMAE V2 and AVION.
_PLACEHOLDERS = ("your_path/", "dataset_root/")


@dataclass(frozen=True)
class _Line:
    """One interpretation of a line of a plain list; `label` is None for a video without a label."""

    name: str
    label: str | None
    fault: str | None = None


def read_kinetics(
    lists: Sequence[Path], *, videos: Location | None = None, dataset: str = "kinetics", skip: Location | None = None
) -> Reading:
    """Read lists of clips. The videos are searched for under `videos`, by default the folder of the first list.

    Raises:
        UserError: No videos are found, or a list cannot be read.
    """
    builder = ReadingBuilder(dataset, labels=LABELS)
    files = builder.find_videos(lists[0].parent if videos is None else videos, skip=skip)
    lookup = VideoLookup(files)
    clips = AnnotatedVideos(builder, lookup, files)
    for path in lists:
        builder.begin_annotations(path)
        first_line = next(text_lines(path), "")
        if all(name in first_line.strip().split(",") for name in _COLUMNS):
            for row in read_csv(path, required=_COLUMNS):
                _add_row(builder, clips, row, lookup=lookup, path=path)
        else:
            _add_plain_list(builder, clips, lookup=lookup, path=path)
    return builder.build()


def _add_row(builder: ReadingBuilder, clips: AnnotatedVideos, row: Row, *, lookup: VideoLookup, path: Path) -> None:
    cells = row.values
    if row.fault is not None:
        builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row.number, detail=row.fault)
        return
    youtube_id = cells["youtube_id"]
    split_cell = cells.get("split") or ""
    split = find_split(split_cell) if split_cell.strip() else split_in_file_name(path.name)
    if split is None:
        detail = f"split is {split_cell!r}, expected train, val or test"
        builder.reject(Reason.BAD_SPLIT, file=str(path), row=row.number, source_id=youtube_id, detail=detail)
        return
    try:
        begin_s = parse_seconds(cells.get("time_start"), default=0.0)
        end_s = parse_seconds(cells.get("time_end"), default=inf)
        source_id, trimmed = _file_id(youtube_id, begin_s=begin_s, end_s=end_s, lookup=lookup)
    except ValueError as error:
        builder.reject(Reason.BAD_TIME, file=str(path), row=row.number, source_id=youtube_id, detail=str(error))
        return
    if trimmed:
        begin_s, end_s = 0.0, inf
    video = clips.index_of(source_id, split=split, file=path, row=row.number)
    if video is not None:
        _add_class(builder, video, cells["label"], path=path, row=row.number, begin_s=begin_s, end_s=end_s)


def _file_id(youtube_id: str, *, begin_s: float, end_s: float, lookup: VideoLookup) -> tuple[str, bool]:
    """Return the name of a clip's file, and True if the file is trimmed to the clip."""
    if not youtube_id.strip() or end_s == inf:
        return youtube_id, False
    if not (isfinite(begin_s) and isfinite(end_s)):
        raise ValueError(f"time_start is {begin_s}, time_end is {end_s}, expected finite numbers")
    trimmed_id = f"{youtube_id}_{round(begin_s):06d}_{round(end_s):06d}"
    try:
        untrimmed = lookup.find(trimmed_id) is None and lookup.find(youtube_id) is not None
    except Ambiguous:
        untrimmed = False
    return (youtube_id, False) if untrimmed else (trimmed_id, True)


def _add_plain_list(builder: ReadingBuilder, clips: AnnotatedVideos, *, lookup: VideoLookup, path: Path) -> None:
    split = split_in_file_name(path.name)
    is_pretraining = any(line.rstrip().endswith(f" {_NO_LABEL}") for line in text_lines(path))
    for row, line in enumerate(line.strip() for line in text_lines(path)):
        if not line:
            continue
        # Possible splits of the line into path and label, the most likely first.
        pairs = []
        if line.startswith('"'):
            pairs.append(line[1:].partition('"')[::2])
        # A label may contain spaces if a comma precedes it, and rarely contains a comma.
        pairs += [line.rpartition(separator)[::2] for separator in (",", " ", "\t") if separator in line]
        if (numbers := _NUMBERS_LAST.fullmatch(line)) is not None:
            pairs.append((numbers["name"], numbers["numbers"]))
        pairs += [line.partition(",")[::2]] if line.count(",") > 1 else []
        stripped = [(name.strip().strip('"'), label.strip(" ,\t").strip('"')) for name, label in pairs]
        readings = [
            _read(_without_placeholder(name, lookup), label, is_pretraining=is_pretraining)
            for name, label in stripped
            if name and label
        ]
        if not readings:
            detail = f"expected `path label` or `path,label`, found {line:.80}"
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
            continue
        # Use the interpretation whose file exists; otherwise the first interpretation with a video file's name.
        existing = (reading for reading in readings if _exists(reading.name, lookup))
        plausible = (reading for reading in readings if PurePosixPath(reading.name).suffix.lower() in VIDEO_SUFFIXES)
        reading = next(existing, None) or next(plausible, readings[0])
        if reading.fault is not None:
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, source_id=reading.name, detail=reading.fault)
            continue
        has_label = reading.label is not None
        video = clips.index_of(reading.name, split=split, file=path, row=row, num_captions=int(has_label))
        if video is None:
            continue
        if reading.label is None:
            builder.count_row(path)
        else:
            _add_class(builder, video, reading.label, path=path, row=row, begin_s=0.0, end_s=inf)


def _without_placeholder(name: str, lookup: VideoLookup) -> str:
    prefix = next((prefix for prefix in _PLACEHOLDERS if name.startswith(prefix)), None)
    if prefix is None or _exists(name, lookup):
        return name
    parts = name.removeprefix(prefix).split("/")
    shortened = ["/".join(parts[first:]) for first in range(len(parts))]
    return next((path for path in shortened if _exists(path, lookup)), shortened[0])


def _read(name: str, label: str, *, is_pretraining: bool) -> _Line:
    """Parse the rest of a line after the path: a class, or two numbers."""
    numbers = _TWO_NUMBERS.fullmatch(label)
    if numbers is None:
        return _Line(name, label)
    count, label = int(numbers["count"]), numbers["label"]
    if label == _NO_LABEL:
        return _Line(name, None)
    if label.startswith("-"):
        return _Line(name, None, f"label is {label}, expected a class, or -1 for no label")
    if count < 2 or is_pretraining:
        # No video has 0 or 1 frames. Extracted frames are numbered from 0 or 1.
        fault = f"a folder of extracted frames (`folder start total`: {count} {label}), expected a video file"
        return _Line(name, None, fault)
    return _Line(name, label)


def _exists(name: str, lookup: VideoLookup) -> bool:
    try:
        return lookup.find(name) is not None
    except Ambiguous:
        return True


def _add_class(
    builder: ReadingBuilder, video: int, label: str, *, path: Path, row: int, begin_s: float, end_s: float
) -> None:
    labels = {"label_class": label}
    builder.add_caption(video, label, Origin(path, CLASS_SOURCE, row), begin_s=begin_s, end_s=end_s, labels=labels)


_WITHOUT_BRACKETS = str.maketrans("", "", "[]")


def read_something_something(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "ssv2", skip: Location | None = None
) -> Reading:
    """Read Something-Something v2.

    Raises:
        UserError: No videos are found, or an annotation file cannot be read.
    """
    builder, clips = begin_reading(dataset, directory, skip=skip, labels=LABELS)
    tables = [path for path in annotations if path.stem.lower().endswith("labels")]
    classes = {name for path in tables for name, _ in object_items(path)} if tables else None
    for path in annotations:
        if path in tables:
            continue
        builder.begin_annotations(path)
        split = split_in_file_name(path.name)
        for row, entry in enumerate(_template_entries(path)):
            if not isinstance(entry, dict):
                builder.reject(
                    Reason.MALFORMED_ROW, file=str(path), row=row, detail=f"not an object: {quote_value(entry)}"
                )
                continue
            is_labelled = "label" in entry or "template" in entry
            video = clips.index_of(entry.get("id"), split=split, file=path, row=row, num_captions=int(is_labelled))
            if video is None:
                continue
            if not is_labelled:
                builder.count_row(path)
                continue
            template = entry.get("template")
            name = template.translate(_WITHOUT_BRACKETS).strip() if isinstance(template, str) else ""
            if not name or not is_encodable(name) or (classes is not None and name not in classes):
                detail = f"template {quote_value(template)} is not " + (
                    "a class" if classes is None else "a class of the labels file"
                )
                builder.reject(Reason.BAD_LABEL, file=str(path), row=row, source_id=entry["id"], detail=detail)
                continue
            source = CLASS_SOURCE if path.suffix.lower() == ".csv" else TEMPLATE_SOURCE
            labels = {"label_class": name}
            builder.add_caption(video, entry.get("label"), Origin(path, source, row), labels=labels)
    return builder.build()


def _template_entries(path: Path) -> Iterator[Any]:
    if path.suffix.lower() != ".csv":
        yield from array_items(path)
        return
    for line in text_lines(path):
        if line.strip():
            source_id, _, name = line.strip().partition(";")
            yield {"id": source_id, "label": name, "template": name}
