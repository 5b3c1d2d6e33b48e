"""Writing the page of `prep inspect --html`: the choice of chunks, their clips, the pages, and what was written."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.storage.mirrors import mirror_of, show_addresses
from clipmill.manifests.storage.urls import mask_secrets
from clipmill.manifests.store import read_videos
from clipmill.prep.core.pages import PageRequest, publish_page
from clipmill.prep.core.report import Report
from clipmill.prep.video.codecs import CODECS
from clipmill.prep.video.page.cards import Card, read_details
from clipmill.prep.video.page.chunks import Chunks, chosen, read_chunks
from clipmill.prep.video.page.clips import ClipFolder, ClipPlan, plan_clips
from clipmill.prep.video.page.header import Header, clips_text, hole_text, settings_words, summary, tiles
from clipmill.prep.video.page.html import TEMPLATE, Pages, page_values
from clipmill.prep.video.page.totals import (
    ChunkScores,
    distributions,
    labels_of,
    num_captions,
    scores_of,
    split_totals,
    written_of,
)
from clipmill.prep.video.recipe import settings_line
from clipmill.shards.columns import CAPTIONS, SCORES, VIDEO
from clipmill.shards.dataset import current_variant
from clipmill.shards.pages.templates import require_page_path
from clipmill.shards.reader import Variant

PAGE_CHUNKS = 150
_BUCKET_THREADS = 16


def write_chunk_page(variant: Variant, request: PageRequest) -> Report:
    """Publish the pages and clips of up to `request.num_samples` chunks (by default PAGE_CHUNKS), drawn evenly.

    Raises:
        UserError: a file cannot be written, no shard is readable, or `request.where` keeps no chunk.
    """
    require_page_path(request.path, flag="--html")
    folder = ClipFolder(request.path)
    data_dir = variant.directory.parent.parent
    everything = read_chunks(variant)
    chunks = everything if request.where is None else everything.kept(request.where, data_dir)
    picked = chosen(chunks, num_chunks=request.num_samples or PAGE_CHUNKS)
    plan = plan_clips(_codec(variant), total_bytes=int(chunks.size_bytes[picked].sum()))
    count = -(-len(picked) // PAGE_CHUNKS)
    if count > 1 or not plan.is_embedded:
        folder.make()
    notes: list[str] = []
    is_current = current_variant(data_dir, VIDEO) == variant.directory.name
    scores = _or_note(lambda: scores_of(chunks, data_dir), notes) if is_current and _has(data_dir, SCORES) else None
    written = _or_note(lambda: written_of(chunks, data_dir), notes) if is_current and _has(data_dir, CAPTIONS) else {}
    captions = _or_note(lambda: num_captions(chunks, data_dir), notes)
    labels = {} if captions is None else labels_of(chunks, picked, data_dir)
    header = Header(
        variant=variant.directory.name,
        summary=summary(everything, chunks, num_shown=len(picked), variant=variant, where=request.where),
        settings=(settings_words(variant.recipe), settings_line(variant.recipe)),
        tiles=tiles(chunks, variant),
        splits=split_totals(chunks),
        distributions=distributions(chunks, captions=captions, scores=scores),
        notes=[show_addresses(note) for note in notes],
        holes=[show_addresses(hole_text(hole)) for hole in chunks.holes.values()],
        clips=clips_text(plan),
    )
    known = _Known(scores, written or {}, labels)
    cards = _cards(variant, chunks, picked, known=known, plan=plan, folder=folder, on_card=request.on_sample)
    return _publish(cards, header, request.path, folder=folder, plan=plan, num_shown=len(picked), num_all=len(chunks))


def _publish(
    cards: Iterator[Card],
    header: Header,
    path: Path,
    *,
    folder: ClipFolder,
    plan: ClipPlan,
    num_shown: int,
    num_all: int,
) -> Report:
    count = -(-num_shown // PAGE_CHUNKS)
    media = "data:" if plan.is_embedded else "'self' file:"
    pages = [Pages(path.name, folder.address, number, count, num_shown) for number in range(1, count + 1)]
    kept: set[str] = set()
    listed: list[tuple[Card, int]] = []
    written_bytes, clip_bytes = 0, 0
    first: list[Card] = []

    def publish(file: Path, cards: Sequence[tuple[Card, int]], page: Pages) -> int:
        return publish_page(file, TEMPLATE, **page_values(cards, header, page, media=media))

    for page in pages:
        mine = [card for _, card in zip(range(min(PAGE_CHUNKS, num_shown - len(listed))), cards, strict=False)]
        clips = [card.clip for card in mine if card.clip is not None]
        clip_bytes += sum(clip.size_bytes for clip in clips)
        kept |= {clip.address for clip in clips if not plan.is_embedded}
        listed += [(replace(card, pictures=(), clip=None), page.number) for card in mine]
        if page.number == 1:
            first = mine  # published last: what it names exists then
        else:
            name = f"page-{page.number}.html"
            written_bytes += publish(folder.path / name, [(card, page.number) for card in mine], page)
            kept.add(name)
    if count > 1:
        written_bytes += publish(folder.path / "all.html", listed, replace(pages[0], number=0))
        kept.add("all.html")
    written_bytes += publish(path, [(card, 1) for card in first], pages[0])
    folder.sweep(kept)
    num_problems = sum(card.problem is not None for card, _ in listed)
    values: dict[str, Any] = {
        "html": os.fspath(path),
        "num_chunks": num_shown,
        "num_all_chunks": num_all,
        "num_pages": count,
        "num_unreadable": num_problems,
        "num_damaged_shards": len(header.holes),
        "html_bytes": written_bytes,
        "clips": "embedded" if plan.is_embedded else "preview" if plan.is_preview else "copy",
        "clip_bytes": clip_bytes,
        "folder": os.fspath(folder.path) if kept else None,
    }
    of_all = (
        count_noun(num_all, "chunk") if num_shown == num_all else f"{num_shown:,} of {num_all:,} chunks, drawn evenly"
    )
    lines = [f"{path}: {of_all}{f', on {count} pages' if count > 1 else ''}"]
    problems = [f"{count_noun(len(header.holes), 'shard')} missing or damaged"] if header.holes else []
    problems += [f"{count_noun(num_problems, 'chunk')} cannot be shown"] if num_problems else []
    if problems:
        lines.append(f"{', '.join(problems)}: run prep verify for the command that repairs them")
    if plan.is_embedded:
        lines.append(f"one file of {size_text(written_bytes)}, clips included")
    else:
        kind = "previews" if plan.is_preview else "clips"
        lines.append(
            f"{size_text(written_bytes)} of pages, and {size_text(clip_bytes)} of {kind} in {folder.path}: keep both"
            " together"
        )
    lines.append(f"open it in a browser: {path.resolve().as_uri()}")
    return Report("\n".join(lines), values)


@dataclass(frozen=True)
class _Known:
    """What is known about chunks besides their shards: scores; captions and labels by the number of their chunk."""

    scores: ChunkScores | None
    written: Mapping[int, str]
    labels: Mapping[int, tuple[str, ...]]


def _cards(
    variant: Variant,
    chunks: Chunks,
    picked: NDArray[np.int64],
    *,
    known: _Known,
    plan: ClipPlan,
    folder: ClipFolder,
    on_card: Callable[[int, int], None],
) -> Iterator[Card]:
    """Yield the cards in order; at most one page of them is in memory."""
    data_dir = variant.directory.parent.parent
    paths = _paths(chunks, picked, data_dir)
    is_remote = mirror_of(data_dir) is not None
    num_threads = _BUCKET_THREADS if is_remote else len(os.sched_getaffinity(0))

    def made_card(number: int) -> Card:
        shard_id, row = int(chunks.shard[number]), int(chunks.row[number])
        video_id = chunks.video_ids[int(chunks.video[number])].as_py()
        begin_s = float(chunks.start_ms[number]) / 1000
        card = Card(
            key=chunks.key(number),
            video_id=video_id,
            split=chunks.splits[int(chunks.split[number])],
            begin_s=begin_s,
            end_s=begin_s + float(chunks.duration_s[number]),
            size_bytes=int(chunks.size_bytes[number]),
            place=f"shard {shard_id:06d}, row {row}",
            path=paths.get(video_id, ""),
            scores={} if known.scores is None else known.scores.of(number),
            written=known.written.get(number, ""),
            labels=known.labels.get(number, ()),
        )
        details = read_details(variant.shard(shard_id), row, plan=plan, folder=folder)
        if "problem" in details:
            hole = chunks.holes.get(shard_id)
            why = details["problem"] if hole is None else f"cannot be shown: {hole.why}"
            details["problem"] = show_addresses(why)
        return replace(card, **details)

    with ThreadPoolExecutor(num_threads) as pool:
        for begin in range(0, len(picked), PAGE_CHUNKS):
            part = picked[begin : begin + PAGE_CHUNKS].tolist()
            for done, made in enumerate(pool.map(made_card, part), begin + 1):
                on_card(done, len(picked))
                yield made


def _paths(chunks: Chunks, picked: NDArray[np.int64], data_dir: Path) -> dict[str, str]:
    """Return the source file of each video that is shown, as far as the manifest has it."""
    try:
        videos = read_videos(data_dir)
    except UserError:
        return {}
    wanted = chunks.video_ids.take(np.unique(chunks.video[picked]))
    mine = videos.select(["video_id", "path"]).filter(pc.is_in(videos["video_id"], value_set=wanted))
    return {row["video_id"]: mask_secrets(row["path"]) for row in mine.to_pylist()}


def _or_note(read: Callable[[], Any], notes: list[str]) -> Any:
    """Return what `read` returns; if it cannot, add the reason to `notes`."""
    try:
        return read()
    except UserError as error:
        notes.append(f"Not shown: {error}")
        return None


def _has(data_dir: Path, column: str) -> bool:
    return (data_dir / column).is_dir()


def _codec(variant: Variant) -> str:
    """Return libav's name of the codec of a variant."""
    name = str(variant.recipe.get("codec"))
    return CODECS[name].decoder if name in CODECS else name
