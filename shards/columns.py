"""The built-in columns, one row each: the command that makes the column, and the fields of its merged table.

A plug-in column has no row here: `prep NAME` makes it, and clipmill.shards.column_fields returns its fields.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]*")
VIDEO, LATENTS, TEXT, SCORES, CAPTIONS = "video", "latents", "text", "scores", "captions"
SOURCE_MEMBER = "source.json"  # member of chunks whose packets stay in the source file
INDEXED = "source"  # codec of such chunks in a recipe; the name of a `video` variant begins with its codec
_TIME_FIELDS = ("start_ms", "num_frames", "fps_num", "fps_den")
_CHUNK_FIELDS = (*_TIME_FIELDS, "width", "height")


@dataclass(frozen=True, kw_only=True)
class StoredColumn:
    """Facts about a built-in column that both `prep` and `train` need.

    Attributes:
        command: Command of `prep` that makes the column.
        needs: Flags that the command needs, with placeholders for values.
        members: Possible extensions of the member that the merged table locates; () for a column without such a table.
        merged: Index fields that the merged table contains in addition to `video_id`.
    """

    name: str
    command: str
    needs: str = ""
    members: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()


COLUMNS = {
    column.name: column
    for column in (
        StoredColumn(name=VIDEO, command="chunk", members=("mp4", SOURCE_MEMBER), merged=_CHUNK_FIELDS),
        StoredColumn(
            name=LATENTS,
            command="latents",
            needs="--vae NAME",
            members=("latents.npy", "latents.npy.zst"),
            merged=(*_CHUNK_FIELDS, "channels", "dtype"),
        ),
        StoredColumn(
            name=TEXT,
            command="text",
            needs="--clip NAME",
            members=("text.npy",),
            merged=("num_rows", "width", "row_tokens", "caption_id", "caption_row"),
        ),
        StoredColumn(name=SCORES, command="scores"),
        StoredColumn(
            name=CAPTIONS,
            command="captions",
            needs="--model NAME",
            members=("caption.json",),
            merged=(*_TIME_FIELDS, "caption_text", "caption_words"),
        ),
    )
}


def command_for(column: str, variant: str = "") -> str:
    """Return the name of the `prep` command that makes `column`, or its given variant."""
    if column == VIDEO and is_indexed(variant):
        return "index"
    return COLUMNS[column].command if column in COLUMNS else column


def is_indexed(variant: str | None) -> bool:
    """Return True if the packets of a variant of `video` are in the source files."""
    return variant is not None and variant.startswith(INDEXED)


def how_to_make(column: str, data_dir: Path | str, variant: str = "") -> str:
    """Return the `prep` command line that makes a column of a data folder (a path or URL)."""
    needs = f"{COLUMNS[column].needs} " if column in COLUMNS and COLUMNS[column].needs else ""
    return f"prep {command_for(column, variant)} {needs}--data {shlex.quote(str(data_dir))}"


def how_to_repair(what: str = "that shard") -> str:
    """Return the hint for a shard, or a table built from shards, that cannot be read."""
    return f"prep verify prints the command that rebuilds {what}"
