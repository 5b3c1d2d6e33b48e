"""The captioner of a run that there is, ready to say captions."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manifests.errors import UserError
from train.caption.decoding.decode import write_captions
from train.caption.decoding.settings import DecodingSettings, within
from train.caption.runs import read_decoder_parts
from train.caption.settings import CaptionerSettings
from train.caption.tokenizer import one_line
from train.checkpoint import latest_checkpoint, read_facts, read_table, read_weights
from train.commands import choose_device
from train.data.batch import Batch, to_device
from train.models.attention import open_attention
from train.models.captioner import Captioner
from train.precision import open_precision
from train.run_folder import RunFolder, open_run
from train.settings_files import load_settings
from train.tasks.caption import CaptionTask


@dataclass(frozen=True, kw_only=True)
class TrainedCaptioner:
    """A run, its model with the weights of the latest checkpoint, in evaluation mode, and what they are.

    Attributes:
        settings: of the run, with the data that was asked for.
        step: of the checkpoint.
        weights: what they are, in words.
    """

    run: RunFolder
    settings: CaptionerSettings
    task: CaptionTask
    model: Captioner
    device: torch.device
    autocast: Callable[[], AbstractContextManager[None]]
    step: int
    weights: str

    @property
    def end_id(self) -> int:
        """The token before and behind a caption."""
        return self.task.decoder.tokenizer.end_id

    def decoding(self, wanted: DecodingSettings | None) -> DecodingSettings:
        """What takes effect: what is wanted, or what the run says; captions end where the decoder's context does.

        Raises:
            UserError: a limit that was asked for is beyond the context.
        """
        chosen = self.settings.decoding if wanted is None else wanted
        return within(chosen, self.task.decoder.size.context_length)

    @torch.no_grad()
    def captions(self, batch: Batch, decoding: DecodingSettings, *, samples: Sequence[int]) -> list[str]:
        """A caption of each clip of a batch, one line each.

        Args:
            samples: a number of each clip, of its own, for what is drawn.
        """
        batch = to_device(batch, self.device)
        with self.autocast():
            clips = self.task.inputs(batch)
            written = write_captions(self.model, clips, decoding, end_id=self.end_id, samples=samples)
        tokenizer = self.task.decoder.tokenizer
        return [one_line(tokenizer.text(ids)) for ids in written.tokens_VL.tolist()]


def open_captioner(run_path: Path, *, shards: str | None = None) -> TrainedCaptioner:
    """Opens a run's latest checkpoint; no data is needed.

    Args:
        shards: data in place of that of the run.

    Raises:
        UserError: there is no such run, it is of another task, or has no checkpoint that fits it.
    """
    run = open_run(run_path)
    run.require_task(CaptionTask.name)
    settings = load_settings(run.settings, CaptionerSettings)
    if shards is not None:
        settings = replace(settings, shards=shards)
    path = latest_checkpoint(run.checkpoints)
    if path is None:
        raise UserError(f"{run.path} has no checkpoint yet", hint="train until --checkpoint-every, or to the end")
    device = choose_device(settings.device)
    door = open_attention(settings.attention, device_type=device.type, compiles=settings.compile)
    precision = open_precision(settings.precision, device_type=device.type)
    task = CaptionTask(settings, door=door, device=device, decoder=read_decoder_parts(run))
    model = task.build_model().to(device)
    try:
        model.load_state_dict(read_weights(path))
    except RuntimeError as error:
        raise UserError(
            f"{path} does not fit the model of {run.settings}: {str(error).splitlines()[-1].strip()}",
            hint="were settings changed by hand? put back what the run was trained with",
        ) from error
    has_averages = any(name.startswith("ema.") for name in read_table(path))
    return TrainedCaptioner(
        run=run,
        settings=settings,
        task=task,
        model=model.eval(),
        device=device,
        autocast=precision.autocast,
        step=read_facts(path).step,
        weights=f"{'moving average of the weights' if has_averages else 'the weights themselves'}, {precision.name}",
    )
