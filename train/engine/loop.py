"""The training loop of all tasks. Model, objective and evaluation come from the task (clipmill.train.engine.task).

All ranks run it in lockstep. Before each step they exchange whether each has a batch and whether one has to stop; an
error or signal on one rank therefore ends all of them (clipmill.train.engine.failure_log).

The metrics of a step are read after the next step has been started (clipmill.train.device.transfer), or at once for a
checkpoint or an evaluation. A loss or gradient norm that is not finite ends the run, and no later step is saved; so do
first steps without any gradient.
"""

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from types import FrameType

import torch
from torch import nn

from clipmill.manifests.errors import ClipmillError, Stopped, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.config.fields import given_in_epochs, in_steps, num_steps
from clipmill.train.config.training import TrainingSettings
from clipmill.train.data.batch import PICTURES, TENSORS, to_device
from clipmill.train.data.loader import TrainingSet
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.prefetch import prefetch
from clipmill.train.device.transfer import DeviceEvent, LateMetrics, Scalar, StepGuard
from clipmill.train.distributed.parallel import average_gradients, exchange_buffers, sync_gradients
from clipmill.train.distributed.step import Step
from clipmill.train.distributed.world import World
from clipmill.train.engine.failure_log import FailureLog
from clipmill.train.engine.metrics_log import BatchIds, MetricsLog, PendingStep, require_finite_state
from clipmill.train.engine.out_of_memory import explain_out_of_memory
from clipmill.train.engine.state import State, new_state
from clipmill.train.engine.task import Task
from clipmill.train.engine.throughput import Throughput
from clipmill.train.optim.optimizer import clip_gradients, set_learning_rates, take_step
from clipmill.train.run.checkpoint import latest_checkpoint
from clipmill.train.run.checkpoint_writer import CheckpointWriter
from clipmill.train.run.consumption import Consumption
from clipmill.train.run.folder import RunFolder
from clipmill.train.run.tracking import Progress, Trackers, open_trackers

# SIGTERM and Ctrl-C: how a run is stopped, and what it says then.


