"""The columns: those of clipmill, one row each, and those of installed packages (docs/plugins.md)."""

from clipmill.manifests.plugins import Parts
from clipmill.prep.captions.column import COLUMN as CAPTIONS
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.latents.column import COLUMN as LATENTS
from clipmill.prep.scores.column import COLUMN as SCORES
from clipmill.prep.text.column import COLUMN as TEXT
from clipmill.prep.video.column import COLUMN as VIDEO
from clipmill.shards.column_fields import COLUMN_NAME

COLUMNS = Parts(
    "column",
    group="columns",
    kind=ColumnSpec,
    own={column.name: column for column in (VIDEO, LATENTS, TEXT, SCORES, CAPTIONS)},
    # Other commands of `prep`, and folders of a data folder.
    taken=(
        "advise",
        "chunk",
        "diff",
        "export",
        "gc",
        "inspect",
        "manifest",
        "plan",
        "retry",
        "status",
        "synthetic",
        "verify",
    ),
    form=COLUMN_NAME,
)


def columns() -> tuple[ColumnSpec, ...]:
    """Return all columns; the one made from the source videos comes first."""
    return tuple(COLUMNS.working())


def column_named(name: str) -> ColumnSpec:
    """Return the column called `name`."""
    return COLUMNS[name]


def column_names() -> tuple[str, ...]:
    """Return the names of all columns."""
    return tuple(column.name for column in columns())
