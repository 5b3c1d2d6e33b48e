"""The plan of the `latents` column: which shards have to be made and why, from the commits of `video` and its own.

Shard N of `latents` holds the chunks of shard N of `video`. The plan covers the shards of `video` committed so far,
even while `prep chunk` is running; a later plan covers the rest.
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from clipmill.manifests.errors import UserError
from clipmill.prep.core.chunk_columns import selected_rows
from clipmill.prep.core.chunk_shards import ChunkShard, read_chunk_shards
from clipmill.prep.core.column import Pending
from clipmill.prep.core.plan import ShardPlan, pending_of, plan_shards, stored_shards
from clipmill.prep.core.selection import stored_request
from clipmill.prep.latents.borders import Borders, with_borders
from clipmill.prep.latents.chunk_reader import ChunkReader
from clipmill.prep.latents.column import COLUMN
from clipmill.prep.latents.frames import frames_on_screen, video_segments
from clipmill.prep.latents.recipe import LATENTS, LatentsRecipe, latents_recipe_from_dict
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Commit, Failure, read_commits
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.reader import Variant
from clipmill.shards.where import parse_where

if TYPE_CHECKING:
    from clipmill.prep.core.run import Job
    from clipmill.prep.latents.vae import Device
    from clipmill.prep.latents.worker import LatentsTask


@dataclass(frozen=True)
class LatentsPlan:
    """A plan and its inputs.

    Attributes:
        shards: the shards, in order of their ids.
        chunk_shards: shards of `video` whose latents are wanted, by shard id.
        num_videos: number of videos with committed chunks.
        borders: of a VAE of videos, what follows the chunks of each shard.
        unreadable: shards of `video` that cannot be planned because their index is unreadable.
    """

    recipe: LatentsRecipe
    data_dir: Path
    variant_dir: Path
    video_dir: Path
    video_commits: dict[int, Commit]
    commits: dict[int, Commit]
    shards: list[ShardPlan]
    chunk_shards: dict[int, ChunkShard]
    num_videos: int
    borders: dict[int, Borders]
    unreadable: list[Failure]

    @property
    def num_chunks(self) -> int:
        """Number of chunks whose latents are wanted."""
        return sum(shard.num_chunks for shard in self.shards)

    def reader(self, shard_id: int) -> ChunkReader:
        """Return what reads the chunks of a shard."""
        following = self.borders[shard_id].following if self.borders else {}
        return ChunkReader(
            self.video_dir, shard_id, commits=self.video_commits, following=following, recipe=self.recipe
        )

    @property
    def num_frames(self) -> int:
        """Number of frames to encode at most; unchanged chunks of a changed shard are copied."""
        if self.recipe.latent_frames is not None:
            return self.num_segments * self.recipe.segment_frames
        fps = self.recipe.settings.fps_exact
        return sum(
            count * len(frames_on_screen(num_frames, chunk_fps=chunk_fps, fps=fps))
            for shard in self.shards
            if shard.has_work
            for (num_frames, chunk_fps), count in self.chunk_shards[shard.shard_id].lengths.items()
        )

    @property
    def num_segments(self) -> int:
        """Number of segments that a VAE of videos encodes at most."""
        return sum(self._segments_of(shard.shard_id)[0] for shard in self.shards if shard.has_work)

    @property
    def left_out_s(self) -> float:
        """Seconds of video at the ends of all chunks that are in no segment of a VAE of videos."""
        return sum(self._segments_of(shard.shard_id)[1] for shard in self.shards if shard.shard_id in self.borders)

    def _segments_of(self, shard_id: int) -> tuple[int, float]:
        recipe, num_segments, left_out_s = self.recipe, 0, Fraction(0)
        fps = recipe.settings.fps_exact
        for (num_frames, chunk_fps, has_next), count in self.borders[shard_id].lengths.items():
            lengths = video_segments(
                frames_on_screen(num_frames, chunk_fps=chunk_fps, fps=fps),
                segment_frames=recipe.segment_frames,
                has_next=has_next,
                tail=recipe.settings.tail,
            ).lengths
            num_segments += count * len(lengths)
            left_out_s += count * max(Fraction(0), num_frames / chunk_fps - len(lengths) * recipe.segment_step / fps)
        return num_segments, float(left_out_s)


def make_latents_plan(
    data_dir: Path, recipe: LatentsRecipe, *, retry_codes: frozenset[str] = frozenset()
) -> LatentsPlan:
    """Plan `recipe` for the committed shards of its `video` variant in `data_dir`.

    Raises:
        UserError: the recipe's `where` selects nothing, or uses scores that chunks lack.
    """
    video_dir = variant_dir(data_dir, VIDEO, recipe.video)
    folder = variant_dir(data_dir, LATENTS, recipe.variant)
    video, own = read_commits(video_dir), stored_shards(folder)
    where = recipe.settings.where
    chosen = (
        None
        if where is None
        else selected_rows(data_dir, video_dir, video.commits.values(), parse_where(where), column=LATENTS)
    )
    chunk_shards, unreadable = read_chunk_shards(video_dir, video.commits.values(), chosen=chosen)
    borders: dict[int, Borders] = {}
    if recipe.latent_frames is not None:
        chunk_shards, borders = with_borders(chunk_shards, video_dir, video.commits)
    unknown = {damaged.shard_id for damaged in video.damaged} | unreadable.keys()
    fingerprint = recipe.fingerprint
    shards = plan_shards(
        (shard.wanted(recipe_fingerprint=fingerprint) for shard in chunk_shards),
        own.without(unknown),
        what_changed="its chunks",
        orphaned_because="the chunks are no longer in the video column"
        if where is None
        else "none of its chunks is selected",
        retry_codes=retry_codes,
    )
    return LatentsPlan(
        recipe=recipe,
        data_dir=data_dir,
        variant_dir=folder,
        video_dir=video_dir,
        video_commits=video.commits,
        commits=own.commits,
        shards=list(shards),
        chunk_shards={shard.shard_id: shard for shard in chunk_shards},
        num_videos=len(pa.chunked_array([shard.video_ids for shard in chunk_shards], pa.string()).unique()),
        borders=borders,
        unreadable=list(unreadable.values()),
    )


def latents_job(plan: LatentsPlan, *, device: "Device", batch: int, num_threads: int | None) -> "Job[LatentsTask]":
    """Return the plan as a job for the driver; see `LatentsTask` for the arguments."""
    from clipmill.prep.core.run import Job
    from clipmill.prep.latents.worker import LatentsTask, make_latents

    def task(shard: ShardPlan) -> "LatentsTask":
        following = plan.borders[shard.shard_id].following if plan.borders else {}
        needed = {shard.shard_id, *(one for one, _ in following.values())}
        return LatentsTask(
            variant_dir=plan.variant_dir,
            shard_id=shard.shard_id,
            plan_fingerprint=shard.plan_fingerprint,
            recipe=plan.recipe,
            video_dir=plan.video_dir,
            video_commits={one: plan.video_commits[one] for one in needed},
            following=following,
            old_commit=plan.commits.get(shard.shard_id),
            device=device,
            batch=batch,
            num_threads=num_threads,
            rows=plan.chunk_shards[shard.shard_id].rows,
        )

    return Job(
        column=COLUMN,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=make_latents,
        task=task,
        video_ids=lambda shard: plan.chunk_shards[shard.shard_id].video_ids.to_pylist(),
        failed_before=plan.unreadable,
        chunk_s=None,
        where=plan.recipe.settings.where,
    )


def pending_latents(data_dir: Path, variant: Variant) -> Pending:
    """Return what remains to be made of a variant; nothing if the variant is not current."""
    if current_variant(data_dir, LATENTS) != variant.directory.name:
        return Pending()
    try:
        recipe = latents_recipe_from_dict(stored_request(variant))
    except UserError:
        return Pending()  # its recipe is missing or of another version
    if recipe.video != (video := current_variant(data_dir, VIDEO)):
        return Pending(stale_because=f"made from {recipe.video}; the current variant of video is {video}")
    try:
        return pending_of(make_latents_plan(data_dir, recipe).shards)
    except UserError as error:
        return Pending(stale_because=f"its --where cannot be evaluated: {error}")
