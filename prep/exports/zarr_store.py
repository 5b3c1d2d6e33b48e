"""Export latents and text embeddings as a Zarr store of segments (section 2 of VideoDataLoader, see docs/seeds.md).

    base_frames [S, F, C, h, w]  float16, latents of S segments with F frames each
    clip_emb [V, D]              float16, one text embedding per video
    segment_to_video [S]         int64, row of each segment's video in clip_emb

Segments are ordered by video (as in the manifest) and time. The store uses Zarr format 2, which versions 2 and 3 of the
zarr library can read. Chunks are compressed by Blosc with Zstandard.
"""

import hashlib
from dataclasses import astuple, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.caption_spans import SplitVideos, open_stored_captions
from clipmill.manifests.divided_videos import read_divided_videos, split_mask, split_names
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import parse_length
from clipmill.manifests.store import read_videos
from clipmill.prep.core.column_arrays import ColumnArrays
from clipmill.prep.exports.kinds import ExportResult, Progress, ZarrFlags, replace_folder
from clipmill.shards.columns import LATENTS, TEXT, how_to_make

FRAMES, EMBEDDINGS, VIDEOS = "base_frames", "clip_emb", "segment_to_video"
_MARK = "clipmill"  # name of the store attribute with the inputs from which the store was written
_SCHEMA = 1
# Number of segments per write, rounded up to complete chunks. zarr compresses the chunks of a write in parallel.
_SEGMENTS_AT_ONCE = 64
_ROWS_AT_ONCE = 1 << 14  # maximum number of rows per Zarr chunk in the two small arrays
_ALL_CHUNKS: Any = {"write_empty_chunks": True}  # so that a missing file always indicates lost data


def write_zarr_store(data_dir: Path, destination: Path, flags: ZarrFlags, show: Progress) -> ExportResult:
    """Write the store, unless the store at `destination` is up to date and complete.

    Raises:
        UserError: zarr is not installed; a column is missing, damaged or unsuitable; no segment can be exported with
            these flags; or `destination` exists, but was not written by `prep export zarr`.
    """
    try:
        import zarr
    except ImportError:
        raise UserError("the package zarr is not installed", hint="pip install 'clipmill[zarr]'") from None
    latents, text = (ColumnArrays.open(data_dir, name) for name in (LATENTS, TEXT))
    if text.variant.recipe.get("max_tokens"):
        raise UserError(
            f"a Zarr store needs text embeddings, but {text.variant.directory} contains sequences",
            hint=f"run {how_to_make(TEXT, data_dir)}",
        )
    if latents.variant.recipe.get("latent_frames"):
        raise UserError(
            f"a Zarr store needs latents of frames, but {latents.variant.directory} contains segments from a video VAE",
            hint="make latents with an image VAE, or export the segments for a trainer (see `prep export --help`)",
        )
    variants = (latents.variant, text.variant)
    inputs = [f"{variant.directory.name} {variant.commits.digest.decode()}" for variant in variants]
    mark: dict[str, Any] = {
        "schema": _SCHEMA,
        LATENTS: latents.variant.directory.name,
        TEXT: text.variant.directory.name,
        "split": flags.split,
        "segment": flags.segment,
        "sha256": hashlib.sha256(f"{_SCHEMA} {inputs} {astuple(flags)}".encode()).hexdigest(),
    }
    segments = _find_segments(data_dir, latents, text, flags)
    num_segments = len(segments.video)
    if _read_mark(destination) == mark:
        return ExportResult("segment", num_segments, 0, segments.left_out)
    with replace_folder(destination) as folder:
        store = zarr.open_group(folder, mode="w", zarr_format=2, attributes={_MARK: mark})
        _write(store, segments, latents, flags, show)
    return ExportResult("segment", num_segments, num_segments, segments.left_out)


@dataclass(frozen=True)
class _Segments:
    """The segments of a store.

    Attributes:
        shape: Shape of a segment, (F, C, h, w).
        sample: Row of each segment's chunk in the table of latents, int64 [S].
        frame: First latent frame of each segment in its chunk, int64 [S].
        video: Row of each segment's video in `embeddings`, int64 [S].
        embeddings: Text embedding of each video, float16 [V, D].
        left_out: Reason -> number of segments, or of incomplete segments at the ends of chunks, that were omitted.
    """

    shape: tuple[int, ...]
    sample: NDArray[np.int64]
    frame: NDArray[np.int64]
    video: NDArray[np.int64]
    embeddings: NDArray[np.float16]
    left_out: dict[str, int]


