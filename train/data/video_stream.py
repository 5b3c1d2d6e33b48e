"""A training set of tars that are read from front to back: no index, no manifest, and no other order than theirs."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import count_noun
from clipmill.manifests.storage.cache import CachedFile
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.manifests.storage.objects import open_objects
from clipmill.train.config.clips import CaptionSettings
from clipmill.train.data.batch import Batch, BatchRing, Sample
from clipmill.train.data.clip_frames import ClipShape, make_clip
from clipmill.train.data.decoders import PlainVideo, require_frames
from clipmill.train.data.frame_sampling import US_PER_S
from clipmill.train.data.loader import Block, Loader, LoaderSettings, SampleRequest
from clipmill.train.data.order import permute
from clipmill.train.data.outcomes import FailedSample, SampleFailed
from clipmill.train.data.query import TARS_SPLIT, DataQuery, one_caption_each
from clipmill.train.data.remote import held_copy, open_cache
from clipmill.train.data.samples import BatchedSamples
from clipmill.train.data.tar_samples import (
    StreamedClip,
    Unreadable,
    WithoutVideo,
    clips_of,
    frames_on_screen,
    samples_of,
)
from clipmill.train.data.workers import Stuck, in_order
from clipmill.train.device.random import generator
from clipmill.train.models.text import Tokenize

_AHEAD_BYTES = 1 << 30  # of files that wait to be decoded, or are being decoded
_Item = StreamedClip | Unreadable


@dataclass(frozen=True)
class _Work:
    request: SampleRequest
    item: _Item


class VideoStream(BatchedSamples):
    """Clips of tars (clipmill.train.data.tar_samples), decoded through their containers.

    Tars are shuffled, and clips within a window; positions count all clips read, including failures. A run resumes
    exactly, by reading up to its position without decoding: the first epoch to count the clips, then its own epoch.
    Every rank reads everything and takes its share.

    Args:
        pattern: Pattern of local or remote tars (`clipmill.train.data.video_stream.expand`).
        tokenize: Makes tokens of captions; None for texts.
        cache, cache_size: Folder for copies of remote tars, and its limit (`clipmill.train.data.remote.open_cache`).

    Attributes:
        fingerprint: Hash of the names and sizes of the tars.

    Raises:
        UserError: a tar is missing; when batches are requested, the tars hold fewer clips than a batch.
    """

    split = TARS_SPLIT
    folders = frame_shape = text_width = num_samples = visits_per_epoch = None  # unknown, or not of a stream

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
        # Now, so that a tar that is lost during a run does not keep it from saving its state.
        self.fingerprint = _fingerprint(self.tars)
        self.reader = StreamReader(
            self.tars, shape=shape, tokenize=tokenize, open_items=partial(items_in, cache=cache, cache_size=cache_size)
        )
        self.loader = Loader(self, self.reader, replace(loading, group=1))  # every clip has a file of its own

    @property
    def num_clips(self) -> int:
        """Number of clips that evaluations have shown so far."""
        return len(self.reader.shown)

    @property
    def variant_name(self) -> str:
        """Origin of the clips."""
        return f"a stream of {count_noun(len(self.tars), 'tar')}"

    def describe(self) -> str:
        """Return one line for the log: how the clips are read, and deviations from the settings so far."""
        return self.reader.describe()

    def require_different_texts(self) -> None:
        """Do nothing: the captions of a stream are not known before they are read."""

    def text(self, sample: int) -> str:
        """Return the caption of a clip that an evaluation has shown."""
        return self.reader.shown[sample].text

    def key(self, sample: int) -> str:
        """Return the sample of such a clip in its tar."""
        return self.reader.shown[sample].key

    def span_s(self, sample: int) -> tuple[float, float]:
        """Start and end of such a clip in its file, seconds."""
        clip = self.reader.shown[sample]
        return clip.begin_us / US_PER_S, float("inf") if clip.end_us is None else clip.end_us / US_PER_S

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Return nothing: a stream cannot go back."""
        return []


