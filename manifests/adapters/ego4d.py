"""Read Ego4D narrations (Grauman et al. 2022): official files, lists from AVION and LaViLa, and files from EgoVLP.

`narration.json` lists the narrations of a video by pass (`narration_pass_1`: `narration_text`, `timestamp_sec`). A pass
contains the narrations of one annotator. `all_narrations_redacted.json` (version 2) has one list for each video
(`narrations`: `text`, `time`). In this list, `_annotation_uid` identifies the pass, and passes are numbered in the
order in which they first occur. In both files, a narration has a single timestamp t. EgoVLP's rule (Lin et al. 2022,
section 3) expands it to the interval [t - beta_i / (2 alpha), t + beta_i / (2 alpha)], where beta_i is the mean gap
between consecutive narrations of video i, and alpha is the mean of beta_i over all videos of the file. Gaps are
measured within a pass. Videos that have not been downloaded also count, so that captions do not shift when more of the
dataset is downloaded. Negative start times become 0.

As in EgoVLP, narrations with the tag #unsure are rejected, and all other tags stay in the text (`#C C opens the door`).

The narration files have no splits. Without `ego4d.json`, the metadata of the videos, all of their videos belong to
train. `ego4d.json` has a split for each group of benchmarks (`split_em`, `split_av`, ...). A video that is in a test
split belongs to test. Otherwise, a video that is in a validation split or in several splits (`multi`) belongs to val.
Therefore, as in EgoVLP's selection of videos, no benchmark evaluates on a training video.

A pickled list contains rows of (video, start in seconds, end in seconds, narration or list of narrations), with exact
intervals. Lists from LaViLa's narrator also contain scores, which are ignored. The file name without the
extension is the source: `ego4d_train.rephraser.no_punkt_top3` and `ego4d_train` are two sources, and their captions
with the same interval belong to the same clip. The split is derived from the file name, unless `ego4d.json` contains
the video.

EgoVLP's tab-separated `egoclip.csv` has one clip with its text in each row: `video_uid`, `clip_start` and `clip_end` in
seconds, and `clip_text`. These clips belong to train and have the source `egoclip`. A negative start time becomes 0.
Each distinct clip of `egomcq.json` (clipmill.manifests.adapters.egomcq) becomes one caption in the split val with the
source `egomcq`. A text file lists videos to omit.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from clipmill.manifests.adapters.annotations import (
    LONGEST_S,
    TEST,
    TRAIN,
    VAL,
    Reason,
    open_annotations,
    read_csv,
    split_in_file_name,
    text_lines,
)
from clipmill.manifests.adapters.egomcq import EGOMCQ, Clip, clip_of, has_questions, read_questions
from clipmill.manifests.adapters.json_stream import object_items
from clipmill.manifests.adapters.reading import (
    AnnotatedVideos,
    Origin,
    Reading,
    ReadingBuilder,
    begin_reading,
    escape_unencodable,
    is_encodable,
)
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, quote_value
from clipmill.manifests.storage.urls import Location

PASSES = ("narration_pass_1", "narration_pass_2")
_LIST = "narrations"
REDACTED_STATUS = "redacted"


def read_ego4d(
    directory: Location, *, annotations: Sequence[Path], dataset: str = "ego4d", skip: Location | None = None
) -> Reading:
    """Read Ego4D narrations.

    Args:
        annotations: Narration files, `ego4d.json` with the splits, EgoVLP's files, and text files with videos to omit.

    Raises:
        UserError: No videos are found, or an annotation file cannot be read.
    """
    builder, videos = begin_reading(dataset, directory, skip=skip)
    omission_files = [path for path in annotations if path.suffix.lower() == ".txt"]
    for path in omission_files:
        omit_listed_videos(builder, videos, path=path)
    annotations = [path for path in annotations if path not in omission_files]
    json_files = [path for path in annotations if path.suffix.lower() == ".json"]
    question_files = [path for path in json_files if has_questions(path)]
    other_files = [path for path in json_files if path not in question_files]
    splits_of_file = {path: splits for path in other_files if (splits := _splits(path))}
    splits = {video: split for file_splits in splits_of_file.values() for video, split in file_splits.items()}
    for path in annotations:
        builder.begin_annotations(path)
        match path.suffix.lower():
            case ".json" if path in splits_of_file:
                pass
            case ".json" if path in question_files:
                add_questions(builder, videos, path=path)
            case ".json":
                _add_narrations(builder, videos, path=path, splits=splits)
            case ".pkl" | ".pickle":
                _add_pickled_list(builder, videos, path=path, splits=splits)
            case ".csv":
                add_pairs(builder, videos, path=path)
            case _:
                raise UserError(
                    f"{path} is not a .json, .pkl, .csv or .txt file",
                    hint="use all_narrations_redacted.json, narration.json, egoclip.csv or a pickled list; ego4d.json "
                    "adds splits, egomcq.json adds questions, and a .txt file lists videos to omit",
                )
    if splits_of_file and set(annotations) == set(splits_of_file):
        raise UserError(
            f"the annotation files contain splits, but no narrations: {', '.join(map(str, splits_of_file))}",
            hint="pass all_narrations_redacted.json or narration.json as well",
        )
    for path, file_splits in splits_of_file.items():
        for video in builder.source_ids():
            if video in file_splits:
                builder.count_row(path)
    if splits_of_file and (num_others := sum(video not in splits for video in builder.source_ids())):
        names = " and ".join(path.name for path in splits_of_file)
        builder.note(f"{names}: no split found for {count_noun(num_others, 'video')}")
    return builder.build()


def _splits(path: Path) -> dict[str, str]:
    """Return the split of each video in `ego4d.json`, or an empty dict for any other file."""
    splits: dict[str, str] = {}
    for key, entry in object_items(path, nested_key="videos"):
        if key == "videos" and isinstance(entry, dict) and isinstance(entry.get("video_uid"), str):
            values = {value for name, value in entry.items() if name.startswith("split_") and isinstance(value, str)}
            is_val = not values.isdisjoint((VAL, "multi"))
            splits[entry["video_uid"]] = TEST if TEST in values else VAL if is_val else TRAIN
        elif splits or _is_video(entry):
            break  # the rest of the file is long and not needed
    return splits


def _add_narrations(builder: ReadingBuilder, videos: AnnotatedVideos, *, path: Path, splits: Mapping[str, str]) -> None:
    # The file is read twice, because alpha, the mean of beta over all videos of the file, is known only at the end.
    # Keeping all narrations in memory would cost more.
    beta_of_video: dict[str, float | None] = {}
    for source_id, entry in _videos(path):
        if source_id not in beta_of_video:
            beta_of_video[source_id] = _mean_gap_s(_passes(entry))
    if not beta_of_video:
        raise UserError(
            f"{path} contains no narrations", hint="use Ego4D's all_narrations_redacted.json or narration.json"
        )
    betas = [beta_s for beta_s in beta_of_video.values() if beta_s is not None]
    alpha_s = float(np.mean(betas)) if betas else 0.0
    seen_ids: set[str] = set()
    for source_id, entry in _videos(path):
        if source_id in seen_ids:
            detail = "an earlier entry has the same ID"
            builder.reject(Reason.DUPLICATE_ID, file=str(path), source_id=source_id, detail=detail)
            continue
        seen_ids.add(source_id)
        narrations = _passes(entry)
        num_captions = sum(len(rows) for rows in narrations.values())
        split = splits.get(source_id, TRAIN)
        video = videos.index_of(source_id, split=split, file=path, row=None, num_captions=num_captions)
        if video is None:
            continue
        if not num_captions and entry.get("status") == REDACTED_STATUS:
            detail = "the narrations are redacted"
            builder.reject(Reason.REDACTED, file=str(path), source_id=source_id, detail=detail)
        beta_s = _mean_gap_s(narrations)
        half_length_s = None if beta_s is None else beta_s / (2 * alpha_s)
        for name, rows in narrations.items():
            times_s = _times(rows)
            usable_rows = _usable_rows(
                builder, rows, times_s, half_length_s=half_length_s, path=path, source_id=source_id, pass_name=name
            )
            if usable_rows and half_length_s is not None:
                texts = [_field(rows[row], "narration_text", "text").strip() for row in usable_rows]
                builder.add_captions(
                    video,
                    texts=pa.array(texts, pa.string()),
                    source=name,
                    file=path,
                    begin_s=np.maximum(times_s[usable_rows] - half_length_s, 0.0),
                    end_s=times_s[usable_rows] + half_length_s,
                )


def _videos(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for source_id, entry in object_items(path, nested_key="videos"):
        if _is_video(entry):
            yield source_id, entry


def _is_video(entry: object) -> bool:
    return isinstance(entry, dict) and any(name in entry for name in (*PASSES, _LIST, "status"))


def _passes(entry: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the narrations of a video by pass."""
    if isinstance(rows := entry.get(_LIST), list):
        pass_names: dict[object, str] = {}
        passes: dict[str, list[Any]] = {}
        for row in rows:
            annotator = str(_field(row, "_annotation_uid"))
            name = pass_names.setdefault(annotator, f"narration_pass_{len(pass_names) + 1}")
            passes.setdefault(name, []).append(row)
        return passes
    contents = {name: content for name in PASSES if isinstance(content := entry.get(name), dict)}
    return {name: rows for name, content in contents.items() if isinstance(rows := content.get("narrations"), list)}


