"""Sources and models of the stored captions, and captions that lie outside their video or its chunks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.further_sources import source_counts
from clipmill.manifests.previous import FURTHER_KEY
from clipmill.manifests.store import open_captions, read_manifest
from clipmill.prep.core.failure_list import MAX_ENTRIES, FailureEntry, first_few
from clipmill.prep.sources.table import probes_of, read_probes
from clipmill.shards.chunk_table import Moments, read_chunk_rows
from clipmill.shards.columns import CAPTIONS, VIDEO
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant

_ROUNDING_S = 1.0  # captions that end at most this long after their video are not reported


@dataclass(frozen=True)
class CaptionSource:
    """Source of captions.

    Attributes:
        name: Name of the source.
        num_captions: Number of captions.
        is_further: True if `prep manifest captions` added the source; False if the captions came with the dataset.
        weights: Names of the models that wrote the captions, with the first digits of the SHA-256 of their weights.
        stale_because: Reason why the captions are stale (made from data that are no longer current), or None.
    """

    name: str
    num_captions: int
    is_further: bool
    weights: tuple[str, ...] = ()
    stale_because: str | None = None


def read_caption_sources(data_dir: Path) -> list[CaptionSource]:
    """Read the caption sources in the manifest: dataset sources first, then other sources, each group sorted by name.

    Raises:
        UserError: The manifest is missing or damaged.
    """
    with open_captions(data_dir) as file:
        counts = source_counts(file)
    further_sources: Mapping[str, Any] = read_manifest(data_dir).get(FURTHER_KEY, {})
    current = current_variant(data_dir, VIDEO)
    sources = []
    for name in sorted(counts, key=lambda name: (name in further_sources, name)):
        models = further_sources[name]["models"] if name in further_sources else []
        variants = other_variants(models, current=current)
        stale_because = (
            f"the captions describe chunks of {', '.join(variants)}, not of the current variant"
            if variants
            else _changed_column(models, data_dir)
        )
        weights = []
        for model in models:
            digest = model.get("weights_sha256")
            label = str(model.get("weights", "unknown weights"))
            weights.append(label if digest is None else f"{label} (SHA-256 {str(digest)[:8]})")
        sources.append(
            CaptionSource(
                name=name,
                num_captions=counts[name],
                is_further=name in further_sources,
                weights=tuple(dict.fromkeys(weights)),
                stale_because=stale_because,
            )
        )
    return sources


@dataclass(frozen=True)
class LateCaptions:
    """Captions that begin or end after the end of their video.

    Attributes:
        num_begin: Number of captions that begin at or after the end of their video.
        num_end: Number of other captions that end more than a second after the end of their video.
        first: First few captions that begin or end too late.
    """

    num_begin: int
    num_end: int
    first: list[FailureEntry]


def find_late_captions(data_dir: Path, *, video_ids: pa.ChunkedArray, end_s: np.ndarray) -> LateCaptions:
    """Find the captions that begin or end after the end of their video.

    A caption may end up to a second after its video, because times are often rounded.

    Args:
        video_ids: IDs of the videos in the manifest.
        end_s: End of each video in seconds, float64; +inf if unknown.

    Raises:
        UserError: The manifest is missing or damaged.
        OSError, ArrowException: The caption table cannot be read.
    """
    captions = open_stored_captions(data_dir)
    captions.verify()
    num_begin = num_end = 0
    first_captions: list[FailureEntry] = []
    for block in captions.blocks():
        begins_late = block.begin_s >= end_s[block.video]
        ends_late = ~begins_late & np.isfinite(block.end_s) & (block.end_s > end_s[block.video] + _ROUNDING_S)
        num_begin += int(block.counts[begins_late].sum())
        num_end += int(block.counts[ends_late].sum())
        for code, is_beyond in (("begins_after_end", begins_late), ("ends_after_end", ends_late)):
            for span in np.flatnonzero(is_beyond)[:MAX_ENTRIES].tolist():
                video, caption = int(block.video[span]), int(block.counts[:span].sum())
                end = f" to {block.end_s[span]:g} s" if np.isfinite(block.end_s[span]) else ""
                times = f"{block.begin_s[span]:g} s{end}, in a video of {end_s[video]:g} s"
                text = captions.texts[int(block.row[caption])].as_py()
                first_captions.append(FailureEntry(video_ids[video].as_py(), code, f"{times}: {text}"))
    return LateCaptions(num_begin, num_end, first_few(first_captions))


def other_variants(models: list[Mapping[str, Any]], *, current: str | None) -> list[str]:
    """Return the variants of `video`, except the current variant, whose chunks the captions of a source describe.

    Args:
        models: Records of the models that wrote the captions of the source.
        current: Name of the current variant. If None, the result is empty.
    """
    variants = {str(model["video_variant"]) for model in models if model.get("video_variant") is not None}
    return sorted(variants - {current}) if current is not None else []


def _changed_column(models: list[Mapping[str, Any]], data_dir: Path) -> str | None:
    """Return why captions from the column `captions` are stale; None if they are current or not from this column."""
    current = current_variant(data_dir, CAPTIONS)
    for model in models:
        variant = model.get("captions_variant")
        if variant is None or current is None:
            continue
        if variant != current:
            return f'the source was made from {variant}, but the current variant of the column "captions" is {current}'
        if model.get("commits_sha256") != Variant.open(data_dir, column=CAPTIONS).commits.digest.decode():
            return 'the column "captions" has changed since its captions.parquet was added; add the file again'
    return None


_TIMES = ("start_ms", "num_frames", "fps_num", "fps_den")
_MAX_TIME_MS = 1e15  # longer than any video; larger times, such as infinity, are reduced to this value


def ends_of_videos(data_dir: Path, videos: pa.Table) -> np.ndarray:
    """Return the end of each video in seconds, float64 [videos]; +inf for videos without a successful probe.

    Args:
        videos: Table with schema VIDEOS.
    """
    probes, is_known = probes_of(videos["path"], read_probes(data_dir, columns=["path", "end_s"]))
    ends_s = np.full(len(videos), np.inf)
    ends_s[is_known] = pc.fill_null(probes["end_s"], np.inf).to_numpy()
    return ends_s


def chunk_finder(data_dir: Path, videos: pa.Table) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None:
    """Return a function that finds captions overlapping a chunk of their video.

    Args:
        videos: Table with schema VIDEOS.

    Returns:
        Function (rows of the videos, starts in s, ends in s) -> bool [captions], True for captions that overlap a
        chunk. None if there are no chunks yet or the chunks cannot be read.
    """
    name = current_variant(data_dir, VIDEO)
    if name is None:
        return None
    try:
        chunks = read_chunk_rows(Variant(variant_dir(data_dir, VIDEO, name)), columns=("video_id", *_TIMES))
    except (Damaged, OSError):
        return None
    if not len(chunks.table):
        return None
    ids = videos["video_id"].combine_chunks()
    entries, codes = chunks.dictionary_codes("video_id")
    video_rows = pc.index_in(entries, value_set=ids).fill_null(-1).to_numpy().astype(np.int64)[codes]
    start_ms, frames, fps_num, fps_den = (chunks.table[name].to_numpy().astype(np.int64) for name in _TIMES)
    end_ms = start_ms + frames * fps_den * 1000 // fps_num
    is_known = video_rows >= 0
    video_rows, start_ms, end_ms = video_rows[is_known], start_ms[is_known], end_ms[is_known]
    moments = Moments.build(video_rows, start_ms, end_ms)
    order = np.lexsort((start_ms, video_rows))
    starts, ends = (moments.numbers(video_rows, times)[order] for times in (start_ms, end_ms))

    def has_chunk(rows: np.ndarray, begin_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
        times_ms = (np.minimum(times * 1000, _MAX_TIME_MS).astype(np.int64) for times in (begin_s, end_s))
        caption_starts, caption_ends = (moments.numbers(rows, times) for times in times_ms)
        # Chunks do not overlap, so only the last chunk that begins before the end of the caption matters.
        last_chunks = np.searchsorted(starts, caption_ends) - 1
        if not len(starts):
            return np.zeros(len(rows), bool)
        return (last_chunks >= 0) & (ends[np.maximum(last_chunks, 0)] > caption_starts)

    return has_chunk