class StreamReader:
    """Reader of clips of tars from front to back (clipmill.train.data.loader.Reader), which numbers them as they come.

    Attributes:
        shown: The clips that evaluations have shown, without their files.
        num_shortened: Captions so far that extend beyond their file and are shown up to its end.
        num_without_video: Samples so far whose video could not be downloaded when the tar was made.
    """

    def __init__(
        self,
        tars: Sequence[str],
        *,
        shape: ClipShape,
        tokenize: Tokenize | None,
        open_items: Callable[[Sequence[str]], Iterator[_Item | WithoutVideo]],
    ) -> None:
        self._tars, self._shape, self._tokenize, self._open_items = tars, shape, tokenize, open_items
        self.shown: dict[int, StreamedClip] = {}
        self.num_shortened = self.num_without_video = 0
        self._first_unreadable: Unreadable | None = None

    def describe(self) -> str:
        """Return what `VideoStream.describe` does."""
        tars = f"{len(self._tars)} tars" if len(self._tars) > 1 else self._tars[0]
        parts = [f"{tars} from front to back, decoded through the container: a stream has no packet tables"]
        if self.num_shortened:
            parts.append(f"{count_noun(self.num_shortened, 'caption')} shortened to the borders of their chunks")
        if self.num_without_video:
            parts.append(f"{count_noun(self.num_without_video, 'sample')} left out: the video could not be downloaded")
        return "; ".join(parts)

    def collate(self, loading: LoaderSettings) -> Callable[[Sequence[Sample]], Batch]:
        """Return the function that makes batches of samples, for one iteration."""
        return BatchRing(loading.batch, pin=loading.pin, can_keep=loading.can_keep).collate

    def outcomes(self, blocks: Iterator[Block], loading: LoaderSettings) -> Iterator[Sample | FailedSample]:
        """Yield the samples or failures at ascending positions of some blocks; an evaluation ends with the tars.

        Raises:
            UserError: the tars hold no clips, or fewer than a batch in training.
        """
        loaded = in_order(
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
                    # Without the file: an evaluation shows only the caption of a clip.
                    self.shown[work.request.position] = replace(work.item, content=b"")
            if isinstance(outcome, Stuck):
                outcome = FailedSample(work.request.position, work.item.key, "stuck", str(outcome))
            yield outcome

    def _work(self, blocks: Iterator[Block], *, batch: int) -> Iterator[_Work]:
        """Yield the clips at the positions of some blocks."""
        requests = (
            SampleRequest(position, position, block.seed) for block in blocks for position in block.positions.tolist()
        )
        position, epoch, request = 0, 0, next(requests)
        while True:
            began, seed = position, request.seed
            for item in self._items(seed, epoch=epoch):
                if position == request.position:
                    yield _Work(request, item)
                    request = next(requests)
                position += 1
            num_items = position - began
            self._require(num_items, at_least=1 if seed is None else batch)
            if seed is None:
                return
            # All epochs have the same length: those before the next position are skipped unread.
            num_skipped = (request.position - position) // num_items
            epoch, position = epoch + 1 + num_skipped, position + num_skipped * num_items

    def _items(self, seed: int | None, *, epoch: int) -> Iterator[_Item]:
        """Return the clips of an epoch: shuffled in training, in the order of the tars in an evaluation."""
        if seed is None:
            return self._read_tars(self._tars)
        items = self._read_tars(tars_of_epoch(self._tars, seed=seed, epoch=epoch))
        return shuffle_items(items, size_of=_size_of, seed=seed, epoch=epoch)

    def _read_tars(self, tars: Sequence[str]) -> Iterator[_Item]:
        for item in self._open_items(tars):
            if isinstance(item, WithoutVideo):
                self.num_without_video += 1
                continue
            if isinstance(item, Unreadable):
                self._first_unreadable = self._first_unreadable or item
            yield item

    def _require(self, num_items: int, *, at_least: int) -> None:
        if num_items >= at_least:
            return
        tars = f"a stream of {count_noun(len(self._tars), 'tar')}"
        message = f"{tars} holds fewer clips than the {at_least} that are needed: {self.describe()}"
        if self._first_unreadable is not None:
            key, why = self._first_unreadable.key, self._first_unreadable.detail
            raise UserError(f"{message}; what cannot be read: {key}: {why}", hint="repair or leave out that tar")
        raise UserError(message, hint="name more tars, or use a smaller --batch")

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
            rng, num_views = request.generator("frames"), self._shape.views.num_clips
            frames = frames_on_screen(video, clip, self._shape.sampling, rng=rng, num_views=num_views)
            decoded = video.decode(frames)
            require_frames(set(frames) - decoded.keys(), key=clip.key)
            pictures, crop = [decoded[frame] for frame in frames], request.generator("crop")
            made = make_clip(pictures, self._shape, rng=crop, in_graph=False, key=clip.key)
            tokens = None if self._tokenize is None else self._tokenize(clip.text)
        except SampleFailed:
            raise
        except Exception as error:  # whatever a foreign file makes libav's bindings raise fails that sample alone
            raise SampleFailed(clip.key, reason="undecodable", detail=f"{type(error).__name__}: {error}") from error
        of_caption = Sample(caption=clip.text) if tokens is None else Sample(tokens=tokens)
        return Sample(
            position=request.position,
            key=clip.key,
            caption_id=clip.caption_id,
            video=made.video,
            colour=made.colour,
            **of_caption,
        )


def _fingerprint(tars: Sequence[str]) -> str:
    """Return the hash of the names and sizes of tars, wherever they are; of remote tars, only the names are known."""
    facts = [(tar.rpartition("/")[2], None if is_remote(tar) else Path(tar).stat().st_size) for tar in tars]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


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


MAX_TARS = 1_000_000
PATTERN_HINT = "patterns look like DIR/{000000..000099}.tar, with as many digits as the names have"

Item = StreamedClip | WithoutVideo | Unreadable

_FETCH_TIMEOUT_S = 3600.0
_WINDOW = 256
_WINDOW_BYTES = 1 << 30  # limits the window of long videos
_MAX_DEPTH = 10  # of nested braces
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d+)?")
_NUM_LETTERS = 52
_T = TypeVar("_T")


