"""Evaluate the reconstruction of masked cubes: the loss on clips of a split, and pictures for the results page."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.shards.pages.figures import evenly_spaced_items, evenly_within, jpeg_uri, png_uri
from clipmill.train.data.latents.segments import FALSE_COLOUR_STDS
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip, evaluate, every_for
from clipmill.train.models.video_vit import CubeGrid
from clipmill.train.run.counted_batches import counted_batches
from clipmill.train.run.folder import RunFolder
from clipmill.train.tasks.mae.objective import MaskedClips
from clipmill.train.tasks.mae.reconstruction import Pictures, ReconstructedClip, ToDisplay, evaluate_reconstruction
from clipmill.train.tasks.mae.settings import MaeSettings, num_masked_places
from clipmill.train.tasks.mae.spec import RECONSTRUCTION, TASK, ReconstructionFlags
from clipmill.train.weights.conversion import IMAGENET_MEAN, IMAGENET_STD
from clipmill.train.weights.source import Say

_NUM_CLIPS = 4
_MAX_FRAMES = 4
_FEW_PX = 96  # pictures with shorter sides are enlarged without interpolation, and stored without loss
_PROTOCOL = (
    "mean squared error of the normalised values of masked cubes (per cube and channel); baseline: the error of "
    "predicting the mean of each cube; explained: 1 - loss / baseline"
)
_PICTURES = {
    "pixels": "The model sees the cubes that are not grey. It predicts masked cubes up to their mean and standard "
    "deviation, which its targets do not contain; the pictures take both from visible cubes, weighted by "
    "distance. Cubes that are too bright or too dark as a whole are therefore due to this rule, and patterns "
    "within a cube to the model.",
    "latents": "False colours: the first three channels of the latents. The model sees the cubes that are not grey. It "
    "predicts masked cubes up to the mean and standard deviation of each channel, which its targets do not "
    "contain; the pictures take both from visible cubes, weighted by distance. Cubes whose colour is wrong as "
    "a whole are therefore due to this rule.",
}


def score_run(opened: OpenedRun, wanted: ReconstructionFlags, *, chosen: str = "") -> Score:
    """Reconstruct masked cubes of clips of a split with a run's latest checkpoint.

    Args:
        chosen: why this split was chosen, if the user named none.

    Raises:
        UserError: there are no such clips.
        FailedWork: nothing could be decoded.
    """
    opened.require_whole()
    settings, trained, task = opened.settings, opened.trained, opened.task
    samples = task.samples(wanted.split, World())
    model = trained.fill(task.build_model(samples))
    every = every_for(len(samples), at_most=wanted.max_samples)
    clips: MaskedClips = task.masked_clips(samples)
    found = evaluate_reconstruction(
        model,
        counted_batches(samples.evaluation_batches(every=every), "reconstructing", total=-(-len(samples) // every)),
        clips,
        pictures=Pictures(
            samples=frozenset(evenly_spaced_items(range(0, len(samples), every), at_most=_NUM_CLIPS)),
            frames=evenly_within(range(settings.num_frames), at_most=_MAX_FRAMES),
            to_display=_to_display(settings),
        ),
        autocast=trained.precision.autocast,
        device=trained.device,
    )
    return Score(
        name=f"reconstruction-{wanted.split}",
        samples=samples,
        clip=describe_clip(settings, samples, is_consecutive=True),
        values={
            "split_chosen": chosen,
            "mask": describe_mask(settings, clips.masking.grid),
            "share_hidden": clips.masking.counts.num_masked / clips.masking.grid.cubes,
            "protocol": _PROTOCOL,
            "num_samples": found.num_samples,
            "loss": found.loss,
            "flat_loss": found.flat_loss,
            "picture_rule": _PICTURES[settings.input],
            "has_few_pixels": any(clip.original.shape[2] < _FEW_PX for clip in found.clips),
            "shown": _figures(found.clips, samples, num_frames=settings.num_frames),
        },
        failed=found.failed,
    )


def reconstruct_at_end(run: RunFolder, settings: MaeSettings, *, say: Say) -> None:
    """Reconstruct clips at the end of a run: of the evaluation split, or of the training split if there is no other.

    Errors are printed, and do not fail the run.
    """
    for folder in settings.folders:
        # Each folder of a mixture has a result of its own; the single folder of another run is the run's own data.
        _reconstruct(run, settings, shards=folder if len(settings.folders) > 1 else None, say=say)


def _reconstruct(run: RunFolder, settings: MaeSettings, *, shards: str | None, say: Say) -> None:
    held_out, of = settings.evaluate.split, "" if shards is None else f" of {shards}"
    try:
        try:
            evaluate(TASK, RECONSTRUCTION, run, ReconstructionFlags(split=held_out), shards=shards)
        except UserError as error:
            chosen = f"{settings.split}, which the model was trained on, because {held_out} cannot be used: {error}"
            say(f"reconstruction{of}: split {chosen}")
            with_reason = replace(RECONSTRUCTION, score=partial(score_run, chosen=chosen))
            evaluate(TASK, with_reason, run, ReconstructionFlags(split=settings.split), shards=shards)
    except (UserError, FailedWork) as error:
        say(f"reconstruction{of}: no pictures: {error}")


def describe_mask(settings: MaeSettings, grid: CubeGrid) -> str:
    """Describe which cubes are masked."""
    num_masked = num_masked_places(settings.mask_ratio, num_places=grid.patches)
    return f"the same {num_masked:,} of {grid.patches:,} places at all {grid.steps} moments, seed {settings.seed}"


def _to_display(settings: MaeSettings) -> ToDisplay:
    """From model inputs to values from 0 to 1: undo the normalisation of pixels, or map latents to false colours."""
    if settings.reads_latents:
        return lambda latents: latents / (2 * FALSE_COLOUR_STDS) + 0.5
    mean_C111, std_C111 = (
        torch.tensor(values)[:, None, None, None]
        for values in (settings.init.pixel_mean or IMAGENET_MEAN, settings.init.pixel_std or IMAGENET_STD)
    )
    return lambda pixels: pixels * std_C111.to(pixels.device) + mean_C111.to(pixels.device)


def _figures(clips: Sequence[ReconstructedClip], samples: Samples[Any], *, num_frames: int) -> list[dict[str, Any]]:
    """Clips as plain values, in the order of the split."""
    figures = []
    for clip in sorted(clips, key=lambda clip: clip.sample):
        begin_s, end_s = samples.shown_span_s(clip.sample, num_frames=num_frames)
        pictures = {
            name: [picture_uri(frame) for frame in getattr(clip, name)] for name in ("original", "masked", "filled")
        }
        figures.append({"key": clip.key, "begin_s": begin_s, "end_s": end_s, "loss": clip.loss, **pictures})
    return figures


def picture_uri(frame: NDArray[np.uint8]) -> str:
    """A picture (uint8 RGB [H, W, 3]) as a data URI: JPEG, or PNG for small ones."""
    return png_uri(frame) if min(frame.shape[:2]) < _FEW_PX else jpeg_uri(frame)
