"""Evaluations of a dual encoder: of a trained run, and in the training loop by all ranks together."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.shards.pages.figures import evenly_spaced_items
from clipmill.train.config.shards import IMAGES, kind_of
from clipmill.train.data.decoding.clip import Views
from clipmill.train.data.folders import open_data_folder
from clipmill.train.data.loader import TrainingSet
from clipmill.train.data.relevancy import Relevancy
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.player import PicturedSamples, open_player
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip, every_for, split_metrics
from clipmill.train.models.text import CONTEXT_LENGTH, Tokenize
from clipmill.train.run.counted_batches import counted_batches
from clipmill.train.tasks.dual_encoder.embeddings import (
    Embeddings,
    EmbedTexts,
    TakesBatches,
    embed_all,
    embed_texts,
    gather_embeddings,
)
from clipmill.train.tasks.dual_encoder.examples import Ranking, retrieval_examples
from clipmill.train.tasks.dual_encoder.metrics import MIR_PROTOCOL, score_mir
from clipmill.train.tasks.dual_encoder.mir_table import MirTable, open_mir_table
from clipmill.train.tasks.dual_encoder.protocols import (
    NAMED,
    OF_IMAGES,
    Match,
    RetrievalScorer,
    protocol_captions,
)
from clipmill.train.tasks.dual_encoder.settings import DualEncoderEvaluation, DualEncoderSettings
from clipmill.train.tasks.dual_encoder.spec import EgoMcqFlags, MirFlags, RetrievalFlags, ZeroShotFlags
from clipmill.train.tasks.dual_encoder.zero_shot import ZeroShotScorer, open_class_prompts

# Scores embeddings by a protocol: plain values for the result file, and metrics for the training log.


class Scorer(Protocol):
    """A protocol with its files read, ready to score embeddings."""

    @property
    def definition(self) -> str:
        """What is ranked or classified, and what is correct."""
        ...

    def score(self, embeddings: Embeddings, embed_texts: EmbedTexts) -> dict[str, Any]:
        """The result as plain values; `embed_texts` gives unit-length embeddings of texts that are not captions."""
        ...

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        """The metrics of a result that are logged during training."""
        ...


_MAX_EXAMPLE_SENTENCES = 256


@dataclass(frozen=True)
class MirMatch:
    """Similarities and relevancy of clips and sentences; `clip_N` are the clips' rows of the embeddings."""

    similarity_NM: NDArray[np.float32]
    relevancy: Relevancy
    clip_N: NDArray[np.int64]


@dataclass(frozen=True)
class MirScorer:
    """EPIC-KITCHENS-100 multi-instance retrieval (clipmill.train.tasks.dual_encoder.metrics)."""

    table: MirTable
    definition: str = MIR_PROTOCOL

    def score(self, embeddings: Embeddings, embed_texts: EmbedTexts) -> dict[str, Any]:
        return self.result(self.match(embeddings, embed_texts))

    def match(self, embeddings: Embeddings, embed_texts: EmbedTexts) -> "MirMatch":
        """Clips that have a row in the relevancy, and all sentences."""
        table = self.table
        rows, place = table.rows_shown(embeddings.caption_id)
        if not len(rows):
            raise FailedWork("none of the clips that could be decoded has a row in the relevancy")
        similarity = embeddings.video[place] @ embed_texts(table.sentences).T
        return MirMatch(similarity, table.relevancy.take(rows, np.arange(len(table.sentences))), place)

    def result(self, match: "MirMatch") -> dict[str, Any]:
        """The result of a match as plain values."""
        scores = score_mir(match.similarity_NM, match.relevancy).as_json()
        num_clips, num_sentences = self.table.relevancy.shape
        coverage = f"{len(match.clip_N):,} of {num_clips:,} clips, {num_sentences:,} sentences"
        incomplete = self.table.missing(len(match.clip_N))
        return {**scores, "relevancy": self.table.source, "coverage": coverage, "incomplete": incomplete}

    def ranking(self, match: "MirMatch", sample_N: NDArray[np.int64]) -> Ranking:
        """Some sentences that have a clip of relevancy 1, spread evenly, for examples; `sample_N` of all embeddings."""
        num_sentences = len(self.table.sentences)
        chosen = np.array(evenly_spaced_items(range(num_sentences), at_most=_MAX_EXAMPLE_SENTENCES))
        relevancy_NM = match.relevancy.take(np.arange(len(match.clip_N)), chosen).rows(slice(None))
        has_right = (relevancy_NM == 1).any(axis=0)
        chosen, relevancy_NM = chosen[has_right], relevancy_NM[:, has_right]
        texts = [self.table.sentences[sentence] for sentence in chosen.tolist()]
        return Ranking(match.similarity_NM[:, chosen], relevancy_NM, sample_N[match.clip_N], texts.__getitem__)

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        pairs = {
            f"{direction}_{name}": result[direction][name]
            for direction in ("average", "video_to_text", "text_to_video")
            for name in ("mean_ap", "ndcg")
        }
        return {name: value for name, value in pairs.items() if value is not None}


