"""Generate data folders of any size without encoding. All files have the real format, and the videos are empty.

Everything that a plan reads is written as `prep` writes it: manifest, source files, probes, layout, commits and their
table. The shards are valid, with payloads of a few bytes. For millions of chunks, the tars have only the right length,
and the indexes are links to one valid index for each number of chunks. Nothing is flushed to disk.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.keys import chunk_key
from clipmill.manifests.publish import make_folder
from clipmill.manifests.schema import CAPTIONS
from clipmill.manifests.write import write_manifest
from clipmill.prep.core.tables import write_layout, write_table_file
from clipmill.prep.core.variants import make_variant
from clipmill.prep.sources.table import PROBES, PROBES_FILE
from clipmill.prep.video.plan import Plan, ShardPlan
from clipmill.prep.video.plan_inputs import make_plan
from clipmill.prep.video.settings import ResolvedRecipe
from clipmill.prep.video.spans import layout_path
from clipmill.shards.commits import Commit, ShardFiles, write_commit
from clipmill.shards.dataset import set_current_variant, variant_dir
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE, VIDEO_FIELDS, ShardName
from clipmill.shards.lists import finish_run
from clipmill.shards.writer import Sample, ShardWriter

COLUMN = "video"
_VIDEOS_PER_FOLDER = 1000
_CHUNK_BYTES = 1_800_000  # size of a typical chunk, for the files that have only the right length
_NO_SHA256 = "0" * 64


def make_videos(data: Path, *, num_videos: int, chunks_per_video: int, recipe: ResolvedRecipe) -> None:
    """Write the manifest, empty source files and links to them, and probes that describe non-empty videos."""
    numbers = np.arange(num_videos)
    names = pc.binary_join_element_wise("video", _digits(numbers, 7), "-")
    # All other folders are links to the first folder, because ten million files would need as many inodes.
    folders = pc.binary_join_element_wise(f"{data}/sources", _digits(numbers // _VIDEOS_PER_FOLDER, 4), "/")
    files = pc.binary_join_element_wise(_digits(numbers % _VIDEOS_PER_FOLDER, 3), "mp4", ".")
    paths = pc.binary_join_element_wise(folders, files, "/")
    first = data / "sources" / "0000"
    first.mkdir(parents=True)
    for name in files.slice(0, _VIDEOS_PER_FOLDER).to_pylist():
        (first / name).touch()
    for number in range(1, -(-num_videos // _VIDEOS_PER_FOLDER)):
        first.with_name(f"{number:04d}").symlink_to(first.name)
    of_folder = [(first / name).stat().st_mtime_ns for name in files.slice(0, _VIDEOS_PER_FOLDER).to_pylist()]
    mtimes_ns = np.array(of_folder, np.int64)[numbers % _VIDEOS_PER_FOLDER]
    videos = pa.table(
        {
            "video_id": names,
            "source_id": names,
            "path": paths,
            "split": pa.repeat("train", num_videos).cast(pa.string()),
        }
    )
    captions = CAPTIONS.empty_table().drop_columns("caption_id")
    write_manifest(data, "made", videos, captions)
    end_s = float(chunks_per_video * recipe.settings.len_s)
    values = {
        "path": paths,
        "size_bytes": np.zeros(num_videos, np.int64),
        "mtime_ns": mtimes_ns,
        "code": pa.nulls(num_videos),
        "message": pa.nulls(num_videos),
        "fingerprint": pa.chunked_array(
            [_digits(part, 64) for part in np.array_split(numbers, -(-num_videos // 10**6))]
        ),
        "end_s": np.full(num_videos, end_s),
        "fps": np.full(num_videos, 30.0),
        "key_gap_s": np.full(num_videos, 5.0),
        "num_audio": np.zeros(num_videos, np.int32),
        "timeline": pa.repeat("", num_videos),
        "notes": pa.repeat("", num_videos),
        "width": np.full(num_videos, 1280),
        "height": np.full(num_videos, 720),
        "codec": pa.repeat("h264", num_videos),
    }
    columns = [
        value.cast(field.type)
        if isinstance(value := values[field.name], pa.ChunkedArray)
        else pa.array(value, field.type)
        for field in PROBES
    ]
    write_table_file(data / PROBES_FILE, pa.table(columns, schema=PROBES))


def _digits(numbers: np.ndarray, width: int) -> pa.Array:
    return pc.utf8_lpad(pa.array(numbers).cast(pa.string()), width, "0")


def commit_everything(data: Path, *, recipe: ResolvedRecipe, num_real_shards: int | None = None) -> int:
    """Commit every shard of the plan, in the state that the plan requires, and return the number of shards.

    Args:
        num_real_shards: Number of shards with samples. The tars of other shards have only the right length. None if all
            shards have samples.
    """
    plan = make_plan(data, recipe).plan
    write_layout(layout_path(data, recipe.settings), plan.layout)
    folder = variant_dir(data, COLUMN, recipe.variant)
    indexes: dict[int, ShardFiles] = {}
    with _without_flushing():
        make_variant(folder, dict(recipe.values))
        for number, shard in enumerate(plan.shards):
            is_real = num_real_shards is None or number < num_real_shards or shard.num_chunks not in indexes
            files = _real_files(folder, plan, shard) if is_real else _linked_files(folder, shard, indexes)
            indexes.setdefault(shard.num_chunks, files)
            write_commit(
                folder,
                Commit(
                    column=COLUMN,
                    shard_id=shard.shard_id,
                    split=shard.split,
                    plan_fingerprint=shard.plan_fingerprint,
                    files=files,
                    failures=(),
                ),
            )
        finish_run(folder, dropped_ids=(), planned_ids=[shard.shard_id for shard in plan.shards])
    set_current_variant(data, COLUMN, recipe.variant)
    return len(plan.shards)


@contextmanager
def _without_flushing() -> Iterator[None]:
    """Disable fsync within the block, because it would take most of the time for thousands of small files."""
    with mock.patch("os.fsync", lambda descriptor: None):
        yield


def _real_files(folder: Path, plan: Plan, shard: ShardPlan) -> ShardFiles:
    writer = ShardWriter(folder, shard_id=shard.shard_id, extensions=["mp4", "json"], fields=VIDEO_FIELDS)
    with writer:
        for sample in _samples(plan, shard):
            writer.add(sample)
        return writer.publish(shard.plan_fingerprint)


def _samples(plan: Plan, shard: ShardPlan) -> Iterator[Sample]:
    fps = plan.recipe.settings.fps_exact
    for span_plan in plan.spans(shard.rows):
        starts = span_plan.span.chunk_starts()
        for first_frame, num_frames in zip(starts, span_plan.span.chunk_frames, strict=True):
            start_ms = round(first_frame / fps * 1000)
            key = chunk_key(span_plan.video_id, start_ms)
            fields = {
                "video_id": span_plan.video_id,
                "start_ms": start_ms,
                "num_frames": num_frames,
                "fps_num": fps.numerator,
                "fps_den": fps.denominator,
                "width": 512,
                "height": 288,
                "codec": "h264",
                "extradata": b"",
                "span_fingerprint": span_plan.fingerprint,
                "packet_offset": [48],
                "packet_size": [100],
                "packet_frame": [0],
                "packet_flags": [PACKET_KEY | PACKET_REFERENCE],
                "packet_crc32": [0],
            }
            yield Sample(key=key, members={"mp4": b"tiny", "json": b"{}"}, fields=fields)


def _linked_files(folder: Path, shard: ShardPlan, indexes: dict[int, ShardFiles]) -> ShardFiles:
    """Make a tar and Energon's index of the right length, and link the index of a shard with as many chunks to them."""
    name, linked = ShardName(shard.shard_id, shard.plan_fingerprint), indexes[shard.num_chunks]
    make_folder((folder / name.tar).parent)
    tar_bytes = shard.num_chunks * _CHUNK_BYTES
    for path, length in ((name.tar, tar_bytes), (name.energon_index, 8 * shard.num_chunks + 8)):
        with (folder / path).open("wb") as file:
            file.truncate(length)
    try:
        os.link(folder / linked.index, folder / name.index)
    except OSError as error:  # a file system limits the number of links to a file, for example to 65,000
        if error.errno != errno.EMLINK:
            raise
        shutil.copyfile(folder / linked.index, folder / name.index)
        indexes[shard.num_chunks] = replace(linked, index=name.index)
    return replace(linked, tar=name.tar, tar_bytes=tar_bytes, tar_sha256=_NO_SHA256, index=name.index)
