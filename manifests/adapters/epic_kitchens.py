"""Adapter that reads the annotations of EPIC-KITCHENS-100 (Damen et al. 2022) into a manifest.

Each annotation is a narrated action with its start and end time, its verb class and its noun classes.

The annotation files are the published CSV files: EPIC_100_train.csv, EPIC_100_validation.csv, and the retrieval files.
The name of an annotation file must contain the split. Times are read from the timestamp columns, because the frame
columns refer to a different frame extraction. The videos are `<video_id>.<extension>`, anywhere under the folder.

The annotation files overlap: the retrieval files repeat narrations from the other files with the same narration_id. A
repeated narration is read only once. A different narration with the same narration_id is rejected.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from clipmill.manifests.adapters.annotations import Reason, Row, read_csv, split_of_list
from clipmill.manifests.adapters.reading import AnnotatedVideos, Origin, Reading, ReadingBuilder, begin_reading
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.manifests.storage.urls import Location

SOURCE = "narrator"
LABELS = {"label_verb": pa.int32(), "label_noun": pa.int32(), "label_nouns": pa.list_(pa.int32())}
_COLUMNS = ["video_id", "start_timestamp", "stop_timestamp", "narration", "verb_class", "noun_class"]
_CONTENT = [*_COLUMNS, "all_noun_classes"]
_TIMESTAMP = re.compile(r"(\d{1,9}):([0-5]?\d):([0-5]?\d(?:\.\d+)?)")
_INTEGER_LIST = re.compile(r"\[\s*(?:\d{1,9}\s*(?:,\s*\d{1,9}\s*)*)?\]")


def read_epic_kitchens(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "epic-kitchens", skip: Location | None = None
) -> Reading:
    """Read the videos and annotations of EPIC-KITCHENS-100.

    Args:
        directory: Folder that contains the videos.
        annotations: Paths of the annotation files.
        dataset: Name of the dataset in the manifest.
        skip: Folder under `directory` whose videos are ignored.

    Raises:
        UserError: No videos are found; or an annotation file cannot be read, is a pickle, lacks a column, belongs to
            EPIC-KITCHENS-55, or has no split in its name.
    """
    builder, videos = begin_reading(dataset, directory, skip=skip, labels=LABELS)
    narrations = _Narrations(builder)
    for path in annotations:
        builder.begin_annotations(path)
        if path.suffix.lower() in (".pkl", ".pickle"):
            raise UserError(f"{path} is a pickle", hint=f"use the CSV file with the same content, {path.stem}.csv")
        split = split_of_list(path, example="EPIC_100_train.csv")
        for row in read_csv(path, required=_COLUMNS):
            if "uid" in row.values and "narration_id" not in row.values:
                raise UserError(
                    f"{path} is a list from EPIC-KITCHENS-55, which has different classes: it has a column uid, but no "
                    "narration_id",
                    hint="use the lists from EPIC-KITCHENS-100, such as EPIC_100_train.csv",
                )
            if narrations.is_new(row, path=path, split=split):
                _add_row(builder, videos, row, path=path, split=split)
    if narrations.num_repeated:
        verb = "was" if narrations.num_repeated == 1 else "were"
        builder.note(f"{count_noun(narrations.num_repeated, 'repeated narration')} {verb} read once")
    return builder.build()


def seconds_of_timestamp(text: str) -> float:
    """Convert a timestamp such as `01:02:03.45` to seconds.

    Raises:
        ValueError: `text` is not a valid timestamp.
    """
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a time of the form HH:MM:SS.ss")
    return int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3])


class _Narrations:
    """Narrations that have been read so far, keyed by narration_id.

    An annotation file may lack this column; all of its narrations are then new.
    """

    def __init__(self, builder: ReadingBuilder) -> None:
        self._builder = builder
        self._first: dict[str, tuple[tuple[str | None, ...], str, Path]] = {}
        self.num_repeated = 0

    def is_new(self, row: Row, *, path: Path, split: str) -> bool:
        """Return True if a row should be added to the manifest.

        A row with a known narration_id is counted as repeated if its narration is the same, and rejected otherwise. If
        the same narration has different splits in two annotation files, the second row is new as well: the split of the
        video then decides which of the two rows is rejected.
        """
        narration_id = row.values.get("narration_id")
        if not narration_id:
            return True
        content = tuple(row.values.get(name) for name in _CONTENT)
        first, first_split, first_path = self._first.setdefault(narration_id, (content, split, path))
        if first is content:
            return True
        if first != content:
            detail = (
                f"narration_id {quote_value(narration_id)} has a different narration in an earlier row of "
                f"{first_path.name}"
            )
            source_id = row.values["video_id"]
            self._builder.reject(
                Reason.DUPLICATE_ID, file=str(path), row=row.number, source_id=source_id, detail=detail
            )
            return False
        if first_split != split:
            return True
        self.num_repeated += 1
        self._builder.count_row(path)
        return False


def _add_row(builder: ReadingBuilder, videos: AnnotatedVideos, row: Row, *, path: Path, split: str) -> None:
    cells = row.values
    if row.fault is not None:
        builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row.number, detail=row.fault)
        return
    video = videos.index_of(cells["video_id"], split=split, file=path, row=row.number)
    if video is None:
        return
    reason = Reason.BAD_TIME
    try:
        begin_s = seconds_of_timestamp(cells["start_timestamp"])
        end_s = seconds_of_timestamp(cells["stop_timestamp"])
        reason = Reason.BAD_LABEL
        nouns = cells.get("all_noun_classes", f"[{cells['noun_class']}]")
        if not _INTEGER_LIST.fullmatch(nouns.strip()):
            raise ValueError(f"all_noun_classes is {nouns!r}, expected a list of numbers")
        labels = {
            "label_verb": _class_number(cells, "verb_class"),
            "label_noun": _class_number(cells, "noun_class"),
            "label_nouns": [int(digits) for digits in re.findall(r"\d+", nouns)],
        }
    except ValueError as error:
        builder.reject(reason, file=str(path), row=row.number, source_id=cells["video_id"], detail=str(error))
        return
    origin = Origin(path, SOURCE, row.number)
    builder.add_caption(video, cells["narration"], origin, begin_s=begin_s, end_s=end_s, labels=labels)


def _class_number(cells: dict[str, Any], column: str) -> int:
    # If a column of integers has empty cells, pandas writes the integers in the form 3.0.
    match = re.fullmatch(r"\s*(\d{1,9})(?:\.0+)?\s*", cells[column])
    if match is None:
        raise ValueError(f"{column} is {cells[column]!r}, expected an integer from 0")
    return int(match[1])
