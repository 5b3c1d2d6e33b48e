"""`Use`: options for opening trained weights for evaluation, embedding, export and captioning."""

from dataclasses import dataclass, replace
from pathlib import Path

from clipmill.train.config.clips import AS_TRAINED, ClipSettings, Overrides
from clipmill.train.config.training import Device


@dataclass(frozen=True, kw_only=True)
class Use:
    """Options for using trained weights in another way than in their training.

    Attributes:
        shards: Data to use in place of a run's data; other weights have no data of their own.
        variant: Names of variants of the data to read; others are the variants of the training, or the current ones.
        where: Condition on the samples that the task opens. The condition of the training does not apply.
        device: Device to use in place of the run's device: auto, cpu or cuda.
        overrides: Changes of how clips are shown. Embeddings of time and place are interpolated.
        is_without_data: Let the task build models without samples, from the shapes of the weights.
        checkpoint: Checkpoint of a run, in place of the latest one.
    """

    shards: str | None = None
    variant: tuple[str, ...] = ()
    where: str | None = None
    device: Device | None = None
    overrides: Overrides = AS_TRAINED
    is_without_data: bool = False
    checkpoint: Path | None = None

    def apply_to(self, settings: ClipSettings) -> tuple[ClipSettings, Overrides]:
        """Apply this use to the settings of weights; also return the overrides that differ from the training.

        Raises:
            UserError: Clips of latents cannot be shown in this way.
        """
        settings = replace(settings, device=self.device or settings.device)
        settings = replace(
            settings if self.shards is None else settings.with_data(self.shards), where=self.where, share=1.0
        )
        overrides = self.overrides.changed_from(settings)
        return overrides.apply_to(settings), overrides


AS_IN_TRAINING = Use()
