"""Images of tars: they are indexed once (clipmill.train.data.images.index), and read in random order.

Images are numbered in the order of the tars and of their members. Samples without what is asked for are left out and
counted.
"""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.config.data import CaptionSettings
from clipmill.train.data.captions import Annotations, Captions
from clipmill.train.data.classes import ClassList, class_numbers_of
from clipmill.train.data.images.index import LABEL, ImageTars, LeftOut
from clipmill.train.data.images.query import ImageQuery, open_tars
from clipmill.train.data.images.reader import ImageReader
from clipmill.train.data.producers.labelled_clips import Labels
from clipmill.train.data.query import TARS_SPLIT, DataQuery, one_caption_each
from clipmill.train.data.samples import Samples, Source
from clipmill.train.data.table import RowCaptions, SampleTable, fingerprint_of
from clipmill.train.models.text import Tokenize

_HINT = "img2dataset writes such tars: jpg, png or webp, with txt or json; classes are in cls, or under a key of json"


def open_tar_images(
    query: ImageQuery,
    *,
    has_captions: bool = False,
    tokenize: Tokenize | None = None,
    classes: ClassList | None = None,
    repeats: int = 1,
) -> Samples[ImageReader]:
    """Open the images of tars; `clip_id` and `caption_id` are their numbers.

    Args:
        has_captions: Leave out images without caption; batches have `tokens` with `tokenize`, or else `caption`.
        classes: Leave out images of other classes; batches have `label`.
        repeats: Samples of an image in an epoch; divides the loader's group, in which it is decoded once.

    Raises:
        UserError: the tars cannot be read, hold videos too, or have no such images.
    """
    label = LABEL if classes is None else classes.label
    tars = open_tars(query.pattern, cache=query.cache, cache_size=query.cache_size, label=label)
    _require_images_only(tars)
    texts = pa.chunked_array([index.captions for index in tars.indexes])
    table = _make_table(tars, texts if has_captions or tokenize else None, classes, needs_captions=has_captions)
    annotations: list[Annotations] = [] if classes is None else [Labels(table)]
    captions: Captions | None = None
    if table.captions is not None:
        captions = Captions(table.captions, texts, tokenize=tokenize)
        annotations.append(captions)
    names = None if classes is None else classes.as_json()
    order = [f"{tars.name(number)} {index.order_sha256}" for number, index in enumerate(tars.indexes)]
    facts = ("images", query.loading.group, repeats, has_captions, names, *order)
    source = Source(
        split=TARS_SPLIT,
        variant_name=f"images of {count_noun(len(tars.tars), 'tar')}",
        fingerprint=lambda: fingerprint_of(table, facts, [table.first_part]),
        nothing=("no image can be shown", _HINT),
    )
    reader = ImageReader(tars, table.first_part, query.shape, annotations=annotations, repeats=repeats)
    return Samples(table, reader, source, query.loading, captions=captions, repeats=repeats)


def open_images(query: DataQuery) -> Samples[ImageReader]:
    """Open the images of the tars that a task asks for, with captions, labels or neither.

    Raises:
        UserError: the settings select samples by what tars do not have, or as of `open_tar_images`.
    """
    settings = query.settings
    if settings.selection is not None:
        raise UserError(
            f"{settings.folder} names tars, which have no manifest and no scores to select by",
            hint="leave out --where and --share, or name a data folder that prep made",
        )
    if query.has_stored_text or query.captions != CaptionSettings():
        raise one_caption_each(settings.folder)
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
    """The images that have what is asked for.

    Args:
        texts: Captions of all images; None for samples without.
        classes: Classes, of which samples have to have one; None for samples without.
        needs_captions: Leave out images without caption.
    """
    left_out, images = LeftOut(), np.arange(tars.num_images)
    for number, index in enumerate(tars.indexes):
        for reason, count, key in index.left_out:
            left_out.add(reason, f"{tars.name(number)}/{key}", count=count)

    def keep(is_kept: pa.Array, reason: str) -> None:
        nonlocal images
        if len(without := images[~is_kept[images]]):
            left_out.add(reason, tars.key(int(without[0])), count=len(without))
        images = images[is_kept[images]]

    if texts is not None and needs_captions:
        keep(pc.binary_length(texts).to_numpy() > 0, "without caption")
    label, caption_id, rows = None, None, None
    if classes is not None:
        of_image = class_numbers_of(pa.chunked_array([index.classes for index in tars.indexes]), classes)
        keep(of_image >= 0, "without one of the classes")
        label, caption_id = of_image[images][:, None], np.arange(len(images))
    if texts is not None:
        sha256 = hashlib.sha256("".join(index.content_sha256 for index in tars.indexes).encode()).hexdigest()
        rows = RowCaptions.of_one_each(images.astype(np.int32), texts=texts, texts_sha256=sha256)
    first = tars.tars[0] if len(tars.tars) == 1 else f"{len(tars.tars):,} tars"
    remarks = [f"{count_noun(len(images), 'image')} of {first}"]
    if classes is not None and label is not None and len(images):
        remarks.append(classes.describe(label[:, 0]))
    remarks += left_out.describe()
    damaged = [(tar, index.damage) for tar, index in zip(tars.tars, tars.indexes, strict=True) if index.damage]
    if damaged:
        remarks.append(f"{count_noun(len(damaged), 'tar')} not read to the end, the first: {': '.join(damaged[0])}")
    return SampleTable(first_part=images, captions=rows, label=label, caption_id=caption_id, remarks=tuple(remarks))


def _require_images_only(tars: ImageTars) -> None:
    for tar, index in zip(tars.tars, tars.indexes, strict=True):
        if index.first_video:
            raise UserError(
                f"{tar} has a video, {index.first_video}, and the first sample of {tars.tars[0]} is an image",
                hint="keep images and videos in tars of their own; a data folder that prep made can be mixed with "
                "images, each by a --shards of its own",
            )