def _field(row: Any, *names: str) -> Any:
    """Return the value of the first of the named fields that a narration contains; return None if there is none."""
    return next((row[name] for name in names if name in row), None) if isinstance(row, dict) else None


def _times(rows: list[Any]) -> np.ndarray:
    """Return the timestamps of narrations in seconds, float64[N]. A missing or invalid timestamp is NaN."""
    times = [_field(row, "timestamp_sec", "time") for row in rows]
    numbers = [time if _is_time(time) and 0 <= time <= LONGEST_S else np.nan for time in times]
    return np.array(numbers, np.float64)


def _mean_gap_s(narrations: dict[str, list[Any]]) -> float | None:
    """Return beta_i, the mean gap in seconds between consecutive narrations of a video; None if no gap is above 0."""
    times = [_times(rows) for rows in narrations.values()]
    gaps = np.concatenate([np.empty(0), *(np.diff(np.sort(times_s[np.isfinite(times_s)])) for times_s in times)])
    return float(gaps.mean()) if gaps.any() else None


def _usable_rows(
    builder: ReadingBuilder,
    rows: list[Any],
    times_s: np.ndarray,
    *,
    half_length_s: float | None,
    path: Path,
    source_id: str,
    pass_name: str,
) -> list[int]:
    """Return the indices of the usable narrations of a pass. All other narrations become rejected rows.

    Args:
        rows: Narrations of the pass.
        times_s: Timestamps in seconds, float64[N].
        half_length_s: Half the length of the intervals in seconds; None if the rule cannot be applied.
    """
    usable_rows = []
    for row, (narration, time_s) in enumerate(zip(rows, times_s.tolist(), strict=True)):
        text = _field(narration, "narration_text", "text")
        if not isinstance(text, str) or not is_encodable(text):
            reason, detail = Reason.MALFORMED_ROW, "no valid text"
        elif not isfinite(time_s):
            time = _field(narration, "timestamp_sec", "time")
            reason, detail = Reason.BAD_TIME, f"the time is {quote_value(time)}"
        elif "#unsure" in text.lower():
            reason, detail = Reason.UNSURE, text[:200]
        elif not text.strip():
            reason, detail = Reason.EMPTY_CAPTION, "the text is empty"
        elif half_length_s is None:
            reason = Reason.NO_INTERVAL
            detail = "the interval rule requires two narrations with different timestamps"
        else:
            usable_rows.append(row)
            continue
        builder.reject(reason, file=str(path), row=row, source_id=source_id, detail=f"{pass_name}: {detail}")
    return usable_rows


