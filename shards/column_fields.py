"""Fields of plug-in columns that `--where` can use to select chunks, in `prep`, training and `open_clips`.

A package declares the column and its fields in two entry points with the same name, because training does not load the
code that makes a column (docs/plugins.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from clipmill.manifests.plugins import Parts, is_declared
from clipmill.shards.columns import COLUMN_NAME, COLUMNS


@dataclass(frozen=True, kw_only=True)
class ColumnFields:
    """The fields of a column of chunks.

    Attributes:
        name: Name of the column.
        fields: Columns of its index rows, with their Arrow types: numbers, strings or bools, null where unknown. Each
            field's name begins with the column's name and `_`. An index row also has the `video_id` and `start_ms` of
            its chunk.
    """

    name: str
    fields: Mapping[str, pa.DataType]

    def __post_init__(self) -> None:
        for name, kind in self.fields.items():
            if not name.startswith(f"{self.name}_") or COLUMN_NAME.fullmatch(name) is None:
                raise ValueError(f"the name of the field {name!r} does not begin with {self.name}_ and a word")
            if not (is_number(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind)):
                raise ValueError(f"the field {name} is {kind}, not a number, a string or a bool")


def is_number(kind: pa.DataType) -> bool:
    """Return True if values of an Arrow type are numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _fault(fields: ColumnFields) -> str:
    problem = f"do not belong to a column: clipmill.columns has no entry point named {fields.name}"
    return "" if is_declared("columns", fields.name) else problem


COLUMN_FIELDS = Parts(
    "fields of the column", group="fields", kind=ColumnFields, builtin={}, form=COLUMN_NAME, fault=_fault
)


def field_differences(column: str, schema: pa.Schema) -> list[str]:
    """Return the declared fields of a column that are missing from a schema, or have a different type in it."""
    types = {field.name: field.type for field in schema}
    declared = {} if column in COLUMNS else COLUMN_FIELDS[column].fields
    return [
        f"{name} is {types[name]}, not {kind}" if name in types else f"{name} is missing"
        for name, kind in declared.items()
        if types.get(name) != kind
    ]
