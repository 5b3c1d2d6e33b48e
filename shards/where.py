"""`--where`: which chunks and captions to use, by an SQL expression on their fields. Its language: `expressions`."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.caption_table import LABEL_PREFIX
from clipmill.manifests.errors import UserError
from clipmill.shards.column_fields import COLUMN_FIELDS, is_number
from clipmill.shards.expressions import Condition, Kind, connect, expression_error, parse_conditions
from clipmill.shards.score_fields import NUMBERS

_FLAG = "--where"

Level = Literal["chunk", "video", "caption", "label"]
_LABEL = re.compile(rf"\b{LABEL_PREFIX}\w+")


@dataclass(frozen=True)
class Field:
    """A name of the language; `column` is the column of a table that its values come from, by `sql`.

    `stored_in` is the column of the data folder whose rows have it, for those that `prep chunk` does not make.
    """

    kind: Kind
    level: Level
    column: str
    sql: str = ""
    stored_in: str = ""


FIELDS: dict[str, Field] = {
    **{name: Field("number", "chunk", name, stored_in="scores") for name in NUMBERS},
    "duplicate": Field("condition", "chunk", "duplicate_of", "duplicate_of >= 0", stored_in="scores"),
    "caption_text": Field("text", "chunk", "caption_text", stored_in="captions"),
    "caption_words": Field("number", "chunk", "caption_words", stored_in="captions"),
    "begin_s": Field("number", "chunk", "start_ms", "start_ms / 1000"),
    **{name: Field("number", "chunk", name) for name in ("duration_s", "width", "height")},
    "video": Field("text", "video", "video_id"),
    "dataset": Field("text", "video", "dataset"),
    "split": Field("text", "video", "split"),
    "num_captions": Field("number", "video", "num_captions"),
    "text": Field("text", "caption", "text"),
    "words": Field("number", "caption", "text", r"len(regexp_extract_all(text, '\S+'))"),
    "source": Field("text", "caption", "source"),
    "likelihood": Field("number", "caption", "likelihood"),
}


@cache
def known_fields() -> dict[str, Field]:
    """All names of the language: `FIELDS`, and those of the columns of installed packages."""
    of_columns = {
        name: Field(_kind_of(kind), "chunk", name, stored_in=column.name)
        for column in COLUMN_FIELDS.working()
        for name, kind in column.fields.items()
    }
    return FIELDS | {name: field for name, field in of_columns.items() if name not in FIELDS}


def _fields_of(names: Iterable[str]) -> dict[str, Field]:
    """The fields of these names; the fields of labels depend on the data folder (`clipmill.shards.labels`)."""
    known = known_fields()
    return {name: known[name] if name in known else Field("text", "label", name) for name in names}


def _kind_of(kind: pa.DataType) -> Kind:
    if is_number(kind):
        return "number"
    return "text" if pa.types.is_string(kind) else "condition"


@dataclass(frozen=True)
class Where:
    """A parsed expression: conditions that must all hold.

    Attributes:
        text: the expression as it was written; a part of one is in canonical form.
    """

    text: str
    conditions: tuple[Condition, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names in it."""
        return frozenset[str]().union(*(condition.names for condition in self.conditions))

    @property
    def columns(self) -> frozenset[str]:
        """The columns that `mask` needs."""
        return frozenset(field.column for field in _fields_of(self.names).values())

    @property
    def labels(self) -> frozenset[str]:
        """The labels among them."""
        return frozenset(name for name, field in _fields_of(self.names).items() if field.level == "label")

    @property
    def stored_in(self) -> dict[str, set[str]]:
        """The columns of the data folder that it needs besides `video`, such as `scores`, and what it needs of each."""
        found: dict[str, set[str]] = {}
        for field in _fields_of(sorted(self.names)).values():
            if field.stored_in:
                found.setdefault(field.stored_in, set()).add(field.column)
        return found

    def mask(self, table: pa.Table) -> NDArray[np.bool_]:
        """bool [rows], True where all conditions hold; one that is unknown does not.

        Args:
            table: has at least `columns`.

        Raises:
            UserError: it cannot be evaluated, for example because a number exceeds the range of its type.
        """
        import duckdb

        used = _fields_of(sorted(self.names))
        fields = ", ".join(f'{field.sql or field.column} as "{name}"' for name, field in used.items())
        conditions = " and ".join(condition.sql for condition in self.conditions)
        with connect() as database:
            database.register("rows", table.select(sorted(self.columns) or table.column_names[:1]))
            query = f"select coalesce({conditions}, false) as selected from (select {fields or '1'} from rows)"
            try:
                selected = database.execute(query).fetchnumpy()["selected"]
            except duckdb.Error as error:
                raise expression_error(self.text, str(error), flag=_FLAG) from error
        return np.asarray(selected, bool)

    def by_level(self, *, labels_of: Level = "caption") -> "tuple[Where | None, Where | None]":
        """The conditions on chunks and videos, and those on captions and their videos; None if there are none.

        Args:
            labels_of: Subject of conditions on labels: captions or chunks.

        Raises:
            UserError: one condition is on a chunk and on a caption, and belongs to neither.
        """
        of_chunks: list[Condition] = []
        of_captions: list[Condition] = []
        for condition in self.conditions:
            names: dict[Level, list[str]] = {}
            for name, field in _fields_of(sorted(condition.names)).items():
                names.setdefault(labels_of if field.level == "label" else field.level, []).append(name)
            if "chunk" in names and "caption" in names:
                raise UserError(
                    f"{_FLAG}: {condition.text} is one condition on fields of chunks ({', '.join(names['chunk'])}) "
                    f"and of captions ({', '.join(names['caption'])})",
                    hint="write conditions on chunks and conditions on captions apart, and join them by `and`",
                    flags=(_FLAG,),
                )
            (of_captions if "caption" in names else of_chunks).append(condition)
        return self._part(of_chunks), self._part(of_captions)

    def require(self, levels: Collection[Level], *, because: str) -> None:
        """Raise a UserError if it uses names of other levels than `levels`."""
        fields = _fields_of(self.names)
        if other := sorted(name for name in self.names if fields[name].level not in levels):
            known = ", ".join(name for name, field in known_fields().items() if field.level in levels)
            raise UserError(
                f"{_FLAG} uses {', '.join(other)}, but {because}", hint=f"use one of {known}", flags=(_FLAG,)
            )

    def _part(self, conditions: list[Condition]) -> "Where | None":
        if len(conditions) == len(self.conditions):
            return self
        text = " and ".join(condition.text for condition in conditions)
        return Where(text, tuple(conditions)) if conditions else None


def parse_where(text: str) -> Where:
    """Parse an expression.

    Raises:
        UserError: it is not one; the message has the position, and the nearest name for one that is unknown.
    """
    if not isinstance(text, str):
        raise UserError(
            f"{_FLAG} is {text!r}, not a text", hint="write a condition, such as 'motion > 0.2'", flags=(_FLAG,)
        )
    text = text.strip()
    names = [*known_fields(), *_LABEL.findall(text.lower())]
    kinds = {name: field.kind for name, field in _fields_of(names).items()}
    return Where(text, tuple(parse_conditions(text, fields=kinds, flag=_FLAG)))
