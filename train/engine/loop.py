"""Training loop of all tasks. A task provides the model, objective and evaluation (clipmill.train.engine.task).

`train` sets up a run, and then repeats: load a batch, call `run_step` (forward, backward, clip, step), log, evaluate,
and save.

All ranks run the loop in lockstep. Before each step, every rank tells the others whether it has a batch and whether it
must stop. An error or signal on one rank therefore ends the loop on all ranks (clipmill.train.engine.failures).

The loop reads the metrics of a step after starting the next step (clipmill.train.device.transfer), or immediately if an
evaluation or a checkpoint follows. If a loss or gradient norm is not finite, the run ends, and no later step is
saved; with fp16, a step with a non-finite gradient norm is only skipped. The run also ends if all gradients of the
first steps are zero.
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

from clipmill.manifests.errors import ClipmillError, Stopped, StorageRefused, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.config.fields import convert_epochs, epoch_remarks, num_steps
from clipmill.train.config.training import TrainingSettings
from clipmill.train.data.batch import PICTURES, TENSORS, to_device
from clipmill.train.data.loader import TrainingSet
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.prefetch import prefetch
from clipmill.train.device.transfer import DeviceEvent, LateMetrics, Scalar, StepGuard
from clipmill.train.distributed.parallel import average_gradients, exchange_buffers, sync_gradients
from clipmill.train.distributed.world import Step, World
from clipmill.train.engine.failures import FailureLog, explain_out_of_memory
from clipmill.train.engine.metrics import (
    BatchIds,
    Consumption,
    MetricsLog,
    PendingStep,
    Throughput,
    require_finite_state,
)
from clipmill.train.engine.state import State, new_state
from clipmill.train.engine.task import Task
from clipmill.train.optim.optimizer import clip_gradients, set_learning_rates, take_step
from clipmill.train.run.checkpoint import all_checkpoints, checkpoint_name, latest_checkpoint
from clipmill.train.run.checkpoint_writer import CheckpointWriter
from clipmill.train.run.folder import RunFolder
from clipmill.train.run.tracking import Progress, Trackers, open_trackers


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
    """Train until step `settings.steps`, starting from the latest checkpoint of `run` if there is one.

    A run that is killed at any time and then resumed ends with the same weights as an uninterrupted run. On CPU, the
    weights are bit-identical.

    Returns:
        The trained model.

    Raises:
        FailedWork: The loss or the weights are not finite, all gradients are zero, too many samples failed, or a
            checkpoint could not be written.
        Stopped: SIGTERM was received; the state has been saved.
        UserError: The checkpoint does not fit the run, a batch is larger than the training set, `settings.best` is not
            a metric of the evaluation, or memory ran out.
    """
    check_batch(settings, samples)
    # The loop counts in steps. Checkpoints store the settings as the user specified them, possibly in epochs.
    step_settings = convert_epochs(settings, epoch_steps(settings, samples))
    state = new_state(task, samples, settings, world=world, device=device)

    # Create the writer before looking up the latest checkpoint: a killed process may have left a complete checkpoint
    # under a temporary name, which the writer publishes.
    writer = CheckpointWriter(
        run.checkpoints,
        world=world,
        keep=settings.keep_checkpoints,
        best=settings.best,
        lower_is_better=settings.best_is_lowest,
    )
    saved_step: int | None = None
    # Broadcast the step, not the path: each rank has a different local folder for a run in a bucket.
    if (latest_step := world.first(lambda: max(all_checkpoints(run.checkpoints), default=None))) is not None:
        path = run.checkpoints / checkpoint_name(latest_step)
        state.restore(path, samples, settings, task=task, world=world)
        saved_step = state.step
        progress.say(f"resuming at step {state.step} of {settings.steps} from {path}")
        writer.prune()

    failures = FailureLog(run, world=world, max_failures=settings.max_failures, cursor=state.cursor)
    trackers = Trackers([])
    if world.is_first:
        trackers = open_trackers(settings, run=run, progress=progress, step=state.step)
    throughput = Throughput(device=device, precision=state.precision.name)
    log = MetricsLog(trackers, throughput, run=run, world=world, num_samples=settings.batch, num_steps=settings.steps)
    guard = StepGuard(device)
    consumption = Consumption(run, world=world, device=device)
    folders = getattr(samples, "folders", None)  # object that counts the samples from each data folder
    # Pipeline stages exchange batches on the CPU, so only the frames are prefetched to the device.
    batches = prefetch(
        samples.batches(max_failures=failures.num_left), device, names=PICTURES if world.stages.size > 1 else TENSORS
    )

    def save(metrics: dict[str, float]) -> None:
        nonlocal saved_step
        if state.step == saved_step:
            return  # this step is already saved, possibly with evaluation metrics
        tensors = state.tensors()
        require_finite_state(tensors, step=state.step, world=world, run=run)
        write_consumption = consumption.measure()

        def write_run_files() -> None:
            write_consumption()
            run.upload_growing_files()

        facts = state.facts(task, samples, settings, world=world, metrics=metrics)
        writer.save(tensors, facts, write_extras=write_run_files)
        saved_step = state.step

    # Whether or not the loop succeeds, join the threads of the loader and the writer, and log the last metrics.
    with (
        resume_hint(run, command=settings.command),
        closing(trackers),
        closing(log),
        closing(writer),
        closing(batches),
        StopSignal().handle() as stop,
    ):
        while state.step < settings.steps:
            # Get the next batch. If a rank has no batch, no rank takes the step: the collectives would never end.
            start_event = log.end or DeviceEvent(device)
            try:
                synced_batch = failures.next_batch(batches, stops=stop.is_received)
            except ClipmillError:
                log.settle()  # a non-finite loss of the previous step is reported first, on all ranks
                if state.step:
                    save({})  # the weights are valid: only data loading failed
                    writer.wait()
                raise
            if synced_batch.stops:
                log.settle()
                save({})
                writer.wait()
                raise Stopped(f"step {state.step} is saved")
            loaded_batch = synced_batch.loaded
            if world.stages.size > 1:
                loaded_batch = loaded_batch._replace(batch=to_device(loaded_batch.batch, device))

            # Forward, backward, clip, step.
            step = next_step(state, samples, settings, world=world)
            with explain_out_of_memory(settings, world.replicas, device=device):
                metrics = run_step(
                    step, state, loaded_batch, step_settings, world=world, throughput=throughput, guard=guard
                )

            # Log the previous step while the device computes this step, so that neither the host nor the device waits.
            if samples.visits_per_epoch:
                metrics["epoch"] = _epoch(state, samples, settings)
            log.settle()
            log.add(
                PendingStep(
                    step=step,
                    metrics=LateMetrics(metrics, device),
                    start_event=start_event,
                    waited_s=synced_batch.waited_s,
                    num_failed=failures.num_failed,
                    batch=BatchIds(loaded_batch.batch["key"], loaded_batch.batch.get("caption_id")),
                    may_skip=state.precision.skips_steps,
                    sources=folders.counts(state.cursor.position) if folders else {},
                )
            )

            # Evaluate and save. First read the metrics of this step, to find out whether the weights are finite.
            is_last = state.step == settings.steps
            interval = num_steps(step_settings.evaluate.every)
            is_evaluated = bool(interval) and (state.step % interval == 0 or is_last)
            is_saved = state.step % step_settings.checkpoint_every == 0 or is_last
            if is_evaluated or is_saved:
                evaluation: dict[str, float] = {}
                batch_metrics: dict[str, list[float]] = {}
                if is_evaluated:
                    log.check()
                    try:
                        evaluation, batch_metrics = _evaluate(task, state, settings, world=world)
                    except StorageRefused:
                        if world.size == 1:  # if there are several ranks, the others may still be evaluating
                            log.settle()
                            save({})
                            writer.wait()
                        raise
                log.settle(evaluation, batch_metrics)
                if is_saved or writer.is_best(evaluation):
                    save(evaluation)
        writer.wait()
    return state.model


def run_step(
    step: Step,
    state: State,
    loaded_batch: LoadedBatch,
    settings: TrainingSettings,
    *,
    world: World,
    throughput: Throughput,
    guard: StepGuard,
) -> dict[str, Scalar]:
    """Take an optimizer step, and return its metrics. The device may still be computing them."""
    lr = set_learning_rates(state.optimizer, step.number, settings, objective=state.objective)
    state.model.zero_grad(set_to_none=True)
    state.objective.zero_grad(set_to_none=True)

    # Forward and backward, microbatch by microbatch. During the last backward pass, the wrapper of the model averages
    # the gradients of the model over the ranks. The objective has no wrapper, so its gradients are averaged here.
    with throughput.count_flops(state.counted_module) if throughput.flops_per_step is None else nullcontext():
        metrics = state.objective.backward(state.trained_module, loaded_batch.batch, step)
    average_gradients(list(state.objective.parameters()), step.world)

    # Clip the gradients by their norm over all ranks and stages, and unscale fp16 gradients in the same operation.
    loss_scale, skips = state.precision.loss_scale, state.precision.skips_steps
    grad_norm = clip_gradients(
        state.parameters(),
        max_norm=settings.max_grad_norm,
        loss_scale=loss_scale,
        stages=world.stages,
        repeated_parameters=[] if state.pipeline is None else state.pipeline.repeated_parameters,
    )

    # Take the step if the loss and the norm are finite. The device decides this, so that the host need not wait.
    state.precision.accepts(grad_norm)
    take_step(state.optimizer, guard.allow(metrics["loss"], grad_norm, skips=skips), skips=skips)
    if state.zero_optimizer is not None:
        state.zero_optimizer.exchange()
    exchange_buffers(state.model, step.world)
    if state.ema is not None:
        state.ema.update(state.model, step=step.number)
    state.objective.after_step(step)
    state.step, state.cursor = step.number, loaded_batch.cursor

    line = {"step": step.number, "loss": metrics["loss"], "lr": lr, "grad_norm": grad_norm, **metrics}
    if skips:
        line |= {"loss_scale": loss_scale, "num_skipped": state.precision.num_skipped}
    return line


def next_step(state: State, samples: TrainingSet, settings: TrainingSettings, *, world: World) -> Step:
    """Describe the next step for the objective."""
    return Step(
        number=state.step + 1,
        epoch=_epoch(state, samples, settings),
        world=world.replicas,
        seed=settings.seed,
        microbatch=settings.microbatch,
        autocast=state.precision.autocast,
        scale=state.precision.scale,
        sync_context=partial(sync_gradients, state.trained_module),
    )


def _epoch(state: State, samples: TrainingSet, settings: TrainingSettings) -> float:
    """Return the number of completed epochs, including fractions; 0 for an endless training set."""
    # Do not use the position of the cursor: the position also counts failed samples of other ranks, and their number
    # depends on where the run was resumed.
    visits = samples.visits_per_epoch
    return state.step * settings.batch / visits if visits else 0.0


def _evaluate(
    task: Task, state: State, settings: TrainingSettings, *, world: World
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Evaluate the current model.

    Returns:
        Scalar metrics, and metrics with one value per batch, both keyed by name.
    """
    with state.evaluation_model() as model, state.precision.autocast():
        metrics = task.evaluate(model, world.replicas)
    batch_metrics = {name: value for name, value in metrics.items() if isinstance(value, list)}
    evaluation = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    if settings.best is not None and settings.best not in evaluation:
        raise UserError(
            f"--best {settings.best} is not a metric of the evaluation",
            hint=f"use one of: {', '.join(evaluation)}",
            flags=("--best",),
        )
    return evaluation, batch_metrics