def make_scorer(
    settings: DualEncoderEvaluation, *, data_dir: Path | None, has_text_tower: bool, sources: str | None = None
) -> Scorer:
    """The scorer of `settings.protocol`, with its files read.

    Args:
        data_dir: the data folder; None for tars, which have no manifest.
        has_text_tower: whether the run has a text tower, which embeds prompts.
        sources: `--captions.sources`, for named protocols.

    Raises:
        UserError: a file cannot be read or does not fit, or the data lacks what the protocol needs.
    """
    protocol, split = settings.protocol, settings.split
    if protocol == "retrieval":
        return RetrievalScorer(temperature=settings.dual_softmax)
    if data_dir is None:
        raise UserError(
            f"{protocol} needs the captions or labels of a manifest, and tars have none",
            hint="give a data folder: --shards DIR",
        )
    if not has_text_tower and protocol != "msrvtt-1ka":
        raise _without_text_tower(protocol)
    if protocol == "mir":
        table = open_mir_table(data_dir, split=split, relevancy=settings.relevancy, sentences=settings.sentences)
        return MirScorer(table)
    if protocol != "zero-shot":
        captions = protocol_captions(data_dir, protocol, split=split, sources=sources)
        if protocol == "egomcq":
            from clipmill.train.tasks.dual_encoder.egomcq import open_questions

            return open_questions(settings.questions, captions, data_dir=data_dir)
        return RetrievalScorer(protocol, captions, settings.dual_softmax)
    classes = open_class_prompts(
        data_dir, split=split, classes=settings.classes, templates=settings.templates, label=settings.label
    )
    return ZeroShotScorer(classes)


def _without_text_tower(protocol: str) -> UserError:
    return UserError(
        f"{protocol} embeds texts, and this run has no text tower: its embeddings are stored",
        hint="use a run of --text-tower trained",
    )


class EmbedsTexts(Protocol):
    """A model with a text tower of its own."""

    tokenize: Tokenize

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        """Token ids [B, L] to unit-length embeddings [B, E]."""
        ...


class LoopEvaluation:
    """Evaluates a model repeatedly on the same samples while it is trained.

    Args:
        samples: this rank's part of the split.
        settings: of the run, with the data to evaluate.
        wanted: the evaluation.
        name: prefix of its metrics.

    Attributes:
        protocol: its name and definition, and what the data lack of it.
        means_of: number and noun of what its metrics are means of; None for clips.

    Raises:
        UserError: the split cannot be evaluated by this protocol.
    """

    def __init__(
        self,
        task: TakesBatches,
        samples: TrainingSet,
        settings: DualEncoderSettings,
        *,
        wanted: DualEncoderEvaluation,
        name: str,
        device: torch.device,
    ) -> None:
        self._task, self._samples, self._device, self._name = task, samples, device, name
        if samples.num_samples is None:
            raise UserError(
                "tars cannot be evaluated while they are trained on: they have no splits",
                hint="name a data folder with --evaluate.shards, or leave out --evaluate.every and use train eval",
            )
        self._every = every_for(samples.num_samples, at_most=wanted.max_samples)
        if self._every > 1 and wanted.protocol in NAMED:
            raise UserError(
                f"--evaluate.max-samples is {wanted.max_samples}, and {wanted.protocol} needs all "
                f"{samples.num_samples:,} clips of {name}",
                hint=f"use {samples.num_samples} or more, or --evaluate.protocol retrieval",
                flags=("--evaluate.max-samples",),
            )
        self._scorer = open_scorer(wanted, settings, samples)
        self.protocol = f"{wanted.protocol}: {self._scorer.definition}"
        self.means_of: tuple[int, str] | None = getattr(self._scorer, "means_of", None)
        if isinstance(self._scorer, RetrievalScorer) and (incomplete := self._scorer.missing(samples.num_samples)):
            self.protocol += f"; incomplete: {incomplete}"

    def __call__(self, model: nn.Module, world: World) -> dict[str, float]:
        """The protocol's metrics as `<name>/<metric>`, equal on all ranks; collective."""
        batches = self._samples.evaluation_batches(every=self._every)
        own = embed_all(self._task, model, batches, device=self._device)
        embeddings = gather_embeddings(own, world, device=self._device)
        result = self._scorer.score(embeddings, text_embedder(model, device=self._device))
        return split_metrics(self._name, self._scorer.metrics(result), num_failed=embeddings.num_failed)


