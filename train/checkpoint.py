"""Checkpoints: one file a checkpoint, whole or not there, read without executing anything in it."""

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manifests.errors import UserError
from manifests.publish import published
from train.data.place import LoaderState

CHECKPOINT_FORMAT = 2
# What torch.load raises for a file that wants more than tensors and plain containers.
_Refused: type[Exception] = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]
_NAME = re.compile(r"step_(\d{6,})\.pt")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The whole state of a run after `step` steps.

    Attributes:
        loader: where each rank's batches end.
        precision: of train.precision.Precision.
        ema: averages of the weights by the names in `model`; {} where none are kept.
    """

    task: str
    step: int
    loader: list[LoaderState]
    model: dict[str, Any]
    objective: dict[str, Any]
    optimizer: dict[str, Any]
    precision: dict[str, Any]
    ema: dict[str, Any]

    @property
    def evaluated(self) -> dict[str, Any]:
        """The weights to evaluate: the averages where there are some."""
        return {**self.model, **self.ema}


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Publishes `folder`/step_<step>.pt."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{checkpoint.step:06d}.pt"
    # Not asdict(): that would copy every tensor first.
    content = {"format": CHECKPOINT_FORMAT, **vars(checkpoint)}
    with published(path) as temporary:
        torch.save(content, temporary)
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    found = {int(match[1]): path for path in folder.glob("*.pt") if (match := _NAME.fullmatch(path.name))}
    return found[max(found)] if found else None


def load_checkpoint(path: Path, *, device: torch.device) -> Checkpoint:
    """Reads a checkpoint with its tensors on `device`.

    Raises:
        UserError: the file is damaged, cut short, or of another format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"the checksum of its part {damaged} does not fit")
        content = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(content, dict) or content.pop("format", None) != CHECKPOINT_FORMAT:
            raise ValueError(f"not a checkpoint of format {CHECKPOINT_FORMAT}")
        return Checkpoint(**content)
    except (OSError, RuntimeError, ValueError, TypeError, zipfile.BadZipFile, _Refused) as error:
        raise UserError(
            f"checkpoint {path} cannot be read: {str(error).splitlines()[0]}",
            hint="remove it: the one before it, if there is one, is used instead",
        ) from error
