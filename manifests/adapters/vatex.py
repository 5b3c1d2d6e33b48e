"""VATEX (Wang et al. 2019): clips of 10 s, each with ten English captions for the whole clip.

An annotation file is a list of {"videoID": "<id>_<begin>_<end>", "enCap": [...], "chCap": [...]}; the videos are
files `<videoID>.<extension>`. Only the English captions are read. The split is derived from the name of the annotation
file.
"""

from collections.abc import Sequence
from pathlib import Path

from clipmill.manifests.adapters.json_stream import array_items
from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder
from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.splits import split_in_file_name
from clipmill.manifests.adapters.wanted import WantedVideos, begin_reading
from clipmill.manifests.storage.urls import Place

SOURCE = "human-en"


def read_vatex(
    directory: Place, *, annotations: Sequence[Path], dataset: str = "vatex", skip: Place | None = None
) -> Reading:
    """Read VATEX.

    Raises:
        UserError: no videos are found, or an annotation file cannot be read.
    """
    builder, wanted = begin_reading(dataset, directory, skip=skip)
    for path in annotations:
        builder.begin_annotations(path)
        split = split_in_file_name(path.name)
        for row, entry in enumerate(array_items(path)):
            _add_entry(builder, wanted, entry, path=path, row=row, split=split)
    return builder.build()


def _add_entry(
    builder: ReadingBuilder, wanted: WantedVideos, entry: object, *, path: Path, row: int, split: str
) -> None:
    texts = entry.get("enCap", []) if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(texts, list):
        detail = "expected an object with a list enCap"
        builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=detail)
        return
    video = wanted.number(entry.get("videoID"), split=split, file=path, row=row, num_captions=len(texts))
    if video is None:
        return
    origin = Origin(path, SOURCE, row)
    for text in texts:
        builder.add_caption(video, text, origin)
