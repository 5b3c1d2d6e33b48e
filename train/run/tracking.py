"""Experiment tracking behind one interface: metrics.jsonl, the console, TensorBoard, Weights & Biases."""

import math
import os
import secrets
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from clipmill.manifests.errors import UserError
from clipmill.manifests.json_text import parse_json
from clipmill.manifests.progress import Activity, ProgressRate, amount_text, is_terminal, joined, log_interval
from clipmill.manifests.publish import publish_json
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.files import settings_yaml
from clipmill.train.config.training import TrackSettings, TrainingSettings
from clipmill.train.run.folder import RunFolder, append_lines, keep_lines, read_lines


class Progress:
    """A tracker that shows the steps of a run: on a terminal in its line, in a log by lines on standard output.

    Args:
        what: a participle, such as "embedding".
        unit: what is counted, singular.
        is_quiet: show nothing, as on all ranks but the first.
    """

    def __init__(self, what: str = "training", *, unit: str = "step", is_quiet: bool = False) -> None:
        self._what, self._unit, self._is_quiet = what, unit, is_quiet
        self._begin_s = self._line_s = 0.0
        self._num_steps = 0
        self._pace = ProgressRate()
        self._activity: Activity | None = None

    def say(self, text: str) -> None:
        """Print a line."""
        if self._is_quiet:
            return
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        except BrokenPipeError:  # continue without output if the reader is gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def begin(self, step: int, num_steps: int) -> None:
        """Begin with step `step` + 1 of `num_steps`."""
        self._num_steps = num_steps
        self._begin_s = self._line_s = time.monotonic()
        self._pace = ProgressRate(step)
        if step < num_steps and not self._is_quiet:
            self._activity = Activity(self._what)
            self._activity.say(amount_text(step, num_steps, f"{self._unit}s"), share=step / num_steps)
            self._activity.__enter__()

    def log(self, line: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl; evaluation metrics are always shown, on a separate line."""
        self.show(line["step"], describe(line))
        if found := evaluated(line):
            self.say(f"{self._place(line['step'])}  {found}")

    def show(self, step: int, text: str) -> None:
        """Show that `step` steps are done; in a log only the first, the last, and some at growing intervals."""
        self._pace.add(step)
        if self._activity is not None and is_terminal(sys.stderr):
            done = amount_text(step, self._num_steps, f"{self._unit}s")
            self._activity.say(
                lambda: joined(done, self._pace.rate(), self._pace.left(self._num_steps), text),
                share=step / self._num_steps,
            )
            if sys.stdout.isatty():
                return
        else:
            self.close()
        now_s = time.monotonic()
        if step in (1, self._num_steps) or now_s - self._line_s >= log_interval(now_s - self._begin_s):
            self._line_s = now_s
            self.say("  ".join(filter(None, (self._place(step), text, self._pace.left(self._num_steps)))))

    def _place(self, step: int) -> str:
        return f"{self._unit} {step}/{self._num_steps}"

    def close(self) -> None:
        """Erase the line of a terminal."""
        if self._activity is not None:
            self._activity.__exit__(None, None, None)
            self._activity = None


def evaluated(line: dict[str, Any]) -> str:
    """Format the evaluation metrics of a line by split; empty if there are none."""
    metrics: dict[str, list[str]] = {}
    for key, value in line.items():
        split, slash, name = key.partition("/")
        if slash:
            metrics.setdefault(split, []).append(f"{name} {value:.4g}")
    return "  ".join(f"{split}: {'  '.join(its)}" for split, its in metrics.items())


def describe(line: dict[str, Any]) -> str:
    """Format the training metrics shown on the console."""
    text = (
        f"loss {line['loss']:.4f}  lr {line['lr']:.2e}  {line['samples_per_s']:.1f} samples/s"
        f"  data wait {line['data_wait_s'] / line['step_s']:.0%}"
    )
    if "gpu_memory_gb" in line:
        text += f"  {line['gpu_memory_gb']:.1f} GB"
    if "mfu" in line:
        text += f"  MFU {line['mfu']:.0%}"
    return f"{text}  {line['num_failed']} failed" if line["num_failed"] else text


_SPEED = frozenset(
    {"samples_per_s", "step_s", "data_wait_s", "data_wait_share", "gpu_memory_gb", "tflops", "mfu", "num_failed"}
)


class Tracker(Protocol):
    """Receives the lines of metrics.jsonl in the order of steps."""

    def log(self, line: dict[str, Any]) -> None:
        """Log the line of a step; keys as in metrics.jsonl, those of evaluations with a slash."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class Trackers:
    """Several trackers, closed in reverse order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, line: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(line)

    def close(self) -> None:
        for tracker in reversed(self._trackers):
            tracker.close()


class JsonLines:
    """Writes metrics.jsonl, after dropping lines of steps after `step`, which will be repeated."""

    def __init__(self, run: RunFolder, *, step: int) -> None:
        self._path = run.metrics
        keep_lines(run.metrics, lambda line: line["step"] <= step)

    def log(self, line: dict[str, Any]) -> None:
        append_lines(self._path, [line])

    def close(self) -> None:
        pass


def check_tracking(settings: TrackSettings) -> None:
    """Raise a UserError if a package that tracking needs is not installed."""
    for flag, module, asked in (
        ("--track.tensorboard", "tensorboard", settings.tensorboard),
        (f"--track.wandb {settings.wandb}", "wandb", settings.wandb != "off"),
    ):
        if asked and find_spec(module) is None:
            raise UserError(f"{flag} needs {module}", hint="pip install 'clipmill[track]'")


def open_trackers(settings: TrainingSettings, *, run: RunFolder, progress: Progress, step: int) -> Trackers:
    """Open the trackers that `settings` select, for the steps after `step`; called on rank 0 only.

    A resumed run continues its event files and its W&B run and logs each step once.
    """
    # W&B first: it keeps all steps, and the last line of metrics.jsonl, which is dropped next, says what it has got.
    trackers: list[Tracker] = []
    if settings.track.wandb != "off":
        trackers.append(WeightsAndBiases(settings, run=run, step=step))
    if settings.track.tensorboard:
        trackers.append(TensorBoard(settings, run=run, step=step))
    lines = JsonLines(run, step=step)
    progress.begin(step, settings.steps)
    return Trackers([lines, progress, *reversed(trackers)])


def tagged(line: dict[str, Any]) -> dict[str, float]:
    """The metrics of a line by chart name: train/loss, speed/mfu, samples/FOLDER, those of evaluations as they are."""
    found = {f"samples/{name}": float(count) for name, count in line.get("sources", {}).items()}
    for key, value in line.items():
        if key == "step" or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            continue
        group = "" if "/" in key else "speed/" if key in _SPEED else "train/"
        found[group + key] = float(value)
    return found


class TensorBoard:
    """Writes event files to RUN/tensorboard, with the settings and the path of the results page as texts.

    A resumed run adds a file, which purges steps after `step` from the earlier ones.
    """

    def __init__(self, settings: TrainingSettings, *, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.path / "tensorboard"), purge_step=step + 1)
        if step == 0:
            self._writer.add_text("settings", f"```yaml\n{settings_yaml(settings)}```", 0)
            self._writer.add_text("page", str(run.page.resolve()), 0)

    def log(self, line: dict[str, Any]) -> None:
        for tag, value in tagged(line).items():
            self._writer.add_scalar(tag, value, line["step"])
        # Otherwise a killed run would lose steps that its checkpoint contains.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to one W&B run, online or offline for `wandb sync`. RUN/wandb.json has its id and the last step sent.

    W&B cannot remove points. Steps that a resumed run repeats have the same metrics and are not sent again.
    """

    def __init__(self, settings: TrainingSettings, *, run: RunFolder, step: int) -> None:
        import wandb
        import yaml

        path = run.path / "wandb.json"
        known: dict[str, Any] = (
            parse_json(path.read_bytes()) if path.exists() else {"id": secrets.token_hex(4), "last_step": 0}
        )
        lines = read_lines(run.metrics)
        self._last_step = max(known["last_step"], step, lines[-1]["step"] if lines else 0)
        publish_json(path, {"id": known["id"], "last_step": self._last_step})
        try:
            self._run = wandb.init(
                project=settings.track.project,
                id=known["id"],
                name=run_name(run.path.resolve().name, settings),
                dir=run.path,
                config=yaml.safe_load(settings_yaml(settings)),
                allow_val_change=True,  # settings that a resumed run may change
                # None: as $WANDB_MODE says, by default online.
                mode="offline" if settings.track.wandb == "offline" else None,
                resume="allow",
                settings=wandb.Settings(silent=True),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"W&B cannot be reached: {str(error).splitlines()[0]} (asked for by --track.wandb online)",
                hint="wandb login, or --track.wandb offline and wandb sync later",
            ) from error
        # Evaluations of runs with different batch sizes are compared by epoch.
        for one in settings.evaluated():
            self._run.define_metric(f"{one.name}/*", step_metric="train/epoch")
        self._run.summary["page"] = str(run.page.resolve())

    def log(self, line: dict[str, Any]) -> None:
        if line["step"] > self._last_step:
            self._run.log(tagged(line), step=line["step"])

    def close(self) -> None:
        self._run.finish()


def run_name(folder: str, settings: TrainingSettings) -> str:
    """Name of a W&B run, such as `captions_b16_nf8_px224_lr5e-07_bs6_st433200_rs42`."""
    parts = [folder]
    if isinstance(settings, ClipSettings):
        parts += [settings.model, f"nf{settings.num_frames}", f"px{settings.size_px}"]
    parts += [f"lr{settings.lr:g}", f"bs{settings.batch}", f"st{settings.steps}", f"rs{settings.seed}"]
    return "_".join(parts)
