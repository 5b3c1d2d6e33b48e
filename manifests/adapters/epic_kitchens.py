"""EPIC-KITCHENS-100 (Damen et al. 2022): narrated actions with times, verb and noun classes.

The annotation files are the published CSVs (EPIC_100_train.csv, EPIC_100_validation.csv, the retrieval ones).
Only time columns are used; frame columns refer to another frame extraction. The split is derived from the file name.
The videos are `<video_id>.<extension>`, anywhere under the folder.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from manifests.adapters.reading import Reading, ReadingBuilder
from manifests.adapters.reasons import Reason
from manifests.adapters.splits import split_in_file_name
from manifests.adapters.tables import Row, read_csv
from manifests.adapters.wanted import WantedVideos, begin_reading
from manifests.storage.urls import Place

SOURCE = "narrator"
LABELS = {"label_verb": pa.int32(), "label_noun": pa.int32(), "label_nouns": pa.list_(pa.int32())}
_COLUMNS = ["video_id", "start_timestamp", "stop_timestamp", "narration", "verb_class", "noun_class"]
_TIMESTAMP = re.compile(r"(\d{1,9}):([0-5]?\d):([0-5]?\d(?:\.\d+)?)")
_INTEGER_LIST = re.compile(r"\[\s*(?:\d{1,9}\s*(?:,\s*\d{1,9}\s*)*)?\]")


def read_epic_kitchens(
    directory: Place, *, annotations: Sequence[Path], dataset: str = "epic-kitchens", skip: Place | None = None
) -> Reading:
    """Read EPIC-KITCHENS-100.

    Raises:
        UserError: no videos are found, or an annotation file cannot be read or lacks a column.
    """
    builder, wanted = begin_reading(dataset, directory, skip=skip, labels=LABELS)
    for path in annotations:
        builder.begin_annotations(path)
        split = split_in_file_name(path.name)
        for row in read_csv(path, required=_COLUMNS):
            _add_row(builder, wanted, row, path=path, split=split)
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


def _add_row(builder: ReadingBuilder, wanted: WantedVideos, row: Row, *, path: Path, split: str) -> None:
    cells = row.values
    if row.fault is not None:
        builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row.number, detail=row.fault)
        return
    video = wanted.number(cells["video_id"], split=split, file=path, row=row.number)
    if video is None:
        return
    reason = Reason.BAD_TIME
    try:
        begin_s = seconds_of_timestamp(cells["start_timestamp"])
        end_s = seconds_of_timestamp(cells["stop_timestamp"])
        reason = Reason.BAD_LABEL
        labels = _labels(cells)
    except ValueError as error:
        builder.reject(reason, file=str(path), row=row.number, source_id=cells["video_id"], detail=str(error))
        return
    builder.add_caption(
        video,
        text=cells["narration"],
        begin_s=begin_s,
        end_s=end_s,
        source=SOURCE,
        file=path,
        row=row.number,
        labels=labels,
    )


def _labels(cells: dict[str, Any]) -> dict[str, Any]:
    nouns = cells.get("all_noun_classes", f"[{cells['noun_class']}]")
    if not _INTEGER_LIST.fullmatch(nouns.strip()):
        raise ValueError(f"all_noun_classes is {nouns!r}, expected a list of numbers")
    return {
        "label_verb": _class_number(cells, "verb_class"),
        "label_noun": _class_number(cells, "noun_class"),
        "label_nouns": [int(digits) for digits in re.findall(r"\d+", nouns)],
    }


def _class_number(cells: dict[str, Any], column: str) -> int:
    if not re.fullmatch(r"\s*\d{1,9}\s*", cells[column]):
        raise ValueError(f"{column} is {cells[column]!r}, expected a number")
    return int(cells[column])
