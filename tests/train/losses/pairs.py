"""Pairs to compare, towers to embed them, and objectives in float64, for the tests of losses."""

import math
from typing import cast

import torch
from torch import nn

from clipmill.train.data.batch import Batch
from clipmill.train.distributed.world import World
from clipmill.train.losses.contrastive import (
    AutogradObjective,
    ContrastiveObjective,
    DatasetSize,
    Pairs,
    build_contrast,
)
from clipmill.train.losses.global_losses import SampleTemperature
from clipmill.train.losses.in_batch import info_nce
from clipmill.train.losses.settings import LOSSES, Convention, Loss

WIDTH = 5
NUM_CLIPS, NUM_CAPTIONS = 7, 11  # both numbers are odd, so ranks keep parts of different lengths
NUM_EPOCHS = 8
DATASET = DatasetSize(num_clips=NUM_CLIPS, num_captions=NUM_CAPTIONS, num_epochs=NUM_EPOCHS)
CONVENTIONS: tuple[Convention, ...] = ("paper", "fast_clip")
# Losses whose conventions differ.
CASES: list[tuple[str, Convention]] = [
    (kind, convention)
    for kind, spec in LOSSES.items()
    for convention in CONVENTIONS
    if spec.is_global or kind == "mbcl" or convention == "paper"
]

# In three batches of 6 pairs, some ids return in a later batch, and some occur twice in one batch.
CLIP_IDS = ([0, 1, 2, 3, 4, 5], [6, 5, 4, 3, 2, 1], [0, 1, 0, 3, 6, 1])
CAPTION_IDS = ([0, 1, 2, 3, 4, 5], [10, 9, 8, 3, 2, 1], [7, 7, 2, 3, 4, 7])


class Table(nn.Module):
    """Embeddings of unit length as parameters, whose gradients are the gradients that a loss sends to the towers."""

    def __init__(self, num_pairs: int, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        video = torch.randn(num_pairs, WIDTH, generator=generator, dtype=torch.float64)
        text = video + 1.5 * torch.randn(num_pairs, WIDTH, generator=generator, dtype=torch.float64)
        self.video = nn.Parameter(nn.functional.normalize(video, dim=1))
        self.text = nn.Parameter(nn.functional.normalize(text, dim=1))

    def forward(self, clips: torch.Tensor, captions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings at these indices."""
        return self.video[clips], self.text[captions]


class Towers(nn.Module):
    """Two towers of two layers each, with dropout."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.video, self.text = (
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(dropout), nn.GELU(), nn.Linear(8, WIDTH)).double()
            for _ in range(2)
        )

    def forward(self, clips: torch.Tensor, captions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings of unit length."""
        return nn.functional.normalize(self.video(clips), dim=1), nn.functional.normalize(self.text(captions), dim=1)


def batch_of(number: int) -> Batch:
    """Return batch 0, 1 or 2 for Towers, whose inputs are `latents` and `text`."""
    generator = torch.Generator().manual_seed(number)
    clips = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
    return Batch(
        input="latents",
        clip_id=torch.tensor(CLIP_IDS[number]),
        caption_id=torch.tensor(CAPTION_IDS[number]),
        latents=clips,
        text=clips + 0.5 * noise,
        relevancy=torch.linspace(0.3, 1, 6, dtype=torch.float64),
    )


def own_part(batch: Batch, world: World) -> Batch:
    """Return a rank's part of a batch."""
    share = len(batch["caption_id"]) // world.size
    rows = slice(world.rank * share, (world.rank + 1) * share)
    part = {name: value if name == "input" else value[rows] for name, value in batch.items()}  # type: ignore[index]
    return cast(Batch, part)


def embedded_inputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of Towers."""
    return batch["latents"], batch["text"]


def row_numbers(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of a Table: the indices of all its rows."""
    numbers = torch.arange(len(batch["caption_id"]))
    return numbers, numbers


def settings_of(kind: str, convention: Convention = "paper", **numbers: float) -> Loss:
    """Return settings with a temperature that is a power of two, so that float32 and float64 represent it equally."""
    if "temperature" in LOSSES[kind].settings:
        numbers = {"temperature": 0.125, **numbers}
    return Loss(kind=kind, convention=convention, **numbers)  # type: ignore[arg-type]


def objective_of(settings: Loss, *, table: bool = False, world: World | None = None) -> ContrastiveObjective:
    """Make the objective in float64, with exactly the numbers of the settings."""
    inputs = row_numbers if table else embedded_inputs
    objective = build_contrast(settings, inputs=inputs, dataset=DATASET, world=world or World()).double()
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            if name == "logit_scale":
                parameter.fill_(-math.log(settings.number("temperature")))
            if name == "temperature":
                parameter.fill_(settings.number("temperature"))
    if isinstance(objective, SampleTemperature):
        for side in (objective.clips, objective.captions):
            side.rows[:, 1] = settings.number("temperature")
    return objective


class DefinedInfoNCE(AutogradObjective):
    """InfoNCE, computed from its definition."""

    def value(self, pairs: Pairs) -> torch.Tensor:
        """Return the mean loss over this rank's pairs."""
        return info_nce(pairs, self._settings)


def defined_infonce(*, table: bool = False, world: World | None = None) -> ContrastiveObjective:
    """Make an objective in float64 from the definition of InfoNCE; `objective_of` returns its closed form."""
    settings = settings_of("infonce")
    inputs = row_numbers if table else embedded_inputs
    objective = DefinedInfoNCE(settings, inputs=inputs, dataset=None, world=world or World()).double()
    assert objective.logit_scale is not None
    objective.logit_scale.data.fill_(-math.log(settings.number("temperature")))
    return objective
