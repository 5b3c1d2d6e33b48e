"""Evaluation of a dual encoder after or during training, and examples for the results page.

An evaluation has three steps:

1. The files of the protocol are read, so that errors in these files are reported before training starts.
2. Every rank embeds its part of the split. The embeddings are gathered in the order of the samples.
3. A `Scorer` converts the embeddings to JSON-serialisable values for the result file, or to metrics for the training
   log.

The examples on the page show successes and failures. If possible, a correct clip ranks first for half of the texts, and
an incorrect clip ranks first for the other half. Both halves are spread evenly over the split.

Shape suffixes: N clips, M texts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.shards.pages.figures import evenly_spaced_items
from clipmill.train.config.shards import kind_of
from clipmill.train.data.clip_frames import Views
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.data.loader import TrainingSet
from clipmill.train.data.relevancy import Relevancy
from clipmill.train.distributed.world import World
from clipmill.train.evaluation.player import PicturedSamples, Player, clip_figure, open_player
from clipmill.train.evaluation.runner import OpenedRun, Score, describe_clip, sample_stride, split_metrics
from clipmill.train.models.dual_encoder import DualEncoder
from clipmill.train.models.text import CONTEXT_LENGTH
from clipmill.train.run.tracking import count_batches
from clipmill.train.tasks.dual_encoder.egocentric import MirTable, open_mir_table
from clipmill.train.tasks.dual_encoder.metrics import MIR_PROTOCOL, ranks, score_mir
from clipmill.train.tasks.dual_encoder.protocols import (
    CLIP_BENCHMARK,
    NAMED,
    Embeddings,
    EmbeddingTask,
    EmbedTexts,
    Match,
    RetrievalScorer,
    embed_all,
    embed_texts,
    gather_embeddings,
    image_captions,
    protocol_captions,
)
from clipmill.train.tasks.dual_encoder.spec import (
    DualEncoderEvaluation,
    DualEncoderSettings,
    EgoMcqFlags,
    MirFlags,
    RetrievalFlags,
    ZeroShotFlags,
)
from clipmill.train.tasks.dual_encoder.zero_shot import ZeroShotScorer, image_class_prompts, open_class_prompts

_NUM_QUERIES = 6  # number of texts on the results page
_NUM_CLIPS = 4  # number of clips per text


@dataclass(frozen=True)
class Ranking:
    """Similarities of clips and texts, used to choose examples.

    Attributes:
        similarity_NM: Similarity of each clip and text.
        relevancy_NM: Relevancies in [0, 1]. Clips with relevancy 1 are correct.
        sample_N: Index of each clip's sample, int64.
        text: Function that takes the index of a text and returns the text.
    """

    similarity_NM: NDArray[np.floating]
    relevancy_NM: NDArray[np.floating] | NDArray[np.bool_]
    sample_N: NDArray[np.int64]
    text: Callable[[int], str]


def retrieval_examples(
    ranking: Ranking, samples: PicturedSamples, *, num_frames: int, player: Player | None
) -> list[dict[str, Any]]:
    """Return example texts, each with its best clips and its best correct clip, as JSON-serialisable values.

    Args:
        num_frames: Number of frames to show per clip.
        player: Player of the clips' videos; None to show only frames.
    """
    similarity_NM, sample_N = ranking.similarity_NM, ranking.sample_N
    rank_M = ranks(similarity_NM.T, ranking.relevancy_NM.T == 1)
    figures: dict[int, dict[str, Any]] = {}

    def make_example(clip: int, text: int, *, rank: int) -> dict[str, Any]:
        sample, relevancy = int(sample_N[clip]), float(ranking.relevancy_NM[clip, text])
        if clip not in figures:
            figures[clip] = clip_figure(samples, sample, num_frames=num_frames, player=player)
        return {
            **figures[clip],
            "place": rank,
            "text": samples.text(sample),
            "score": float(similarity_NM[clip, text]),
            "is_right": relevancy == 1,
            "relevancy": relevancy,
        }

    examples = []
    for text in choose_texts(rank_M):
        order = np.argsort(-similarity_NM[:, text], kind="stable")
        # If none of the best clips is correct, show the best correct clip in place of the last one.
        best_correct = int(np.flatnonzero(ranking.relevancy_NM[order, text] == 1)[0])
        indices = [*range(min(_NUM_CLIPS, len(order)))]
        indices[-1] = max(indices[-1], best_correct)
        clips = [make_example(int(order[index]), text, rank=index + 1) for index in indices]
        examples.append({"text": ranking.text(text), "rank": int(rank_M[text]), "found": clips})
    return examples


def choose_texts(rank_M: NDArray[np.int64], *, at_most: int = _NUM_QUERIES) -> list[int]:
    """Return the indices of example texts, alternating between rank 1 (a correct clip is first) and other ranks."""
    correct_texts, incorrect_texts = np.flatnonzero(rank_M == 1).tolist(), np.flatnonzero(rank_M > 1).tolist()
    num_incorrect = min(len(incorrect_texts), max(at_most // 2, at_most - len(correct_texts)))
    num_correct = min(len(correct_texts), at_most - num_incorrect)
    groups = ((correct_texts, num_correct), (incorrect_texts, num_incorrect))
    examples = (evenly_spaced_items(texts, at_most=count) if texts and count else [] for texts, count in groups)
    return [text for text in chain.from_iterable(zip_longest(*examples)) if text is not None]


class Scorer(Protocol):
    """Interface of an object that scores embeddings with a protocol, and has already read the protocol's files."""

    @property
    def definition(self) -> str:
        """Definition of the task and of correct answers."""
        ...

    def score(self, embeddings: Embeddings, embed: EmbedTexts) -> dict[str, Any]:
        """Return the values for the result file.

        Args:
            embed: Function that returns unit-length embeddings of texts other than the samples' captions.
        """
        ...

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        """Return the metrics to log during training, from the values for the result file."""
        ...