def expand(pattern: str) -> list[str]:
    """Return the tars that a pattern such as `DIR/{000000..000099}.tar` names, in order; `::` joins several patterns.

    Raises:
        UserError: it is not a pattern, it names too many tars, or a local one or the first remote one is missing.
    """
    if "pipe:" in pattern:
        raise UserError(f"{pattern} is a command, and none is run", hint="name tars: DIR/{000000..000099}.tar")
    tars = _names_of(pattern)
    missing = [tar for tar in tars if not is_remote(tar) and not Path(tar).is_file()]
    if missing:
        raise UserError(
            f"of {count_noun(len(tars), 'tar')}, {len(missing):,} cannot be found; the first: {missing[0]}",
            hint=PATTERN_HINT,
        )
    first = next((tar for tar in tars if is_remote(tar)), None)
    if first is not None:
        # The others are checked when their turn comes: a request for each would delay the run.
        folder, _, key = first.rpartition("/")
        try:
            open_objects(folder).info(key)
        except FileNotFoundError as error:
            raise UserError(f"there is no {first}", hint=PATTERN_HINT) from error
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"{first} cannot be read: {error}", hint="check the address") from error
    return tars


def _names_of(pattern: str) -> list[str]:
    """Return the names that a pattern stands for, counted before any of them is made."""
    from webdataset.shardlists import envsubst, expand_urls

    try:
        for _ in range(_MAX_DEPTH):  # webdataset replaces ${NAME} by the environment variable WDS_NAME
            before, pattern = pattern, envsubst(pattern)
            if pattern == before:
                break
        num_named = sum(_num_names(part) for part in pattern.split("::"))
        if num_named > MAX_TARS:
            named = f"{num_named:,}" if num_named < 10**15 else "very many"
            raise UserError(f"{_shorten(pattern)} names {named} tars, more than {MAX_TARS:,}", hint=PATTERN_HINT)
        return [str(name) for name in expand_urls(pattern)]
    except (ValueError, AssertionError) as error:  # the second for a ${NAME} that is not in the environment
        raise UserError(f"{_shorten(pattern)} is not a pattern: {error}", hint=PATTERN_HINT) from error


