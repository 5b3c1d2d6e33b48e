"""Charts of a run in TensorBoard and Weights & Biases (W&B); results of `train eval` are added to W&B."""

import math
import secrets
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import parse_json, publish_json
from clipmill.manifests.storage.mirrors import show_addresses
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.files import settings_yaml
from clipmill.train.config.training import TrackSettings, TrainingSettings
from clipmill.train.run.folder import RunFolder, read_lines

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
            raise UserError(f"{flag} needs {module}", hint="pip install 'clipmill[track]'", flags=(flag,))


def tag_metrics(line: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a line by chart name: train/loss, speed/mfu, samples/FOLDER, VAL/METRIC of evaluations."""
    metrics = {f"samples/{name}": float(count) for name, count in line.get("sources", {}).items()}
    for key, value in line.items():
        if key == "step" or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            continue
        group = "" if "/" in key else "speed/" if key in _SPEED else "train/"
        metrics[group + key] = float(value)
    return metrics


class TensorBoard:
    """Event files in RUN/tensorboard, with the settings and the path of the results page as text.

    A resumed run adds a file, which purges the steps after `step` from earlier files.
    """

    def __init__(self, settings: TrainingSettings, *, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.path / "tensorboard"), purge_step=step + 1)
        if step == 0:
            self._writer.add_text("settings", f"```yaml\n{settings_yaml(settings)}```", 0)
            self._writer.add_text("page", show_addresses(str(run.page.resolve())), 0)

    def log(self, line: dict[str, Any]) -> None:
        for tag, value in tag_metrics(line).items():
            self._writer.add_scalar(tag, value, line["step"])
        # Otherwise a killed run would lose steps that its checkpoint contains.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Tracker that logs to one W&B run, online or offline (for `wandb sync`).

    RUN/wandb.json contains the id of that run and the last step sent.

    W&B cannot remove points. Steps that a resumed run repeats have the same metrics and are not sent again.
    """

    def __init__(self, settings: TrainingSettings, *, run: RunFolder, step: int) -> None:
        import yaml

        path = run.path / _WANDB_FILE
        known: dict[str, Any] = (
            parse_json(path.read_bytes()) if path.exists() else {"id": secrets.token_hex(4), "last_step": 0}
        )
        lines = read_lines(run.metrics)
        self._last_step = max(known["last_step"], step, lines[-1]["step"] if lines else 0)
        publish_json(path, {"id": known["id"], "last_step": self._last_step})
        facts = run.read_facts()
        self._run = _open_wandb(
            settings.track,
            run,
            run_id=known["id"],
            name=run_name(run.name, settings, facts),
            config={
                **yaml.safe_load(settings_yaml(settings)),
                **{name: facts[name] for name in ("world_size", "precision") if name in facts},
            },
            allow_val_change=True,  # a resumed run may change some settings
        )
        # Runs with different batch sizes are compared by epoch.
        for name in ("train/loss", "train/epoch_loss", *(f"{data.name}/*" for data in settings.evaluated_data())):
            self._run.define_metric(name, step_metric="train/epoch")
        self._run.summary["page"] = show_addresses(str(run.page.resolve()))

    def log(self, line: dict[str, Any]) -> None:
        if line["step"] > self._last_step:
            from wandb import Histogram

            batches = {name: Histogram(values) for name, values in line.get("batches", {}).items()}
            self._run.log(tag_metrics(line) | batches, step=line["step"])

    def close(self) -> None:
        self._run.finish()


def _open_wandb(track: TrackSettings, run: RunFolder, *, run_id: str, **more: Any) -> Any:
    """Open or continue a W&B run of this ID; raise a UserError if W&B cannot be reached."""
    import wandb

    try:
        return wandb.init(
            project=track.project,
            id=run_id,
            dir=run.path,
            # None: as $WANDB_MODE specifies; by default, online.
            mode="offline" if track.wandb == "offline" else None,
            resume="allow",
            settings=wandb.Settings(silent=True),
            **more,
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"W&B cannot be reached: {str(error).splitlines()[0]} (requested by --track.wandb online)",
            hint="wandb login, or --track.wandb offline and wandb sync later",
            flags=("--track.wandb",),
        ) from error


def add_evaluation(run: RunFolder, track: TrackSettings, result: Mapping[str, Any]) -> None:
    """Add the numbers of a result of `train eval` to the W&B run of its training, as NAME-SPLIT/METRIC in its summary.

    Raises:
        UserError: wandb is not installed, or W&B cannot be reached.
    """
    path = run.path / _WANDB_FILE
    if track.wandb == "off" or not path.exists():
        return
    check_tracking(track)
    opened = _open_wandb(track, run, run_id=parse_json(path.read_bytes())["id"])
    name = f"{result['evaluation']}-{result['split']}"
    opened.summary.update({f"{name}/{metric}": value for metric, value in _numbers(result)})
    opened.finish()


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the names and values of the numbers in a result, without lists, which hold values of single samples."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def run_name(folder: str, settings: TrainingSettings, facts: Mapping[str, Any]) -> str:
    """Return the name of a W&B run, made of the fields of SpaceTimeGPT's run names that the task has.

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
