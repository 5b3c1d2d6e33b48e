"""Read datasets of longer videos with timed captions: ActivityNet Captions, DiDeMo and EPIC-KITCHENS-100.

*ActivityNet Captions* (Krishna et al. 2017) contains a paragraph of timed sentences for each video. train.json,
val_1.json and val_2.json contain {"v_<id>": {"duration": 82.73, "timestamps": [[0.83, 19.86], ...], "sentences":
["...", ...]}, ...}. Each sentence becomes a caption with its times. Caption IDs follow the order of the file, so that
the paragraph can be reassembled. The videos are files `v_<id>.<extension>` or `<id>.<extension>`. The split is
derived from the file name.

val_1.json and val_2.json contain captions of the same videos by different annotators. Their sources are `human` and
`human-2`. A sentence whose interval begins after the end of the video is rejected. A sentence whose interval only ends
after the end of the video is kept unchanged.

*DiDeMo* (Hendricks et al. 2017) has captions of moments in the first 30 s of videos. train_data.json, val_data.json and
test_data.json are lists of {"video": "<name>.mov", "description": "...", "num_segments": 6, "times": [[1, 1], [1, 2],
...]}. A video has five or six segments of 5 s. Each item of `times` is the first and the last segment of the moment
according to one annotator. Each moment has at least four annotators. The caption gets the interval that was marked most
often. If several intervals are equally frequent, it gets the first one. An interval that includes the last segment
ends with this segment, or with the video if the video is shorter.

Some videos (3 % of val and test) are annotated under two names that differ only in the extension. Both names refer to
the same video, so its ID is the name without the extension. The file is `<name>.mov`, `<name>.mov.mp4` (from the
official download script), or `<name>` with any extension. Text files (train_list.txt, val_list.txt, test_list.txt from
retrieval code) list the videos to read, by name with the extension. Without such a list, all videos of a split are
read. The split is derived from the file name.

*EPIC-KITCHENS-100* (Damen et al. 2022) has narrated actions with start and end times, a verb class and noun classes.
The annotation files are the published CSV files: EPIC_100_train.csv, EPIC_100_validation.csv, and the retrieval files.
The file name must contain the split. Times are read from the timestamp columns, because the frame columns refer to a
different extraction of frames. The videos are files `<video_id>.<extension>`, in any subfolder.

The annotation files overlap: the retrieval files repeat narrations of the other files with the same narration_id. A
repeated narration is read only once. A different narration with the same narration_id is rejected.
"""

import re
from collections import Counter
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa

from clipmill.manifests.adapters.annotations import (
    Reason,
    Row,
    parse_seconds,
    read_csv,
    split_in_file_name,
    split_of_list,
    text_lines,
)
from clipmill.manifests.adapters.json_stream import array_items, object_items
from clipmill.manifests.adapters.reading import AnnotatedVideos, Origin, Reading, ReadingBuilder, begin_reading
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.manifests.storage.urls import Location

SOURCE = "human"
SECOND_SOURCE = "human-2"


def read_activitynet(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "activitynet", skip: Location | None = None
) -> Reading:
    """Read ActivityNet Captions.

    Raises:
        UserError: No videos are found, or an annotation file cannot be read.
    """
    builder, videos = begin_reading(dataset, directory, skip=skip)
    for path in annotations:
        builder.begin_annotations(path)
        for row, (source_id, entry) in enumerate(object_items(path)):
            _add_video(builder, videos, source_id, entry, path=path, row=row)
    return builder.build()


def _add_video(
    builder: ReadingBuilder, videos: AnnotatedVideos, source_id: str, entry: Any, *, path: Path, row: int
) -> None:
    sentences, timestamps = (
        (entry.get("sentences"), entry.get("timestamps")) if isinstance(entry, dict) else (None, None)
    )
    if not isinstance(sentences, list) or not isinstance(timestamps, list) or len(sentences) != len(timestamps):
        detail = "not an object with the lists timestamps and sentences, of equal length"
        builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, source_id=source_id, detail=detail)
        return
    video = videos.index_of(
        source_id,
        split=split_in_file_name(path.name),
        file=path,
        row=row,
        num_captions=len(sentences),
        file_names=(source_id, source_id.removeprefix("v_")),
    )
    if video is None:
        return
    source = SECOND_SOURCE if path.stem.endswith("_2") else SOURCE
    origin = Origin(path, source, row)
    for text, interval in zip(sentences, timestamps, strict=True):
        try:
            duration_s = parse_seconds(entry.get("duration"), default=inf)
            if not isinstance(interval, list) or len(interval) != 2 or any(time in (None, "") for time in interval):
                raise ValueError(f"its times are {quote_value(interval)}, not a start and an end")
            begin_s, end_s = (parse_seconds(time, default=inf) for time in interval)
            if begin_s >= duration_s:
                raise ValueError(f"begins at {begin_s} s, after the end of the video at {duration_s} s")
        except ValueError as error:
            builder.reject(Reason.BAD_TIME, file=str(path), row=row, source_id=source_id, detail=str(error))
        else:
            builder.add_caption(video, text, origin, begin_s=begin_s, end_s=end_s)


SEGMENT_S = 5.0
_MAX_SEGMENTS = 6


