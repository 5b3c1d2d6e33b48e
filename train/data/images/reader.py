"""`ImageReader`: images of tars; an image is a clip of one frame, which is repeated for towers of several frames."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.shards.opening import Damaged
from clipmill.train.data.batch import Sample
from clipmill.train.data.captions import Annotations
from clipmill.train.data.decoding.clip import ClipBuilder, ClipShape
from clipmill.train.data.decoding.image_files import decode_image
from clipmill.train.data.images.index import ImageTars
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.outcomes import FailedSample, SampleFailed
from clipmill.train.data.workers import ReadAhead, ThreadedReader

if TYPE_CHECKING:
    import av

_NUM_READERS = 32  # of remote tars; a request waits for tens of milliseconds


class ImageReader(ThreadedReader):
    """Reads the images of a table, whose parts are the images of all tars, in their order. Thread-safe.

    Sample i shows row i // repeats.

    Args:
        images: int64 [N], the image of each row.
        annotations: What samples get beside frames.
        repeats: Samples of an image in an epoch; divides the loader's group, in which it is decoded once.
    """

    def __init__(
        self,
        tars: ImageTars,
        images: NDArray[np.int64],
        shape: ClipShape,
        *,
        annotations: Sequence[Annotations] = (),
        repeats: int = 1,
    ) -> None:
        self._tars, self._images, self._shape = tars, images, shape
        self._annotations, self._repeats = annotations, repeats

    def key(self, sample: int) -> str:
        """The tar of an image and its key there."""
        return self._tars.key(self._image(sample))

    def content(self, sample: int) -> bytes:
        """The file of an image.

        Raises:
            SampleFailed: it cannot be read.
        """
        image = self._image(sample)
        tar = self._tars.tar_of(image)
        try:
            size = int(self._tars.size[image])
            content = self._tars.read(tar, int(self._tars.offset[image]), size)
        except UserError:  # credentials that are refused, for this tar and for all others
            raise
        except (OSError, Damaged) as error:
            detail = f"{self._tars.tars[tar]}: {error}"
            raise SampleFailed(self.key(sample), reason="shard_unreadable", detail=detail) from error
        if len(content) < size:
            detail = f"{self._tars.tars[tar]} is shorter than when it was indexed"
            raise SampleFailed(self.key(sample), reason="shard_unreadable", detail=detail)
        return content

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """The image as a model sees it in an evaluation, RGB [H, W, 3], once; empty if it cannot be read or decoded."""
        return super().pictures(sample, num_frames=1)

    def deviations(self) -> list[str]:
        """How often an image is shown."""
        num_frames = self._shape.sampling.num_frames
        return [
            f"{self._repeats} samples of each in an epoch" if self._repeats > 1 else "",
            f"each repeated in {num_frames} frames" if num_frames > 1 else "",
        ]

    @property
    def ahead(self) -> ReadAhead | None:
        """How images of remote tars are read ahead of decoding; None for local ones."""
        return ReadAhead(self.read, self.load_read, _NUM_READERS) if self._tars.has_remote else None

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Read, decode and crop the images of a group of requests; one that occurs several times is decoded once."""
        return self.load_read(self.read(requests))

    def read(self, requests: Sequence[SampleRequest]) -> list[tuple[SampleRequest, bytes | SampleFailed]]:
        """Read the files of a group of requests, for `load_read`."""
        contents: dict[int, bytes | SampleFailed] = {}
        for request in requests:
            row = request.sample // self._repeats
            if row not in contents:
                try:
                    contents[row] = self.content(request.sample)
                except SampleFailed as error:
                    contents[row] = error
        return [(request, contents[request.sample // self._repeats]) for request in requests]

    def load_read(self, read: Sequence[tuple[SampleRequest, bytes | SampleFailed]]) -> list[Sample | FailedSample]:
        """Decode and crop images that were read."""
        loaded: list[Sample | FailedSample] = []
        decoded: dict[int, av.VideoFrame] = {}
        for request, content in read:
            try:
                if isinstance(content, SampleFailed):
                    raise content
                row = request.sample // self._repeats
                if row not in decoded:
                    decoded = {row: self._decoded(request.sample, content)}
                loaded.append(self._sample(request, decoded[row]))
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
        shape, key, row = self._shape, self.key(request.sample), request.sample // self._repeats
        num_frames = shape.sampling.num_frames * shape.views.num_clips
        building = ClipBuilder(shape, num_frames=num_frames, rng=request.generator("crop"), key=key)
        building.add(frame, range(num_frames))
        clip = building.clip()
        sample = Sample(position=request.position, key=key, clip_id=row, video=clip.video, colour=clip.colour)
        for annotations in self._annotations:
            annotations.add(sample, replace(request, sample=row))
        return sample

    def _image(self, sample: int) -> int:
        return int(self._images[sample // self._repeats])
