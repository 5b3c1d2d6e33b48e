"""Write the dataset as columns of clipmill, as `prep latents` and `prep text` do, but without encoding.

A chunk of 15 s has 60 frames, which are three segments; the last chunk of a video is shorter. Segments are not split:
50 segments of a video are 16 chunks of 60 frames and one chunk of 40 frames. Each video has one caption, which spans
the complete video.

A dataset that is several times as large repeats the latents. Each copy has separate videos, keys, indexes and commits,
but its tars are hard links to the tars of the first copy, so that a loader reads different files that take no
additional disk space.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.latent_peers.segment_set import SEGMENT_SHAPE, TEXT_WIDTH, SegmentSet
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.publish import publish_json
from clipmill.manifests.schema import CAPTIONS
from clipmill.manifests.store import read_captions
from clipmill.manifests.write import write_manifest
from clipmill.shards.commits import Commit, ShardFiles, write_commit
from clipmill.shards.dataset import set_current_variant, variant_dir
from clipmill.shards.format import LATENTS_FIELDS, RECIPE_FILE, TEXT_FIELDS, ShardName
from clipmill.shards.index import index_bytes, open_index
from clipmill.shards.npy import npy_bytes
from clipmill.shards.writer import Sample, ShardWriter

FPS = 4
SPLIT = "train"
_SEGMENTS_PER_CHUNK = 3
_CHUNKS_PER_SHARD = 128
_FINGERPRINT = "0" * 64
_LATENTS_VARIANT, _TEXT_VARIANT = "made-0a0a0a0a", "made-0b0b0b0b"


def write_columns(data: Path, segments: SegmentSet, *, num_copies: int = 1, is_video: bool = False) -> int:
    """Write the manifest, latents and text of the dataset `num_copies` times, and return the number of chunks.

    Args:
        is_video: Store segments in the layout of a video VAE, with the channels before the frames.
    """
    lengths = np.bincount(segments.video_of_segment)
    captions = _write_manifest(data, lengths=lengths, num_copies=num_copies)
    _write_text(data, segments, captions=captions, num_copies=num_copies)
    folder = variant_dir(data, "latents", _LATENTS_VARIANT)
    recipe = {
        "schema": 1,
        "column": "latents",
        "video": "made-0c0c0c0c",
        "vae": "none: made numbers",
        "vae_sha256": _FINGERPRINT,
        "scaling_factor": 1.0,
        "shift_factor": None,
        "fps": str(FPS),
        "size": 256,
        "crop": "centre",
        "segment": f"{SEGMENT_SHAPE[0] // FPS}s",
        "seed": 0,
        "posterior": "mean",
        "dtype": "float16",
    }
    if is_video:
        recipe["latent_frames"] = SEGMENT_SHAPE[0]
    _start_variant(data, "latents", _LATENTS_VARIANT, recipe)
    chunks = list(_chunks(segments, lengths))
    first_copy = []
    for shard_id, begin in enumerate(range(0, len(chunks), _CHUNKS_PER_SHARD)):
        with ShardWriter(folder, shard_id=shard_id, extensions=["latents.npy"], fields=LATENTS_FIELDS) as writer:
            for video, first, end in chunks[begin : begin + _CHUNKS_PER_SHARD]:
                writer.add(_latents_sample(segments, video, first, end, is_video=is_video))
            first_copy.append(writer.publish(_FINGERPRINT))
            _commit(folder, "latents", shard_id, first_copy[-1])
    for copy in range(1, num_copies):
        for number, files in enumerate(first_copy):
            shard_id = copy * len(first_copy) + number
            _commit(folder, "latents", shard_id, _link_shard(folder, files, shard_id=shard_id, copy=copy))
    return len(chunks) * num_copies


def _video_id(video: int, *, copy: int) -> str:
    return f"made-{copy:04d}-{video:06d}"


def _write_manifest(data: Path, *, lengths: np.ndarray, num_copies: int) -> pa.Table:
    """Write the manifest of the dataset, and return its captions, one per video, in the order of the videos."""
    names = pa.array([_video_id(video, copy=copy) for copy in range(num_copies) for video in range(len(lengths))])
    texts = pa.array([f"what video {number} shows" for number in range(len(names))])
    splits, sources = (pa.array([word] * len(names)) for word in (SPLIT, "made"))
    videos = pa.table({"video_id": names, "source_id": names, "path": names, "split": splits})
    ends = np.tile(lengths * SEGMENT_SHAPE[0] / FPS, num_copies)
    values = {"video_id": names, "begin_s": np.zeros(len(names)), "end_s": ends, "text": texts, "source": sources}
    fields = [field for field in CAPTIONS if field.name in values]
    captions = pa.table([pa.array(values[field.name]).cast(field.type) for field in fields], schema=pa.schema(fields))
    write_manifest(data, "made", videos, captions)
    return read_captions(data)


def _write_text(data: Path, segments: SegmentSet, *, captions: pa.Table, num_copies: int) -> None:
    folder = variant_dir(data, "text", _TEXT_VARIANT)
    recipe = {"schema": 1, "column": "text", "encoder": "none: made numbers", "encoder_sha256": _FINGERPRINT}
    _start_variant(data, "text", _TEXT_VARIANT, {**recipe, "width": TEXT_WIDTH, "dtype": "float16"})
    with ShardWriter(folder, shard_id=0, extensions=["text.npy", "json"], fields=TEXT_FIELDS) as writer:
        for number, caption in enumerate(captions.to_pylist()):
            text, caption_id = caption["text"], caption["caption_id"]
            record = {"video_id": caption["video_id"], "texts": [text], "captions": [[caption_id, 0]]}
            row = segments.text[number % len(segments.text)]
            fields = {
                "video_id": caption["video_id"],
                "num_rows": 1,
                "width": TEXT_WIDTH,
                "text_digest": [hashlib.blake2b(text.encode(), digest_size=16).digest()],
                "caption_id": [caption_id],
                "row_tokens": [],
                "caption_row": [0],
            }
            members = {"text.npy": npy_bytes(row[np.newaxis]), "json": json.dumps(record).encode()}
            writer.add(Sample(key=caption["video_id"], members=members, fields=fields))
        _commit(folder, "text", 0, writer.publish(_FINGERPRINT))


def _chunks(segments: SegmentSet, lengths: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (video, first segment, segment after the last) of every chunk."""
    begin = 0
    for video, length in enumerate(lengths.tolist()):
        for first in range(begin, begin + length, _SEGMENTS_PER_CHUNK):
            yield video, first, min(first + _SEGMENTS_PER_CHUNK, begin + length)
        begin += length


