"""A folder of videos, with an optional table of captions (text with a header, or JSON lines; see `dialects`).

Every video file is a video; its ID is the relative path without the extension, or with it if files differ only in their
extension (`file_ids`). The table's columns are `video` (relative path, file name, or either without the extension; a
name without extension that matches several files refers to the one with this ID; a name that matches none may differ
from one file's in separators and case) and `text`, and optionally `begin_s`,
`end_s` (without times a caption applies to the whole video: 0 to +inf), `source`, `likelihood` and `split` (of the
video). The split of a video defaults to the one that a parent folder is named after, otherwise to train.

Subtitles and the output of speech recognition beside the videos are read if asked for (`beside`).

The folder may be in a bucket (`s3://bucket/videos`). The files of a web server cannot be listed: its videos are those
that the table names, by URLs or by paths below the URL of the folder. The same holds without a folder. Such a table may
also have rows without a text, for videos without captions.
"""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from clipmill.manifests.adapters.beside import SUFFIXES, add_files_beside, note_unread
from clipmill.manifests.adapters.dialects import read_caption_rows
from clipmill.manifests.adapters.file_ids import file_ids
from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder
from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.remote_videos import distinct, named_videos, normal_url
from clipmill.manifests.adapters.splits import split_named, split_of_folders
from clipmill.manifests.adapters.tables import Row, log_probability, seconds
from clipmill.manifests.adapters.video_files import (
    Ambiguous,
    LooseLookup,
    NearestName,
    VideoFile,
    VideoLookup,
    composed,
)
from clipmill.manifests.errors import UserError
from clipmill.manifests.further_sources import source_fault
from clipmill.manifests.quoting import counted, quoted
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.urls import Place, is_web, masked, split_url

DEFAULT_SOURCE = "human"


def read_folder(
    directory: Place | None,
    *,
    captions: Path | None = None,
    subtitles: bool = False,
    dataset: str = "folder",
    skip: Place | None = None,
    known: Mapping[str, str] | None = None,
) -> Reading:
    """Read a folder of videos.

    Args:
        directory: path of a folder, URL of a folder, or None if the table has URLs.
        subtitles: read the subtitles beside the videos.
        skip: a subfolder to ignore (the data folder).
        known: source ID -> file name of this dataset's videos in the manifest, which keep their IDs.

    Raises:
        UserError: no videos are found, the files cannot be listed, or the caption table cannot be read.
    """
    builder = ReadingBuilder(dataset)
    base = directory if isinstance(directory, str) and is_web(directory) else None
    is_named = captions is not None and (directory is None or base is not None)
    if is_named:
        if subtitles:
            raise UserError("--subtitles requires a folder whose files can be listed", hint="omit it")
        if base is not None:
            split_url(base)  # raises UserError if it cannot be served
        assert captions is not None
        names = distinct(
            row.values.get("video") for row in read_caption_rows(captions, required=("video",), note=_silent)
        )
        scan = builder.use_scan(named_videos(names, base=base))
    elif directory is None:
        raise UserError("no videos are given", hint="give a folder, or --captions and a table with URLs of videos")
    else:
        scan = builder.scan(directory, skip=skip, beside=SUFFIXES)
    files = scan.files
    usable = [file for file in files if builder.check_file(file.source_id, file.path, size_bytes=file.size_bytes)]
    numbers: dict[str, int | None] = {}
    owners: dict[str, VideoFile] = {}
    for file, source_id in zip(usable, file_ids(usable, known=known or {}), strict=True):
        split = split_of_folders(file.relative)
        numbers[file.relative] = builder.add_checked_video(source_id, path=file.path, split=split)
        if source_id == file.source_id:
            owners[composed(source_id)] = file
    if captions is not None:
        _add_captions(builder, captions, files=files, owners=owners, numbers=numbers, base=base, is_named=is_named)
    if subtitles and directory is not None:
        place = directory.resolve() if isinstance(directory, Path) else directory
        add_files_beside(builder, place, scan.beside, numbers=numbers)
    else:
        note_unread(builder, scan.beside, numbers=numbers)
    return builder.build()


def _silent(_: str) -> None:
    """Ignore a note: the table is read again for its captions, with the same notes."""


