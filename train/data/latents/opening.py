"""The segments of latents that a task asks for."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from clipmill.manifests.errors import UserError
from clipmill.shards.columns import LATENTS
from clipmill.train.config.clips import LatentSettings
from clipmill.train.config.shards import names_tars
from clipmill.train.data.latents.loader import CaptionedLatents, LabelledLatents, LatentLoader
from clipmill.train.data.latents.segment_query import SegmentQuery
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.query import LATENT_PATCH, DataQuery

Latents = TypeVar("Latents", bound=LatentLoader)


def open_captions(query: DataQuery) -> CaptionedLatents:
    """Open segments with captions; raises UserError like `open_frames`, or if there are no captions."""

    def make(segments: SegmentQuery) -> CaptionedLatents:
        captions = replace(
            segments, captions="stored" if query.has_stored_text else "words", sources=query.captions.sources
        )
        return CaptionedLatents(captions, tokenize=query.tokenize)

    return _open(query, make)


def open_labels(query: DataQuery) -> LabelledLatents:
    """Open segments with labels; raises UserError like `open_frames`, or if there are no labels."""
    return _open(
        query, lambda segments: LabelledLatents(replace(segments, captions="none", classes=tuple(query.classes)))
    )


def open_frames(query: DataQuery) -> LatentLoader:
    """Open segments alone.

    Raises:
        UserError: there are none, they are not on this machine, or they do not fit the settings.
    """
    return _open(query, lambda segments: LatentLoader(replace(segments, captions="none")))


def _open(query: DataQuery, make: Callable[[SegmentQuery], Latents]) -> Latents:
    settings, loading, views = query.settings, query.loading, query.views
    assert isinstance(settings, LatentSettings)
    if len(views) > 1:
        raise UserError(
            f"{views.num_clips} clips x {views.num_crops} crops apply to frames in pixels, not to latents",
            hint="leave --clips and --crops out with --input latents",
        )
    if names_tars(settings.folder):
        raise UserError(
            f"--input latents cannot be read from {settings.folder}: latents need the index of their tars",
            hint="name the data folder that prep made",
        )
    folder = query.open_folder(column=LATENTS)
    latents = make(
        SegmentQuery(
            folder.path,
            split=query.split,
            segment=settings.segment,
            # Reading takes no decoding threads and no groups.
            loading=LoaderSettings(
                batch=loading.batch, seed=loading.seed, rank=loading.rank, num_ranks=loading.num_ranks
            ),
            max_segments=None if query.has_all_segments or query.split != settings.split else settings.max_segments,
            where=settings.selection,
            tars=folder.tars,
        )
    )
    latents.samples.require_embeddings()
    shape, length = latents.frame_shape, latents.samples.segments.num_frames
    if settings.num_frames > length:
        raise UserError(
            f"--num-frames {settings.num_frames}: a segment of {latents.segment_s:g}s has {length} frames",
            hint=f"use --num-frames {length} or fewer, or a longer --segment",
        )
    if shape.height != shape.width or shape.height % LATENT_PATCH:
        raise UserError(
            f"latents of {shape.height} x {shape.width} cannot be cut into squares of {LATENT_PATCH}",
            hint=f"make them with a --size that gives an even side: {latents.variant_name}",
        )
    return latents
