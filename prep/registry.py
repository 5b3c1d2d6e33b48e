"""The columns that the commands know: one row each.

A column from outside of clipmill is a row too: a program of its own registers the column's spec and then becomes
`prep`. A worker process never needs to: what it runs is named by its import path.

    from prep.registry import register
    from loudness.column import COLUMN

    register(COLUMN)

    from prep.cli import main

    main()
"""

from prep.core.column import ColumnSpec
from prep.latents.column import COLUMN as LATENTS
from prep.text.column import COLUMN as TEXT
from prep.video.column import COLUMN as VIDEO

_COLUMNS = {column.name: column for column in (VIDEO, LATENTS, TEXT)}


def register(column: ColumnSpec) -> None:
    """Adds a column; call it before `prep.cli` is imported, whose flags list the columns.

    Raises:
        ValueError: there is a column of that name, or the name is none.
    """
    if column.name in _COLUMNS or not column.name.isidentifier() or column.name != column.name.lower():
        raise ValueError(f"{column.name!r} is taken, or is no name of a column: lower-case letters, digits and _")
    _COLUMNS[column.name] = column


def columns() -> tuple[ColumnSpec, ...]:
    """All columns, the one that is made from the sources first."""
    return tuple(_COLUMNS.values())


def column_named(name: str) -> ColumnSpec:
    """The column of a name that `columns` knows."""
    return _COLUMNS[name]


def column_names() -> tuple[str, ...]:
    """Names of all columns."""
    return tuple(_COLUMNS)
