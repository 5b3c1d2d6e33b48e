"""`Use`: options for opening trained weights for evaluation, embedding, export and captioning."""

from dataclasses import dataclass, replace
from pathlib import Path

from clipmill.train.config.clips import AS_TRAINED, ClipSettings, Overrides
from clipmill.train.config.training import Device


@dataclass(frozen=True, kw_only=True)
class Use:
    """Options of a use of trained weights, where it differs from their training.

    Attributes:
        shards: Data that replace the data of a run; other weights have none.
        where: Condition on the samples that the task opens; the condition of the training does not apply.
        device: Device that replaces the device of a run: auto, cpu or cuda.
        overrides: Overrides of how clips are shown; embeddings of time and place are interpolated.
        is_without_data: True to let the task build models without samples, by the shapes of the weights.
        checkpoint: Checkpoint of a run, instead of the latest one.
    """

    shards: str | None = None
    where: str | None = None
    device: Device | None = None
    overrides: Overrides = AS_TRAINED
    is_without_data: bool = False
    checkpoint: Path | None = None

    def apply_to(self, settings: ClipSettings) -> tuple[ClipSettings, Overrides]:
        """Return the settings of weights for this use, and the overrides that differ from the training.

        Raises:
            UserError: Clips of latents cannot be shown in that way.
        """
        settings = replace(settings, device=self.device or settings.device)
        settings = replace(settings if self.shards is None else settings.on(self.shards), where=self.where, share=1.0)
        overrides = self.overrides.beside(settings)
        return overrides.apply_to(settings), overrides


AS_IN_TRAINING = Use()