def _add_pickled_list(
    builder: ReadingBuilder, videos: AnnotatedVideos, *, path: Path, splits: Mapping[str, str]
) -> None:
    # A file name that is not valid Unicode cannot be stored as a source.
    source = escape_unencodable(path.stem)
    rows = load_plain_pickle(path)
    if not isinstance(rows, list | tuple):
        raise UserError(
            f"{path} contains a {type(rows).__name__}, not a list",
            hint="use a list of (video, start, end, narration) rows",
        )
    split = split_in_file_name(path.name)
    for row, entry in enumerate(rows):
        if not isinstance(entry, list | tuple) or len(entry) not in (4, 5):
            detail = f"expected (video, start, end, narration) with or without scores, found {quote_value(entry)}"
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
            continue
        source_id, begin_s, end_s, narration = entry[:4]
        texts = narration if isinstance(narration, list | tuple) else [narration]
        video_split = splits.get(source_id, split) if isinstance(source_id, str) else split
        video = videos.index_of(source_id, split=video_split, file=path, row=row, num_captions=len(texts))
        if video is None:
            continue
        if not (_is_time(begin_s) and _is_time(end_s)):
            detail = f"start and end are {quote_value(begin_s)} and {quote_value(end_s)}, expected numbers of seconds"
            builder.reject(Reason.BAD_TIME, file=str(path), row=row, source_id=source_id, detail=detail)
            continue
        origin = Origin(path, source, row)
        for text in texts:
            builder.add_caption(video, text, origin, begin_s=begin_s, end_s=end_s)


