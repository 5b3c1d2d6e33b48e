"""The texts at the top of a page of chunks: totals, settings in words, and what could not be read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clipmill.manifests.formatting import count_noun, duration_text, short_number, size_text
from clipmill.prep.video.page.chunks import Chunks, Hole
from clipmill.prep.video.page.clips import ClipPlan
from clipmill.prep.video.page.pictures import PREVIEW_S
from clipmill.prep.video.page.totals import Distribution, SplitTotal
from clipmill.shards.reader import Variant

# What is between the key frames, by GOP layout.
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
    """What the first page says of all chunks.

    Attributes:
        variant: its name.
        summary: number of chunks, videos and bytes; which of them are shown.
        settings: settings in words, and all of them as they are stored.
        notes: what could not be read, or is not shown.
        holes: shards that cannot be read.
        clips: how the clips were made.
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


def summary(everything: Chunks, chunks: Chunks, *, num_shown: int, variant: Variant, where: str | None) -> str:
    """Return how many chunks, videos and bytes there are, and which of the chunks are shown."""
    num_videos = len(np.unique(chunks.video))
    kept = f"{len(chunks):,} of {count_noun(len(everything), 'chunk')}, those with {where}," if where else ""
    size = size_text(int(variant.tar_files.sizes.sum() if where is None else chunks.size_bytes.sum()))
    total = f"{kept or count_noun(len(chunks), 'chunk')} of {count_noun(num_videos, 'video')}, {size}"
    shown = "" if num_shown == len(chunks) else f"; showing {num_shown:,} evenly spaced chunks of all splits"
    holes = f"; {count_noun(len(chunks.holes), 'shard')} missing or damaged" if chunks.holes else ""
    return f"{total}{shown}{holes}"


def tiles(chunks: Chunks, variant: Variant) -> list[tuple[str, str]]:
    """Return the totals as values with their names."""
    seconds, size_bytes = float(chunks.duration_s.sum()), int(chunks.size_bytes.sum())
    found = [
        (f"{len(np.unique(chunks.video)):,}", "videos"),
        (f"{len(chunks):,}", "chunks"),
        (duration_text(seconds), "of video"),
        (size_text(size_bytes), "of MP4 files"),
        (f"{short_number(size_bytes * 8e-3 / max(seconds, 1e-3))} kbit/s", "mean bit rate"),
        (f"{variant.num_shards:,}", "shard" if variant.num_shards == 1 else "shards"),
    ]
    failures = sum(len(commit.failures) for commit in variant.commits.values())
    return [*found, (f"{failures:,}", "failed parts of videos: see prep status")] if failures else found


def hole_text(hole: Hole) -> str:
    """Return which shard cannot be read, and why."""
    what = "" if hole.num_chunks is None else f" ({hole.split}, {count_noun(hole.num_chunks, 'chunk')})"
    return f"Shard {hole.shard_id:06d}{what}: {hole.why}"


def clips_text(plan: ClipPlan) -> str:
    """Return how the clips were made."""
    if not plan.is_preview:
        return f"Clips are {plan.why}."
    how = f"encoded again as H.264 with a short side of 240 pixels, up to {PREVIEW_S:.0f} s"
    return f"Clips are previews, {how}: {plan.why}."


def settings_words(recipe: Mapping[str, Any]) -> str:
    """Return the settings of a recipe.json in words, as far as it has them."""
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
        every, words = f"a key frame every {keyint} frames", _LAYOUTS.get(gop := str(recipe.get("gop")))
        every = every if words is None else f"{gop}{keyint}: {every}{words}"  # it is so in the name of the variant
        parts.append("key frames only" if keyint == 1 else every)
    if (length := recipe.get("len")) is not None:
        length = _LENGTH.sub(r"\1 \2", str(length))
        parts.append(f"cut at shots, up to {length}" if recipe.get("cut") == "shots" else f"chunks of {length}")
    return ", ".join(part for part in parts if part)
