"""The built-in columns: the command that makes each column, and the fields of its merged table.

Plug-in columns are not listed here: `prep NAME` makes a plug-in column, and clipmill.shards.column_fields contains its
fields.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]*")
VIDEO, LATENTS, TEXT, SCORES, CAPTIONS = "video", "latents", "text", "scores", "captions"
SOURCE_MEMBER = "source.json"  # replaces the member `mp4` in chunks whose packets stay in the source file
INDEXED = "source"  # codec in the recipes of `prep index`; the name of a `video` variant begins with its codec
_TIME_FIELDS = ("start_ms", "num_frames", "fps_num", "fps_den")
_CHUNK_FIELDS = (*_TIME_FIELDS, "width", "height")


@dataclass(frozen=True, kw_only=True)
class StoredColumn:
    """Facts about a built-in column that both `prep` and `train` need.

    Attributes:
        command: Command of `prep` that makes the column.
        required_flags: Flags that the command requires, with placeholders for their values.
        members: Possible extensions of the member whose location is in the merged table; () for `scores`, whose
            merged table contains no locations.
        merged_fields: Index fields that the merged table contains in addition to `video_id`.
    """

    name: str
    command: str
    required_flags: str = ""
    members: tuple[str, ...] = ()
    merged_fields: tuple[str, ...] = ()


COLUMNS = {
    column.name: column
    for column in (
        StoredColumn(name=VIDEO, command="chunk", members=("mp4", SOURCE_MEMBER), merged_fields=_CHUNK_FIELDS),
        StoredColumn(
            name=LATENTS,
            command="latents",
            required_flags="--vae NAME",
            members=("latents.npy", "latents.npy.zst"),
            merged_fields=(*_CHUNK_FIELDS, "channels", "dtype"),
        ),
        StoredColumn(
            name=TEXT,
            command="text",
            required_flags="--clip NAME",
            members=("text.npy",),
            merged_fields=("num_rows", "width", "row_tokens", "caption_id", "caption_row"),
        ),
        StoredColumn(name=SCORES, command="scores"),
        StoredColumn(
            name=CAPTIONS,
            command="captions",
            required_flags="--model NAME",
            members=("caption.json",),
            merged_fields=(*_TIME_FIELDS, "caption_text", "caption_words"),
        ),
    )
}


def command_for(column: str, variant: str = "") -> str:
    """Return the name of the `prep` command that makes a column, or one of its variants."""
    if column == VIDEO and is_indexed(variant):
        return "index"
    return COLUMNS[column].command if column in COLUMNS else column


def is_indexed(variant: str | None) -> bool:
    """Return True if a variant of `video` was made by `prep index`, so that its packets are in the source files."""
    return variant is not None and variant.startswith(INDEXED)


def how_to_make(column: str, data_dir: Path | str, variant: str = "") -> str:
    """Return the `prep` command line that makes a column.

    Args:
        data_dir: Data folder, as a path or URL.
        variant: Name of the variant to make; empty for any variant.
    """
    flags = f"{COLUMNS[column].required_flags} " if column in COLUMNS and COLUMNS[column].required_flags else ""
    return f"prep {command_for(column, variant)} {flags}--data {shlex.quote(str(data_dir))}"


def how_to_repair(subject: str = "that shard") -> str:
    """Return the hint for a shard, or for a table built from shards, that cannot be read."""
    return f"run prep verify, which prints the command that rebuilds {subject}"
