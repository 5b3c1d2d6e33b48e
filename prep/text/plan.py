"""Plan of the column `text`: the shards to make, with reasons, and the layout, which assigns videos to shards.

The plan is a function of the manifest's table of videos, the layout, the recipe and the commits. No captions are read,
because the row of a video contains the digest of its captions. The column `video` does not affect the plan.

The layout contains each video with captions. It is stored in `<data>/layout/text.parquet`, and all text encoders share
it. Existing assignments never change. The table has the same schema as the layout of `video`
(clipmill.prep.core.tables), but a video is not divided into spans: each video has a single row, with span index 0.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.store import has_manifest, read_videos
from clipmill.prep.core.column import PendingWork
from clipmill.prep.core.plan import ShardPlan, WantedShard, pending_of, plan_shards, stored_shards
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.tables import (
    LAYOUT,
    LAYOUT_FOLDER,
    as_array,
    layout_of_commits,
    stored_or_rebuilt_layout,
    variants_of,
    video_rows_of,
    wanted_spans,
)
from clipmill.prep.core.variants import stored_recipe
from clipmill.prep.text.column import COLUMN
from clipmill.prep.text.recipe import TEXT, TextSettings
from clipmill.shards.commits import Commit
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.reader import Variant
from clipmill.shards.selection import empty_selection_error
from clipmill.shards.where import Where, parse_where

LAYOUT_FILE = f"{TEXT}.parquet"

MAX_SHARD_VIDEOS = 4096
MAX_SHARD_CAPTIONS = 65_536  # about 100 MB of CLIP embeddings; a video with more captions gets its own shard


@dataclass(frozen=True)
class TextPlan:
    """Plan for making the column `text` from the manifest with a recipe.

    Attributes:
        layout: Layout that assigns videos to shards. It must be written before shards are made.
        video_ids: IDs of the planned videos. The `rows` of a shard are a range of indices into this array.
        num_captions: Total number of captions of the selected videos.
        num_left_out: Number of videos that get no sample, because they have no captions in the manifest.
        shards: Planned shards in the order of their IDs, followed by stored shards that are no longer planned.
        commits: Commits of the variant, keyed by shard ID.
        where: Conditions on captions; None for all captions.
    """

    recipe: Recipe[TextSettings]
    data_dir: Path
    variant_dir: Path
    layout: pa.Table
    video_ids: pa.Array
    num_captions: int
    num_left_out: int
    shards: list[ShardPlan]
    commits: dict[int, Commit]
    where: Where | None

    @property
    def num_videos(self) -> int:
        """Number of planned videos."""
        return len(self.video_ids)

    def ids_of(self, shard: ShardPlan) -> pa.Array:
        """Return the IDs of the videos in a shard."""
        return self.video_ids[shard.rows.start : shard.rows.stop]


def make_text_plan(
    data_dir: Path, recipe: Recipe[TextSettings], *, retry_codes: frozenset[str] = frozenset()
) -> TextPlan:
    """Plan the shards of a recipe for the manifest in `data_dir`.

    Args:
        retry_codes: Codes of failures to retry even if nothing has changed.

    Raises:
        UserError: The manifest is missing, the layout is damaged, `where` is invalid, or there is no caption to encode.
    """
    videos = read_videos(data_dir)
    video_conditions, caption_conditions = None, None
    if recipe.settings.where is not None:
        where = parse_where(recipe.settings.where)
        because = "prep text encodes captions, which belong to videos and not to chunks"
        where.require(("video", "caption", "label"), because=because)
        video_conditions, caption_conditions = where.split_by_level()
    folder = variant_dir(data_dir, TEXT, recipe.variant)
    stored = stored_shards(folder)
    num_captions = np.asarray(videos["num_captions"])
    num_left_out = int((num_captions == 0).sum())
    if video_conditions is not None:
        # Plan videos that are not selected like videos without captions.
        num_captions = np.where(video_conditions.mask(videos), num_captions, 0)
        if not num_captions.any():
            raise empty_selection_error(
                video_conditions, what=f"{count_noun(len(videos) - num_left_out, 'video')} with captions"
            )
    if not num_captions.any() and not stored.commits:
        raise UserError(
            f"the manifest in {data_dir} has no captions",
            hint="add captions with `prep manifest folder VIDEOS --captions TABLE`",
        )
    video_ids, splits = as_array(videos["video_id"]), as_array(videos["split"])
    stored_layout = stored_or_rebuilt_layout(
        text_layout_path(data_dir),
        lambda: layout_of_commits(
            list(variants_of(data_dir, TEXT)),
            video_ids,
            spans=lambda index: [(video_id, 0) for video_id in index["video_id"].to_pylist()],
            span_of_failure=lambda failure: (failure.video_id, 0),
        ),
        video_ids=video_ids,
        splits=splits,
    )
    layout = extend_text_layout(stored_layout, video_ids=video_ids, splits=splits, num_captions=num_captions)
    rows, video_rows = wanted_text_rows(layout, video_ids=video_ids, splits=splits, num_captions=num_captions)
    planned_videos = videos.take(pa.array(video_rows)) if len(video_rows) else videos.slice(0, 0)
    fingerprint = recipe.fingerprint + ("" if caption_conditions is None else f" where {caption_conditions.text}")
    shards = plan_shards(
        _wanted_shards(np.asarray(layout["shard_id"])[rows], planned_videos, fingerprint=fingerprint),
        stored,
        what_changed="its videos or their captions",
        orphaned_because="the videos are no longer in the manifest, or no longer selected",
        retry_codes=retry_codes,
    )
    return TextPlan(
        recipe=recipe,
        data_dir=data_dir,
        variant_dir=folder,
        layout=layout,
        video_ids=as_array(planned_videos["video_id"]),
        num_captions=int(num_captions.sum()),
        num_left_out=num_left_out,
        shards=list(shards),
        commits=stored.commits,
        where=caption_conditions,
    )


def pending_text(data_dir: Path, variant: Variant) -> PendingWork:
    """Return the remaining work of a variant, or no work if the variant is not current or cannot be planned."""
    is_manifest_written = has_manifest(data_dir)
    if not is_manifest_written or current_variant(data_dir, TEXT) != variant.directory.name:
        return PendingWork()
    try:
        plan = make_text_plan(data_dir, stored_recipe(COLUMN, variant))
    except UserError:
        return PendingWork()
    return replace(pending_of(plan.shards), left_out=tuple(left_out_lines(plan.num_left_out)))


def left_out_lines(num_videos: int) -> list[str]:
    """Return a line with the number of videos without a sample, or an empty list if every video has a sample."""
    return [f"{count_noun(num_videos, 'video')} without captions: nothing to encode"] if num_videos else []


def _wanted_shards(shard_ids: np.ndarray, videos: pa.Table, *, fingerprint: str) -> Iterator[WantedShard]:
    """Yield the shards of the planned videos.

    Args:
        shard_ids: Shard ID of each video, in ascending order.
        videos: Rows of the manifest, in the order of the plan.
        fingerprint: Fingerprint of the recipe and of the conditions on captions.
    """
    bounds = np.flatnonzero(np.diff(shard_ids, prepend=-1, append=-1)).tolist() if len(shard_ids) else [0]
    columns = ("video_id", "captions_sha256", "split")
    for start, end in pairwise(bounds):
        shard_videos = videos.slice(start, end - start)
        digest = hashlib.sha256(fingerprint.encode())
        for line in zip(*(shard_videos[name].to_pylist() for name in columns), strict=True):
            digest.update("\0".join(line).encode() + b"\n")
        split = shard_videos["split"][0].as_py()
        yield WantedShard(int(shard_ids[start]), split, digest.hexdigest(), end - start, range(start, end))


def text_layout_path(data_dir: Path) -> Path:
    """Return the path of the layout of `text`."""
    return data_dir / LAYOUT_FOLDER / LAYOUT_FILE


def extend_text_layout(
    layout: pa.Table, *, video_ids: pa.Array, splits: pa.Array, num_captions: np.ndarray
) -> pa.Table:
    """Assign each video with captions that is not in a shard yet to a new shard, split by split.

    Args:
        layout: Table with schema clipmill.prep.core.tables.LAYOUT.
        video_ids: IDs of the videos, in manifest order.
        splits: Splits of the videos, in the same order.
        num_captions: Number of captions of each video, int64 [videos].

    Returns:
        Layout with the new rows appended; `layout` itself if there are no new rows.
    """
    _, video_rows = wanted_text_rows(layout, video_ids=video_ids, splits=splits, num_captions=num_captions)
    is_new = num_captions > 0
    is_new[video_rows] = False
    next_shard = pc.max(layout["shard_id"]).as_py() + 1 if len(layout) else 0
    new_tables = []
    for split in sorted(pc.unique(splits.filter(pa.array(is_new))).to_pylist()):
        split_rows = np.flatnonzero(is_new & np.asarray(pc.equal(splits, split)))
        # Fill one shard after another.
        counts = num_captions[split_rows]
        relative_shards = np.empty(len(counts), np.int64)
        shard = num_videos = num_shard_captions = 0
        for row, captions in enumerate(counts.tolist()):
            if num_videos == MAX_SHARD_VIDEOS or (num_videos and num_shard_captions + captions > MAX_SHARD_CAPTIONS):
                shard, num_videos, num_shard_captions = shard + 1, 0, 0
            relative_shards[row] = shard
            num_videos, num_shard_captions = num_videos + 1, num_shard_captions + captions
        shard_ids = next_shard + relative_shards
        next_shard = int(shard_ids[-1]) + 1
        columns = [
            pa.array(shard_ids, pa.int32()),
            pa.repeat(split, len(split_rows)),
            video_ids.take(pa.array(split_rows)),
            pa.array(np.zeros(len(split_rows)), pa.int32()),
        ]
        new_tables.append(pa.table(columns, schema=LAYOUT))
    return pa.concat_tables([layout, *new_tables]).combine_chunks() if new_tables else layout


def wanted_text_rows(
    layout: pa.Table, *, video_ids: pa.Array, splits: pa.Array, num_captions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `layout` whose videos have captions in the manifest and are still in the split of the shard.

    Returns:
        Rows of the layout, and the corresponding rows of the videos in the manifest.
    """
    rows = video_rows_of(layout, video_ids)
    return wanted_spans(layout, video_rows=rows, splits=splits, num_spans=(num_captions > 0).astype(np.int64))
