"""Tables of captions as JSON: lines, a list of rows, columns, or videos with their captions.

    {"video": "a.mp4", "text": "..."}                               lines, one row each
    [{"video": "a.mp4", "text": "..."}, ...]                        a list of rows
    {"video": ["a.mp4", ...], "text": ["...", ...]}                 columns as lists of equal length, or as pandas
    {"video": {"0": "a.mp4", ...}, "text": {"0": "...", ...}}       writes them, with an index
    {"a.mp4": ["...", ...], "b.mp4": {"start": 0, "text": "..."}}   videos: a caption, a row, or a list of these
    {"annotations": [{"video": "a.mp4", "text": "..."}, ...]}       lists of rows below any name; what else is beside
                                                                    them, such as "info", is left out and noted

Lines may be in a file named .json too, as `datasets` writes them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipmill.manifests.adapters.annotation_file import open_annotations
from clipmill.manifests.adapters.column_names import columns_of, missing_columns, take_columns
from clipmill.manifests.adapters.dialects import LINE_SUFFIXES, note_encoding
from clipmill.manifests.adapters.json_stream import array_items, object_items
from clipmill.manifests.adapters.tables import Row, json_rows, require_unique_keys
from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import count_noun, on_one_line, quote_value

JSON_SUFFIX = ".json"
_MAX_FORMS = 20  # sets of keys of rows that are remembered, and of notes on them
_MAX_LINE_CHARS = 1 << 20
_MAX_NAMED = 5
# Names of lists in files of COCO, ActivityNet and MSR-VTT, which are not those of videos.
_NAMES_OF_LISTS = frozenset({"annotations", "database", "sentences"})
_SHAPES = (
    'give a list of rows ([{"video": ..., "text": ...}, ...]), columns ({"video": [...], "text": [...]}), or videos '
    'with their captions ({"a.mp4": ["...", ...]})'
)


def json_table_rows(path: Path, *, required: Sequence[str], note: Callable[[str], None]) -> Iterator[Row]:
    """Iterate over the rows of a table, with the documented names of the columns.

    Args:
        required: columns that some row must have; a label stands in for a text.
        note: called with each thing about the table that differs from its documented form.

    Raises:
        UserError: the file is not JSON, or not a table of captions. That no row has a required column is known, and
            raised, after the last row.
    """
    lacking: Sequence[str] = required
    first_keys: tuple[str, ...] = ()
    known: dict[tuple[str, ...], dict[str, str]] = {}
    noted: set[str] = set()

    def note_once(text: str) -> None:
        if text not in noted and len(noted) < _MAX_FORMS:
            noted.add(text)
            note(text)

    for row in _rows(path, note=note):
        keys = tuple(row.values)
        if keys not in known:
            if len(known) == _MAX_FORMS:
                known.clear()
            known[keys] = take_columns(keys, path=path, note=note_once)
        columns = known[keys]
        if lacking and row.fault is None:
            lacking, first_keys = missing_columns(columns.values(), lacking), first_keys or keys
        yield Row(row.number, {columns[key]: value for key, value in row.values.items() if key in columns}, row.fault)
    if first_keys and lacking:
        raise UserError(
            f"{path} has no column for {' and '.join(lacking)} (the keys of its first row: "
            f"{', '.join(map(on_one_line, first_keys[:_MAX_FORMS]))})",
            hint="name them video and text; docs/datasets.md lists the other names that are recognized",
        )


def _rows(path: Path, *, note: Callable[[str], None]) -> Iterator[Row]:
    if path.suffix.lower() in LINE_SUFFIXES or _has_lines(path):
        yield from json_rows(path, encoding=note_encoding(path, note=note))
    elif _first_character(path) == "[":
        for number, item in enumerate(array_items(path, hook=require_unique_keys)):
            yield _row(number, item)
    else:
        yield from _object_rows(path, note=note)


def _first_character(path: Path) -> str:
    with open_annotations(path, encoding="utf-8-sig", errors="replace") as file:
        return next((line.strip()[0] for line in iter(lambda: file.readline(_MAX_LINE_CHARS), "") if line.strip()), "")


def _has_lines(path: Path) -> bool:
    """Return True if the first line is an object, and further lines follow."""
    with open_annotations(path, encoding="utf-8-sig", errors="replace") as file:
        lines = (line for line in iter(lambda: file.readline(_MAX_LINE_CHARS), "") if line.strip())
        first = next(lines, "")
        try:
            return isinstance(json.loads(first), dict) and next(lines, None) is not None
        except (ValueError, RecursionError):
            return False


def _row(number: int, item: object, *, video: str | None = None) -> Row:
    """Return a row from an object, or from a caption or a list of captions of a `video`."""
    if video is not None and (isinstance(item, str) or _is_texts(item)):
        return Row(number, {"video": video, "text": item})
    if not isinstance(item, dict):
        return Row(number, {} if video is None else {"video": video}, f"not a JSON object: {quote_value(item)}")
    return Row(number, dict(item) if video is None else {"video": video, **item})


def _is_texts(item: object) -> bool:
    return isinstance(item, list) and all(isinstance(one, str) for one in item)


def _object_rows(path: Path, *, note: Callable[[str], None]) -> Iterator[Row]:
    content: dict[str, Any] = {}
    for key, value in object_items(path, hook=require_unique_keys):
        if key in content:
            raise UserError(f"{path} has {quote_value(key)} twice", hint="remove or rename one of them")
        content[key] = value
    if not missing_columns(columns_of(list(content)).values(), ("video", "text")):
        yield from _column_rows(content, path=path)
        return
    if beside := [key for key, value in content.items() if not _has_whole_rows(value)]:
        if len(beside) < len(content):
            content = {key: value for key, value in content.items() if key not in beside}
            some = ", ".join(map(quote_value, beside[:_MAX_NAMED])) + (", ..." if len(beside) > _MAX_NAMED else "")
            note(f"{path.name}: the rows are below {', '.join(map(quote_value, content))}; not read: {some}")
        elif named := sorted(_NAMES_OF_LISTS.intersection(content)):
            raise UserError(
                f"{path}: {named[0]} is not a list of rows with a video and a text",
                hint=f"{_SHAPES}; prep manifest --help names the datasets that are read as they are",
            )
    number = 0
    for video, value in content.items():
        items = value if isinstance(value, list) and not _is_texts(value) else [value]
        for item in items:
            # Rows with videos of their own are below an index, as pandas writes them, or the name of their list.
            is_row = isinstance(item, dict) and "video" in columns_of(list(item)).values()
            yield _row(number, item, video=None if is_row else video)
            number += 1


def _has_whole_rows(value: object) -> bool:
    """Return True for a list with a row that names its video and has a text or a label."""
    return isinstance(value, list) and any(
        isinstance(item, dict) and not missing_columns(columns_of(list(item)).values(), ("video", "text"))
        for item in value
    )


def _column_rows(columns: Mapping[str, Any], *, path: Path) -> Iterator[Row]:
    """Yield the rows of a table that is given by columns, or of one row."""
    if all(isinstance(column, dict) for column in columns.values()):
        index = list(next(iter(columns.values())))
        for name, column in columns.items():
            if column.keys() != set(index):
                raise UserError(f"{path}: the column {on_one_line(name)} has other rows than the first", hint=_SHAPES)
        columns = {name: [column[key] for key in index] for name, column in columns.items()}
    elif not any(isinstance(column, list | dict) for column in columns.values()):
        columns = {name: [value] for name, value in columns.items()}
    lengths = {name: len(column) if isinstance(column, list) else None for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        found = ", ".join(
            f"{on_one_line(name)} {'is not a list' if length is None else 'has ' + count_noun(length, 'value')}"
            for name, length in lengths.items()
        )
        raise UserError(f"{path}: its columns are not lists of the same length: {found}", hint=_SHAPES)
    values: Sequence[Sequence[Any]] = list(columns.values())
    for number, cells in enumerate(zip(*values, strict=True)):
        yield Row(number, dict(zip(columns, cells, strict=True)))