_MAX_EXAMPLE_SENTENCES = 256


@dataclass(frozen=True)
class MirMatch:
    """Similarities and relevancies of clips and sentences.

    Attributes:
        clip_N: Row of each clip in the embeddings, int64.
    """

    similarity_NM: NDArray[np.float32]
    relevancy: Relevancy
    clip_N: NDArray[np.int64]


@dataclass(frozen=True)
class MirScorer:
    """Scorer for multi-instance retrieval in EPIC-KITCHENS-100 (clipmill.train.tasks.dual_encoder.metrics)."""

    table: MirTable
    definition: str = MIR_PROTOCOL

    def score(self, embeddings: Embeddings, embed: EmbedTexts) -> dict[str, Any]:
        return self.result(self.match(embeddings, embed))

    def match(self, embeddings: Embeddings, embed: EmbedTexts) -> "MirMatch":
        """Compare all sentences with the clips that have a row in the relevancy matrix.

        Raises:
            FailedWork: No clip has a row.
        """
        table = self.table
        rows, clip_N = table.find_rows(embeddings.caption_id)
        if not len(rows):
            raise FailedWork("no decoded clip has a row in the relevancy matrix")
        similarity = embeddings.video[clip_N] @ embed(table.sentences).T
        return MirMatch(similarity, table.relevancy.take(rows, np.arange(len(table.sentences))), clip_N)

    def result(self, match: "MirMatch") -> dict[str, Any]:
        """Return the values for the result file."""
        scores = score_mir(match.similarity_NM, match.relevancy).as_json()
        num_clips, num_sentences = self.table.relevancy.shape
        coverage = f"{len(match.clip_N):,} of {num_clips:,} clips, {num_sentences:,} sentences"
        incomplete = self.table.describe_missing(len(match.clip_N))
        return {**scores, "relevancy": self.table.source, "coverage": coverage, "incomplete": incomplete}

    def ranking(self, match: "MirMatch", sample_N: NDArray[np.int64]) -> Ranking:
        """Return a ranking of evenly spaced sentences for examples, omitting sentences without a clip of relevancy 1.

        Args:
            sample_N: Index of the sample of each embedding, int64.
        """
        num_sentences = len(self.table.sentences)
        sentences = np.array(evenly_spaced_items(range(num_sentences), at_most=_MAX_EXAMPLE_SENTENCES))
        relevancy_NM = match.relevancy.take(np.arange(len(match.clip_N)), sentences).rows(slice(None))
        has_correct = (relevancy_NM == 1).any(axis=0)
        sentences, relevancy_NM = sentences[has_correct], relevancy_NM[:, has_correct]
        texts = [self.table.sentences[sentence] for sentence in sentences.tolist()]
        return Ranking(match.similarity_NM[:, sentences], relevancy_NM, sample_N[match.clip_N], texts.__getitem__)

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        metrics = {
            f"{direction}_{name}": result[direction][name]
            for direction in ("average", "video_to_text", "text_to_video")
            for name in ("mean_ap", "ndcg")
        }
        return {name: value for name, value in metrics.items() if value is not None}


