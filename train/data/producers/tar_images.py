"""Producer of images in tars, with a table, a reader, and a decoder for JPEG, PNG and WebP files.

Each tar is indexed once (clipmill.train.data.image_tars), and images are read in random order. Images are numbered in
the order of the tars and their members. Samples without the requested caption or class are omitted and counted.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.storage.mirrors import is_remote
from clipmill.shards.opening import Damaged
from clipmill.train.data.batch import Sample
from clipmill.train.data.captions import Annotations, Captions, RowCaptions
from clipmill.train.data.classes import ClassList, class_numbers_of
from clipmill.train.data.clip_frames import ClipBuilder, ClipShape, as_yuv420
from clipmill.train.data.decoders import MAX_PIXELS
from clipmill.train.data.image_tars import LABEL, ImageQuery, ImageTars, open_tars
from clipmill.train.data.loader import SampleRequest
from clipmill.train.data.outcomes import FailedSample, OmittedItems, SampleFailed
from clipmill.train.data.producers.chunk_clips import Labels
from clipmill.train.data.query import TARS_SPLIT, DataQuery
from clipmill.train.data.samples import Samples, SampleTable, Source, fingerprint_of
from clipmill.train.data.workers import ReadAhead, ThreadedReader
from clipmill.train.models.text import Tokenize

if TYPE_CHECKING:
    import av


_NUM_READERS = 32  # number of reading threads for remote tars; a request takes tens of milliseconds


class ImageReader(ThreadedReader):
    """Reader of the images in tars. Thread-safe.

    Sample i shows row i // repeats.

    Args:
        tars: Tars with the images.
        images: Index of the image that each row shows, int64 [N].
        shape: Rules for cropping and resizing images.
        annotations: Annotations that are added to samples, such as captions.
        repeats: Number of samples per image in an epoch. It must divide the loader's group size; an image is decoded
            once per group.
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
        """Return the file name of an image's tar, followed by the image's key in the tar."""
        return self._tars.key(self._image(sample))

    def content(self, sample: int) -> bytes:
        """Read the image file of a sample.

        Raises:
            SampleFailed: The file cannot be read.
        """
        image = self._image(sample)
        tar = self._tars.tar_of(image)
        try:
            size = int(self._tars.size[image])
            content = self._tars.read(tar, int(self._tars.offset[image]), size)
        except UserError:  # rejected credentials affect all tars
            raise
        except (OSError, Damaged) as error:
            detail = f"{self._tars.tars[tar]}: {error}"
            raise SampleFailed(self.key(sample), reason="shard_unreadable", detail=detail) from error
        if len(content) < size:
            detail = f"{self._tars.tars[tar]} has become shorter since it was indexed"
            raise SampleFailed(self.key(sample), reason="shard_unreadable", detail=detail)
        return content

    def shown_frames(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Return the image that a model sees in an evaluation, as one RGB frame; [] if the image cannot be read."""
        return super().shown_frames(sample, num_frames=1)

    def deviations(self) -> list[str]:
        """Return remarks on the number of samples per image, and the number of frames that show an image."""
        num_frames = self._shape.sampling.num_frames
        return [
            f"{self._repeats} samples of each image per epoch" if self._repeats > 1 else "",
            f"each image repeated in {num_frames} frames" if num_frames > 1 else "",
        ]

    @property
    def read_ahead(self) -> ReadAhead | None:
        """Functions that read and decode the images of remote tars in two steps; None for local tars."""
        return ReadAhead(self.read, self.load_read, _NUM_READERS) if any(map(is_remote, self._tars.tars)) else None

    def load(self, requests: Sequence[SampleRequest]) -> list[Sample | FailedSample]:
        """Read, decode and crop the images of a group of requests. A repeated image is decoded once."""
        return self.load_read(self.read(requests))

    def read(self, requests: Sequence[SampleRequest]) -> list[tuple[SampleRequest, bytes | SampleFailed]]:
        """Read the files for a group of requests, so that `load_read` can decode them."""
        contents: dict[int, bytes | SampleFailed] = {}
        for request in requests:
            row = request.sample // self._repeats
            if row not in contents:
                try:
                    contents[row] = self.content(request.sample)
                except SampleFailed as error:
                    contents[row] = error
        return [(request, contents[request.sample // self._repeats]) for request in requests]

    def load_read(self, files: Sequence[tuple[SampleRequest, bytes | SampleFailed]]) -> list[Sample | FailedSample]:
        """Decode and crop the images that `read` returned."""
        outcomes: list[Sample | FailedSample] = []
        last_image: dict[int, av.VideoFrame] = {}  # last decoded image, by its row
        for request, content in files:
            try:
                if isinstance(content, SampleFailed):
                    raise content
                row = request.sample // self._repeats
                if row not in last_image:
                    last_image = {row: self._decode(request.sample, content)}
                outcomes.append(self._sample(request, last_image[row]))
            except SampleFailed as error:
                outcomes.append(error.at(request.position))
        return outcomes

    def _decode(self, sample: int, content: bytes) -> "av.VideoFrame":
        try:
            return decode_image(content)
        except Exception as error:  # whatever error libav raises for a file, only this sample fails
            detail = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise SampleFailed(self.key(sample), reason="undecodable", detail=detail) from error

    def _sample(self, request: SampleRequest, frame: "av.VideoFrame") -> Sample:
        shape, key, row = self._shape, self.key(request.sample), request.sample // self._repeats
        num_frames = shape.sampling.num_frames * shape.views.num_clips
        builder = ClipBuilder(shape, num_frames=num_frames, rng=request.generator("crop"), key=key)
        builder.add(frame, range(num_frames))
        clip = builder.clip()
        sample = Sample(position=request.position, key=key, clip_id=row, video=clip.video, colour=clip.colour)
        sample["time_s"] = [math.nan] * num_frames
        for annotations in self._annotations:
            annotations.add(sample, replace(request, sample=row))
        return sample

    def _image(self, sample: int) -> int:
        return int(self._images[sample // self._repeats])


_HINT = "use tars with img2dataset's layout: jpg, png or webp, with captions in txt or json, and classes in cls or json"


def open_tar_images(
    query: ImageQuery,
    *,
    has_captions: bool = False,
    tokenize: Tokenize | None = None,
    classes: ClassList | None = None,
    repeats: int = 1,
) -> Samples[ImageReader]:
    """Open the images in tars. The row of an image in the table is both its `clip_id` and its `caption_id`.

    Args:
        has_captions: True to omit images without a caption. Batches then contain `tokens` or, without `tokenize`,
            `caption`.
        tokenize: Function that tokenizes captions; None to keep captions as text.
        classes: Classes of the label; images with other classes are omitted, and batches contain `label`. None for
            images without labels.
        repeats: Number of samples per image in an epoch. It must divide the loader's group size; an image is decoded
            once per group.

    Raises:
        UserError: The tars cannot be read, also contain videos, or contain no usable image.
    """
    label = LABEL if classes is None else classes.label
    tars = open_tars(query.pattern, cache=query.cache, cache_size=query.cache_size, label=label)
    for tar, index in zip(tars.tars, tars.indexes, strict=True):
        if index.first_video:
            raise UserError(
                f"{tar} contains a video, {index.first_video}, but the first sample of {tars.tars[0]} is an image",
                hint="keep images and videos in separate tars; to mix videos with images, pass a data folder that prep "
                "made and the image tars as two values of --shards",
            )
    texts = pa.chunked_array([index.captions for index in tars.indexes])
    table = _make_table(tars, texts if has_captions or tokenize else None, classes, needs_captions=has_captions)
    annotations: list[Annotations] = [] if classes is None else [Labels(table)]
    captions: Captions | None = None
    if table.captions is not None:
        captions = Captions(table.captions, texts, tokenize=tokenize)
        annotations.append(captions)
    names = None if classes is None else classes.as_json()
    order = [f"{tars.name(tar)} {index.order_sha256}" for tar, index in enumerate(tars.indexes)]
    facts = ("images", query.loading.group, repeats, has_captions, names, *order)
    source = Source(
        split=TARS_SPLIT,
        variant_name="",
        fingerprint=lambda: fingerprint_of(table, facts, [table.first_part]),
        empty_error=("no image is usable", _HINT),
    )
    reader = ImageReader(tars, table.first_part, query.shape, annotations=annotations, repeats=repeats)
    return Samples(table, reader, source, query.loading, captions=captions, repeats=repeats)


def open_images(query: DataQuery) -> Samples[ImageReader]:
    """Open the images that a task needs, with captions, with labels, or without either.

    Raises:
        UserError: See `open_tar_images`.
    """
    settings = query.settings
    return open_tar_images(
        ImageQuery(settings.folder, query.shape, query.loading, cache=settings.cache, cache_size=settings.cache_size),
        has_captions=query.content == "captions",
        tokenize=query.tokenize,
        classes=query.classes[0] if query.classes else None,
        repeats=query.repeats,
    )


def _make_table(
    tars: ImageTars, texts: pa.ChunkedArray | None, classes: ClassList | None, *, needs_captions: bool
) -> SampleTable:
    """Return the table of the images that have the requested captions or classes.

    Args:
        texts: Captions of all images; None for a table without captions.
        classes: Classes; images of other classes are omitted. None for a table without classes.
        needs_captions: True to omit images without a caption.
    """
    left_out, images = OmittedItems(), np.arange(tars.num_images)
    for tar, index in enumerate(tars.indexes):
        for reason, count, key in index.left_out:
            left_out.add(reason, f"{tars.name(tar)}/{key}", count=count)

    def keep(is_kept: pa.Array, reason: str) -> None:
        nonlocal images
        if len(omitted := images[~is_kept[images]]):
            left_out.add(reason, tars.key(int(omitted[0])), count=len(omitted))
        images = images[is_kept[images]]

    if texts is not None and needs_captions:
        keep(pc.binary_length(texts).to_numpy() > 0, "without caption")
    label, caption_id, rows = None, None, None
    if classes is not None:
        class_of_image = class_numbers_of(pa.chunked_array([index.classes for index in tars.indexes]), classes)
        keep(class_of_image >= 0, "with none of the classes")
        label, caption_id = class_of_image[images][:, None], np.arange(len(images))
    if texts is not None:
        sha256 = hashlib.sha256("".join(index.content_sha256 for index in tars.indexes).encode()).hexdigest()
        rows = RowCaptions.one_per_row(images.astype(np.int32), texts=texts, texts_sha256=sha256)
    tars_text = tars.tars[0] if len(tars.tars) == 1 else f"{len(tars.tars):,} tars"
    remarks = [f"{count_noun(len(images), 'image')} of {tars_text}"]
    if classes is not None and label is not None and len(images):
        remarks.append(classes.describe(label[:, 0]))
    remarks += left_out.describe()
    damages = [f"{name}: {index.damage}" for name, index in zip(tars.tars, tars.indexes, strict=True) if index.damage]
    if damages:
        remarks.append(f"{count_noun(len(damages), 'tar')} not read to the end; the first is {damages[0]}")
    return SampleTable(first_part=images, captions=rows, label=label, caption_id=caption_id, remarks=tuple(remarks))


_ORIENTATION_TAG = 0x0112
# libav filters that turn an image upright, by EXIF orientation. Orientation 1 is already upright.
_UPRIGHT: dict[int, tuple[tuple[str, str], ...]] = {
    2: (("hflip", ""),),
    3: (("hflip", ""), ("vflip", "")),
    4: (("vflip", ""),),
    5: (("transpose", "cclock_flip"),),
    6: (("transpose", "clock"),),
    7: (("transpose", "clock_flip"),),
    8: (("transpose", "cclock"),),
}
_EXIF_MARKS = {"mjpeg": b"Exif\0\0", "png": b"eXIf", "webp": b"EXIF"}
_EXIF_SIZE_BYTES = 4  # length of a WebP chunk's size field, between the chunk's name and its content
_JPEG_FRAMES = (b"\xc0", b"\xc1", b"\xc2")  # markers of frame headers: baseline, extended, progressive


def decode_image(content: bytes) -> "av.VideoFrame":
    """Decode a JPEG, PNG or WebP file, and return the upright image as 8-bit YUV 4:2:0.

    The YUV planes of a JPEG or lossy WebP file are used without a conversion to RGB and back; most of these files are
    already 4:2:0. The format is detected from the content. CMYK, grey, palettes and 16 bits per channel are converted.
    Transparency is dropped, as by Pillow's `convert("RGB")`.

    Raises:
        ValueError: The file has a different format, or is animated, too large, truncated or damaged.
    """
    import av

    codec = _codec_of(content)
    # Create a new decoder for each image, because libav's PNG decoder outputs noise for a second file. Creating a
    # decoder takes a tenth of the time of decoding a small JPEG.
    context = av.CodecContext.create(codec, "r")
    assert isinstance(context, av.VideoCodecContext)
    context.thread_count = 1  # the loader's threads already use all cores
    # Report errors instead of concealing them. Limit the number of pixels, because a small file can declare any size.
    context.options = {"err_detect": "explode", "max_pixels": str(MAX_PIXELS)}
    try:
        frames = context.decode(av.Packet(content))
    except av.FFmpegError as error:
        width, height = _declared_size(content, codec)
        if width * height > MAX_PIXELS:
            raise ValueError(f"an image of {width} x {height} is larger than {MAX_PIXELS:,} pixels") from error
        raise ValueError(f"the file is damaged or truncated ({codec}: {error.strerror})") from error
    if len(frames) != 1 or frames[0].is_corrupt:
        raise ValueError(f"the file is damaged or truncated ({codec}: no intact image)")
    return as_yuv420(_turn_upright(frames[0], _orientation_of(content, codec)))


def _codec_of(content: bytes) -> str:
    """Return the libav name of the codec; raise ValueError for other formats and for animations."""
    if content.startswith(b"\xff\xd8\xff"):
        return "mjpeg"
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        # Reject animations, because libav would decode only their first image.
        if b"acTL" in content[: max(content.find(b"IDAT"), 0)]:
            raise ValueError("the file is an animated PNG, not an image")
        return "png"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        if content[12:16] == b"VP8X" and content[20] & 2:
            raise ValueError("the file is an animated WebP, not an image")
        return "webp"
    raise ValueError(f"the file is neither JPEG, PNG nor WebP: it begins with {content[:12]!r}")


def _declared_size(content: bytes, codec: str) -> tuple[int, int]:
    """Return the width and height in the header of a file that the decoder rejected; (0, 0) if they are missing."""
    if codec == "png":
        return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    if codec == "webp":
        if content[12:16] == b"VP8X":
            return int.from_bytes(content[24:27], "little") + 1, int.from_bytes(content[27:30], "little") + 1
        if content[12:16] == b"VP8L":
            packed = int.from_bytes(content[21:25], "little")
            return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
        return int.from_bytes(content[26:28], "little") & 0x3FFF, int.from_bytes(content[28:30], "little") & 0x3FFF
    begin = 2
    while content[begin : begin + 1] == b"\xff":  # a segment consists of a marker, its length and its content
        if content[begin + 1 : begin + 2] in _JPEG_FRAMES:
            return int.from_bytes(content[begin + 7 : begin + 9]), int.from_bytes(content[begin + 5 : begin + 7])
        begin += 2 + int.from_bytes(content[begin + 2 : begin + 4])
    return 0, 0


def _orientation_of(content: bytes, codec: str) -> int:
    """Return the orientation in a file's EXIF data, 1 to 8; 1 without EXIF data."""
    mark = _EXIF_MARKS[codec]
    begin = content.find(mark)
    if begin < 0:
        return 1
    begin += len(mark) + (_EXIF_SIZE_BYTES if codec == "webp" else 0)
    begin += len(_EXIF_MARKS["mjpeg"]) if content.startswith(_EXIF_MARKS["mjpeg"], begin) else 0
    tiff = memoryview(content)[begin:]
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(bytes(tiff[:4]))
    if order is None:
        return 1

    def read_integer(begin: int, size: int) -> int:
        return int.from_bytes(tiff[begin : begin + size], "little" if order == "little" else "big")

    directory = read_integer(4, 4)
    for entry in range(directory + 2, directory + 2 + 12 * read_integer(directory, 2), 12):
        if read_integer(entry, 2) == _ORIENTATION_TAG:
            return read_integer(entry + 8, 2)
    return 1


def _turn_upright(frame: "av.VideoFrame", orientation: int) -> "av.VideoFrame":
    if orientation not in _UPRIGHT:
        return frame
    from av.filter import Graph

    graph = Graph()
    links = [graph.add_buffer(width=frame.width, height=frame.height, format=frame.format, time_base=Fraction(1))]
    links += [graph.add(name, arguments or None) for name, arguments in _UPRIGHT[orientation]]
    # Copy the frame in the graph, because vflip only gives the lines a negative stride.
    graph.link_nodes(*links, graph.add("copy"), graph.add("buffersink")).configure()
    graph.push(frame)
    upright_frame = graph.pull()
    assert isinstance(upright_frame, type(frame))
    return upright_frame
