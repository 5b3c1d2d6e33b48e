"""The evaluation that is made while a model is trained, by all ranks together."""

from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from manifests.errors import UserError
from train.config.evaluation import DualEncoderEvaluation
from train.data.loader import TrainingSet
from train.data.remote.folder import open_data_folder
from train.data.streams.tars import names_tars
from train.distributed.world import World
from train.evaluation.embeddings import TakesBatches, embed_all, embed_texts, gathered
from train.evaluation.scoring import Scorer, make_scorer
from train.tasks.dual_encoder.settings import DualEncoderSettings


class EmbedsTexts(Protocol):
    """A model with a text tower of its own."""

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        """Token ids [B, L] to embeddings [B, E] of unit length."""
        ...


class LoopEvaluation:
    """Evaluates a model again and again on the same samples.

    Args:
        samples: this rank's part of the split.

    Raises:
        UserError: the split cannot be evaluated by this protocol.
    """

    def __init__(
        self, task: TakesBatches, samples: TrainingSet, settings: DualEncoderSettings, *, device: torch.device
    ) -> None:
        self._task, self._samples, self._device = task, samples, device
        self._split = settings.evaluate.split
        if samples.num_samples is None:
            raise UserError(
                "tars cannot be evaluated while they are trained on: they know no splits",
                hint="leave out --evaluate.every, and use train eval with --shards afterwards",
            )
        self._every = every_for(samples.num_samples, at_most=settings.evaluate.max_samples)
        self._scorer = open_scorer(settings.evaluate, settings)

    def __call__(self, model: nn.Module, world: World) -> dict[str, float]:
        """The protocol's numbers as `<split>/<name>`, equal on all ranks; collective."""
        batches = self._samples.evaluation_batches(every=self._every)
        own = embed_all(self._task, model, batches, device=self._device)
        found = gathered(own, world, device=self._device)
        result = score(self._scorer, found, model, device=self._device)
        numbers = self._scorer.numbers(result)
        if found.num_failed:
            numbers["num_failed"] = float(found.num_failed)
        return {f"{self._split}/{name}": value for name, value in numbers.items()}


def every_for(num_samples: int, *, at_most: int) -> int:
    """The smallest step with which no more than `at_most` of the samples are visited."""
    return -(-num_samples // at_most)


def open_scorer(wanted: DualEncoderEvaluation, settings: DualEncoderSettings) -> Scorer:
    """The scorer of a protocol for a run's data.

    Raises:
        UserError: see `make_scorer`; or multi-instance retrieval is asked of latents.
    """
    if wanted.protocol == "mir" and settings.input == "latents":
        raise UserError("mir scores the clips of captions, and latents are in segments", hint="use --input pixels")
    data_dir: Path | None = None
    if wanted.protocol != "retrieval" and not names_tars(settings.shards):
        data_dir = open_data_folder(settings.shards, cache=settings.cache).path
    return make_scorer(wanted, data_dir=data_dir, has_text_tower=settings.text_tower == "trained")


def score(scorer: Scorer, found: Any, model: nn.Module, *, device: torch.device) -> dict[str, Any]:
    """The result of a protocol for embeddings that `model` made."""
    # A wrapped model's own method: what wraps it knows only how to be called.
    towers = cast(EmbedsTexts, getattr(model, "module", model))
    return scorer.score(found, lambda texts: embed_texts(towers.embed_text, texts, device=device))