def _latents_sample(segments: SegmentSet, video: int, first: int, end: int, *, is_video: bool) -> Sample:
    stored = segments.latents[first:end]
    array = np.ascontiguousarray(stored.swapaxes(1, 2)) if is_video else stored.reshape(-1, *SEGMENT_SHAPE[1:])
    first_of_video = int(np.searchsorted(segments.video_of_segment, video))
    start_ms = (first - first_of_video) * SEGMENT_SHAPE[0] * 1000 // FPS
    fields = {
        "video_id": _video_id(video, copy=0),
        "start_ms": start_ms,
        "num_frames": len(stored) * SEGMENT_SHAPE[0],
        "fps_num": FPS,
        "fps_den": 1,
        "channels": SEGMENT_SHAPE[1],
        "height": SEGMENT_SHAPE[2],
        "width": SEGMENT_SHAPE[3],
        "dtype": "float16",
        "crops": [0, 0, 256, 256] * (end - first),
        "source_frames": [0] * len(stored) if is_video else [],
        "chunk_fingerprint": _FINGERPRINT,
    }
    key = chunk_key(_video_id(video, copy=0), start_ms)
    return Sample(key=key, members={"latents.npy": npy_bytes(array)}, fields=fields)


def _link_shard(folder: Path, files: ShardFiles, *, shard_id: int, copy: int) -> ShardFiles:
    """Link a shard again, with new keys for its samples."""
    name = ShardName(shard_id, _FINGERPRINT)
    os.link(folder / files.tar, folder / name.tar)
    os.link(folder / files.energon_index, folder / name.energon_index)
    table = open_index(folder / files.index)
    for column in ("key", "video_id"):
        place = table.schema.get_field_index(column)
        renamed = [f"made-{copy:04d}{value[len('made-0000') :]}" for value in table[column].to_pylist()]
        table = table.set_column(place, table.schema.field(place), pa.array(renamed))
    content = index_bytes(table.combine_chunks())
    (folder / name.index).write_bytes(content)
    return ShardFiles(
        tar=name.tar,
        tar_bytes=files.tar_bytes,
        tar_sha256=files.tar_sha256,
        index=name.index,
        index_bytes=len(content),
        index_sha256=hashlib.sha256(content).hexdigest(),
        num_samples=files.num_samples,
    )


def _start_variant(data: Path, column: str, variant: str, recipe: dict[str, Any]) -> None:
    folder = variant_dir(data, column, variant)
    folder.mkdir(parents=True)
    publish_json(folder / RECIPE_FILE, recipe)
    set_current_variant(data, column, variant)


def _commit(folder: Path, column: str, shard_id: int, files: ShardFiles) -> None:
    commit = Commit(
        column=column, shard_id=shard_id, split=SPLIT, plan_fingerprint=_FINGERPRINT, files=files, failures=()
    )
    write_commit(folder, commit)
