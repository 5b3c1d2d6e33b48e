"""Something-Something v2 (Goyal et al. 2017): clips of one of 174 actions with objects.

train.json and validation.json are lists of {"id": "78687", "label": "holding a cup next to a box", "template":
"Holding [something] next to [something]", "placeholders": ["a cup", "a box"]}, with or without the prefix
`something-something-v2-` in the file name. The caption is `label`; the class is the template without its brackets, as
in labels.json. The videos are files `<id>.webm`. The split is derived from the file name.

test.json lists videos without labels; test-answers.csv has their classes in lines `<id>;<class>`, which are also their
captions, with the source `class`. If labels.json is given, other classes than its keys are rejected.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from clipmill.manifests.adapters.json_stream import array_items, object_items
from clipmill.manifests.adapters.reading import Origin, Reading, ReadingBuilder, is_encodable
from clipmill.manifests.adapters.reasons import Reason
from clipmill.manifests.adapters.splits import split_in_file_name
from clipmill.manifests.adapters.tables import text_lines
from clipmill.manifests.adapters.wanted import WantedVideos, begin_reading
from clipmill.manifests.quoting import quote_value
from clipmill.manifests.storage.urls import Place

SOURCE = "human"
CLASS_SOURCE = "class"
LABELS = {"label_class": pa.string()}
_WITHOUT_BRACKETS = str.maketrans("", "", "[]")


def read_something_something(
    directory: Place, *, annotations: Sequence[Path], dataset: str = "ssv2", skip: Place | None = None
) -> Reading:
    """Read Something-Something v2.

    Raises:
        UserError: no videos are found, or an annotation file cannot be read.
    """
    builder, wanted = begin_reading(dataset, directory, skip=skip, labels=LABELS)
    tables = [path for path in annotations if path.stem.lower().endswith("labels")]
    classes = {name for path in tables for name, _ in object_items(path)} if tables else None
    for path in annotations:
        if path in tables:
            continue
        builder.begin_annotations(path)
        split = split_in_file_name(path.name)
        for row, entry in enumerate(_entries(path)):
            _add_entry(builder, wanted, entry, path=path, row=row, split=split, classes=classes)
    return builder.build()


def _entries(path: Path) -> Iterator[Any]:
    if path.suffix.lower() != ".csv":
        yield from array_items(path)
        return
    for line in text_lines(path):
        if line.strip():
            source_id, _, name = line.strip().partition(";")
            yield {"id": source_id, "label": name, "template": name}


def _add_entry(
    builder: ReadingBuilder,
    wanted: WantedVideos,
    entry: object,
    *,
    path: Path,
    row: int,
    split: str,
    classes: set[str] | None,
) -> None:
    if not isinstance(entry, dict):
        builder.reject(Reason.MALFORMED_ROW, file=str(path), row=row, detail=f"not an object: {quote_value(entry)}")
        return
    is_labelled = "label" in entry or "template" in entry
    video = wanted.number(entry.get("id"), split=split, file=path, row=row, num_captions=int(is_labelled))
    if video is None:
        return
    if not is_labelled:
        builder.use_row(path)
        return
    template = entry.get("template")
    name = template.translate(_WITHOUT_BRACKETS).strip() if isinstance(template, str) else ""
    if not name or not is_encodable(name) or (classes is not None and name not in classes):
        detail = f"template {quote_value(template)} is not " + (
            "a class" if classes is None else "a class of the labels file"
        )
        builder.reject(Reason.BAD_LABEL, file=str(path), row=row, source_id=entry["id"], detail=detail)
        return
    source = CLASS_SOURCE if path.suffix.lower() == ".csv" else SOURCE
    labels = {"label_class": name}
    builder.add_caption(video, entry.get("label"), Origin(path, source, row), labels=labels)
