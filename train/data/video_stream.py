"""`VideoStream`: training data in tars that are read sequentially, without an index or a manifest.

A stream is for tars without clipmill's index: tars from other tools, or tars from prep without their indexes. Each
remote tar is downloaded completely into the cache before it is read. A stream is much slower than a data folder: files
are read completely and decoded through their containers, a caption that crosses a chunk boundary is shortened (counted
in `num_shortened`), and the number of samples is not known in advance. If you have the data folder, use its path or URL
instead of a pattern for its tars.

Each caption of a sample is a clip. Clips wait undecoded in a shuffle window; when they leave it, the loader's threads
open, decode and crop them. Positions count clips and failures in the order in which they leave the window. To find its
position, a resumed run reads tars without decoding them. It counts the clips in the first epoch, and then reads the
current epoch from its start.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.train.data.batch import Batch, BatchRing, Sample
from clipmill.train.data.clip_frames import Clip, ClipShape, make_clip
from clipmill.train.data.decoders import PlainVideo, require_frames
from clipmill.train.data.frame_sampling import US_PER_S, Sampling, moments_of, view_offsets
from clipmill.train.data.loader import Block, Loader, LoaderSettings, SampleRequest
from clipmill.train.data.order import permute
from clipmill.train.data.outcomes import FailedSample, SampleFailed
from clipmill.train.data.query import TARS_SPLIT, DataQuery
from clipmill.train.data.samples import BatchedSamples
from clipmill.train.data.tar_samples import MissingVideo, StreamedClip, UnreadableItem, expand, items_in, shuffle_items
from clipmill.train.data.workers import StuckResult, map_in_order
from clipmill.train.models.text import Tokenize

_AHEAD_BYTES = 1 << 30  # maximum total size of the files that wait for decoding or are being decoded
_Item = StreamedClip | UnreadableItem


@dataclass(frozen=True)
class _Work:
    request: SampleRequest
    item: _Item


class VideoStream(BatchedSamples):
    """Samples from tars that are read sequentially (clipmill.train.data.tar_samples).

    The order of the tars is shuffled, and so are the clips within a window. Runs are resumed exactly. Every rank reads
    all tars and uses its share of the clips.

    Args:
        pattern: Pattern of local or remote tars (`clipmill.train.data.tar_samples.expand`).
        shape: Rules for sampling, cropping and resizing the frames of clips.
        tokenize: Function that tokenizes captions; None to keep captions as text.
        loading: Settings for loading and batching.
        cache, cache_size: Folder for copies of remote tars, and the folder's maximum size
            (`clipmill.train.data.remote.open_cache`).

    Attributes:
        tars: Paths or URLs of the tars.
        fingerprint: Hash of the names of the tars and the sizes of local tars.

    Raises:
        UserError: A tar is missing; or, once batches are requested, the tars contain fewer clips than a batch.
    """

    split = TARS_SPLIT
    folders = frame_shape = text_width = num_samples = visits_per_epoch = None  # unknown or missing in a stream

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
        self.tars = expand(pattern)
        # Hash the tars now, so that a run can save its state even if a tar is deleted later. For a remote tar, only the
        # name is hashed.
        names_and_sizes = [
            (tar.rpartition("/")[2], None if is_remote(tar) else Path(tar).stat().st_size) for tar in self.tars
        ]
        self.fingerprint = hashlib.sha256(repr(names_and_sizes).encode()).hexdigest()
        self.reader = StreamReader(
            self.tars, shape=shape, tokenize=tokenize, open_items=partial(items_in, cache=cache, cache_size=cache_size)
        )
        self.loader = Loader(self, self.reader, replace(loading, group=1))  # every clip has its own file

    @property
    def num_clips(self) -> int:
        """Number of clips that evaluations have shown so far."""
        return len(self.reader.shown_clips)

    @property
    def variant_name(self) -> str:
        """Description of the tars, in place of the name of a variant."""
        return f"a stream of {count_noun(len(self.tars), 'tar')}"

    def describe(self) -> str:
        """Return a line for the log: how clips are read, and how many have been shortened or omitted so far."""
        return self.reader.describe()

    def require_different_texts(self) -> None:
        """Do nothing, because the captions of a stream are unknown until they are read."""

    def text(self, sample: int) -> str:
        """Return the caption of a clip. An evaluation must have shown the clip."""
        return self.reader.shown_clips[sample].text

    def key(self, sample: int) -> str:
        """Return the key of a clip's sample in its tar. An evaluation must have shown the clip."""
        return self.reader.shown_clips[sample].key

    def span_s(self, sample: int) -> tuple[float, float]:
        """Return the start and end of a clip in its file, in seconds. An evaluation must have shown the clip."""
        clip = self.reader.shown_clips[sample]
        return clip.begin_us / US_PER_S, float("inf") if clip.end_us is None else clip.end_us / US_PER_S

    def shown_frames(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Return an empty list, because a stream cannot read a sample again."""
        return []


class StreamReader:
    """Reader of clips from tars, in order of arrival (clipmill.train.data.loader.Reader).

    Args:
        tars: Paths or URLs of the tars.
        shape: Rules for sampling, cropping and resizing the frames of clips.
        tokenize: Function that tokenizes captions; None to keep captions as text.
        open_items: Function that yields the clips and unreadable items in tars, in order.

    Attributes:
        shown_clips: Clips that evaluations have shown, by position, without the bytes of their files.
        num_shortened: Number of captions read so far that extend beyond their files and are therefore shortened.
        num_without_video: Number of samples read so far whose video could not be downloaded when the tar was made.
    """

    def __init__(
        self,
        tars: Sequence[str],
        *,
        shape: ClipShape,
        tokenize: Tokenize | None,
        open_items: Callable[[Sequence[str]], Iterator[_Item | MissingVideo]],
    ) -> None:
        self._tars, self._shape, self._tokenize, self._open_items = tars, shape, tokenize, open_items
        self.shown_clips: dict[int, StreamedClip] = {}
        self.num_shortened = self.num_without_video = 0
        self._first_unreadable: UnreadableItem | None = None

    def describe(self) -> str:
        """Return the line of `VideoStream.describe`."""
        tars = f"{len(self._tars)} tars" if len(self._tars) > 1 else self._tars[0]
        parts = [f"{tars} read sequentially and decoded through the container, because a stream has no packet tables"]
        if self.num_shortened:
            parts.append(f"{count_noun(self.num_shortened, 'caption')} shortened to the boundaries of their chunks")
        if self.num_without_video:
            parts.append(f"{count_noun(self.num_without_video, 'sample')} left out: the video could not be downloaded")
        return "; ".join(parts)

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[Sample]], Batch]:
        """Return a function that collates samples into batches. Each iteration uses a new function."""
        return BatchRing(loading.batch, pin=loading.pin, can_keep=loading.can_keep).collate

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[Sample | FailedSample]:
        """Yield the samples or failures at the ascending positions of the blocks. Evaluations end with the last tar.

        Raises:
            UserError: The tars contain no clips or, in training, fewer clips than a batch.
        """
        loaded = map_in_order(
            self._load,
            self._work(blocks, batch=loading.batch),
            num_threads=loading.num_threads,
            num_ahead=loading.num_ahead,
            stuck_after_s=loading.stuck_after_s,
            size_of=lambda work: _size_of(work.item),
            max_bytes=_AHEAD_BYTES,
        )
        for work, outcome in loaded:
            if isinstance(work.item, StreamedClip):
                self.num_shortened += work.item.is_shortened
                if work.request.seed is None:
                    # Drop the bytes of the file, because only the key, the caption and the span are needed later.
                    self.shown_clips[work.request.position] = replace(work.item, content=b"")
            if isinstance(outcome, StuckResult):
                outcome = FailedSample(work.request.position, work.item.key, "stuck", str(outcome))
            yield outcome

    def _work(self, blocks: Iterator[Block], *, batch: int) -> Iterator[_Work]:
        """Yield the clips at the positions of the blocks."""
        requests = (
            SampleRequest(position, position, block.seed) for block in blocks for position in block.positions.tolist()
        )
        position, epoch, request = 0, 0, next(requests)
        while True:
            epoch_start, seed = position, request.seed
            for item in self._items(seed, epoch=epoch):
                if position == request.position:
                    yield _Work(request, item)
                    request = next(requests)
                position += 1
            num_items = position - epoch_start
            self._require_items(num_items, at_least=1 if seed is None else batch)
            if seed is None:
                return
            # All epochs have the same length, so complete epochs before the next position can be skipped.
            num_skipped = (request.position - position) // num_items
            epoch, position = epoch + 1 + num_skipped, position + num_skipped * num_items

    def _items(self, seed: int | None, *, epoch: int) -> Iterator[_Item]:
        """Return the clips of an epoch: shuffled in training, in the order of the tars in an evaluation."""
        if seed is None:
            return self._read_tars(self._tars)
        order = permute(np.arange(len(self._tars)), len(self._tars), seed=seed, epoch=epoch)
        items = self._read_tars([self._tars[index] for index in order.tolist()])
        return shuffle_items(items, size_of=_size_of, seed=seed, epoch=epoch)

    def _read_tars(self, tars: Sequence[str]) -> Iterator[_Item]:
        for item in self._open_items(tars):
            if isinstance(item, MissingVideo):
                self.num_without_video += 1
                continue
            if isinstance(item, UnreadableItem):
                self._first_unreadable = self._first_unreadable or item
            yield item

    def _require_items(self, num_items: int, *, at_least: int) -> None:
        if num_items >= at_least:
            return
        tars = f"a stream of {count_noun(len(self._tars), 'tar')}"
        message = f"{tars} contains fewer than the required {count_noun(at_least, 'clip')}: {self.describe()}"
        if self._first_unreadable is not None:
            key, detail = self._first_unreadable.key, self._first_unreadable.detail
            raise UserError(f"{message}; unreadable: {key}: {detail}", hint="repair or omit this tar")
        raise UserError(message, hint="add more tars, or use a smaller --batch")

    def _load(self, work: _Work) -> Sample | FailedSample:
        try:
            if isinstance(work.item, UnreadableItem):
                raise SampleFailed(work.item.key, reason="shard_unreadable", detail=work.item.detail)
            return self._sample(work.item, work.request)
        except SampleFailed as error:
            return error.at(work.request.position)

    def _sample(self, clip: StreamedClip, request: SampleRequest) -> Sample:
        frames, time_s = clip_of_file(
            clip.content, self._shape, request, key=clip.key, begin_us=clip.begin_us, end_us=clip.end_us
        )
        sample = Sample(position=request.position, key=clip.key, caption_id=clip.caption_id)
        sample["video"], sample["colour"], sample["time_s"] = frames.video, frames.colour, time_s
        if self._tokenize is None:
            sample["caption"] = clip.text
            return sample
        try:
            sample["tokens"] = self._tokenize(clip.text)
        except Exception as error:  # whatever error a tokenizer raises for a text, only this sample fails
            raise SampleFailed(clip.key, reason="undecodable", detail=f"{type(error).__name__}: {error}") from error
        return sample


def open_stream(query: DataQuery) -> VideoStream:
    """Open the stream of tars that a task needs.

    Raises:
        UserError: See `VideoStream`.
    """
    settings = query.settings
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


def clip_of_file(
    content: bytes,
    shape: ClipShape,
    request: SampleRequest,
    *,
    key: str,
    begin_us: int = 0,
    end_us: int | None = None,
) -> tuple[Clip, list[float]]:
    """Decode a clip from a span of a video file. The frame rate of the file may vary.

    In training, `request.generator("frames")` draws the moments of the frames, and `request.generator("crop")` draws
    the crop rectangle. In an evaluation, the frames of `shape.views.num_clips` temporal views follow one another.

    Args:
        content: Bytes of the complete file.
        shape: Rules for sampling, cropping and resizing the frames.
        request: Request with the random choices.
        key: Key of the sample, for failures.
        begin_us, end_us: Span, microseconds from the first frame of the file; None for the end of the file.

    Returns:
        clip: The clip.
        times_s: Time of each frame, seconds from the first frame of the file.

    Raises:
        SampleFailed: The file is truncated or cannot be decoded, a frame is missing, frames differ in resolution or
            colour, or the span does not overlap the file.
    """
    rng, num_views = request.generator("frames"), shape.views.num_clips
    try:
        video = PlainVideo(content)
        # Round up, because a window of complete frames would not fit into a span that is slightly too short.
        end_of_file_us = math.ceil((video.end_pts - video.pts[0]) * video.time_base * US_PER_S)
        end_us = end_of_file_us if end_us is None else min(end_us, end_of_file_us)
        if end_us <= begin_us:
            detail = f"its span from {begin_us} us to {end_us} us is empty; the file ends at {end_of_file_us} us"
            raise SampleFailed(key, reason="empty_span", detail=detail)
        frames = _frames_on_screen(video, (begin_us, end_us), shape.sampling, rng=rng, num_views=num_views)
        intact_frames = video.decode(frames)
        require_frames(set(frames) - intact_frames.keys(), key=key)
        clip_frames = [intact_frames[frame] for frame in frames]
        clip = make_clip(clip_frames, shape, rng=request.generator("crop"), in_graph=False, key=key)
        return clip, [float(video.time_base * (video.pts[frame] - video.pts[0])) for frame in frames]
    except SampleFailed:
        raise
    except Exception as error:  # whatever error libav raises for a file, only this sample fails
        raise SampleFailed(key, reason="undecodable", detail=f"{type(error).__name__}: {error}") from error


def _frames_on_screen(
    video: PlainVideo, span_us: tuple[int, int], sampling: Sampling, *, rng: np.random.Generator | None, num_views: int
) -> list[int]:
    """Return the indices of the frames that are on screen at the moments of a span (`moments_of`)."""
    tick_us = video.time_base * US_PER_S
    fps = Fraction(len(video.pts) * US_PER_S) / ((video.end_pts - video.pts[0]) * tick_us)
    ticks: list[int] = []
    for offset in view_offsets(sampling.rule, 1 if rng is not None else num_views):
        moments = moments_of(
            *span_us, sampling, fps_num=fps.numerator, fps_den=fps.denominator, rng=rng, view_offset=offset
        )
        divisor = moments.denominator * tick_us.numerator
        ticks += [numerator * tick_us.denominator // divisor for numerator in moments.numerators]
    frames = np.searchsorted(np.array(video.pts) - video.pts[0], ticks, side="right") - 1
    return [int(frame) for frame in frames]
