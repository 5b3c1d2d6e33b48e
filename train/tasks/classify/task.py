"""Task `train classify`: samples, model and objective for fine-tuning a video tower on labelled clips.

The objective supports mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019). The kind of mixing and the mixing ratio
are drawn once per batch, from torch's CPU generator. Clip i of B clips is mixed with clip B - 1 - i, and their targets
are mixed with the same ratio. CutMix replaces the same rectangle in all frames.

Shape suffixes: B batch, R rows of a microbatch, K classes, D width, C channels, T frames, F frames in a segment of
latents, H and W height and width in pixels (or in values of a latent).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.shards.columns import LATENTS, VIDEO
from clipmill.train.config.model import LIBRARY, Towers, kind_of
from clipmill.train.data.batch import Batch
from clipmill.train.data.classes import ClassList
from clipmill.train.data.clip_frames import Views
from clipmill.train.data.frame_sampling import spread_frames, window_frames
from clipmill.train.data.query import DataQuery, loader_settings, open_samples, picture_size, read_classes_of
from clipmill.train.device.random import Positions, draw_uniform
from clipmill.train.device.transfer import Scalar
from clipmill.train.distributed.world import Step, World
from clipmill.train.engine.task import UNUSED_PARTS, ClipTask, drop_parts
from clipmill.train.evaluation.runner import sample_stride, split_metrics
from clipmill.train.losses.objective import Objective, backward_microbatches
from clipmill.train.models.attention import Attend
from clipmill.train.models.library_towers import LibraryImage, image_tower
from clipmill.train.models.transformer import LayerNorm, checkpoint_blocks, drop_path_of
from clipmill.train.models.video_vit import VideoViT, VideoViTSize, clip_tower
from clipmill.train.models.videomae import VideoMAEEncoder
from clipmill.train.run.tracking import count_batches
from clipmill.train.tasks.classify.evaluation import ClassResult, score_classifier
from clipmill.train.tasks.classify.spec import ClassEvaluation, ClassifySettings
from clipmill.train.weights.conversion import CLIP_MEAN, CLIP_STD
from clipmill.train.weights.loading import LoadedWeights, fit_to
from clipmill.train.weights.source import Say, Source

_FEATURE_NORM = "fc_norm."
# Standard deviation of the last layer's initial weights. 0.01 is AVION's value. VideoMAE multiplies 0.02 by its
# init_scale of 0.001.
_HEAD_STD = {"clip": 0.01, "videomae": 2e-5, LIBRARY: 0.01}


class VideoClassifier(nn.Module):
    """Classifier of clips: a video tower, dropout, and a linear layer with small initial weights.

    The feature vector of a clip is the class token of a CLIP tower before the projection, the embedding of a library
    tower, or the mean of all tokens of a videomae tower. After the mean, a layer norm replaces the last norm of the
    videomae tower, as in VideoMAE's fine-tuning.

    The tower's parameters are named `video.*`, as in other tasks. The classifier adds `fc_norm.*` and `head.*`.

    Args:
        size: Size of the tower.
        towers: Settings of the tower, including its kind.
        image_px: Side length of the frames.
        dropout: Dropout probability before the linear layer.
    """

    video: VideoViT | VideoMAEEncoder | LibraryImage

    def __init__(
        self,
        size: VideoViTSize,
        *,
        towers: Towers,
        image_px: int,
        num_frames: int,
        num_classes: int,
        dropout: float,
        attend: Attend,
    ) -> None:
        super().__init__()
        trunk, kind = size.trunk, kind_of(towers)
        self.fc_norm, width = None, trunk.width
        if kind == "videomae":
            drop_path = drop_path_of(towers.drop_path, depth=trunk.depth, is_rising=towers.drop_path_rule == "rising")
            self.video = VideoMAEEncoder(
                size,
                image_px=image_px,
                num_frames=num_frames,
                attend=attend,
                has_last_norm=False,
                drop_path=drop_path,
            )
            self.fc_norm = LayerNorm(trunk.width)
        else:
            build = clip_tower if kind == "clip" else image_tower
            self.video = build(
                size, image_px=image_px, num_frames=num_frames, embedding_width=None, attend=attend, towers=towers
            )
            width = getattr(self.video, "feature_width", width)
        if size.num_views > 1:
            from clipmill.train.models.views import accept_views

            accept_views(self.video, num_views=size.num_views, rule=towers.views)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_classes)
        nn.init.normal_(self.head.weight, std=_HEAD_STD[kind])
        nn.init.zeros_(self.head.bias)
        if towers.activation_checkpointing:
            checkpoint_blocks(self)

    def forward(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Return logits [B, K] for normalised clips [B, C, T, H, W]."""
        logits_BK: torch.Tensor = self.head(self.dropout(self.features(video_BCTHW)))
        return logits_BK

    def features(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Return the feature vectors of clips, the input of the linear layer, [B, D]."""
        if isinstance(self.video, VideoMAEEncoder):
            assert self.fc_norm is not None
            features_BD: torch.Tensor = self.fc_norm(self.video.features(video_BCTHW))
            return features_BD
        class_BD: torch.Tensor = self.video(video_BCTHW)
        return class_BD


if TYPE_CHECKING:
    from clipmill.train.data.mixed_samples import MixedSamples
    from clipmill.train.data.samples import Samples

    AnySamples = Samples[Any] | MixedSamples


class ClassifyTask(ClipTask[ClassifySettings, "AnySamples", VideoClassifier]):
    """The task of `train classify`.

    Args:
        classes: Classes of an existing run. Default: read the classes from the data when the training set is opened.
    """

    name = "classify"

    def __init__(self, settings: ClassifySettings, *, classes: ClassList | None = None, **arguments: Any) -> None:
        super().__init__(settings, **arguments)
        self._classes = classes
        self._evaluation_samples: dict[str, Samples[Any]] = {}
        self.columns: tuple[str, ...] = (LATENTS,) if settings.reads_latents else (VIDEO,)

    @property
    def classes(self) -> ClassList:
        """Classes of the model, in order."""
        assert self._classes is not None  # set by the constructor or by `training_set`
        return self._classes

    def facts(self) -> dict[str, Any]:
        """Return the entries for run.json."""
        return {"classes": self.classes.as_json(), **super().facts()}

    def training_set(self, world: World) -> "AnySamples":
        """Open this rank's part of the labelled clips, or segments of latents, in the training split.

        Raises:
            UserError: The split is empty, all its clips belong to one class, or an evaluation during training has
                unsuitable data.
        """
        settings = self._settings
        if self._classes is None:
            splits = (settings.split, settings.evaluate.split)
            self._classes = read_classes_of(settings, label=settings.label, splits=splits)
        samples = self.open_mixture(lambda task: task.samples(settings.split, world, repeats=settings.repeats))
        if len(np.unique(samples.labels)) < 2:
            name = self.classes.names[int(samples.labels[0])]
            raise UserError(
                f"all clips of split {settings.split!r} belong to the class {name!r}, but two classes are needed",
                hint="use more data, or a different --label",
            )
        if settings.evaluate.every:
            # Open the data now, so that errors in their settings are reported before training starts.
            for data in settings.evaluated_data():
                with data.explain_errors():
                    task = self.with_data(data.shards)
                    evaluation_samples = task.samples(data.split, world, views=_views(settings.evaluate))
                self._evaluation_samples[data.name] = evaluation_samples
                self.record_evaluation(data, evaluation_samples)
        return samples

    def samples(self, split: str, world: World, *, views: Views | None = None, repeats: int = 1) -> "Samples[Any]":
        """Open this rank's part of the labelled samples of a split.

        Args:
            views: Views of each clip in an evaluation; None for training.
            repeats: Number of samples per clip, for training.

        Raises:
            UserError: The split is empty, or does not fit the settings.
        """
        settings = self._settings
        loading = loader_settings(settings, world, device=self._device)
        loading = replace(loading, group=loading.group * repeats)
        if views is not None:
            # Reduce the batch size, because all views of a clip are in memory at the same time.
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

    def fit_weights(self, model: VideoClassifier, source: Source, *, say: Say) -> LoadedWeights:
        """Fit weights to the tower, and to the norm of the features if the weights contain this norm.

        The last layer always keeps its random initial weights. A text tower, CLIP's projection, a decoder, the last
        layer of a classifier, and the last norm of a masked autoencoder's encoder are not used.
        """
        tower = nn.Module()
        tower.video = model.video
        norm = getattr(model, "fc_norm", None)
        if norm is not None and any(name.startswith(_FEATURE_NORM) for name in source.converted.tensors):
            tower.fc_norm = norm
        unused_parts = dict(UNUSED_PARTS)
        if not any(name.startswith("video.ln_post.") for name in tower.state_dict()):
            unused_parts["video.ln_post."] = (
                "the encoder's last norm (video.ln_post), replaced by a new norm after the mean of the tokens"
            )
        return fit_to(
            tower,
            drop_parts(source, unused_parts, model="a classifier", say=say),
            allow=self._settings.init.allow,
            say=say,
        )

    def build_objective(self, samples: "AnySamples", world: World) -> Objective:
        """Build the objective: the cross-entropy with mixed targets."""
        inputs: Callable[[Batch, slice], torch.Tensor] = partial(self.inputs, is_training=True)
        return SoftCrossEntropy(
            inputs, self._settings, num_classes=len(self.classes), frame_px=picture_size(samples, self._settings)[1]
        )

    def inputs(self, batch: Batch, rows: slice = slice(None), *, is_training: bool = False) -> torch.Tensor:
        """Return the model's input, normalised clips [B, C, T, H, W], for the given rows of a batch."""
        if batch["input"] == "latents":
            positions = batch["position"][rows].numpy() if is_training else None
            return self._frames(batch["latents"][rows], positions).float().transpose(1, 2)
        return self.pixels(batch, rows, mean=CLIP_MEAN, std=CLIP_STD, is_training=is_training)

    def _frames(self, latents_BFCHW: torch.Tensor, positions: Positions | None) -> torch.Tensor:
        """Select frames [B, T, C, H, W] from segments of latents.

        Args:
            positions: Positions of the samples, used to draw random frames; None for centred frames.
        """
        count, seed = self._settings.num_frames, self._settings.seed
        if self._settings.sampling == "stride":
            offset = None if positions is None else draw_uniform(positions, 1, seed=seed, purpose="window")[:, 0]
            return window_frames(latents_BFCHW, num_frames=count, offset_B=offset)
        offset = None if positions is None else draw_uniform(positions, count, seed=seed, purpose="frames")
        return spread_frames(latents_BFCHW, num_frames=count, offset_BK=offset)

    def evaluate(self, model: nn.Module, world: World) -> dict[str, float]:
        """Return the accuracies on all evaluation data, as `<name>/<metric>`."""
        evaluation = self._settings.evaluate
        metrics: dict[str, float] = {}
        for name, samples in self._evaluation_samples.items():
            stride = sample_stride(len(samples), at_most=evaluation.max_samples)
            result = self.score(model, samples, world, views=_views(evaluation), stride=stride)
            metrics |= split_metrics(name, result.metrics, num_failed=result.num_failed)
        return metrics

    def score(
        self, model: nn.Module, samples: "Samples[Any]", world: World, *, views: Views, stride: int = 1
    ) -> ClassResult:
        """Score a model in evaluation mode. All ranks must call this method.

        Args:
            samples: Samples opened with the same `views`.
            stride: Step between the samples to score; 1 for all samples.
        """
        return score_classifier(
            model,
            count_batches(samples.evaluation_batches(stride=stride), "classifying", total=-(-len(samples) // stride)),
            inputs=self.inputs,
            classes=self.classes,
            num_views=len(views),
            world=world,
            device=self._device,
        )

    def new_model(self, samples: "AnySamples") -> VideoClassifier:
        """Build a classifier for the resolution of `samples`."""
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


def _views(evaluation: ClassEvaluation) -> Views:
    return Views(num_clips=evaluation.clips, num_crops=evaluation.crops)


# Index that replaces the microbatch index in the seed for drawing a batch's mix. Microbatch indices start at 0.
_MIX_INDEX = -1


class SoftCrossEntropy(Objective):
    """Objective of a classifier: the cross-entropy with soft targets, averaged over the batch.

    Args:
        inputs: Function that takes a batch and a slice of its rows, and returns normalised clips [R, C, T, H, W].
        frame_px: Height and width of the frames.
    """

    def __init__(
        self,
        inputs: Callable[[Batch, slice], torch.Tensor],
        settings: ClassifySettings,
        *,
        num_classes: int,
        frame_px: int,
    ) -> None:
        super().__init__()
        self._inputs, self._settings, self._num_classes, self._frame_px = inputs, settings, num_classes, frame_px

    def backward(self, model: nn.Module, batch: Batch, step: Step) -> dict[str, Scalar]:
        """Accumulate this rank's gradients, and return the loss of the global batch."""
        settings = self._settings
        num_samples = len(batch["label"])
        with step.seed_generators(_MIX_INDEX):
            mix = draw_mix(mixup=settings.mixup, cutmix=settings.cutmix, size_px=self._frame_px)
        targets_BK = mixed_targets(
            batch["label"], num_classes=self._num_classes, smoothing=settings.label_smoothing, mix=mix
        )

        def compute_loss(rows: slice) -> torch.Tensor:
            clips_RCTHW = self._inputs(batch, rows)
            if mix != NO_MIX:
                partner_rows = slice(num_samples - rows.stop, num_samples - rows.start)
                partners = clips_RCTHW if partner_rows == rows else self._inputs(batch, partner_rows)
                clips_RCTHW = mix_clips(clips_RCTHW, partners.flip(0), mix)
            with step.autocast():
                logits_RK = model(clips_RCTHW)
            # Weight the loss by the microbatch's fraction of the batch, so that the microbatch losses add up to the
            # mean over the batch.
            fraction = (rows.stop - rows.start) / num_samples
            return soft_cross_entropy(logits_RK.float(), targets_BK[rows]) * fraction

        losses = backward_microbatches(compute_loss, num_samples=num_samples, step=step)
        return {"loss": step.world.sum(sum(losses[1:], losses[0])).double() / step.world.size}


def soft_cross_entropy(logits_RK: torch.Tensor, targets_RK: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy between soft targets and logits, averaged over the rows (scalar)."""
    return -(targets_RK * logits_RK.log_softmax(dim=1)).sum(dim=1).mean()


@dataclass(frozen=True)
class Mix:
    """Parameters for mixing the clips of a batch with their partners.

    Attributes:
        weight: Weight of a clip's target in [0, 1]. The weight of its partner's target is 1 - weight.
        box: Top, bottom, left and right edges of the rectangle that comes from the partner, for CutMix; None for mixup.
    """

    weight: float
    box: tuple[int, int, int, int] | None = None


NO_MIX = Mix(1.0)


def draw_mix(*, mixup: float, cutmix: float, size_px: int) -> Mix:
    """Draw the mixing parameters of a batch.

    Args:
        mixup, cutmix: Alpha of the weight's Beta distribution; 0 disables mixup or CutMix. If both are positive, each
            batch uses one of them, with equal probability.
    """
    if not mixup and not cutmix:
        return NO_MIX
    is_cut = bool(cutmix) and (not mixup or torch.rand(()).item() < 0.5)
    alpha = torch.tensor(cutmix if is_cut else mixup, dtype=torch.float64)
    weight = torch.distributions.Beta(alpha, alpha).sample().item()
    if not is_cut:
        return Mix(weight)
    row, column = (int(torch.randint(size_px, ())) for _ in range(2))
    return cut_around(row, column, weight=weight, size_px=size_px)


def cut_around(row: int, column: int, *, weight: float, size_px: int) -> Mix:
    """Return CutMix parameters for a square around a pixel.

    The square covers the fraction 1 - `weight` of the frame's area, and is clipped to the frame. The result has the
    weight that corresponds to the clipped area.
    """
    half = int(size_px * math.sqrt(1 - weight)) // 2
    top, bottom = max(row - half, 0), min(row + half, size_px)
    left, right = max(column - half, 0), min(column + half, size_px)
    return Mix(1 - (bottom - top) * (right - left) / size_px**2, (top, bottom, left, right))


def mix_clips(clips_BCTHW: torch.Tensor, partners_BCTHW: torch.Tensor, mix: Mix) -> torch.Tensor:
    """Mix each clip with its partner, which is the clip in the same row of `partners_BCTHW`."""
    if mix.box is None:
        return mix.weight * clips_BCTHW + (1 - mix.weight) * partners_BCTHW
    top, bottom, left, right = mix.box
    mixed_BCTHW = clips_BCTHW.clone()
    mixed_BCTHW[..., top:bottom, left:right] = partners_BCTHW[..., top:bottom, left:right]
    return mixed_BCTHW


def mixed_targets(label_B: torch.Tensor, *, num_classes: int, smoothing: float, mix: Mix) -> torch.Tensor:
    """Return the targets of a batch after label smoothing and mixing, float32 [B, K]. Each row sums to 1.

    Args:
        smoothing: Fraction of the target to spread over all classes (Szegedy et al. 2016, section 7).
    """
    # torch's one_hot checks the range of the labels, which would make the CPU wait for the GPU.
    one_hot_BK = (label_B[:, None] == torch.arange(num_classes, device=label_B.device)).float()
    smooth_BK = one_hot_BK * (1 - smoothing) + smoothing / num_classes
    return mix.weight * smooth_BK + (1 - mix.weight) * smooth_BK.flip(0)