def make_scorer(
    settings: DualEncoderEvaluation, *, data_dir: Path | None, has_text_tower: bool, sources: str | None = None
) -> Scorer:
    """Read the files that a protocol needs, and return the protocol's scorer.

    Args:
        data_dir: Data folder; None if the data have no manifest.
        has_text_tower: True if the run has a text tower. Most protocols need a text tower to embed texts.
        sources: Value of `--captions.sources`, for protocols that use the captions of one source.

    Raises:
        UserError: A file cannot be read or does not match, or the data or the run do not fit the protocol.
    """
    protocol, split = settings.protocol, settings.split
    if protocol == "retrieval":
        return RetrievalScorer(temperature=settings.dual_softmax)
    if data_dir is None:
        raise UserError(
            f"{protocol} needs captions or labels from a manifest, but these data have no manifest",
            hint="use a data folder: --shards DIR",
        )
    if not has_text_tower and protocol != "msrvtt-1ka":
        raise _text_tower_error(protocol)
    if protocol == "mir":
        table = open_mir_table(data_dir, split=split, relevancy=settings.relevancy, sentences=settings.sentences)
        return MirScorer(table)
    if protocol != "zero-shot":
        captions = protocol_captions(data_dir, protocol, split=split, sources=sources)
        if protocol == "egomcq":
            from clipmill.train.tasks.dual_encoder.egocentric import open_questions

            return open_questions(settings.questions, captions, data_dir=data_dir)
        return RetrievalScorer(protocol, captions, settings.dual_softmax)
    classes = open_class_prompts(
        data_dir, split=split, classes=settings.classes, templates=settings.templates, label=settings.label
    )
    return ZeroShotScorer(classes)


def _text_tower_error(protocol: str) -> UserError:
    return UserError(
        f"{protocol} embeds texts, but this run has no text tower: it was trained with stored embeddings",
        hint="use a run with --text-tower trained",
    )


class LoopEvaluation:
    """Evaluation that runs repeatedly during training, always on the same samples.

    Args:
        task: Task that returns the model's inputs.
        samples: This rank's part of the split.
        settings: Settings of the run, with the shards to evaluate on.
        evaluation: Settings of the evaluation.
        name: Prefix of the metrics' names.

    Attributes:
        protocol: Name and definition of the protocol, and a description of missing data.
        averaged_items: Number and name of the items over which the metrics are averaged; None for clips.

    Raises:
        UserError: The protocol cannot evaluate the split.
    """

    def __init__(
        self,
        task: EmbeddingTask,
        samples: TrainingSet,
        settings: DualEncoderSettings,
        *,
        evaluation: DualEncoderEvaluation,
        name: str,
        device: torch.device,
    ) -> None:
        self._task, self._samples, self._device, self._name = task, samples, device, name
        if samples.num_samples is None:
            raise UserError(
                f"{kind_of(settings.folder, settings).noun} cannot be used for evaluation during training",
                hint="pass a data folder with --evaluate.shards, or omit --evaluate.every and use train eval",
            )
        self._stride = sample_stride(samples.num_samples, at_most=evaluation.max_samples)
        if self._stride > 1 and evaluation.protocol in NAMED:
            raise UserError(
                f"--evaluate.max-samples is {evaluation.max_samples}, but {evaluation.protocol} needs all "
                f"{samples.num_samples:,} clips of {name}",
                hint=f"use --evaluate.max-samples {samples.num_samples}, or --evaluate.protocol retrieval",
                flags=("--evaluate.max-samples",),
            )
        self._scorer = open_scorer(evaluation, settings, samples)
        self.protocol = f"{evaluation.protocol}: {self._scorer.definition}"
        self.averaged_items: tuple[int, str] | None = getattr(self._scorer, "averaged_items", None)
        if isinstance(self._scorer, RetrievalScorer) and (
            incomplete := self._scorer.describe_missing(samples.num_samples)
        ):
            self.protocol += f"; incomplete: {incomplete}"

    def __call__(self, model: nn.Module, world: World) -> dict[str, float]:
        """Return the protocol's metrics as `<name>/<metric>`, equal on all ranks. All ranks must call this method."""
        batches = self._samples.evaluation_batches(stride=self._stride)
        local_embeddings = embed_all(self._task, model, batches, device=self._device)
        embeddings = gather_embeddings(local_embeddings, world, device=self._device)
        result = self._scorer.score(embeddings, text_embedder(model, device=self._device))
        return split_metrics(self._name, self._scorer.metrics(result), num_failed=embeddings.num_failed)


