"""Collecting the inputs of a `video` plan, turning the plan into a job, and counting what the manifest requires.

`make_plan` reads the sources. `wanted_chunks` uses stored records only; it serves the commands that maintain a data
folder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manifests.errors import UserError
from manifests.store import MANIFEST_FILE, captions_path, manifest_dir, read_videos
from prep.core.column import VIDEO, Pending
from prep.core.layout import read_layout, stored_or_rebuilt_layout, write_layout
from prep.core.plan import NUM_CHECK_THREADS, ShardPlan, stored_shards
from prep.core.table_file import as_array
from prep.sources.table import probe_sources, read_probes
from prep.video.column import COLUMN
from prep.video.layout import layout_path, video_layout_of_commits, wanted_rows
from prep.video.plan import Plan
from prep.video.recipe import ResolvedRecipe, recipe_from_dict
from prep.video.settings import ChunkSettings
from prep.video.spans import num_chunks_of, num_output_frames
from shards.commits import Commit
from shards.dataset import variant_dir
from shards.reader import Variant

if TYPE_CHECKING:
    from prep.core.run import Job
    from prep.video.worker import ShardTask


@dataclass(frozen=True)
class Planned:
    """A plan and its inputs."""

    plan: Plan
    data_dir: Path
    variant_dir: Path
    commits: dict[int, Commit]

    @property
    def shards(self) -> list[ShardPlan]:
        return self.plan.shards

    @property
    def num_videos(self) -> int:
        return self.plan.num_videos


def make_plan(
    data_dir: Path,
    recipe: ResolvedRecipe,
    *,
    retry_codes: frozenset[str] = frozenset(),
    on_probe: Callable[[int, int], None] = lambda done, total: None,
) -> Planned:
    """Plan `recipe` for the manifest in `data_dir`.

    Args:
        retry_codes: failure codes to try again even if nothing changed; if there is any, failed sources are probed
            again.
        on_probe: called with (sources probed, sources to probe).
    """
    videos = read_videos(data_dir)
    probes = probe_sources(
        data_dir,
        videos["path"],
        num_workers=NUM_CHECK_THREADS,
        retry_failed=bool(retry_codes),
        on_progress=on_probe,
    )
    folder = variant_dir(data_dir, VIDEO, recipe.variant)
    stored = stored_shards(folder)
    plan = Plan(
        recipe=recipe,
        videos=videos,
        probes=probes,
        layout=stored_or_rebuilt_layout(
            layout_path(data_dir, recipe.settings),
            lambda: video_layout_of_commits(data_dir, recipe.settings, video_ids=as_array(videos["video_id"])),
        ),
        commits=stored.commits,
        problems=stored.problems,
        retry_codes=retry_codes,
    )
    return Planned(plan, data_dir, folder, stored.commits)


def chunk_job(planned: Planned) -> "Job[ShardTask]":
    """Write the layout of the plan and return the plan as a job for the driver."""
    from prep.core.run import Job
    from prep.video.worker import ShardTask, make_shard

    plan = planned.plan
    write_layout(layout_path(planned.data_dir, plan.recipe.settings), plan.layout)
    has_work = any(shard.has_work for shard in plan.shards)
    captions_file = captions_path(planned.data_dir) if plan.has_captions and has_work else None

    def task(shard: ShardPlan) -> "ShardTask":
        return ShardTask(
            variant_dir=planned.variant_dir,
            shard_id=shard.shard_id,
            split=shard.split,
            plan_fingerprint=shard.plan_fingerprint,
            recipe=plan.recipe,
            spans=tuple(plan.spans(shard.rows)),
            old_commit=planned.commits.get(shard.shard_id),
            captions_file=captions_file,
        )

    return Job(
        column=COLUMN,
        data_dir=planned.data_dir,
        variant_dir=planned.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=make_shard,
        task=task,
        video_ids=lambda shard: [span.video_id for span in plan.spans(shard.rows)],
        failed_before=list(plan.failed_sources()),
        chunk_s=float(plan.recipe.settings.len_s),
        needs=("prep.video.ffmpeg:version_mismatch", plan.recipe.ffmpeg),
    )


@dataclass(frozen=True)
class WantedChunks:
    """Chunks and shards that the manifest requires.

    Attributes:
        num_chunks: number of chunks of all videos with a known probe.
        shard_ids: shards of the layout with wanted content. A video that was not probed yet counts as having all its
            spans.
    """

    num_chunks: int
    shard_ids: frozenset[int]


def wanted_chunks(data_dir: Path, settings: ChunkSettings, *, videos: pa.Table, probes: pa.Table) -> WantedChunks:
    """Return what the manifest requires of `videos` (manifests.schema.VIDEOS), as far as their probes are known.

    Args:
        probes: the stored probes (prep.sources.table.PROBES).

    Raises:
        UserError: the layout is damaged.
    """
    rows = np.asarray(pc.fill_null(pc.index_in(videos["path"].combine_chunks(), value_set=probes["path"]), -1))
    is_known = rows >= 0
    ends_s = probes["end_s"].take(pa.array(rows[is_known])).combine_chunks()
    is_usable = np.asarray(pc.is_valid(probes["fingerprint"].take(pa.array(rows[is_known]))))
    frames = num_output_frames(np.asarray(pc.fill_null(ends_s, 0.0)), fps=settings.fps_exact)
    num_chunks = np.zeros(len(videos), np.int64)
    num_chunks[is_known] = num_chunks_of(
        np.where(is_usable, frames, 0), chunk_frames=settings.chunk_frames, tail=settings.tail
    )
    layout = read_layout(layout_path(data_dir, settings))
    ids, splits = videos["video_id"].combine_chunks(), videos["split"].combine_chunks()
    for_ever = np.where(is_known, num_chunks, np.iinfo(np.int64).max)
    layout_rows, _ = wanted_rows(layout, video_ids=ids, splits=splits, num_chunks=for_ever)
    return WantedChunks(
        num_chunks=int(num_chunks.sum()),
        shard_ids=frozenset(np.asarray(layout["shard_id"])[layout_rows].tolist()),
    )


def pending_chunks(data_dir: Path, variant: Variant) -> Pending:
    """Return what remains to be made of a variant, without checking whether its sources have changed.

    Raises:
        UserError: there is no manifest, the recipe is of another version, or the layout is damaged.
    """
    if not (manifest_dir(data_dir) / MANIFEST_FILE).exists():
        raise UserError(
            f"{data_dir} has no manifest, so the required chunks are unknown",
            hint="create it again with `prep manifest`",
        )
    settings = recipe_from_dict(variant.recipe).settings()
    chunks = wanted_chunks(data_dir, settings, videos=read_videos(data_dir), probes=read_probes(data_dir))
    missing = len(chunks.shard_ids - variant.commits.keys())
    return Pending(chunks.num_chunks, chunks.shard_ids, {"missing": missing} if missing else {})