def _find_segments(data_dir: Path, latents: ColumnArrays, text: ColumnArrays, flags: ZarrFlags) -> _Segments:
    videos, divided_videos = read_videos(data_dir), read_divided_videos(data_dir)
    video_ids, is_member = videos["video_id"].combine_chunks(), split_mask(flags.split, videos, divided_videos)
    video_row = latents.video_rows(video_ids)
    samples = np.flatnonzero((video_row >= 0) & is_member[video_row])
    if not len(samples):
        splits = ", ".join(sorted(split_names(videos, divided_videos)))
        raise UserError(f"no latents of split {flags.split!r}", hint=f"use one of the splits {splits}")
    samples = samples[np.lexsort((latents.field_values("start_ms")[samples], video_row[samples]))]
    num_frames, shape = _segment_shape(latents, samples, flags.segment)
    embeddings = _embeddings(data_dir, text, videos, split=flags.split)
    is_captioned = np.isin(video_row[samples], list(embeddings))
    num_per_chunk, remainder = np.divmod(latents.field_values("num_frames")[samples].astype(np.int64), num_frames)
    left_out = {
        "segments of videos without an embedded caption": int(num_per_chunk[~is_captioned].sum()),
        "ends of chunks that are shorter than a segment": int((remainder > 0).sum()),
    }
    samples, num_per_chunk = samples[is_captioned], num_per_chunk[is_captioned]
    sample = np.repeat(samples, num_per_chunk)
    # Index of each segment in its chunk, from which its first frame is computed.
    index = np.arange(len(sample)) - np.repeat(np.cumsum(num_per_chunk) - num_per_chunk, num_per_chunk)
    if divided_videos is not None:
        frame_s = latents.field_values("fps_den")[sample] / latents.field_values("fps_num")[sample]
        begin_us = latents.field_values("start_ms")[sample] * 1000 + np.rint(index * num_frames * frame_s * 1e6)
        times = {"begin_us": begin_us.astype(np.int64), "end_us": (begin_us + num_frames * frame_s * 1e6).astype(int)}
        is_kept = divided_videos.is_entirely_in(flags.split, video=video_row[sample], **times)
        left_out["segments with seconds of other splits"] = int((~is_kept).sum())
        sample, index = sample[is_kept], index[is_kept]
    if not len(sample):
        raise UserError(
            f"no {flags.segment} segment of split {flags.split!r} has a text embedding",
            hint=f"use a shorter --segment, or run {how_to_make(TEXT, data_dir)}",
        )
    exported_videos, video = np.unique(video_row[sample], return_inverse=True)
    rows = np.stack([embeddings[int(row)] for row in exported_videos])
    return _Segments((num_frames, *shape), sample, index * num_frames, video.astype(np.int64), rows, left_out)


def _segment_shape(latents: ColumnArrays, samples: NDArray[np.int64], segment: str) -> tuple[int, tuple[int, ...]]:
    """Return the number of latent frames in a segment, and the shape (C, h, w) of a latent frame.

    Raises:
        UserError: Latents are not float16 or differ in shape, the segment is not a whole number of frames, or the crop
            may change within a segment.
    """
    names = ["fps_num", "fps_den", "channels", "height", "width", "dtype"]
    layouts = latents.rows.table.take(pa.array(samples)).select(names).group_by(names).aggregate([]).to_pylist()
    first = layouts[0]
    if len(layouts) > 1 or first["dtype"] != "float16":
        shapes = " and ".join(
            f"{layout['dtype']} {layout['channels']}x{layout['height']}x{layout['width']} at "
            f"{layout['fps_num'] / layout['fps_den']:g} fps"
            for layout in layouts
        )
        raise UserError(
            f"a Zarr store needs float16 latents of one shape and frame rate, but {latents.variant.directory} contains "
            f"{shapes}",
            hint="make all latents with the same settings and --dtype float16",
        )
    seconds = parse_length(segment, flag="--segment")
    num_frames = seconds * Fraction(first["fps_num"], first["fps_den"])
    crop_period = latents.variant.recipe.get("segment")  # length after which the crop changes
    if num_frames.denominator != 1 or (
        crop_period and (parse_length(crop_period, flag="--segment") / seconds).denominator != 1
    ):
        raise UserError(
            f"--segment {segment} is {float(num_frames):g} latent frames"
            + (f", but the crop changes every {crop_period}" if crop_period else ", which is not a whole number"),
            hint=f"use {crop_period} divided by a whole number"
            if crop_period
            else "use a length with a whole number of frames",
        )
    return int(num_frames), tuple(first[name] for name in ("channels", "height", "width"))


