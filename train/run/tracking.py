"""Trackers that log the metrics of a run to metrics.jsonl, the console, TensorBoard and Weights & Biases.

`count_batches` shows the progress of an evaluation within a block of `show_batch_counts`.
"""

import math
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from clipmill.manifests.errors import UserError
from clipmill.manifests.monitoring import metrics_registry
from clipmill.manifests.progress import (
    Activity,
    ProgressRate,
    amount_text,
    is_terminal,
    join_parts,
    line_time,
    log_interval,
)
from clipmill.manifests.publish import parse_json, publish_json
from clipmill.manifests.storage.mirrors import show_urls
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.files import settings_yaml
from clipmill.train.config.training import TrackSettings, TrainingSettings
from clipmill.train.run.folder import RunFolder, append_lines, keep_lines, read_lines

if TYPE_CHECKING:
    from clipmill.train.data.outcomes import LoadedBatch


class Progress:
    """Tracker that shows the progress of a run on a status line of the terminal, or as lines on standard output.

    Args:
        what: Name of the activity, such as "embedding".
        unit: Singular noun for the counted items.
        is_quiet: True to show nothing, as on all ranks except the first.
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
        """Start showing progress after `step` of `num_steps` steps."""
        self._num_steps = num_steps
        self._begin_s = self._line_s = time.monotonic()
        self._pace = ProgressRate(step)
        if step < num_steps and not self._is_quiet:
            self._activity = Activity(self._what)
            self._activity.say(amount_text(step, num_steps, self._unit), fraction=step / num_steps)
            self._activity.__enter__()

    def log(self, line: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl. Metrics of an evaluation are always shown, on a separate line."""
        self.show(line["step"], describe(line))
        metrics: dict[str, list[str]] = {}
        for key, value in line.items():
            split, slash, name = key.partition("/")
            if slash:
                metrics.setdefault(split, []).append(f"{name} {value:.4g}")
        if evaluation := "  ".join(f"{split}: {'  '.join(values)}" for split, values in metrics.items()):
            self.say(f"{line_time(sys.stdout)}{self._unit} {line['step']}/{self._num_steps}  {evaluation}")

    def show(self, step: int, text: str) -> None:
        """Show that `step` steps are done. Without a terminal, print only the first, the last and some other steps."""
        self._pace.add(step)
        if self._activity is not None and is_terminal(sys.stderr):
            done = amount_text(step, self._num_steps, self._unit)
            self._activity.say(
                lambda: join_parts(done, self._pace.rate(), self._pace.time_left(self._num_steps), text),
                fraction=step / self._num_steps,
            )
            if sys.stdout.isatty():
                return
        else:
            self.close()
        now_s = time.monotonic()
        if step in (1, self._num_steps) or now_s - self._line_s >= log_interval(now_s - self._begin_s):
            self._line_s = now_s
            parts = (f"{self._unit} {step}/{self._num_steps}", text, self._pace.time_left(self._num_steps))
            self.say(line_time(sys.stdout) + "  ".join(filter(None, parts)))

    def close(self) -> None:
        """Erase the status line of the terminal."""
        if self._activity is not None:
            self._activity.__exit__(None, None, None)
            self._activity = None


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


_ROUNDING = 1e-9  # tolerance for a number of epochs


class Tracker(Protocol):
    """Object that logs the lines of metrics.jsonl, in the order of steps."""

    def log(self, line: dict[str, Any]) -> None:
        """Log the line of a step, with the keys of metrics.jsonl. Keys of evaluation metrics contain a slash."""
        ...

    def close(self) -> None:
        """Write all buffered lines, and release the resources of the tracker."""
        ...


