"""Scores embeddings by a protocol: plain values for the result file, and metrics for the training log."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from manifests.errors import FailedWork, UserError
from train.config.evaluation import DualEncoderEvaluation
from train.tasks.dual_encoder.embeddings import Embeddings, distinct_texts
from train.tasks.dual_encoder.mir import score_mir
from train.tasks.dual_encoder.mir_table import MirTable, open_mir_table
from train.tasks.dual_encoder.retrieval import score_retrieval
from train.tasks.dual_encoder.zero_shot import (
    PLAIN_TEMPLATE,
    ClassPrompts,
    class_embeddings,
    open_class_prompts,
    score_classes,
)

EmbedTexts = Callable[[Sequence[str]], NDArray[np.float32]]


class Scorer(Protocol):
    """A protocol with its files read, ready to score embeddings."""

    def score(self, found: Embeddings, embed_texts: EmbedTexts) -> dict[str, Any]:
        """The result as plain values; `embed_texts` gives unit-length embeddings of texts that are not captions."""
        ...

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        """The metrics of a result that are logged during training."""
        ...


class RetrievalScorer:
    """Text-video retrieval (train.tasks.dual_encoder.retrieval)."""

    def score(self, found: Embeddings, embed_texts: EmbedTexts) -> dict[str, Any]:
        first_rows, text_of_clip = distinct_texts(found.text_key)
        return score_retrieval(found.video @ found.text[first_rows].T, text_of_clip).as_json()

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for direction in ("text_to_video", "video_to_text"):
            scores = result[direction]
            metrics |= {f"{direction}_r{k}": share for k, share in scores["recall"].items()}
            metrics[f"{direction}_median_rank"] = scores["median_rank"]
        return metrics


@dataclass(frozen=True)
class MirScorer:
    """EPIC-KITCHENS-100 multi-instance retrieval (train.tasks.dual_encoder.mir)."""

    table: MirTable

    def score(self, found: Embeddings, embed_texts: EmbedTexts) -> dict[str, Any]:
        table = self.table
        rows, place = table.rows_shown(found.caption_id)
        if not len(rows):
            raise FailedWork("none of the clips that could be decoded has a row in the relevancy")
        similarity = found.video[place] @ embed_texts(table.sentences).T
        relevancy = table.relevancy.take(rows, np.arange(len(table.sentences)))
        scores = score_mir(similarity, relevancy).as_json()
        num_clips, num_sentences = table.relevancy.shape
        coverage = f"{len(rows):,} of {num_clips:,} clips, {num_sentences:,} sentences"
        return {**scores, "relevancy": table.source, "coverage": coverage}

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        pairs = {
            f"{direction}_{name}": result[direction][name]
            for direction in ("average", "video_to_text", "text_to_video")
            for name in ("mean_ap", "ndcg")
        }
        return {name: value for name, value in pairs.items() if value is not None}


@dataclass(frozen=True)
class ZeroShotScorer:
    """Zero-shot classification (train.tasks.dual_encoder.zero_shot)."""

    classes: ClassPrompts

    def score(self, found: Embeddings, embed_texts: EmbedTexts) -> dict[str, Any]:
        classes = self.classes
        has_class = np.isin(found.caption_id, classes.caption_ids)
        if not has_class.any():
            raise FailedWork("none of the clips that could be decoded has a class")
        class_of_clip = classes.class_of_N[np.searchsorted(classes.caption_ids, found.caption_id[has_class])]
        texts, class_of_prompt = classes.prompts()
        embedded = class_embeddings(embed_texts(texts), class_of_prompt)
        scores = score_classes(found.video[has_class] @ embedded.T, class_of_clip).as_json()
        templates = list(classes.templates)
        prompts = "the bare name" if templates == [PLAIN_TEMPLATE] else f"{len(templates)} templates"
        return {
            **scores,
            "classes": classes.source,
            "prompts": f"{len(texts):,} prompts: {prompts}, {sum(map(len, classes.names)):,} names",
            "templates": templates,
            "num_without_class": int((~has_class).sum()),
        }

    def metrics(self, result: dict[str, Any]) -> dict[str, float]:
        top = {f"top{k}": share for k, share in result["top"].items()}
        return {**top, "mean_class_accuracy": result["mean_class_accuracy"]}


def make_scorer(settings: DualEncoderEvaluation, *, data_dir: Path | None, has_text_tower: bool) -> Scorer:
    """The scorer of `settings.protocol`, with its files read.

    Args:
        data_dir: the data folder; None for tars, which have no manifest.
        has_text_tower: whether the run has a text tower, which embeds prompts.

    Raises:
        UserError: a file cannot be read or does not fit, or the data lacks what the protocol needs.
    """
    if settings.protocol == "retrieval":
        return RetrievalScorer()
    if data_dir is None:
        raise UserError(
            f"{settings.protocol} needs the labels of a manifest, and tars have none",
            hint="give a data folder: --shards DIR",
        )
    if not has_text_tower:
        raise UserError(
            f"{settings.protocol} embeds texts, and this run has no text tower: its embeddings are stored",
            hint="use a run of --text-tower trained",
        )
    if settings.protocol == "mir":
        table = open_mir_table(
            data_dir, split=settings.split, relevancy=settings.relevancy, sentences=settings.sentences
        )
        return MirScorer(table)
    classes = open_class_prompts(
        data_dir,
        split=settings.split,
        classes=settings.classes,
        templates=settings.templates,
        label=settings.label,
    )
    return ZeroShotScorer(classes)
