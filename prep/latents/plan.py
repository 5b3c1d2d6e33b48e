"""The plan of the `latents` column: which shards have to be made and why, from the commits of `video` and its own."""

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import count_noun
from clipmill.prep.core.chunk_columns import ChunksPlan, pending_chunks, plan_chunks
from clipmill.prep.core.chunk_shards import ChunkShard
from clipmill.prep.core.column import WEIGHTS, Pending
from clipmill.prep.core.plan import ShardPlan
from clipmill.prep.core.selection import stored_request
from clipmill.prep.latents.borders import Borders, with_borders
from clipmill.prep.latents.chunk_reader import ChunkReader
from clipmill.prep.latents.column import COLUMN
from clipmill.prep.latents.frames import frames_on_screen, video_segments
from clipmill.prep.latents.recipe import LATENTS, LatentsRecipe, latents_recipe_from_dict
from clipmill.shards.columns import VIDEO, command_for
from clipmill.shards.commits import Commit
from clipmill.shards.reader import Variant

if TYPE_CHECKING:
    from clipmill.prep.core.run import Job
    from clipmill.prep.latents.vae import Device
    from clipmill.prep.latents.worker import LatentsTask


@dataclass(frozen=True)
class LeftOut:
    """What is in no segment of a VAE of videos.

    Attributes:
        num_chunks: Number of chunks without a segment, which have no sample.
        seconds: Seconds of video at the ends of chunks, those of these chunks included.
    """

    num_chunks: int = 0
    seconds: Fraction = Fraction(0)

    def __add__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(self.num_chunks + other.num_chunks, self.seconds + other.seconds)


@dataclass(frozen=True)
class LatentsPlan(ChunksPlan[LatentsRecipe]):
    """A plan and its inputs.

    Attributes:
        borders: of a VAE of videos, what follows the chunks of each shard.
    """

    borders: dict[int, Borders]

    def reader(self, shard_id: int) -> ChunkReader:
        """Return what reads the chunks of a shard."""
        following = self.borders[shard_id].following if self.borders else {}
        return ChunkReader(
            self.video_dir, shard_id, commits=self.video_commits, following=following, recipe=self.recipe
        )

    def fingerprints(self, shard_id: int) -> list[str]:
        """See `ChunksPlan`; with a VAE of videos, they cover the next chunks too."""
        return self.reader(shard_id).fingerprints

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
        parts = (self.borders[shard.shard_id] for shard in self.shards if shard.has_work)
        return sum(_segments_in(self.recipe, borders)[0] for borders in parts)

    @property
    def left_out(self) -> "LeftOut":
        """What is in no segment of a VAE of videos, in all shards."""
        return sum((_segments_in(self.recipe, borders)[1] for borders in self.borders.values()), LeftOut())

    def require_segments(self) -> None:
        """Check that a VAE of videos finds a segment in a chunk.

        Raises:
            UserError: all chunks are shorter than a segment.
        """
        lengths = [(frames / fps, has_next) for part in self.borders.values() for frames, fps, has_next in part.lengths]
        if not lengths or any(_segments_in(self.recipe, part)[0] for part in self.borders.values()):
            return
        recipe, settings = self.recipe, self.recipe.settings
        (longest_s, has_next), fps, step = max(lengths), settings.fps_exact, recipe.vae.frames_step
        # Without a next chunk, there is no frame at the end of the last segment.
        most = (int(longest_s * fps) - (not has_next)) // step * step + 1
        longer = f"make longer chunks: prep {command_for(VIDEO)} --len"
        raise UserError(
            f"--segment {settings.segment} at {settings.fps} fps has {count_noun(recipe.segment_frames, 'frame')} in"
            f" {float(recipe.segment_step / fps):g} s and the frame after it, and the longest chunk has"
            f" {float(longest_s):g} s{'' if has_next else ', at the end of its video'}: no chunk holds a segment",
            hint=f"use --segment {most}f or less, or {longer}" if most > step else f"use a higher --fps, or {longer}",
        )


def _segments_in(recipe: LatentsRecipe, borders: Borders) -> tuple[int, LeftOut]:
    """Return the number of segments in the chunks of a shard, and what is in none of them."""
    num_segments, left_out, fps = 0, LeftOut(), recipe.settings.fps_exact
    for (num_frames, chunk_fps, has_next), count in borders.lengths.items():
        lengths = video_segments(
            frames_on_screen(num_frames, chunk_fps=chunk_fps, fps=fps),
            segment_frames=recipe.segment_frames,
            has_next=has_next,
            tail=recipe.settings.tail,
        ).lengths
        num_segments += count * len(lengths)
        seconds = max(Fraction(0), num_frames / chunk_fps - len(lengths) * recipe.segment_step / fps)
        left_out += LeftOut(0 if lengths else count, count * seconds)
    return num_segments, left_out


def make_latents_plan(
    data_dir: Path, recipe: LatentsRecipe, *, retry_codes: frozenset[str] = frozenset()
) -> LatentsPlan:
    """Plan `recipe` for the committed shards of its `video` variant in `data_dir`.

    Raises:
        UserError: the recipe's `where` selects nothing, or uses scores that chunks lack.
    """
    borders: dict[int, Borders] = {}

    def beyond(chunk_shards: list[ChunkShard], video_dir: Path, commits: dict[int, Commit]) -> list[ChunkShard]:
        found, its = with_borders(chunk_shards, video_dir, commits)
        borders.update(its)
        # Chunks without a segment have no sample.
        num_without = {shard_id: _segments_in(recipe, part)[1].num_chunks for shard_id, part in its.items()}
        return [replace(shard, num_chunks=shard.num_chunks - num_without[shard.shard_id]) for shard in found]

    plan = plan_chunks(
        data_dir,
        recipe,
        column=LATENTS,
        where=recipe.settings.where,
        retry_codes=retry_codes,
        beyond=None if recipe.latent_frames is None else beyond,
    )
    return LatentsPlan(**vars(plan), borders=borders)


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
            old_commits=plan.old_commits(shard.shard_id),
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
        video_ids=plan.video_ids,
        failed_before=plan.unreadable,
        chunk_s=None,
        where=plan.recipe.settings.where,
        asked={WEIGHTS: plan.recipe.weights},
    )


def pending_latents(data_dir: Path, variant: Variant) -> Pending:
    """Return what remains to be made of a variant; nothing if the variant is not current."""
    return pending_chunks(
        data_dir,
        variant,
        stored_recipe=lambda: latents_recipe_from_dict(stored_request(variant)),
        plan=lambda recipe: make_latents_plan(data_dir, recipe),
    )
