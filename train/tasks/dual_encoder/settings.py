"""Settings of `train dual-encoder`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.train.config import fields as groups
from clipmill.train.config.data import CaptionSettings
from clipmill.train.config.evaluation import DualEncoderEvaluation
from clipmill.train.config.fields import FIRST_RUN, caught, help_group
from clipmill.train.config.latents import LatentSettings
from clipmill.train.config.model import check_picture
from clipmill.train.config.tuning import Tower
from clipmill.train.losses.settings import Loss

LOSS = help_group("Loss", 6)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DualEncoderSettings(LatentSettings):
    """Settings of `train dual-encoder`."""

    command = "dual-encoder"
    of_other_data: ClassVar[Mapping[str, Any]] = {"captions": CaptionSettings()}
    only_kind = "clip"

    text_tower: Annotated[Literal["trained", "frozen"], groups.MODEL, FIRST_RUN] = "trained"
    """Text tower. frozen: the embeddings made by prep text take its place."""
    captions: Annotated[CaptionSettings, groups.CAPTIONS] = field(default_factory=CaptionSettings)
    """Which caption of a clip a sample shows."""
    loss: Annotated[Loss, LOSS] = field(default_factory=Loss)
    """Contrastive loss."""
    evaluate: Annotated[DualEncoderEvaluation, groups.EVALUATION] = field(default_factory=DualEncoderEvaluation)

    def tower_names(self) -> tuple[Tower, ...]:
        """The towers that the model has: stored embeddings take the place of a text tower."""
        return ("video",) if self.text_tower == "frozen" else ("video", "text")

    def rules(self) -> Iterator[UserError]:
        """Yields batches without negatives, and settings that do not suit the input or the text tower."""
        yield from super().rules()
        if self.reads_latents and self.captions.min_relevancy is not None:
            yield UserError(
                "--captions.min-relevancy draws captions for clips, not for segments of latents",
                hint="leave it out, or use --input pixels",
            )
        if self.batch < 2:
            yield UserError(
                f"--batch is {self.batch}", hint="it must be at least 2: a contrastive loss needs negatives"
            )
        if not self.reads_latents:
            yield from caught(check_picture, self.model, size_px=self.size_px)
        if self.text_tower == "frozen" and self.towers.embedding_width is not None:
            yield UserError(
                f"--towers.embedding-width is {self.towers.embedding_width}, and stored embeddings have their own",
                hint="leave it out with --text-tower frozen",
            )
