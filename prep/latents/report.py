"""What a plan and a run of the `latents` column say to people and to scripts."""

from math import prod
from pathlib import Path
from typing import Any

from prep.core.data_folder import LATENTS
from prep.core.failure_list import failure_lines
from prep.core.report import Report, states_lines, states_values, summary_values
from prep.core.run import Summary
from prep.latents.plan import LatentsPlan
from prep.upkeep.status_text import size_text
from prep.video.recipe import recipe_differences
from shards.dataset import current_variant
from shards.reader import Variant

_BYTES_PER_NUMBER = 2


def latents_report(plan: LatentsPlan) -> Report:
    """What would be done, by state and reason."""
    recipe = plan.recipe
    differences = _differences(plan)
    num_frames = sum(plan.video_shards[shard.shard_id].num_frames for shard in plan.shards if shard.has_work)
    size_bytes = num_frames * prod(recipe.frame_shape) * _BYTES_PER_NUMBER
    lines = [f"variant  {recipe.variant}", f"video    {recipe.video}"]
    lines += [f"setting  {difference}" for difference in differences]
    lines += states_lines(plan.shards)
    lines += [f"{failure.video_id}  cannot be planned: {failure.message}" for failure in plan.unreadable]
    if num_frames:
        # Unchanged chunks of a changed shard are taken over, which only the work itself finds out.
        lines.append(f"estimate at most {num_frames} frames to encode, {size_text(size_bytes)}")
    else:
        lines.append("nothing to do")
    values = {
        "variant": recipe.variant,
        "video": recipe.video,
        "changed_settings": differences,
        "num_chunks": plan.num_chunks,
        **states_values(plan.shards),
        "unreadable": [failure.message for failure in plan.unreadable],
        "estimate": {"num_frames": num_frames, "size_bytes": size_bytes},
    }
    return Report("\n".join(lines), values)


def _differences(plan: LatentsPlan) -> list[str]:
    current = current_variant(plan.data_dir, LATENTS)
    if current is None or current == plan.recipe.variant:
        return []
    old = Variant.open(plan.data_dir, column=LATENTS, variant=current).recipe
    return recipe_differences(old, plan.recipe.as_dict())


def latents_summary_text(summary: Summary, *, listed: Path) -> str:
    """A run's summary for people; `listed` is the list of its failures."""
    lines = [f"variant  {summary.variant}", f"shards   {summary.num_shards} with {summary.num_chunks} chunks"]
    if summary.num_shards_made:
        lines.append(
            f"made     {summary.num_shards_made} shards: {summary.num_encoded} chunks encoded,"
            f" {summary.num_reused} taken over, {summary.num_bytes_written / 1e6:.1f} MB"
        )
        if summary.encoded_s:
            lines.append(
                f"speed    {summary.encoded_s / summary.wall_s:.1f}x real time;"
                f" {summary.encoded_s / summary.cpu_s:.1f}x a core ({summary.cpu_s:.1f} CPU-s)"
            )
    elif not summary.num_chunks and not summary.failures:
        lines.append("nothing was encoded: no chunk is committed yet; run it again when `prep chunk` has made some")
    else:
        lines.append("nothing was encoded" + ("" if summary.failures else ": everything is as planned"))
    lines += failure_lines(summary.failures, listed=listed)
    return "\n".join(lines)


def latents_summary_values(summary: Summary, *, vae: str, listed: Path) -> dict[str, Any]:
    """The same for scripts, with the VAE's name."""
    return {"vae": vae, **summary_values(summary, listed=listed)}
