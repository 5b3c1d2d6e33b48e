"""A training set made of tars that are read from front to back: no index, no manifest, no other order than theirs."""

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError
from train.data.batch import Sample
from train.data.cursor import Cursor, LoaderState, resume_cursor
from train.data.decoding.clip import ClipShape, make_clip
from train.data.decoding.plain import PlainVideo
from train.data.frame_sampling import US_PER_S
from train.data.loader import LoaderSettings, SampleRequest
from train.data.outcomes import BatchFilling, FailedSample, LoadedBatch, SampleFailed
from train.data.streams.clips import StreamedClip, WithoutVideo, frames_on_screen
from train.data.streams.samples import Unreadable
from train.data.streams.tars import expand, items_in, shuffled, tars_of_epoch
from train.data.workers import Stuck, in_order
from train.models.text import Tokenize

_BLOCK = 4096
_AHEAD_BYTES = 1 << 30  # of files that wait to be decoded, or are being decoded
_Item = StreamedClip | Unreadable


@dataclass(frozen=True)
class _Work:
    position: int
    item: _Item
    seed: int | None


class VideoStream:
    """Clips of tars (train.data.streams.clips says which), decoded by way of their containers.

    Tars are shuffled, and clips within a window; `position` counts what has been read, failures included. A run resumes
    exactly, by reading to its place without decoding: the first epoch to learn how many clips there are, and its own.
    Every rank reads everything and takes its part.

    Args:
        pattern: tars, on this machine or remote (`train.data.streams.tars.expand`).
        cache: where copies of remote tars lie; None for the user's cache.

    Attributes:
        place: where the batches taken so far end.
        num_shortened: captions seen so far that reach beyond their file and are shown up to its border.
        num_without_video: samples read so far whose video, as their tar says, could not be had.

    Raises:
        UserError: a tar is not there.
    """

    def __init__(
        self,
        pattern: str,
        *,
        shape: ClipShape,
        tokenize: Tokenize,
        loading: LoaderSettings,
        cache: Path | None = None,
    ) -> None:
        self.split = "all"
        self._tars = expand(pattern)
        self._shape, self._tokenize, self._loading, self._cache = shape, tokenize, loading, cache
        self._shown: dict[int, StreamedClip] = {}
        self.place = Cursor(0)
        self.num_shortened = 0
        self.num_without_video = 0
        self._first_unreadable: Unreadable | None = None

    @property
    def num_samples(self) -> None:
        """Not known before an epoch is over."""
        return

    @property
    def variant_name(self) -> str:
        """Where the pictures come from."""
        return f"a stream of {len(self._tars)} tars"

    @property
    def fingerprint(self) -> str:
        """Hash of the names of the tars, which is all that is known of them."""
        return hashlib.sha256("\n".join(self._tars).encode()).hexdigest()

    def describe(self) -> str:
        """One line for the log: how the clips are read, and what is not as it was asked for, as of now."""
        tars = f"{len(self._tars)} tars" if len(self._tars) > 1 else self._tars[0]
        parts = [f"{tars} from front to back, decoded by way of the container: a stream has no packet tables"]
        if self.num_shortened:
            parts.append(f"{self.num_shortened:,} captions shortened to the borders of their chunks")
        if self.num_without_video:
            parts.append(f"{self.num_without_video:,} samples left out, whose videos could not be downloaded")
        return "; ".join(parts)

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """Endless batches, from `position` on, or from where the stream stands.

        Raises:
            TooManyFailures: more than `max_failures` samples failed.
            UserError: the tars hold fewer clips than a batch.
        """
        loading = self._loading
        begin = self.place if position is None else Cursor(position)
        filling = BatchFilling(loading.batch, pin=loading.pin, max_failures=max_failures)
        outcomes = self._outcomes(self._training_work(begin))
        for num_own, (_, outcome) in enumerate(outcomes, start=1):
            if filling.add(outcome):
                num_common = filling.num_batches * loading.batch
                self.place = begin.after(num_common, num_own, rank=loading.rank, num_ranks=loading.num_ranks)
                yield filling.take(self.place)

    def evaluation_batches(self, *, every: int = 1) -> Iterator[LoadedBatch]:
        """This rank's part of every `every`-th clip, once, in the order of the tars; the last batch may be smaller.

        Raises:
            UserError: the tars hold no clips.
        """
        loading = self._loading
        filling = BatchFilling(loading.batch, pin=loading.pin, max_failures=None)
        position = 0
        for work, outcome in self._outcomes(self._evaluation_work(every)):
            position = work.position + 1
            if isinstance(work.item, StreamedClip):
                # Without the file: what an evaluation shows of a clip is its caption.
                self._shown[work.position] = _without_content(work.item)
            if filling.add(outcome):
                yield filling.take(Cursor(position))
        if filling.has_any:
            yield filling.take(Cursor(position))

    def state_dict(self) -> LoaderState:
        """Where the batches taken so far end."""
        place = self.place
        return LoaderState(
            position=place.position, ahead=list(place.ahead), seed=self._loading.seed, samples=self.fingerprint
        )

    def load_state_dict(self, *states: LoaderState) -> None:
        """Goes on from the states of all ranks.

        Raises:
            UserError: they are of other tars or another seed, or of different steps.
        """
        self.place = resume_cursor(states, samples=self.fingerprint, seed=self._loading.seed, what=self.describe())

    def text(self, sample: int) -> str:
        """The caption of a clip that an evaluation has passed."""
        return self._shown[sample].text

    def key(self, sample: int) -> str:
        """The sample of such a clip in its tar."""
        return self._shown[sample].key

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of such a clip in its file, seconds."""
        clip = self._shown[sample]
        return clip.begin_us / US_PER_S, float("inf") if clip.end_us is None else clip.end_us / US_PER_S

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """None: a stream does not go back."""
        return []

    def _training_work(self, place: Cursor) -> Iterator[_Work]:
        """This rank's part of the endless stream, from `place` on."""
        loading = self._loading
        wanted = self._positions(place)
        position, next_wanted = 0, next(wanted)
        epoch = 0
        while True:
            began = position
            items = self._items(tars_of_epoch(self._tars, seed=loading.seed, epoch=epoch))
            for item in shuffled(items, size_of=_size_of, seed=loading.seed, epoch=epoch):
                if position == next_wanted:
                    next_wanted = next(wanted)
                    yield _Work(position, item, loading.seed)
                position += 1
            num_items = position - began
            self._require(num_items, at_least=loading.batch)
            # Epochs are equally long: those before the next place are passed over unread.
            num_passed = (next_wanted - position) // num_items
            epoch, position = epoch + 1 + num_passed, position + num_passed * num_items

    def _evaluation_work(self, every: int) -> Iterator[_Work]:
        loading, num_items = self._loading, 0
        for item in self._items(self._tars):
            if num_items % every == 0 and num_items // every % loading.num_ranks == loading.rank:
                yield _Work(num_items, item, None)
            num_items += 1
        self._require(num_items, at_least=1)

    def _items(self, tars: list[str]) -> Iterator[_Item]:
        for item in items_in(tars, cache=self._cache):
            if isinstance(item, WithoutVideo):
                self.num_without_video += 1
                continue
            if isinstance(item, Unreadable):
                self._first_unreadable = self._first_unreadable or item
            yield item

    def _require(self, num_items: int, *, at_least: int) -> None:
        if num_items >= at_least:
            return
        message = f"{self.variant_name} holds fewer than the {at_least} clips that are needed: {self.describe()}"
        if self._first_unreadable is not None:
            key, why = self._first_unreadable.key, self._first_unreadable.detail
            raise UserError(f"{message}; what cannot be read: {key}: {why}", hint="mend or leave out that tar")
        raise UserError(message, hint="name more tars, or use a smaller --batch")

    def _positions(self, place: Cursor) -> Iterator[int]:
        loading = self._loading
        for begin in count(0, _BLOCK):
            yield from place.positions(begin, _BLOCK, rank=loading.rank, num_ranks=loading.num_ranks).tolist()

    def _outcomes(self, work: Iterator[_Work]) -> Iterator[tuple[_Work, Sample | FailedSample]]:
        loading = self._loading
        loaded = in_order(
            self._load,
            work,
            num_threads=loading.num_threads,
            num_ahead=loading.num_ahead,
            stuck_after_s=loading.stuck_after_s,
            size_of=lambda one: _size_of(one.item),
            max_bytes=_AHEAD_BYTES,
        )
        for done, outcome in loaded:
            if isinstance(done.item, StreamedClip):
                self.num_shortened += done.item.is_shortened
            if isinstance(outcome, Stuck):
                detail = f"it was not there after {outcome.after_s:g} s, and nobody waits for it any more"
                outcome = FailedSample(done.position, done.item.key, "stuck", detail)
            yield done, outcome

    def _load(self, work: _Work) -> Sample | FailedSample:
        clip = work.item
        if not isinstance(clip, StreamedClip):
            return FailedSample(work.position, clip.key, "shard_unreadable", clip.detail)
        try:
            return self._sample(clip, SampleRequest(0, work.position, work.seed))
        except SampleFailed as error:
            return FailedSample(work.position, error.key, error.reason, error.detail)

    def _sample(self, clip: StreamedClip, request: SampleRequest) -> Sample:
        rng = request.rng()
        try:
            video = PlainVideo(clip.content)
            frames = frames_on_screen(video, clip, self._shape.sampling, rng=rng)
            found = video.decode(frames)
            if missing := sorted(set(frames) - found.keys()):
                detail = f"frames {missing} do not come out of the decoder"
                raise SampleFailed(clip.key, reason="frame_missing", detail=detail)
            made = make_clip([found[frame] for frame in frames], self._shape, rng=rng, in_graph=False, key=clip.key)
            tokens = self._tokenize(clip.text)
        except SampleFailed:
            raise
        except Exception as error:  # whatever a foreign file makes libav's bindings raise is its own failure
            raise SampleFailed(clip.key, reason="undecodable", detail=f"{type(error).__name__}: {error}") from error
        return Sample(
            position=request.position,
            key=clip.key,
            caption_id=clip.caption_id,
            video=made.video,
            colour=made.colour,
            tokens=tokens,
        )


def _size_of(item: _Item) -> int:
    return len(item.content) if isinstance(item, StreamedClip) else 0


def _without_content(clip: StreamedClip) -> StreamedClip:
    return StreamedClip(clip.key, b"", clip.caption_id, clip.text, clip.begin_us, clip.end_us, clip.is_shortened)
