"""Short clips with several captions each: MSR-VTT and VATEX.

*MSR-VTT* (Xu et al. 2016) has clips of 10 to 30 s. Each clip has about twenty captions for the complete clip, and one
category. The official files (train_val_videodatainfo.json, test_videodatainfo.json) and MSRVTT_data.json have the form

    {"videos": [{"video_id": "video0", "category": 9, "split": "train", ...}, ...],
     "sentences": [{"video_id": "video0", "caption": "..."}, ...]}

The videos are files `<video_id>.<extension>`, which are already cut: `start time` and `end time` refer to the original
videos.

CSV files replace these splits. MSRVTT_JSFUSION_test.csv (Yu et al. 2018), with the columns video_id and sentence, lists
the 1,000 test videos of the split 1k-A, each with its only caption. MSRVTT_train.9k.csv and MSRVTT_train.7k.csv, with
the column video_id, list the training videos, whose captions are in the JSON file. The name of a CSV file must contain
the split. Captions and videos that are not in the CSV files are not read.

*VATEX* (Wang et al. 2019) has clips of 10 s, each with ten English captions for the complete clip. An annotation file
is a list of {"videoID": "<id>_<begin>_<end>", "enCap": [...], "chCap": [...]}. The videos are files
`<videoID>.<extension>`. Only the English captions are read. The split is derived from the name of the annotation file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from clipmill.manifests.adapters.annotations import Reason, find_split, read_csv, split_in_file_name, split_of_list
from clipmill.manifests.adapters.json_stream import array_items, object_items
from clipmill.manifests.adapters.reading import AnnotatedVideos, Origin, Reading, ReadingBuilder, begin_reading
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import quote_value
from clipmill.manifests.storage.urls import Location

SOURCE, VATEX_SOURCE = "human", "human-en"
LABELS = {"label_category": pa.int32()}
_TEST_LIST = "MSRVTT_JSFUSION_test.csv"
_MAX_CATEGORY = 2**31 - 1


@dataclass(frozen=True)
class _Video:
    """An entry of `videos`. If it has a reason for rejection, its captions are lost."""

    split: str = ""
    category: int | None = None
    reason: Reason | None = None
    detail: str = ""


_UNKNOWN = _Video(reason=Reason.MALFORMED_ROW, detail="it is not among the videos of the file")


@dataclass(frozen=True)
class _Info:
    """The content of one JSON file."""

    path: Path
    videos: dict[str, _Video]
    sentences: list[Any]


def read_msrvtt(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "msrvtt", skip: Location | None = None
) -> Reading:
    """Read MSR-VTT with its official splits, or with splits from CSV files.

    Raises:
        UserError: There are no videos; an annotation file cannot be read or has a different form; the name of a CSV
            file does not contain a split; or CSV files list videos without the JSON file that has their captions, or
            the reverse.
    """
    builder, videos = begin_reading(dataset, directory, skip=skip, labels=LABELS)
    for path in annotations:
        builder.begin_annotations(path)
    tables = [path for path in annotations if path.suffix.lower() == ".csv"]
    infos = [_read_info(builder, path) for path in annotations if path not in tables]
    categories = {name: video.category for info in infos for name, video in info.videos.items()}
    listed = _add_tables(builder, videos, tables, categories=categories)
    if tables and infos and not listed:
        hint = f"add the CSV of the training videos (MSRVTT_train.9k.csv), or omit {infos[0].path.name}"
        raise UserError(f"no CSV file lists videos whose captions are in {infos[0].path}", hint=hint)
    if listed and not infos:
        hint = "add the JSON file with their captions"
        raise UserError(f"{next(iter(listed.values()))[0]} lists videos without captions", hint=hint)
    unseen = dict(listed)
    for info in infos:
        for row, entry in enumerate(info.sentences):
            video_id = entry.get("video_id") if isinstance(entry, dict) else None
            if not isinstance(video_id, str):
                detail = f"not an object with a video_id: {quote_value(entry)}"
                builder.reject(Reason.MALFORMED_ROW, file=str(info.path), row=row, detail=detail)
            elif not tables or video_id in listed:
                _add_sentence(builder, videos, info, entry, row=row, listed=listed.get(video_id), unseen=unseen)
    for video_id, (path, number) in unseen.items():
        detail = "the JSON files have no sentence for it"
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
    """Add the captions in the CSV files; return the file and row of each video that is listed without a caption."""
    listed: dict[str, tuple[Path, int]] = {}
    paired = set()
    for path in tables:
        split = split_of_list(path, example=_TEST_LIST)
        for row in read_csv(path, required=["video_id"]):
            video_id = row.values.get("video_id", "")
            if row.fault is not None:
                builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row.number, detail=row.fault)
            elif "sentence" not in row.values:
                listed.setdefault(video_id, (path, row.number))
            else:
                paired.add(video_id)
                video = videos.index_of(video_id, split=split, file=path, row=row.number)
                if video is not None:
                    labels = {"label_category": categories.get(video_id)}
                    origin = Origin(path, SOURCE, row.number)
                    builder.add_caption(video, row.values["sentence"], origin, labels=labels)
    for video_id in [video_id for video_id in listed if video_id in paired]:
        path, number = listed.pop(video_id)
        detail = "its only caption is in a row of another CSV file"
        builder.reject(Reason.BAD_SPLIT, file=str(path), row=number, source_id=video_id, detail=detail)
    return listed


def _add_sentence(
    builder: ReadingBuilder,
    videos: AnnotatedVideos,
    info: _Info,
    entry: dict[str, Any],
    *,
    row: int,
    listed: tuple[Path, int] | None,
    unseen: dict[str, tuple[Path, int]],
) -> None:
    video_id = entry["video_id"]
    facts = info.videos.get(video_id, _UNKNOWN)
    is_first = unseen.pop(video_id, None) is not None
    if facts.reason is not None:
        builder.count_lost_captions(video_id, file=info.path, reason=facts.reason, detail=facts.detail)
        return
    split = facts.split if listed is None else split_of_list(listed[0], example=_TEST_LIST)
    video = videos.index_of(video_id, split=split, file=info.path, row=row)
    if video is None:
        return
    if is_first and listed is not None:
        builder.count_row(listed[0])
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
