"""Read a folder of videos, with an optional table of captions (text, JSON or Parquet; see `caption_tables`).

Each video file becomes a video. Its ID is the relative path without the extension. If several files differ only in the
extension, the ID includes the extension (`file_ids`). The table has these columns:

- `video`: Relative path or file name, with or without the extension. If a name without an extension matches several
  files, it refers to the file whose ID equals the name. If no file matches, the lookup ignores case and the difference
  between slashes and backslashes.
- `text`: Caption. A row with labels does not need a text. Without a text, its caption is the name of the class, with
  the source `class`.
- `begin_s`, `end_s` or `duration_s` (optional): Time span. Without times, a caption applies to the complete video, from
  0 to +inf.
- `source`, `likelihood`, `split`, `group`, `view` (optional): See schema.CAPTIONS and schema.OPTIONAL_CAPTIONS. Rows of
  different cameras that show the same moment have the same `group`.
- Labels (optional) of the video or of the time span.

The split of a video is the first split in its rows, otherwise the split in the name of a parent folder, otherwise
train. Later rows of the video may have a different split. Subtitles and the output of speech recognition next to the
videos are read on request (`subtitles`).

The folder may be in a bucket (`s3://bucket/videos`). Files on a web server cannot be listed, so the table must list the
videos by URLs, or by paths relative to the URL of the folder. A table with URLs does not need a folder. A table that
lists videos may have rows without a text, for videos without captions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import pyarrow as pa

from clipmill.manifests.adapters.annotations import Reason, UnusableRow, find_split, split_of_folders
from clipmill.manifests.adapters.caption_tables import CLASS_SOURCE, CaptionRow, label_columns, read_caption_rows
from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder
from clipmill.manifests.adapters.subtitles import SUFFIXES, add_companion_files, note_companion_files
from clipmill.manifests.adapters.video_files import (
    AmbiguousName,
    LooseLookup,
    NearestName,
    VideoFile,
    VideoLookup,
    compose_unicode,
    find_listed_videos,
    resolve_url,
)
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.manifests.further_sources import source_fault
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.urls import Location, is_web, mask_secrets, split_url

DEFAULT_SOURCE = "human"


def read_folder(
    directory: Location | None,
    *,
    captions: Path | None = None,
    subtitles: bool = False,
    dataset: str = "folder",
    skip: Location | None = None,
    known_files: Mapping[str, str] | None = None,
) -> Reading:
    """Read a folder of videos.

    Args:
        directory: Path or URL of a folder, or None if the table contains URLs.
        captions: Path of a table of captions.
        subtitles: Read the subtitles and the output of speech recognition next to the videos.
        dataset: Name of the dataset in the manifest.
        skip: Subfolder to ignore, such as the data folder.
        known_files: File names of this dataset's videos in the manifest, by source ID. These videos keep their IDs.

    Raises:
        UserError: No videos are found, the files cannot be listed, or the table of captions cannot be read.
    """
    base = directory if isinstance(directory, str) and is_web(directory) else None
    lists_videos = captions is not None and (directory is None or base is not None)
    required = ("video",) if lists_videos else ("video", "text")
    labels = [] if captions is None else label_columns(captions, required=required)
    builder = ReadingBuilder(dataset, labels=dict.fromkeys(labels, pa.string()))
    if lists_videos:
        if subtitles:
            raise UserError("--subtitles requires a folder whose files can be listed", hint="omit it")
        if base is not None:
            split_url(base)  # raises UserError if the URL is invalid
        assert captions is not None
        # The table is read again later for its captions. The notes are added at that time.
        rows = read_caption_rows(captions, required=required, note=lambda _: None)
        names = dict.fromkeys(row.video.strip() for row in rows if row.video and row.video.strip())
        scan = builder.use_scan(find_listed_videos(names, base=base))
    elif directory is None:
        raise UserError("VIDEOS is required", hint="pass a folder, or --captions with a table of video URLs")
    else:
        scan = builder.scan(directory, skip=skip, companions=SUFFIXES)
    files = scan.files
    usable_files = [file for file in files if builder.check_file(file.source_id, file.path, size_bytes=file.size_bytes)]
    video_indices: dict[str, int | None] = {}
    owners: dict[str, VideoFile] = {}
    for file, source_id in zip(usable_files, file_ids(usable_files, known_files=known_files or {}), strict=True):
        split = split_of_folders(file.relative)
        video_indices[file.relative] = builder.add_checked_video(source_id, path=file.path, split=split)
        if source_id == file.source_id:
            owners[compose_unicode(source_id)] = file
    if captions is not None:
        _add_captions(builder, captions, required, files=files, owners=owners, video_indices=video_indices, base=base)
    if subtitles and directory is not None:
        location = directory.resolve() if isinstance(directory, Path) else directory
        add_companion_files(builder, location, scan.companions, video_indices=video_indices)
    else:
        note_companion_files(builder, scan.companions, video_paths=video_indices)
    return builder.build()


class _Videos:
    """Lookup of the videos in the rows of a table.

    Args:
        owners: Files by ID, for IDs without an extension.
        base: URL of the folder on a web server, or None.
        lists_videos: True if the table itself lists the videos.
    """

    def __init__(
        self, files: Sequence[VideoFile], *, owners: Mapping[str, VideoFile], base: str | None, lists_videos: bool
    ) -> None:
        self._lookup, self._loose_lookup = VideoLookup(list(files)), LooseLookup([] if lists_videos else files)
        self._owners, self._base, self._lists_videos = owners, base, lists_videos
        self._names = NearestName(files)
        self._suggestions: dict[str, str] = {}  # suggestion with the nearest name, by name in the table
        self.respelled_paths: dict[str, str] = {}  # path of a file with a different spelling, by name in the table

    def find(self, name: str) -> VideoFile | None:
        """Return the file that a name in the table refers to, or None if there is no such file.

        Raises:
            UnusableRow: Several files match, or the name is an invalid URL.
        """
        resolved = name
        if self._lists_videos or is_remote(name):
            try:
                resolved = resolve_url(name.strip(), base=self._base)
            except UserError as error:
                raise UnusableRow(Reason.MALFORMED_ROW, str(error)) from None
            except ValueError as error:
                raise UnusableRow(Reason.MALFORMED_ROW, f"{quote_value(name)}: {error}") from None
        file = _find(resolved, lookup=self._lookup, owners=self._owners)
        if file is None and (file := _find(name, lookup=self._loose_lookup, owners=self._owners)) is not None:
            self.respelled_paths[name] = file.relative
        return file

    def missing_detail(self, name: str) -> str:
        """Return a description of a name that matches no file, with the nearest name as a suggestion."""
        if name not in self._suggestions:
            nearest = self._names.find(name)
            self._suggestions[name] = "" if nearest is None else f" (similar name: {nearest})"
        return f"no matching video file{self._suggestions[name]}"


def _add_captions(
    builder: ReadingBuilder,
    table: Path,
    required: Sequence[str],
    *,
    files: Sequence[VideoFile],
    owners: Mapping[str, VideoFile],
    video_indices: dict[str, int | None],
    base: str | None,
) -> None:
    """Add the captions of a table to the builder.

    Args:
        required: Columns that the table must have. Without `text`, the table lists the videos, and its rows do not need
            a text.
        owners: Files by ID, for IDs without an extension.
        video_indices: Index of each video by relative path; None for a rejected video.
        base: URL of the folder on a web server, or None.
    """
    builder.begin_annotations(table)
    lists_videos = "text" not in required
    videos = _Videos(files, owners=owners, base=base, lists_videos=lists_videos)
    videos_with_split: set[int] = set()
    labeled_keys: set[tuple[object, ...]] = set()  # video, times and labels of the captions that have labels
    num_classes = 0
    for row in read_caption_rows(table, required=required, note=builder.note):
        name = row.video or ""
        video: int | None = None
        try:
            file = videos.find(name) if name.strip() else None
            video = None if file is None else video_indices.get(file.relative)
            if row.fault is not None:
                raise row.fault
            if not name.strip():
                raise UnusableRow(Reason.EMPTY_ID, "the row does not identify a video")
            if video is None:
                detail = videos.missing_detail(name) if file is None else "the video was rejected"
                builder.count_lost_captions(
                    name, file=table, num_captions=len(row.texts), detail=detail, row=row.number
                )
                continue
            source = row.source or DEFAULT_SOURCE
            if fault := source_fault(source):
                raise UnusableRow(Reason.BAD_SOURCE, fault)
            split = _split_of_row(row.split)
            if split is not None and video not in videos_with_split:
                videos_with_split.add(video)
                builder.set_split(video, split)
            has_text = not lists_videos or row.texts not in ((None,), ("",))
            if not has_text and split not in (None, builder.split_of(video)):
                fault = f"split is {split!r}, but the video is in {builder.split_of(video)!r}, and the row has no text"
                raise UnusableRow(Reason.BAD_SPLIT, fault)
        except UnusableRow as error:
            source_id = (mask_secrets(name) or None) if video is None else builder.source_id_of(video)
            builder.reject(error.reason, file=str(table), row=row.number, source_id=source_id, detail=error.detail)
            continue
        if not has_text:
            builder.count_row(table)
        else:
            _add_row(builder, video, row, Origin(table, source, row.number), split=split, labeled_keys=labeled_keys)
            num_classes += source == CLASS_SOURCE and row.texts == (" ".join(row.labels.values()),)
    if num_classes:
        builder.note(
            f"{table.name}: {count_noun(num_classes, 'row')} with labels and without a text: the captions are "
            f"the names of the classes, with the source {CLASS_SOURCE}"
        )
    if videos.respelled_paths:
        name, path = next(iter(videos.respelled_paths.items()))
        names = count_noun(len(videos.respelled_paths), "name")
        builder.note(
            f'{table.name}: matched {names} of videos although separators or case differ, such as "{name}" for "{path}"'
        )


def _add_row(
    builder: ReadingBuilder,
    video: int,
    row: CaptionRow,
    origin: Origin,
    *,
    split: str | None,
    labeled_keys: set[tuple[object, ...]],
) -> None:
    """Add the captions of a row. If several captions have the same times and labels, only the first gets the labels."""
    for text in row.texts:
        key = (video, row.begin_s, row.end_s, split, *sorted(row.labels.items()))
        labels = {} if key in labeled_keys else row.labels
        is_added = builder.add_caption(
            video,
            text,
            origin,
            begin_s=row.begin_s,
            end_s=row.end_s,
            likelihood=row.likelihood,
            split=split,
            group=row.group,
            view=row.view,
            labels=labels,
        )
        if is_added and labels:
            labeled_keys.add(key)


def _find(name: str, *, lookup: VideoLookup | LooseLookup, owners: Mapping[str, VideoFile]) -> VideoFile | None:
    """Look up a file. If files that differ only in the extension match, return the file whose ID is the name."""
    try:
        return lookup.find(name)
    except AmbiguousName as error:
        owner = owners.get(compose_unicode(name.removeprefix("./")))
        if owner is None or any(file.source_id != owner.source_id for file in error.matches):
            raise UnusableRow(Reason.AMBIGUOUS_VIDEO, str(error)) from None
        return owner


def _split_of_row(value: object) -> str | None:
    """Return the split in a row, or None if the row has no split. Raise UnusableRow if the split is invalid."""
    if value is None or value == "":
        return None
    split = find_split(value) if isinstance(value, str) else None
    if split is None:
        raise UnusableRow(Reason.BAD_SPLIT, f"split is {quote_value(value)}, expected train, val or test")
    return split


def file_ids(files: Sequence[VideoFile], *, known_files: Mapping[str, str]) -> list[str]:
    """Assign a unique source ID to each file, and return the IDs in the order of the files.

    The ID of `a.mp4` is `a`. If several files differ only in the extension, each ID includes the extension (`a.mkv`,
    `a.mp4`). A file with a known ID keeps it: `a.mp4` keeps the ID `a` when `a.mkv` is added, and `a.mkv` keeps the ID
    `a.mkv` when `a.mp4` is removed. Therefore, an ID never passes to a different existing file, and IDs do not depend
    on the order of the files.

    Args:
        known_files: File names, without folders, of the videos of this dataset in the manifest, by source ID.
    """
    ids: list[str | None] = []
    for file in files:
        name = PurePosixPath(file.relative)
        candidates = (file.source_id, file.relative, f"{file.relative}{name.suffix}") if known_files else ()
        ids.append(next((source_id for source_id in candidates if known_files.get(source_id) == name.name), None))
    used_ids = {source_id for source_id in ids if source_id is not None}
    claims = Counter(file.source_id for file in files)
    for row, file in enumerate(files):
        source_id, suffix = file.source_id, PurePosixPath(file.relative).suffix
        if ids[row] is not None:
            continue
        if claims[source_id] > 1:
            source_id += suffix
        while source_id in used_ids:
            source_id += suffix  # the file `a.mp4.mkv` would also have the ID `a.mp4`
        used_ids.add(source_id)
        ids[row] = source_id
    return [source_id for source_id in ids if source_id is not None]
