"""Producer of the latent segments of a split: with captions, with labels, or without either."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.divided_videos import DividedVideos
from clipmill.manifests.errors import UserError
from clipmill.manifests.store import num_captions_of, resolve_folder
from clipmill.shards.columns import LATENTS, TEXT, VIDEO
from clipmill.shards.dataset import current_variant
from clipmill.shards.merged_table import variant_state
from clipmill.shards.reader import Variant
from clipmill.train.config.clips import LatentSettings
from clipmill.train.config.shards import data_folder_error, kind_of
from clipmill.train.data.captions import Captions
from clipmill.train.data.chunks import manifest_mark
from clipmill.train.data.data_folder import ChunkRows, Selection, selection_mark
from clipmill.train.data.latents.reader import LatentReader
from clipmill.train.data.latents.segment_table import make_segment_table, read_latents, read_text, require_uniform_crops
from clipmill.train.data.latents.segments import (
    FrameShape,
    LatentRecords,
    LatentSegments,
    SegmentQuery,
    ShownCaptions,
    StoredLatents,
    frames_of,
)
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.mapped_tars import open_maps
from clipmill.train.data.node_cache import open_shared
from clipmill.train.data.query import LATENT_PATCH, DataQuery
from clipmill.train.data.samples import Samples, Source, open_fingerprint, open_table
from clipmill.train.data.stored_text import encoder_of, require_embeddings

if TYPE_CHECKING:
    from clipmill.train.models.text import Tokenize


def open_latent_segments(
    query: SegmentQuery, *, tokenize: "Tokenize | None" = None, needs_embeddings: bool = False
) -> Samples[LatentReader]:
    """Open the latent segments of a split, for one rank.

    A sample is a segment of a chunk's latents, with one of the captions that overlap the segment. In training, the
    caption is drawn by a pure function of (seed, position); an evaluation uses the first caption of the first source.
    See clipmill.train.data.batch for the entries of batches.

    Every array is verified against its checksum when it is first needed, so only the first epoch takes longer. If an
    array does not match its checksum, the sample fails (clipmill.train.data.outcomes).

    The table takes up to 40 bytes of memory per chunk and 8 per segment. Captions take another 4 bytes per segment with
    captions, 8 to 24 per caption, and 4 per pair of a segment and a caption.

    Args:
        tokenize: Function that tokenizes captions in text form; None for batches that contain only caption IDs and text
            rows.
        needs_embeddings: True to reject texts that are stored as sequences of vectors.

    Raises:
        UserError: There are no samples, the columns belong to different datasets, or a tar is missing or truncated.
    """
    data_dir, tars, has_text = query.data_dir, query.tars, query.captions == "stored"
    if not resolve_folder(data_dir).is_dir():
        raise UserError(f"there is no data folder {data_dir}", hint="use a data folder that prep made")
    if tars is not None:
        for column in (LATENTS, TEXT) if has_text else (LATENTS,):
            tars.files.copy_column(column)
    latents = Variant.open(data_dir, column=LATENTS, tars=tars).require_complete()
    text = Variant.open(data_dir, column=TEXT, tars=tars).require_complete() if has_text else None
    if text is not None and needs_embeddings:
        require_embeddings(text, data_dir)
    variants = [latents] if text is None else [latents, text]
    maps = open_maps(variants, tars, cached_variant=text)
    marks = [variant_state(variant.directory, variant.commits) for variant in variants]
    split_mark = (query.split, *manifest_mark(data_dir))
    stored = open_shared(
        lambda: read_latents(latents, data_dir, split=query.split, maps=maps),
        depends_on=(LATENTS, *split_mark, marks[0]),
        num_rows=latents.num_samples,
        types=(StoredLatents, LatentRecords, FrameShape, DividedVideos),
        prefix=LATENTS,
    )
    members, text_rows = (
        (None, None)
        if text is None
        else read_text(text, stored, maps, data_dir=data_dir, split=query.split, depends_on=(*split_mark, *marks))
    )
    records = stored.records
    num_frames = frames_of(query.segment, records.shape)
    require_uniform_crops(latents, records.shape, segment=query.segment, num_frames=num_frames)
    selection = Selection(
        query.where,
        data_dir,
        split=query.split,
        chunks=ChunkRows(stored.video_ids, records.video_row, records.start_ms),
        has_captions=query.captions != "none" or bool(query.classes),
        depends_on=(*split_mark, marks[0]),
    )
    settings = (query.captions, query.tails, query.sources, [class_list.as_json() for class_list in query.classes])
    where = selection_mark(query.where, data_dir, tars=tars)
    stored_captions = None if query.captions == "none" else open_stored_captions(data_dir)
    captions_mark = () if stored_captions is None else stored_captions.mark
    depends_on = (*split_mark, *marks, num_frames, *settings, query.max_segments, *where, captions_mark)
    num_rows = latents.num_samples
    if query.captions != "none" or query.classes:
        num_rows += num_captions_of(data_dir)
    table = open_table(
        "segments",
        lambda: make_segment_table(
            query, stored, selection, stored_captions, text_rows, num_frames=num_frames, manifest=split_mark[1:]
        ),
        depends_on=depends_on,
        num_rows=num_rows,
    )
    is_first = np.diff(table.first_part, prepend=-1) > 0  # first segment of each chunk; rows are ordered by chunk
    maps.register_places(records.array_place[table.first_part[is_first]])
    captions: Captions | None = None
    if table.captions is not None and stored_captions is not None:
        captions = Captions(table.captions, stored_captions.texts, tokenize=tokenize)
    # Release the memory that was used for reading indexes and captions, because Arrow would keep it.
    pa.default_memory_pool().release_unused()
    names = [variant.directory.name for variant in variants]

    def identify_chunks() -> list[NDArray[Any]]:
        ids = np.frombuffer("\n".join(stored.video_ids.to_pylist()).encode(), np.uint8)
        return [ids, records.video_row[table.first_part], records.start_ms[table.first_part]]

    has_segments = bool((records.num_frames >= num_frames).any())
    source = Source(
        split=query.split,
        variant_name=" and ".join(names),
        fingerprint=partial(
            open_fingerprint,
            table,
            (*names, selection.text, num_frames, *settings),
            identify_chunks,
            depends_on=depends_on,
            num_rows=num_rows,
        ),
        empty_error=(
            f"no segment of split {query.split!r} is usable",
            "run prep manifest with annotations that contain labels"
            if query.classes and has_segments
            else "use a shorter segment" + (", or data with captions" if query.captions != "none" else ""),
        ),
        mixture_facts=_common_facts(latents, records.shape, text),
        frame_shape=records.shape,
        text_width=None if members is None else members.width,
    )
    video, current = latents.recipe.get(VIDEO), current_variant(data_dir, VIDEO)
    source_remark = ""
    if video is not None and current is not None and video != current:
        source_remark = f"made from the chunks of {video}, but {current} is the current variant"
    segments = LatentSegments(
        records=records,
        video_ids=stored.video_ids,
        maps=maps,
        text=members,
        num_frames=num_frames,
        has_tails=query.tails == "pad",
        source_remark=source_remark,
    )
    import torch

    loading = replace(query.loading, pin=not query.loading.can_keep and torch.cuda.is_available())
    return Samples(table, LatentReader(segments, table, captions), source, loading, captions=captions)


def open_captions(query: DataQuery) -> Samples[LatentReader]:
    """Open the segments with captions that a task needs.

    Raises:
        UserError: See `open_frames`; or there are no captions.
    """
    form: ShownCaptions = "stored" if query.has_stored_text else "words"
    segment_query = replace(_segment_query(query), captions=form, sources=query.captions.sources)
    samples = open_latent_segments(segment_query, tokenize=query.tokenize, needs_embeddings=True)
    return _require_compatible(query, samples)


def open_labels(query: DataQuery) -> Samples[LatentReader]:
    """Open the segments with labels that a task needs.

    Raises:
        UserError: See `open_frames`; or there are no labels.
    """
    segment_query = replace(_segment_query(query), captions="none", classes=tuple(query.classes))
    return _require_compatible(query, open_latent_segments(segment_query))


def open_frames(query: DataQuery) -> Samples[LatentReader]:
    """Open the segments that a task needs, without captions or labels.

    Raises:
        UserError: There are no segments, they cannot be read, or they contradict the settings.
    """
    return _require_compatible(query, open_latent_segments(replace(_segment_query(query), captions="none")))


def _segment_query(query: DataQuery) -> SegmentQuery:
    settings, loading, views = query.settings, query.loading, query.views
    assert isinstance(settings, LatentSettings)
    if len(views) > 1:
        raise UserError(
            f"{views.num_clips} clips x {views.num_crops} crops apply to frames in pixels, not to latents",
            hint="omit --clips and --crops with --input latents",
        )
    if not kind_of(settings.folder).has_manifest:
        raise data_folder_error(settings.folder, "but --input latents needs a data folder", flags=("--input",))
    folder = query.open_folder(column=LATENTS)
    return SegmentQuery(
        folder.path,
        split=query.split,
        segment=settings.segment,
        # The numbers of threads and the group size keep their defaults: latents are neither decoded nor read in groups.
        loading=LoaderSettings(batch=loading.batch, seed=loading.seed, rank=loading.rank, num_ranks=loading.num_ranks),
        max_segments=None if query.has_all_segments or query.split != settings.split else settings.max_segments,
        where=settings.selection,
        tars=folder.tars,
    )


def _require_compatible(query: DataQuery, samples: Samples[LatentReader]) -> Samples[LatentReader]:
    """Return the samples; raise a UserError if --num-frames or the patch size does not fit the samples."""
    settings, shape, reader = query.settings, samples.frame_shape, samples.reader
    if settings.num_frames > reader.num_frames:
        raise UserError(
            f"--num-frames is {settings.num_frames}, but a segment of {reader.segment_s:g}s has only "
            f"{reader.num_frames} frames",
            hint=f"use --num-frames {reader.num_frames} or fewer, or a longer --segment",
            flags=("--num-frames",),
        )
    if shape.height != shape.width or shape.height % LATENT_PATCH:
        raise UserError(
            f"latents of {shape.height} x {shape.width} cannot be cut into squares of {LATENT_PATCH}",
            hint=f"make {samples.variant_name} again with a --size that results in even sides",
        )
    return samples


def _common_facts(latents: Variant, shape: FrameShape, text: Variant | None) -> dict[str, str]:
    """Return the properties that must be the same in all folders of a mixture.

    These are the shape and the VAE of the latents, and the encoder of stored embeddings.
    """
    recipe = latents.recipe
    name, weights = recipe.get("vae"), str(recipe.get("vae_sha256"))[:8]
    scaling = f"(x - {recipe.get('shift_factor') or 0}) * {recipe.get('scaling_factor')}"
    facts = {"latents": str(shape), "VAE": f"{name} {weights}, scaled as {scaling}"}
    return facts if text is None else {**facts, "text embeddings": encoder_of(text)}
