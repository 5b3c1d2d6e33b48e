"""The captioner of a run that there is, ready to say captions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from train.data.batch import Batch, to_device
from train.engine.trained_run import TrainedRun, open_trained_run, read_settings
from train.models.captioner import Captioner
from train.run.folder import open_run
from train.tasks.caption.decoding import write_captions
from train.tasks.caption.runs import read_decoder_parts
from train.tasks.caption.settings import CaptionerSettings, DecodingSettings
from train.tasks.caption.task import CaptionTask


@dataclass(frozen=True)
class TrainedCaptioner:
    """A run and its model, which has the weights of the latest checkpoint and is in evaluation mode."""

    trained: TrainedRun[CaptionerSettings]
    task: CaptionTask
    model: Captioner

    @property
    def end_id(self) -> int:
        """The token before and behind a caption."""
        return self.task.decoder.tokenizer.end_id

    @torch.no_grad()
    def captions(self, batch: Batch, decoding: DecodingSettings, *, samples: Sequence[int]) -> list[str]:
        """A caption of each clip of a batch, one line each.

        Args:
            samples: a number of each clip, of its own, for what is drawn.
        """
        batch = to_device(batch, self.trained.device)
        with self.trained.precision.autocast():
            clips = self.task.inputs(batch)
            written = write_captions(self.model, clips, decoding, end_id=self.end_id, samples=samples)
        tokenizer = self.task.decoder.tokenizer
        return [tokenizer.text(ids) for ids in written.tokens_VL.tolist()]


def open_captioner(run_path: Path, *, shards: str | None = None) -> TrainedCaptioner:
    """Opens a run's latest checkpoint; no data is needed.

    Args:
        shards: data in place of that of the run.

    Raises:
        UserError: there is no such run, it is of another task, or has no checkpoint that fits it.
    """
    run = open_run(run_path)
    run.require_task(CaptionTask.name)
    settings = read_settings(run, CaptionerSettings, shards=shards)
    trained = open_trained_run(run, settings)
    task = CaptionTask(settings, attention=trained.attention, device=trained.device, decoder=read_decoder_parts(run))
    return TrainedCaptioner(trained, task, trained.fill(task.build_model()))
