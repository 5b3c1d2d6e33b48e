"""The contact sheet: a self-contained HTML page with pictures from a shard set.

Each picture is a single frame, decoded with the chunk's packet table without decoding unrelated frames.
"""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from av.video.frame import VideoFrame

from manifests.errors import UserError
from manifests.publish import publish_bytes
from manifests.quoting import counted
from prep.core.plan import is_readable
from prep.core.report import size_text
from prep.video.inspection import clock
from prep.video.recipe import settings_line
from shards.damage import DamagedTar
from shards.format import PACKET_KEY, PACKET_REFERENCE
from shards.reader import CommittedShard, Variant

MAX_CHUNKS = 150
_PICTURES = 4
_PICTURE_HEIGHT_PX = 108
_MAX_CAPTIONS = 3


@dataclass(frozen=True)
class Card:
    """One chunk on the page. `pictures` are JPEG files; `problem` is the reason if there are none."""

    video_id: str
    key: str
    begin_s: float
    end_s: float
    captions: list[str]
    pictures: list[bytes]
    problem: str | None


def write_contact_sheet(
    path: Path, variant: Variant, *, on_chunk: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Publish the page and return the number of chunks on it: at most MAX_CHUNKS, evenly spaced over the shard set.

    Raises:
        UserError: `path` cannot be written, or no shard is readable.
    """
    shards = [shard for shard in variant.shards() if is_readable(shard)]
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UserError(f"--html {path} {why}", hint="give a file in an existing folder")
    if not shards:
        raise UserError(f"no readable shards in {variant.directory}", hint="run `prep verify` to find what is damaged")
    chunks = _sorted_chunks(shards)
    picked = np.unique(np.linspace(0, len(chunks) - 1, min(MAX_CHUNKS, len(chunks))).round().astype(np.int64))
    cards = []
    for shard, row in zip(*(chunks.take(picked)[name].to_pylist() for name in ("shard", "row")), strict=True):
        cards.append(read_card(shards[shard], row))
        on_chunk(len(cards), len(picked))
    num_chunks = Counter[str](chunks["video_id"].to_pylist())
    num_unread = len(variant.shards()) - len(shards) + len(variant.damaged)
    total_bytes = sum(commit.files.tar_bytes for commit in variant.commits.values() if commit.files)
    total = f"{counted(len(chunks), 'chunk')} of {counted(len(num_chunks), 'video')}, {size_text(total_bytes)}"
    shown = "" if len(cards) == len(chunks) else f"; showing {len(cards)} evenly spaced chunks"
    unread = f"; {counted(num_unread, 'shard')} cannot be read" if num_unread else ""
    text = page(
        cards,
        num_chunks=num_chunks,
        title=variant.directory.name,
        summary=f"{total}{shown}{unread}",
        settings=variant.recipe,
    )
    try:
        publish_bytes(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror}", hint="give another file") from None
    return len(cards)


def _sorted_chunks(shards: list[CommittedShard]) -> pa.Table:
    """Return video_id, start_ms, shard (index into `shards`) and row of every chunk, sorted by video and time."""
    parts = [
        shard.index.select(["video_id", "start_ms"])
        .append_column("shard", pa.array(np.full(shard.index.num_rows, number, np.int32)))
        .append_column("row", pa.array(np.arange(shard.index.num_rows, dtype=np.int32)))
        .replace_schema_metadata()
        for number, shard in enumerate(shards)
    ]
    return pa.concat_tables(parts).sort_by([("video_id", "ascending"), ("start_ms", "ascending")])


def read_card(shard: CommittedShard, number: int) -> Card:
    """Return the pictures and description of one chunk; if it is damaged, the card says so."""
    import av.error

    row: dict[str, Any] = {name: shard.index[name][number].as_py() for name in shard.index.column_names}
    seconds = row["fps_den"] / row["fps_num"]
    captions, pictures, problem = [], [], None
    try:
        captions = [str(caption["text"]) for caption in json.loads(shard.read(number, "json"))["captions"]]
        frames = spread(row["num_frames"], num_pictures=_PICTURES)
        decoded = decode_frames(shard.read(number, "mp4"), row, frames=frames)
        pictures = [jpeg(frame, height=_PICTURE_HEIGHT_PX) for frame in decoded]
    except (DamagedTar, OSError, ValueError, KeyError, NoPicture, av.error.FFmpegError) as error:
        problem = f"cannot be shown: {error}"
    begin_s = row["start_ms"] / 1000
    end_s = begin_s + row["num_frames"] * seconds
    return Card(row["video_id"], row["key"], begin_s, end_s, captions, pictures, problem)


def page(
    cards: list[Card], *, num_chunks: Mapping[str, int], title: str, summary: str, settings: dict[str, Any]
) -> str:
    """Return the HTML of the page. All text that comes from data is escaped.

    Args:
        cards: the cards, grouped by video.
        num_chunks: number of chunks of each video, by video id.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<header><h1>{escape(title)}</h1><p>{escape(summary)}</p><p><code>{escape(settings_line(settings))}</code></p>",
        "</header><main>",
    ]
    for video_id, mine in groupby(cards, key=lambda card: card.video_id):
        parts.append(
            f"<section><h2>{escape(video_id)}<span>{counted(num_chunks[video_id], 'chunk')}</span></h2>"
            '<div class="row">'
        )
        parts += [line for card in mine for line in _card_html(card)]
        parts.append("</div></section>")
    parts.append("</main></body></html>")
    return "\n".join(parts) + "\n"


