"""Weights of a run of this project: its latest checkpoint, and what its settings say of them."""

import math
from dataclasses import fields
from pathlib import Path

import torch

from train.config.model import Towers
from train.distributed.world import World
from train.models.dual_encoder import size_of
from train.models.transformer import NORM_EPS
from train.run.checkpoint import fill, read_metadata, read_table, read_weights
from train.run.folder import RunFolder
from train.weights.converted import (
    LOGIT_SCALE,
    MEANS,
    STDS,
    Converted,
    Facts,
    kind_of_tensors,
    require_finite,
)

_TOWERS = "towers."


def is_run(folder: Path) -> bool:
    """Whether a folder was made by a training command."""
    return RunFolder(folder).settings.is_file()


def read_run(folder: Path) -> tuple[Converted, Facts, str]:
    """The weights of a run (averages where it kept some), what is known of them, and a title.

    Raises:
        UserError: it has no checkpoint, or one that cannot be read.
    """
    path = RunFolder(folder).require_checkpoint()
    facts = read_metadata(path)
    # What the checkpoint was trained with; settings.yaml may have been changed by hand since.
    settings = facts.settings
    tensors = read_weights(path)
    if (log_scale := read_log_scale(path)) is not None:
        tensors[LOGIT_SCALE] = torch.tensor(log_scale)
    towers = {name.removeprefix(_TOWERS): value for name, value in settings.items() if name.startswith(_TOWERS)}
    common = {field.name for field in fields(Towers)}
    size = size_of(settings["model"], Towers(**{name: value for name, value in towers.items() if name in common}))
    kind = kind_of_tensors(tensors) or "clip"
    known = Facts(
        activation=size.video.trunk.activation,
        video_eps=size.video.trunk.norm_eps,
        text_eps=NORM_EPS,
        mean=_triple(settings["init.pixel_mean"]) or MEANS[kind],
        std=_triple(settings["init.pixel_std"]) or STDS[kind],
        video_heads=towers.get("heads") or size.video.trunk.num_heads,
        text_heads=size.text.trunk.num_heads,
        picture_px=settings["size_px"] if settings.get("input", "pixels") == "pixels" else None,
    )
    converted = Converted(tensors=tensors, origins={name: name for name in tensors})
    return converted, known, f"{folder} (step {facts.step} of a run)"


def _triple(values: list[float] | None) -> tuple[float, float, float] | None:
    return None if values is None else (values[0], values[1], values[2])


# What a run's checkpoint knows of its temperature.


_LOG_SCALE, _TEMPERATURE = "objective.logit_scale", "objective.temperature"


def read_log_scale(path: Path) -> float | None:
    """log(1 / temperature) of the loss in a checkpoint; None where it has none, or one for each sample.

    Raises:
        UserError: the checkpoint cannot be read, or the number is not finite.
    """
    table = read_table(path)
    for name in (_LOG_SCALE, _TEMPERATURE):
        if name in table and not table[name]["size"]:
            number = torch.zeros(())
            fill(path, table, {name: number}, world=World())
            require_finite({name: number}, source=path)
            return float(number) if name == _LOG_SCALE else -math.log(float(number))
    return None
