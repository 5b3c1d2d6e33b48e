"""`--where`: which chunks and captions to use, by conditions on their fields. Its grammar: `expressions`."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.shards.expressions import Expression, Kind, parse_conditions
from clipmill.shards.format import SCORES_FIELDS

_FLAG = "--where"
_BLOCK_ROWS = 1 << 17  # evaluated at a time, so that intermediate arrays stay small

Level = Literal["chunk", "video", "caption"]


@dataclass(frozen=True)
class Field:
    """A name of the language; `column` is the column of a table that its values come from."""

    kind: Kind
    level: Level
    column: str


_NO_NAMES = ("video_id", "start_ms", "cut_times_s", "chunk_fingerprint")
SCORE_NAMES = tuple(field.name for field in SCORES_FIELDS if field.name not in _NO_NAMES)
FIELDS: dict[str, Field] = {
    **{name: Field("number", "chunk", name) for name in SCORE_NAMES},
    "duplicate": Field("condition", "chunk", "duplicate_of"),
    "begin_s": Field("number", "chunk", "start_ms"),
    **{name: Field("number", "chunk", name) for name in ("duration_s", "width", "height")},
    "video": Field("text", "video", "video_id"),
    "dataset": Field("text", "video", "dataset"),
    "split": Field("text", "video", "split"),
    "num_captions": Field("number", "video", "num_captions"),
    "text": Field("text", "caption", "text"),
    "words": Field("number", "caption", "text"),
    "source": Field("text", "caption", "source"),
    "likelihood": Field("number", "caption", "likelihood"),
}
_KINDS: dict[str, Kind] = {name: field.kind for name, field in FIELDS.items()}
# Names whose values are not those of their column.
_COMPUTED: dict[str, Callable[[Any], Any]] = {
    "duplicate": lambda first: pc.greater_equal(first, pa.scalar(0, pa.int64())),
    "begin_s": lambda start_ms: pc.divide(start_ms.cast(pa.float64()), 1000.0),
    "words": lambda text: pc.count_substring_regex(text, r"\S+"),
}


@dataclass(frozen=True)
class Where:
    """A parsed expression: conditions that must all hold."""

    conditions: tuple[Expression, ...]

    @property
    def text(self) -> str:
        """The expression in canonical form: the same for expressions that differ only in white space."""
        return " and ".join(f"({one.text})" if " or " in one.text else one.text for one in self.conditions)

    @property
    def names(self) -> frozenset[str]:
        """The names in it."""
        return frozenset[str]().union(*(condition.names for condition in self.conditions))

    @property
    def columns(self) -> frozenset[str]:
        """The columns that `mask` needs."""
        return frozenset(FIELDS[name].column for name in self.names)

    @property
    def uses_scores(self) -> bool:
        """Whether it needs the scores of the chunks."""
        return not self.names.isdisjoint((*SCORE_NAMES, "duplicate"))

    def mask(self, table: pa.Table) -> NDArray[np.bool_]:
        """bool [rows], True where all conditions hold; one that is unknown does not.

        Args:
            table: has at least `columns`.
        """
        mask = np.ones(table.num_rows, bool)
        names = sorted(self.names)
        begin = 0
        for batch in table.select(sorted(self.columns) or table.column_names[:1]).to_batches(_BLOCK_ROWS):
            end = begin + batch.num_rows
            values = {name: _values(batch, name) for name in names}
            for condition in self.conditions:
                mask[begin:end] &= _is_true(condition.evaluate(values))
            begin = end
        return mask

    def by_level(self) -> "tuple[Where | None, Where | None]":
        """The conditions on chunks and videos, and those on captions and their videos; None if there are none.

        Raises:
            UserError: one condition is on a chunk and on a caption, and belongs to neither.
        """
        of_chunks: list[Expression] = []
        of_captions: list[Expression] = []
        for condition in self.conditions:
            chunk, caption = (
                sorted(name for name in condition.names if FIELDS[name].level == level)
                for level in ("chunk", "caption")
            )
            if chunk and caption:
                raise UserError(
                    f"{_FLAG}: ({condition.text}) is one condition on fields of chunks ({', '.join(chunk)}) "
                    f"and of captions ({', '.join(caption)})",
                    hint="write conditions on chunks and conditions on captions apart, and join them by `and`",
                )
            (of_captions if caption else of_chunks).append(condition)
        return (
            Where(tuple(of_chunks)) if of_chunks else None,
            Where(tuple(of_captions)) if of_captions else None,
        )

    def require(self, levels: Collection[Level], *, because: str) -> None:
        """Raise a UserError if it uses names of other levels than `levels`."""
        if other := sorted(name for name in self.names if FIELDS[name].level not in levels):
            known = ", ".join(name for name, field in FIELDS.items() if field.level in levels)
            raise UserError(f"{_FLAG} uses {', '.join(other)}, but {because}", hint=f"use one of {known}")


def parse_where(text: str) -> Where:
    """Parse an expression.

    Raises:
        UserError: it is not one; the message has the position, and the nearest name for one that is unknown.
    """
    if not isinstance(text, str):
        raise UserError(f"{_FLAG} is {text!r}, not a text", hint="write a condition, such as 'motion > 0.2'")
    return Where(tuple(parse_conditions(text, kinds=_KINDS, flag=_FLAG)))


def _values(batch: pa.RecordBatch, name: str) -> pa.Array:
    field = FIELDS[name]
    values = batch.column(field.column)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return _COMPUTED[name](values) if name in _COMPUTED else values


def _is_true(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    return (
        pc.fill_null(value, False).as_py() if isinstance(value, pa.Scalar) else np.asarray(pc.fill_null(value, False))
    )
