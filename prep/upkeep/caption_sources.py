"""Status of the captions: how many each source has, which models wrote them, and how many lie after their video."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.further_sources import source_counts
from clipmill.manifests.previous import FURTHER_KEY
from clipmill.manifests.store import open_captions, read_manifest
from clipmill.prep.core.failure_list import MAX_NAMED, FailureEntry, first_few
from clipmill.shards.columns import CAPTIONS, VIDEO
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant

_ROUNDING_S = 1.0


@dataclass(frozen=True)
class CaptionSource:
    """One source of captions.

    Attributes:
        is_further: added by `prep manifest captions`, rather than by the command of a dataset.
        weights: names of the models that wrote it, with the first digits of their SHA-256.
        stale_because: why it differs from what its model would write now, or None.
    """

    name: str
    num_captions: int
    is_further: bool
    weights: tuple[str, ...] = ()
    stale_because: str | None = None


def read_caption_sources(data_dir: Path) -> list[CaptionSource]:
    """Read the sources of captions in the manifest, those of datasets first, in alphabetical order.

    Raises:
        UserError: the manifest is missing or damaged.
    """
    with open_captions(data_dir) as file:
        counts = source_counts(file)
    further: Mapping[str, Any] = read_manifest(data_dir).get(FURTHER_KEY, {})
    current = current_variant(data_dir, VIDEO)
    sources = []
    for name in sorted(counts, key=lambda name: (name in further, name)):
        models = further[name]["models"] if name in further else []
        other = other_variants(models, current=current)
        stale = (
            f"it describes chunks of {', '.join(other)}, not of the current variant"
            if other
            else _changed_column(models, data_dir)
        )
        sources.append(
            CaptionSource(
                name=name,
                num_captions=counts[name],
                is_further=name in further,
                weights=tuple(dict.fromkeys(_weights(model) for model in models)),
                stale_because=stale,
            )
        )
    return sources


@dataclass(frozen=True)
class CaptionsBeyond:
    """Captions that begin at or after the end of their video, and those that only end after it.

    Attributes:
        first: the first few of both.
    """

    num_begin: int
    num_end: int
    first: list[FailureEntry]


def captions_beyond(data_dir: Path, *, video_ids: pa.ChunkedArray, end_s: np.ndarray) -> CaptionsBeyond:
    """Find the captions whose times are after the end of their video; an end up to a second after it is rounding.

    Args:
        video_ids: of the videos of the manifest.
        end_s: end of each of them in seconds, +inf if unknown, float64.

    Raises:
        UserError: the manifest is missing or damaged.
    """
    captions = open_stored_captions(data_dir)
    captions.verify()
    num_begin = num_end = 0
    first: list[FailureEntry] = []
    for one in captions.blocks():
        begins = one.begin_s >= end_s[one.video]
        ends = ~begins & np.isfinite(one.end_s) & (one.end_s > end_s[one.video] + _ROUNDING_S)
        num_begin, num_end = num_begin + int(one.counts[begins].sum()), num_end + int(one.counts[ends].sum())
        for code, found in (("begins_after_end", begins), ("ends_after_end", ends)):
            for span in np.flatnonzero(found)[:MAX_NAMED].tolist():
                video, caption = int(one.video[span]), int(one.counts[:span].sum())
                end = f" to {one.end_s[span]:g} s" if np.isfinite(one.end_s[span]) else ""
                times = f"{one.begin_s[span]:g} s{end}, of a video of {end_s[video]:g} s"
                text = captions.texts[int(one.row[caption])].as_py()
                first.append(FailureEntry(video_ids[video].as_py(), code, f"{times}: {text}"))
    return CaptionsBeyond(num_begin, num_end, first_few(first))


def other_variants(models: list[Mapping[str, Any]], *, current: str | None) -> list[str]:
    """Return the variants of `video` whose chunks were captioned, other than the current one.

    Args:
        models: metadata of the models that wrote a further source of captions.
        current: None if no variant is current; nothing is then known.
    """
    variants = {str(model["video_variant"]) for model in models if model.get("video_variant") is not None}
    return sorted(variants - {current}) if current is not None else []


def _changed_column(models: list[Mapping[str, Any]], data_dir: Path) -> str | None:
    """Return why captions that `prep captions` wrote are not those that it has now; None if they are, or of another."""
    current = current_variant(data_dir, CAPTIONS)
    for model in models:
        variant = model.get("captions_variant")
        if variant is None or current is None:
            continue
        if variant != current:
            return f"it is that of {variant}; the current variant of captions is {current}"
        if model.get("commits_sha256") != Variant.open(data_dir, column=CAPTIONS).commits.digest.decode():
            return "the column captions has changed since; add its table again"
    return None


def _weights(model: Mapping[str, Any]) -> str:
    digest = model.get("weights_sha256")
    name = str(model.get("weights", "unknown weights"))
    return name if digest is None else f"{name} (SHA-256 {str(digest)[:8]})"
