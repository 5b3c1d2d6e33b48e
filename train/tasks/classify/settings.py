"""Settings of `train classify`."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import SHARE, GoesWith, Range, errors_of
from clipmill.train.config import fields as groups
from clipmill.train.config.clips import Augment, LatentSettings
from clipmill.train.config.evaluation import EVERY, EvaluationSettings
from clipmill.train.config.fields import FIRST_RUN, help_group
from clipmill.train.config.model import LIBRARY, check_picture

CLASSES = help_group("Classes", 6)
VIEWS = Range(1, 100)
_ALPHA = Range(0, 100)


@dataclass(frozen=True, kw_only=True)
class ClassEvaluation(EvaluationSettings):
    """How a classifier is evaluated."""

    # The split is read in any case: for its classes.
    split: str = "val"
    clips: Annotated[int, VIEWS, EVERY] = 1
    """Number of temporal views per clip. Probabilities are averaged over all views."""
    crops: Annotated[int, VIEWS, EVERY] = 1
    """Number of spatial crops per view, spread over the longer side; 1: the centre, 3: both ends and the centre."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClassifySettings(LatentSettings):
    """Settings of `train classify`."""

    command = "classify"
    has_head = True

    segment: Annotated[str | None, groups.CLIPS, GoesWith("input", ("latents",))] = None
    """Length of a segment of latents, such as 5s. Its label is that of the caption which covers most of it. Default:
    the stored segments of a VAE of videos; 5s of other latents."""
    repeats: Annotated[int, groups.CLIPS, Range(1, 1000)] = 1
    """Number of samples per clip (repeated augmentation), decoded once, each with its own frames and crop."""
    label: Annotated[str, CLASSES, FIRST_RUN] = "class"
    """Label column to classify: class (Kinetics), action (EPIC-KITCHENS: verb and noun), or another one."""
    dropout: Annotated[float, CLASSES, SHARE] = 0.0
    """Dropout probability before the classification head."""
    label_smoothing: Annotated[float, CLASSES, FIRST_RUN, SHARE] = 0.0
    """Label smoothing. Share of the target that is spread over all classes."""
    mixup: Annotated[float, CLASSES, FIRST_RUN, _ALPHA] = 0.0
    """Alpha of mixup's Beta distribution; 0: no mixup. With --cutmix, one of the two is drawn for each batch."""
    cutmix: Annotated[float, CLASSES, FIRST_RUN, _ALPHA] = 0.0
    """Alpha of CutMix's Beta distribution; 0: no CutMix."""
    evaluate: Annotated[ClassEvaluation, groups.EVALUATION] = field(default_factory=ClassEvaluation)

    def rules(self) -> Iterator[UserError]:
        """Yields towers that do not suit the input, and augmentation that does not apply to it."""
        yield from super().rules()
        if (kind := self.towers.kind) not in (None, "clip", "videomae", LIBRARY):
            yield UserError(
                f"--towers.kind is {kind}, a tower that this task does not support",
                hint="use clip or videomae",
                flags=("--towers.kind",),
            )
        if not self.reads_latents:
            yield from errors_of(check_picture, self.model, self.towers, size_px=self.size_px)
        else:
            yield from self._rules_of_latents()
        if (self.mixup or self.cutmix) and self.batch < 2:
            yield UserError(
                f"--batch is {self.batch}, and --mixup and --cutmix mix two clips",
                hint="use 2 or more",
                flags=("--batch", "--mixup", "--cutmix"),
            )

    def _rules_of_latents(self) -> Iterator[UserError]:
        for one in fields(Augment):
            if getattr(self.augment, one.name) != one.default:
                yield UserError(
                    f"{self.augment.flag(one.name)} applies to frames in pixels, not to latents",
                    hint="leave it out with --input latents, or use --input pixels",
                    flags=(self.augment.flag(one.name),),
                )
        if self.repeats > 1:
            yield UserError(
                f"--repeats is {self.repeats}, but latents are not decoded, so that it saves nothing",
                hint="leave it out with --input latents",
                flags=("--repeats",),
            )
        if self.sampling == "lavila":
            yield UserError(
                "--sampling lavila applies to the frames of clips, not to segments of latents",
                hint="use --sampling uniform, or stride for frames in a row",
                flags=("--sampling",),
            )