def _add_captions(
    builder: ReadingBuilder,
    table: Path,
    *,
    files: Sequence[VideoFile],
    owners: Mapping[str, VideoFile],
    numbers: dict[str, int | None],
    base: str | None,
    is_named: bool,
) -> None:
    """Add the captions of a table.

    Args:
        base: URL of the folder on a web server, or None.
        is_named: whether the table names the videos, so that a row needs no text.
    """
    builder.begin_annotations(table)
    lookup, names = VideoLookup(list(files)), NearestName(files)
    loose = LooseLookup([] if is_named else files)
    taken: dict[str, str] = {}  # name in the table -> the file that it refers to, written otherwise
    nearest: dict[str, str] = {}  # name in the table -> what to say
    splits_given: dict[int, str] = {}
    required = ("video",) if is_named else ("video", "text")
    for row in read_caption_rows(table, required=required, note=builder.note):
        name = row.values.get("video")
        video: int | None = None
        if row.fault is not None:
            source_id = masked(name) if isinstance(name, str) else None
            builder.reject(row.reason, file=str(table), row=row.number, source_id=source_id, detail=row.fault)
            continue
        if not isinstance(name, str) or not name.strip():
            builder.reject(Reason.EMPTY_ID, file=str(table), row=row.number, detail="the row names no video")
            continue
        try:
            file = _find(_meant(name, base=base, is_named=is_named), lookup=lookup, owners=owners)
            if file is None and (file := _find(name, lookup=loose, owners=owners)) is not None:
                taken[name] = file.relative
            video = None if file is None else numbers.get(file.relative)
            begin_s, end_s, likelihood = _numbers(row)
            if video is None:
                why = "the video was rejected"
                if file is None:
                    if name not in nearest:
                        found = names.find(name)
                        nearest[name] = "" if found is None else f", the nearest is {found}"
                    why = f"no matching video file{nearest[name]}"
                builder.lose_captions(name, file=table, why=why, row=row.number)
                continue
            source = _source(row)
            _apply_split(builder, video, row.values.get("split"), given=splits_given)
        except _Unusable as fault:
            source_id = masked(name) if video is None else builder.source_id_of(video)
            builder.reject(fault.reason, file=str(table), row=row.number, source_id=source_id, detail=fault.detail)
            continue
        if is_named and row.values.get("text") in (None, ""):
            builder.use_row(table)
            continue
        builder.add_caption(
            video,
            row.values.get("text"),
            Origin(table, source, row.number),
            begin_s=begin_s,
            end_s=end_s,
            likelihood=likelihood,
        )
    if taken:
        written, meant = next(iter(taken.items()))
        builder.note(
            f"{table.name}: {counted(len(taken), 'name')} of videos matched although separators or case differ,"
            f' such as "{written}" for "{meant}"'
        )


class _Unusable(Exception):
    """Why a row cannot be used."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def _meant(name: str, *, base: str | None, is_named: bool) -> str:
    """Return the URL that a row means, or a name of a file as it is; _Unusable if the URL cannot be served."""
    if not is_named and not is_remote(name):
        return name
    try:
        return normal_url(name.strip(), base=base)
    except UserError as error:
        raise _Unusable(Reason.MALFORMED_ROW, str(error)) from None
    except ValueError as error:
        raise _Unusable(Reason.MALFORMED_ROW, f"{quoted(name)}: {error}") from None


def _numbers(row: Row) -> tuple[float, float, float | None]:
    """Return start and end in seconds, and the likelihood, of a row; _Unusable if one of them is not valid."""
    try:
        begin_s = seconds(row.values.get("begin_s"), default=0.0)
        end_s = seconds(row.values.get("end_s"), default=inf)
    except ValueError as error:
        raise _Unusable(Reason.BAD_TIME, str(error)) from None
    try:
        return begin_s, end_s, log_probability(row.values.get("likelihood"))
    except ValueError as error:
        raise _Unusable(Reason.BAD_LIKELIHOOD, f"likelihood is {error}") from None


def _source(row: Row) -> str:
    source = row.values.get("source") or DEFAULT_SOURCE
    if not isinstance(source, str):
        raise _Unusable(Reason.MALFORMED_ROW, f"source is {quoted(source)}, expected a string")
    if fault := source_fault(source):
        raise _Unusable(Reason.BAD_SOURCE, fault)
    return source


def _find(name: str, *, lookup: VideoLookup | LooseLookup, owners: Mapping[str, VideoFile]) -> VideoFile | None:
    """Find the file that a row refers to by `name`; None if there is none.

    Raises:
        _Unusable: several files match. If they differ only in their extension, `name` refers to the one with this ID.
    """
    try:
        return lookup.find(name)
    except Ambiguous as error:
        owner = owners.get(composed(name.removeprefix("./")))
        if owner is None or any(file.source_id != owner.source_id for file in error.matches):
            raise _Unusable(Reason.AMBIGUOUS_VIDEO, str(error)) from None
        return owner


def _apply_split(builder: ReadingBuilder, video: int, value: object, *, given: dict[int, str]) -> None:
    """Set the split that a row gives for its video; _Unusable if it is not valid."""
    if value is None or value == "":
        return
    split = split_named(value) if isinstance(value, str) else None
    if split is None:
        raise _Unusable(Reason.BAD_SPLIT, f"split is {quoted(value)}, expected train, val or test")
    if given.setdefault(video, split) != split:
        raise _Unusable(Reason.BAD_SPLIT, f"split is {split!r}, but {given[video]!r} in an earlier row")
    builder.set_split(video, split)
