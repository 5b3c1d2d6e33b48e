"""Time that a training step waits for data, and device time of augmentation.

The waiting time is read from `metrics.jsonl` of real runs of `train`, with the largest batch that fits into GPU memory.
Augmentation and complete steps are timed with CUDA events on a batch that is already on the device.
"""

import gc
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.feeding_data import require_repeated
from benchmarks.gpu.measurements import Result, Setup, Target, one_line
from clipmill.manifests.errors import UserError
from clipmill.train.commands.launch import launch
from clipmill.train.config.clips import Augment, ClipSettings
from clipmill.train.config.files import Provenance
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.device.precision import open_precision
from clipmill.train.distributed.world import Step, World
from clipmill.train.models.attention import open_attention
from clipmill.train.optim.optimizer import make_optimizer
from clipmill.train.registry import find_task
from clipmill.train.run.folder import read_lines
from clipmill.train.tasks.caption.spec import CaptionerSettings, DecoderSettings
from clipmill.train.tasks.caption.task import CaptionTask
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import DualEncoderTask
from clipmill.train.tasks.mae.spec import MaeSettings
from clipmill.train.tasks.mae.task import MaeTask

_GOAL_WAIT, _GOAL_AUGMENT = 0.01, 0.03
_WARM_STEPS = 8
_FLIP_AND_COLOUR = Augment(flip=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
_VIDEOMAE_FINE_TUNING = Augment(flip=0.5, rand_ops=4, rand_magnitude=7.0, erase=0.25)
_GIB = 1024**3


@dataclass(frozen=True)
class Trained:
    """Kind of training.

    Attributes:
        batch_of_80_gib: Batch size that fits into 80 GiB. It is scaled for other GPUs.
        train: Command of `train`.
    """

    name: str
    settings: ClipSettings
    batch_of_80_gib: int
    train: Callable[..., object]
    make_task: Callable[..., Any]


def trainings(setup: Setup, *, data: Path) -> list[Trained]:
    """Return the trainings: ViT-B on 4 frames, VideoMAE on 16 x 4, and a captioner with a TimeSformer."""
    of_all = _settings(setup, data=data)
    gpt2 = DecoderSettings(name="tiny", vocabulary=300) if setup.is_dry_run else DecoderSettings(vocabulary=300)
    frames = (4, 4, 4) if setup.is_dry_run else (4, 16, 8)
    return [
        Trained(
            "dual encoder, ViT-B, T = 4",
            DualEncoderSettings(**of_all, num_frames=frames[0]),
            128,
            partial(launch, find_task("dual-encoder")),
            DualEncoderTask,
        ),
        Trained(
            "MAE, ViT-B, 16 x 4",
            MaeSettings(**of_all, num_frames=frames[1], decoder_depth=1 if setup.is_dry_run else 4),
            128,
            partial(launch, find_task("mae")),
            MaeTask,
        ),
        Trained(
            "captioner, TimeSformer-B, T = 8",
            CaptionerSettings(**of_all, num_frames=frames[2], decoder=gpt2),
            32,
            partial(launch, find_task("caption")),
            CaptionTask,
        ),
    ]


def batch_for(memory_bytes: int, *, of_80_gib: int) -> int:
    """Return a batch size in proportion to the memory, as a multiple of 8."""
    return max(8, int(of_80_gib * memory_bytes / (80 * _GIB)) // 8 * 8)


def wait_row(name: str, lines: Sequence[dict[str, Any]], *, batch: int, workers: int) -> dict[str, Any]:
    """Return a table row of the waiting times in metrics.jsonl, without the first steps, which compile and allocate."""
    steady = lines[min(_WARM_STEPS, len(lines) // 2) :]
    step_s, wait_s = (sum(line[key] for line in steady) for key in ("step_s", "data_wait_s"))
    return {
        "training": name,
        "batch": batch,
        "threads": workers,
        "steps": len(steady),
        "clips/s": round(batch * len(steady) / step_s),
        "step ms": round(1000 * median(line["step_s"] for line in steady), 1),
        "wait share": round(wait_s / step_s, 4),
        "longest wait ms": round(1000 * max(line["data_wait_s"] for line in steady), 1),
    }


def measure_waits(setup: Setup) -> Result:
    """Measure the fraction of a step that waits for data, in runs of the real training loop."""
    data = require_repeated(setup)
    rows: list[dict[str, Any]] = []
    notes = [f"without the first {_WARM_STEPS} steps; the steps in metrics.jsonl do not include checkpoints"]
    targets = []
    for number, training in enumerate(trainings(setup, data=data)):
        out = setup.scratch / f"run-{number}"
        try:
            batch = _train_what_fits(training, setup, out=out)
        except Exception as error:  # noqa: BLE001  the other trainings are measured all the same
            rows.append({"training": training.name, "error": one_line(error)})
            targets.append(Target(what=training.name, figure=None, goal=_GOAL_WAIT, is_at_most=True))
            continue
        lines = read_lines(out / "metrics.jsonl")
        row = wait_row(training.name, lines, batch=batch, workers=training.settings.workers)
        rows.append(row)
        targets.append(Target(what=training.name, figure=row["wait share"], goal=_GOAL_WAIT, is_at_most=True))
    _require_any(rows)
    return Result(rows=rows, notes=notes, targets=targets)


def measure_augmentation(setup: Setup) -> Result:
    """Measure the device time of augmentation, and of a complete step with augmentation."""
    data = require_repeated(setup)
    rows: list[dict[str, Any]] = []
    notes = [
        "medians of CUDA event times. The pass includes colour conversion, normalisation and the random augmentations. "
        "A step includes the pass, the model's forward and backward pass and the optimizer, on a batch that stays on "
        "the device; the difference from a step of a training run is the cost of loading beyond waiting"
    ]
    targets = []
    augments = {"flip, colour": _FLIP_AND_COLOUR, "RandAugment, erasing": _VIDEOMAE_FINE_TUNING, "nothing": Augment()}
    if setup.is_dry_run:
        augments = {"flip, colour": _FLIP_AND_COLOUR}
    for training in trainings(setup, data=data):
        for name, augment in augments.items():
            if isinstance(training.settings, MaeSettings) and augment.erase:
                continue  # this task does not allow it, because erased pixels would be targets
            what = f"{training.name}: {name}"
            try:
                row = _augmentation_row(training, name, augment, setup)
            except Exception as error:  # noqa: BLE001  the others are measured all the same
                row = {"training": what, "error": one_line(error)}
            rows.append(row)
            share = row.get("share of a step")
            targets.append(Target(what=what, figure=share, goal=_GOAL_AUGMENT, is_at_most=True))
            _clear(setup.device)
    _require_any(rows)
    return Result(rows=rows, notes=notes, targets=targets)


def _require_any(rows: Sequence[dict[str, Any]]) -> None:
    if all("error" in row for row in rows):
        raise RuntimeError("; ".join(row["error"] for row in rows))


def _settings(setup: Setup, *, data: Path) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    return {
        "shards": str(data),
        "model": "tiny" if setup.is_dry_run else "b16",
        "size_px": 32 if setup.is_dry_run else 224,
        "batch": 4,
        "steps": 2 if setup.is_dry_run else 40,
        "warmup_steps": 0,
        "workers": 2 if setup.is_dry_run else cores,
        "checkpoint_every": 10**6,
        "device": setup.device.type,
    }


def _train_what_fits(training: Trained, setup: Setup, *, out: Path) -> int:
    """Train with the largest batch size that fits, and return it."""
    batch = _batch(training, setup)
    while True:
        try:
            training.train(replace(training.settings, batch=batch, out=out), resume=False, provenance=Provenance())
        except UserError:
            # The loop converts an out-of-memory error to a UserError that suggests a smaller batch.
            if setup.device.type != "cuda" or batch <= 8:
                raise
        else:
            return batch
        # Continue outside of the except block, in which the exception still references the model.
        batch = max(8, batch // 2)
        shutil.rmtree(out, ignore_errors=True)
        _clear(setup.device)


def _batch(training: Trained, setup: Setup) -> int:
    if setup.device.type != "cuda":
        return training.settings.batch
    memory_bytes = torch.cuda.get_device_properties(setup.device).total_memory
    return batch_for(memory_bytes, of_80_gib=training.batch_of_80_gib)


def _augmentation_row(training: Trained, name: str, augment: Augment, setup: Setup) -> dict[str, Any]:
    batch_size = _batch(training, setup)
    settings = replace(training.settings, augment=augment, batch=batch_size)
    device = setup.device
    attention = open_attention("auto", device_type=device.type, compiles=False)
    precision = open_precision("auto", device_type=device.type)
    task = training.make_task(settings, attention=attention, device=device)
    samples = task.training_set(World())
    torch.manual_seed(0)
    model: nn.Module = task.build_model(samples).to(device)
    objective = task.build_objective(samples, World()).to(device)
    optimizer = make_optimizer(model, objective, settings)
    with closing(samples.batches(position=0, max_failures=0)) as batches:
        batch: Batch = to_device(next(batches).batch, device)
    step = Step(number=1, autocast=precision.autocast)

    def take_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        objective.backward(model, batch, step)
        optimizer.step()

    rounds = 1 if setup.is_dry_run else 10
    pass_ms = device_ms(lambda: task.inputs(batch, is_training=True), device=device, rounds=rounds)
    step_ms = device_ms(take_step, device=device, rounds=rounds)
    return {
        "training": training.name,
        "augmentation": name,
        "batch": batch_size,
        "pass ms": round(pass_ms, 2),
        "step ms": round(step_ms, 1),
        "share of a step": round(pass_ms / step_ms, 4),
    }


def device_ms(work: Callable[[], object], *, device: torch.device, rounds: int) -> float:
    """Return the median time of `work` in ms by CUDA events, after two warm-up rounds; on a CPU, wall time."""
    if device.type != "cuda":
        begin_s = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - begin_s)
    for _ in range(2):
        work()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for begin, end in pairs:
        torch.cuda.synchronize(device)
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return median(begin.elapsed_time(end) for begin, end in pairs)


def _clear(device: torch.device) -> None:
    """Release the memory of a model, for the next model."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
