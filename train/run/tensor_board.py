"""TensorBoard's event files."""

from typing import Any

from train.config.files import settings_yaml
from train.config.training import TrainingSettings
from train.run.folder import RunFolder
from train.run.tracking import tagged


class TensorBoard:
    """RUN/tensorboard: curves, and the settings and the place of the results page as texts.

    A run that is resumed writes a further file, which says that what others have of later steps than `step` is void.
    """

    def __init__(self, settings: TrainingSettings, *, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.path / "tensorboard"), purge_step=step + 1)
        if step == 0:
            self._writer.add_text("settings", f"```yaml\n{settings_yaml(settings)}```", 0)
            self._writer.add_text("page", str(run.page.resolve()), 0)

    def log(self, line: dict[str, Any]) -> None:
        """Writes a point for each number."""
        for tag, value in tagged(line).items():
            self._writer.add_scalar(tag, value, line["step"])
        # Else a run that is killed loses steps that its checkpoint has.
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()
