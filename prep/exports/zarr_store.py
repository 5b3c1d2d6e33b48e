"""Latents and text embeddings as a Zarr store of segments, the layout of the VideoDataLoader document (section 2).

    base_frames [S, F, C, h, w]  float16, the latents of S segments of F frames
    clip_emb [V, D]              float16, one text embedding per video
    segment_to_video [S]         int64, the row in clip_emb of each segment

Segments are ordered by video (as in the manifest) and time. The store has Zarr format 2, which versions 2 and 3 of the
zarr library read; chunks are compressed by Blosc with Zstandard.
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

from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import parse_length
from clipmill.manifests.store import read_videos
from clipmill.prep.core.column_arrays import ColumnArrays
from clipmill.prep.exports.kinds import Exported, Progress, ZarrFlags
from clipmill.prep.exports.replacing import replaced_folder
from clipmill.shards.columns import LATENTS, TEXT, how_to_make

FRAMES, EMBEDDINGS, VIDEOS = "base_frames", "clip_emb", "segment_to_video"
_MARK = "clipmill"  # attribute of a store that was written here: what it was made of
_SCHEMA = 1
_WRITTEN_AT_ONCE = 64  # segments, rounded to whole chunks; zarr compresses the chunks of one call in parallel
_ROWS_AT_ONCE = 1 << 14  # of a chunk of the small arrays
_ALL_CHUNKS: Any = {"write_empty_chunks": True}  # a missing file is a lost one, of segments of one video too


def write_zarr_store(data_dir: Path, destination: Path, flags: ZarrFlags, show: Progress) -> Exported:
    """Write the store, unless the one at `destination` is up to date and complete.

    Raises:
        UserError: zarr is not installed; columns are missing or damaged; latents are not float16 or differ in shape;
            something else is at `destination`.
    """
    try:
        import zarr
    except ImportError:
        raise UserError("the package zarr is not installed", hint="pip install 'clipmill[zarr]'") from None
    latents, text = (ColumnArrays.open(data_dir, name) for name in (LATENTS, TEXT))
    if text.variant.recipe.get("max_tokens"):
        raise UserError(
            f"{text.variant.directory} has sequences, not embeddings", hint=f"run {how_to_make(TEXT, data_dir)}"
        )
    if latents.variant.recipe.get("latent_frames"):
        raise UserError(
            f"a Zarr store has latents of frames, and {latents.variant.directory} has segments of a VAE of videos",
            hint="make latents with a VAE of images, or export them for a trainer: prep export --help",
        )
    made_of = [f"{one.variant.directory.name} {one.variant.commits.digest.decode()}" for one in (latents, text)]
    mark: dict[str, Any] = {
        "schema": _SCHEMA,
        LATENTS: latents.variant.directory.name,
        TEXT: text.variant.directory.name,
        "split": flags.split,
        "segment": flags.segment,
        "sha256": hashlib.sha256(f"{_SCHEMA} {made_of} {astuple(flags)}".encode()).hexdigest(),
    }
    segments = _find_segments(data_dir, latents, text, flags)
    num_segments = len(segments.video)
    old = _mark_at(destination)
    if old == mark:
        return Exported("segment", num_segments, 0, segments.left_out)
    with replaced_folder(destination) as folder:
        store = zarr.open_group(folder, mode="w", zarr_format=2, attributes={_MARK: mark})
        _write(store, segments, latents, flags, show)
    return Exported("segment", num_segments, num_segments, segments.left_out)


@dataclass(frozen=True)
class _Segments:
    """The segments of a store.

    Attributes:
        shape: F, C, h, w.
        sample: [S], the row of each segment's chunk in the table of latents.
        frame: [S], its first latent frame there.
        video: int64 [S], row in `embeddings`.
        embeddings: float16 [V, D].
    """

    shape: tuple[int, ...]
    sample: NDArray[np.int64]
    frame: NDArray[np.int64]
    video: NDArray[np.int64]
    embeddings: NDArray[np.float16]
    left_out: dict[str, int]


def _find_segments(data_dir: Path, latents: ColumnArrays, text: ColumnArrays, flags: ZarrFlags) -> _Segments:
    videos = read_videos(data_dir)
    video_ids, split = videos["video_id"].combine_chunks(), np.array(videos["split"].to_pylist())
    video_row = latents.video_rows(video_ids)
    own = np.flatnonzero((video_row >= 0) & (split[video_row] == flags.split))
    if not len(own):
        splits = ", ".join(sorted(set(split.tolist())))
        raise UserError(f"no latents of split {flags.split!r}", hint=f"splits of the manifest: {splits}")
    own = own[np.lexsort((latents.numbers("start_ms")[own], video_row[own]))]
    num_frames, shape = _segment_shape(latents, own, flags.segment)
    embeddings = _embeddings(data_dir, text, video_ids)
    is_described = np.isin(video_row[own], list(embeddings))
    per_chunk, rest = np.divmod(latents.numbers("num_frames")[own].astype(np.int64), num_frames)
    left_out = {
        "segments of videos without an embedded caption": int(per_chunk[~is_described].sum()),
        "ends of chunks that are shorter than a segment": int((rest > 0).sum()),
    }
    own, per_chunk = own[is_described], per_chunk[is_described]
    sample = np.repeat(own, per_chunk)
    if not len(sample):
        raise UserError(
            f"no segment of {flags.segment} of split {flags.split!r} has a text embedding",
            hint=f"give a shorter --segment, or run {how_to_make(TEXT, data_dir)}",
        )
    number = np.arange(len(sample)) - np.repeat(np.cumsum(per_chunk) - per_chunk, per_chunk)
    shown, video = np.unique(video_row[sample], return_inverse=True)
    rows = np.stack([embeddings[int(one)] for one in shown])
    return _Segments((num_frames, *shape), sample, number * num_frames, video.astype(np.int64), rows, left_out)


def _segment_shape(latents: ColumnArrays, own: NDArray[np.int64], segment: str) -> tuple[int, tuple[int, ...]]:
    """Number of frames of a segment, and the shape of the latents of a frame."""
    names = ["fps_num", "fps_den", "channels", "height", "width", "dtype"]
    kinds = latents.rows.table.take(pa.array(own)).select(names).group_by(names).aggregate([]).to_pylist()
    first = kinds[0]
    if len(kinds) > 1 or first["dtype"] != "float16":
        found = " and ".join(f"{kind['dtype']} {kind['channels']}x{kind['height']}x{kind['width']}" for kind in kinds)
        raise UserError(
            f"a Zarr store has float16 latents of one shape, and those of {latents.variant.directory} are {found}",
            hint="make latents with one setting and --dtype float16",
        )
    seconds = parse_length(segment, flag="--segment")
    num_frames = seconds * Fraction(first["fps_num"], first["fps_den"])
    made = latents.variant.recipe.get("segment")  # where the crop changes
    if num_frames.denominator != 1 or (made and (parse_length(made, flag="--segment") / seconds).denominator != 1):
        raise UserError(
            f"--segment {segment} is {float(num_frames):g} latent frames"
            + (f", and the crop changes every {made}" if made else ""),
            hint=f"give {made} or a whole part of it" if made else "give seconds that hold a whole number of frames",
        )
    return int(num_frames), tuple(first[name] for name in ("channels", "height", "width"))


def _embeddings(data_dir: Path, text: ColumnArrays, video_ids: pa.Array) -> dict[int, NDArray[np.float16]]:
    """The embedding of the first caption (by time, source and row) of each video, by row of the video."""
    lists = [text.rows.table[name].combine_chunks() for name in ("caption_id", "caption_row")]
    ids, rows = (pc.list_flatten(one).to_numpy() for one in lists)
    sample = np.repeat(np.arange(len(lists[0])), pc.list_value_length(lists[0]).to_numpy())
    by_id = np.argsort(ids, kind="stable")
    found: dict[int, NDArray[np.float16]] = {}
    if not len(ids):
        return found
    for block in open_stored_captions(data_dir).blocks():
        video = np.repeat(block.video, block.counts)
        at = by_id[np.minimum(np.searchsorted(ids[by_id], block.caption_id), len(ids) - 1)]
        is_embedded = ids[at] == block.caption_id
        shown, first = np.unique(video[is_embedded], return_index=True)
        for one, entry in zip(shown.tolist(), at[is_embedded][first].tolist(), strict=True):
            found[one] = text.array(int(sample[entry]))[rows[entry]]
    return found


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
        fill_value=np.nan,  # of a chunk whose file is lost, such as by a copy that was cut off
        compressors=blosc,
        config=_ALL_CHUNKS,
    )
    num_at_once = -(-_WRITTEN_AT_ONCE // flags.chunk) * flags.chunk
    opened, array = -1, np.empty(0, np.float16)
    for begin in range(0, num_segments, num_at_once):
        end = min(begin + num_at_once, num_segments)
        block = np.empty((end - begin, *segments.shape), np.float16)
        for row, (sample, frame) in enumerate(
            zip(segments.sample[begin:end].tolist(), segments.frame[begin:end].tolist(), strict=True)
        ):
            if sample != opened:
                opened, array = sample, latents.array(sample)
            block[row] = array[frame : frame + segments.shape[0]]
        frames[begin:end] = block
        show(end, num_segments)


def _mark_at(destination: Path) -> dict[str, Any] | None:
    """What the store at `destination` was made of; None if nothing is there, or files of its arrays are missing.

    Raises:
        UserError: something else is there.
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
            f"{destination} exists and was not written by prep export zarr", hint="remove it, or give another name"
        )
    arrays = (FRAMES, EMBEDDINGS, VIDEOS)
    return mark if all(_is_complete(destination / name, store.get(name)) for name in arrays) else None


def _is_complete(folder: Path, array: Any) -> bool:
    """Whether an array is there with a file for each of its chunks, which divide the first dimension alone."""
    if array is None:
        return False
    rest, there = ".0" * (array.ndim - 1), {path.name for path in folder.iterdir()}
    return there.issuperset(f"{number}{rest}" for number in range(array.nchunks))
