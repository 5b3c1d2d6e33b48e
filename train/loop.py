"""The one training loop. What is trained, and towards what, is the task's business (train.tasks)."""

import math
import time
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from manifests.errors import FailedWork, UserError
from manifests.publish import publish_json
from train.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from train.data.batch import Batch
from train.data.failures import FailedSample, TooManyFailures
from train.data.filling import LoadedBatch
from train.data.loader import TrainingSet
from train.data.place import LoaderState, Place
from train.data.prefetch import prefetch
from train.distributed.world import World
from train.objective import Objective
from train.optim.ema import Ema
from train.optim.optimizer import clip_gradients, make_optimizer, set_learning_rates
from train.precision import Precision, open_precision
from train.progress import Progress
from train.run_folder import RunFolder, append_lines, keep_lines
from train.settings import TrainingSettings
from train.step import Step
from train.tasks import Task
from train.throughput import Throughput
from train.tracking.trackers import Trackers, open_trackers


@dataclass
class _State:
    """What changes from step to step."""

    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    precision: Precision
    throughput: Throughput
    ema: Ema | None
    step: int = 0
    place: Place = field(default_factory=lambda: Place(0))
    num_failed: int = 0


def train(
    task: Task,
    samples: TrainingSet,
    settings: TrainingSettings,
    *,
    run: RunFolder,
    world: World,
    device: torch.device,
    progress: Progress,
) -> nn.Module:
    """Trains until `settings.steps`, from the latest checkpoint of `run` where there is one.

    Killed at any moment and called again, it ends with the weights of an undisturbed run (bit by bit on a CPU).

    Returns:
        The trained model.

    Raises:
        FailedWork: the loss is not finite, or too many samples failed.
        UserError: the checkpoint does not fit, or a batch is larger than the set of samples.
    """
    check_batch(settings, samples)
    state = _begin(task, samples, settings, run=run, world=world, device=device)
    left_to_fail = settings.max_failures - state.num_failed
    batches = prefetch(samples.batches(max_failures=left_to_fail), device)
    state.model.train()
    trackers = Trackers([])
    if world.is_first:
        trackers = open_trackers(settings, run=run, progress=progress, step=state.step)
    try:
        while state.step < settings.steps:
            epoch = state.place.position / samples.num_samples if samples.num_samples else 0.0
            step = Step(
                number=state.step + 1,
                epoch=epoch,
                world=world,
                seed=settings.seed,
                autocast=state.precision.autocast,
                scale=state.precision.scale,
            )
            line = _one_step(state, step, batches, settings, run=run)
            if samples.num_samples:
                line["epoch"] = state.place.position / samples.num_samples
            trackers.log(line)
            if state.step % settings.checkpoint_every == 0 or state.step == settings.steps:
                _save(task, state, samples, settings, run=run)
    finally:
        # Ends the loader's threads, whatever happened.
        batches.close()
        trackers.close()
    return state.model


def check_batch(settings: TrainingSettings, samples: TrainingSet) -> None:
    """Raises a UserError where a batch would hold a sample twice."""
    if samples.num_samples is not None and settings.batch > samples.num_samples:
        raise UserError(
            f"--batch is {settings.batch}, and there are {samples.num_samples} samples to train on",
            hint="use a smaller --batch, or more data",
        )


def _begin(
    task: Task,
    samples: TrainingSet,
    settings: TrainingSettings,
    *,
    run: RunFolder,
    world: World,
    device: torch.device,
) -> _State:
    torch.manual_seed(settings.seed)
    model = task.build_model(samples).to(device)
    objective = task.build_objective(samples, world).to(device)
    precision = open_precision(settings.precision, device_type=device.type)
    state = _State(
        model,
        objective,
        make_optimizer(model, objective, settings),
        precision,
        Throughput(device=device, precision=precision.name),
        Ema(model, decay=settings.optimizer.ema) if settings.optimizer.ema else None,
    )
    path = latest_checkpoint(run.checkpoints)
    if path is not None:
        saved = load_checkpoint(path, device=device)
        if saved.task != task.name:
            raise UserError(f"{path} is of a run of {saved.task}", hint="begin a new run with another --out")
        samples.load_state_dict(*saved.loader)
        model.load_state_dict(saved.model)
        objective.load_state_dict(saved.objective)
        state.optimizer.load_state_dict(saved.optimizer)
        state.precision.load_state_dict(saved.precision)
        if state.ema is not None:
            state.ema.load_state_dict(saved.ema)
        state.step = saved.step
        state.place = Place(saved.loader[0]["position"], tuple(saved.loader[0]["ahead"]))
    state.num_failed = len(keep_lines(run.failures, lambda line: line["position"] < state.place.position))
    return state