def check_batch(settings: TrainingSettings, samples: TrainingSet) -> None:
    """Check that a batch is not larger than the training set, so that no batch contains a sample twice.

    Raises:
        UserError: The batch is larger than the training set.
    """
    if samples.num_samples is not None and settings.batch > samples.num_samples:
        raise UserError(
            f"--batch {settings.batch} is larger than the {count_noun(samples.num_samples, 'training sample')}",
            hint=f"use --batch {1 << (samples.num_samples.bit_length() - 1)}, or add data",
            flags=("--batch",),
        )


def describe_epochs(settings: TrainingSettings, samples: TrainingSet) -> Iterator[str]:
    """Yield a line for the log that describes an epoch, if a setting is given in epochs.

    Raises:
        UserError: A setting is given in epochs, but the length of an epoch is unknown.
    """
    steps = epoch_steps(settings, samples)
    if remarks := epoch_remarks(settings, steps):
        unit = "sample" if samples.visits_per_epoch == samples.num_samples else "caption"
        yield f"an epoch has {steps:,.1f} steps, which visit every {unit} once; {', '.join(remarks)}"


def epoch_steps(settings: TrainingSettings, samples: TrainingSet) -> float | None:
    """Return the number of steps in an epoch; None if it is unknown, as for a stream."""
    visits = samples.visits_per_epoch
    return None if visits is None else visits / settings.batch


# SIGTERM and Ctrl-C


class StopSignal:
    """Handler that records SIGTERM, so that the loop can stop between steps.

    The ranks exchange `is_received` before each step (clipmill.train.engine.failures). Once a rank has received the
    signal, all ranks save a checkpoint and stop.

    Attributes:
        is_received: True once the process has received SIGTERM.
    """

    is_received = False

    @contextmanager
    def handle(self) -> Iterator["StopSignal"]:
        """Handle SIGTERM within the block: the signal sets `is_received` and does not end the process."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread can set signal handlers
            return

        def remember(_: int, __: FrameType | None) -> None:
            self.is_received = True

        previous_handler = signal.signal(signal.SIGTERM, remember)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, previous_handler)


@contextmanager
def resume_hint(run: RunFolder, *, command: str) -> Iterator[None]:
    """If Ctrl-C interrupts the block, raise a KeyboardInterrupt whose message is the command that resumes the run."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        step = "the latest checkpoint" if latest_checkpoint(run.checkpoints) else "step 0 (no checkpoint yet)"
        arguments = ("train", *filter(None, [command]), "--resume", "--out", str(run.path))
        raise KeyboardInterrupt(f"{shlex.join(arguments)} continues from {step}") from interrupt
