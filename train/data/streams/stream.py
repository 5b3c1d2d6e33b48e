"""A training set of tars that are read from front to back: no index, no manifest, and no other order than theirs."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted
from clipmill.train.config.data import CaptionSettings
from clipmill.train.data.batch import Sample
from clipmill.train.data.decoding.clip import ClipShape, make_clip
from clipmill.train.data.decoding.decoders import PlainVideo, require_frames
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.data.loader import BatchLoader, LoaderSettings, SampleRequest
from clipmill.train.data.order import Cursor
from clipmill.train.data.outcomes import FailedSample, LoadedBatch, SampleFailed
from clipmill.train.data.query import TARS_SPLIT, DataQuery, one_caption_each
from clipmill.train.data.streams.samples import StreamedClip, Unreadable, WithoutVideo, frames_on_screen
from clipmill.train.data.streams.tars import expand, items_in, shuffled, tars_of_epoch
from clipmill.train.data.workers import Stuck, in_order
from clipmill.train.models.text import Tokenize

_AHEAD_BYTES = 1 << 30  # of files that wait to be decoded, or are being decoded
_Item = StreamedClip | Unreadable


@dataclass(frozen=True)
class _Work:
    request: SampleRequest
    item: _Item


class VideoStream(BatchLoader):
    """Clips of tars (clipmill.train.data.streams.samples), decoded through their containers.

    Tars are shuffled, and clips within a window; positions count all clips read, including failures. A run resumes
    exactly, by reading up to its position without decoding: the first epoch to count the clips, then its own epoch.
    Every rank reads everything and takes its share.

    Args:
        pattern: local or remote tars (`clipmill.train.data.streams.tars.expand`).
        tokenize: makes captions tokens; None for texts.
        cache, cache_size: folder for copies of remote tars, and the limit (`clipmill.train.data.remote.open_cache`).

    Attributes:
        num_shortened: captions so far that extend beyond their file and are shown up to its end.
        num_without_video: samples so far whose video could not be downloaded when the tar was made.

    Raises:
        UserError: a tar is missing; when batches are requested, the tars hold fewer clips than a batch.
    """

    def __init__(
        self,
        pattern: str,
        *,
        shape: ClipShape,
        tokenize: Tokenize | None,
        loading: LoaderSettings,
        cache: Path | None = None,
        cache_size: str | None = None,
    ) -> None:
        super().__init__(replace(loading, group=1))  # every clip has a file of its own
        self.split = TARS_SPLIT
        self._tars = expand(pattern)
        self._shape, self._tokenize = shape, tokenize
        self._cache, self._cache_size = cache, cache_size
        self._shown: dict[int, StreamedClip] = {}
        self.num_shortened = 0
        self.num_without_video = 0
        self._first_unreadable: Unreadable | None = None

    @property
    def num_samples(self) -> None:
        """Unknown before the end of an epoch."""
        return

    @property
    def num_clips(self) -> int:
        """Number of clips that evaluations have shown so far."""
        return len(self._shown)

    @property
    def variant_name(self) -> str:
        """Where the clips come from."""
        return f"a stream of {counted(len(self._tars), 'tar')}"

    @property
    def fingerprint(self) -> str:
        """Hash of the names of the tars, which is all that is known of them."""
        return hashlib.sha256("\n".join(self._tars).encode()).hexdigest()

    def describe(self) -> str:
        """One line for the log: how the clips are read, and deviations from the settings so far."""
        tars = f"{len(self._tars)} tars" if len(self._tars) > 1 else self._tars[0]
        parts = [f"{tars} from front to back, decoded through the container: a stream has no packet tables"]
        if self.num_shortened:
            parts.append(f"{counted(self.num_shortened, 'caption')} shortened to the borders of their chunks")
        if self.num_without_video:
            parts.append(f"{counted(self.num_without_video, 'sample')} left out: the video could not be downloaded")
        return "; ".join(parts)

    def require_different_texts(self) -> None:
        """Do nothing: the captions of a stream are not known before they are read."""

    def evaluation_batches(self, *, every: int = 1, begin: int = 0) -> Iterator[LoadedBatch]:
        """This rank's share of every `every`-th clip, once, in the order of the tars; the last batch may be smaller.

        Args:
            begin: see `Loader.evaluation_batches`; earlier clips are read and not decoded.

        Raises:
            UserError: the tars hold no clips.
        """
        building = self._builder(None)
        position, of_ranks = begin, self._loading.num_ranks * every
        for work, outcome in self._outcomes(self._evaluation_work(every, begin)):
            position = begin + ((work.request.position - begin) // of_ranks + 1) * of_ranks
            if isinstance(work.item, StreamedClip):
                # Without the file: an evaluation shows only the caption of a clip.
                self._shown[work.request.position] = replace(work.item, content=b"")
            if building.add(outcome):
                yield building.take(Cursor(position))
        if not building.is_empty:
            yield building.take(Cursor(position))

    def text(self, sample: int) -> str:
        """The caption of a clip that an evaluation has shown."""
        return self._shown[sample].text

    def key(self, sample: int) -> str:
        """The sample of such a clip in its tar."""
        return self._shown[sample].key

    def span_s(self, sample: int) -> tuple[float, float]:
        """Start and end of such a clip in its file, seconds."""
        clip = self._shown[sample]
        return clip.begin_us / US_PER_S, float("inf") if clip.end_us is None else clip.end_us / US_PER_S

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Always empty: a stream cannot go back."""
        return []

    def _training_outcomes(self, begin: Cursor) -> Iterator[Sample | FailedSample]:
        return (outcome for _, outcome in self._outcomes(self._training_work(begin)))

    def _training_work(self, begin: Cursor) -> Iterator[_Work]:
        """This rank's share of the endless stream, from `begin` on."""
        seed = self._seed
        wanted = chain.from_iterable(positions.tolist() for positions in self._positions(begin))
        position, next_wanted = 0, next(wanted)
        epoch = 0
        while True:
            began = position
            items = self._items(tars_of_epoch(self._tars, seed=seed, epoch=epoch))
            for item in shuffled(items, size_of=_size_of, seed=seed, epoch=epoch):
                if position == next_wanted:
                    next_wanted = next(wanted)
                    yield _Work(SampleRequest(position, position, seed), item)
                position += 1
            num_items = position - began
            self._require(num_items, at_least=self._loading.batch)
            # All epochs have the same length: those before the next position are skipped unread.
            num_skipped = (next_wanted - position) // num_items
            epoch, position = epoch + 1 + num_skipped, position + num_skipped * num_items

    def _evaluation_work(self, every: int, begin: int) -> Iterator[_Work]:
        loading, num_items = self._loading, 0
        for item in self._items(self._tars):
            number, rest = divmod(num_items - begin, every)
            if number >= 0 and not rest and number % loading.num_ranks == loading.rank:
                yield _Work(SampleRequest(num_items, num_items, None), item)
            num_items += 1
        self._require(num_items, at_least=1)

    def _items(self, tars: list[str]) -> Iterator[_Item]:
        for item in items_in(tars, cache=self._cache, cache_size=self._cache_size):
            if isinstance(item, WithoutVideo):
                self.num_without_video += 1
                continue
            if isinstance(item, Unreadable):
                self._first_unreadable = self._first_unreadable or item
            yield item

    def _require(self, num_items: int, *, at_least: int) -> None:
        if num_items >= at_least:
            return
        message = f"{self.variant_name} holds fewer clips than the {at_least} that are needed: {self.describe()}"
        if self._first_unreadable is not None:
            key, why = self._first_unreadable.key, self._first_unreadable.detail
            raise UserError(f"{message}; what cannot be read: {key}: {why}", hint="repair or leave out that tar")
        raise UserError(message, hint="name more tars, or use a smaller --batch")

    def _outcomes(self, work: Iterator[_Work]) -> Iterator[tuple[_Work, Sample | FailedSample]]:
        loading = self._loading
        loaded = in_order(
            self._load,
            work,
            num_threads=loading.num_threads,
            num_ahead=loading.num_ahead,
            stuck_after_s=loading.stuck_after_s,
            size_of=lambda work: _size_of(work.item),
            max_bytes=_AHEAD_BYTES,
        )
        for done, outcome in loaded:
            if isinstance(done.item, StreamedClip):
                self.num_shortened += done.item.is_shortened
            if isinstance(outcome, Stuck):
                outcome = FailedSample(done.request.position, done.item.key, "stuck", str(outcome))
            yield done, outcome

    def _load(self, work: _Work) -> Sample | FailedSample:
        try:
            if isinstance(work.item, Unreadable):
                raise SampleFailed(work.item.key, reason="shard_unreadable", detail=work.item.detail)
            return self._sample(work.item, work.request)
        except SampleFailed as error:
            return error.at(work.request.position)

    def _sample(self, clip: StreamedClip, request: SampleRequest) -> Sample:
        try:
            video = PlainVideo(clip.content)
            frames = frames_on_screen(video, clip, self._shape.sampling, rng=request.generator("frames"))
            found = video.decode(frames)
            require_frames(set(frames) - found.keys(), key=clip.key)
            pictures, crop = [found[frame] for frame in frames], request.generator("crop")
            made = make_clip(pictures, self._shape, rng=crop, in_graph=False, key=clip.key)
            tokens = None if self._tokenize is None else self._tokenize(clip.text)
        except SampleFailed:
            raise
        except Exception as error:  # whatever a foreign file makes libav's bindings raise fails that sample alone
            raise SampleFailed(clip.key, reason="undecodable", detail=f"{type(error).__name__}: {error}") from error
        said = Sample(caption=clip.text) if tokens is None else Sample(tokens=tokens)
        return Sample(
            position=request.position,
            key=clip.key,
            caption_id=clip.caption_id,
            video=made.video,
            colour=made.colour,
            **said,
        )


def open_stream(query: DataQuery) -> VideoStream:
    """Open the stream of tars that a task asks for.

    Raises:
        UserError: the settings select samples by what tars do not have, or as of `VideoStream`.
    """
    settings = query.settings
    if query.has_stored_text or query.captions != CaptionSettings():
        raise one_caption_each(settings.folder)
    if settings.selection is not None:
        raise UserError(
            f"{settings.folder} is a stream of tars: it has no manifest and no scores to select by",
            hint="leave out --where and --share, or name a data folder that prep made",
        )
    return VideoStream(
        settings.folder,
        shape=query.shape,
        tokenize=query.tokenize,
        loading=query.loading,
        cache=settings.cache,
        cache_size=settings.cache_size,
    )


def _size_of(item: _Item) -> int:
    return len(item.content) if isinstance(item, StreamedClip) else 0
