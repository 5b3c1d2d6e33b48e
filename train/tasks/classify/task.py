"""Fine-tune a video tower to classify the clips of a labelled set.

Shape suffixes: B batch, C channels, T frames, H and W pixels (or values of a latent).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.shards.columns import LATENTS, VIDEO
from clipmill.train.data.batch import Batch
from clipmill.train.data.classes import ClassList
from clipmill.train.data.decoding.clip import Views
from clipmill.train.data.frame_sampling import spread_frames, window_frames
from clipmill.train.data.inputs import picture_size, read_classes_of
from clipmill.train.data.query import DataQuery, loader_settings, open_samples
from clipmill.train.device.random import Positions, draw_uniform
from clipmill.train.distributed.world import World
from clipmill.train.engine.task import ClipTask
from clipmill.train.evaluation.runner import every_for, split_metrics
from clipmill.train.losses.objective import Objective
from clipmill.train.run.tracking import counted_batches
from clipmill.train.tasks.classify.evaluation import ClassResult, score_classifier
from clipmill.train.tasks.classify.model import VideoClassifier, start_of_classifier
from clipmill.train.tasks.classify.objective import SoftCrossEntropy
from clipmill.train.tasks.classify.settings import ClassEvaluation, ClassifySettings
from clipmill.train.weights.conversion import CLIP_MEAN, CLIP_STD
from clipmill.train.weights.loading import Loaded
from clipmill.train.weights.source import Say, Source

if TYPE_CHECKING:
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.data.samples import Samples

    AnySamples = Samples[Any] | MixedSamples


class ClassifyTask(ClipTask[ClassifySettings, "AnySamples", VideoClassifier]):
    """The task of `train classify`.

    Args:
        classes: of an existing run; if they are left out, they are read with the training set.
    """

    name = "classify"

    def __init__(self, settings: ClassifySettings, *, classes: ClassList | None = None, **opened: Any) -> None:
        super().__init__(settings, **opened)
        self._classes = classes
        self._held_out: dict[str, Samples[Any]] = {}
        self.columns: tuple[str, ...] = (LATENTS,) if settings.reads_latents else (VIDEO,)

    @property
    def classes(self) -> ClassList:
        """The classes of the model."""
        assert self._classes is not None  # given, or read by training_set
        return self._classes

    def facts(self) -> dict[str, Any]:
        """Entries of run.json."""
        return {"classes": self.classes.as_json(), **super().facts()}

    def training_set(self, world: World) -> "AnySamples":
        """This rank's part of the labelled clips, or segments of latents, of the split that the settings name.

        Raises:
            UserError: there are none, or all are of one class.
        """
        settings = self._settings
        if self._classes is None:
            splits = (settings.split, settings.evaluate.split)
            self._classes = read_classes_of(settings, label=settings.label, splits=splits)
        samples = self.open_mixture(lambda task: task.samples(settings.split, world, repeats=settings.repeats))
        if len(np.unique(samples.labels)) < 2:
            name = self.classes.names[int(samples.labels[0])]
            raise UserError(
                f"all clips of split {settings.split!r} are of the class {name!r}: there is nothing to tell apart",
                hint="use more data, or another --label",
            )
        if settings.evaluate.every:
            # Opened now, so that a mistake in its settings is reported before training starts.
            for one in settings.evaluated():
                with one.opening():
                    found = self.on(one.shards).samples(one.split, world, views=_views(settings.evaluate))
                self._held_out[one.name] = found
                self.note_evaluation(one, found)
        return samples

    def samples(self, split: str, world: World, *, views: Views | None = None, repeats: int = 1) -> "Samples[Any]":
        """This rank's part of the labelled samples of any split.

        Args:
            views: of an evaluation.
            repeats: samples of a clip, in training.

        Raises:
            UserError: there are none, or they do not fit the settings.
        """
        settings = self._settings
        loading = loader_settings(settings, world, device=self._device)
        loading = replace(loading, group=loading.group * repeats)
        if views is not None:
            # A clip takes the memory of all its views.
            loading = replace(loading, batch=max(1, loading.batch // len(views)))
        query = DataQuery(
            settings=settings,
            content="labels",
            split=split,
            loading=loading,
            views=views or Views(),
            classes=(self.classes,),
            repeats=repeats,
        )
        samples: Samples[Any] = open_samples(query)
        return samples

    def fit_weights(self, model: VideoClassifier, source: Source, *, say: Say) -> Loaded:
        """Fit weights to the tower; the last layer is always new."""
        return start_of_classifier(model, source, allow=self._settings.init.allow, say=say)

    def build_objective(self, samples: "AnySamples", world: World) -> Objective:
        """Cross-entropy with mixed targets."""
        inputs: Callable[[Batch, slice], torch.Tensor] = partial(self.inputs, is_training=True)
        return SoftCrossEntropy(
            inputs, self._settings, num_classes=len(self.classes), side=picture_size(samples, self._settings)[1]
        )

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        """Clips [B, C, T, H, W] of some rows of a batch, as the model takes them."""
        if batch["input"] == "latents":
            positions = batch["position"][rows].numpy() if is_training else None
            return self._frames(batch["latents"][rows], positions).float().transpose(1, 2)
        return self.pixels(batch, rows, mean=CLIP_MEAN, std=CLIP_STD, is_training=is_training)

    def _frames(self, latents_BFCHW: torch.Tensor, positions: Positions | None) -> torch.Tensor:
        """Frames [B, T, C, H, W] of segments of latents: random ones for `positions`, otherwise centred ones."""
        count, seed = self._settings.num_frames, self._settings.seed
        if self._settings.sampling == "stride":
            within = None if positions is None else draw_uniform(positions, 1, seed=seed, purpose="window")[:, 0]
            return window_frames(latents_BFCHW, num_frames=count, offset_B=within)
        within = None if positions is None else draw_uniform(positions, count, seed=seed, purpose="frames")
        return spread_frames(latents_BFCHW, num_frames=count, offset_BK=within)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Accuracies on the data that the settings name, as `<name>/<metric>`."""
        wanted = self._settings.evaluate
        metrics: dict[str, float] = {}
        for name, samples in self._held_out.items():
            every = every_for(len(samples), at_most=wanted.max_samples)
            result = self.score(model, samples, world, views=_views(wanted), every=every)
            metrics |= split_metrics(name, result.metrics, num_failed=result.num_failed)
        return metrics

    def score(
        self, model: nn.Module, samples: "Samples[Any]", world: World, *, views: Views, every: int = 1
    ) -> ClassResult:
        """Score a model in evaluation mode on samples that were opened with `views`; collective."""
        return score_classifier(
            model,
            counted_batches(samples.evaluation_batches(every=every), "classifying", total=-(-len(samples) // every)),
            inputs=self.inputs,
            classes=self.classes,
            num_views=len(views),
            world=world,
            device=self._device,
        )

    def new_model(self, samples: "AnySamples") -> VideoClassifier:
        """A tower for clips as `samples` has them, and a new last layer."""
        settings = self._settings
        if self._shape is not None:
            size, image_px = self._shape.size.video, self._shape.image_px
        else:
            size, image_px = picture_size(samples, settings)
        return VideoClassifier(
            size,
            towers=settings.towers,
            image_px=image_px,
            num_frames=settings.num_frames,
            num_classes=len(self.classes),
            dropout=settings.dropout,
            attend=self._attention.attend,
        )


def _views(wanted: ClassEvaluation) -> Views:
    return Views(num_clips=wanted.clips, num_crops=wanted.crops)
