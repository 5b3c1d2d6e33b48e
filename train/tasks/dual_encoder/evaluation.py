"""The evaluation that is made while a model is trained, by all ranks together."""

from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from manifests.errors import UserError
from train.config.evaluation import DualEncoderEvaluation
from train.data.decoding.clip import Views
from train.data.loader import TrainingSet
from train.data.remote.folder import open_data_folder
from train.data.streams.tars import names_tars
from train.distributed.world import World
from train.evaluation.embeddings import Embeddings, TakesBatches, distinct_texts, embed_all, embed_texts, gathered
from train.evaluation.examples import ShownSet, clip_in_words, retrieval_examples
from train.evaluation.runner import OpenedRun, Score, every_for
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


def score_run(opened: OpenedRun, wanted: DualEncoderEvaluation, *, num_clips: int) -> Score:
    """Scores a run's latest checkpoint by a protocol.

    Args:
        num_clips: looks at each clip, whose embeddings are averaged.

    Raises:
        UserError: the run's data lack what the protocol needs.
        FailedWork: nothing could be decoded.
    """
    settings, trained, task = opened.settings, opened.trained, opened.task
    if num_clips > 1 and settings.input == "latents":
        raise UserError(f"--clips is {num_clips}", hint="latents are looked at once: leave it out")
    scorer = open_scorer(wanted, settings)
    # Two narrations of one span are two queries of multi-instance retrieval.
    samples = task.samples(wanted.split, World(), num_clips=num_clips, each_caption=wanted.protocol == "mir")
    model = trained.fill(task.build_model(samples))
    with trained.precision.autocast():
        own = embed_all(task, model, samples.evaluation_batches(), device=trained.device, num_clips=num_clips)
        found = gathered(own, World(), device=trained.device)
        values = {"split": samples.split, **score(scorer, found, model, device=trained.device)}
    if wanted.protocol == "retrieval":
        values["examples"] = _examples(found, samples, num_frames=settings.num_frames)
    return Score(
        name=_file_name(wanted, num_clips=num_clips),
        samples=samples,
        clip=clip_in_words(settings, views=Views(num_clips=num_clips), mean_of="embeddings"),
        values=values,
        failed=found.failed,
    )


def _examples(found: Embeddings, samples: ShownSet, *, num_frames: int) -> list[dict[str, Any]]:
    first_rows, text_of_clip = distinct_texts(found.text_key)
    return retrieval_examples(
        samples,
        found.samples,
        num_frames=num_frames,
        similarity_NM=found.video @ found.text[first_rows].T,
        first_rows=first_rows,
        text_of_clip=text_of_clip,
    )


def _file_name(wanted: DualEncoderEvaluation, *, num_clips: int) -> str:
    """Results by other protocols stand beside one another; the same one again takes the place of the old one."""
    parts: list[str] = [wanted.protocol, wanted.split]
    parts += [path.stem for path in (wanted.relevancy, wanted.classes) if path is not None]
    parts += [] if wanted.label is None else [wanted.label]
    parts += [] if num_clips == 1 else [f"{num_clips}-clips"]
    return "-".join(parts)
