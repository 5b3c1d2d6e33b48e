"""Which caption a visit of a clip shows: first a source by its weight, then one of its captions, all alike.

What is drawn is a pure function of (seed, position), like everything about a visit. Captions of a clip stand in one
row, source after source: an entry in the arrays is called a place, and the places of one source of a clip a run.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.store import read_captions
from train.config.data import parse_weights
from train.device.random import below, uniform


@dataclass(frozen=True)
class Sources:
    """The sources of captions that are used.

    Attributes:
        names: in the order in which they count as first, second, ...
        weights: float64 [names], each more than 0.
        rank: int16, by the code that a source has in the manifest; -1 for those left out.
    """

    names: tuple[str, ...]
    weights: NDArray[np.float64]
    rank: NDArray[np.int16]

    def describe(self, num_captions: NDArray[np.int64]) -> str:
        """Names with their weights and numbers of captions."""
        each = zip(self.names, self.weights.tolist(), num_captions.tolist(), strict=True)
        return "sources " + ", ".join(f"{name} = {weight:g} ({number:,} captions)" for name, weight, number in each)


def choose_sources(names: list[str], *, wanted: str | None) -> Sources:
    """Sources among `names`, those of the manifest.

    Args:
        wanted: `--captions.sources`: names, or patterns as of a shell; the first that fits a source gives its weight.
            None gives every source the weight 1, in the order of the alphabet.

    Raises:
        UserError: something wanted fits no source.
    """
    pairs = [(name, 1.0) for name in sorted(names)] if wanted is None else list(parse_weights(wanted).items())
    chosen: list[tuple[str, float]] = []
    left = sorted(names)
    for pattern, weight in pairs:
        # A source that is named in full is meant, whatever its name looks like as a pattern.
        found = [name for name in left if name == pattern or (pattern not in names and fnmatchcase(name, pattern))]
        if not found and not any(name == pattern or fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"no caption of this manifest has the source {pattern!r} (asked for by --captions.sources)",
                hint=f"sources there: {', '.join(sorted(names)) or 'none'}",
            )
        left = [name for name in left if name not in found]
        chosen += [(name, weight) for name in found if weight > 0]
    rank = np.full(len(names), -1, np.int16)
    for place, (name, _) in enumerate(chosen):
        rank[names.index(name)] = place
    return Sources(tuple(name for name, _ in chosen), np.array([weight for _, weight in chosen]), rank)


@dataclass(frozen=True)
class CaptionChoice:
    """The captions of clips.

    Attributes:
        first_place: [R + 1] where each run begins.
        first_run: [N + 1] the first run of each clip; None where every clip has one.
        before: [R + 1] float64, the weights of all runs before; None likewise.
    """

    first_place: NDArray[Any]
    first_run: NDArray[Any] | None
    before: NDArray[np.float64] | None

    def first(self, clips: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first caption of the first source of each clip."""
        runs = clips if self.first_run is None else self.first_run[clips]
        return self.first_place[runs].astype(np.int64)

    def draw(self, clips: NDArray[np.int64], *, position: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """A caption of each clip for its visit at `position`."""
        runs = clips
        if self.first_run is not None and self.before is not None:
            low, high = self.first_run[clips], self.first_run[clips + 1]
            share = uniform(position, 1, seed=seed, purpose="source")[:, 0]
            wanted = self.before[low] + share * (self.before[high] - self.before[low])
            # Rounding may lead a little out of the clip.
            runs = np.clip(np.searchsorted(self.before, wanted, side="right") - 1, low, high - 1)
        begin, end = self.first_place[runs].astype(np.int64), self.first_place[runs + 1].astype(np.int64)
        return begin + below(end - begin, position, seed=seed, purpose="caption")

    def draw_one(self, clip: int, *, position: int, seed: int) -> int:
        """As `draw` for one clip, at once where it has one caption only: this is done for every sample."""
        places = self.places(clip)
        if len(places) == 1:
            return places[0]
        return int(self.draw(np.array([clip]), position=np.array([position]), seed=seed)[0])

    def places(self, clip: int) -> range:
        """All captions of a clip."""
        first, last = (clip, clip + 1) if self.first_run is None else self.first_run[clip : clip + 2].tolist()
        return range(int(self.first_place[first]), int(self.first_place[last]))

    def weights(self, clip: int) -> NDArray[np.float64]:
        """How likely each of the captions of a clip is drawn, in their order; the sum is 1."""
        if self.first_run is None or self.before is None:
            count = len(self.places(clip))
            return np.full(count, 1 / count)
        low, high = self.first_run[clip : clip + 2].tolist()
        counts = np.diff(self.first_place[low : high + 1])
        weights = np.diff(self.before[low : high + 1])
        return np.asarray(np.repeat(weights / weights.sum() / counts, counts))


def caption_choice(
    clip: NDArray[np.int64], rank: NDArray[np.int16], *, num_clips: int, weights: NDArray[np.float64]
) -> CaptionChoice:
    """Makes the choice from the clip and the source's rank of each place, ascending by both."""
    begins = np.flatnonzero(np.r_[len(clip) > 0, (clip[1:] != clip[:-1]) | (rank[1:] != rank[:-1])])
    first_place = smallest(np.r_[begins, len(clip)])
    if len(begins) == num_clips:
        return CaptionChoice(first_place, None, None)
    first_run = np.searchsorted(clip[begins], np.arange(num_clips + 1))
    return CaptionChoice(first_place, smallest(first_run), np.r_[0.0, np.cumsum(weights[rank[begins]])])


def smallest(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """The same numbers, which are not negative, in four bytes each where they fit."""
    fits = not len(numbers) or int(numbers.max()) <= np.iinfo(np.int32).max
    return numbers.astype(np.int32) if fits else numbers


# The words of captions, by id.


class CaptionTexts:
    """All captions of a manifest, as Arrow has them: no Python object a caption. Safe to use from many threads."""

    def __init__(self, data_dir: Path) -> None:
        table = read_captions(data_dir)
        self._caption_id: NDArray[np.int64] = table["caption_id"].to_numpy()
        self._texts: pa.ChunkedArray = table["text"]

    def text(self, caption_id: int) -> str:
        """The words of a caption that there is."""
        return str(self._texts[int(np.searchsorted(self._caption_id, caption_id))].as_py())

    def require_different(self, caption_id: NDArray[np.integer], *, split: str) -> None:
        """Raises a UserError where all of some captions are the same text: there is nothing to tell apart."""
        require_different(self._texts, np.searchsorted(self._caption_id, caption_id), split=split)


def require_different(texts: pa.ChunkedArray, rows: NDArray[np.integer], *, split: str) -> None:
    """Raises a UserError where the texts at `rows` are all the same: there is nothing to tell apart."""
    first = texts[int(rows[0])]
    if pc.equal(texts, first).to_numpy()[rows].all():
        raise UserError(
            f"all {len(rows):,} captions of split {split!r} are {first.as_py()!r:.60}: there is nothing to tell apart",
            hint="give prep manifest annotations with different captions",
        )
