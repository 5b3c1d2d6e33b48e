"""A training set made of tars that are read from front to back: no index, no manifest, no other order than theirs."""

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.batch import Sample
from train.data.clips import US_PER_S, Moments, moments_of
from train.data.decoding.clip import ClipShape, make_clip
from train.data.decoding.plain import PlainVideo
from train.data.failures import FailedSample, SampleFailed
from train.data.filling import BatchFilling, LoadedBatch
from train.data.loader import LoaderSettings, Visit
from train.data.place import LoaderState, Place, resumed
from train.data.streams.clips import StreamedClip
from train.data.streams.order import shuffled
from train.data.streams.tars import clips_in, expand
from train.data.workers import Stuck, in_order
from train.models.text import Tokenize

_BLOCK = 4096
_Item = StreamedClip | tuple[str, str]


@dataclass(frozen=True)
class _Work:
    position: int
    item: _Item
    seed: int | None


class VideoStream:
    """Clips of tars (train.data.streams.clips says which), decoded by way of their containers.

    Tars are shuffled, and clips within a window; `position` counts what has been read, failures included, so that a
    run resumes exactly by reading on from the beginning of its epoch to its place. Every rank reads everything and
    takes its part.

    Args:
        pattern: tars, on this machine or remote (`train.data.streams.tars.expand`).
        cache: where copies of remote tars lie; None for the user's cache.

    Attributes:
        place: where the batches taken so far end.
        num_shortened: captions seen so far that reach beyond their file and are shown up to its border.

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
        self.place = Place(0)
        self.num_shortened = 0

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
        """One line for the log: how the clips are read."""
        tars = f"{len(self._tars)} tars" if len(self._tars) > 1 else self._tars[0]
        return f"{tars} from front to back, decoded by way of the container: a stream has no packet tables"

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        """Endless batches, from `position` on, or from where the stream stands.

        Raises:
            TooManyFailures: more than `max_failures` samples failed.
        """
        loading = self._loading
        begin = self.place if position is None else Place(position)
        filling = BatchFilling(loading.batch, pin=loading.pin, max_failures=max_failures)
        outcomes = self._outcomes(self._training_work(begin))
        for num_own, (_, outcome) in enumerate(outcomes, start=1):
            if filling.add(outcome):
                num_common = filling.num_batches * loading.batch
                self.place = begin.after(num_common, num_own, rank=loading.rank, num_ranks=loading.num_ranks)
                yield filling.take(self.place.position)

    def evaluation_batches(self) -> Iterator[LoadedBatch]:
        """This rank's part of all clips, each once, in the order of the tars; the last batch may be smaller."""
        loading = self._loading
        filling = BatchFilling(loading.batch, pin=loading.pin, max_failures=None)
        items = enumerate(item for tar in self._tars for item in clips_in(tar, cache=self._cache))
        own = (_Work(at, item, None) for at, item in items if at % loading.num_ranks == loading.rank)
        position = 0
        for work, outcome in self._outcomes(own):
            position = work.position + 1
            if isinstance(work.item, StreamedClip):
                # Without the file: what an evaluation shows of a clip is its caption.
                self._shown[work.position] = _without_content(work.item)
            if filling.add(outcome):
                yield filling.take(position)
        if filling.has_any:
            yield filling.take(position)

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
        self.place = resumed(states, samples=self.fingerprint, seed=self._loading.seed, what=self.describe())

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

    def _training_work(self, place: Place) -> Iterator[_Work]:
        """This rank's part of the endless stream, from `place` on."""
        loading = self._loading
        wanted = self._positions(place)
        position, next_wanted = 0, next(wanted)
        for epoch in count():
            began = position
            for item in shuffled(
                self._tars, lambda tar: clips_in(tar, cache=self._cache), seed=loading.seed, epoch=epoch
            ):
                if position == next_wanted:
                    next_wanted = next(wanted)
                    yield _Work(position, item, loading.seed)
                position += 1
            if position == began:
                return  # tars without a single sample

    def _positions(self, place: Place) -> Iterator[int]:
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
        )
        for done, outcome in loaded:
            if isinstance(done.item, StreamedClip):
                self.num_shortened += done.item.is_shortened
            if isinstance(outcome, Stuck):
                key = done.item.key if isinstance(done.item, StreamedClip) else done.item[0]
                outcome = FailedSample(done.position, key, "stuck", f"it was not there after {outcome.after_s:g} s")
            yield done, outcome

    def _load(self, work: _Work) -> Sample | FailedSample:
        clip = work.item
        if not isinstance(clip, StreamedClip):
            return FailedSample(work.position, clip[0], "shard_unreadable", clip[1])
        try:
            return self._sample(clip, Visit(0, work.position, work.seed))
        except SampleFailed as error:
            return FailedSample(work.position, error.key, error.reason, error.detail)

    def _sample(self, clip: StreamedClip, visit: Visit) -> Sample:
        import av

        rng = visit.rng()
        try:
            video = PlainVideo(clip.content)
            frames = _frames_on_screen(video, clip, self._shape, rng=rng)
            found = video.decode(frames)
        except (av.FFmpegError, ValueError) as error:
            raise SampleFailed(clip.key, reason="undecodable", detail=f"{type(error).__name__}: {error}") from error
        if missing := sorted(set(frames) - found.keys()):
            detail = f"frames {missing} do not come out of the decoder"
            raise SampleFailed(clip.key, reason="frame_missing", detail=detail)
        pictures = [found[frame] for frame in frames]
        made = make_clip(pictures, self._shape, rng=rng, in_graph=False, key=clip.key)
        return Sample(
            position=visit.position,
            key=clip.key,
            caption_id=clip.caption_id,
            video=made.video,
            colour=made.colour,
            tokens=self._tokenize(clip.text),
        )


def _frames_on_screen(
    video: PlainVideo, clip: StreamedClip, shape: ClipShape, *, rng: np.random.Generator | None
) -> list[int]:
    """Frames of the file that its times say are on screen at the clip's moments, at a constant rate or not."""
    tick_us = video.time_base * US_PER_S
    end_of_file_us = int((video.end_pts - video.pts[0]) * tick_us)
    end_us = end_of_file_us if clip.end_us is None else min(clip.end_us, end_of_file_us)
    if end_us <= clip.begin_us:
        detail = f"its span from {clip.begin_us} us to {end_us} us is empty; the file ends at {end_of_file_us} us"
        raise SampleFailed(clip.key, reason="empty_span", detail=detail)
    fps = Fraction(len(video.pts) * US_PER_S, max(end_of_file_us, 1))
    moments = moments_of(clip.begin_us, end_us, shape.sampling, fps_num=fps.numerator, fps_den=fps.denominator, rng=rng)
    return _frames_at(video, moments, tick_us=tick_us)


def _frames_at(video: PlainVideo, moments: Moments, *, tick_us: Fraction) -> list[int]:
    ticks = [
        numerator * tick_us.denominator // (moments.denominator * tick_us.numerator) for numerator in moments.numerators
    ]
    found = np.searchsorted(np.array(video.pts) - video.pts[0], ticks, side="right") - 1
    return [int(frame) for frame in found]


def _without_content(clip: StreamedClip) -> StreamedClip:
    return StreamedClip(clip.key, b"", clip.caption_id, clip.text, clip.begin_us, clip.end_us, clip.is_shortened)