def read_didemo(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "didemo", skip: Location | None = None
) -> Reading:
    """Read DiDeMo.

    Raises:
        UserError: No videos are found, or an annotation file cannot be read.
    """
    builder, videos = begin_reading(dataset, directory, skip=skip)
    lists: dict[str, dict[str, Path]] = {}
    for path in annotations:
        builder.begin_annotations(path)
        if path.suffix.lower() == ".txt":
            names = {name: path for line in text_lines(path) if (name := line.strip())}
            lists.setdefault(split_in_file_name(path.name), {}).update(names)
    for path in annotations:
        if path.suffix.lower() == ".txt":
            continue
        split = split_in_file_name(path.name)
        for row, entry in enumerate(array_items(path)):
            list_of_name = lists.get(split)
            if not isinstance(entry, dict) or not isinstance(file_name := entry.get("video"), str):
                detail = f"not an object with a video: {quote_value(entry)}"
                builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
                continue
            if list_of_name is not None and file_name not in list_of_name:
                continue
            source_id = file_name.rpartition(".")[0] or file_name
            video = videos.index_of(source_id, split=split, file=path, row=row, file_names=(file_name, source_id))
            if video is None:
                continue
            try:
                begin_s, end_s = moment_of(entry.get("times"), num_segments=entry.get("num_segments", _MAX_SEGMENTS))
            except ValueError as error:
                builder.reject(Reason.BAD_TIME, file=str(path), row=row, source_id=file_name, detail=str(error))
                continue
            if list_of_name is not None:
                builder.count_row(list_of_name[file_name])
            origin = Origin(path, SOURCE, row, field="description")
            builder.add_caption(video, entry.get("description"), origin, begin_s=begin_s, end_s=end_s)
    return builder.build()


def moment_of(times: object, *, num_segments: object = _MAX_SEGMENTS) -> tuple[float, float]:
    """Return the start and end in seconds of the interval that annotators marked most often.

    Args:
        times: List of pairs of the first and the last segment.
        num_segments: Number of segments of the video.

    Raises:
        ValueError: `times` is not a list of such pairs, or `num_segments` is not a number from 1 to 6.
    """
    if not isinstance(num_segments, int) or not 1 <= num_segments <= _MAX_SEGMENTS:
        raise ValueError(f"num_segments is {quote_value(num_segments)}, not a number from 1 to {_MAX_SEGMENTS}")
    are_intervals = isinstance(times, list) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(number) is int for number in pair)
        and 0 <= pair[0] <= pair[1] < num_segments
        for pair in times
    )
    if not isinstance(times, list) or not times or not are_intervals:
        raise ValueError(f"times are {quote_value(times)}, not pairs of segments from 0 to {num_segments - 1}")
    # If several pairs are equally frequent, most_common returns the first of them in the list.
    ((first, last), _) = Counter((first, last) for first, last in times).most_common(1)[0]
    return first * SEGMENT_S, (last + 1) * SEGMENT_S


NARRATOR_SOURCE = "narrator"
EPIC_LABELS = {"label_verb": pa.int32(), "label_noun": pa.int32(), "label_nouns": pa.list_(pa.int32())}
_COLUMNS = ["video_id", "start_timestamp", "stop_timestamp", "narration", "verb_class", "noun_class"]
_CONTENT = [*_COLUMNS, "all_noun_classes"]
_TIMESTAMP = re.compile(r"(\d{1,9}):([0-5]?\d):([0-5]?\d(?:\.\d+)?)")
_INTEGER_LIST = re.compile(r"\[\s*(?:\d{1,9}\s*(?:,\s*\d{1,9}\s*)*)?\]")


def read_epic_kitchens(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "epic-kitchens", skip: Location | None = None
) -> Reading:
    """Read EPIC-KITCHENS-100.

    Raises:
        UserError: No videos are found, or an annotation file cannot be read, is a pickle, lacks a column, belongs to
            EPIC-KITCHENS-55, or has no split in its name.
    """
    builder, videos = begin_reading(dataset, directory, skip=skip, labels=EPIC_LABELS)
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
        builder.note(f"{count_noun(narrations.num_repeated, 'repeated narration')} {verb} read only once")
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
    """Narrations that have been read, by narration_id. All narrations of a file without this column are new."""

    def __init__(self, builder: ReadingBuilder) -> None:
        self._builder = builder
        self._first_narrations: dict[str, tuple[tuple[str | None, ...], str, Path]] = {}
        self.num_repeated = 0

    def is_new(self, row: Row, *, path: Path, split: str) -> bool:
        """Return True if a row must be added to the manifest.

        A row that repeats a narration is counted. A row with the narration_id of a different narration is rejected. If
        the same narration has different splits in two annotation files, the second row counts as new, and the split of
        the video decides which of the two rows is rejected.
        """
        narration_id = row.values.get("narration_id")
        if not narration_id:
            return True
        content = tuple(row.values.get(name) for name in _CONTENT)
        first_content, first_split, first_path = self._first_narrations.setdefault(narration_id, (content, split, path))
        if first_content is content:
            return True
        if first_content != content:
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
    origin = Origin(path, NARRATOR_SOURCE, row.number)
    builder.add_caption(video, cells["narration"], origin, begin_s=begin_s, end_s=end_s, labels=labels)


def _class_number(cells: dict[str, Any], column: str) -> int:
    # If a column of integers has empty cells, pandas writes integers in the form 3.0.
    match = re.fullmatch(r"\s*(\d{1,9})(?:\.0+)?\s*", cells[column])
    if match is None:
        raise ValueError(f"{column} is {cells[column]!r}, expected an integer of 0 or more")
    return int(match[1])
