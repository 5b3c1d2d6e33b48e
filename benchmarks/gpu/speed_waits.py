"""Number of host-device synchronizations per step of each task, counted in the real training loop.

On a GPU torch warns of every synchronizing operation (`torch.cuda.set_sync_debug_mode`), and waits for events and
streams are counted in addition. On a CPU, which never synchronizes, reads of a number from a tensor are counted.
"""

import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.environment import REPOSITORY
from benchmarks.gpu.implementations import release
from benchmarks.gpu.measurements import Result, Setup, Target, one_line
from manifests.caption_table import LABEL_PREFIX
from manifests.store import read_captions
from train.config.training import ClipSettings
from train.distributed.world import Step, World
from train.engine.loop import train
from train.losses.objective import Objective
from train.models.attention import open_attention
from train.run.folder import create_run
from train.run.tracking import Progress
from train.tasks.caption.settings import CaptionerSettings, DecoderSettings
from train.tasks.caption.task import CaptionTask
from train.tasks.classify.settings import ClassifySettings
from train.tasks.classify.task import ClassifyTask
from train.tasks.dual_encoder.settings import DualEncoderSettings
from train.tasks.dual_encoder.task import DualEncoderTask
from train.tasks.mae.settings import MaeSettings
from train.tasks.mae.task import MaeTask

_WARM_STEPS, _STEPS, _DRY_STEPS = 3, 12, 5
_MOST_PLACES = 6
_TINY = {"model": "tiny", "num_frames": 2, "size_px": 32, "batch": 4, "workers": 1, "warmup_steps": 1}


def measure_waits(setup: Setup) -> Result:
    """Return a row for each task and precision."""
    num_steps = _DRY_STEPS if setup.is_dry_run else _STEPS
    precisions = ["fp32"] if setup.is_dry_run else ["bf16", "fp16"]
    rows: list[dict[str, Any]] = []
    places = []
    for name, (make_task, settings) in _tasks(setup).items():
        for precision in precisions:
            chosen = replace(settings, precision=precision, steps=num_steps)  # type: ignore[arg-type]
            try:
                waits = _waits(make_task, chosen, setup)
            except Exception as error:  # noqa: BLE001  the other tasks are counted all the same
                rows.append({"task": name, "precision": precision, "error": one_line(error)})
            else:
                rows.append({"task": name, "precision": precision, **waits.a_step(num_steps)})
                places.append(f"{name}, {precision}: {waits.described(num_steps)}")
            release()
    counted = [row["waits a step"] for row in rows if "waits a step" in row]
    what = "values that the host reads from tensors" if setup.device.type == "cpu" else "synchronising operations"
    return Result(
        rows=rows,
        notes=[
            f"In the training thread, steps {_WARM_STEPS + 1} to {num_steps} of tiny models: {what}. `for events`: "
            "waits for a CUDA event or stream, possibly for work of the previous step.",
            *places,
        ],
        targets=[
            Target(
                what="waits per step, maximum over tasks", figure=max(counted, default=None), goal=1, is_at_most=True
            )
        ],
    )


class Waits:
    """Number of waits by source line, in the counted steps."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.is_counting = False
        self._thread = threading.get_ident()

    def add(self, counts: "Counter[str]") -> None:
        """Count one wait, attributed to the caller in the training thread."""
        if self.is_counting and threading.get_ident() == self._thread:
            counts[_place()] += 1

    def a_step(self, num_steps: int) -> dict[str, float]:
        """Return the numbers of a row."""
        counted = num_steps - _WARM_STEPS
        operations, events = self.operations.total() / counted, self.events.total() / counted
        return {"waits a step": operations + events, "by operations": operations, "for events": events}

    def described(self, num_steps: int) -> str:
        """List the source lines with their number of waits per step."""
        counted = num_steps - _WARM_STEPS
        found = (self.operations + self.events).most_common(_MOST_PLACES)
        return ", ".join(f"{place} x {count / counted:.2g}" for place, count in found) or "none"


@contextmanager
def counted(waits: Waits, device: torch.device) -> Iterator[None]:
    """Context manager that counts waits."""
    with ExitStack() as held:
        if device.type != "cuda":
            held.enter_context(_Reads(waits))
            yield
            return
        held.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")

        def warned(message: Any, *args: Any, **kwargs: Any) -> None:
            if "synchronizing" in str(message):
                waits.add(waits.operations)

        warnings.showwarning = warned
        for owner, name in (
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda, "synchronize"),
        ):
            held.enter_context(mock.patch.object(owner, name, _counting(getattr(owner, name), waits)))
        torch.cuda.set_sync_debug_mode("warn")
        held.callback(torch.cuda.set_sync_debug_mode, "default")
        yield


class _Reads(TorchDispatchMode):
    """Counts the numbers that are read from tensors."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._waits.add(self._waits.operations)
        return func(*args, **(kwargs or {}))


def _counting(wait: Callable[..., Any], waits: Waits) -> Callable[..., Any]:
    def waiting(*args: Any, **kwargs: Any) -> Any:
        waits.add(waits.events)
        return wait(*args, **kwargs)

    return waiting


def _place() -> str:
    """Return the innermost source line of the project on the stack, except in this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY / "train"):
            return f"{path.relative_to(REPOSITORY)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _tasks(setup: Setup) -> dict[str, tuple[Callable[..., Any], ClipSettings]]:
    tiny: dict[str, Any] = {**_TINY, "shards": str(setup.data), "device": setup.device.type}
    captioner = DecoderSettings(name="tiny", vocabulary=300, max_tokens=16)
    return {
        "dual-encoder": (DualEncoderTask, DualEncoderSettings(**tiny)),
        "mae": (MaeTask, MaeSettings(**{**tiny, "stride": 2}, decoder_depth=1, mask_ratio=0.5)),
        "caption": (CaptionTask, CaptionerSettings(**tiny, decoder=captioner)),
        "classify": (ClassifyTask, ClassifySettings(**tiny, label=_label(setup.data))),
    }


def _label(data: Path) -> str:
    """Return a label column of the captions; if there is none, the task's own error explains it."""
    labels = [name for name in read_captions(data).column_names if name.startswith(LABEL_PREFIX)]
    return labels[0].removeprefix(LABEL_PREFIX) if labels else ClassifySettings.label


def _waits(make_task: Callable[..., Any], settings: ClipSettings, setup: Setup) -> Waits:
    device, waits = setup.device, Waits()
    with tempfile.TemporaryDirectory(dir=setup.scratch) as folder, counted(waits, device):
        settings = replace(settings, out=Path(folder) / "run")
        attention = open_attention(settings.attention, device_type=device.type)
        task = make_task(settings, attention=attention, device=device)
        samples = task.training_set(World())
        build = task.build_objective

        def watched(*args: Any, **kwargs: Any) -> Objective:
            objective = build(*args, **kwargs)
            after = objective.after_step

            def after_step(step: Step) -> None:
                after(step)
                # From the end of one step to the end of the last, so that work deferred to the next step is included.
                waits.is_counting = _WARM_STEPS <= step.number < settings.steps

            objective.after_step = after_step  # type: ignore[method-assign]
            return objective

        with mock.patch.object(task, "build_objective", watched):
            run = create_run(settings)
            train(task, samples, settings, run=run, world=World(), device=device, progress=Progress(is_quiet=True))
    return waits
