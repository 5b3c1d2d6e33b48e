"""What `prep inspect` shows: a shard set as a table, or everything about one chunk."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.errors import UserError
from manifests.keys import split_key
from manifests.store import MANIFEST_FILE, manifest_dir, read_videos
from prep.core.report import Report
from prep.upkeep.recipe_text import settings_line
from prep.upkeep.status import is_readable, problems_of
from prep.upkeep.status_text import size_text
from shards.damage import DamagedTar
from shards.format import PACKET_KEY, PACKET_REFERENCE
from shards.reader import CommittedShard, Variant

_MAX_SHARD_ROWS = 30
_MAX_CAPTIONS = 20
_MAX_PATTERN = 32  # frames of a group that are spelled out
_MAX_PATTERNS = 4
_NUM_NEAREST = 4


def set_report(variant: Variant) -> Report:
    """The shards of a variant, its totals and its settings."""
    problems, recipe = problems_of(variant), variant.recipe
    rows: list[dict[str, Any]] = []
    for shard_id, commit in variant.commits.items():
        files = commit.files
        rows.append(
            {
                "shard_id": shard_id,
                "split": commit.split,
                "num_chunks": files.num_samples if files else 0,
                "tar": files.tar if files else None,
                "tar_bytes": files.tar_bytes if files else 0,
                "num_failures": len(commit.failures),
                "state": problems.get(shard_id, ("committed", ""))[0],
            }
        )
    rows += [
        {"shard_id": damaged.shard_id, "split": "?", "num_chunks": 0, "tar": None, "tar_bytes": 0}
        | {"num_failures": 0, "state": "corrupt"}
        for damaged in variant.damaged
    ]
    num_chunks, num_bytes = (sum(row[name] for row in rows) for name in ("num_chunks", "tar_bytes"))
    num_shards = sum(row["tar"] is not None for row in rows)
    lines = [
        f"variant   {variant.directory.name}",
        f"settings  {settings_line(recipe)}",
        f"total     {num_chunks} chunks in {num_shards} shards, {size_text(num_bytes)}",
        "",
        " shard  split   chunks        MB  failed  state",
    ]
    lines += [
        f"{row['shard_id']:06d}  {row['split']:<6}{row['num_chunks']:>8}{row['tar_bytes'] / 1e6:>10.1f}"
        f"{row['num_failures']:>8}  {row['state']}"
        for row in rows[:_MAX_SHARD_ROWS]
    ]
    if len(rows) > _MAX_SHARD_ROWS:
        lines.append(f"... and {len(rows) - _MAX_SHARD_ROWS} shards more")
    values = {
        "variant": variant.directory.name,
        "recipe": recipe,
        "num_chunks": num_chunks,
        "tar_bytes": num_bytes,
        "shards": rows,
    }
    return Report("\n".join(lines), values)


def chunk_report(variant: Variant, key: str, *, data_dir: Path) -> Report:
    """Everything about one chunk.

    Raises:
        UserError: no readable shard has it, or it cannot be read.
    """
    shard, number = find_chunk(variant, key)
    row = {name: shard.index[name][number].as_py() for name in shard.index.column_names}
    try:
        description = json.loads(shard.read(number, "json"))
    except (DamagedTar, OSError, ValueError) as error:
        raise UserError(f"{key} cannot be read: {error}", hint="`prep verify` tells what is damaged") from None
    begin_s, end_s = (float(np.divide(*description[name])) for name in ("begin_s", "end_s"))
    members = {
        extension: dict(zip(("offset", "size"), shard.member_range(number, extension), strict=True))
        for extension in shard.extensions
    }
    path = _source_path(data_dir, row["video_id"])
    gop = gop_line(row["packet_frame"], row["packet_flags"])
    captions = description["captions"]
    lines = [
        f"key       {key}",
        f"tar       {shard.tar_path} ({shard.split})",
        *(
            f"  .{name:<8}bytes {place['offset']} to {place['offset'] + place['size']}"
            for name, place in members.items()
        ),
        f"time      {clock(begin_s)} to {clock(end_s)} of video {row['video_id']}",
        f"frames    {row['num_frames']} at {row['fps_num'] / row['fps_den']:g} fps,"
        f" {description['num_source_frames']} different ones in the source",
        f"video     {row['codec']} {row['width']}x{row['height']},"
        f" {row['mp4_size'] * 8 / (end_s - begin_s) / 1000:.0f} kbit/s",
        f"GOP       {gop}",
        f"source    {description['source_id']} of {description['dataset']}: {path or 'not in the manifest any more'}",
        f"captions  {len(captions)}",
        *(f"  {_caption_time(caption)}  {caption['text']}" for caption in captions[:_MAX_CAPTIONS]),
    ]
    if len(captions) > _MAX_CAPTIONS:
        lines.append(f"  ... and {len(captions) - _MAX_CAPTIONS} more")
    values = {
        "variant": variant.directory.name,
        "shard_id": shard.shard_id,
        "tar": str(shard.tar_path),
        "members": members,
        "gop": gop,
        "source_path": path,
        **description,
    }
    return Report("\n".join(lines), values)


def find_chunk(variant: Variant, key: str) -> tuple[CommittedShard, int]:
    """Shard and row of a chunk.

    Raises:
        UserError: there is none of that key; the hint names its neighbours.
    """
    shards = [shard for shard in variant.shards() if is_readable(shard)]
    for shard in shards:
        row = pc.index(shard.index["key"], key).as_py()
        if row >= 0:
            return shard, row
    unread = len(variant.shards()) - len(shards) + len(variant.damaged)
    hint = f"shards that cannot be read: {unread}; see `prep verify`" if unread else _nearest(shards, key)
    raise UserError(f'no chunk "{key}" in variant {variant.directory.name}', hint=hint)


def gop_line(packet_frame: list[int], packet_flags: list[int]) -> str:
    """How a chunk's frames depend on each other, in the order shown: `IbbbP x 28 + IP`.

    I begins decoding, P may be needed by other frames, b is needed by none.
    """
    shown = [flags for _, flags in sorted(zip(packet_frame, packet_flags, strict=True))]
    letters = "".join("I" if flag & PACKET_KEY else "P" if flag & PACKET_REFERENCE else "b" for flag in shown)
    begins = [place for place, letter in enumerate(letters) if letter == "I"]
    groups = [letters[begin:end] for begin, end in zip(begins, [*begins[1:], len(letters)], strict=True)]
    parts = []
    for group, repeated in groupby(groups):
        count = len(list(repeated))
        spelled = group if len(group) <= _MAX_PATTERN else _runs(group)
        parts.append(f"{spelled} x {count}" if count > 1 else spelled)
    more = f" + {len(parts) - _MAX_PATTERNS} other patterns" if len(parts) > _MAX_PATTERNS else ""
    return " + ".join(parts[:_MAX_PATTERNS]) + more


def clock(seconds: float) -> str:
    """Seconds as a player shows them: 0:15, 1:02:03.5."""
    minutes, rest = divmod(round(seconds, 3), 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{rest:06.3f}".rstrip("0").rstrip(".")
    return f"{hours}:{minutes:02d}:{text}" if hours else f"{minutes}:{text}"


def _runs(letters: str) -> str:
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    text = " ".join(f"{count}{letter}" if count > 1 else letter for letter, count in runs[:_MAX_PATTERN])
    return f"({text}{' ...' if len(runs) > _MAX_PATTERN else ''})"


def _caption_time(caption: dict[str, Any]) -> str:
    end_s = caption["end_s"]
    return f"{clock(caption['begin_s'])} to {'the end' if end_s is None else clock(end_s)}"


def _source_path(data_dir: Path, video_id: str) -> str | None:
    if not (manifest_dir(data_dir) / MANIFEST_FILE).exists():
        return None
    videos = read_videos(data_dir)
    row = pc.index(videos["video_id"], video_id).as_py()
    return None if row < 0 else str(videos["path"][row].as_py())


def _nearest(shards: list[CommittedShard], key: str) -> str:
    try:
        video_id, start_ms = split_key(key)
    except ValueError:
        video_id, start_ms = key, 0
    found: list[tuple[int, str]] = []
    for shard in shards:
        mine = shard.index.select(["video_id", "key", "start_ms"]).filter(pc.equal(shard.index["video_id"], video_id))
        found += zip(mine["start_ms"].to_pylist(), mine["key"].to_pylist(), strict=True)
    if found:
        nearest = sorted(found, key=lambda entry: abs(entry[0] - start_ms))[:_NUM_NEAREST]
        return f"nearest of that video: {', '.join(name for _, name in sorted(nearest))}"
    first = [shard.index["key"][0].as_py() for shard in shards[:_NUM_NEAREST]]
    return f"no video has that id; keys look like {', '.join(first)}" if first else "no shard holds a chunk"


def sorted_chunks(shards: list[CommittedShard]) -> pa.Table:
    """video_id, start_ms, shard (number in `shards`) and row of every chunk, by video and time."""
    parts = [
        shard.index.select(["video_id", "start_ms"])
        .append_column("shard", pa.array(np.full(shard.index.num_rows, number, np.int32)))
        .append_column("row", pa.array(np.arange(shard.index.num_rows, dtype=np.int32)))
        .replace_schema_metadata()
        for number, shard in enumerate(shards)
    ]
    return pa.concat_tables(parts).sort_by([("video_id", "ascending"), ("start_ms", "ascending")])
