"""ActivityNet Captions (Krishna et al. 2017): sentences with times that together describe a video.

train.json, val_1.json and val_2.json hold {"v_<id>": {"duration": 82.73, "timestamps": [[0.83, 19.86], ...],
"sentences": ["...", ...]}, ...}. Each sentence becomes one caption with its times; their order in the file is the order
of their caption IDs, so that the paragraph can be put together again. The videos are files `v_<id>.<extension>` or
`<id>.<extension>`. The split is derived from the file name.

val_1.json and val_2.json describe the same videos, by different annotators: their sources are `human` and `human-2`.
A sentence whose interval begins after the video's end is rejected; one that ends later is kept as it is.
"""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.json_stream import object_items
from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder
from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.splits import split_in_file_name
from clipmill.manifests.adapters.tables import seconds
from clipmill.manifests.adapters.wanted import WantedVideos, begin_reading
from clipmill.manifests.quoting import quote_value
from clipmill.manifests.storage.urls import Place

SOURCE = "human"
SECOND_SOURCE = "human-2"


def read_activitynet(
    directory: Place, *, annotations: Sequence[Path], dataset: str = "activitynet", skip: Place | None = None
) -> Reading:
    """Read ActivityNet Captions.

    Raises:
        UserError: no videos are found, or an annotation file cannot be read.
    """
    builder, wanted = begin_reading(dataset, directory, skip=skip)
    for path in annotations:
        builder.begin_annotations(path)
        for row, (source_id, entry) in enumerate(object_items(path)):
            _add_video(builder, wanted, source_id, entry, path=path, row=row)
    return builder.build()


def _add_video(
    builder: ReadingBuilder, wanted: WantedVideos, source_id: str, entry: Any, *, path: Path, row: int
) -> None:
    sentences, timestamps = (
        (entry.get("sentences"), entry.get("timestamps")) if isinstance(entry, dict) else (None, None)
    )
    if not isinstance(sentences, list) or not isinstance(timestamps, list) or len(sentences) != len(timestamps):
        detail = "not an object with the lists timestamps and sentences, of equal length"
        builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, source_id=source_id, detail=detail)
        return
    video = wanted.number(
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
            begin_s, end_s = _times(interval, duration_s=seconds(entry.get("duration"), default=inf))
        except ValueError as error:
            builder.reject(Reason.BAD_TIME, file=str(path), row=row, source_id=source_id, detail=str(error))
        else:
            builder.add_caption(video, text, origin, begin_s=begin_s, end_s=end_s)


def _times(interval: object, *, duration_s: float) -> tuple[float, float]:
    if not isinstance(interval, list) or len(interval) != 2 or any(time is None or time == "" for time in interval):
        raise ValueError(f"its times are {quote_value(interval)}, not a start and an end")
    begin_s, end_s = (seconds(time, default=inf) for time in interval)
    if begin_s >= duration_s:
        raise ValueError(f"begins at {begin_s} s, after the end of the video at {duration_s} s")
    return begin_s, end_s
