"""Registry of the columns, the kinds of data that prep makes: built-in columns and plug-ins (docs/plugins.md)."""

from clipmill.manifests.plugins import Parts
from clipmill.prep.core.column import ColumnSpec
from clipmill.shards.columns import CAPTIONS, COLUMN_NAME, LATENTS, SCORES, TEXT, VIDEO

# First help line of the command that makes each column. `prep --help` shows it without loading the column.
SUMMARIES = {
    VIDEO: "Encode the videos of the manifest as chunks, and write them to WebDataset shards.",
    LATENTS: "Encode frames of the chunks with a VAE, and write the latents to shards.",
    TEXT: "Encode each unique caption of the manifest once, with a CLIP text tower from open_clip or a T5 encoder.",
    SCORES: "Score the chunks: motion, sharpness, brightness, black and frozen frames, bars, cuts, speech, perceptual "
    "hash.",
    CAPTIONS: "Caption the chunks with a vision-language model, either a local model or a server with OpenAI's API.",
}
# Specs are registered by import path, and loaded on first use.
COLUMNS = Parts(
    "column",
    group="columns",
    kind=ColumnSpec,
    builtin={name: f"clipmill.prep.{name}.column:COLUMN" for name in SUMMARIES},
    # Names that plug-in columns must not use: other commands of `prep`, and folders in a data folder.
    reserved_names=(
        "advise",
        "chunk",
        "diff",
        "export",
        "gc",
        "index",
        "inspect",
        "layout",
        "manifest",
        "plan",
        "retry",
        "status",
        "synthetic",
        "use",
        "verify",
    ),
    pattern=COLUMN_NAME,
)


def columns() -> tuple[ColumnSpec, ...]:
    """Return the specs of all columns. The first is `video`: most other columns are made from its chunks."""
    return tuple(COLUMNS.list_usable())


def column_named(name: str) -> ColumnSpec:
    """Return the spec of the column called `name`."""
    return COLUMNS[name]


def column_names() -> tuple[str, ...]:
    """Return the names of all columns without loading their specs."""
    return tuple(COLUMNS)
