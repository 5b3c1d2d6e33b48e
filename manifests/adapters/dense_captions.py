"""Longer videos with timed sentences: ActivityNet Captions and DiDeMo.

*ActivityNet Captions* (Krishna et al. 2017) has timed sentences that together describe a video. train.json, val_1.json
and val_2.json contain {"v_<id>": {"duration": 82.73, "timestamps": [[0.83, 19.86], ...], "sentences": ["...", ...]},
...}. Each sentence becomes a caption with its times. Caption IDs follow the order of the file, so that the paragraph
can be reassembled. The videos are files `v_<id>.<extension>` or `<id>.<extension>`. The split is derived from the file
name.

val_1.json and val_2.json contain captions of the same videos by different annotators; their sources are `human` and
`human-2`. If the interval of a sentence begins after the end of the video, the sentence is rejected. If only the end is
later, the sentence is kept unchanged.

*DiDeMo* (Hendricks et al. 2017) has captions of moments in the first 30 s of videos. train_data.json, val_data.json and
test_data.json are lists of {"video": "<name>.mov", "description": "...", "num_segments": 6, "times": [[1, 1], [1, 2],
...]}. A video has five or six segments of 5 s. Each item of `times` has the first and last segment of the moment, as
one annotator marked it; there are at least four annotators. The caption gets the interval that most annotators marked,
or the first of several equally frequent intervals. If the interval includes the last segment, it ends with that
segment, or with the video if the video is shorter.

Some videos (3 % of val and test) are annotated under two names that differ only in the extension. Both names mean the
same video, so its ID is the name without the extension. The file is `<name>.mov`, `<name>.mov.mp4` (from the official
download script), or `<name>` with any extension. Text files (train_list.txt, val_list.txt, test_list.txt from retrieval
code) list the videos to read, by name with extension. Without such a list, all videos of a split are read. The split is
derived from the file name.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.annotations import Reason, parse_seconds, split_in_file_name, text_lines
from clipmill.manifests.adapters.json_stream import array_items, object_items
from clipmill.manifests.adapters.reading import AnnotatedVideos, Origin, Reading, ReadingBuilder, begin_reading
from clipmill.manifests.formatting import quote_value
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
            listed = lists.get(split)
            if not isinstance(entry, dict) or not isinstance(file_name := entry.get("video"), str):
                detail = f"not an object with a video: {quote_value(entry)}"
                builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
                continue
            if listed is not None and file_name not in listed:
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
            if listed is not None:
                builder.count_row(listed[file_name])
            origin = Origin(path, SOURCE, row, field="description")
            builder.add_caption(video, entry.get("description"), origin, begin_s=begin_s, end_s=end_s)
    return builder.build()


def moment_of(times: object, *, num_segments: object = _MAX_SEGMENTS) -> tuple[float, float]:
    """Return the start and end, in seconds, of the interval that most annotators marked.

    Raises:
        ValueError: `times` is not a list of pairs of a first and a last segment of the video.
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
    # If elements are equally frequent, most_common returns the first one in the list.
    ((first, last), _) = Counter((first, last) for first, last in times).most_common(1)[0]
    return first * SEGMENT_S, (last + 1) * SEGMENT_S
