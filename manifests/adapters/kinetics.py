"""Kinetics (Kay et al. 2017) and lists like it: one class a clip.

A list is the published CSV with the columns label, youtube_id, time_start, time_end, split, whose videos are
`<youtube_id>_<start as 6 digits>_<end as 6 digits>.<ending>` (trimmed: the label holds for the whole file) or
`<youtube_id>.<ending>` (untrimmed: it holds from time_start to time_end). Or it has no header, and a line is
`path label` or `path,label`; the split is then the one that the list's file name speaks of. A path may have spaces
and commas, or stand in quotes: of the ways to read a line the first counts whose file there is. The class is the text
of the caption too.
"""

from collections.abc import Sequence
from math import inf
from pathlib import Path

import pyarrow as pa

from manifests.adapters.reading import Reading, ReadingBuilder
from manifests.adapters.reasons import Reason
from manifests.adapters.splits import split_in_file_name, split_named
from manifests.adapters.tables import Row, read_csv, seconds, text_lines
from manifests.adapters.video_files import Ambiguous, VideoLookup, find_video_files
from manifests.adapters.wanted import WantedVideos

SOURCE = "class"
LABELS = {"label_class": pa.string()}
_COLUMNS = ["label", "youtube_id"]


def read_kinetics(
    lists: Sequence[Path], *, videos: Path | None = None, dataset: str = "kinetics", skip: Path | None = None
) -> Reading:
    """Reads lists of clips; the videos are under `videos`, or under the folder of the first list.

    Raises:
        UserError: there are no videos, or a list cannot be read.
    """
    builder = ReadingBuilder(dataset, labels=LABELS)
    lookup = VideoLookup(find_video_files(lists[0].parent if videos is None else videos, skip=skip))
    wanted = WantedVideos(builder, lookup)
    for path in lists:
        first_line = next(text_lines(path), "")
        if all(name in first_line.strip().split(",") for name in _COLUMNS):
            for row in read_csv(path, required=_COLUMNS):
                _add_row(builder, wanted, row, lookup=lookup, path=path)
        else:
            _add_plain_list(builder, wanted, lookup=lookup, path=path)
    return builder.build()


def _add_row(builder: ReadingBuilder, wanted: WantedVideos, row: Row, *, lookup: VideoLookup, path: Path) -> None:
    cells = row.values
    if row.fault is not None:
        builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row.number, detail=row.fault)
        return
    youtube_id = cells["youtube_id"]
    split_cell = cells.get("split") or ""
    split = split_named(split_cell) if split_cell.strip() else split_in_file_name(path.name)
    if split is None:
        detail = f"split {split_cell!r} is not train, val or test"
        builder.reject(Reason.BAD_SPLIT, file=str(path), row=row.number, source_id=youtube_id, detail=detail)
        return
    try:
        begin_s = seconds(cells.get("time_start"), default=0.0)
        end_s = seconds(cells.get("time_end"), default=inf)
        source_id, trimmed = _file_id(youtube_id, begin_s=begin_s, end_s=end_s, lookup=lookup)
    except ValueError as error:
        builder.reject(Reason.BAD_TIME, file=str(path), row=row.number, source_id=youtube_id, detail=str(error))
        return
    if trimmed:
        begin_s, end_s = 0.0, inf
    video = wanted.number(source_id, split=split, file=path, row=row.number)
    if video is not None:
        _add_class(builder, video, cells["label"], path=path, row=row.number, begin_s=begin_s, end_s=end_s)


def _file_id(youtube_id: str, *, begin_s: float, end_s: float, lookup: VideoLookup) -> tuple[str, bool]:
    """Name of a clip's file, and whether the file is the clip alone."""
    if not youtube_id.strip() or end_s == inf:
        return youtube_id, False
    trimmed_id = f"{youtube_id}_{round(begin_s):06d}_{round(end_s):06d}"
    try:
        untrimmed = lookup.find(trimmed_id) is None and lookup.find(youtube_id) is not None
    except Ambiguous:
        untrimmed = False
    return (youtube_id, False) if untrimmed else (trimmed_id, True)


def _add_plain_list(builder: ReadingBuilder, wanted: WantedVideos, *, lookup: VideoLookup, path: Path) -> None:
    split = split_in_file_name(path.name)
    for row, line in enumerate(line.strip() for line in text_lines(path)):
        if not line:
            continue
        readings = _readings(line)
        if not readings:
            detail = f"not of the form `path label` or `path,label`: {line:.80}"
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
            continue
        name, label = next((one for one in readings if _is_there(one[0], lookup)), readings[0])
        video = wanted.number(name, split=split, file=path, row=row)
        if video is not None:
            _add_class(builder, video, label, path=path, row=row, begin_s=0.0, end_s=inf)


def _readings(line: str) -> list[tuple[str, str]]:
    """The ways to take a line apart into path and label, the likeliest first."""
    found = []
    if line.startswith('"'):
        found.append(line[1:].partition('"')[::2])
    # A label may have spaces where a comma stands before it, and seldom a comma.
    found += [line.rpartition(separator)[::2] for separator in (",", " ", "\t") if separator in line]
    found += [line.partition(",")[::2]] if line.count(",") > 1 else []
    stripped = [(name.strip(), label.strip(" ,\t").strip('"')) for name, label in found]
    return [(name, label) for name, label in stripped if name and label]


def _is_there(name: str, lookup: VideoLookup) -> bool:
    try:
        return lookup.find(name) is not None
    except Ambiguous:
        return True


def _add_class(
    builder: ReadingBuilder, video: int, label: str, *, path: Path, row: int, begin_s: float, end_s: float
) -> None:
    builder.add_caption(
        video,
        text=label,
        begin_s=begin_s,
        end_s=end_s,
        source=SOURCE,
        file=path,
        row=row,
        labels={"label_class": label},
    )
