"""A folder of videos, with an optional table of captions (text with a header, or JSON lines; see `dialects`).

Every video file is a video; its ID is the relative path without the extension, or with it if files differ only in their
extension (`file_ids`). The table's columns are `video` (relative path, file name, or either without the extension; a
name without extension that matches several files refers to the one with this ID) and `text`, and optionally `begin_s`,
`end_s` (without times a caption applies to the whole video: 0 to +inf), `source`, `likelihood` and `split` (of the
video). The split of a video defaults to the one that a parent folder is named after, otherwise to train.

Subtitles and the output of speech recognition beside the videos are read if asked for (`beside`).
"""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from manifests.adapters.beside import SUFFIXES, add_files_beside, note_unread
from manifests.adapters.dialects import read_caption_rows
from manifests.adapters.file_ids import file_ids
from manifests.adapters.reading import Reading, ReadingBuilder
from manifests.adapters.reasons import Reason
from manifests.adapters.splits import split_named, split_of_folders
from manifests.adapters.tables import log_probability, seconds
from manifests.adapters.video_files import Ambiguous, NearestName, VideoFile, VideoLookup, composed
from manifests.quoting import quoted

DEFAULT_SOURCE = "human"


def read_folder(
    directory: Path,
    *,
    captions: Path | None = None,
    subtitles: bool = False,
    dataset: str = "folder",
    skip: Path | None = None,
    known: Mapping[str, str] | None = None,
) -> Reading:
    """Read a folder of videos.

    Args:
        subtitles: read the subtitles beside the videos.
        skip: a subfolder to ignore (the data folder).
        known: source ID -> file name of this dataset's videos in the manifest, which keep their IDs.

    Raises:
        UserError: no videos are found, or the caption table cannot be read.
    """
    builder = ReadingBuilder(dataset)
    scan = builder.scan(directory, skip=skip, beside=SUFFIXES)
    files = scan.files
    usable = [file for file in files if builder.check_file(file.source_id, file.path)]
    numbers: dict[str, int | None] = {}
    owners: dict[str, VideoFile] = {}
    for file, source_id in zip(usable, file_ids(usable, known=known or {}), strict=True):
        split = split_of_folders(file.relative)
        numbers[file.relative] = builder.add_checked_video(source_id, path=file.path, split=split)
        if source_id == file.source_id:
            owners[composed(source_id)] = file
    if captions is not None:
        _add_captions(builder, captions, files=files, owners=owners, numbers=numbers)
    if subtitles:
        add_files_beside(builder, directory.resolve(), scan.beside, numbers=numbers)
    else:
        note_unread(builder, scan.beside, numbers=numbers)
    return builder.build()


def _add_captions(
    builder: ReadingBuilder,
    table: Path,
    *,
    files: Sequence[VideoFile],
    owners: Mapping[str, VideoFile],
    numbers: dict[str, int | None],
) -> None:
    builder.begin_annotations(table)
    lookup, names = VideoLookup(list(files)), NearestName(files)
    nearest: dict[str, str] = {}  # name in the table -> what to say
    splits_given: dict[int, str] = {}
    for row in read_caption_rows(table, note=builder.note):
        name = row.values.get("video")
        if row.fault is not None:
            builder.reject(Reason.MALFORMED_ROW, file=str(table), row=row.number, detail=row.fault)
            continue
        if not isinstance(name, str) or not name.strip():
            builder.reject(Reason.EMPTY_ID, file=str(table), row=row.number, detail="the row names no video")
            continue
        try:
            file = _find(name, lookup=lookup, owners=owners)
            begin_s = seconds(row.values.get("begin_s"), default=0.0)
            end_s = seconds(row.values.get("end_s"), default=inf)
        except Ambiguous as error:
            builder.reject(Reason.AMBIGUOUS_VIDEO, file=str(table), row=row.number, source_id=name, detail=str(error))
            continue
        except ValueError as error:
            builder.reject(Reason.BAD_TIME, file=str(table), row=row.number, source_id=name, detail=str(error))
            continue
        try:
            likelihood = log_probability(row.values.get("likelihood"))
        except ValueError as error:
            detail = f"likelihood is {error}"
            builder.reject(Reason.BAD_LIKELIHOOD, file=str(table), row=row.number, source_id=name, detail=detail)
            continue
        if file is None:
            if name not in nearest:
                found = names.find(name)
                nearest[name] = "" if found is None else f", the nearest is {found}"
            builder.lose_captions(name, file=table, why=f"no matching video file{nearest[name]}")
            continue
        video = numbers.get(file.relative)
        if video is None:
            builder.lose_captions(name, file=table, why="the video was rejected")
            continue
        source = row.values.get("source") or DEFAULT_SOURCE
        if not isinstance(source, str):
            detail = f"source is {quoted(source)}, expected a string"
            builder.reject(Reason.MALFORMED_ROW, file=str(table), row=row.number, source_id=name, detail=detail)
            continue
        fault = _apply_split(builder, video, row.values.get("split"), given=splits_given)
        if fault is not None:
            builder.reject(Reason.BAD_SPLIT, file=str(table), row=row.number, source_id=name, detail=fault)
            continue
        builder.add_caption(
            video,
            text=row.values.get("text"),
            begin_s=begin_s,
            end_s=end_s,
            source=source,
            likelihood=likelihood,
            file=table,
            row=row.number,
        )


def _find(name: str, *, lookup: VideoLookup, owners: Mapping[str, VideoFile]) -> VideoFile | None:
    """Find the file that a row refers to by `name`; None if there is none.

    Raises:
        Ambiguous: several files match. If they differ only in their extension, `name` refers to the one with this ID.
    """
    try:
        return lookup.find(name)
    except Ambiguous as error:
        owner = owners.get(composed(name.removeprefix("./")))
        if owner is None or any(file.source_id != owner.source_id for file in error.matches):
            raise
        return owner


def _apply_split(builder: ReadingBuilder, video: int, value: object, *, given: dict[int, str]) -> str | None:
    """Set the split that a row gives for its video; return a description of the error, or None."""
    if value is None or value == "":
        return None
    split = split_named(value) if isinstance(value, str) else None
    if split is None:
        return f"split is {quoted(value)}, expected train, val or test"
    if given.setdefault(video, split) != split:
        return f"split is {split!r}, but {given[video]!r} in an earlier row"
    builder.set_split(video, split)
    return None
