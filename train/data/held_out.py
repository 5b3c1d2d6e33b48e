"""Cautions about metrics that are based on few clips, or on clips that look like training clips."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, percent
from clipmill.shards.columns import SCORES
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.shards import kind_of

# With fewer clips or questions, the 95 % interval around 50 % is more than about 20 percentage points wide.
MIN_ITEMS = 100
_Z = 1.96  # number of standard deviations in the 95 % interval of a normal distribution


class EvaluatedClips(Protocol):
    """Samples of an evaluation."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if it is unknown."""
        ...

    def key(self, sample: int) -> str:
        """Return the key of the chunk in which a sample begins."""
        ...


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Counts of the clips of an evaluation. The names of the fields are keys in result files.

    Attributes:
        num_clips: Number of distinct clips.
        num_chunks: Number of chunks in which the clips begin; 0 if no chunk of the evaluated split looks like one of
            `trained_split`.
        num_alike: Number of chunks that contain the start of a clip and look like a chunk of `trained_split`; None
            if the chunks were not compared, for example without scores.
        trained_split: Split that was used for training.
        were_trained_on: True if the model was trained on these clips, because the data have no splits.
    """

    num_clips: int
    num_chunks: int = 0
    num_alike: int | None = None
    trained_split: str = ""
    were_trained_on: bool = False

    def cautions(self, value: float | None = None, *, items: tuple[int, str] | None = None) -> list[str]:
        """Return cautions about the metrics. The list is empty if clips are numerous and unlike training clips.

        Args:
            value: Value of a metric in [0, 1]. The caution states its 95 % interval; None to omit the interval.
            items: Number and noun of the items over which the metrics are averaged; None for the clips.
        """
        num, noun = items or (self.num_clips, "clip")
        cautions = (
            ["the model was trained on these clips, because the data have no splits"] if self.were_trained_on else []
        )
        if num < MIN_ITEMS:
            low, high = interval(0.0 if value is None else value, num)
            suffix = f", so that {percent(value)} has a 95 % interval from {percent(low)} to {percent(high)}"
            cautions.append(f"only {count_noun(num, noun)}{'' if value is None else suffix}")
        if self.num_alike:
            chunks = f"{self.num_alike:,} of {count_noun(self.num_chunks, 'chunk')}"
            verb = "looks" if self.num_alike == 1 else "look"
            cautions.append(f"{chunks} {verb} like a chunk of the training split {self.trained_split!r}")
        return cautions


def interval(proportion: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion of `count` items (Wilson 1927).

    For a mean of values in [0, 1], the interval is conservative.
    """
    if not count:
        return 0.0, 1.0
    spread = _Z**2 / count
    centre = (proportion + spread / 2) / (1 + spread)
    half_width = _Z * math.sqrt(proportion * (1 - proportion) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def held_out_facts(
    samples: EvaluatedClips, settings: ClipSettings, *, split: str, data: Mapping[str, Any]
) -> HeldOut | None:
    """Return the counts of the evaluated clips; None if the number of clips is unknown.

    Args:
        samples: Samples that were evaluated. The number of clips of a stream is known only after the evaluation.
        settings: Settings whose data are evaluated, and whose `split` is the training split.
        split: Split that was evaluated.
        data: Data fields of the result (`clipmill.train.run.folder.data_facts`). Look-alikes are counted only if
            these data were used for training.
    """
    num_clips: int | None = getattr(samples, "num_clips", samples.num_samples)
    if num_clips is None:
        return None
    was_trained_on = bool(data.get("is_own_data") or data.get("is_part_of_own_data"))
    if not kind_of(settings.folder).has_manifest:
        return HeldOut(num_clips=num_clips, were_trained_on=was_trained_on)
    facts = HeldOut(num_clips=num_clips, trained_split=settings.split)
    if split == settings.split or not was_trained_on:
        return facts
    assert samples.num_samples is not None  # it is None only for streams
    look_alikes = look_alikes_of(settings.folder, cache=settings.cache, split=split, trained_split=settings.split)
    if look_alikes is None:
        return facts
    keys = {samples.key(sample) for sample in range(samples.num_samples)} if look_alikes else set()
    return replace(facts, num_chunks=len(keys), num_alike=len(keys & look_alikes))


def look_alikes_of(address: str, *, cache: Path | None, split: str, trained_split: str) -> set[str] | None:
    """Return the keys of the chunks of `split` that look like a chunk of `trained_split`; None without scores."""
    from clipmill.shards.scores import look_alike_keys
    from clipmill.train.data.data_folder import open_data_folder

    try:
        folder = open_data_folder(address, cache=cache, column=None)
        if folder.tars is not None:
            folder.tars.files.copy_column(SCORES)
        return look_alike_keys(folder.path, split=split, other_split=trained_split)
    except UserError:
        return None  # `prep status` reports errors in the scores