def _is_time(value: object) -> TypeGuard[float]:
    """Return True for a finite float, or for an integer between -LONGEST_S and LONGEST_S."""
    return (type(value) is float and isfinite(value)) or (type(value) is int and abs(value) <= LONGEST_S)


EGOCLIP = "egoclip"
_COLUMNS = ("video_uid", "clip_start", "clip_end", "clip_text")


def add_questions(builder: ReadingBuilder, videos: AnnotatedVideos, *, path: Path) -> None:
    """Add each distinct clip of `egomcq.json` once, with its text as the caption."""
    seen_clips: set[Clip] = set()
    for row, question in enumerate(read_questions(path)):
        if isinstance(question, str):
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=question)
            continue
        for clip, text in zip(question.choices, question.texts, strict=True):
            if clip in seen_clips:
                continue
            seen_clips.add(clip)
            video = videos.index_of(clip.source_id, split=VAL, file=path, row=row, is_span=True)
            if video is not None:
                origin = Origin(path, EGOMCQ, row)
                builder.add_caption(video, text, origin, begin_s=clip.begin_s, end_s=clip.end_s, split=VAL)


def add_pairs(builder: ReadingBuilder, videos: AnnotatedVideos, *, path: Path) -> None:
    """Add the clips in `egoclip.csv` with their texts."""
    for row in read_csv(path, required=_COLUMNS, separator="\t"):
        if row.fault is not None:
            builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row.number, detail=row.fault)
            continue
        video = videos.index_of(row.values["video_uid"], split=TRAIN, file=path, row=row.number, is_span=True)
        if video is None:
            continue
        try:
            clip = clip_of(row.values)
        except ValueError as error:
            source_id = row.values["video_uid"]
            builder.reject(Reason.BAD_TIME, file=str(path), row=row.number, source_id=source_id, detail=str(error))
            continue
        origin = Origin(path, EGOCLIP, row.number, field="clip_text")
        text = row.values["clip_text"]
        builder.add_caption(video, text, origin, begin_s=clip.begin_s, end_s=clip.end_s, split=TRAIN)


def omit_listed_videos(builder: ReadingBuilder, videos: AnnotatedVideos, *, path: Path) -> None:
    """Omit the videos that a text file lists, with one ID per line.

    Raises:
        UserError: The file cannot be read, or lists no videos.
    """
    names = {line.strip() for line in text_lines(path) if line.strip()}
    if not names:
        raise UserError(f"{path} does not list any videos to omit", hint="write one video ID per line")
    videos.omit_videos(names, detail=f"listed in {path.name}")
    builder.note(f"{count_noun(len(names), 'video')} to omit, listed in {path.name}")


# Old pickle protocols encode a set as a call to the class `set`.
_PLAIN = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("__builtin__", "set"): set,
    ("__builtin__", "frozenset"): frozenset,
}


def load_plain_pickle(path: Path) -> Any:
    """Load a pickle of lists, tuples, dicts, sets, strings, bytes, numbers, booleans and None.

    Raises:
        UserError: The file cannot be read, is not a pickle, or references a class or function.
    """
    try:
        with open_annotations(path, "rb") as file:
            return _PlainUnpickler(file).load()
    except _NotPlain as error:
        raise UserError(
            f"{path} is rejected, because it references {error}: loading it could execute code",
            hint="save it with only lists, tuples, strings and numbers",
        ) from error
    except MemoryError as error:
        raise UserError(
            f"{path} requires more memory than is available",
            hint="copy the file again from its source, because it may be damaged",
        ) from error
    # A damaged pickle may raise exceptions other than UnpicklingError (see Python's documentation of pickle.load).
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        detail = str(error) or type(error).__name__
        raise UserError(
            f"{path} is not a complete pickle: {detail}",
            hint="copy it again from its source, because it may be damaged",
        ) from error


class _NotPlain(Exception):
    """The pickle references something other than a plain container."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PLAIN[module, name]
        except KeyError:
            raise _NotPlain(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _NotPlain(f"the external object {pid!r:.40}")
