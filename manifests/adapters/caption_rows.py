"""A row of a caption table: its captions, times, source, labels and the rest, checked and converted.

A cell may have several captions: a list in JSON or Parquet, or a list as Python, NumPy or JSON write it in a cell of
text, such as ['a dog runs', "it's a cat"].
"""

import ast
import json
import re
from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

from clipmill.manifests.adapters.reading import is_encodable
from clipmill.manifests.adapters.reasons import Reason, Unusable
from clipmill.manifests.adapters.tables import Row, log_probability
from clipmill.manifests.adapters.time_columns import times_of
from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.quoting import quote_value

CLASS_SOURCE = "class"  # of captions that are the names of classes
_STRING = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
# Items are separated by commas, or by white space as NumPy writes arrays.
_LIST = re.compile(rf"\[\s*{_STRING}(?:[\s,]+{_STRING})*[\s,]*\]", re.DOTALL)
_LIST_BEGIN = re.compile(r"""\[\s*(?:['"]|\])""")
_BOOLEANS = frozenset({"true", "false"})
_IN_BRACKETS = re.compile(r"\[[^\[\]]*,[^\[\]]*\]")


class CaptionRow(NamedTuple):
    """A row of a table of captions.

    Attributes:
        number: 0-based, without the header.
        video: as it is written; None if it is missing or not a text.
        texts: its captions; None for a missing one.
        source: None if the row has none.
        labels: label_ column -> class, of those that the row has.
        fault: why the row cannot be used; the other fields but number and video are then empty.
    """

    number: int
    video: str | None
    texts: tuple[str | None, ...] = ()
    begin_s: float = 0.0
    end_s: float = inf
    source: str | None = None
    likelihood: float | None = None
    split: object = None
    labels: Mapping[str, str] = MappingProxyType({})
    fault: Unusable | None = None


def caption_row(row: Row) -> CaptionRow:
    """Convert a row with the documented names of the columns."""
    values = row.values
    video = values.get("video")
    name = video if isinstance(video, str) else None
    try:
        if row.fault is not None:
            raise Unusable(Reason.MALFORMED_ROW, row.fault)
        _string(values, "video")
        begin_s, end_s = times_of(values)
        labels = _labels(values)
        texts = texts_of(values.get("text"))
        source = _string(values, "source") or None
        if labels and texts in ((None,), ("",)):
            texts, source = (" ".join(labels.values()),), source or CLASS_SOURCE
        return CaptionRow(
            number=row.number,
            video=name,
            texts=texts,
            begin_s=begin_s,
            end_s=end_s,
            source=source,
            likelihood=_likelihood(values.get("likelihood")),
            split=values.get("split"),
            labels=labels,
        )
    except Unusable as fault:
        return CaptionRow(row.number, name, fault=fault)


def texts_of(value: object) -> tuple[str | None, ...]:
    """Return the captions of a cell.

    Raises:
        Unusable: it is neither a text nor a list of texts, or it begins like such a list and is not one.
    """
    if isinstance(value, str) and _LIST_BEGIN.match(stripped := value.strip()):
        value = _parse_list(stripped)
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise Unusable(Reason.EMPTY_CAPTION, "the list of captions is empty")
    for text in texts:
        if not isinstance(text, str) and not (text is None and text is value):
            raise Unusable(
                Reason.MALFORMED_ROW, f"text is {quote_value(value)}, expected a string or a list of strings"
            )
        if text is not None and not is_encodable(text):
            raise Unusable(Reason.MALFORMED_ROW, f"text is not valid Unicode: {quote_value(text)}")
    return tuple(texts)


def is_in_brackets(text: str | None) -> bool:
    """Return True if a caption may be a list whose items have no quotation marks: [one, two]."""
    return text is not None and text.startswith("[") and _IN_BRACKETS.fullmatch(text.strip()) is not None


def _parse_list(cell: str) -> list[Any]:
    try:
        found = json.loads(cell)
        return found if isinstance(found, list) else [found]
    except (ValueError, RecursionError):
        pass
    if _LIST.fullmatch(cell) is not None:
        try:
            return [ast.literal_eval(item) for item in re.findall(_STRING, cell, re.DOTALL)]
        except (ValueError, SyntaxError):
            pass
    raise Unusable(Reason.MALFORMED_ROW, f"text begins like a list of captions, but is not one: {quote_value(cell)}")


def _labels(values: Mapping[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for name, value in values.items():
        if not name.startswith(LABEL_PREFIX) or value is None or value != value:  # NaN, of pandas
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a column of integers with gaps, as pandas writes it
        if not isinstance(value, str | int | float) or not is_encodable(str(value)):
            raise Unusable(Reason.BAD_LABEL, f"{name} is {quote_value(value)}, expected one class, a name or a number")
        label = str(value).strip()
        if label:
            # JSON has a true of its own, Python writes True, and spreadsheets TRUE: all of them are one class.
            labels[name] = label.lower() if label.lower() in _BOOLEANS else label
    return labels


def _string(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is not None and not (isinstance(value, str) and is_encodable(value)):
        raise Unusable(Reason.MALFORMED_ROW, f"{name} is {quote_value(value)}, expected a string")
    return value


def _likelihood(value: object) -> float | None:
    try:
        return log_probability(value)
    except ValueError as error:
        raise Unusable(Reason.BAD_LIKELIHOOD, f"likelihood is {error}") from error
