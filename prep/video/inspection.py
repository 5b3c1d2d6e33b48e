"""Inspect stored chunks: the report of `prep inspect` on one chunk, and the check of `prep verify --deep`."""

import json
from dataclasses import asdict
from fractions import Fraction
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import clock, count_noun
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.publish import parse_json
from clipmill.manifests.store import has_manifest, read_videos
from clipmill.prep.core.chunk_content import source_location
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.core.work import Report
from clipmill.prep.video.span_task import check_chunk, read_chunk
from clipmill.shards.columns import SOURCE_MEMBER
from clipmill.shards.decoding import DamagedPacket, SourceFile, read_packets
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.opening import Damaged, DamagedTar
from clipmill.shards.packets import PacketTable
from clipmill.shards.reader import CommittedShard

_MAX_CAPTIONS = 20
# Data types of the fields of a `PacketTable`, in order. The index columns have the prefix `packet_`.
_PACKET_FIELDS = {"offset": np.uint32, "size": np.uint32, "frame": np.int32, "flags": np.uint8, "crc32": np.uint32}
_MAX_PATTERN = 32  # maximum number of frames in a GOP that is printed in full, and of printed runs in a longer GOP
_MAX_PATTERNS = 4  # maximum number of GOP patterns that are printed


def chunk_report(shard: CommittedShard, index: int, data_dir: Path) -> Report:
    """Return the report on the chunk in row `index` of a shard.

    Raises:
        UserError: The chunk cannot be read.
    """
    row = {name: shard.index[name][index].as_py() for name in shard.index.column_names}
    key = row["key"]
    try:
        description = json.loads(shard.read(index, "json"))
    except (DamagedTar, OSError, ValueError) as error:
        raise UserError(f"{key} cannot be read: {error}", hint="run `prep verify` to find what is damaged") from None
    begin_s, end_s = (float(np.divide(*description[name])) for name in ("begin_s", "end_s"))
    members = {
        extension: dict(zip(("offset", "size"), shard.member_range(index, extension), strict=True))
        for extension in shard.extensions
    }
    path = None
    if has_manifest(data_dir):
        videos = read_videos(data_dir)
        video_row = pc.index(videos["video_id"], row["video_id"]).as_py()
        path = None if video_row < 0 else str(videos["path"][video_row].as_py())
    gop = gop_line(row["packet_frame"], row["packet_flags"])
    captions = description["captions"]
    caption_lines = []
    for caption in captions[:_MAX_CAPTIONS]:
        end = "the end" if caption["end_s"] is None else clock(caption["end_s"], decimals=3)
        caption_lines.append(f"  {clock(caption['begin_s'], decimals=3)} to {end}  {caption['text']}")
    # The size of an indexed chunk is the total size of its packets.
    size_bytes = row["mp4_size"] if "mp4_size" in row else sum(row["packet_size"])
    lines = [
        f"key       {key}",
        f"tar       {shard.tar_path} ({shard.split})",
        *(
            f"  .{name:<8} bytes {member['offset']} to {member['offset'] + member['size']}"
            for name, member in members.items()
        ),
        f"time      {clock(begin_s, decimals=3)} to {clock(end_s, decimals=3)} of video {row['video_id']}",
        f"frames    {row['num_frames']} at {row['fps_num'] / row['fps_den']:g} fps,"
        f" from {count_noun(description['num_source_frames'], 'distinct source frame')}",
        f"video     {row['codec']} {row['width']}x{row['height']},"
        f" {size_bytes * 8 / (end_s - begin_s) / 1000:.0f} kbit/s",
        f"GOP       {gop}",
        f"source    {description['source_id']} of {description['dataset']}: {path or 'no longer in the manifest'}",
        f"captions  {len(captions)}",
        *caption_lines,
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
    """Return the frame types of a chunk in presentation order, such as `IbbbP x 28 + IP`.

    I is a key frame, P is any other reference frame, and b is a non-reference frame.
    """
    sorted_flags = [flags for _, flags in sorted(zip(packet_frame, packet_flags, strict=True))]
    letters = "".join("I" if flag & PACKET_KEY else "P" if flag & PACKET_REFERENCE else "b" for flag in sorted_flags)
    starts = [position for position, letter in enumerate(letters) if letter == "I"]
    groups = [letters[begin:end] for begin, end in zip(starts, [*starts[1:], len(letters)], strict=True)]
    parts = []
    for group, equal_groups in groupby(groups):
        count = len(list(equal_groups))
        pattern = group
        if len(group) > _MAX_PATTERN:  # print runs of equal letters, such as 3b
            runs = [(letter, len(list(run))) for letter, run in groupby(group)]
            shown_runs = " ".join(
                f"{length}{letter}" if length > 1 else letter for letter, length in runs[:_MAX_PATTERN]
            )
            pattern = f"({shown_runs}{' ...' if len(runs) > _MAX_PATTERN else ''})"
        parts.append(f"{pattern} x {count}" if count > 1 else pattern)
    more = f" + {count_noun(len(parts) - _MAX_PATTERNS, 'other pattern')}" if len(parts) > _MAX_PATTERNS else ""
    return " + ".join(parts[:_MAX_PATTERNS]) + more


def check_video(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Decode every frame of a chunk, and compare the frames and the JSON member with the index row.

    For an indexed chunk, only the JSON member and the checksums of the packets are compared. Only one frame is in
    memory at a time.
    """
    json_differences = _check_description(row, members, split=split)
    if SOURCE_MEMBER in members:  # an indexed chunk
        table = PacketTable(*(np.array(row[f"packet_{name}"], dtype) for name, dtype in _PACKET_FIELDS.items()))
        payload = row["source_offset"], row["source_bytes"] - row["source_offset"]
        try:
            source = SourceFile(source_location(row["tar"], row["video_id"]))
            packets = read_packets(source, payload, table, list(range(len(table.frame))))
        except (DamagedPacket, Damaged, OSError, KeyError) as error:
            return CheckedSample([(DeepCode.UNREADABLE, f"the source cannot be read: {error}"), *json_differences], 0)
        return CheckedSample(json_differences, len(packets))
    content = members["mp4"]
    try:
        facts = read_chunk(content, fps=Fraction(row["fps_num"], row["fps_den"]))
        check_chunk(
            facts,
            num_frames=row["num_frames"],
            size=(row["width"], row["height"]),
            codec=row["codec"],
            size_bytes=len(content),
        )
    except SourceFailure as failure:
        return CheckedSample([(DeepCode.PACKETS_DIFFER, failure.message), *json_differences], 0)
    differences = [
        (DeepCode.PACKETS_DIFFER, f"{name} in the index differs from the demuxed packets")
        for name, value in asdict(facts).items()
        if row[name] != value
    ]
    try:
        num_decoded, difference = _decode(content, row)
    except av.error.FFmpegError as error:
        return CheckedSample([*differences, (DeepCode.DECODE_ERRORS, str(error)), *json_differences], 0)
    return CheckedSample([*differences, *([] if difference is None else [difference]), *json_differences], num_decoded)


def _check_description(row: dict[str, Any], members: dict[str, bytes], *, split: str) -> list[tuple[DeepCode, str]]:
    """Compare the JSON member of a chunk with the index row, and the txt member, if present, with the JSON member."""
    try:
        description = parse_json(members["json"])
        captions = [caption["text"] for caption in description["captions"]]
        fps, begin_s, end_s = (Fraction(*description[name]) for name in ("fps", "begin_s", "end_s"))
        json_values = {
            name: description[name]
            for name in ("key", "video_id", "split", "num_frames", "width", "height", "codec", "span_fingerprint")
        }
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        return [(DeepCode.JSON_DIFFERS, f"the json member cannot be read: {error!r}")]
    start_ms = round(begin_s * 1000)
    json_values |= {"start_ms": start_ms, "fps_num": fps.numerator, "fps_den": fps.denominator}
    expected_values = {name: split if name == "split" else row[name] for name in json_values}
    expected_values["key"] = chunk_key(row["video_id"], row["start_ms"])
    differences = [
        (
            DeepCode.JSON_DIFFERS,
            f"{name}: {json_values[name]!r} in the json member, {expected_values[name]!r} in the index",
        )
        for name in json_values
        if json_values[name] != expected_values[name]
    ]
    if expected_values["key"] != row["key"]:
        differences.append(
            (DeepCode.JSON_DIFFERS, f"key: {row['key']!r} in the index instead of {expected_values['key']!r}")
        )
    if (end_s - begin_s) * fps != row["num_frames"]:
        message = f"begin_s and end_s do not match {count_noun(row['num_frames'], 'frame')}"
        differences.append((DeepCode.JSON_DIFFERS, message))
    if "txt" in members and members["txt"] != "\n".join(captions).encode("utf-8", "replace"):
        differences.append((DeepCode.JSON_DIFFERS, "the txt member differs from the captions in the json member"))
    return differences


def _decode(content: bytes, row: dict[str, Any]) -> tuple[int, tuple[DeepCode, str] | None]:
    """Decode a chunk; return (number of intact frames, first difference from the index row or None)."""
    fps, size = Fraction(row["fps_num"], row["fps_den"]), (row["width"], row["height"])
    num_decoded = 0
    with av.open(BytesIO(content), "r", format="mp4") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        # The decoder must not conceal errors: some decoders do not mark frames with concealed errors.
        stream.codec_context.options = {"err_detect": "explode"}
        for frame in container.decode(stream):
            if frame.is_corrupt:
                return num_decoded, (DeepCode.DECODE_ERRORS, f"frame {num_decoded} is damaged")
            if frame.pts is None or frame.time_base is None or frame.pts * frame.time_base * fps != num_decoded:
                return num_decoded, (DeepCode.FRAMES_DIFFER, f"frame {num_decoded} has unexpected pts {frame.pts}")
            if (frame.width, frame.height) != size:
                message = f"frame {num_decoded} has {frame.width}x{frame.height} pixels instead of {size[0]}x{size[1]}"
                return num_decoded, (DeepCode.FRAMES_DIFFER, message)
            num_decoded += 1
    if num_decoded != row["num_frames"]:
        return num_decoded, (DeepCode.FRAMES_DIFFER, f"{num_decoded} frames decoded instead of {row['num_frames']}")
    return num_decoded, None
