"""What limits metrics of held-out clips: how few they are, and how many look like clips that were trained on."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, percent
from clipmill.shards.columns import SCORES
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.shards import kind_of

FEW = 100  # clips or questions: with fewer, the interval of a metric of 50 % is wider than 20 points
_Z = 1.96  # 95 % of a normal distribution


class EvaluatedClips(Protocol):
    """A set of samples that is evaluated."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if it is not known."""
        ...

    def key(self, sample: int) -> str:
        """The chunk in which a sample begins."""
        ...


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Facts about the clips of an evaluation; the fields are keys of result files.

    Attributes:
        num_clips: distinct clips.
        num_chunks: the chunks in which they begin, if any of them looks like one of `trained_split`.
        num_alike: those of them that do; None if there are no scores to tell by.
        were_trained_on: whether the clips are those of the training, because tars have no splits.
    """

    num_clips: int
    num_chunks: int = 0
    num_alike: int | None = None
    trained_split: str = ""
    were_trained_on: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def cautions(self, share: float | None = None, *, of: tuple[int, str] | None = None) -> list[str]:
        """What to know before the metrics are believed; empty for many clips without look-alikes.

        Args:
            share: a metric in [0, 1], whose 95 % interval is stated.
            of: number and noun of what metrics are means of; by default the clips.
        """
        num, noun = of or (self.num_clips, "clip")
        found = ["the model was trained on these clips: tars have no splits"] if self.were_trained_on else []
        if num < FEW:
            low, high = interval(0.0 if share is None else share, num)
            between = f", so that {percent(share)} has a 95 % interval from {percent(low)} to {percent(high)}"
            found.append(f"only {count_noun(num, noun)}{'' if share is None else between}")
        if self.num_alike:
            chunks = f"{self.num_alike:,} of {count_noun(self.num_chunks, 'chunk')}"
            verb = "looks" if self.num_alike == 1 else "look"
            found.append(f"{chunks} {verb} like a chunk of the training split {self.trained_split!r}")
        return found


def interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a binomial proportion (Wilson 1927); conservative for other means of values in [0, 1]."""
    if not count:
        return 0.0, 1.0
    spread = _Z**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def held_out_facts(
    samples: EvaluatedClips, settings: ClipSettings, *, split: str, data: Mapping[str, Any]
) -> HeldOut | None:
    """Facts about the clips of a split; None if the samples do not count them.

    Args:
        samples: The samples after their evaluation, by which the clips of a stream are counted.
        settings: of the data to evaluate, and of the training split.
        data: the data fields of the result (`clipmill.train.run.folder.data_facts`). Only data that were trained on are
            searched for look-alikes.
    """
    num_clips: int | None = getattr(samples, "num_clips", samples.num_samples)
    if num_clips is None:
        return None
    is_own = bool(data.get("is_own_data") or data.get("is_part_of_own_data"))
    if not kind_of(settings.folder).has_manifest:
        return HeldOut(num_clips=num_clips, were_trained_on=is_own)
    found = HeldOut(num_clips=num_clips, trained_split=settings.split)
    if split == settings.split or not is_own:
        return found
    assert samples.num_samples is not None  # a data folder knows its samples
    alike = look_alikes_of(settings.folder, cache=settings.cache, split=split, trained_split=settings.split)
    if alike is None:
        return found
    keys = {samples.key(number) for number in range(samples.num_samples)} if alike else set()
    return HeldOut(
        num_clips=found.num_clips, num_chunks=len(keys), num_alike=len(keys & alike), trained_split=settings.split
    )


def look_alikes_of(address: str, *, cache: Path | None, split: str, trained_split: str) -> set[str] | None:
    """Keys of the chunks of a split that look like one of another split; None if there are no scores to tell by."""
    from clipmill.shards.scores import keys_alike
    from clipmill.train.data.folders import open_data_folder

    try:
        folder = open_data_folder(address, cache=cache, column=None)
        if folder.tars is not None:
            folder.tars.files.copy_column(SCORES)
        return keys_alike(folder.path, split=split, other_split=trained_split)
    except UserError:
        return None  # prep status says what is wrong with the scores