def _one_step(
    state: _State,
    step: Step,
    batches: Generator[LoadedBatch, None, None],
    settings: TrainingSettings,
    *,
    run: RunFolder,
) -> dict[str, Any]:
    """Takes one step and returns its line of metrics.jsonl."""
    began = time.perf_counter()
    loaded = _next_batch(batches, state, settings, run=run)
    waited_s = time.perf_counter() - began
    lr = set_learning_rates(state.optimizer, step.number, settings, objective=state.objective)
    state.optimizer.zero_grad(set_to_none=True)
    with state.throughput.counting(state.model) if state.throughput.flops_per_step is None else nullcontext():
        numbers = state.objective.backward(state.model, loaded.batch, step)
    if not math.isfinite(numbers["loss"]):
        _stop_at("loss", numbers["loss"], step, loaded.batch, run=run)
    parameters = [*state.model.parameters(), *state.objective.parameters()]
    grad_norm = clip_gradients(parameters, max_norm=settings.max_grad_norm, loss_scale=state.precision.loss_scale)
    if state.precision.accepts(grad_norm):
        if not math.isfinite(grad_norm):
            _stop_at("norm of the gradients", grad_norm, step, loaded.batch, run=run)
        state.optimizer.step()
    if state.ema is not None:
        state.ema.update(state.model, step=step.number)
    state.objective.after_step(step)
    state.step, state.place = step.number, loaded.place
    line = {
        "step": step.number,
        "loss": numbers["loss"],
        "lr": lr,
        "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
        **numbers,
        **state.throughput.numbers(step_s=time.perf_counter() - began, waited_s=waited_s, num_samples=settings.batch),
        "num_failed": state.num_failed,
    }
    if state.precision.name == "fp16":
        line |= {"loss_scale": state.precision.loss_scale, "num_skipped": state.precision.num_skipped}
    return line


def _next_batch(
    batches: Generator[LoadedBatch, None, None], state: _State, settings: TrainingSettings, *, run: RunFolder
) -> LoadedBatch:
    try:
        loaded = next(batches)
    except TooManyFailures as error:
        _record(error.failed, state, run=run)
        raise FailedWork(
            f"{state.num_failed} samples failed, more than --max-failures {settings.max_failures}; "
            f"the last one: {error}; all are listed in {run.failures}"
        ) from error
    _record(loaded.failed, state, run=run)
    return loaded


def _record(failed: tuple[FailedSample, ...], state: _State, *, run: RunFolder) -> None:
    state.num_failed += len(failed)
    append_lines(run.failures, [failure.as_json() for failure in failed])


def _stop_at(what: str, value: float, step: Step, batch: Batch, *, run: RunFolder) -> None:
    path = run.path / "bad_batch.json"
    keys, caption_ids = list(batch["key"]), batch["caption_id"].tolist()
    publish_json(path, {"step": step.number, what: str(value), "keys": keys, "caption_ids": caption_ids})
    raise FailedWork(f"the {what} is {value} at step {step.number}; the keys of its batch are in {path}")


def _save(task: Task, state: _State, samples: TrainingSet, settings: TrainingSettings, *, run: RunFolder) -> None:
    loader = LoaderState(
        position=state.place.position, ahead=list(state.place.ahead), seed=settings.seed, samples=samples.fingerprint
    )
    save_checkpoint(
        run.checkpoints,
        Checkpoint(
            task=task.name,
            step=state.step,
            loader=[loader],
            model=state.model.state_dict(),
            objective=state.objective.state_dict(),
            optimizer=state.optimizer.state_dict(),
            precision=state.precision.state_dict(),
            ema=state.ema.state_dict() if state.ema is not None else {},
        ),
    )
