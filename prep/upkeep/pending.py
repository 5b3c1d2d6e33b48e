"""What would be made of `latents` and `text` now, by the recipe of their current variant, from stored records alone."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from manifests.errors import UserError
from manifests.store import MANIFEST_FILE, manifest_dir
from prep.core.data_folder import TEXT, VIDEO
from prep.latents.plan import make_latents_plan
from prep.latents.recipe import latents_recipe_from_dict
from prep.text.plan import make_text_plan
from prep.text.recipe import text_recipe_from_dict
from prep.video.plan import ShardPlan, ShardState
from shards.dataset import current_variant
from shards.reader import Variant


@dataclass(frozen=True)
class Outlook:
    """What a plan would find.

    Attributes:
        num_wanted: samples; None when that cannot be told.
        wanted_shards: of the plan; None when that cannot be told.
        to_make: state -> shards that have work.
        stale_because: why the variant is not what would be made now, or None.
    """

    num_wanted: int | None = None
    wanted_shards: frozenset[int] | None = None
    to_make: dict[str, int] = field(default_factory=dict)
    stale_because: str | None = None


def outlook_of(data_dir: Path, column: str, variant: Variant) -> Outlook:
    """The outlook of a variant of `latents` or `text`; nothing is known of `video` without looking at its sources.

    Raises:
        UserError: the layout of `text`, or the manifest, is damaged.
    """
    if column == VIDEO:
        return Outlook()
    try:
        stored = variant.recipe
        if column == TEXT:
            if not (manifest_dir(data_dir) / MANIFEST_FILE).exists():
                return Outlook()
            return _outlook(make_text_plan(data_dir, text_recipe_from_dict(stored)).shards)
        recipe = latents_recipe_from_dict(stored)
    except UserError:
        return Outlook()  # of another version, or without a recipe
    if recipe.video != (video := current_variant(data_dir, VIDEO)):
        return Outlook(stale_because=f"made from {recipe.video}; the current variant of video is {video}")
    return _outlook(make_latents_plan(data_dir, recipe).shards)


def _outlook(shards: list[ShardPlan]) -> Outlook:
    wanted = [shard for shard in shards if shard.state != ShardState.ORPHANED]
    return Outlook(
        num_wanted=sum(shard.num_chunks for shard in wanted),
        wanted_shards=frozenset(shard.shard_id for shard in wanted),
        to_make=dict(Counter(str(shard.state) for shard in shards if shard.has_work)),
    )
