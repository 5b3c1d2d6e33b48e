"""A contact sheet: one HTML file, whole in itself, that shows what is in a shard set."""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from manifests.errors import UserError
from manifests.publish import publish_bytes
from prep.upkeep.recipe_text import settings_line
from prep.upkeep.status import is_readable
from prep.upkeep.status_text import size_text
from prep.video.contact_style import STYLE
from prep.video.inspection import clock, sorted_chunks
from prep.video.thumbnails import NoPicture, decode_frames, jpeg, spread
from shards.damage import DamagedTar
from shards.reader import CommittedShard, Variant

MAX_CHUNKS = 150
_PICTURES = 4
_PICTURE_HEIGHT_PX = 108
_MAX_CAPTIONS = 3


@dataclass(frozen=True)
class Card:
    """One chunk on the page; `pictures` are JPEG files, and `problem` says why there are none."""

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
    """Publishes the page and returns the number of chunks on it: at most MAX_CHUNKS, spread evenly over the set.

    Raises:
        UserError: `path` cannot be written, or no shard can be read.
    """
    shards = [shard for shard in variant.shards() if is_readable(shard)]
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UserError(f"--html {path} {why}", hint="name a file in a folder that exists")
    if not shards:
        raise UserError(f"no shard of {variant.directory} can be read", hint="`prep verify` tells what is damaged")
    chunks = sorted_chunks(shards)
    picked = np.unique(np.linspace(0, len(chunks) - 1, min(MAX_CHUNKS, len(chunks))).round().astype(np.int64))
    cards = []
    for shard, row in zip(*(chunks.take(picked)[name].to_pylist() for name in ("shard", "row")), strict=True):
        cards.append(read_card(shards[shard], row))
        on_chunk(len(cards), len(picked))
    num_chunks = Counter[str](chunks["video_id"].to_pylist())
    num_unread = len(variant.shards()) - len(shards) + len(variant.damaged)
    total_bytes = sum(commit.files.tar_bytes for commit in variant.commits.values() if commit.files)
    summary = f"{len(chunks):,} chunks of {len(num_chunks):,} videos, {size_text(total_bytes)}"
    shown = "all of them shown" if len(cards) == len(chunks) else f"{len(cards)} of them shown, spread evenly"
    unread = f"; shards that cannot be read: {num_unread}" if num_unread else ""
    text = page(
        cards,
        num_chunks=num_chunks,
        title=variant.directory.name,
        summary=f"{summary}; {shown}{unread}",
        settings=variant.recipe,
    )
    try:
        publish_bytes(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror}", hint="name another file") from None
    return len(cards)


def read_card(shard: CommittedShard, number: int) -> Card:
    """One chunk's pictures and description; damage becomes the card's text."""
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
    """The HTML of the page; every text that comes from data is escaped.

    Args:
        cards: those of a video together.
        num_chunks: that each video has, by its id.
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
            f'<section><h2>{escape(video_id)}<span>{_count(num_chunks[video_id])}</span></h2><div class="row">'
        )
        parts += [line for card in mine for line in _card_html(card)]
        parts.append("</div></section>")
    parts.append("</main></body></html>")
    return "\n".join(parts) + "\n"


def _count(num_chunks: int) -> str:
    return "1 chunk" if num_chunks == 1 else f"{num_chunks:,} chunks"


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
    yield f'<p class="place"><time>{escape(times)}</time> <code>{escape(card.key)}</code></p>'
    for text in card.captions[:_MAX_CAPTIONS]:
        yield f'<p class="caption">{escape(text)}</p>'
    if len(card.captions) > _MAX_CAPTIONS:
        yield f'<p class="more">and {len(card.captions) - _MAX_CAPTIONS} captions more</p>'
    yield "</article>"