def open_scorer(wanted: DualEncoderEvaluation, settings: DualEncoderSettings, samples: Any) -> Scorer:
    """The scorer of a protocol for a run's data; of images, `samples` have what others read from a manifest.

    Raises:
        UserError: see `make_scorer`; also for protocols of clips on latents, or of images on clips.
    """
    if kind_of(settings.folder, settings) is IMAGES:
        from clipmill.train.tasks.dual_encoder.clip_benchmark import class_prompts, image_captions

        if settings.text_tower == "frozen":
            raise _without_text_tower(wanted.protocol)
        if wanted.protocol == "zero-shot":
            return ZeroShotScorer(class_prompts(samples, settings.folder, wanted))
        if wanted.protocol == OF_IMAGES:
            return RetrievalScorer(OF_IMAGES, image_captions(samples), wanted.dual_softmax)
    elif wanted.protocol == OF_IMAGES:
        raise UserError(
            f"{OF_IMAGES} scores tars of images with captions, and {settings.folder} has videos",
            hint="use --protocol retrieval (in training --evaluate.protocol), or --shards with tars of images",
        )
    if wanted.protocol in ("mir", *NAMED) and settings.reads_latents:
        raise UserError(
            f"{wanted.protocol} scores the clips of captions, and latents are in segments", hint="use --input pixels"
        )
    data_dir: Path | None = None
    if wanted.protocol != "retrieval" and kind_of(settings.folder).has_manifest:
        data_dir = open_data_folder(settings.folder, cache=settings.cache, column=None).path
    has_text, sources, towers = settings.text_tower == "trained", settings.captions.sources, settings.towers
    scorer = make_scorer(wanted, data_dir=data_dir, has_text_tower=has_text, sources=sources)
    if not isinstance(scorer, RetrievalScorer):
        return scorer
    return replace(scorer, context_length=None if towers.text else towers.context_length or CONTEXT_LENGTH)


def text_embedder(model: nn.Module, *, device: torch.device) -> EmbedTexts:
    """Unit-length embeddings of texts by the text tower of `model`."""
    # A wrapper such as DDP forwards calls of the model, but not its other methods.
    towers = cast(EmbedsTexts, getattr(model, "module", model))
    return lambda texts: embed_texts(towers.embed_text, texts, tokenize=towers.tokenize, device=device)


def score_run(opened: OpenedRun, flags: RetrievalFlags | MirFlags | EgoMcqFlags | ZeroShotFlags) -> Score:
    """Score a run's latest checkpoint by a protocol.

    Raises:
        UserError: the run's data lack what the protocol needs.
        FailedWork: nothing could be decoded.
    """
    settings, trained, task = opened.settings, opened.trained, opened.task
    wanted, num_clips = flags.evaluation(), flags.clips
    if num_clips > 1 and settings.reads_latents:
        raise UserError(f"--clips is {num_clips}", hint="leave it out: latents have a single view", flags=("--clips",))
    samples = task.samples_of(wanted, World(), num_clips=num_clips)
    scorer = open_scorer(wanted, settings, samples)
    model = trained.fill(task.build_model(samples))
    ranking: Ranking | None = None
    with trained.precision.autocast():
        batches = counted_batches(samples.evaluation_batches(), "embedding", total=samples.num_samples)
        own = embed_all(task, model, batches, device=trained.device, num_clips=num_clips)
        embeddings = gather_embeddings(own, World(), device=trained.device)
        embed = text_embedder(model, device=trained.device)
        if isinstance(scorer, RetrievalScorer):
            match = scorer.match(embeddings, embed)
            values, ranking = scorer.result(match), _ranking(match, embeddings, samples)
        elif isinstance(scorer, MirScorer):
            ranked = scorer.match(embeddings, embed)
            values, ranking = scorer.result(ranked), scorer.ranking(ranked, embeddings.samples)
        else:
            values = scorer.score(embeddings, embed)
    if ranking is not None:
        player = open_player(settings, split=wanted.split)
        examples = retrieval_examples(ranking, samples, num_frames=settings.num_frames, player=player)
        values = {**values, "examples": examples}
    return Score(
        name=_result_name(wanted, num_clips=num_clips),
        samples=samples,
        clip=describe_clip(settings, samples, views=Views(num_clips=num_clips), mean_of="embeddings"),
        values={"split": samples.split, **values},
        failed=embeddings.failed,
    )


def _ranking(match: Match, embeddings: Embeddings, samples: PicturedSamples) -> Ranking:
    """Texts and clips of a protocol, for examples."""
    sample_N, sample_M = embeddings.samples[match.clip_N], embeddings.samples[match.row_M]

    def text(index: int) -> str:
        return samples.text(int(sample_M[index])) if match.texts is None else match.texts[index]

    return Ranking(match.similarity_NM, match.is_right_NM, sample_N, text)


def _result_name(wanted: DualEncoderEvaluation, *, num_clips: int) -> str:
    """Results of different protocols are kept side by side; the same protocol again replaces its result."""
    parts: list[str] = [wanted.protocol, wanted.split]
    parts += [path.stem for path in (wanted.relevancy, wanted.classes) if path is not None]
    parts += [] if wanted.label is None else [wanted.label]
    parts += [] if num_clips == 1 else [f"{num_clips}-clips"]
    return "-".join(parts)
