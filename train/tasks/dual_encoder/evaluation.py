"""Evaluations of a dual encoder: of a trained run, and in the training loop by all ranks together."""

from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn

from manifests.errors import UserError
from train.config.evaluation import DualEncoderEvaluation
from train.data.decoding.clip import Views
from train.data.loader import TrainingSet
from train.data.remote.folder import open_data_folder
from train.data.streams.tars import names_tars
from train.distributed.world import World
from train.evaluation.pages import PicturedSamples, clip_figure, evenly_spaced
from train.evaluation.runner import OpenedRun, Score, describe_clip, every_for, split_metrics
from train.tasks.dual_encoder.embeddings import (
    Embeddings,
    TakesBatches,
    distinct_texts,
    embed_all,
    embed_texts,
    gathered,
)
from train.tasks.dual_encoder.retrieval import ranks
from train.tasks.dual_encoder.scoring import Scorer, make_scorer
from train.tasks.dual_encoder.settings import DualEncoderSettings

_NUM_QUERIES = 6
_NUM_FOUND = 4


class EmbedsTexts(Protocol):
    """A model with a text tower of its own."""

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        """Token ids [B, L] to unit-length embeddings [B, E]."""
        ...


class LoopEvaluation:
    """Evaluates a model repeatedly on the same samples while it is trained.

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
                "tars cannot be evaluated while they are trained on: they have no splits",
                hint="leave out --evaluate.every, and use train eval with --shards afterwards",
            )
        self._every = every_for(samples.num_samples, at_most=settings.evaluate.max_samples)
        self._scorer = open_scorer(settings.evaluate, settings)

    def __call__(self, model: nn.Module, world: World) -> dict[str, float]:
        """The protocol's metrics as `<split>/<name>`, equal on all ranks; collective."""
        batches = self._samples.evaluation_batches(every=self._every)
        own = embed_all(self._task, model, batches, device=self._device)
        found = gathered(own, world, device=self._device)
        metrics = self._scorer.metrics(score(self._scorer, found, model, device=self._device))
        return split_metrics(self._split, metrics, num_failed=found.num_failed)


def open_scorer(wanted: DualEncoderEvaluation, settings: DualEncoderSettings) -> Scorer:
    """The scorer of a protocol for a run's data.

    Raises:
        UserError: see `make_scorer`; also for multi-instance retrieval on latents.
    """
    if wanted.protocol == "mir" and settings.input == "latents":
        raise UserError("mir scores the clips of captions, and latents are in segments", hint="use --input pixels")
    data_dir: Path | None = None
    if wanted.protocol != "retrieval" and not names_tars(settings.shards):
        data_dir = open_data_folder(settings.shards, cache=settings.cache).path
    return make_scorer(wanted, data_dir=data_dir, has_text_tower=settings.text_tower == "trained")


def score(scorer: Scorer, found: Embeddings, model: nn.Module, *, device: torch.device) -> dict[str, Any]:
    """The result of a protocol for the embeddings of `model`."""
    # A wrapper such as DDP forwards calls of the model, but not its other methods.
    towers = cast(EmbedsTexts, getattr(model, "module", model))
    return scorer.score(found, lambda texts: embed_texts(towers.embed_text, texts, device=device))


def score_run(opened: OpenedRun, wanted: DualEncoderEvaluation, *, num_clips: int) -> Score:
    """Score a run's latest checkpoint by a protocol.

    Args:
        num_clips: temporal views of each clip, whose embeddings are averaged.

    Raises:
        UserError: the run's data lack what the protocol needs.
        FailedWork: nothing could be decoded.
    """
    settings, trained, task = opened.settings, opened.trained, opened.task
    if num_clips > 1 and settings.input == "latents":
        raise UserError(f"--clips is {num_clips}", hint="leave it out: latents have a single view")
    scorer = open_scorer(wanted, settings)
    # In multi-instance retrieval, two narrations of one span are two queries.
    samples = task.samples(wanted.split, World(), num_clips=num_clips, each_caption=wanted.protocol == "mir")
    model = trained.fill(task.build_model(samples))
    with trained.precision.autocast():
        own = embed_all(task, model, samples.evaluation_batches(), device=trained.device, num_clips=num_clips)
        found = gathered(own, World(), device=trained.device)
        values = {"split": samples.split, **score(scorer, found, model, device=trained.device)}
    if wanted.protocol == "retrieval":
        values["examples"] = retrieval_examples(found, samples, num_frames=settings.num_frames)
    return Score(
        name=_result_name(wanted, num_clips=num_clips),
        samples=samples,
        clip=describe_clip(settings, views=Views(num_clips=num_clips), mean_of="embeddings"),
        values=values,
        failed=found.failed,
    )


def retrieval_examples(found: Embeddings, samples: PicturedSamples, *, num_frames: int) -> list[dict[str, Any]]:
    """Text queries spread evenly over the split, whatever their rank, each with the clips that score best."""
    first_rows, text_of_clip = distinct_texts(found.text_key)
    similarity_NM = found.video @ found.text[first_rows].T
    num_texts = similarity_NM.shape[1]
    rank_M = ranks(similarity_NM.T, (text_of_clip[:, None] == np.arange(num_texts)).T)

    def retrieved(clip: int, text: int) -> dict[str, Any]:
        sample = int(found.samples[clip])
        return {
            **clip_figure(samples, sample, num_frames=num_frames),
            "text": samples.text(sample),
            "score": float(similarity_NM[clip, text]),
            "is_right": bool(text_of_clip[clip] == text),
        }

    return [
        {
            "text": samples.text(int(found.samples[first_rows[text]])),
            "rank": int(rank_M[text]),
            "found": [
                retrieved(clip, text) for clip in np.argsort(-similarity_NM[:, text], kind="stable")[:_NUM_FOUND]
            ],
        }
        for text in evenly_spaced(range(num_texts), at_most=_NUM_QUERIES)
    ]


def _result_name(wanted: DualEncoderEvaluation, *, num_clips: int) -> str:
    """Results of different protocols are kept side by side; the same protocol again replaces its result."""
    parts: list[str] = [wanted.protocol, wanted.split]
    parts += [path.stem for path in (wanted.relevancy, wanted.classes) if path is not None]
    parts += [] if wanted.label is None else [wanted.label]
    parts += [] if num_clips == 1 else [f"{num_clips}-clips"]
    return "-".join(parts)