def open_scorer(evaluation: DualEncoderEvaluation, settings: DualEncoderSettings, samples: Any) -> Scorer:
    """Return the scorer of a protocol for the data of a run. Images do not need a manifest.

    Raises:
        UserError: The protocol does not support latents or videos, images are to be scored without a text tower, or
            `make_scorer` raised the error.
    """
    if kind_of(settings.folder, settings).has_images:
        if settings.text_tower == "frozen":
            raise _text_tower_error(evaluation.protocol)
        if evaluation.protocol == "zero-shot":
            return ZeroShotScorer(image_class_prompts(samples, settings.folder, evaluation))
        if evaluation.protocol == CLIP_BENCHMARK:
            return RetrievalScorer(CLIP_BENCHMARK, image_captions(samples), evaluation.dual_softmax)
    elif evaluation.protocol == CLIP_BENCHMARK:
        raise UserError(
            f"{CLIP_BENCHMARK} scores image tars with captions, but {settings.folder} contains videos",
            hint="use --protocol retrieval (during training: --evaluate.protocol), or pass image tars to --shards",
        )
    if evaluation.protocol in ("mir", *NAMED) and settings.reads_latents:
        raise UserError(
            f"{evaluation.protocol} scores the clip of each caption, but latents are stored by segment",
            hint="use --input pixels",
        )
    data_dir: Path | None = None
    if evaluation.protocol != "retrieval" and kind_of(settings.folder).has_manifest:
        data_dir = open_data_folder(settings.folder, cache=settings.cache, column=None).path
    has_text, sources, towers = settings.text_tower == "trained", settings.captions.sources, settings.towers
    scorer = make_scorer(evaluation, data_dir=data_dir, has_text_tower=has_text, sources=sources)
    if not isinstance(scorer, RetrievalScorer):
        return scorer
    return replace(scorer, context_length=None if towers.text else towers.context_length or CONTEXT_LENGTH)


def text_embedder(model: nn.Module, *, device: torch.device) -> EmbedTexts:
    """Return a function that computes unit-length embeddings of texts with the text tower of `model`."""
    # A wrapper such as DDP exposes only `forward`, not the model's other methods.
    towers = cast(DualEncoder, getattr(model, "module", model))
    return lambda texts: embed_texts(towers.embed_text, texts, tokenize=towers.tokenize, device=device)


def score_run(opened: OpenedRun, flags: RetrievalFlags | MirFlags | EgoMcqFlags | ZeroShotFlags) -> Score:
    """Score the latest checkpoint of a run with the protocol that the flags select.

    Raises:
        UserError: The data or the run do not fit the protocol.
        FailedWork: No clip could be decoded, or an embedding is not finite.
    """
    settings, trained, task = opened.settings, opened.trained, opened.task
    evaluation, num_clips = flags.evaluation(), flags.clips
    if num_clips > 1 and settings.reads_latents:
        raise UserError(f"--clips is {num_clips}, but latents have a single view", hint="omit it", flags=("--clips",))
    samples = task.samples_of(evaluation, World(), num_clips=num_clips)
    scorer = open_scorer(evaluation, settings, samples)
    model = trained.fill(task.build_model(samples))
    ranking: Ranking | None = None
    with trained.precision.autocast():
        batches = count_batches(samples.evaluation_batches(), "embedding", total=samples.num_samples)
        local_embeddings = embed_all(task, model, batches, device=trained.device, num_clips=num_clips)
        embeddings = gather_embeddings(local_embeddings, World(), device=trained.device)
        embed = text_embedder(model, device=trained.device)
        if isinstance(scorer, RetrievalScorer):
            match = scorer.match(embeddings, embed)
            values, ranking = scorer.result(match), _ranking(match, embeddings, samples)
        elif isinstance(scorer, MirScorer):
            mir_match = scorer.match(embeddings, embed)
            values, ranking = scorer.result(mir_match), scorer.ranking(mir_match, embeddings.samples)
        else:
            values = scorer.score(embeddings, embed)
    if ranking is not None:
        player = open_player(settings, split=evaluation.split)
        examples = retrieval_examples(ranking, samples, num_frames=settings.num_frames, player=player)
        values = {**values, "examples": examples}
    # Each combination of protocol and settings has a separate result file. A later evaluation with
    # the same combination replaces the file.
    parts: list[str] = [evaluation.protocol, evaluation.split]
    parts += [path.stem for path in (evaluation.relevancy, evaluation.classes) if path is not None]
    parts += [] if evaluation.label is None else [evaluation.label]
    parts += [] if num_clips == 1 else [f"{num_clips}-clips"]
    return Score(
        name="-".join(parts),
        samples=samples,
        clip=describe_clip(settings, samples, views=Views(num_clips=num_clips), mean_of="embeddings"),
        values={"split": samples.split, **values},
        failed=embeddings.failed,
    )


def _ranking(match: Match, embeddings: Embeddings, samples: PicturedSamples) -> Ranking:
    """Return the ranking of a protocol's clips and texts, used to choose examples."""
    sample_N, sample_M = embeddings.samples[match.clip_N], embeddings.samples[match.row_M]

    def text(index: int) -> str:
        return samples.text(int(sample_M[index])) if match.texts is None else match.texts[index]

    return Ranking(match.similarity_NM, match.is_right_NM, sample_N, text)
