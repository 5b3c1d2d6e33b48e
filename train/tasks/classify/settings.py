"""Settings of `train classify`."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from train.config.data import Augment
from train.config.evaluation import EvaluationSettings
from train.config.model import check_picture
from train.config.training import ClipSettings

_CLIPS = Parameter(group="Clips")
_CLASSES = Parameter(group="Classes")
_EVALUATION = Parameter(group="Evaluation")


@dataclass(frozen=True, kw_only=True)
class ClassEvaluation(EvaluationSettings):
    """How a classifier is evaluated."""

    clips: int = 1
    """Looks at each clip, at different moments; probabilities are averaged over all views."""
    crops: int = 1
    """Squares that each look is cut out as: 1 is the centre, 3 are both ends and the centre."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clips", "crops"):
            if not 1 <= getattr(self, name) <= 100:
                raise UserError(f"--evaluate.{name} is {getattr(self, name)}", hint="it must be from 1 to 100")


_NO_EVALUATION = ClassEvaluation()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClassifySettings(ClipSettings):
    """Settings of `train classify`."""

    command = "classify"

    input: Annotated[Literal["pixels", "latents"], _CLIPS] = "pixels"
    """pixels: clips of captions, decoded; latents: segments of the column that prep latents made."""
    segment: Annotated[str, _CLIPS] = "5s"
    """Length of a segment of latents, whose label is that of the caption which covers most of it."""
    repeats: Annotated[int, _CLIPS] = 1
    """Samples of a clip in a row (repeated augmentation), each with its own moments and crop; decoded once."""
    label: Annotated[str, _CLASSES] = "class"
    """Label of the captions that is learned: class (Kinetics), action (EPIC-KITCHENS: verb and noun), or another."""
    dropout: Annotated[float, _CLASSES] = 0.0
    """Share of the tower's features that training leaves out before the last layer."""
    label_smoothing: Annotated[float, _CLASSES] = 0.0
    """Part of a target that is spread over all classes."""
    mixup: Annotated[float, _CLASSES] = 0.0
    """Alpha of the Beta distribution of mixup's shares; 0 for none. With --cutmix, a coin decides for each batch."""
    cutmix: Annotated[float, _CLASSES] = 0.0
    """Alpha of the Beta distribution of cutmix's shares; 0 for none."""
    evaluate: Annotated[ClassEvaluation, _EVALUATION] = _NO_EVALUATION
    """Evaluation while the model is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.towers.kind == "timesformer":
            raise UserError("--towers.kind is timesformer, and train caption alone has it", hint="use clip or videomae")
        if self.input == "pixels":
            check_picture(self.model, size_px=self.size_px)
        else:
            self._check_latents()
        if not 1 <= self.repeats <= 1000:
            raise UserError(f"--repeats is {self.repeats}", hint="it must be from 1 to 1,000")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} is {getattr(self, name)}", hint="it must be 0 or more, and less than 1")
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) <= 100:
                raise UserError(f"--{name} is {getattr(self, name)}", hint="it must be from 0 to 100")
        if (self.mixup or self.cutmix) and self.batch < 2:
            raise UserError(f"--batch is {self.batch}, and --mixup and --cutmix mix two clips", hint="use 2 or more")

    def _check_latents(self) -> None:
        changed = next(
            (field.name for field in fields(Augment) if getattr(self.augment, field.name) != field.default), ""
        )
        if changed:
            raise UserError(
                f"--augment.{changed.replace('_', '-')} changes pictures, and latents are none",
                hint="leave it out with --input latents, or use --input pixels",
            )
        if self.repeats > 1:
            raise UserError(
                f"--repeats is {self.repeats}, and latents have no decoding that it could save",
                hint="leave it out with --input latents",
            )
        if self.sampling == "lavila":
            raise UserError(
                "--sampling lavila is a rule for the frames of clips, and segments of latents are none",
                hint="use --sampling uniform, or stride for frames in a row",
            )
