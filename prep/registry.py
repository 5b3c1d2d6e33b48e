"""The registry of columns: one entry per column.

To add a column from outside clipmill, write a program that registers the column's spec and then runs `prep`. Workers
need no registration: they import what they run by its path.

    from clipmill.prep.registry import register
    from loudness.column import COLUMN

    register(COLUMN)

    from clipmill.prep.cli import main

    main()
"""

from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.latents.column import COLUMN as LATENTS
from clipmill.prep.scores.column import COLUMN as SCORES
from clipmill.prep.text.column import COLUMN as TEXT
from clipmill.prep.video.column import COLUMN as VIDEO

_COLUMNS = {column.name: column for column in (VIDEO, LATENTS, TEXT, SCORES)}


def register(column: ColumnSpec) -> None:
    """Add a column; call it before importing `clipmill.prep.cli`, whose flags list the columns.

    Raises:
        ValueError: the name is taken or invalid.
    """
    if column.name in _COLUMNS or not column.name.isidentifier() or column.name != column.name.lower():
        raise ValueError(
            f"{column.name!r} cannot be a column name: it is taken, or is not made of lower-case letters, digits and _"
        )
    _COLUMNS[column.name] = column


def columns() -> tuple[ColumnSpec, ...]:
    """Return all columns; the one made from the source videos comes first."""
    return tuple(_COLUMNS.values())


def column_named(name: str) -> ColumnSpec:
    """Return the registered column called `name`."""
    return _COLUMNS[name]


def column_names() -> tuple[str, ...]:
    """Return the names of all columns."""
    return tuple(_COLUMNS)