class StopSignal:
    """SIGTERM, remembered until the loop has finished its step.

    The ranks exchange it before each step (clipmill.train.engine.failure_log): if one has received it, all save a
        checkpoint and
    stop.
    """

    def __init__(self) -> None:
        self.is_received = False

    @contextmanager
    def handled(self) -> Iterator["StopSignal"]:
        """Handle SIGTERM within the block: it sets `is_received` instead of ending the process."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # Python allows only the main thread to set a signal handler
            return

        def remember(_: int, __: FrameType | None) -> None:
            self.is_received = True

        before = signal.signal(signal.SIGTERM, remember)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def resume_hint(run: RunFolder, *, command: str) -> Iterator[None]:
    """Add to a KeyboardInterrupt (Ctrl-C) how to resume the run with `train COMMAND`."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        step = "the latest checkpoint" if latest_checkpoint(run.checkpoints) else "step 0 (no checkpoint yet)"
        words = ("train", *filter(None, [command]), "--resume", "--out", str(run.path))
        raise KeyboardInterrupt(f"{shlex.join(words)} continues from {step}") from interrupt


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
    """Train up to `settings.steps`, from the latest checkpoint of `run` if there is one.

    Killed at any moment and called again, it ends with the weights of an uninterrupted run (bit-identical on a CPU).

    Returns:
        The trained model.

    Raises:
        FailedWork: the loss or the weights are not finite, too many samples failed, or a checkpoint could not be
            written.
        Stopped: SIGTERM was received; the state has been saved.
        UserError: the checkpoint does not fit, or a batch is larger than the set of samples or than memory.
    """
    check_batch(settings, samples)
    counted = in_steps(settings, epoch_steps(settings, samples))
    state = new_state(task, samples, settings, world=world, device=device)
    # Before the latest checkpoint is looked up: the writer renames one that a killed process left complete.
    writer = CheckpointWriter(
        run.checkpoints,
        world=world,
        keep=settings.keep_checkpoints,
        best=settings.best,
        lower_is_better=settings.best_is_lowest,
    )
    saved_step: int | None = None
    if (path := world.first(lambda: latest_checkpoint(run.checkpoints))) is not None:
        state.restore(path, samples, settings, task=task, world=world)
        saved_step = state.step
        progress.say(f"resumes at step {state.step} of {settings.steps} from {path}")
        writer.prune()
    failures = FailureLog(run, world=world, max_failures=settings.max_failures, cursor=state.cursor)
    trackers = Trackers([])
    if world.is_first:
        trackers = open_trackers(settings, run=run, progress=progress, step=state.step)
    # Pipeline stages exchange batches on the CPU: there, only the pictures are sent to the device ahead of the step.
    batches = prefetch(
        samples.batches(max_failures=failures.num_left), device, names=PICTURES if world.stages.size > 1 else TENSORS
    )
    throughput = Throughput(device=device, precision=state.precision.name)
    log = MetricsLog(trackers, throughput, run=run, world=world, num_samples=settings.batch, num_steps=settings.steps)
    soundness = StepGuard(device)
    folders = getattr(samples, "folders", None)
    used = Consumption(run, world=world, device=device)

    def save(metrics: dict[str, float]) -> None:
        nonlocal saved_step
        if state.step == saved_step:
            return  # stopped right after a checkpoint of the same state, which may have metrics
        tensors = state.tensors()
        require_finite_state(tensors, step=state.step, world=world, run=run)
        facts = state.facts(task, samples, settings, world=world, metrics=metrics)
        writer.save(tensors, facts)
        used.record()
        saved_step = state.step

    # However the loop ends: join the threads of loader and writer, and log the last metrics.
    with (
        resume_hint(run, command=settings.command),
        closing(trackers),
        closing(log),
        closing(writer),
        closing(batches),
        StopSignal().handled() as stop,
    ):
        while state.step < settings.steps:
            began = log.end or DeviceEvent(device)
            try:
                agreed = failures.next_batch(batches, stops=stop.is_received)
            except ClipmillError:
                log.settle()  # all ranks raise here; report a non-finite loss of the previous step first
                if state.step:
                    save({})  # the data is at fault, or the way to it, and not the weights
                    writer.wait()
                raise
            if agreed.stops:
                log.settle()
                save({})
                writer.wait()
                raise Stopped(f"step {state.step} is saved")
            step = next_step(state, samples, settings, world=world)
            loaded = _on_device(agreed.loaded, device, world=world)
            with explain_out_of_memory(settings, world.replicas, device=device):
                metrics = run_step(
                    step, state, loaded, counted, world=world, throughput=throughput, soundness=soundness
                )
            passed = {"epoch": _epoch(state, samples, settings)} if samples.visits_per_epoch else {}
            pending = PendingStep(
                step=step,
                metrics=LateMetrics(metrics | passed, device),
                began=began,
                waited_s=agreed.waited_s,
                num_failed=failures.num_failed,
                batch=BatchIds(loaded.batch["key"], loaded.batch.get("caption_id")),
                skips=state.precision.skips_steps,
                sources=folders.counts(state.cursor.position) if folders else {},
            )
            log.settle()
            log.add(pending)
            is_saved = state.step % counted.checkpoint_every == 0 or state.step == settings.steps
            is_evaluated = _is_evaluated(state.step, counted)
            if is_saved or is_evaluated:
                found: dict[str, float] = {}
                of_batches: dict[str, list[float]] = {}
                if is_evaluated:
                    log.check()
                    found, of_batches = _evaluate(task, state, settings, world=world)
                log.settle(found, of_batches)
                if is_saved or writer.is_best(found):
                    save(found)
        writer.wait()
    return state.model


def check_batch(settings: TrainingSettings, samples: TrainingSet) -> None:
    """Raise a UserError if a batch would hold a sample twice."""
    if samples.num_samples is not None and settings.batch > samples.num_samples:
        verb = "is" if samples.num_samples == 1 else "are"
        raise UserError(
            f"--batch is {settings.batch}, and there {verb} {count_noun(samples.num_samples, 'sample')} to train on",
            hint=f"use --batch {1 << (samples.num_samples.bit_length() - 1)}, or more data",
            flags=("--batch",),
        )


