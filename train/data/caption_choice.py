"""Which caption a clip is shown with: a source is drawn by its weight, then one of its captions, all equally likely.

The draw is a pure function of (seed, position). All captions of a clip are consecutive entries of an array, ordered by
source; the entries of one source of a clip are a run.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import is_of_model, source_order
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.config.data import parse_weights
from clipmill.train.data.node_cache import index_type, scratch
from clipmill.train.device.random import draw_uniform, integers_below

if TYPE_CHECKING:
    from clipmill.train.models.text import Tokenize

_MAX_TOKENIZED = 20_000


@dataclass(frozen=True)
class Sources:
    """The caption sources that are used.

    Attributes:
        names: in the order in which they count as first, second, ...
        weights: float64 [names], all positive.
        rank: int16, by the source's code in the manifest: index in `names`, -1 for sources that are excluded.
        not_asked_for: sources of models, excluded because nothing names them.
    """

    names: tuple[str, ...]
    weights: NDArray[np.float64]
    rank: NDArray[np.int16]
    not_asked_for: tuple[str, ...] = ()

    def describe(self, num_captions: NDArray[np.int64]) -> str:
        """Names with their weights and numbers of captions."""
        each = zip(self.names, self.weights.tolist(), num_captions.tolist(), strict=True)
        parts = (f"{name} = {weight:g} ({count_noun(number, 'caption')})" for name, weight, number in each)
        return f"sources {', '.join(parts)}"

    def describe_excluded(self, num_captions: int) -> str:
        """Count the captions that are excluded, with the sources that include them; empty if there are none."""
        if not num_captions:
            return ""
        if not self.not_asked_for:
            return f"{count_noun(num_captions, 'caption')} of other sources left out"
        return (
            f"{count_noun(num_captions, 'caption')} of models left out ({', '.join(self.not_asked_for)}); the sources "
            f'"{asking_for([*self.names, *self.not_asked_for])}" include them'
        )


def asking_for(names: Sequence[str]) -> str:
    """The value of `--captions.sources` that takes these sources alike, whatever their models' fingerprints."""
    wanted = dict.fromkeys(f"{name.partition('@')[0]}@*=1" if is_of_model(name) else f"{name}=1" for name in names)
    return ",".join(wanted)


def choose_sources(names: list[str], *, wanted: str | None, elsewhere: Collection[str] = ()) -> Sources:
    """Select sources among `names`, those of a split.

    Args:
        elsewhere: sources of other splits, such as pseudo-captions of training videos in an evaluation. They can be
            wanted, too, as long as the split has captions of another one that is.
        wanted: `--captions.sources`: names or shell patterns with weights; the first one that matches a source gives
            its weight. None gives every source the weight 1, in alphabetical order, but those of models
            (`captioner@1f2e3d4c`), which are used only if they are named.

    Raises:
        UserError: a name or pattern matches no source, or no source of the split is left.
    """
    left = sorted(names, key=source_order)
    by_people = [name for name in left if not is_of_model(name)]
    if wanted is None and left and not by_people:
        raise UserError(
            f"all captions of this split are of models ({', '.join(left)}), which are used only if they are named",
            hint=f'name them: --captions.sources "{asking_for(left)}"',
        )
    not_asked_for = tuple(left[len(by_people) :]) if wanted is None else ()
    pairs = [(name, 1.0) for name in by_people] if wanted is None else list(parse_weights(wanted).items())
    chosen: list[tuple[str, float]] = []
    for pattern, weight in pairs:
        # The full name of a source means that source, even if it could be read as a pattern.
        matching = [name for name in names if name == pattern or (pattern not in names and fnmatchcase(name, pattern))]
        if not matching and not any(name == pattern or fnmatchcase(name, pattern) for name in elsewhere):
            raise UserError(
                f"no caption of this manifest has the source {pattern!r} (asked for by --captions.sources)",
                hint=f"available sources: {', '.join(sorted(names)) or 'none'}",
                flags=("--captions.sources",),
            )
        found = [name for name in left if name in matching]
        left = [name for name in left if name not in found]
        chosen += [(name, weight) for name in found if weight > 0]
    if names and not chosen:
        raise UserError(
            f"--captions.sources is {wanted!r}, and this split has no captions of these sources",
            hint=f"sources of this split: {', '.join(sorted(names))}",
            flags=("--captions.sources",),
        )
    rank = np.full(len(names), -1, np.int16)
    for number, (name, _) in enumerate(chosen):
        rank[names.index(name)] = number
    weights = np.array([weight for _, weight in chosen])
    return Sources(tuple(name for name, _ in chosen), weights, rank, not_asked_for)