def _embeddings(data_dir: Path, text: ColumnArrays, videos: pa.Table, *, split: str) -> dict[int, NDArray[np.float16]]:
    """Return the embedding of the first embedded caption of each video in a split, keyed by the row of the video.

    Captions are ordered by time, source and row.
    """
    lists = [text.rows.table[name].combine_chunks() for name in ("caption_id", "caption_row")]
    ids, rows = (pc.list_flatten(values).to_numpy() for values in lists)
    sample = np.repeat(np.arange(len(lists[0])), pc.list_value_length(lists[0]).to_numpy())
    id_order = np.argsort(ids, kind="stable")
    embeddings: dict[int, NDArray[np.float16]] = {}
    if not len(ids):
        return embeddings
    captions = open_stored_captions(data_dir)
    split_index = captions.splits.index(split) if split in captions.splits else -2
    is_of_split = pc.equal(videos["split"], split).to_numpy()
    for block in captions.blocks(SplitVideos(np.arange(len(videos), dtype=np.int32), is_of_split, split_index)):
        video = np.repeat(block.video, block.counts)
        entries = id_order[np.minimum(np.searchsorted(ids[id_order], block.caption_id), len(ids) - 1)]
        is_embedded = ids[entries] == block.caption_id
        captioned_videos, first = np.unique(video[is_embedded], return_index=True)
        for row, entry in zip(captioned_videos.tolist(), entries[is_embedded][first].tolist(), strict=True):
            embeddings[row] = text.array(int(sample[entry]))[rows[entry]]
    return embeddings


def _write(store: Any, segments: _Segments, latents: ColumnArrays, flags: ZarrFlags, show: Progress) -> None:
    from zarr.registry import get_numcodec

    num_segments = len(segments.video)
    codec: Any = {"id": "blosc", "cname": "zstd", "clevel": flags.level, "shuffle": 1}
    blosc = get_numcodec(codec)
    for name, values in ((EMBEDDINGS, segments.embeddings), (VIDEOS, segments.video)):
        chunks = (min(len(values), _ROWS_AT_ONCE), *values.shape[1:])
        store.create_array(name, data=values, chunks=chunks, compressors=blosc, config=_ALL_CHUNKS)
    frames = store.create_array(
        FRAMES,
        shape=(num_segments, *segments.shape),
        chunks=(flags.chunk, *segments.shape),
        dtype=np.float16,
        fill_value=np.nan,  # value of chunks whose files are lost, for example in an interrupted copy
        compressors=blosc,
        config=_ALL_CHUNKS,
    )
    num_at_once = -(-_SEGMENTS_AT_ONCE // flags.chunk) * flags.chunk
    array_sample, array = -1, np.empty(0, np.float16)  # sample whose latents are in memory
    for begin in range(0, num_segments, num_at_once):
        end = min(begin + num_at_once, num_segments)
        block = np.empty((end - begin, *segments.shape), np.float16)
        for row, (sample, frame) in enumerate(
            zip(segments.sample[begin:end].tolist(), segments.frame[begin:end].tolist(), strict=True)
        ):
            if sample != array_sample:
                array_sample, array = sample, latents.array(sample)
            block[row] = array[frame : frame + segments.shape[0]]
        frames[begin:end] = block
        show(end, num_segments)


def _read_mark(destination: Path) -> dict[str, Any] | None:
    """Return the inputs from which the store at `destination` was written; None if the store or a file is missing.

    Raises:
        UserError: `destination` exists, but was not written by `prep export zarr`.
    """
    import zarr

    if not destination.exists():
        return None
    try:
        store = zarr.open_group(destination, mode="r")
        mark = store.attrs.get(_MARK)
    except (OSError, ValueError, KeyError):
        mark = None
    if not isinstance(mark, dict):
        raise UserError(
            f"{destination} exists, but was not written by `prep export zarr`",
            hint="remove it, or use a different name",
        )
    arrays = (FRAMES, EMBEDDINGS, VIDEOS)
    for name in arrays:
        array: Any = store.get(name)
        if array is None:
            return None
        # The arrays are chunked only along the first dimension.
        suffix, files = ".0" * (array.ndim - 1), {path.name for path in (destination / name).iterdir()}
        if not files.issuperset(f"{index}{suffix}" for index in range(array.nchunks)):
            return None
    return mark
