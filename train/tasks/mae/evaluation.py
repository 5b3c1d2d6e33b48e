"""The reconstruction of masked cubes by a run's latest checkpoint: the loss on clips of a split, and pictures."""

from dataclasses import replace
from functools import partial

from manifests.errors import FailedWork, UserError
from train.distributed.world import World
from train.evaluation.runner import OpenedRun, Score, describe_clip, evaluate, every_for
from train.models.videomae import CubeGrid
from train.run.folder import RunFolder
from train.spec import EvaluationSpec, TaskSpec
from train.tasks.mae.reconstruction import evaluate_reconstruction
from train.tasks.mae.settings import MaeSettings, num_masked_places
from train.tasks.mae.shown import chosen_pictures, has_few_pixels, shown_json
from train.tasks.mae.spec import ReconstructionFlags
from train.weights.sources import Say

_PROTOCOL = (
    "mean squared error of the values of hidden cubes, normalised within each cube and channel; flat cubes: the same "
    "of a prediction that knows the mean of each cube and nothing else; explained: the part of it that is not left"
)
_PICTURES = {
    "pixels": "The model sees what is not grey, and says how each hidden cube looks apart from its brightness and "
    "contrast, which are no part of what it learns. Here they are taken from the visible cubes, the nearer the more: "
    "cubes that are too bright or too dark as a whole are this rule's doing, their patterns are the model's.",
    "latents": "False colours: the first three channels of the latents. The model sees what is not grey, and says what "
    "each hidden cube holds apart from the mean and the spread of its channels, which are no part of what it learns. "
    "Here they are taken from the visible cubes, the nearer the more: cubes whose colour is wrong as a whole are this "
    "rule's doing.",
}


def score_run(opened: OpenedRun, wanted: ReconstructionFlags, *, chosen: str = "") -> Score:
    """Has a run's latest checkpoint reconstruct masked cubes of a split.

    Args:
        chosen: why it is this split, where nobody named it.

    Raises:
        UserError: there are no such clips.
        FailedWork: nothing could be decoded.
    """
    settings, trained, task = opened.settings, opened.trained, opened.task
    samples = task.samples(wanted.split, World())
    model = trained.fill(task.build_model(samples))
    every = every_for(len(samples), at_most=wanted.max_samples)
    masking = task.masking(samples)
    found = evaluate_reconstruction(
        model,
        samples.evaluation_batches(every=every),
        inputs=task.inputs,
        masking=masking,
        size=task.size(samples),
        std=task.std,
        pictures=chosen_pictures(settings, len(samples), every=every),
        autocast=trained.precision.autocast,
        device=trained.device,
    )
    return Score(
        name=f"reconstruction-{wanted.split}",
        samples=samples,
        clip=describe_clip(settings, is_consecutive=True),
        values={
            "split_chosen": chosen,
            "mask": describe_mask(settings, masking.grid),
            "share_hidden": masking.counts.num_masked / masking.grid.cubes,
            "protocol": _PROTOCOL,
            "num_samples": found.num_samples,
            "loss": found.loss,
            "flat_loss": found.flat_loss,
            "picture_rule": _PICTURES[settings.input],
            "has_few_pixels": has_few_pixels(found.shown),
            "shown": shown_json(found.shown, samples, num_frames=settings.num_frames),
        },
        failed=found.failed,
    )


def reconstruct_at_end(
    spec: TaskSpec, evaluation: EvaluationSpec, run: RunFolder, settings: MaeSettings, *, say: Say
) -> None:
    """Reconstructs clips at the end of a run: of the held-out split, or where it has none of the training split.

    What goes wrong is said, and does not fail the run.
    """
    held_out = settings.evaluate.split
    try:
        try:
            evaluate(spec, evaluation, run, ReconstructionFlags(split=held_out))
        except UserError as error:
            chosen = f"{settings.split}, which was trained on, as there is nothing to show of {held_out}: {error}"
            say(f"reconstruction: split {chosen}")
            told = replace(evaluation, score=partial(score_run, chosen=chosen))
            evaluate(spec, told, run, ReconstructionFlags(split=settings.split))
    except (UserError, FailedWork) as error:
        say(f"reconstruction: no pictures: {error}")


def describe_mask(settings: MaeSettings, grid: CubeGrid) -> str:
    """What is hidden, in words."""
    num_masked = num_masked_places(settings.mask_ratio, num_places=grid.patches)
    return f"the same {num_masked:,} of {grid.patches:,} places at all {grid.steps} moments, seed {settings.seed}"