@dataclass(frozen=True)
class CaptionChoice:
    """The captions of clips.

    Attributes:
        first_entry: [R + 1], first entry of each run.
        first_run: [N + 1], first run of each clip; None if every clip has one run.
        before: float64 [R + 1], sum of the weights of all earlier runs; None likewise.
    """

    first_entry: NDArray[Any]
    first_run: NDArray[Any] | None
    before: NDArray[np.float64] | None

    @property
    def num_rows(self) -> int:
        """Number of clips."""
        return len(self.first_entry if self.first_run is None else self.first_run) - 1

    def first(self, clips: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first caption of the first source of each clip, as entries."""
        runs = clips if self.first_run is None else self.first_run[clips]
        return self.first_entry[runs].astype(np.int64)

    def draw(self, clips: NDArray[np.int64], *, position: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Draw a caption of each clip for its `position` in the sample order, as entries."""
        runs = clips
        if self.first_run is not None and self.before is not None:
            low, high = self.first_run[clips], self.first_run[clips + 1]
            share = draw_uniform(position, 1, seed=seed, purpose="source")[:, 0]
            wanted = self.before[low] + share * (self.before[high] - self.before[low])
            # Rounding may lead slightly out of the clip.
            runs = np.clip(np.searchsorted(self.before, wanted, side="right") - 1, low, high - 1)
        begin, end = self.first_entry[runs].astype(np.int64), self.first_entry[runs + 1].astype(np.int64)
        return begin + integers_below(end - begin, position, seed=seed, purpose="caption")

    def draw_one(self, clip: int, *, position: int, seed: int) -> int:
        """`draw` for one clip, with a shortcut for a single caption, as it is called for every sample."""
        entries = self.entries(clip)
        if len(entries) == 1:
            return entries[0]
        return int(self.draw(np.array([clip]), position=np.array([position]), seed=seed)[0])

    def entries(self, clip: int) -> range:
        """All captions of a clip."""
        first, last = (clip, clip + 1) if self.first_run is None else self.first_run[clip : clip + 2].tolist()
        return range(int(self.first_entry[first]), int(self.first_entry[last]))

    @property
    def clip_of_entry(self) -> NDArray[np.int64]:
        """The clip of each caption."""
        bounds = self.first_entry if self.first_run is None else self.first_entry[self.first_run]
        return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))

    def weights(self, clip: int) -> NDArray[np.float64]:
        """Probability of each caption of a clip, in the order of `entries`; the sum is 1."""
        if self.first_run is None or self.before is None:
            count = len(self.entries(clip))
            return np.full(count, 1 / count)
        low, high = self.first_run[clip : clip + 2].tolist()
        counts = np.diff(self.first_entry[low : high + 1])
        weights = np.diff(self.before[low : high + 1])
        return np.asarray(np.repeat(weights / weights.sum() / counts, counts))


@dataclass(frozen=True)
class Runs:
    """The entries of consecutive clips, divided by source.

    Attributes:
        first_entry: [R], first entry of each run.
        rank: int16 [R], of its source.
        num_runs: [N], number of runs of each clip.
    """

    first_entry: NDArray[np.int64]
    rank: NDArray[np.int16]
    num_runs: NDArray[np.int64]


