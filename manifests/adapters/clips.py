"""Read datasets of short clips with captions (MSR-VTT, VATEX), classes (Kinetics) or both (Something-Something v2).

*MSR-VTT* (Xu et al. 2016) has clips of 10 to 30 s. Each clip has about twenty captions, which apply to the complete
clip, and one category. The official files (train_val_videodatainfo.json, test_videodatainfo.json) and MSRVTT_data.json
have the form

    {"videos": [{"video_id": "video0", "category": 9, "split": "train", ...}, ...],
     "sentences": [{"video_id": "video0", "caption": "..."}, ...]}

The videos are files `<video_id>.<extension>`. They are already cut: `start time` and `end time` refer to the original
videos.

CSV files replace the official splits. MSRVTT_JSFUSION_test.csv (Yu et al. 2018), with the columns video_id and
sentence, lists the 1,000 test videos of the split 1k-A, each with a single caption. MSRVTT_train.9k.csv and
MSRVTT_train.7k.csv, with the column video_id, list the training videos, whose captions are in the JSON file. The file
name must contain the split. Captions and videos that are not in the CSV files are not read.

*VATEX* (Wang et al. 2019) has clips of 10 s, each with ten English captions for the complete clip. An annotation file
is a list of {"videoID": "<id>_<begin>_<end>", "enCap": [...], "chCap": [...]}. The videos are files
`<videoID>.<extension>`. Only the English captions are read. The split is derived from the file name.

*Kinetics* (Kay et al. 2017) and similar datasets are lists of clips. A published list is a CSV file with the columns
label, youtube_id, time_start, time_end, split. The videos are files
`<youtube_id>_<start as 6 digits>_<end as 6 digits>.<extension>` (trimmed: the label applies to the complete file) or
`<youtube_id>.<extension>` (untrimmed: the label applies from time_start to time_end). A list without a header contains
lines such as

    path label               or `path,label`: lists from VideoMAE
    path num_frames label    lists from AVION; num_frames is ignored, because it refers to a different copy of the video
    path 0 -1                pre-training lists from VideoMAE V2: a video without a label
    path start num_frames    in a list with lines of the previous form: a folder of extracted frames, which is rejected

The split of a list without a header is derived from the file name of the list. A path may contain spaces and commas, or
be quoted: the reader uses the first interpretation of a line whose file exists. Paths in published lists begin
with a placeholder folder, `your_path/` (VideoMAE V2) or `dataset_root/` (AVION). The reader removes the placeholder and
all folders after it that do not exist. The class is also the caption. It is read from the list unchanged, as a name or
a number, so a dataset should not mix lists with numbers and lists with names.

*Something-Something v2* (Goyal et al. 2017) has clips of 174 actions with objects, one action per clip. train.json and
validation.json are lists of {"id": "78687", "label": "holding a cup next to a box", "template": "Holding [something]
next to [something]", "placeholders": ["a cup", "a box"]}. These names may have the prefix `something-something-v2-`.
The caption is `label`. The class is the template without brackets, as in labels.json. The videos are files `<id>.webm`.
The split is derived from the file name. test.json lists videos without labels. Their classes are in test-answers.csv,
in lines of the form `<id>;<class>`. The class is also the caption, with the source `class`. If labels.json is passed,
rows whose class is not among its keys are rejected.
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
    split_of_list,
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
from clipmill.manifests.adapters.video_files import VIDEO_SUFFIXES, AmbiguousName, VideoLookup
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import quote_value
from clipmill.manifests.storage.urls import Location

SOURCE, VATEX_SOURCE = "human", "human-en"
MSRVTT_LABELS = {"label_category": pa.int32()}
_TEST_LIST = "MSRVTT_JSFUSION_test.csv"
_MAX_CATEGORY = 2**31 - 1


@dataclass(frozen=True)
class _Video:
    """Entry of the list `videos` in a JSON file.

    Attributes:
        reason, detail: Reason why the entry is unusable and its captions are lost; None and "" if it is usable.
    """

    split: str = ""
    category: int | None = None
    reason: Reason | None = None
    detail: str = ""


_UNKNOWN = _Video(reason=Reason.MALFORMED_ROW, detail='the list "videos" of the file does not contain it')


@dataclass(frozen=True)
class _Info:
    """Content of one JSON file."""

    path: Path
    videos: dict[str, _Video]
    sentences: list[Any]


def read_msrvtt(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "msrvtt", skip: Location | None = None
) -> Reading:
    """Read MSR-VTT with its official splits, or with splits from CSV files.

    Raises:
        UserError: No videos are found, an annotation file cannot be read or has a different form, the name of a CSV
            file does not contain a split, CSV files list videos without captions but there is no JSON file, or there
            are CSV and JSON files but no CSV file lists such videos.
    """
    builder, videos = begin_reading(dataset, directory, skip=skip, labels=MSRVTT_LABELS)
    for path in annotations:
        builder.begin_annotations(path)
    tables = [path for path in annotations if path.suffix.lower() == ".csv"]
    infos = [_read_info(builder, path) for path in annotations if path not in tables]
    categories = {name: video.category for info in infos for name, video in info.videos.items()}
    listed_videos = _add_tables(builder, videos, tables, categories=categories)
    if tables and infos and not listed_videos:
        hint = f"add the CSV of the training videos (MSRVTT_train.9k.csv), or omit {infos[0].path.name}"
        raise UserError(f"no CSV file lists videos whose captions are in {infos[0].path}", hint=hint)
    if listed_videos and not infos:
        hint = "add the JSON file with the captions of these videos"
        raise UserError(f"{next(iter(listed_videos.values()))[0]} lists videos without captions", hint=hint)
    unseen_videos = dict(listed_videos)
    for info in infos:
        for row, entry in enumerate(info.sentences):
            video_id = entry.get("video_id") if isinstance(entry, dict) else None
            if not isinstance(video_id, str):
                detail = f"not an object with a video_id: {quote_value(entry)}"
                builder.reject(Reason.MALFORMED_ROW, file=str(info.path), row=row, detail=detail)
            elif not tables or video_id in listed_videos:
                _add_sentence(
                    builder,
                    videos,
                    info,
                    entry,
                    row=row,
                    list_row=listed_videos.get(video_id),
                    unseen_videos=unseen_videos,
                )
    for video_id, (path, number) in unseen_videos.items():
        detail = "the JSON files contain no sentence for this video"
        builder.reject(Reason.EMPTY_CAPTION, file=str(path), row=number, source_id=video_id, detail=detail)
    return builder.build()


def _read_info(builder: ReadingBuilder, path: Path) -> _Info:
    content = dict(object_items(path))
    entries, sentences = content.get("videos"), content.get("sentences")
    if not isinstance(entries, list) or not isinstance(sentences, list):
        hint = "expected train_val_videodatainfo.json, test_videodatainfo.json or MSRVTT_data.json"
        raise UserError(f"{path} does not have the lists videos and sentences", hint=hint)
    videos = {}
    for row, entry in enumerate(entries):
        video_id = entry.get("video_id") if isinstance(entry, dict) else None
        if isinstance(video_id, str):
            videos[video_id] = _video_of(entry)
        else:
            detail = f"videos: not an object with a video_id: {quote_value(entry)}"
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
    return _Info(path, videos, sentences)


def _video_of(entry: dict[str, Any]) -> _Video:
    name, category = entry.get("split"), entry.get("category")
    split = find_split(name) if isinstance(name, str) else None
    if split is None:
        return _Video(reason=Reason.BAD_SPLIT, detail=f"split {quote_value(name)} is not train, val or test")
    if category is not None and not (type(category) is int and 0 <= category <= _MAX_CATEGORY):
        return _Video(reason=Reason.BAD_LABEL, detail=f"category {quote_value(category)} is not a number")
    return _Video(split, category)


def _add_tables(
    builder: ReadingBuilder, videos: AnnotatedVideos, tables: Sequence[Path], *, categories: dict[str, int | None]
) -> dict[str, tuple[Path, int]]:
    """Add the captions in CSV files.

    Returns:
        The file and row of each video that is listed without a caption, by video ID.
    """
    listed_videos: dict[str, tuple[Path, int]] = {}
    captioned_ids = set()
    for path in tables:
        split = split_of_list(path, example=_TEST_LIST)
        for row in read_csv(path, required=["video_id"]):
            video_id = row.values.get("video_id", "")
            if row.fault is not None:
                builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row.number, detail=row.fault)
            elif "sentence" not in row.values:
                listed_videos.setdefault(video_id, (path, row.number))
            else:
                captioned_ids.add(video_id)
                video = videos.index_of(video_id, split=split, file=path, row=row.number)
                if video is not None:
                    labels = {"label_category": categories.get(video_id)}
                    origin = Origin(path, SOURCE, row.number)
                    builder.add_caption(video, row.values["sentence"], origin, labels=labels)
    for video_id in [video_id for video_id in listed_videos if video_id in captioned_ids]:
        path, number = listed_videos.pop(video_id)
        detail = "its only caption is in a row of another CSV file"
        builder.reject(Reason.BAD_SPLIT, file=str(path), row=number, source_id=video_id, detail=detail)
    return listed_videos


def _add_sentence(
    builder: ReadingBuilder,
    videos: AnnotatedVideos,
    info: _Info,
    entry: dict[str, Any],
    *,
    row: int,
    list_row: tuple[Path, int] | None,
    unseen_videos: dict[str, tuple[Path, int]],
) -> None:
    video_id = entry["video_id"]
    facts = info.videos.get(video_id, _UNKNOWN)
    is_first = unseen_videos.pop(video_id, None) is not None
    if facts.reason is not None:
        builder.count_lost_captions(video_id, file=info.path, reason=facts.reason, detail=facts.detail)
        return
    split = facts.split if list_row is None else split_of_list(list_row[0], example=_TEST_LIST)
    video = videos.index_of(video_id, split=split, file=info.path, row=row)
    if video is None:
        return
    if is_first and list_row is not None:
        builder.count_row(list_row[0])
    labels = {"label_category": facts.category}
    origin = Origin(info.path, SOURCE, row, field="caption")
    builder.add_caption(video, entry.get("caption"), origin, labels=labels)


def read_vatex(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "vatex", skip: Location | None = None
) -> Reading:
    """Read VATEX.

    Raises:
        UserError: No videos are found, or an annotation file cannot be read.
    """
    builder, videos = begin_reading(dataset, directory, skip=skip)
    for path in annotations:
        builder.begin_annotations(path)
        split = split_in_file_name(path.name)
        for row, entry in enumerate(array_items(path)):
            texts = entry.get("enCap", []) if isinstance(entry, dict) else None
            if not isinstance(entry, dict) or not isinstance(texts, list):
                detail = "expected an object with a list enCap"
                builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
                continue
            video = videos.index_of(entry.get("videoID"), split=split, file=path, row=row, num_captions=len(texts))
            if video is None:
                continue
            origin = Origin(path, VATEX_SOURCE, row)
            for text in texts:
                builder.add_caption(video, text, origin)
    return builder.build()


CLASS_SOURCE = "class"
CLASS_LABELS = {"label_class": pa.string()}
_COLUMNS = ["label", "youtube_id"]
_TWO_NUMBERS = re.compile(r"(?P<count>\d{1,9})[ ,\t]+(?P<label>-?\d{1,9})")
_NUMBERS_LAST = re.compile(rf"(?P<name>.*[^ ,\t])[ ,\t]+(?P<numbers>{_TWO_NUMBERS.pattern})")
_NO_LABEL = "-1"
# Placeholder folders at the start of the paths in published lists from VideoMAE V2 and AVION.
_PLACEHOLDERS = ("your_path/", "dataset_root/")


@dataclass(frozen=True)
class _Line:
    """Possible interpretation of a line in a list without a header.

    Attributes:
        name: Path of the video.
        label: Class; None for a video without a label.
        fault: Reason why the line is unusable, or None.
    """

    name: str
    label: str | None
    fault: str | None = None


def read_kinetics(
    lists: Sequence[Path], *, videos: Location | None = None, dataset: str = "kinetics", skip: Location | None = None
) -> Reading:
    """Read Kinetics or similar lists of clips.

    Args:
        lists: Paths of the lists.
        videos: Folder with the videos. Default: the folder of the first list.

    Raises:
        UserError: No videos are found, or a list cannot be read.
    """
    builder = ReadingBuilder(dataset, labels=CLASS_LABELS)
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
        source_id, is_trimmed = _file_id(youtube_id, begin_s=begin_s, end_s=end_s, lookup=lookup)
    except ValueError as error:
        builder.reject(Reason.BAD_TIME, file=str(path), row=row.number, source_id=youtube_id, detail=str(error))
        return
    if is_trimmed:
        begin_s, end_s = 0.0, inf
    video = clips.index_of(source_id, split=split, file=path, row=row.number)
    if video is not None:
        _add_class(builder, video, cells["label"], path=path, row=row.number, begin_s=begin_s, end_s=end_s)


def _file_id(youtube_id: str, *, begin_s: float, end_s: float, lookup: VideoLookup) -> tuple[str, bool]:
    """Return the name of the file that contains a clip, and True if the file is trimmed to the clip."""
    if not youtube_id.strip() or end_s == inf:
        return youtube_id, False
    if not (isfinite(begin_s) and isfinite(end_s)):
        raise ValueError(f"time_start is {begin_s}, time_end is {end_s}, expected finite numbers")
    trimmed_id = f"{youtube_id}_{round(begin_s):06d}_{round(end_s):06d}"
    try:
        is_untrimmed = lookup.find(trimmed_id) is None and lookup.find(youtube_id) is not None
    except AmbiguousName:
        is_untrimmed = False
    return (youtube_id, False) if is_untrimmed else (trimmed_id, True)


def _add_plain_list(builder: ReadingBuilder, clips: AnnotatedVideos, *, lookup: VideoLookup, path: Path) -> None:
    split = split_in_file_name(path.name)
    is_pretraining = any(line.rstrip().endswith(f" {_NO_LABEL}") for line in text_lines(path))
    for row, line in enumerate(line.strip() for line in text_lines(path)):
        if not line:
            continue
        # Ways to divide the line into path and label, with the most likely way first.
        pairs = []
        if line.startswith('"'):
            pairs.append(line[1:].partition('"')[::2])
        # A label may contain spaces if a comma precedes it, and rarely contains a comma.
        pairs += [line.rpartition(separator)[::2] for separator in (",", " ", "\t") if separator in line]
        if (numbers := _NUMBERS_LAST.fullmatch(line)) is not None:
            pairs.append((numbers["name"], numbers["numbers"]))
        pairs += [line.partition(",")[::2]] if line.count(",") > 1 else []
        stripped = [(name.strip().strip('"'), label.strip(" ,\t").strip('"')) for name, label in pairs]
        candidates = [
            _parse_label(_strip_placeholder(name, lookup), label, is_pretraining=is_pretraining)
            for name, label in stripped
            if name and label
        ]
        if not candidates:
            detail = f"expected `path label` or `path,label`, found {line:.80}"
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
            continue
        # Use the first interpretation whose file exists, otherwise the first one with a video extension.
        existing_entries = (entry for entry in candidates if _exists(entry.name, lookup))
        video_entries = (entry for entry in candidates if PurePosixPath(entry.name).suffix.lower() in VIDEO_SUFFIXES)
        entry = next(existing_entries, None) or next(video_entries, candidates[0])
        if entry.fault is not None:
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, source_id=entry.name, detail=entry.fault)
            continue
        has_label = entry.label is not None
        video = clips.index_of(entry.name, split=split, file=path, row=row, num_captions=int(has_label))
        if video is None:
            continue
        if entry.label is None:
            builder.count_row(path)
        else:
            _add_class(builder, video, entry.label, path=path, row=row, begin_s=0.0, end_s=inf)


def _strip_placeholder(name: str, lookup: VideoLookup) -> str:
    prefix = next((prefix for prefix in _PLACEHOLDERS if name.startswith(prefix)), None)
    if prefix is None or _exists(name, lookup):
        return name
    parts = name.removeprefix(prefix).split("/")
    shortened = ["/".join(parts[first:]) for first in range(len(parts))]
    return next((path for path in shortened if _exists(path, lookup)), shortened[0])


def _parse_label(name: str, label: str, *, is_pretraining: bool) -> _Line:
    """Parse the part of a line after the path, which is a class or two numbers."""
    numbers = _TWO_NUMBERS.fullmatch(label)
    if numbers is None:
        return _Line(name, label)
    count, label = int(numbers["count"]), numbers["label"]
    if label == _NO_LABEL:
        return _Line(name, None)
    if label.startswith("-"):
        return _Line(name, None, f"label is {label}, expected a class, or -1 for no label")
    if count < 2 or is_pretraining:
        # The first number is the index of the first extracted frame. It is not a number of frames, because no video has
        # 0 or 1 frames, and lists for pre-training do not contain numbers of frames.
        fault = f"a folder of extracted frames (`folder start total`: {count} {label}), expected a video file"
        return _Line(name, None, fault)
    return _Line(name, label)


def _exists(name: str, lookup: VideoLookup) -> bool:
    try:
        return lookup.find(name) is not None
    except AmbiguousName:
        return True


def _add_class(
    builder: ReadingBuilder, video: int, label: str, *, path: Path, row: int, begin_s: float, end_s: float
) -> None:
    labels = {"label_class": label}
    builder.add_caption(video, label, Origin(path, CLASS_SOURCE, row), begin_s=begin_s, end_s=end_s, labels=labels)


_NO_BRACKETS = str.maketrans("", "", "[]")


def read_something_something(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "ssv2", skip: Location | None = None
) -> Reading:
    """Read Something-Something v2.

    Raises:
        UserError: No videos are found, or an annotation file cannot be read.
    """
    builder, clips = begin_reading(dataset, directory, skip=skip, labels=CLASS_LABELS)
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
            is_labeled = "label" in entry or "template" in entry
            video = clips.index_of(entry.get("id"), split=split, file=path, row=row, num_captions=int(is_labeled))
            if video is None:
                continue
            if not is_labeled:
                builder.count_row(path)
                continue
            template = entry.get("template")
            name = template.translate(_NO_BRACKETS).strip() if isinstance(template, str) else ""
            if not name or not is_encodable(name) or (classes is not None and name not in classes):
                detail = f"template {quote_value(template)} is not " + (
                    "a class" if classes is None else "a class of the labels file"
                )
                builder.reject(Reason.BAD_LABEL, file=str(path), row=row, source_id=entry["id"], detail=detail)
                continue
            source = CLASS_SOURCE if path.suffix.lower() == ".csv" else SOURCE
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