class EpochLoss:
    """Mean loss of each epoch, which is added as `epoch_loss` to the line of the epoch's last step.

    Args:
        lines: Lines of the earlier steps, in order, so that the means of a resumed run cover complete epochs.
    """

    def __init__(self, lines: Iterable[dict[str, Any]] = ()) -> None:
        self._sum, self._num_lines = 0.0, 0
        for line in lines:
            self.complete(line)

    def complete(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the line of the next step, with `epoch_loss` if the integer part of its `epoch` has increased."""
        if "epoch" not in line:
            return line
        self._sum, self._num_lines = self._sum + line["loss"], self._num_lines + 1
        previous_epoch = line["epoch"] * (line["step"] - 1) / line["step"]
        if math.floor(previous_epoch + _ROUNDING) == math.floor(line["epoch"] + _ROUNDING):
            return line
        mean, self._sum, self._num_lines = self._sum / self._num_lines, 0.0, 0
        return {**line, "epoch_loss": mean}


class Trackers:
    """Group of trackers. They are closed in reverse order."""

    def __init__(self, trackers: Sequence[Tracker], epoch_loss: EpochLoss | None = None) -> None:
        self._trackers, self._epoch_loss = trackers, epoch_loss or EpochLoss()

    def log(self, line: dict[str, Any]) -> None:
        line = self._epoch_loss.complete(line)
        for tracker in self._trackers:
            tracker.log(line)

    def close(self) -> None:
        for tracker in reversed(self._trackers):
            tracker.close()


class JsonLines:
    """Writer of metrics.jsonl. It first removes the lines after `step`, because these steps will be repeated."""

    def __init__(self, run: RunFolder, *, step: int) -> None:
        self._path = run.metrics
        keep_lines(run.metrics, lambda line: line["step"] <= step)

    def log(self, line: dict[str, Any]) -> None:
        append_lines(self._path, [line])

    def close(self) -> None:
        pass


def open_trackers(settings: TrainingSettings, *, run: RunFolder, progress: Progress, step: int) -> Trackers:
    """Open the trackers that the settings select, for the steps after `step`. Only rank 0 calls this function.

    A resumed run continues its TensorBoard charts and its W&B run. Each step is logged once.
    """
    # W&B cannot remove steps. The W&B tracker must read the last step before JsonLines shortens metrics.jsonl.
    trackers: list[Tracker] = []
    if settings.track.wandb != "off":
        trackers.append(WeightsAndBiases(settings, run=run, step=step))
    if settings.track.tensorboard:
        trackers.append(TensorBoard(settings, run=run, step=step))
    if (registry := metrics_registry()) is not None:
        from clipmill.train.run.meters import Meters

        trackers.append(Meters(registry, settings))
    lines = JsonLines(run, step=step)
    progress.begin(step, settings.steps)
    return Trackers([lines, progress, *reversed(trackers)], EpochLoss(read_lines(run.metrics)))


_is_counting: ContextVar[bool] = ContextVar("is_counting", default=False)


@contextmanager
def show_batch_counts() -> Iterator[None]:
    """Let `count_batches` show progress within the block. The training loop does not use this function."""
    token = _is_counting.set(True)
    try:
        yield
    finally:
        _is_counting.reset(token)


def count_batches(batches: "Iterable[LoadedBatch]", what: str, *, total: int | None) -> "Iterator[LoadedBatch]":
    """Yield the batches. Within `show_batch_counts`, also count their samples, and show the progress.

    Args:
        what: Name of the activity, such as "embedding".
        total: Number of samples in all batches; None if unknown.
    """
    if not _is_counting.get():
        yield from batches
        return
    with Activity(what) as activity:
        add = activity.adder(total, unit="clip")
        add(0)
        for loaded in batches:
            yield loaded
            add(len(loaded.batch.get("position", ())) + len(loaded.failed))


# Charts of a run in TensorBoard and Weights & Biases, and the results that `train eval` adds to Weights & Biases.

_WANDB_FILE = "wandb.json"
_SPEED = frozenset(
    {"samples_per_s", "step_s", "data_wait_s", "data_wait_share", "gpu_memory_gb", "tflops", "mfu", "num_failed"}
)


def check_tracking(settings: TrackSettings) -> None:
    """Raise a UserError if a package that tracking needs is not installed."""
    for flag, module, is_requested in (
        ("--track.tensorboard", "tensorboard", settings.tensorboard),
        (f"--track.wandb {settings.wandb}", "wandb", settings.wandb != "off"),
    ):
        if is_requested and find_spec(module) is None:
            raise UserError(f"{flag} needs {module}", hint="run pip install 'clipmill[track]'", flags=(flag,))


def tag_metrics(line: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a line, keyed by chart name: train/loss, speed/mfu, samples/FOLDER, SPLIT/METRIC."""
    metrics = {f"samples/{name}": float(count) for name, count in line.get("sources", {}).items()}
    for key, value in line.items():
        if key == "step" or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            continue
        group = "" if "/" in key else "speed/" if key in _SPEED else "train/"
        metrics[group + key] = float(value)
    return metrics


class TensorBoard:
    """Tracker that writes event files to RUN/tensorboard, with the settings and the path of the results page as text.

    A resumed run adds an event file, which tells TensorBoard to hide the later steps of the earlier event files.
    """

    def __init__(self, settings: TrainingSettings, *, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.path / "tensorboard"), purge_step=step + 1)
        if step == 0:
            self._writer.add_text("settings", f"```yaml\n{settings_yaml(settings)}```", 0)
            self._writer.add_text("page", show_urls(str(run.page.resolve())), 0)

    def log(self, line: dict[str, Any]) -> None:
        for tag, value in tag_metrics(line).items():
            self._writer.add_scalar(tag, value, line["step"])
        # Without the flush, a killed run would lose steps that its checkpoint contains.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Tracker that logs to one W&B run, online or offline (for `wandb sync`).

    RUN/wandb.json contains the ID of the W&B run, and the last step that was logged before this tracker was opened.
    W&B cannot remove points, so steps that a resumed run repeats are not sent again; their metrics are the same.
    """

    def __init__(self, settings: TrainingSettings, *, run: RunFolder, step: int) -> None:
        import yaml

        path = run.path / _WANDB_FILE
        wandb_state: dict[str, Any] = (
            parse_json(path.read_bytes()) if path.exists() else {"id": secrets.token_hex(4), "last_step": 0}
        )
        lines = read_lines(run.metrics)
        self._last_step = max(wandb_state["last_step"], step, lines[-1]["step"] if lines else 0)
        publish_json(path, {"id": wandb_state["id"], "last_step": self._last_step})
        facts = run.read_facts()
        self._run = _open_wandb(
            settings.track,
            run,
            run_id=wandb_state["id"],
            name=run_name(run.name, settings, facts),
            config={
                **yaml.safe_load(settings_yaml(settings)),
                **{name: facts[name] for name in ("world_size", "precision") if name in facts},
            },
            allow_val_change=True,  # a resumed run may change some settings
        )
        # Plot these metrics by epoch, so that runs with different batch sizes can be compared.
        for name in ("train/loss", "train/epoch_loss", *(f"{data.name}/*" for data in settings.evaluated_data())):
            self._run.define_metric(name, step_metric="train/epoch")
        self._run.summary["page"] = show_urls(str(run.page.resolve()))

    def log(self, line: dict[str, Any]) -> None:
        if line["step"] > self._last_step:
            from wandb import Histogram

            batches = {name: Histogram(values) for name, values in line.get("batches", {}).items()}
            self._run.log(tag_metrics(line) | batches, step=line["step"])

    def close(self) -> None:
        self._run.finish()


def _open_wandb(track: TrackSettings, run: RunFolder, *, run_id: str, **options: Any) -> Any:
    """Create or continue the W&B run with this ID; raise a UserError if W&B cannot be reached."""
    import wandb

    try:
        return wandb.init(
            project=track.project,
            id=run_id,
            dir=run.path,
            # None stands for the mode in $WANDB_MODE; by default, online.
            mode="offline" if track.wandb == "offline" else None,
            resume="allow",
            settings=wandb.Settings(silent=True),
            **options,
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"W&B cannot be reached: {str(error).splitlines()[0]} (requested by --track.wandb online)",
            hint="run wandb login; or use --track.wandb offline, and run wandb sync later",
            flags=("--track.wandb",),
        ) from error


def add_evaluation(run: RunFolder, track: TrackSettings, result: Mapping[str, Any]) -> None:
    """Add the metrics of a `train eval` result to the summary of the W&B run, keyed by NAME-SPLIT/METRIC.

    Raises:
        UserError: wandb is not installed, or W&B cannot be reached.
    """
    path = run.path / _WANDB_FILE
    if track.wandb == "off" or not path.exists():
        return
    check_tracking(track)
    wandb_run = _open_wandb(track, run, run_id=parse_json(path.read_bytes())["id"])
    name = f"{result['evaluation']}-{result['split']}"
    wandb_run.summary.update({f"{name}/{metric}": value for metric, value in _numbers(result)})
    wandb_run.finish()


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the names and values of the numbers in a result. Lists are omitted, because they hold per-sample values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def run_name(folder: str, settings: TrainingSettings, facts: Mapping[str, Any]) -> str:
    """Return the name of a W&B run in the style of SpaceTimeGPT's run names, with the fields that apply to the task.

    Example: `vatex_ws16_nc10_ss1.0_enl12_dnl12_dhs768_ehs768_nf8_ps16_lr5e-07_bs16_rs42`, with the number of processes,
    captions per clip, fraction of the videos, layers of encoder and decoder, widths of decoder and encoder, frames,
    patch size, learning rate, batch size and seed.

    Args:
        facts: Content of run.json.
    """
    parts: dict[str, Any] = {"ws": facts.get("world_size"), "nc": facts.get("captions_per_clip"), "ss": settings.share}
    decoder = facts.get("decoder", {})
    if isinstance(settings, ClipSettings):
        from clipmill.train.models.dual_encoder import size_of

        video = size_of(settings.model, settings.towers).video
        parts |= {"enl": video.trunk.depth, "dnl": decoder.get("depth"), "dhs": decoder.get("width")}
        parts |= {"ehs": video.trunk.width, "nf": settings.num_frames}
        parts["ps"] = None if settings.reads_latents else video.patch_px
    parts |= {"lr": f"{settings.lr:g}", "bs": settings.batch, "rs": settings.seed}
    return "_".join([folder, *(f"{name}{value}" for name, value in parts.items() if value is not None)])