def _num_names(pattern: str, *, depth: int = 0) -> int:
    """Count the names that braces expand to, with letters counted as all letters, by the grammar of braceexpand."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"braces within braces, more than {_MAX_DEPTH} deep")
    num = 1
    for begin, end in _outermost_braces(pattern):
        inner = pattern[begin + 1 : end]
        if numbers := _RANGE.fullmatch(inner):
            first, last, step = (int(number or 1) for number in numbers.groups())
            num *= abs(last - first) // (step or 1) + 1
        elif _LETTERS.fullmatch(inner):
            num *= _NUM_LETTERS
        else:
            num *= sum(_num_names(part, depth=depth + 1) for part in _parts(inner))
    return num


def _outermost_braces(pattern: str) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each outermost pair of braces."""
    begin = depth = 0
    for at, sign in _signs(pattern):
        if sign == "{":
            begin = begin if depth else at
            depth += 1
        elif sign == "}":
            depth -= 1
            if depth < 0:
                break
            if not depth:
                yield begin, at
    if depth:
        raise ValueError("its braces are not balanced")


def _parts(inner: str) -> Iterator[str]:
    """Yield the parts between the commas of a pair of braces."""
    begin = depth = 0
    for at, sign in _signs(inner):
        depth += {"{": 1, "}": -1, ",": 0}[sign]
        if sign == "," and not depth:
            yield inner[begin:at]
            begin = at + 1
    yield inner[begin:]


def _signs(pattern: str) -> Iterator[tuple[int, str]]:
    """Yield braces and commas that are not escaped by a backslash, with their positions."""
    return ((found.start(), found[0]) for found in re.finditer(r"\\.|[{},]", pattern, re.DOTALL) if found[0] in "{},")


def _shorten(pattern: str) -> str:
    return pattern if len(pattern) <= 200 else f"{pattern[:200]}..."


def items_in(tars: Iterable[str], *, cache: Path | None, cache_size: str | None = None) -> Iterator[Item]:
    """Yield the clips in `tars` in order, and unreadable items. While a remote tar is read, the next ones are fetched.

    Raises:
        UserError: the cache cannot be written, or is too small for the tars that are read and fetched together.
    """

    def fetch(tar: str) -> Path | CachedFile | OSError:
        if not is_remote(tar):
            return Path(tar)
        try:
            return held_copy(tar, open_cache(cache, size=cache_size))
        except UserError:
            raise
        except OSError as error:
            return error

    fetched = in_order(fetch, tars, num_threads=1, num_ahead=2, stuck_after_s=_FETCH_TIMEOUT_S)
    for tar, found in fetched:
        if isinstance(found, Path):
            yield from _items_of(tar, found)
        elif isinstance(found, CachedFile):
            with found:
                yield from _items_of(tar, found.path)
        elif isinstance(found, Stuck):
            yield Unreadable(tar, str(found))
        else:
            yield Unreadable(tar, f"the tar cannot be read: {found}")


def _items_of(tar: str, path: Path) -> Iterator[Item]:
    try:
        for sample in samples_of(tar, path):
            if isinstance(sample, Unreadable):
                yield sample
                continue
            try:
                yield from clips_of(sample)
            except ValueError as error:
                yield Unreadable(sample.key, str(error))
    except OSError as error:
        yield Unreadable(tar, f"the tar cannot be read: {error}")


def tars_of_epoch(tars: Sequence[str], *, seed: int, epoch: int) -> list[str]:
    """Return all of `tars` in the order of an epoch."""
    return [tars[number] for number in permute(np.arange(len(tars)), len(tars), seed=seed, epoch=epoch).tolist()]


def shuffle_items(items: Iterable[_T], *, size_of: Callable[[_T], int], seed: int, epoch: int) -> Iterator[_T]:
    """Shuffle `items` within a window of `_WINDOW` items that hold at most `_WINDOW_BYTES`, by (seed, epoch).

    Args:
        size_of: size of an item in bytes.
    """
    rng = generator(epoch, seed=seed, purpose="window of a stream")
    window: list[_T] = []
    held_bytes = 0
    for item in items:
        window.append(item)
        held_bytes += size_of(item)
        while len(window) > _WINDOW or held_bytes > _WINDOW_BYTES:
            taken = _take(window, rng)
            held_bytes -= size_of(taken)
            yield taken
    while window:
        yield _take(window, rng)


def _take(window: list[_T], rng: np.random.Generator) -> _T:
    chosen = int(rng.integers(len(window)))
    window[chosen], window[-1] = window[-1], window[chosen]
    return window.pop()
