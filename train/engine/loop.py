"""The one training loop. What is trained, and towards what, is the task's business (train.engine.task).

All ranks run it in step. Before each step they agree that everyone has a batch and nobody is to stop, and then take it
together: whatever ends one of them ends all (train.engine.agreement).

A step's numbers are read when the next step has been begun (train.device.transfer), and at once where something
depends on them.
A number that is not finite ends the run before anything is made of the steps from its own on.
"""

import shlex
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from manifests.errors import ClipmillError, Stopped, UserError
from train.config.training import TrainingSettings
from train.data.batch import PICTURES, TENSORS, to_device
from train.data.loader import TrainingSet
from train.data.outcomes import LoadedBatch
from train.data.prefetch import prefetch
from train.device.transfer import DeviceEvent, LateMetrics, Scalar, StepGuard
from train.distributed.parallel import average_gradients, synced
from train.distributed.step import Step
from train.distributed.world import World
from train.engine.agreement import FailureLog, Shown, StopSignal, require_finite_state, with_resume_hint
from train.engine.journal import Journal, Taken
from train.engine.memory import explained
from train.engine.state import State, new_state
from train.engine.task import Task
from train.engine.throughput import Throughput
from train.optim.optimizer import clip_gradients, set_learning_rates, take_step
from train.run.checkpoint import latest_checkpoint
from train.run.checkpoint_writer import CheckpointWriter
from train.run.folder import RunFolder
from train.run.progress import Progress
from train.run.tracking import Trackers, open_trackers


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
        FailedWork: the loss or the weights are not finite, too many samples failed, or a checkpoint could not be
            written.
        Stopped: SIGTERM came; the state has been saved.
        UserError: the checkpoint does not fit, or a batch is larger than the set of samples or than memory.
    """
    check_batch(settings, samples)
    state = new_state(task, samples, settings, world=world, device=device)
    # Before the latest checkpoint is looked for: the writer adopts one that a killed process did not get to rename.
    writer = CheckpointWriter(run.checkpoints, world=world, keep=settings.keep_checkpoints, best=settings.best)
    saved_step: int | None = None
    if (path := world.first(lambda: latest_checkpoint(run.checkpoints))) is not None:
        state.restore(path, samples, settings, task=task, world=world)
        saved_step = state.step
        writer.prune()
    failures = FailureLog(run, world=world, max_failures=settings.max_failures, cursor=state.cursor)
    trackers = Trackers([])
    if world.is_first:
        trackers = open_trackers(settings, run=run, progress=progress, step=state.step)
    # What a pipeline's stages tell one another must not come from a device; there, only pictures go ahead of the step.
    batches = prefetch(
        samples.batches(max_failures=failures.num_left), device, names=PICTURES if world.stages.size > 1 else TENSORS
    )
    throughput = Throughput(device=device, precision=state.precision.name)
    journal = Journal(trackers, throughput, run=run, world=world, num_samples=settings.batch)
    soundness = StepGuard(device)

    def save(numbers: dict[str, float]) -> None:
        nonlocal saved_step
        if state.step == saved_step:
            return  # told to stop right after a checkpoint, which has the same state, and perhaps numbers
        tensors = state.tensors()
        require_finite_state(tensors, step=state.step, world=world, run=run)
        facts = state.facts(task, samples, settings, world=world, numbers=numbers)
        writer.save(tensors, facts)
        saved_step = state.step

    state.trained.train()
    # However it ends, the threads of loader and writer end, and the numbers are kept.
    with (
        with_resume_hint(run),
        closing(trackers),
        closing(journal),
        closing(writer),
        closing(batches),
        StopSignal().installed() as stop,
    ):
        while state.step < settings.steps:
            began = journal.end or DeviceEvent(device)
            try:
                agreed = failures.next_batch(batches, stops=stop.is_set)
            except ClipmillError:
                journal.settle()  # all ranks are here: a bad number came before what ends them now
                raise
            if agreed.stops:
                journal.settle()
                save({})
                writer.wait()
                raise Stopped(f"step {state.step} is saved, go on with --resume --out {shlex.quote(str(run.path))}")
            step = Step(
                number=state.step + 1,
                epoch=_epoch(state, samples),
                world=world.replicas,
                seed=settings.seed,
                microbatch=settings.microbatch,
                autocast=state.precision.autocast,
                scale=state.precision.scale,
                synced=partial(synced, state.trained),
            )
            loaded = _on_device(agreed.loaded, device, world=world)
            with explained(settings, world.replicas, device=device):
                numbers = _take(step, state, loaded, settings, world=world, throughput=throughput, soundness=soundness)
            passed = {"epoch": _epoch(state, samples)} if samples.num_samples else {}
            taken = Taken(
                step=step,
                numbers=LateMetrics(numbers | passed, device),
                began=began,
                waited_s=agreed.waited_s,
                num_failed=failures.num_failed,
                shown=Shown(loaded.batch["key"], loaded.batch.get("caption_id")),
                skips=state.precision.skips_steps,
            )
            journal.settle()
            journal.add(taken)
            is_saved = state.step % settings.checkpoint_every == 0 or state.step == settings.steps
            is_evaluated = _is_evaluated(state.step, settings)
            if is_saved or is_evaluated:
                found = {}
                if is_evaluated:
                    journal.check()
                    found = _evaluate(task, state, settings, world=world)
                journal.settle(found)
                if is_saved or writer.is_best(found):
                    save(found)
        writer.wait()
    return state.model


def check_batch(settings: TrainingSettings, samples: TrainingSet) -> None:
    """Raises a UserError where a batch would hold a sample twice."""
    if samples.num_samples is not None and settings.batch > samples.num_samples:
        raise UserError(
            f"--batch is {settings.batch}, and there are {samples.num_samples} samples to train on",
            hint="use a smaller --batch, or more data",
        )


def _on_device(loaded: LoadedBatch, device: torch.device, *, world: World) -> LoadedBatch:
    """A batch whose tensors are all there; those that the stages of a pipeline were told are still on the CPU."""
    return loaded if world.stages.size == 1 else replace(loaded, batch=to_device(loaded.batch, device))


def _take(
    step: Step,
    state: State,
    loaded: LoadedBatch,
    settings: TrainingSettings,
    *,
    world: World,
    throughput: Throughput,
    soundness: StepGuard,
) -> dict[str, Scalar]:
    """One step of the optimizer: from a batch to new weights; the step's numbers, which the device may not have yet."""
    lr = set_learning_rates(state.optimizer, step.number, settings, objective=state.objective)
    state.model.zero_grad(set_to_none=True)
    state.objective.zero_grad(set_to_none=True)
    with throughput.counting(state.counted) if throughput.flops_per_step is None else nullcontext():
        numbers = state.objective.backward(state.trained, loaded.batch, step)
    average_gradients(list(state.objective.parameters()), step.world)
    loss_scale = state.precision.loss_scale
    grad_norm = clip_gradients(
        state.parameters(),
        max_norm=settings.max_grad_norm,
        loss_scale=loss_scale,
        stages=world.stages,
        repeated=state.repeated(),
    )
    skips = state.precision.skips_steps
    state.precision.accepts(grad_norm)
    take_step(state.optimizer, soundness.after(numbers["loss"], grad_norm, skips=skips), skips=skips)
    if state.zero is not None:
        state.zero.exchange()
    if state.ema is not None:
        state.ema.update(state.model, step=step.number)
    state.objective.after_step(step)
    state.step, state.cursor = step.number, loaded.cursor
    found = {"step": step.number, "loss": numbers["loss"], "lr": lr, "grad_norm": grad_norm, **numbers}
    if skips:
        found |= {"loss_scale": loss_scale, "num_skipped": state.precision.num_skipped}
    return found


def _is_evaluated(step: int, settings: TrainingSettings) -> bool:
    every = settings.evaluate.every
    return bool(every) and (step % every == 0 or step == settings.steps)


def _evaluate(task: Task, state: State, settings: TrainingSettings, *, world: World) -> dict[str, float]:
    """The numbers of an evaluation of the model as it is."""
    best = settings.best
    with state.evaluated() as model, state.precision.autocast():
        found = task.evaluate(model, world.replicas)
    if best is not None and best not in found:
        raise UserError(f"--best {best} is no number of the evaluation", hint=f"it gives: {', '.join(found)}")
    return found


def _epoch(state: State, samples: TrainingSet) -> float:
    return state.cursor.position / samples.num_samples if samples.num_samples else 0.0
