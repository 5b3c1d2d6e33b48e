"""Fine-tuning a video tower to tell the classes of a labelled set apart.

Shape suffixes: B batch, C channels, T frames, H and W pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from manifests.errors import UserError
from train.augment.draws import draw
from train.augment.pictures import to_model_input
from train.classify.classes import ClassList, read_classes
from train.classify.evaluating import ClassResult, score_classifier
from train.classify.model import VideoClassifier
from train.classify.objective import SoftCrossEntropy
from train.classify.settings import ClassEvaluation, ClassifySettings
from train.classify.start import start_of_classifier
from train.data.batch import Batch
from train.data.decoding.clip import Views
from train.data.labelled_clips import LabelledClips
from train.data.remote.folder import open_data_folder
from train.data.streams.tars import names_tars
from train.distributed.world import World
from train.models.attention import AttentionDoor
from train.models.dual_encoder import size_of
from train.models.transformer import blocks_of, compile_blocks
from train.objective import Objective
from train.tasks.clips import clip_shape, loader_settings
from train.weights.converted import CLIP_MEAN, CLIP_STD
from train.weights.loading import Loaded, copy_into
from train.weights.sources import Say, Source


class ClassifyTask:
    """The task of `train classify`.

    Args:
        classes: of a run that there is; else they are read with the training set.
    """

    name = "classify"
    columns: tuple[str, ...] = ("video",)

    def __init__(
        self,
        settings: ClassifySettings,
        *,
        door: AttentionDoor,
        device: torch.device,
        classes: ClassList | None = None,
    ) -> None:
        self._settings, self._door, self._device = settings, door, device
        self._classes = classes
        self._start: Loaded | None = None
        self._held_out: LabelledClips | None = None

    @property
    def classes(self) -> ClassList:
        """What a model tells apart."""
        assert self._classes is not None  # given, or read by training_set
        return self._classes

    def facts(self) -> dict[str, Any]:
        """For run.json."""
        return {"classes": self.classes.as_json()}

    def training_set(self, world: World) -> LabelledClips:
        """This rank's part of the labelled clips of the split that the settings name.

        Raises:
            UserError: there are none, or all are of one class.
        """
        settings = self._settings
        if names_tars(settings.shards):
            raise UserError(
                f"{settings.shards} is a stream of tars, and labels are in the manifest of a data folder",
                hint="name the data folder that prep made",
            )
        folder = open_data_folder(settings.shards, cache=settings.cache)
        self._classes = read_classes(
            folder.path, label=settings.label, splits=(settings.split, settings.evaluate.split)
        )
        samples = self.samples(settings.split, world, repeats=settings.repeats)
        if len(np.unique(samples.labels)) < 2:
            name = self.classes.names[int(samples.labels[0])]
            raise UserError(
                f"all clips of split {settings.split!r} are of the class {name!r}: there is nothing to tell apart",
                hint="use more data, or another --label",
            )
        if settings.evaluate.every:
            # Made now, so that a mistake in its settings ends the run before it begins.
            self._held_out = self.samples(settings.evaluate.split, world, views=_views(settings.evaluate))
        return samples

    def samples(self, split: str, world: World, *, views: Views | None = None, repeats: int = 1) -> LabelledClips:
        """This rank's part of the labelled clips of any split.

        Args:
            views: of an evaluation.
            repeats: samples of a clip, in training.
        """
        settings = self._settings
        folder = open_data_folder(settings.shards, cache=settings.cache)
        loading = loader_settings(settings, world, device=self._device)
        loading = replace(loading, group=loading.group * repeats)
        if views is not None:
            # A clip of an evaluation takes the memory of all its views.
            loading = replace(loading, batch=max(1, loading.batch // len(views)))
        return LabelledClips(
            folder.path,
            split=split,
            classes=self.classes,
            shape=clip_shape(settings, views=views or Views()),
            loading=loading,
            decode=settings.decode,
            tars=folder.tars,
            repeats=repeats,
        )

    def start_from(self, source: Source, samples: LabelledClips, *, say: Say) -> Loaded:
        """Has `build_model` give towers these weights, once they fit; the last layer is always new.

        Raises:
            UserError: they do not fit, and nothing explains why.
        """
        with torch.device("meta"):
            model = self._classifier()
        self._start = start_of_classifier(model, source, allow=self._settings.init.allow, say=say)
        return self._start

    def build_model(self, samples: LabelledClips | None = None) -> VideoClassifier:
        """A tower and a new last layer."""
        model = self._classifier()
        if self._start is not None:
            copy_into(model, self._start)
        if self._settings.compile:
            compile_blocks(model)
        return model

    def build_objective(self, samples: LabelledClips, world: World) -> Objective:
        """Cross-entropy with mixed targets."""
        inputs: Callable[[Batch, slice], torch.Tensor] = partial(self.inputs, is_training=True)
        return SoftCrossEntropy(inputs, self._settings, num_classes=len(self.classes))

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks of the tower."""
        return blocks_of(model)

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        """Clips [B, C, T, H, W] of some rows of a batch, as the model takes them."""
        settings, init = self._settings, self._settings.init
        drawn = None
        if is_training:
            drawn = draw(batch["position"][rows].numpy(), settings.augment, seed=settings.seed)
        return to_model_input(
            batch["video"][rows],
            batch["colour"][rows],
            size_px=settings.size_px,
            mean=init.pixel_mean or CLIP_MEAN,
            std=init.pixel_std or CLIP_STD,
            draw=drawn,
        )

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Accuracies on the split that the settings name, as `<split>/<name>`."""
        if self._held_out is None:
            return {}
        wanted = self._settings.evaluate
        every = -(-len(self._held_out) // wanted.max_samples)
        result = self.score(model, self._held_out, world, views=_views(wanted), every=every)
        numbers = dict(result.numbers)
        if result.num_failed:
            numbers["num_failed"] = float(result.num_failed)
        return {f"{wanted.split}/{name}": value for name, value in numbers.items()}

    def score(
        self, model: nn.Module, samples: LabelledClips, world: World, *, views: Views, every: int = 1
    ) -> ClassResult:
        """Scores a model, which is in evaluation mode, on samples that were opened with `views`; collective."""
        return score_classifier(
            model,
            samples.evaluation_batches(every=every),
            inputs=self.inputs,
            classes=self.classes,
            num_views=len(views),
            world=world,
            device=self._device,
        )

    def _classifier(self) -> VideoClassifier:
        settings = self._settings
        return VideoClassifier(
            size_of(settings.model, settings.towers).video,
            towers=settings.towers,
            image_px=settings.size_px,
            num_frames=settings.num_frames,
            num_classes=len(self.classes),
            dropout=settings.dropout,
            attend=self._door.attend,
        )


def _views(wanted: ClassEvaluation) -> Views:
    return Views(num_clips=wanted.clips, num_crops=wanted.crops)
