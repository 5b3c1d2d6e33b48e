"""Settings of `train dual-encoder`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from train.config.data import CaptionSettings
from train.config.evaluation import NUMBERS, DualEncoderEvaluation
from train.config.model import check_picture
from train.losses.settings import Loss

if TYPE_CHECKING:
    pass
from train.config.training import ClipSettings, check_best

_CLIPS = Parameter(group="Clips")
_EVALUATION = Parameter(group="Evaluation")
_NO_RETRIEVAL = DualEncoderEvaluation()
_CAPTIONS = Parameter(group="Captions")
_ALL_CAPTIONS = CaptionSettings()
_LOSS = Parameter(group="Loss")
_INFONCE = Loss()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DualEncoderSettings(ClipSettings):
    """Settings of `train dual-encoder`."""

    command = "dual-encoder"
    only_kind = "clip"

    input: Annotated[Literal["pixels", "latents"], _CLIPS] = "pixels"
    """pixels: clips of captions, decoded; latents: segments of the column that prep latents made."""
    text_tower: Annotated[Literal["trained", "frozen"], _CLIPS] = "trained"
    """frozen: the embeddings that prep text made stand in for a text tower."""
    segment: Annotated[str, _CLIPS] = "5s"
    """Length of a segment of latents."""
    captions: Annotated[CaptionSettings, _CAPTIONS] = _ALL_CAPTIONS
    """Which of a clip's captions a visit shows."""
    loss: Annotated[Loss, _LOSS] = _INFONCE
    """What the towers are trained towards."""
    evaluate: Annotated[DualEncoderEvaluation, _EVALUATION] = _NO_RETRIEVAL
    """Evaluation while the model is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input == "latents" and self.captions.min_relevancy is not None:
            raise UserError(
                "--captions.min-relevancy draws captions for clips, and segments of latents are none",
                hint="leave it out, or use --input pixels",
            )
        if self.batch < 2:
            raise UserError(
                f"--batch is {self.batch}", hint="it must be at least 2: a caption needs others to be told from"
            )
        check_best(self.best, split=self.evaluate.split, names=NUMBERS[self.evaluate.protocol])
        if self.input == "pixels":
            check_picture(self.model, size_px=self.size_px)
        if self.text_tower == "frozen" and self.towers.embedding_width is not None:
            raise UserError(
                f"--towers.embedding-width is {self.towers.embedding_width}, and stored embeddings have their own",
                hint="leave it out with --text-tower frozen",
            )
