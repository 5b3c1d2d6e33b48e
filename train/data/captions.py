"""`Captions` chooses the caption of a sample, and adds it as tokens, as text or as an embedding.

In training, a source is drawn by weight. Then one of the clip's captions from this source is drawn, with equal
probability. The draws are pure functions of (seed, position). An evaluation uses the first caption of the first source.

All captions of a clip are consecutive entries of an array, ordered by source. A run consists of a clip's entries from
one source.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import is_model_source, source_order
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.config.clips import parse_weights
from clipmill.train.data.batch import Sample
from clipmill.train.data.node_cache import index_type, scratch
from clipmill.train.device.random import draw_uniform, integers_below

if TYPE_CHECKING:
    from clipmill.train.data.loader import SampleRequest
    from clipmill.train.data.stored_text import StoredText
    from clipmill.train.models.text import Tokenize


_BLOCK = 1 << 16  # number of captions whose texts are read at a time
_MAX_TOKENIZED = 20_000  # maximum number of captions that `describe_truncation` tokenizes


class Annotations(Protocol):
    """Annotations that are added to the frames of samples, such as captions or labels."""

    def add(self, sample: Sample, request: "SampleRequest") -> None:
        """Add the annotations to the sample in row `request.sample` of the table."""


@dataclass(frozen=True)
class Sources:
    """Caption sources in use.

    Attributes:
        names: Names in order of priority.
        weights: Sampling weights, float64 [names], all positive.
        rank: Index in `names` of each source that was passed to `choose_sources`, int16; -1 for omitted sources.
        not_asked_for: Model sources that are omitted because the user did not select them.
    """

    names: tuple[str, ...]
    weights: NDArray[np.float64]
    rank: NDArray[np.int16]
    not_asked_for: tuple[str, ...] = ()

    def describe(self, num_captions: NDArray[np.int64]) -> str:
        """Return a remark with the name, weight and number of captions of each source."""
        sources = zip(self.names, self.weights.tolist(), num_captions.tolist(), strict=True)
        parts = (f"{name} = {weight:g} ({count_noun(count, 'caption')})" for name, weight, count in sources)
        return f"sources {', '.join(parts)}"

    def describe_omitted(self, num_captions: int) -> str:
        """Return a remark on the omitted captions that says how to include them; '' if `num_captions` is 0."""
        if not num_captions:
            return ""
        if not self.not_asked_for:
            return f"{count_noun(num_captions, 'caption')} from other sources left out"
        return (
            f"{count_noun(num_captions, 'caption')} from models left out ({', '.join(self.not_asked_for)}); the "
            f'sources "{equal_weights([*self.names, *self.not_asked_for])}" include them'
        )


def equal_weights(names: Sequence[str]) -> str:
    """Return a value for `--captions.sources` that gives these sources equal weights, for any model fingerprints."""
    pairs = dict.fromkeys(f"{name.partition('@')[0]}@*=1" if is_model_source(name) else f"{name}=1" for name in names)
    return ",".join(pairs)


def choose_sources(names: list[str], *, weights: str | None, all_sources: Collection[str] = ()) -> Sources:
    """Select caption sources of a split.

    Args:
        names: Names of the sources of the split.
        weights: Value of `--captions.sources`: names or shell patterns with weights. A source gets the weight of the
            first pattern that matches it. None to use all sources in alphabetical order with weight 1, except model
            sources (`captioner@1f2e3d4c`): they are used only if `weights` lists them.
        all_sources: Names of the sources of all splits. `weights` may list sources of other splits, such as
            pseudo-captions of training videos in an evaluation, if the split has captions from another listed source.

    Raises:
        UserError: A name or pattern does not match any source, or the split has no captions from the selected sources.
    """
    remaining = sorted(names, key=source_order)
    human_sources = [name for name in remaining if not is_model_source(name)]
    if weights is None and remaining and not human_sources:
        raise UserError(
            f"all captions of this split are from models ({', '.join(remaining)}), which are used only if selected",
            hint=f'select them: --captions.sources "{equal_weights(remaining)}"',
        )
    not_asked_for = tuple(remaining[len(human_sources) :]) if weights is None else ()
    pairs = [(name, 1.0) for name in human_sources] if weights is None else list(parse_weights(weights).items())
    selection: list[tuple[str, float]] = []
    for pattern, weight in pairs:
        # A complete name selects only the source of this name, even if it could also be read as a pattern.
        matching = [name for name in names if name == pattern or (pattern not in names and fnmatchcase(name, pattern))]
        if not matching and not any(name == pattern or fnmatchcase(name, pattern) for name in all_sources):
            raise UserError(
                f"no caption of this manifest has the source {pattern!r} (requested by --captions.sources)",
                hint=f"use sources of this split: {', '.join(sorted(names))}"
                if names
                else "use another split, because this split has no captions",
                flags=("--captions.sources",),
            )
        matching = [name for name in remaining if name in matching]
        remaining = [name for name in remaining if name not in matching]
        selection += [(name, weight) for name in matching if weight > 0]
    if names and not selection:
        raise UserError(
            f"--captions.sources is {weights!r}, but this split has no captions from these sources",
            hint=f"use sources of this split: {', '.join(sorted(names))}",
            flags=("--captions.sources",),
        )
    rank = np.full(len(names), -1, np.int16)
    for index, (name, _) in enumerate(selection):
        rank[names.index(name)] = index
    return Sources(
        tuple(name for name, _ in selection), np.array([weight for _, weight in selection]), rank, not_asked_for
    )


@dataclass(frozen=True)
class CaptionChoice:
    """Entries of each clip's captions, and random choices among these entries. R runs, N clips.

    Attributes:
        first_entry: First entry of each run, followed by the number of entries, int [R + 1].
        first_run: First run of each clip, followed by the number of runs, int [N + 1]; None if every clip has one run.
        before: Sum of the weights of the runs before each run, float64 [R + 1]; None if every clip has one run.
    """

    first_entry: NDArray[Any]
    first_run: NDArray[Any] | None
    before: NDArray[np.float64] | None

    @property
    def num_rows(self) -> int:
        """Number of clips."""
        return len(self.first_entry if self.first_run is None else self.first_run) - 1

    def first_entries(self, clips: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first entry of each clip."""
        runs = clips if self.first_run is None else self.first_run[clips]
        return self.first_entry[runs].astype(np.int64)

    def draw(self, clips: NDArray[np.int64], *, position: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Draw a caption for each clip; return the entries. `position` is the position of each clip in the order."""
        runs = clips
        if self.first_run is not None and self.before is not None:
            low, high = self.first_run[clips], self.first_run[clips + 1]
            fraction = draw_uniform(position, 1, seed=seed, purpose="source")[:, 0]
            point = self.before[low] + fraction * (self.before[high] - self.before[low])
            # Limit the result to the runs of the clip, because rounding may exceed the last run.
            runs = np.clip(np.searchsorted(self.before, point, side="right") - 1, low, high - 1)
        begin, end = self.first_entry[runs].astype(np.int64), self.first_entry[runs + 1].astype(np.int64)
        return begin + integers_below(end - begin, position, seed=seed, purpose="caption")

    def draw_one(self, clip: int, *, position: int, seed: int) -> int:
        """Draw a caption for one clip; return its entry."""
        entries = self.entries(clip)
        if len(entries) == 1:  # shortcut, because this method is called for every sample
            return entries[0]
        return int(self.draw(np.array([clip]), position=np.array([position]), seed=seed)[0])

    def entries(self, clip: int) -> range:
        """Return the entries of all captions of a clip."""
        first, last = (clip, clip + 1) if self.first_run is None else self.first_run[clip : clip + 2].tolist()
        return range(int(self.first_entry[first]), int(self.first_entry[last]))

    @property
    def clip_of_entry(self) -> NDArray[np.int64]:
        """Clip to which each entry belongs."""
        bounds = self.first_entry if self.first_run is None else self.first_entry[self.first_run]
        return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))

    def weights(self, clip: int) -> NDArray[np.float64]:
        """Return the probability of each caption of a clip, in the order of `entries`. The probabilities sum to 1."""
        if self.first_run is None or self.before is None:
            count = len(self.entries(clip))
            return np.full(count, 1 / count)
        low, high = self.first_run[clip : clip + 2].tolist()
        counts = np.diff(self.first_entry[low : high + 1])
        weights = np.diff(self.before[low : high + 1])
        return np.asarray(np.repeat(weights / weights.sum() / counts, counts))


@dataclass(frozen=True)
class Runs:
    """Runs of the entries of consecutive clips. R runs, N clips.

    Attributes:
        first_entry: First entry of each run, int64 [R].
        rank: Rank of each run's source, int16 [R].
        num_runs: Number of runs of each clip, int64 [N].
    """

    first_entry: NDArray[np.int64]
    rank: NDArray[np.int16]
    num_runs: NDArray[np.int64]


def runs_of(clip: NDArray[np.int64], rank: NDArray[np.int16], *, num_clips: int) -> Runs:
    """Divide entries, which must be sorted by clip and source rank, into runs."""
    starts = np.flatnonzero(np.r_[len(clip) > 0, (clip[1:] != clip[:-1]) | (rank[1:] != rank[:-1])])
    return Runs(starts, rank[starts], np.bincount(clip[starts], minlength=num_clips))


def choice_from_runs(
    first_entry: NDArray[Any], *, rank: NDArray[np.int16], num_runs: NDArray[Any], weights: NDArray[np.float64]
) -> CaptionChoice:
    """Return the choice for the runs of all clips.

    Args:
        first_entry: First entry of each run, followed by the number of entries, [R + 1].
        rank, num_runs: See `Runs`.
        weights: Weight of each source, by rank.
    """
    if len(rank) == len(num_runs):
        return CaptionChoice(first_entry, None, None)
    first_run = scratch(len(num_runs) + 1, index_type(len(rank)))
    before = scratch(len(rank) + 1, np.float64)
    first_run[0] = before[0] = 0
    np.cumsum(num_runs, out=first_run[1:])
    before[1:] = weights[rank]
    np.cumsum(before[1:], out=before[1:])
    return CaptionChoice(first_entry, first_run, before)


def choice_from_entries(
    clip: NDArray[np.int64], rank: NDArray[np.int16], *, num_clips: int, weights: NDArray[np.float64]
) -> CaptionChoice:
    """Return the choice for entries, which must be sorted by clip and source rank."""
    runs = runs_of(clip, rank, num_clips=num_clips)
    first_entry = smallest_integers(np.append(runs.first_entry, len(clip)))
    return choice_from_runs(first_entry, rank=runs.rank, num_runs=runs.num_runs, weights=weights)


def smallest_integers(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Convert non-negative integers to int32 if all of them fit."""
    fits_int32 = not len(numbers) or int(numbers.max()) <= np.iinfo(np.int32).max
    return numbers.astype(np.int32) if fits_int32 else numbers


def describe_truncation(texts: pa.ChunkedArray, rows: NDArray[np.integer], tokenize: "Tokenize") -> str:
    """Return a remark on the texts that fill the tokenizer's context and may be truncated; '' if no text does.

    A token has at least one byte, and a word has at least one token, so only a few texts have to be tokenized. If more
    than 20,000 texts remain, only an evenly spaced sample of them is tokenized.

    Args:
        rows: Rows of the texts to check.
    """
    empty = tokenize("")
    context, padding = len(empty), empty[-1]
    num_bytes = pc.binary_length(texts).to_numpy()[rows]
    candidates = rows[num_bytes >= context - 2]
    sample = candidates[:: max(1, len(candidates) // _MAX_TOKENIZED)]
    if not len(sample):
        return ""
    sampled_texts = (str(texts[row].as_py()) for row in sample.tolist())
    num_full = sum(len(text.split()) >= context - 2 or tokenize(text)[-1] != padding for text in sampled_texts)
    if not num_full:
        return ""
    prefix = "" if len(sample) == len(candidates) else "about "
    num_truncated = round(num_full / len(sample) * len(candidates))
    return f"{prefix}{num_truncated:,} with {context} tokens or more, truncated to {context}"


def same_text(texts: pa.ChunkedArray, rows: NDArray[np.integer] | None = None) -> str | None:
    """Return the text that all rows have in common; None if the texts differ. `rows` are ascending; None for all."""
    first, begin = texts[0 if rows is None else int(rows[0])], 0
    for chunk in texts.chunks:  # in most data sets, texts already differ in the first chunk
        is_same = pc.equal(chunk, first).to_numpy(zero_copy_only=False)
        low, high = (0, 0) if rows is None else np.searchsorted(rows, (begin, begin + len(chunk)))
        if not (is_same if rows is None else is_same[rows[low:high] - begin]).all():
            return None
        begin += len(chunk)
    return str(first.as_py())


@dataclass(frozen=True, kw_only=True)
class RowCaptions:
    """Captions of the rows of a table. C captions, P entries.

    Attributes:
        choice: Entries of the captions of each row.
        sources: Caption sources in use.
        texts_sha256: SHA-256 digest of the texts.
        same_text: Text of all captions if they have the same text; otherwise None.
        caption_id: ID of each caption in the manifest, int [C].
        text_row: Row of each caption in the stored texts, int32 [C].
        caption: Caption of each entry, as an index into the arrays [C], int32 [P]; None if entry i is caption i.
        place: Location of each caption's stored embedding, int64 [C] (clipmill.train.data.mapped_tars); None without
            embeddings.
        num_tokens: Length of each caption's stored sequence, int32 [C]; None if embeddings are single vectors.
    """

    choice: CaptionChoice
    sources: Sources
    texts_sha256: str
    caption_id: NDArray[Any]
    text_row: NDArray[np.int32]
    caption: NDArray[np.int32] | None = None
    place: NDArray[np.int64] | None = None
    num_tokens: NDArray[np.int32] | None = None
    same_text: str | None = None

    @classmethod
    def one_per_row(cls, text_row: NDArray[np.int32], *, texts: "pa.ChunkedArray", texts_sha256: str) -> "RowCaptions":
        """Return the captions of rows with one caption each. The IDs of the captions are 0, 1, 2, ...

        Args:
            text_row: Row of each caption in `texts`, ascending.
        """
        count = len(text_row)
        return cls(
            choice=CaptionChoice(np.arange(count + 1), None, None),
            sources=Sources(("",), np.ones(1), np.zeros(1, np.int16)),
            texts_sha256=texts_sha256,
            caption_id=np.arange(count),
            text_row=text_row,
            same_text=same_text(texts, text_row) if count else None,
        )

    @property
    def num_entries(self) -> int:
        """Number of captions of all rows."""
        return int(self.choice.first_entry[-1])

    def captions_at(self, entries: Any) -> Any:
        """Return the caption of an entry, or the captions of an array of entries, as indices into the arrays [C]."""
        return entries if self.caption is None else self.caption[entries]


class CaptionDraw(Protocol):
    """Random choice of captions without source weights (clipmill.train.data.relevancy.RelevantCaptions).

    Attributes:
        sha256: SHA-256 digest of everything that affects the draw.
    """

    sha256: str

    def draw(self, clip: int, *, position: int, seed: int) -> tuple[int, float]:
        """Draw a caption for a clip; return its entry and its relevancy in [0, 1]."""


class Captions:
    """Annotations that choose a caption for each sample and add it. All methods are thread-safe.

    Args:
        rows: Captions of the rows of the table.
        texts: Stored texts of the captions of the manifest.
        tokenize: Function that tokenizes captions; None to keep captions as text.
        stored_text: Embeddings that replace captions; None to use the captions.
        caption_draw: Random choice by relevancy; None to choose among the captions of the clip by source weights.
    """

    def __init__(
        self,
        rows: RowCaptions,
        texts: "pa.ChunkedArray",
        *,
        tokenize: "Tokenize | None" = None,
        stored_text: "StoredText | None" = None,
        caption_draw: "CaptionDraw | None" = None,
    ) -> None:
        self.rows, self.stored_texts = rows, texts
        self.tokenize, self.stored_text, self._caption_draw = tokenize, stored_text, caption_draw

    @property
    def num_entries(self) -> int:
        """Number of captions of all clips."""
        return self.rows.num_entries

    def visits_per_epoch(self, num_samples: int) -> float:
        """Return the number of samples in a training epoch."""
        return num_samples

    def add(self, sample: Sample, request: "SampleRequest") -> None:
        """Add a caption and its ID to a sample."""
        relevancy = 1.0
        if request.seed is None:
            entry = self.first_entry(request.sample)
        elif self._caption_draw is not None:
            entry, relevancy = self._caption_draw.draw(request.sample, position=request.position, seed=request.seed)
        else:
            entry = self.rows.choice.draw_one(request.sample, position=request.position, seed=request.seed)
        caption_id = sample["caption_id"] = self.caption_id(entry)
        if self.stored_text is not None:
            sample["text"] = self.stored_text.embedding(caption_id, key=sample["key"])
        if self.tokenize is not None:
            sample["tokens"] = self.tokenize(self.text_at(entry))
        elif self.stored_text is None:
            sample["caption"] = self.text_at(entry)
        if self._caption_draw is not None:
            sample["relevancy"] = relevancy

    def caption_id(self, entry: int) -> int:
        """Return the ID of an entry's caption in the manifest."""
        return int(self.rows.caption_id[self.rows.captions_at(entry)])

    def text(self, row: int) -> str:
        """Return the text of the caption that an evaluation shows for a row."""
        return self.text_at(self.first_entry(row))

    def text_at(self, entry: int) -> str:
        """Return the text of an entry's caption."""
        return self.texts(np.array([entry]))[0]

    def texts(self, entries: NDArray[np.int64]) -> list[str]:
        """Return the texts of the captions at these entries."""
        return self.texts_at(self.rows.text_row[self.rows.captions_at(entries)])

    def texts_at(self, text_rows: NDArray[np.integer]) -> list[str]:
        """Return the texts at these rows of the stored texts."""
        # Arrow's `take` would first concatenate all chunks.
        return [str(self.stored_texts[row].as_py()) for row in text_rows.tolist()]

    def texts_of(self, row: int) -> list[str]:
        """Return the texts of all captions of a row, ordered by source."""
        return self.texts(np.array(self.rows.choice.entries(row)))

    def all_texts(self) -> Iterator[str]:
        """Yield the texts of all captions in use."""
        for begin in range(0, self.num_entries, _BLOCK):
            yield from self.texts(np.arange(begin, min(begin + _BLOCK, self.num_entries)))

    def first_entry(self, row: int) -> int:
        """Return the entry of the caption that an evaluation uses for a row."""
        return int(self.rows.choice.first_entries(np.array([row]))[0])

    def require_different_texts(self, *, split: str) -> None:
        """Raise a UserError if all captions have the same text, because a model could not learn from them."""
        if self.rows.same_text is not None:
            raise UserError(
                f"all {len(self.rows.caption_id):,} captions of split {split!r} are {self.rows.same_text!r:.60}, so "
                "they do not distinguish clips",
                hint="use data whose captions differ; for a data folder, run prep manifest with other annotations",
            )

    def describe(self) -> list[str]:
        """Return a remark for the log on the captions that the tokenizer may truncate."""
        return (
            []
            if self.tokenize is None
            else [describe_truncation(self.stored_texts, np.sort(self.rows.text_row), self.tokenize)]
        )

    def facts(self) -> tuple[Any, ...]:
        """Return values for the fingerprint of the samples."""
        return () if self._caption_draw is None else (self._caption_draw.sha256,)
