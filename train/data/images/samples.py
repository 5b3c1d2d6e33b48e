"""Sample set of images in tars: an image is a clip of one frame, which is repeated for towers of several frames.

Order, random crops, captions as tokens, failures, resumption and ids are those of clips of a data folder: the tars are
indexed (clipmill.train.data.images.index), and `Loader` reads them in random order.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted
from clipmill.shards.damage import Damaged
from clipmill.train.config.data import CaptionSettings
from clipmill.train.data.batch import Sample
from clipmill.train.data.caption_choice import all_the_same
from clipmill.train.data.classes import ClassList, class_numbers_of
from clipmill.train.data.decoding.clip import ClipBuilder
from clipmill.train.data.decoding.image_files import decode_image
from clipmill.train.data.decoding.pictures import rgb_pictures
from clipmill.train.data.images.index import LABEL, ImageTars, LeftOut
from clipmill.train.data.images.query import ImageQuery, open_tars
from clipmill.train.data.loader import Loader, ReadAhead, SampleRequest
from clipmill.train.data.order import set_fingerprint
from clipmill.train.data.outcomes import FailedSample, SampleFailed
from clipmill.train.data.query import TARS_SPLIT, DataQuery, one_caption_each
from clipmill.train.models.text import Tokenize

if TYPE_CHECKING:
    import av

_NUM_READERS = 32  # of remote tars; a request waits for tens of milliseconds
_HINT = "img2dataset writes such tars: jpg, png or webp, with txt or json; classes are in cls, or under a key of json"


class TarImages(Loader):
    """Images of tars, and the loader of their batches; sample i shows image i // repeats. Thread-safe.

    Images are numbered in the order of the tars and of their members; `clip_id` and `caption_id` are these numbers.
    Samples without what is asked for are left out and counted.

    Args:
        has_captions: leave out images without caption; batches have `tokens` with `tokenize`, or else `caption`.
        classes: leave out images of other classes; batches have `label`.
        repeats: samples of an image in an epoch; divides the loader's group, in which it is decoded once.

    Raises:
        UserError: the tars cannot be read, hold videos too, or have no such images.
    """

    split = TARS_SPLIT
    text_width = None

    def __init__(
        self,
        query: ImageQuery,
        *,
        has_captions: bool = False,
        tokenize: Tokenize | None = None,
        classes: ClassList | None = None,
        repeats: int = 1,
    ) -> None:
        label = LABEL if classes is None else classes.label
        self._tars = open_tars(query.pattern, cache=query.cache, cache_size=query.cache_size, label=label)
        self._shape = query.shape
        self._has_captions, self._tokenize, self._classes = has_captions, tokenize, classes
        self._group, self._repeats = query.loading.group, repeats
        indexes = self._tars.indexes
        _require_images_only(self._tars)
        self._first_row: NDArray[np.int64] = np.cumsum([0, *map(len, indexes)])  # of each tar, then their total
        self._offset = np.concatenate([one.offset for one in indexes])
        self._size = np.concatenate([one.size for one in indexes])
        self._captions = pa.chunked_array([one.captions for one in indexes])
        self._keys = pa.chunked_array([one.keys for one in indexes])
        rows = np.arange(self._first_row[-1])
        self._left_out = LeftOut()
        for tar, one in zip(self._tars.tars, indexes, strict=True):
            for reason, count, key in one.left_out:
                self._left_out.add(reason, f"{_name(tar)}/{key}", count=count)
        if has_captions:
            rows = self._kept(rows, pc.binary_length(self._captions).to_numpy() > 0, "without caption")
        self.labels: NDArray[np.int64] = np.empty(0, np.int64)
        if classes is not None:
            number = class_numbers_of(pa.chunked_array([one.classes for one in indexes]), classes)
            rows = self._kept(rows, number >= 0, "without one of the classes")
            self.labels = number[rows]
        self._rows = rows  # of each image that is used
        if not len(rows):
            raise UserError(f"no image can be shown: {self.describe()}", hint=_HINT)
        super().__init__(self, query.loading, ahead=self.ahead)

    def _kept(self, rows: NDArray[np.int64], is_kept: NDArray[np.bool_], reason: str) -> NDArray[np.int64]:
        without = rows[~is_kept[rows]]
        if len(without):
            self._left_out.add(reason, self._key(int(without[0])), count=len(without))
        return rows[is_kept[rows]]

    def __len__(self) -> int:
        return len(self._rows) * self._repeats

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
        return len(self)

    @property
    def num_clips(self) -> int:
        """Number of images; ids of clips are in [0, num_clips)."""
        return len(self._rows)

    @property
    def num_caption_ids(self) -> int:
        """Ids of captions are in [0, num_caption_ids)."""
        return len(self._rows)

    @property
    def mixing_facts(self) -> dict[str, str]:
        """What has to be the same in all sets of a mixture: nothing, see `ClipSamples`."""
        return {}

    @property
    def variant_name(self) -> str:
        """Where the images come from."""
        return f"images of {counted(len(self._tars.tars), 'tar')}"

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Hash of the samples and their order, wherever the tars are, and of captions and classes."""
        names = None if self._classes is None else self._classes.as_json()
        order = hashlib.sha256(f"images {self._group} {self._repeats} {self._has_captions} {names}".encode())
        content = hashlib.sha256()
        for tar, index in zip(self._tars.tars, self._tars.indexes, strict=True):
            order.update(f"{_name(tar)} {index.order_sha256}\n".encode())
            content.update(index.content_sha256.encode())
        order.update(self._rows.data)
        return set_fingerprint(order.hexdigest(), content.hexdigest())

    def describe(self) -> str:
        """One line for the log: images used and left out, by reason, and tars that end early."""
        tars = self._tars.tars
        parts = [f"{counted(len(self._rows), 'image')} of {tars[0] if len(tars) == 1 else f'{len(tars):,} tars'}"]
        if self._repeats > 1:
            parts.append(f"{self._repeats} samples of each in an epoch")
        if self._shape.sampling.num_frames > 1:
            parts.append(f"each repeated in {self._shape.sampling.num_frames} frames")
        if self._classes is not None and len(self._rows):
            parts.append(self._classes.describe(self.labels))
        parts += self._left_out.describe()
        damaged = [(tar, one.damage) for tar, one in zip(tars, self._tars.indexes, strict=True) if one.damage]
        if damaged:
            parts.append(f"{counted(len(damaged), 'tar')} not read to the end, the first: {': '.join(damaged[0])}")
        return "; ".join(parts)

    def require_different_texts(self) -> None:
        """Raise a UserError if all captions are the same text, so that there is nothing to tell apart."""
        first = self.text(0)
        if all(self.text(number * self._repeats) == first for number in range(1, self.num_clips)):
            raise all_the_same(first, self.num_clips, split=self.split)

    def text(self, sample: int) -> str:
        """The caption of an image."""
        return str(self._captions[self._row(sample)].as_py())

    def key(self, sample: int) -> str:
        """The tar of an image and its key there."""
        return self._key(self._row(sample))

    def content(self, sample: int) -> bytes:
        """The file of an image.

        Raises:
            SampleFailed: it cannot be read.
        """
        row = self._row(sample)
        tar = self._tar(row)
        try:
            size = int(self._size[row])
            content = self._tars.read(tar, int(self._offset[row]), size)
        except UserError:  # credentials that are refused, for this tar and for all others
            raise
        except (OSError, Damaged) as error:
            detail = f"{self._tars.tars[tar]}: {error}"
            raise SampleFailed(self.key(sample), reason="shard_unreadable", detail=detail) from error
        if len(content) < size:
            detail = f"{self._tars.tars[tar]} is shorter than when it was indexed"
            raise SampleFailed(self.key(sample), reason="shard_unreadable", detail=detail)
        return content

    def span_us(self, clips: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of clips, microseconds: an image has no duration."""
        return np.zeros_like(clips), np.zeros_like(clips)

    def shown_span_s(self, sample: int, *, num_frames: int) -> tuple[float, float]:
        """Always (0, 0): an image has no time."""
        return self.span_s(sample)

    def span_s(self, sample: int) -> tuple[float, float]:
        """Start and end of the clip, seconds."""
        return 0.0, 0.0

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """The image as a model sees it in an evaluation, RGB [H, W, 3], once; empty if it cannot be read or decoded."""
        [loaded] = self.load([SampleRequest(sample, sample, None)])
        if isinstance(loaded, FailedSample):
            return []
        video = loaded["video"][:1]
        return list(video if self._shape.rgb else rgb_pictures(video, loaded["colour"], size_px=self._shape.size_px))

    @property
    def ahead(self) -> ReadAhead | None:
        """How images of remote tars are read ahead of decoding; None for local ones."""
        return ReadAhead(self.read, self.load_read, _NUM_READERS) if self._tars.has_remote else None

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Read, decode and crop the images of a group of requests; one that occurs several times is decoded once."""
        return self.load_read(self.read(requests))

    def read(self, requests: Sequence[SampleRequest]) -> list[tuple[SampleRequest, bytes | SampleFailed]]:
        """Read the files of a group of requests, for `load_read`."""
        found: dict[int, bytes | SampleFailed] = {}
        for request in requests:
            image = request.sample // self._repeats
            if image not in found:
                try:
                    found[image] = self.content(request.sample)
                except SampleFailed as error:
                    found[image] = error
        return [(request, found[request.sample // self._repeats]) for request in requests]

    def load_read(self, read: Sequence[tuple[SampleRequest, bytes | SampleFailed]]) -> list[Sample | FailedSample]:
        """Decode and crop images that were read."""
        loaded: list[Sample | FailedSample] = []
        decoded: dict[int, av.VideoFrame] = {}
        for request, content in read:
            try:
                if isinstance(content, SampleFailed):
                    raise content
                image = request.sample // self._repeats
                if image not in decoded:
                    decoded = {image: self._decoded(request.sample, content)}
                loaded.append(self._sample(request, decoded[image]))
            except SampleFailed as error:
                loaded.append(error.at(request.position))
        return loaded

    def _decoded(self, sample: int, content: bytes) -> "av.VideoFrame":
        try:
            return decode_image(content)
        except Exception as error:  # whatever a foreign file makes libav's bindings raise fails that sample alone
            detail = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise SampleFailed(self.key(sample), reason="undecodable", detail=detail) from error

    def _sample(self, request: SampleRequest, frame: "av.VideoFrame") -> Sample:
        shape, key, image = self._shape, self.key(request.sample), request.sample // self._repeats
        num_frames = shape.sampling.num_frames * shape.views.num_clips
        building = ClipBuilder(shape, num_frames=num_frames, rng=request.generator("crop"), key=key)
        building.add(frame, range(num_frames))
        clip = building.clip()
        sample = Sample(position=request.position, key=key, clip_id=image, video=clip.video, colour=clip.colour)
        if self._has_captions or self._classes is not None:
            sample["caption_id"] = image
        if self._classes is not None:
            sample["label"] = int(self.labels[image])
        if self._tokenize is not None:
            sample["tokens"] = self._tokenize(self.text(request.sample))
        elif self._has_captions:
            sample["caption"] = self.text(request.sample)
        return sample

    def _row(self, sample: int) -> int:
        return int(self._rows[sample // self._repeats])

    def _key(self, row: int) -> str:
        return f"{_name(self._tars.tars[self._tar(row)])}/{self._keys[row].as_py()}"

    def _tar(self, row: int) -> int:
        return int(np.searchsorted(self._first_row, row, side="right")) - 1


def _require_images_only(tars: ImageTars) -> None:
    for tar, index in zip(tars.tars, tars.indexes, strict=True):
        if index.first_video:
            raise UserError(
                f"{tar} has a video, {index.first_video}, and the first sample of {tars.tars[0]} is an image",
                hint="keep images and videos in tars of their own; a data folder that prep made can be mixed with "
                "images, each by a --shards of its own",
            )


def _name(tar: str) -> str:
    return tar.rpartition("/")[2]


def open_images(query: DataQuery) -> TarImages:
    """Open the images of the tars that a task asks for, with captions, labels or neither.

    Raises:
        UserError: the settings select samples by what tars do not have, or as of `TarImages`.
    """
    settings = query.settings
    if settings.selection is not None:
        raise UserError(
            f"{settings.folder} names tars, which have no manifest and no scores to select by",
            hint="leave out --where and --share, or name a data folder that prep made",
        )
    if query.has_stored_text or query.captions != CaptionSettings():
        raise one_caption_each(settings.folder)
    return TarImages(
        ImageQuery(settings.folder, query.shape, query.loading, cache=settings.cache, cache_size=settings.cache_size),
        has_captions=query.content == "captions",
        tokenize=query.tokenize,
        classes=query.classes[0] if query.classes else None,
        repeats=query.repeats,
    )
