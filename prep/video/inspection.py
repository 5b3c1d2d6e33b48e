"""The report of `prep inspect` on one chunk."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import clock, count_noun
from clipmill.manifests.store import has_manifest, read_videos
from clipmill.prep.core.report import Report
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.opening import DamagedTar
from clipmill.shards.reader import CommittedShard

_MAX_CAPTIONS = 20
_MAX_PATTERN = 32  # longest GOP in frames that is printed in full
_MAX_PATTERNS = 4


def chunk_report(shard: CommittedShard, number: int, data_dir: Path) -> Report:
    """Return the report on one chunk.

    Raises:
        UserError: the chunk cannot be read.
    """
    row = {name: shard.index[name][number].as_py() for name in shard.index.column_names}
    key = row["key"]
    try:
        description = json.loads(shard.read(number, "json"))
    except (DamagedTar, OSError, ValueError) as error:
        raise UserError(f"{key} cannot be read: {error}", hint="run `prep verify` to find what is damaged") from None
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
            f"  .{name:<8}bytes {member['offset']} to {member['offset'] + member['size']}"
            for name, member in members.items()
        ),
        f"time      {clock(begin_s, decimals=3)} to {clock(end_s, decimals=3)} of video {row['video_id']}",
        f"frames    {row['num_frames']} at {row['fps_num'] / row['fps_den']:g} fps,"
        f" from {count_noun(description['num_source_frames'], 'distinct source frame')}",
        f"video     {row['codec']} {row['width']}x{row['height']},"
        f" {row['mp4_size'] * 8 / (end_s - begin_s) / 1000:.0f} kbit/s",
        f"GOP       {gop}",
        f"source    {description['source_id']} of {description['dataset']}: {path or 'no longer in the manifest'}",
        f"captions  {len(captions)}",
        *(f"  {_caption_time(caption)}  {caption['text']}" for caption in captions[:_MAX_CAPTIONS]),
    ]
    if len(captions) > _MAX_CAPTIONS:
        lines.append(f"  ... and {len(captions) - _MAX_CAPTIONS} more")
    values = {
        "variant": shard.tar_path.parent.name,
        "shard_id": shard.shard_id,
        "tar": str(shard.tar_path),
        "members": members,
        "gop": gop,
        "source_path": path,
        **description,
    }
    return Report("\n".join(lines), values)


def gop_line(packet_frame: list[int], packet_flags: list[int]) -> str:
    """Return the frame types of a chunk in presentation order: `IbbbP x 28 + IP`.

    I marks a key frame, P a frame that other frames may reference, and b a frame that no other frame references.
    """
    shown = [flags for _, flags in sorted(zip(packet_frame, packet_flags, strict=True))]
    letters = "".join("I" if flag & PACKET_KEY else "P" if flag & PACKET_REFERENCE else "b" for flag in shown)
    begins = [position for position, letter in enumerate(letters) if letter == "I"]
    groups = [letters[begin:end] for begin, end in zip(begins, [*begins[1:], len(letters)], strict=True)]
    parts = []
    for group, repeated in groupby(groups):
        count = len(list(repeated))
        spelled = group if len(group) <= _MAX_PATTERN else _runs(group)
        parts.append(f"{spelled} x {count}" if count > 1 else spelled)
    more = f" + {count_noun(len(parts) - _MAX_PATTERNS, 'other pattern')}" if len(parts) > _MAX_PATTERNS else ""
    return " + ".join(parts[:_MAX_PATTERNS]) + more


def _runs(letters: str) -> str:
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    text = " ".join(f"{count}{letter}" if count > 1 else letter for letter, count in runs[:_MAX_PATTERN])
    return f"({text}{' ...' if len(runs) > _MAX_PATTERN else ''})"


def _caption_time(caption: dict[str, Any]) -> str:
    end_s = caption["end_s"]
    return f"{clock(caption['begin_s'], decimals=3)} to {'the end' if end_s is None else clock(end_s, decimals=3)}"


def _source_path(data_dir: Path, video_id: str) -> str | None:
    if not has_manifest(data_dir):
        return None
    videos = read_videos(data_dir)
    row = pc.index(videos["video_id"], video_id).as_py()
    return None if row < 0 else str(videos["path"][row].as_py())
