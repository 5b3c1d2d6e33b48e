"""Text and JSON reports of plans and runs of the `latents` column."""

from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from pathlib import Path

from clipmill.manifests.quoting import count_noun
from clipmill.manifests.units import duration_text, size_text
from clipmill.prep.core.chunk_report import chunks_report, speed_text
from clipmill.prep.core.chunk_shards import NO_CHUNKS
from clipmill.prep.core.column import WEIGHTS
from clipmill.prep.core.disk_use import disk_use
from clipmill.prep.core.report import Report, summary_report
from clipmill.prep.core.run import Summary
from clipmill.prep.latents.column import COLUMN
from clipmill.prep.latents.plan import LatentsPlan, LeftOut
from clipmill.prep.latents.recipe import LATENTS, LatentsSettings
from clipmill.prep.latents.trial import run_trial, time_lines, time_values

_BYTES_PER_NUMBER = 2


def latents_report(plan: LatentsPlan) -> Report:
    """Return the report of a plan: the work by state and reason."""
    recipe, where = plan.recipe, plan.recipe.settings.where
    num_frames, left_out = plan.num_frames, plan.left_out
    is_video = recipe.latent_frames is not None
    size_bytes = (plan.num_segments if is_video else num_frames) * prod(recipe.unit_shape) * _BYTES_PER_NUMBER
    trial = run_trial(plan) if num_frames else None
    disk = disk_use(
        plan.data_dir, column=LATENTS, variant=recipe.variant, added_bytes=(float(size_bytes), float(size_bytes))
    )
    estimate: list[str] = []
    if num_frames:
        # Unchanged chunks of a changed shard are copied; how many is known only while the shard is made.
        estimate.append(f"estimate at most {count_noun(num_frames, 'frame')} to encode, {size_text(size_bytes)}")
        estimate += [*time_lines(trial, num_frames=num_frames), *disk.lines()]
    values = {
        "where": where,
        "segments": {"num_segments": plan.num_segments, "left_out_s": float(left_out.seconds)} if is_video else None,
        "estimate": {"num_frames": num_frames, "size_bytes": size_bytes, **time_values(trial, num_frames=num_frames)},
        "disk": disk.values(),
    }
    return chunks_report(
        plan,
        COLUMN,
        recipe.as_dict(),
        estimate=estimate,
        values=values,
        asked={"where": where, WEIGHTS: recipe.weights},
        about=_segment_lines(plan) if is_video else (),
    )


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
    return [*lines, *(f"         {text}" for text in _left_out_texts(plan.left_out, settings))]


def _left_out_texts(left_out: LeftOut, settings: LatentsSettings) -> list[str]:
    """Return what is in no segment, in words; nothing if everything is."""
    texts = []
    if left_out.seconds:
        texts.append(f"{duration_text(float(left_out.seconds))} at the ends of chunks and videos are in no segment")
    if left_out.num_chunks:
        tail = ", which --tail repeat completes" if settings.tail == "drop" else ""
        texts.append(f"{count_noun(left_out.num_chunks, 'chunk')} without a segment: too short{tail}")
    return texts


@dataclass
class LatentsSummary(Summary):
    """Result of a run.

    Attributes:
        left_out: What is in no segment of a VAE of videos, in the whole plan.
    """

    left_out: LeftOut = field(default_factory=LeftOut)


def latents_summary(summary: LatentsSummary, settings: LatentsSettings, *, listed: Path) -> Report:
    """Return the report of a run with the VAE's name; `listed` is the path of the list of failures."""
    nothing = None if summary.num_chunks else NO_CHUNKS
    report = summary_report(summary, listed=listed, speed=speed_text(summary), nothing=nothing, vae=settings.vae)
    left_out = {"num_chunks": summary.left_out.num_chunks, "seconds": float(summary.left_out.seconds)}
    lines = [f"left out {text}" for text in _left_out_texts(summary.left_out, settings)]
    return Report("\n".join([report.text, *lines]), {**report.values, "left_out": left_out})