def _on_device(loaded: LoadedBatch, device: torch.device, *, world: World) -> LoadedBatch:
    """A batch on the device; what pipeline stages have exchanged is still on the CPU."""
    return loaded if world.stages.size == 1 else loaded._replace(batch=to_device(loaded.batch, device))


def next_step(state: State, samples: TrainingSet, settings: TrainingSettings, *, world: World) -> Step:
    """What an objective knows of the step after those of `state`."""
    return Step(
        number=state.step + 1,
        epoch=_epoch(state, samples, settings),
        world=world.replicas,
        seed=settings.seed,
        microbatch=settings.microbatch,
        autocast=state.precision.autocast,
        scale=state.precision.scale,
        synced=partial(sync_gradients, state.trained),
    )


def run_step(
    step: Step,
    state: State,
    loaded: LoadedBatch,
    settings: TrainingSettings,
    *,
    world: World,
    throughput: Throughput,
    soundness: StepGuard,
) -> dict[str, Scalar]:
    """Take one optimizer step; return its metrics, which the device may not have computed yet."""
    lr = set_learning_rates(state.optimizer, step.number, settings, objective=state.objective)
    state.model.zero_grad(set_to_none=True)
    state.objective.zero_grad(set_to_none=True)
    with throughput.counting(state.counted) if throughput.flops_per_step is None else nullcontext():
        metrics = state.objective.backward(state.trained, loaded.batch, step)
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
    take_step(state.optimizer, soundness.after(metrics["loss"], grad_norm, skips=skips), skips=skips)
    if state.zero is not None:
        state.zero.exchange()
    exchange_buffers(state.model, step.world)
    if state.ema is not None:
        state.ema.update(state.model, step=step.number)
    state.objective.after_step(step)
    state.step, state.cursor = step.number, loaded.cursor
    found = {"step": step.number, "loss": metrics["loss"], "lr": lr, "grad_norm": grad_norm, **metrics}
    if skips:
        found |= {"loss_scale": loss_scale, "num_skipped": state.precision.num_skipped}
    return found


def _is_evaluated(step: int, settings: TrainingSettings) -> bool:
    every = num_steps(settings.evaluate.every)
    return bool(every) and (step % every == 0 or step == settings.steps)


def _evaluate(
    task: Task, state: State, settings: TrainingSettings, *, world: World
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics of the current model, and those of each batch."""
    best = settings.best
    with state.evaluated() as model, state.precision.autocast():
        metrics = task.evaluate(model, world.replicas)
    of_batches = {name: one for name, one in metrics.items() if isinstance(one, list)}
    found = {name: one for name, one in metrics.items() if not isinstance(one, list)}
    if best is not None and best not in found:
        raise UserError(
            f"--best {best} is not a metric of the evaluation", hint=f"it has: {', '.join(found)}", flags=("--best",)
        )
    return found, of_batches


def _epoch(state: State, samples: TrainingSet, settings: TrainingSettings) -> float:
    # Not of the cursor's position: what a rank knows of the others' failures depends on where the run was resumed.
    visits = samples.visits_per_epoch
    return state.step * settings.batch / visits if visits else 0.0


def describe_epochs(settings: TrainingSettings, samples: TrainingSet) -> Iterator[str]:
    """What an epoch is, if settings are given in epochs; raises a UserError if that is unknown."""
    steps = epoch_steps(settings, samples)
    if given := given_in_epochs(settings, steps):
        what = "sample" if samples.visits_per_epoch == samples.num_samples else "caption"
        yield f"an epoch is {steps:,.1f} steps, as many as show every {what} once; {', '.join(given)}"


def epoch_steps(settings: TrainingSettings, samples: TrainingSet) -> float | None:
    """Number of steps in an epoch; None if unknown, as in a stream."""
    visits = samples.visits_per_epoch
    return None if visits is None else visits / settings.batch
