"""`Use`: how trained weights are opened for evaluation, embedding, export and captioning."""

from dataclasses import dataclass, replace
from pathlib import Path

from clipmill.train.config.clips import AS_TRAINED, ClipSettings, Overrides
from clipmill.train.config.training import Device


@dataclass(frozen=True, kw_only=True)
class Use:
    """What trained weights are used for, where that differs from their training.

    Attributes:
        shards: data that replaces a run's own; other weights have none.
        where: condition on the samples that the task opens; that of a run's training does not apply.
        device: replaces a run's own: auto, cpu or cuda.
        overrides: of how clips are shown; embeddings of time and place are interpolated.
        is_without_data: let the task build models without samples, by the shapes of the weights.
        checkpoint: of a run, in place of its latest.
    """

    shards: str | None = None
    where: str | None = None
    device: Device | None = None
    overrides: Overrides = AS_TRAINED
    is_without_data: bool = False
    checkpoint: Path | None = None

    def applied(self, settings: ClipSettings) -> tuple[ClipSettings, Overrides]:
        """The settings of weights for this use, and the overrides that differ from the training.

        Raises:
            UserError: clips of latents cannot be shown in that way.
        """
        settings = replace(settings, device=self.device or settings.device)
        settings = replace(settings if self.shards is None else settings.on(self.shards), where=self.where, share=1.0)
        overrides = self.overrides.beside(settings)
        return overrides.apply_to(settings), overrides


AS_IN_TRAINING = Use()
