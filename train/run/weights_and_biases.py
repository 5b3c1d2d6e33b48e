"""Weights & Biases, online or into files that `wandb sync` sends later."""

import secrets
from typing import Any

from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.publish import publish_json
from train.config.files import settings_yaml
from train.config.training import TrainingSettings
from train.run.folder import RunFolder, read_lines
from train.run.run_name import run_name
from train.run.tracking import tagged


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
