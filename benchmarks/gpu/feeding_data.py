"""Make data folders for the loader benchmarks, in which existing chunks are repeated many times with new keys.

Every copy has separate videos, captions, index and commit. The tar of a copy is a new file, not a link, so that the
loader reads as many pages as from a dataset of this size. All files have just been written and are in the page cache:
the benchmarks measure the path from the page cache to the model, not a disk.
"""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from benchmarks.gpu.measurements import Setup
from clipmill.manifests.schema import CAPTIONS
from clipmill.manifests.store import read_captions, read_videos
from clipmill.manifests.write import write_manifest
from clipmill.shards.commits import Commit, ShardFiles, write_commit
from clipmill.shards.dataset import set_current_variant, variant_dir
from clipmill.shards.format import RECIPE_FILE, ShardName
from clipmill.shards.index import index_bytes
from clipmill.shards.reader import CommittedShard, Variant

SPLIT = "train"
COLUMN = "video"
_FINGERPRINT = "0" * 64
_MAX_TAR_BYTES = 1 << 30
_NUM_CLIPS, _NUM_CLIPS_OF_DRY_RUN = 4000, 64


def repeated_folder(scratch: Path) -> Path:
    """Return the folder of the repeated chunks, which `require_repeated` creates."""
    return scratch / "repeated"


def require_repeated(setup: Setup) -> Path:
    """Repeat the chunks of the data folder to a few thousand clips."""
    folder = repeated_folder(setup.scratch)
    if not folder.exists():
        num_clips = _NUM_CLIPS_OF_DRY_RUN if setup.is_dry_run else _NUM_CLIPS
        unfinished = folder.with_name("repeated-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        repeat_chunks(setup.data, unfinished, num_copies=num_copies_for(setup.data, num_clips=num_clips))
        unfinished.rename(folder)
    return folder


def num_copies_for(data: Path, *, num_clips: int) -> int:
    """Return the number of copies of a data folder that gives `num_clips` captioned clips, within a gigabyte."""
    captions = read_captions(data)
    tars = sum(shard.tar_path.stat().st_size for shard in Variant.open(data).shards())
    wanted = -(-num_clips // max(captions.num_rows, 1))
    return max(1, min(wanted, _MAX_TAR_BYTES // max(tars, 1)))


def repeat_chunks(data: Path, target: Path, *, num_copies: int, variant: str | None = None) -> Path:
    """Write the `video` column of `data` to `target` `num_copies` times, as one split, and return `target`.

    Args:
        variant: Variant of the column. Default: the current variant.

    Raises:
        UserError: `data` has no chunks.
    """
    opened = Variant.open(data, variant=variant)
    name = opened.directory.name
    videos, captions = read_videos(data), read_captions(data)
    names = [[_rename(one, copy) for one in videos["video_id"].to_pylist()] for copy in range(num_copies)]
    every = pa.array([one for of_copy in names for one in of_copy])
    splits = pa.array([SPLIT] * len(every))
    video_table = pa.table({"video_id": every, "source_id": every, "path": every, "split": splits})
    fields = [field for field in CAPTIONS if field.name in captions.column_names and field.name != "caption_id"]
    parts = []
    for copy in range(num_copies):
        columns = {field.name: captions[field.name] for field in fields}
        renamed = [_rename(one, copy) for one in captions["video_id"].to_pylist()]
        columns["video_id"] = pa.chunked_array([pa.array(renamed)])
        parts.append(pa.table([columns[field.name].cast(field.type) for field in fields], schema=pa.schema(fields)))
    target.mkdir(parents=True, exist_ok=True)
    write_manifest(target, "repeated", video_table, pa.concat_tables(parts).combine_chunks())
    folder = variant_dir(target, COLUMN, name)
    folder.mkdir(parents=True)
    if (opened.directory / RECIPE_FILE).exists():
        shutil.copyfile(opened.directory / RECIPE_FILE, folder / RECIPE_FILE)
    shards = opened.shards()
    for copy in range(num_copies):
        for number, shard in enumerate(shards):
            shard_id = copy * len(shards) + number
            files = _copy_shard(folder, shard, shard_id=shard_id, copy=copy)
            commit_shard(folder, shard_id, files)
    set_current_variant(target, COLUMN, name)
    return target


def _rename(video_id: str, copy: int) -> str:
    return f"r{copy:04d}-{video_id}"


def _copy_shard(folder: Path, shard: CommittedShard, *, shard_id: int, copy: int) -> ShardFiles:
    assert shard.commit.files is not None
    name = ShardName(shard_id, _FINGERPRINT)
    shutil.copyfile(shard.tar_path, folder / name.tar)
    table = shard.index
    for column in ("key", "video_id"):
        place = table.schema.get_field_index(column)
        renamed = [_rename(value, copy) for value in table[column].to_pylist()]
        table = table.set_column(place, table.schema.field(place), pa.array(renamed))
    content = index_bytes(table.combine_chunks())
    (folder / name.index).write_bytes(content)
    return replace(
        shard.commit.files,
        tar=name.tar,
        index=name.index,
        index_bytes=len(content),
        index_sha256=hashlib.sha256(content).hexdigest(),
    )


def commit_shard(folder: Path, shard_id: int, files: ShardFiles) -> None:
    """Write the commit of a shard of `SPLIT`."""
    commit = Commit(
        column=COLUMN, shard_id=shard_id, split=SPLIT, plan_fingerprint=_FINGERPRINT, files=files, failures=()
    )
    write_commit(folder, commit)
