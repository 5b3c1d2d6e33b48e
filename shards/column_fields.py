"""The fields of plug-in columns, by which `--where` selects chunks in `prep`, `train` and `open_clips`.

A package declares a column in one entry point, and its fields in another entry point with the same name, because
training does not load the code that makes columns (docs/plugins.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from clipmill.manifests.plugins import Parts, is_declared
from clipmill.shards.columns import COLUMN_NAME, COLUMNS


@dataclass(frozen=True, kw_only=True)
class ColumnFields:
    """The fields of a plug-in column with one sample per chunk.

    Attributes:
        name: Name of the column.
        fields: Arrow type of each index field, by name. Values are numbers, strings or bools, and null where unknown. A
            name begins with the column's name and `_`. The index also has `video_id` and `start_ms`, which are not
            listed here.
    """

    name: str
    fields: Mapping[str, pa.DataType]

    def __post_init__(self) -> None:
        for name, arrow_type in self.fields.items():
            if not name.startswith(f"{self.name}_") or COLUMN_NAME.fullmatch(name) is None:
                raise ValueError(
                    f"the field name {name!r} is invalid: use {self.name}_ followed by lower-case letters, digits and _"
                )
            if not (is_number(arrow_type) or pa.types.is_string(arrow_type) or pa.types.is_boolean(arrow_type)):
                raise ValueError(f"the field {name} has the type {arrow_type}, not a number, a string or a bool")


def is_number(arrow_type: pa.DataType) -> bool:
    """Return True if values of an Arrow type are numbers."""
    return bool(pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type))


COLUMN_FIELDS = Parts(
    "field list",
    group="fields",
    kind=ColumnFields,
    builtin={},
    pattern=COLUMN_NAME,
    fault=lambda fields: (
        ""
        if is_declared("columns", fields.name)
        else f"does not belong to a column: clipmill.columns has no entry point named {fields.name}"
    ),
)


def field_differences(column: str, schema: pa.Schema) -> list[str]:
    """Describe the declared fields of a column that a schema lacks, or contains with a different type."""
    types = {field.name: field.type for field in schema}
    declared_fields = {} if column in COLUMNS else COLUMN_FIELDS[column].fields
    return [
        f"{name} is {types[name]}, not {arrow_type}" if name in types else f"{name} is missing"
        for name, arrow_type in declared_fields.items()
        if types.get(name) != arrow_type
    ]
