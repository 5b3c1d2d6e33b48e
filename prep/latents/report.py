"""Text and JSON reports of plans and runs of the `latents` column."""

from fractions import Fraction
from math import prod
from pathlib import Path

from clipmill.manifests.quoting import counted
from clipmill.manifests.units import duration_text, size_text
from clipmill.prep.core.chunk_shards import NO_CHUNKS
from clipmill.prep.core.disk_use import disk_use
from clipmill.prep.core.report import (
    NOTHING_TO_DO,
    Report,
    changed_settings,
    next_line,
    states_lines,
    states_values,
    summary_report,
)
from clipmill.prep.core.run import Summary
from clipmill.prep.latents.column import COLUMN
from clipmill.prep.latents.plan import LatentsPlan
from clipmill.prep.latents.recipe import LATENTS
from clipmill.prep.latents.trial import run_trial, time_lines, time_values

_BYTES_PER_NUMBER = 2


def latents_report(plan: LatentsPlan) -> Report:
    """Return the report of a plan: the work by state and reason."""
    recipe = plan.recipe
    differences = changed_settings(plan.data_dir, LATENTS, variant=recipe.variant, recipe=recipe.as_dict())
    num_frames = plan.num_frames
    is_video = recipe.latent_frames is not None
    size_bytes = (plan.num_segments if is_video else num_frames) * prod(recipe.unit_shape) * _BYTES_PER_NUMBER
    trial = run_trial(plan) if num_frames else None
    disk = disk_use(
        plan.data_dir, column=LATENTS, variant=recipe.variant, added_bytes=(float(size_bytes), float(size_bytes))
    )
    where = {} if recipe.settings.where is None else {"where": recipe.settings.where}
    command = COLUMN.command_line({**recipe.as_dict(), **where}, data_dir=plan.data_dir)
    lines = [f"variant  {recipe.variant}", f"video    {recipe.video}"]
    if recipe.settings.where is not None:
        lines.append(f"where    {recipe.settings.where}: {counted(plan.num_chunks, 'chunk')} selected")
    if is_video:
        lines += _segment_lines(plan)
    lines += [f"setting  {difference}" for difference in differences]
    lines += states_lines(plan.shards)
    lines += [f"{failure.video_id}  cannot be planned: {failure.message}" for failure in plan.unreadable]
    if num_frames:
        # Unchanged chunks of a changed shard are copied; how many is known only while the shard is made.
        lines.append(f"estimate at most {counted(num_frames, 'frame')} to encode, {size_text(size_bytes)}")
        lines += [*time_lines(trial, num_frames=num_frames), *disk.lines(), next_line(command)]
    else:
        lines.append(NOTHING_TO_DO)
    values = {
        "variant": recipe.variant,
        "video": recipe.video,
        "where": recipe.settings.where,
        "changed_settings": differences,
        "num_chunks": plan.num_chunks,
        **states_values(plan.shards),
        "unreadable": [failure.message for failure in plan.unreadable],
        "segments": {"num_segments": plan.num_segments, "left_out_s": plan.left_out_s} if is_video else None,
        "estimate": {"num_frames": num_frames, "size_bytes": size_bytes, **time_values(trial, num_frames=num_frames)},
        "disk": disk.values(),
        "next": command if num_frames else None,
    }
    return Report("\n".join(lines), values)


def _segment_lines(plan: LatentsPlan) -> list[str]:
    """Return how the chunks are divided into segments, and what is in none of them."""
    recipe, settings = plan.recipe, plan.recipe.settings
    num_frames, fps = recipe.segment_frames, settings.fps_exact
    length = next(iter(plan.chunk_shards.values())).longest_s if plan.chunk_shards else Fraction(0)
    seconds = recipe.segment_step / fps
    lines = [
        f"segments {num_frames} frames at {settings.fps} fps, {float(seconds):g} s, become {recipe.latent_frames}"
        f" latent frames; a chunk of {float(length):g} s holds {length // seconds}"
    ]
    if left_out_s := plan.left_out_s:
        lines.append(f"         {duration_text(left_out_s)} at the ends of chunks and videos are in no segment")
    return lines


def latents_summary(summary: Summary, *, vae: str, listed: Path) -> Report:
    """Return the report of a run with the VAE's name; `listed` is the path of the list of failures."""
    speed = None
    if summary.encoded_s:
        speed = (
            f"{summary.encoded_s / summary.wall_s:.1f}x real time;"
            f" {summary.encoded_s / summary.cpu_s:.1f}x per core ({summary.cpu_s:.1f} s of CPU time)"
        )
    nothing = None
    if not summary.num_chunks:
        nothing = NO_CHUNKS
    return summary_report(summary, listed=listed, speed=speed, nothing=nothing, vae=vae)
