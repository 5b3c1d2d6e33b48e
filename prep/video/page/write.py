"""Write the page of `prep inspect --html`: choose chunks, write their clips and the pages, and return the report.

Only the cards of the chosen chunks are read, one page at a time.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, short_number, size_text
from clipmill.manifests.storage.mirrors import mirror_of, show_urls
from clipmill.manifests.storage.urls import mask_secrets
from clipmill.manifests.store import read_videos
from clipmill.prep.core.report import publish_page
from clipmill.prep.core.work import PageRequest, Report
from clipmill.prep.video.codecs import CODECS
from clipmill.prep.video.column import settings_line
from clipmill.prep.video.page.cards import PREVIEW_S, Card, ClipFolder, ClipPlan, plan_clips, read_details
from clipmill.prep.video.page.chunks import (
    Chunks,
    ChunkScores,
    Distribution,
    SplitTotal,
    choose_chunks,
    count_captions,
    distributions,
    labels_of,
    model_captions_of,
    read_chunks,
    scores_of,
    split_totals,
)
from clipmill.shards.columns import CAPTIONS, VIDEO
from clipmill.shards.columns import SCORES as SCORES_COLUMN
from clipmill.shards.dataset import current_variant
from clipmill.shards.pages.templates import SEARCH_SCRIPT, require_page_path
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import SCORES

PAGE_CHUNKS = 150  # maximum number of chunks on a page
_BUCKET_THREADS = 16
_MAX_OPTIONS = 400  # maximum number of values in a filter menu
TEMPLATE = Path(__file__).with_name("chunks.html.j2")
_SCRIPT = Path(__file__).with_name("chunks.js").read_text()
# Description of the frames between key frames, by GOP layout.
_LAYOUTS = {
    "comb": " with a P frame every 16 frames and skippable B frames between them",
    "star": " with one P frame and skippable B frames between them",
    "closed": "",
}
_CODEC_NAMES = {
    **{"h264": "H.264", "h264_nvenc": "H.264 (NVENC)", "hevc": "HEVC", "hevc_nvenc": "HEVC (NVENC)"},
    **{"av1": "AV1", "av1_nvenc": "AV1 (NVENC)", "vp9": "VP9", "mjpeg": "MJPEG"},
}
_LENGTH = re.compile(r"(\d[\d./]*)(ms|s|m|min|h)")


@dataclass(frozen=True)
class Header:
    """Text about all chunks, at the top of the first page.

    Attributes:
        variant: Name of the variant.
        summary: Number of chunks, videos and bytes, and the selection of chunks that are shown.
        settings: Description of the settings, and all settings as they are stored.
        tiles: Values and names of totals.
        splits: Totals of each split.
        distributions: Distributions of lengths, scores and other quantities.
        notes: Reasons why information is missing.
        holes: Descriptions of the shards that cannot be read.
        clips: Description of the clips.
    """

    variant: str
    summary: str
    settings: tuple[str, str]
    tiles: Sequence[tuple[str, str]]
    splits: Sequence[SplitTotal]
    distributions: Sequence[Distribution]
    notes: Sequence[str]
    holes: Sequence[str]
    clips: str


def summary(all_chunks: Chunks, chunks: Chunks, *, num_shown: int, variant: Variant, where: str | None) -> str:
    """Describe the number of chunks, videos and bytes, and the selection of chunks that are shown."""
    num_videos = len(np.unique(chunks.video))
    selection = f"{len(chunks):,} of {count_noun(len(all_chunks), 'chunk')}, selected by {where}," if where else ""
    size = size_text(int(variant.tar_files.sizes.sum() if where is None else chunks.size_bytes.sum()))
    total = f"{selection or count_noun(len(chunks), 'chunk')} of {count_noun(num_videos, 'video')}, {size}"
    limit = "" if num_shown == len(chunks) else f"; showing {num_shown:,} evenly spaced chunks from all splits"
    holes = f"; {count_noun(len(chunks.holes), 'shard')} missing or damaged" if chunks.holes else ""
    return f"{total}{limit}{holes}"


def tiles(chunks: Chunks, variant: Variant) -> list[tuple[str, str]]:
    """Return (value, name) of each total."""
    seconds, size_bytes = float(chunks.duration_s.sum()), int(chunks.size_bytes.sum())
    totals = [
        (f"{len(np.unique(chunks.video)):,}", "videos"),
        (f"{len(chunks):,}", "chunks"),
        (duration_text(seconds), "of video"),
        (size_text(size_bytes), "of encoded video"),
        (f"{short_number(size_bytes * 8e-3 / max(seconds, 1e-3))} kbit/s", "mean bit rate"),
        (f"{variant.num_shards:,}", "shard" if variant.num_shards == 1 else "shards"),
    ]
    failures = sum(len(commit.failures) for commit in variant.commits.values())
    return [*totals, (f"{failures:,}", "failed parts of videos: see prep status")] if failures else totals


def describe_settings(recipe: Mapping[str, Any]) -> str:
    """Describe the settings that a recipe.json contains."""
    parts = [_CODEC_NAMES.get(str(recipe.get("codec")), str(recipe.get("codec", "")))]
    for name, text in (
        ("short_side", "short side {} px"),
        ("fps", "{} fps"),
        ("crf", "CRF {}"),
        ("bitrate", "{}bit/s"),
    ):
        if recipe.get(name) is not None:
            parts.append(text.format(recipe[name]))
    if (keyint := recipe.get("keyint")) is not None:
        layout, details = f"a key frame every {keyint} frames", _LAYOUTS.get(gop := str(recipe.get("gop")))
        layout = layout if details is None else f"{gop}{keyint}: {layout}{details}"  # as in the name of the variant
        parts.append("key frames only" if keyint == 1 else layout)
    if (length := recipe.get("len")) is not None:
        length = _LENGTH.sub(r"\1 \2", str(length))
        parts.append(f"cut at shots, up to {length}" if recipe.get("cut") == "shots" else f"chunks of {length}")
    return ", ".join(part for part in parts if part)


def write_chunk_page(variant: Variant, request: PageRequest) -> Report:
    """Publish the pages and clips of up to `request.num_samples` evenly spaced chunks (default: PAGE_CHUNKS).

    Raises:
        UserError: A file cannot be written, no shard is readable, or `request.where` matches no chunk.
    """
    require_page_path(request.path, flag="--html")
    folder = ClipFolder(request.path)
    data_dir = variant.directory.parent.parent
    all_chunks = read_chunks(variant)
    chunks = all_chunks if request.where is None else all_chunks.select(request.where, data_dir)
    rows = choose_chunks(chunks, num_chunks=request.num_samples or PAGE_CHUNKS)
    codec = str(variant.recipe.get("codec"))
    codec = CODECS[codec].decoder if codec in CODECS else codec
    plan = plan_clips(codec, total_bytes=int(chunks.size_bytes[rows].sum()))
    count = -(-len(rows) // PAGE_CHUNKS)
    if count > 1 or not plan.is_embedded:
        folder.make()
    # Scores and generated captions belong to the current variant. If they cannot be read, the page shows a note.
    notes: list[str] = []
    is_current = current_variant(data_dir, VIDEO) == variant.directory.name
    has_scores, has_model_captions = (
        is_current and (data_dir / column).is_dir() for column in (SCORES_COLUMN, CAPTIONS)
    )
    scores = _read_or_note(lambda: scores_of(chunks, data_dir), notes) if has_scores else None
    model_captions = _read_or_note(lambda: model_captions_of(chunks, data_dir), notes) if has_model_captions else {}
    captions = _read_or_note(lambda: count_captions(chunks, data_dir), notes)
    labels = {} if captions is None else labels_of(chunks, rows, data_dir)
    holes = []
    for hole in chunks.holes.values():
        content = "" if hole.num_chunks is None else f" ({hole.split}, {count_noun(hole.num_chunks, 'chunk')})"
        holes.append(show_urls(f"Shard {hole.shard_id:06d}{content}: {hole.reason}"))
    clips = f"Clips are {plan.reason}."
    if plan.is_preview:
        encoding = f"encoded again as H.264 with a short side of 240 pixels, each at most {PREVIEW_S:.0f} s long"
        clips = f"Clips are previews, {encoding}: {plan.reason}."
    header = Header(
        variant=variant.directory.name,
        summary=summary(all_chunks, chunks, num_shown=len(rows), variant=variant, where=request.where),
        settings=(describe_settings(variant.recipe), settings_line(variant.recipe)),
        tiles=tiles(chunks, variant),
        splits=split_totals(chunks),
        distributions=distributions(chunks, captions=captions, scores=scores),
        notes=[show_urls(note) for note in notes],
        holes=holes,
        clips=clips,
    )
    chunk_info = _ChunkDetails(scores, model_captions or {}, labels)
    cards = _cards(variant, chunks, rows, chunk_info=chunk_info, plan=plan, folder=folder, on_card=request.on_sample)
    return _publish(cards, header, request.path, folder=folder, plan=plan, num_shown=len(rows), num_all=len(chunks))


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
    """Write the pages, remove clips of earlier pages, and return the report."""
    count = -(-num_shown // PAGE_CHUNKS)
    media = "data:" if plan.is_embedded else "'self' file:"  # for the content security policy
    pages = [PageLinks(path.name, folder.url, number, count, num_shown) for number in range(1, count + 1)]
    kept_names: set[str] = set()
    listed_cards: list[tuple[Card, int]] = []
    written_bytes, clip_bytes = 0, 0
    first_cards: list[Card] = []

    def publish(file: Path, cards: Sequence[tuple[Card, int]], page: PageLinks) -> int:
        return publish_page(file, TEMPLATE, **page_values(cards, header, page, media=media))

    for page in pages:
        page_cards = [
            card for _, card in zip(range(min(PAGE_CHUNKS, num_shown - len(listed_cards))), cards, strict=False)
        ]
        clips = [card.clip for card in page_cards if card.clip is not None]
        clip_bytes += sum(clip.size_bytes for clip in clips)
        kept_names |= {clip.url for clip in clips if not plan.is_embedded}
        # The list of all chunks has no images, so that even thousands of chunks can be searched.
        listed_cards += [(replace(card, pictures=(), clip=None), page.number) for card in page_cards]
        if page.number == 1:
            first_cards = page_cards  # publish the first page last, when the pages and clips that it links to exist
        else:
            name = f"page-{page.number}.html"
            written_bytes += publish(folder.path / name, [(card, page.number) for card in page_cards], page)
            kept_names.add(name)
    if count > 1:
        written_bytes += publish(folder.path / "all.html", listed_cards, replace(pages[0], number=0))
        kept_names.add("all.html")
    written_bytes += publish(path, [(card, 1) for card in first_cards], pages[0])
    folder.sweep(kept_names)
    num_problems = sum(card.problem is not None for card, _ in listed_cards)
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
        "folder": os.fspath(folder.path) if kept_names else None,
    }
    total = (
        count_noun(num_all, "chunk") if num_shown == num_all else f"{num_shown:,} of {num_all:,} chunks, evenly spaced"
    )
    lines = [f"{path}: {total}{f', on {count} pages' if count > 1 else ''}"]
    problems = [f"{count_noun(len(header.holes), 'shard')} missing or damaged"] if header.holes else []
    problems += [f"{count_noun(num_problems, 'chunk')} cannot be shown"] if num_problems else []
    if problems:
        lines.append(f"{', '.join(problems)}: run `prep verify` for the command that repairs them")
    if plan.is_embedded:
        lines.append(f"one file of {size_text(written_bytes)}, clips included")
    else:
        kind = "previews" if plan.is_preview else "clips"
        lines.append(
            f"{size_text(written_bytes)} of pages, and {size_text(clip_bytes)} of {kind} in {folder.path}: keep both"
            " together"
        )
    lines.append(f"open the page in a browser: {path.resolve().as_uri()}")
    return Report("\n".join(lines), values)


@dataclass(frozen=True)
class _ChunkDetails:
    """Information about chunks that is not in their shards: scores, and captions and labels by row of `Chunks`."""

    scores: ChunkScores | None
    model_captions: Mapping[int, str]
    labels: Mapping[int, tuple[tuple[str, str], ...]]


def _cards(
    variant: Variant,
    chunks: Chunks,
    chunk_rows: NDArray[np.int64],
    *,
    chunk_info: _ChunkDetails,
    plan: ClipPlan,
    folder: ClipFolder,
    on_card: Callable[[int, int], None],
) -> Iterator[Card]:
    """Yield the cards of the chunks in `chunk_rows`, in order. Only the cards of one page are in memory at a time."""
    data_dir = variant.directory.parent.parent
    paths: dict[str, str] = {}  # source files of the videos on the page, if the manifest contains them
    with suppress(UserError):
        videos = read_videos(data_dir)
        video_ids = chunks.video_ids.take(np.unique(chunks.video[chunk_rows]))
        rows = videos.select(["video_id", "path"]).filter(pc.is_in(videos["video_id"], value_set=video_ids))
        paths = {row["video_id"]: mask_secrets(row["path"]) for row in rows.to_pylist()}
    is_remote = mirror_of(data_dir) is not None
    num_threads = _BUCKET_THREADS if is_remote else len(os.sched_getaffinity(0))

    def make_card(chunk_row: int) -> Card:
        shard_id, row = int(chunks.shard[chunk_row]), int(chunks.row[chunk_row])
        video_id = chunks.video_ids[int(chunks.video[chunk_row])].as_py()
        begin_s = float(chunks.start_ms[chunk_row]) / 1000
        card = Card(
            key=chunks.key(chunk_row),
            video_id=video_id,
            split=chunks.splits[int(chunks.split[chunk_row])],
            begin_s=begin_s,
            end_s=begin_s + float(chunks.duration_s[chunk_row]),
            size_bytes=int(chunks.size_bytes[chunk_row]),
            location=f"shard {shard_id:06d}, row {row}",
            path=paths.get(video_id, ""),
            scores={} if chunk_info.scores is None else chunk_info.scores.values(chunk_row),
            model_caption=chunk_info.model_captions.get(chunk_row, ""),
            labels=chunk_info.labels.get(chunk_row, ()),
        )
        details = read_details(variant.shard(shard_id), row, plan=plan, folder=folder)
        if "problem" in details:
            hole = chunks.holes.get(shard_id)
            problem = details["problem"] if hole is None else f"cannot be shown: {hole.reason}"
            details["problem"] = show_urls(problem)
        return replace(card, **details)

    with ThreadPoolExecutor(num_threads) as pool:
        for begin in range(0, len(chunk_rows), PAGE_CHUNKS):
            page_rows = chunk_rows[begin : begin + PAGE_CHUNKS].tolist()
            for num_done, card in enumerate(pool.map(make_card, page_rows), begin + 1):
                on_card(num_done, len(chunk_rows))
                yield card


def _read_or_note(read: Callable[[], Any], notes: list[str]) -> Any:
    """Return the result of `read`; if it raises a UserError, add the reason to `notes` and return None."""
    try:
        return read()
    except UserError as error:
        notes.append(f"Not shown: {error}")
        return None


@dataclass(frozen=True)
class PageLinks:
    """Links from one page to the others. The first page is beside the folder that holds the other pages and the list.

    Attributes:
        name: File name of the first page.
        folder: URL of the folder, relative to the first page.
        number: Number of this page; 0 for the list of all chunks.
        count: Number of pages.
        num_shown: Number of chunks on all pages.
    """

    name: str
    folder: str
    number: int
    count: int
    num_shown: int

    @property
    def is_list(self) -> bool:
        """True if this page is the list of all chunks, which has no images."""
        return self.number == 0

    def url(self, number: int) -> str:
        """Return the URL of a page, relative to this page."""
        if number == self.number:
            return ""
        if number == 1:
            return f"../{quote(self.name)}"
        return f"{self.folder_url}page-{number}.html"

    @property
    def folder_url(self) -> str:
        """URL of the folder, relative to this page."""
        return self.folder if self.number == 1 else ""

    @property
    def linked_numbers(self) -> list[int | None]:
        """Numbers of the pages in the navigation bar, with None for each gap."""
        visible_numbers = {1, self.count, *range(max(1, self.number - 2), min(self.count, self.number + 2) + 1)}
        numbers: list[int | None] = []
        previous_number = 0
        for number in sorted(visible_numbers):
            numbers += [None, number] if number > previous_number + 1 else [number]
            previous_number = number
        return numbers


def page_values(cards: Sequence[tuple[Card, int]], header: Header, pages: PageLinks, *, media: str) -> dict[str, Any]:
    """Return the values for the template.

    Args:
        cards: Cards of the page, each with the number of the page that shows its images.
        media: Sources of clips, for the content security policy.
    """
    part = ", list of chunks" if pages.is_list else "" if pages.number == 1 else f", page {pages.number}"
    page_cards = [card for card, _ in cards]
    values_of_filters = (
        ("split", "Split", [card.split for card in page_cards]),
        ("dataset", "Dataset", [card.dataset for card in page_cards if card.dataset]),
        ("video", "Source video", [card.video_id for card in page_cards]),
    )
    # A filter with a single value does not distinguish chunks, and a menu of thousands of values is unusable.
    values_of_labels: dict[str, dict[str, None]] = {}
    for card in page_cards:
        for name, value in card.labels:
            values_of_labels.setdefault(name, {})[value] = None
    filters = [(name, label, list(dict.fromkeys(values))) for name, label, values in values_of_filters]
    filters += [(f"label={name}", f"Label {name}", sorted(values)) for name, values in values_of_labels.items()]
    filters = [entry for entry in filters if 1 < len(entry[2]) <= _MAX_OPTIONS]
    orders = [("order", "video and time"), ("length", "longest first"), ("bitrate", "highest bit rate first")]
    orders += [("captions", "most captions first")] if any(card.captions for card in page_cards) else []
    sort_labels = [(score.name, score.sort_label) for score in SCORES if score.sort_label]
    orders += [(name, label) for name, label in sort_labels if any(name in card.scores for card in page_cards)]
    return {
        "title": f"Chunks{part}",
        "header": header,
        "pages": pages,
        "filters": filters,
        "orders": orders,
        "cards": [(card, f"{pages.url(number)}#{quote(card.key)}" if pages.is_list else "") for card, number in cards],
        "scripts": [SEARCH_SCRIPT, _SCRIPT],
        "media": media,
    }