def _card_html(card: Card) -> Iterator[str]:
    yield f'<article id="{escape(card.key)}">'
    if card.problem is not None:
        yield f'<p class="problem">{escape(card.problem)}</p>'
    else:
        images = "".join(
            f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(picture).decode()}">'
            for picture in card.pictures
        )
        yield f'<div class="strip">{images}</div>'
    times = f"{clock(card.begin_s)} to {clock(card.end_s)}"
    yield f'<p class="position"><time>{escape(times)}</time> <code>{escape(card.key)}</code></p>'
    for text in card.captions[:_MAX_CAPTIONS]:
        yield f'<p class="caption">{escape(text)}</p>'
    if len(card.captions) > _MAX_CAPTIONS:
        num_more = len(card.captions) - _MAX_CAPTIONS
        yield f'<p class="more">and {counted(num_more, "more caption")}</p>'
    yield "</article>"


_JPEG_QUANTISER = 5  # from 2 (best) to 31
_DECODERS = {"av1": "libdav1d"}  # libav's native av1 decoder requires hardware


class NoPicture(Exception):
    """The decoder did not return a requested frame."""


def spread(num_frames: int, *, num_pictures: int) -> list[int]:
    """Return the middle frames of `num_pictures` equal parts of a chunk."""
    count = min(num_pictures, num_frames)
    return [(2 * part + 1) * num_frames // (2 * count) for part in range(count)]


def decode_frames(content: bytes, row: dict[str, Any], *, frames: Sequence[int]) -> list[VideoFrame]:
    """Decode single frames of a chunk.

    Args:
        content: bytes of the MP4 file.
        row: row of the index (shards.format.VIDEO_FIELDS).
        frames: presentation indices of the frames.

    Raises:
        NoPicture: a frame could not be decoded.
        av.error.FFmpegError: the packets are damaged.
    """
    context = av.CodecContext.create(_DECODERS.get(row["codec"], row["codec"]), "r")
    context.extradata = row["extradata"]
    context.thread_count = 1
    position_of = {frame: position for position, frame in enumerate(row["packet_frame"])}
    pictures = []
    for wanted in frames:
        found = None
        for position in _needed(row["packet_flags"], position_of[wanted]):
            begin = row["packet_offset"][position]
            packet = av.Packet(content[begin : begin + row["packet_size"][position]])
            packet.pts, packet.time_base = row["packet_frame"][position], Fraction(1)
            found = _pick(context.decode(packet), wanted) or found
        found = _pick(context.decode(None), wanted) or found
        context.flush_buffers()
        if found is None:
            raise NoPicture(f"frame {wanted} cannot be decoded")
        pictures.append(found)
    return pictures


def jpeg(frame: VideoFrame, *, height: int) -> bytes:
    """Encode `frame` as a JPEG, scaled to a height of `height` pixels."""
    width = max(2, round(frame.width * height / frame.height / 2) * 2)
    small = frame.reformat(width=width, height=height, format="yuvj420p")
    context = av.CodecContext.create("mjpeg", "w")
    context.width, context.height, context.pix_fmt, context.time_base = width, height, "yuvj420p", Fraction(1, 25)
    context.qmin = context.qmax = _JPEG_QUANTISER
    small.pts, small.time_base = 0, Fraction(1, 25)
    return b"".join(bytes(packet) for packet in [*context.encode(small), *context.encode(None)])


def _needed(flags: Sequence[int], target: int) -> list[int]:
    """Return the packets to decode for the packet at `target`: from its key frame on, reference frames only."""
    begin = max(at for at in range(target + 1) if flags[at] & PACKET_KEY)
    return [at for at in range(begin, target + 1) if at == target or flags[at] & PACKET_REFERENCE]


def _pick(frames: Sequence[Any], wanted: int) -> VideoFrame | None:
    return next((frame for frame in frames if frame.pts == wanted), None)


STYLE = """
:root { color-scheme: light dark; --paper: #f6f6f4; --card: #fff; --ink: #1d1d1b; --soft: #6b6b66; --line: #e2e2dc;
  --alarm: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #141413; --card: #1e1e1c; --ink: #ececE6; --soft: #9c9c95; --line: #32322e; --alarm: #f2b8b5; } }
* { box-sizing: border-box; margin: 0; }
body { background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; padding: 24px; }
header { margin-bottom: 24px; }
h1 { font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
header p { color: var(--soft); margin-top: 4px; overflow-wrap: anywhere; }
h2 { font-size: 14px; font-weight: 600; margin: 20px 0 8px; padding-top: 12px; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
h2 span { color: var(--soft); font-weight: 400; margin-left: 8px; }
code { font: 12px/1.4 ui-monospace, monospace; color: var(--soft); overflow-wrap: anywhere; }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); gap: 12px; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; overflow: hidden;
  padding-bottom: 8px; }
.strip { display: flex; gap: 1px; background: #000; align-items: center; }
.strip img { flex: 1 1 0; min-width: 0; max-width: 25%; height: auto; max-height: 140px; object-fit: contain;
  display: block; }
article p { padding: 4px 10px 0; }
.position { display: flex; justify-content: space-between; gap: 10px; flex-wrap: wrap; }
time { font-variant-numeric: tabular-nums; font-weight: 600; }
.caption { overflow-wrap: anywhere; }
.more { color: var(--soft); }
.problem { color: var(--alarm); min-height: 72px; padding-top: 10px; overflow-wrap: anywhere; }
"""
