"""What the commands of `train` do, once their flags are read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from manifests.errors import FailedWork, UserError
from manifests.publish import publish_json
from train.checkpoint import latest_checkpoint, load_checkpoint
from train.distributed.world import World
from train.evaluation.embeddings import Embeddings, embed_all
from train.evaluation.examples import retrieval_examples
from train.evaluation.retrieval import distinct_texts, score_retrieval
from train.loop import check_batch, train
from train.models.attention import open_attention
from train.precision import open_precision
from train.progress import Progress
from train.report import write_page
from train.run_folder import create_run, open_run, reopen_run
from train.settings import DualEncoderSettings, load_settings
from train.surroundings import machine, versions
from train.tasks.dual_encoder import DualEncoderTask, Samples
from train.tracking.trackers import check_tracking


def train_dual_encoder(settings: DualEncoderSettings, *, resume: bool) -> None:
    """Trains a dual encoder and writes the run's results page."""
    world = World()
    check_tracking(settings.track)
    device = choose_device(settings.device)
    door = open_attention(settings.attention, device_type=device.type, compiles=settings.compile)
    precision = open_precision(settings.precision, device_type=device.type)
    progress = Progress()
    progress.say(f"attention: {door.name} ({door.reason}); precision: {precision.name} ({precision.reason})")
    task = DualEncoderTask(settings, door=door, device=device)
    old_run = reopen_run(settings) if resume else None
    samples = task.training_set(world)
    check_batch(settings, samples)
    # The folder is made last: a mistake in the flags leaves nothing behind.
    run = old_run or create_run(settings)
    progress.say(f"data: {samples.describe()}; {samples.variant_name}")
    facts = {
        "task": task.name,
        "attention": f"{door.name} ({door.reason})",
        "precision": f"{precision.name} ({precision.reason})",
        "data": samples.describe(),
        "variant": samples.variant_name,
        "machine": machine(device),
        "versions": versions(),
    }
    publish_json(run.facts, facts)
    train(task, samples, settings, run=run, world=world, device=device, progress=progress)
    write_page(run)
    progress.say(f"done: {settings.steps} steps, checkpoints and results page ({run.page.name}) in {run.path}")


def evaluate_retrieval(run_path: Path, *, shards: str | None, split: str) -> tuple[dict[str, Any], int]:
    """Scores a run's latest checkpoint by retrieval and adds the result to its page.

    Returns:
        The result as plain values, and the number of samples that failed.
    """
    run = open_run(run_path)
    settings = load_settings(run.settings, DualEncoderSettings)
    if shards is not None:
        settings = replace(settings, shards=shards)
    path = latest_checkpoint(run.checkpoints)
    if path is None:
        raise UserError(f"{run.path} has no checkpoint yet", hint="train until --checkpoint-every, or to the end")
    device = choose_device(settings.device)
    door = open_attention(settings.attention, device_type=device.type, compiles=settings.compile)
    task = DualEncoderTask(settings, door=door, device=device)
    samples = task.samples(split, World())
    checkpoint = load_checkpoint(path, device=device)
    model = task.build_model(samples).to(device)
    try:
        model.load_state_dict(checkpoint.evaluated)
    except RuntimeError as error:
        raise UserError(
            f"{path} does not fit the model of {run.settings}: {str(error).splitlines()[-1].strip()}",
            hint="were settings changed by hand? put back what the run was trained with",
        ) from error
    found = embed_all(task, model, samples.evaluation_batches(), device=device)
    if not len(found.samples):
        raise FailedWork(
            f"none of the samples of {settings.shards} could be decoded; the first: {found.failed[0].detail}"
        )
    result = _retrieval_result(found, samples, settings, step=checkpoint.step)
    run.write_evaluation(f"retrieval-{split}", result)
    write_page(run)
    return result, len(found.failed)


def _retrieval_result(
    found: Embeddings, samples: Samples, settings: DualEncoderSettings, *, step: int
) -> dict[str, Any]:
    first_rows, text_of_clip = distinct_texts(found.text_input)
    similarity = found.video @ found.text[first_rows].T
    return {
        "evaluation": "retrieval",
        "split": samples.split,
        "step": step,
        "data": samples.describe(),
        "variant": samples.variant_name,
        "clip": _describe_clip(settings),
        **score_retrieval(similarity, text_of_clip).as_json(),
        "failed": [failure.as_json() for failure in found.failed],
        "examples": retrieval_examples(
            samples,
            found.samples,
            num_frames=settings.num_frames,
            similarity_NM=similarity,
            first_rows=first_rows,
            text_of_clip=text_of_clip,
        ),
    }


def _describe_clip(settings: DualEncoderSettings) -> str:
    if settings.input == "latents":
        return f"latents of {settings.segment}, the middle frames of {settings.num_frames} equal parts, first caption"
    moments = {
        "uniform": "at the centres of equal segments",
        "stride": f"every {settings.stride} frames in the middle",
        "lavila": "at the middles of LaViLa's segments",
    }
    return f"{settings.num_frames} frames {moments[settings.sampling]}, centre square, {settings.size_px} px"


def choose_device(name: str) -> torch.device:
    """The device of `--device`.

    Raises:
        UserError: cuda was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("torch finds no CUDA device (asked for by --device cuda)", hint="use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
