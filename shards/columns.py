"""The columns that clipmill defines, one row each: the command that makes a column, and its merged table's fields.

A plug-in column has no row here: `prep NAME` makes it, and clipmill.shards.column_fields returns its fields.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]*")
VIDEO, LATENTS, TEXT, SCORES, CAPTIONS = "video", "latents", "text", "scores", "captions"
SOURCE_MEMBER = "source.json"  # of chunks whose packets stay in the source file
INDEXED = "source"  # codec of such chunks in a recipe; names of variants of `video` begin with the codec
_TIMES = ("start_ms", "num_frames", "fps_num", "fps_den")
_OF_CHUNKS = (*_TIMES, "width", "height")


@dataclass(frozen=True, kw_only=True)
class StoredColumn:
    """Facts about a column that all programs need.

    Attributes:
        command: Command of `prep` that makes the column.
        needs: Flags that the command needs, with placeholders for values.
        members: Possible extensions of the member that the merged table locates; () for a column without such a table.
        merged: Index fields that the merged table has in addition to `video_id`.
    """

    name: str
    command: str
    needs: str = ""
    members: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()


COLUMNS = {
    column.name: column
    for column in (
        StoredColumn(name=VIDEO, command="chunk", members=("mp4", SOURCE_MEMBER), merged=_OF_CHUNKS),
        StoredColumn(
            name=LATENTS,
            command="latents",
            needs="--vae NAME",
            members=("latents.npy", "latents.npy.zst"),
            merged=(*_OF_CHUNKS, "channels", "dtype"),
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
            merged=(*_TIMES, "caption_text", "caption_words"),
        ),
    )
}


def command_for(column: str, variant: str = "") -> str:
    """Return the command of `prep` that makes `column`, or the variant of that name."""
    if column == VIDEO and is_indexed(variant):
        return "index"
    return COLUMNS[column].command if column in COLUMNS else column


def is_indexed(variant: str | None) -> bool:
    """Return True if the packets of a variant of `video` are in the source files."""
    return variant is not None and variant.startswith(INDEXED)


def how_to_make(column: str, data_dir: Path | str, variant: str = "") -> str:
    """Return the command line, without `run`, that makes a column of a data folder (a path or an address)."""
    needs = f"{COLUMNS[column].needs} " if column in COLUMNS and COLUMNS[column].needs else ""
    return f"prep {command_for(column, variant)} {needs}--data {shlex.quote(str(data_dir))}"


def how_to_repair(what: str = "that shard") -> str:
    """Return the hint for a shard, or a table made of shards, that cannot be read."""
    return f"prep verify prints the command that makes {what} again"
