"""What `train eval reconstruction` does, and `train mae` at its end: loss on held-out clips, and pictures."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manifests.errors import FailedWork, UserError
from train.distributed.world import World
from train.engine.trained_run import open_trained_run, read_settings
from train.evaluation.examples import clip_in_words
from train.models.video_vit import CubeGrid
from train.report.results import write_page
from train.run.folder import RunFolder, open_run
from train.tasks.dual_encoder.evaluation import every_for
from train.tasks.mae.evaluating import evaluate_reconstruction
from train.tasks.mae.settings import MaeSettings, num_masked_places
from train.tasks.mae.shown import chosen_pictures, has_few_pixels, shown_json
from train.tasks.mae.task import MaeTask

MAX_SAMPLES = 1000
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


def evaluate_reconstructions(
    run_path: Path, *, split: str, max_samples: int = MAX_SAMPLES, shards: str | None = None, chosen: str = ""
) -> dict[str, Any]:
    """Has a run's latest checkpoint fill in hidden cubes of a split, and adds loss and pictures to the run's page.

    Args:
        max_samples: at most, spread evenly over the split.
        chosen: why it is this split, where nobody named it.

    Raises:
        UserError: there is no such run, it is of another task, or there are no such clips.
        FailedWork: nothing could be decoded.
    """
    if max_samples < 1:
        raise UserError(f"--max-samples is {max_samples}", hint="it must be 1 or more")
    run = open_run(run_path)
    run.require_task(MaeTask.name)
    settings = read_settings(run, MaeSettings, shards=shards)
    trained = open_trained_run(run, settings)
    task = MaeTask(settings, attention=trained.attention, device=trained.device)
    samples = task.samples(split, World())
    model = trained.fill(task.build_model(samples))
    every = every_for(len(samples), at_most=max_samples)
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
    result = {
        "evaluation": "reconstruction",
        "split": split,
        **run.data_facts(shards),
        "split_chosen": chosen,
        "step": trained.step,
        "weights": trained.weights,
        "data": samples.describe(),
        "variant": samples.variant_name,
        "clip": clip_in_words(settings, is_in_row=True),
        "mask": describe_mask(settings, masking.grid),
        "share_hidden": masking.counts.num_masked / masking.grid.cubes,
        "protocol": _PROTOCOL,
        "num_samples": found.num_samples,
        "loss": found.loss,
        "flat_loss": found.flat_loss,
        "failed": [failure.as_json() for failure in found.failed],
        "picture_rule": _PICTURES[settings.input],
        "has_few_pixels": has_few_pixels(found.shown),
        "shown": shown_json(found.shown, samples, num_frames=settings.num_frames),
        "command": _command(run, split=split, max_samples=max_samples, shards=shards),
    }
    run.write_evaluation(f"reconstruction-{split}", result)
    write_page(run)
    return result


def reconstruct_at_end(run: RunFolder, settings: MaeSettings, *, say: Callable[[str], None]) -> None:
    """The same for a run that is done: on the split that is held out, or where it has no clips on the one trained on.

    What goes wrong is said, and the run is none the worse for it.
    """
    held_out = settings.evaluate.split
    try:
        try:
            evaluate_reconstructions(run.path, split=held_out)
        except UserError as error:
            chosen = f"{settings.split}, which was trained on, as there is nothing to show of {held_out}: {error}"
            say(f"reconstruction: split {chosen}")
            evaluate_reconstructions(run.path, split=settings.split, chosen=chosen)
    except (UserError, FailedWork) as error:
        say(f"reconstruction: no pictures: {error}")


def describe_mask(settings: MaeSettings, grid: CubeGrid) -> str:
    """What is hidden, in words."""
    num_masked = num_masked_places(settings.mask_ratio, num_places=grid.patches)
    return f"the same {num_masked:,} of {grid.patches:,} places at all {grid.steps} moments, seed {settings.seed}"


def _command(run: RunFolder, *, split: str, max_samples: int, shards: str | None) -> str:
    words = ["train", "eval", "reconstruction", str(run.path), "--split", split]
    words += [] if shards is None else ["--shards", shards]
    words += [] if max_samples == MAX_SAMPLES else ["--max-samples", str(max_samples)]
    return shlex.join(words)