def runs_of(clip: NDArray[np.int64], rank: NDArray[np.int16], *, num_clips: int) -> Runs:
    """The runs of entries of these clips and sources, sorted by both."""
    begins = np.flatnonzero(np.r_[len(clip) > 0, (clip[1:] != clip[:-1]) | (rank[1:] != rank[:-1])])
    return Runs(begins, rank[begins], np.bincount(clip[begins], minlength=num_clips))


def choice_of(
    first_entry: NDArray[Any], *, rank: NDArray[np.int16], num_runs: NDArray[Any], weights: NDArray[np.float64]
) -> CaptionChoice:
    """Make the choice from the runs of all clips: `Runs`, with the number of entries after `first_entry`."""
    if len(rank) == len(num_runs):
        return CaptionChoice(first_entry, None, None)
    first_run = scratch(len(num_runs) + 1, index_type(len(rank)))
    before = scratch(len(rank) + 1, np.float64)
    first_run[0] = before[0] = 0
    np.cumsum(num_runs, out=first_run[1:])
    before[1:] = weights[rank]
    np.cumsum(before[1:], out=before[1:])
    return CaptionChoice(first_entry, first_run, before)


def caption_choice(
    clip: NDArray[np.int64], rank: NDArray[np.int16], *, num_clips: int, weights: NDArray[np.float64]
) -> CaptionChoice:
    """Make the choice from the clip and the source's rank of each entry, sorted by both."""
    runs = runs_of(clip, rank, num_clips=num_clips)
    first_entry = smallest_integers(np.append(runs.first_entry, len(clip)))
    return choice_of(first_entry, rank=runs.rank, num_runs=runs.num_runs, weights=weights)


def smallest_integers(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Convert non-negative integers to int32 if they fit."""
    fits = not len(numbers) or int(numbers.max()) <= np.iinfo(np.int32).max
    return numbers.astype(np.int32) if fits else numbers


def describe_cut(texts: pa.ChunkedArray, rows: NDArray[np.integer], tokenize: "Tokenize") -> str:
    """How many of the texts at `rows` fill the context of a tokenizer, which cuts what is longer; '' for none.

    A token is a byte at least, and a word is a token at least, so that few texts have to be tokenized. Of very many,
    evenly spaced ones are.
    """
    empty = tokenize("")
    context, padding = len(empty), empty[-1]
    num_bytes = pc.binary_length(texts).to_numpy()[rows]
    uncertain = rows[num_bytes >= context - 2]
    looked_at = uncertain[:: max(1, len(uncertain) // _MAX_TOKENIZED)]
    if not len(looked_at):
        return ""
    found = 0
    for row in looked_at.tolist():
        text = str(texts[row].as_py())
        found += len(text.split()) >= context - 2 or tokenize(text)[-1] != padding
    if not found:
        return ""
    about = "" if len(looked_at) == len(uncertain) else "about "
    return f"{about}{round(found / len(looked_at) * len(uncertain)):,} of {context} tokens or more, cut to {context}"


def same_text(texts: pa.ChunkedArray, rows: NDArray[np.integer] | None = None) -> str | None:
    """The text at `rows`, which ascend (None: all), if it is the same at all of them; None if texts differ."""
    first, begin = texts[0 if rows is None else int(rows[0])], 0
    for chunk in texts.chunks:  # texts of most sets differ in the first one
        is_same = pc.equal(chunk, first).to_numpy(zero_copy_only=False)
        low, high = (0, 0) if rows is None else np.searchsorted(rows, (begin, begin + len(chunk)))
        if not (is_same if rows is None else is_same[rows[low:high] - begin]).all():
            return None
        begin += len(chunk)
    return str(first.as_py())


def all_the_same(text: str, num_captions: int, *, split: str) -> UserError:
    """The error for captions that are all the same text."""
    return UserError(
        f"all {num_captions:,} captions of split {split!r} are {text!r:.60}: there is nothing to tell apart",
        hint="run prep manifest with annotations whose captions differ",
    )
