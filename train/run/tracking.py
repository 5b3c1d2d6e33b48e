"""All who get the numbers of a run, behind one interface: metrics.jsonl, the console, TensorBoard, Weights & Biases."""

import math
import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.publish import publish_json
from train.config.files import settings_yaml
from train.config.machine import TrackSettings
from train.config.training import ClipSettings, TrainingSettings
from train.run.folder import RunFolder, append_lines, keep_lines, read_lines
from train.run.progress import Progress

_SPEED = frozenset(
    {"samples_per_s", "step_s", "data_wait_s", "data_wait_share", "gpu_memory_gb", "tflops", "mfu", "num_failed"}
)


class Tracker(Protocol):
    """One who gets the lines of metrics.jsonl, in the order of steps."""

    def log(self, line: dict[str, Any]) -> None:
        """Takes the line of a step; keys as in metrics.jsonl, with a slash where they name an evaluation."""
        ...

    def close(self) -> None:
        """Writes what is not yet written; nothing follows."""
        ...


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, line: dict[str, Any]) -> None:
        """Gives everyone the line of a step."""
        for tracker in self._trackers:
            tracker.log(line)

    def close(self) -> None:
        """Closes all, the last one first."""
        for tracker in reversed(self._trackers):
            tracker.close()


class JsonLines:
    """metrics.jsonl; what it has of later steps than `step`, which are taken once more, is dropped."""

    def __init__(self, run: RunFolder, *, step: int) -> None:
        self._path = run.metrics
        keep_lines(run.metrics, lambda line: line["step"] <= step)

    def log(self, line: dict[str, Any]) -> None:
        """Appends the line."""
        append_lines(self._path, [line])

    def close(self) -> None:
        """Every line is in the file already."""


class Console:
    """A bar or plain lines (train.run.progress)."""

    def __init__(self, progress: Progress, *, step: int, num_steps: int) -> None:
        self._progress = progress
        progress.begin(step, num_steps)

    def log(self, line: dict[str, Any]) -> None:
        """Shows the line, where it is time for one."""
        self._progress.show(line)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._progress.end()


def check_tracking(settings: TrackSettings) -> None:
    """Looks for the packages that tracking needs, before anything is made.

    Raises:
        UserError: one is missing.
    """
    for flag, module, asked in (
        ("--track.tensorboard", "tensorboard", settings.tensorboard),
        (f"--track.wandb {settings.wandb}", "wandb", settings.wandb != "off"),
    ):
        if asked and find_spec(module) is None:
            raise UserError(f"{flag} needs {module}", hint="pip install 'clipmill[track]'")


def open_trackers(settings: TrainingSettings, *, run: RunFolder, progress: Progress, step: int) -> Trackers:
    """Everyone that `settings` name, for the steps after `step`; of several ranks the first one calls it.

    A run that goes on from a checkpoint has each step once, in the event files and the W&B run that it began with.
    """
    # Before metrics.jsonl is cut: its last line tells what W&B, which forgets nothing, has been told.
    trackers: list[Tracker] = []
    if settings.track.wandb != "off":
        trackers.append(WeightsAndBiases(settings, run=run, step=step))
    if settings.track.tensorboard:
        trackers.append(TensorBoard(settings, run=run, step=step))
    return Trackers(
        [JsonLines(run, step=step), Console(progress, step=step, num_steps=settings.steps), *reversed(trackers)]
    )


def tagged(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by the names that charts have: train/loss, speed/mfu, and those of evaluations."""
    found = {}
    for key, value in line.items():
        if key == "step" or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            continue
        room = "" if "/" in key else "speed/" if key in _SPEED else "train/"
        found[room + key] = float(value)
    return found


# TensorBoard's event files.


class TensorBoard:
    """RUN/tensorboard: curves, and the settings and the place of the results page as texts.

    A run that is resumed writes a further file, which says that what others have of later steps than `step` is void.
    """

    def __init__(self, settings: TrainingSettings, *, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.path / "tensorboard"), purge_step=step + 1)
        if step == 0:
            self._writer.add_text("settings", f"```yaml\n{settings_yaml(settings)}```", 0)
            self._writer.add_text("page", str(run.page.resolve()), 0)

    def log(self, line: dict[str, Any]) -> None:
        """Writes a point for each number."""
        for tag, value in tagged(line).items():
            self._writer.add_scalar(tag, value, line["step"])
        # Else a run that is killed loses steps that its checkpoint has.
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


# Weights & Biases, online or into files that `wandb sync` sends later.


class WeightsAndBiases:
    """One W&B run for all of a run's life; RUN/wandb.json has its id and the last step that it may have.

    W&B cannot take points back. Steps that a resumed run takes once more have the numbers that they had: they are
    not sent again.
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
                # Of what a resumed run may change, the newest holds.
                allow_val_change=True,
                # Else $WANDB_MODE decides, and online where it is not set.
                mode="offline" if settings.track.wandb == "offline" else None,
                resume="allow",
                settings=wandb.Settings(silent=True),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"W&B cannot be reached: {str(error).splitlines()[0]} (asked for by --track.wandb online)",
                hint="wandb login, or --track.wandb offline and wandb sync later",
            ) from error
        # Evaluations are compared by how much was seen, whatever the batch.
        self._run.define_metric(f"{settings.evaluate.split}/*", step_metric="train/epoch")
        self._run.summary["page"] = str(run.page.resolve())

    def log(self, line: dict[str, Any]) -> None:
        """Sends the numbers of a step that has not been sent."""
        if line["step"] > self._last_step:
            self._run.log(tagged(line), step=line["step"])

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()


# What a run is called among others: the name of its folder, and the settings that runs are told apart by.


def run_name(folder: str, settings: TrainingSettings) -> str:
    """As `captions_b16_nf8_px224_lr5e-07_bs6_st433200_rs42`: model, frames, size, rate, batch, steps, seed."""
    parts = [folder]
    if isinstance(settings, ClipSettings):
        parts += [settings.model, f"nf{settings.num_frames}", f"px{settings.size_px}"]
    parts += [f"lr{settings.lr:g}", f"bs{settings.batch}", f"st{settings.steps}", f"rs{settings.seed}"]
    return "_".join(parts)
