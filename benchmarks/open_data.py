"""Generate data folders with millions of chunks for `benchmarks.open`, without videos: tables, commits and indexes.

The manifest, the merged tables, the table of commits and contents.json are as `prep` writes them. Commits exist only in
their table, as in a copy of a folder. Tars have the right length, but are sparse files. On request, indexes of `video`
are written, with two packets per chunk; a real chunk has 450.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.caption_spans import write_caption_spans
from clipmill.manifests.publish import publish_bytes, publish_checked_json, publish_json
from clipmill.manifests.schema import CAPTIONS, MANIFEST_FORMAT, VIDEOS
from clipmill.manifests.store import CAPTIONS_FILE, FINGERPRINT_KEY, MAPPED_FILES, VIDEOS_FILE, file_entry
from clipmill.shards.chunk_table import chunk_table_metadata
from clipmill.shards.commit_table import (
    SCHEMA,
    Contents,
    commit_folders,
    confirm_folders,
    file_sha256,
    open_table_commits,
    table_bytes,
    write_contents,
)
from clipmill.shards.dataset import set_current_variant, variant_dir
from clipmill.shards.format import COMMIT_TABLE_FILE, COMMITS_FOLDER, RECIPE_FILE, VIDEO_FIELDS, ShardName, folder_of
from clipmill.shards.index import index_bytes, index_schema
from clipmill.shards.merged_table import CHUNKS_FILE, write_merged_table

CHUNKS_PER_VIDEO, CHUNKS_PER_SHARD, CHUNK_MS, FPS = 10, 240, 15_000, 30
VARIANTS = {"video": "made-video-00000000", "latents": "made-latents-00000000"}
CHUNK_BYTES = {"video": 190_000, "latents": 512 + 60 * 128}  # latents: 60 frames of 4 x 4 x 4 float16
_MEMBERS = {"video": "mp4", "latents": "latents.npy"}
_FINGERPRINT = "0" * 64
_ROWS = 131_072
_WORDS = 9  # number of words in a narration, which has 45 bytes


def video_ids(first: int, count: int) -> pa.Array:
    """Return IDs of consecutive videos, as long as the IDs of Kinetics."""
    numbers = pc.utf8_lpad(pa.array(np.arange(first, first + count)).cast(pa.string()), 8, "0")
    return pc.binary_join_element_wise("video", numbers, "-")


def write_manifest_of(
    data: Path, *, num_chunks: int, num_captions: int, chunks_per_video: int = CHUNKS_PER_VIDEO
) -> None:
    """Write a manifest of videos with `chunks_per_video` chunks each, and of narrations and rewritten narrations."""
    folder = data / "manifest"
    folder.mkdir(parents=True)
    num_videos = -(-num_chunks // chunks_per_video)
    names, count = video_ids(0, num_videos), pa.array(np.zeros(num_videos, np.int32))
    text = pa.array(["made"] * num_videos)
    columns = [names, names, names, pa.array(["train"] * num_videos), text, count, text]
    metadata = {FINGERPRINT_KEY: _FINGERPRINT.encode()}
    pq.write_table(pa.table(columns, schema=VIDEOS.with_metadata(metadata)), folder / VIDEOS_FILE, compression="zstd")
    plain = {"video_id": pa.string(), "source": pa.string()}
    fields = [field.with_type(plain.get(field.name, field.type)) for field in CAPTIONS]
    schema = pa.schema([*fields, pa.field("label_class", pa.string())], metadata=metadata)
    with pq.ParquetWriter(
        folder / CAPTIONS_FILE, schema, compression="zstd", use_dictionary=["video_id", "source", "label_class"]
    ) as writer:
        for table in _captions(num_captions, num_videos, length_s=chunks_per_video * CHUNK_MS / 1000):
            writer.write_table(table.cast(schema), row_group_size=_ROWS)
    spans, texts = (folder / name for name in MAPPED_FILES)
    with pq.ParquetFile(folder / CAPTIONS_FILE, read_dictionary=["video_id", "source"]) as file:
        write_caption_spans(file, names, spans=spans, texts=texts, metadata=metadata, scratch_folder=folder)
    tables = {name: file_entry(folder / name) for name in (VIDEOS_FILE, CAPTIONS_FILE, *MAPPED_FILES)}
    entry = {"num_videos": num_videos, "num_captions": num_captions, "num_captions_lost": 0, "num_rejected": {}}
    content = {"format": MANIFEST_FORMAT, "fingerprint": _FINGERPRINT, "next_caption_id": num_captions}
    publish_checked_json(folder / "manifest.json", {**content, "datasets": {"made": entry}, "tables": tables})


def _captions(num_captions: int, num_videos: int, *, length_s: float) -> Iterator[pa.Table]:
    """Yield captions: first one seventh of narrations, by video and time, and then six rewritten texts of each."""
    num_narrations = max(-(-num_captions // 7), 1)
    for first in range(0, num_captions, _ROWS):
        ids = np.arange(first, min(first + _ROWS, num_captions))
        narration = ids % num_narrations
        video = narration * num_videos // num_narrations
        per_video = max(num_narrations / num_videos, 1)
        begin_s = np.round((narration % per_video) / per_video * (length_s - 2), 3)
        rng = np.random.default_rng(first)
        words = pa.array(rng.integers(0, 10_000, len(ids) * _WORDS).astype("U4"))
        text = pc.binary_join(
            pa.ListArray.from_arrays(np.arange(0, len(words) + 1, _WORDS, dtype=np.int32), words), " "
        )
        own = video - video[0]
        low = int(own.min())
        names = video_ids(int(video[0]) + low, int(own.max()) - low + 1)
        yield pa.table(
            {
                "caption_id": ids,
                "video_id": names.take(pa.array(own - low)),
                "begin_s": begin_s,
                "end_s": begin_s + 1.5,
                "text": text,
                "source": pa.array(np.where(ids < num_narrations, "narrator", "rewriter")),
                "label_class": pc.utf8_lpad(pa.array(video % 400).cast(pa.string()), 3, "0"),
            }
        )


def write_column(
    data: Path,
    column: str,
    *,
    num_chunks: int,
    has_indexes: bool = False,
    chunks_per_shard: int = CHUNKS_PER_SHARD,
    chunks_per_video: int = CHUNKS_PER_VIDEO,
) -> None:
    """Write a column: commits, sparse tars, the merged table and, if `has_indexes` is True, indexes."""
    folder = variant_dir(data, column, VARIANTS[column])
    (folder / COMMITS_FOLDER).mkdir(parents=True)
    num_shards = -(-num_chunks // chunks_per_shard)
    recipe = {"column": column, "vae": "made", "vae_sha256": _FINGERPRINT, "scaling_factor": 1.0}
    publish_json(folder / RECIPE_FILE, recipe)
    columns: dict[str, list[object]] = {"shard_id": list(range(num_shards))}
    columns |= {name: [] for name in ("tar", "tar_bytes", "index", "index_bytes", "index_sha256", "num_samples")}
    for shard_id in range(num_shards):
        name = ShardName(shard_id, "abcdef01")
        count = min(chunks_per_shard, num_chunks - shard_id * chunks_per_shard)
        tar = folder / name.tar
        for parent in (tar.parent, folder / COMMITS_FOLDER / folder_of(shard_id)):
            parent.mkdir(exist_ok=True)
        tar_bytes = count * _stride(column) + 1024
        with tar.open("wb") as file:
            file.truncate(tar_bytes)
        index_size, sha256 = 0, hashlib.sha256(name.tar.encode()).hexdigest()
        if has_indexes:
            content = index_bytes(_index(shard_id * chunks_per_shard, count, chunks_per_video))
            index_size, sha256 = len(content), hashlib.sha256(content).hexdigest()
            (folder / name.index).write_bytes(content)
        values = (name.tar, tar_bytes, name.index, index_size, sha256, count)
        for key, value in zip(list(columns)[1:], values, strict=True):
            columns[key].append(value)
    same: dict[str, object] = {"column": column, "split": "train", "plan_fingerprint": "1", "tar_sha256": _FINGERPRINT}
    columns |= {name: [value] * num_shards for name, value in same.items()}
    columns |= {"failures": [None] * num_shards, "seconds": [1.0] * num_shards}
    content = table_bytes(pa.table(columns, schema=SCHEMA))
    publish_bytes(folder / COMMIT_TABLE_FILE, content)
    sha256 = file_sha256(content)
    recipe_sha256 = hashlib.sha256((folder / RECIPE_FILE).read_bytes()).hexdigest()
    files = {RECIPE_FILE: recipe_sha256, COMMIT_TABLE_FILE: sha256}
    write_contents(folder, Contents(frozenset(range(num_shards)), files))
    confirm_folders(folder, sha256=sha256, folders=commit_folders(folder))
    set_current_variant(data, column, VARIANTS[column])
    commits = open_table_commits(folder)
    assert commits is not None, "the table of commits is not valid"
    for part, of_folder in commits.split_by_folder():
        first, last = min(of_folder), max(of_folder)
        number = np.arange(first * chunks_per_shard, min((last + 1) * chunks_per_shard, num_chunks))
        metadata = chunk_table_metadata(_MEMBERS[column], of_folder.index_checksums(), open_gops=())
        table = _part(column, number, chunks_per_shard, chunks_per_video)
        write_merged_table(folder / part / CHUNKS_FILE, table, commits=of_folder, metadata=metadata)


def _stride(column: str) -> int:
    return -(-(CHUNK_BYTES[column] + 128) // 512) * 512 + 512


def _part(column: str, number: np.ndarray, chunks_per_shard: int, chunks_per_video: int) -> pa.Table:
    """Return the rows of chunks in a merged table, given the numbers of the chunks."""
    row = (number % chunks_per_shard).astype(np.int32)
    video = number // chunks_per_video
    codes = pa.array((video - video[0]).astype(np.int32))
    is_video = column == "video"

    def filled(value: int) -> np.ndarray:
        return np.full(len(number), value, np.int32)

    columns: dict[str, object] = {
        "video_id": pa.DictionaryArray.from_arrays(codes, video_ids(int(video[0]), int(video[-1] - video[0]) + 1)),
        "start_ms": (number % chunks_per_video) * CHUNK_MS,
        "num_frames": filled(FPS * CHUNK_MS // 1000 if is_video else 60),
        "fps_num": filled(FPS if is_video else 4),
        "fps_den": filled(1),
        "width": filled(512 if is_video else 4),
        "height": filled(288 if is_video else 4),
        "offset": (row.astype(np.uint64) * np.uint64(_stride(column)) + np.uint64(512)),
        "size": np.full(len(number), CHUNK_BYTES[column], np.uint64),
        "crc32": (number % 1_000_003).astype(np.uint32),
        "shard": (number // chunks_per_shard).astype(np.int32),
        "row": row,
    }
    if not is_video:
        columns["channels"] = filled(4)
        columns["dtype"] = pa.DictionaryArray.from_arrays(pa.array(filled(0)), ["float16"])
    return pa.table(columns)


def _index(first: int, count: int, chunks_per_video: int) -> pa.Table:
    number = first + np.arange(count)
    video, start = number // chunks_per_video, number % chunks_per_video * CHUNK_MS
    names = video_ids(int(video[0]), int(video[-1] - video[0]) + 1).take(pa.array(video - video[0]))
    keys = pc.binary_join_element_wise(names, pc.utf8_lpad(pa.array(start).cast(pa.string()), 9, "0"), "_")
    packets = np.arange(0, 2 * count + 1, 2, dtype=np.int32)
    values: dict[str, object] = {
        "key": keys,
        "mp4_offset": np.arange(count) * _stride("video") + 512,
        "mp4_size": np.full(count, CHUNK_BYTES["video"]),
        "mp4_crc32": number % 1_000_003,
        "video_id": names,
        "start_ms": start,
        "num_frames": np.full(count, FPS * CHUNK_MS // 1000),
        "fps_num": np.full(count, FPS),
        "fps_den": np.ones(count),
        "width": np.full(count, 512),
        "height": np.full(count, 288),
        "codec": ["h264"] * count,
        "extradata": [b""] * count,
        "span_fingerprint": ["0" * 16] * count,
    }
    lists = {"packet_offset": [48, 500], "packet_size": [400, 50], "packet_frame": [0, 1]}
    lists |= {"packet_flags": [3, 2], "packet_crc32": [1, 2]}
    for name, pair in lists.items():
        values[name] = pa.ListArray.from_arrays(packets, pa.array(pair * count))
    schema = index_schema(["mp4"], fields=VIDEO_FIELDS)
    arrays = [pa.array(values[field.name]).cast(field.type) for field in schema]
    return pa.table(arrays, schema=schema)


def describe_sizes(data: Path) -> str:
    """Describe the sizes of the tables, for the notes."""
    sizes: Counter[str] = Counter()
    for path in data.rglob("*"):
        if path.name in (CHUNKS_FILE, CAPTIONS_FILE, VIDEOS_FILE):
            sizes["/".join(path.relative_to(data).parts[:2])] += path.stat().st_size >> 20
    return json.dumps(sizes)
