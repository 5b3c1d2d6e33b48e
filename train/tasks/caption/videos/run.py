"""Caption video files with a trained captioner: what `train caption-video` runs."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity
from clipmill.train.config.data import AS_TRAINED, Overrides
from clipmill.train.config.training import Device
from clipmill.train.data.batch import Batch, to_device
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.engine.trained_run import TrainedRun
from clipmill.train.evaluation.identity import identity_of
from clipmill.train.evaluation.opening import open_weights_as
from clipmill.train.evaluation.use import Use
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.model import AnyCaptioner
from clipmill.train.tasks.caption.settings import CaptionerSettings, DecodingSettings, VideoFormat
from clipmill.train.tasks.caption.spec import TASK
from clipmill.train.tasks.caption.task import CaptionTask
from clipmill.train.tasks.caption.videos.captioning import (
    Caption,
    CaptionClips,
    VideoEnd,
    VideoProgress,
    caption_videos,
)
from clipmill.train.tasks.caption.videos.clips import WindowClip, length_us
from clipmill.train.tasks.caption.videos.outputs import open_sink, print_windows
from clipmill.train.tasks.caption.videos.source import find_videos, shown_name
from clipmill.train.weights.source import Say

_MAX_NAMED = 5


@dataclass(frozen=True)
class TrainedCaptioner:
    """A run and its model with the weights of the latest checkpoint, in evaluation mode; `name` is that of the run."""

    name: str
    trained: TrainedRun[CaptionerSettings]
    task: CaptionTask
    model: AnyCaptioner

    @cached_property
    def weights_sha256(self) -> str:
        """The identity of the weights: equal for a run and its exports."""
        return identity_of(self.model, self.trained.settings, task=self.task.name)

    @property
    def source(self) -> str:
        """The model as a source of captions: its name, without characters that sources cannot have, and its hash."""
        name = re.sub(r"[^\w.-]+", "-", self.name)
        return f"{name}@{self.weights_sha256[:8]}"

    @torch.no_grad()
    def captions(
        self, batch: Batch, decoding: DecodingSettings, *, samples: Sequence[int], rows_per_video: int = 1
    ) -> tuple[list[str], NDArray[np.float32]]:
        """Generate captions of each clip of a batch, and their likelihoods (clipmill.train.tasks.caption.decoding).

        Args:
            samples: a number for each caption, which sampling depends on.
            rows_per_video: number of captions per clip, those of a clip adjacent.
        """
        tokenizer = self.task.decoder.tokenizer
        batch = to_device(batch, self.trained.device)
        with self.trained.precision.autocast():
            clips = self.task.inputs(batch)
            generated = generate_captions(  # type: ignore[misc] # of either decoder, with its own cache
                self.model,
                clips,
                decoding,
                end_id=tokenizer.end_id,
                samples=samples,
                rows_per_video=rows_per_video,
            )
        texts = [tokenizer.text(ids) for ids in generated.tokens_VL.tolist()]
        return texts, generated.likelihoods_V.cpu().numpy()


def caption_files(
    weights: str,
    paths: Sequence[Path],
    *,
    length: str,
    out: Path | None,
    wanted: VideoFormat | None,
    batch: int,
    overrides: Overrides,
    decoding: DecodingSettings | None,
) -> None:
    """Caption videos, and write or print the captions of all windows.

    Raises:
        UserError: a flag, the weights or a path does not work.
        FailedWork: some videos could not be read to the end (the others are done), or captions could not be
            written.
    """
    if batch < 1:
        raise UserError(f"--batch is {batch}", hint="it must be 1 or more", flags=("--batch",))
    if wanted is not None and out is None:
        raise UserError(
            f"--format {wanted} is the format of a file",
            hint="add --out, or leave it out to print lines",
            flags=("--format",),
        )
    window_us, videos = length_us(length), find_videos(paths)
    if out is not None:  # a file of captions is read in other folders
        videos = [video.parent.resolve() / video.name for video in videos]
    sink = print_windows() if out is None else open_sink(out, videos, wanted=wanted)
    with Activity(f"loading {weights}"):
        captioner = open_captioner(weights, overrides=overrides, say=partial(print, file=sys.stderr))
    settings, how = captioner.trained.settings, captioner.task.decoding(decoding)
    sampling = Sampling(num_frames=settings.num_frames, rule=settings.sampling, stride=settings.stride)
    failed = []
    with sink as take, VideoProgress(num_videos=len(videos)) as progress:
        for event in caption_videos(
            videos,
            caption_by(captioner, how, source="" if out is None else captioner.source),
            sampling=sampling,
            size_px=settings.size_px,
            length_us=window_us,
            batch=batch,
        ):
            take(event)
            progress.show(event)
            if isinstance(event, VideoEnd) and event.failure is not None:
                failed.append(event)
    progress.say_done("" if out is None else f" in {out}")
    if failed:
        named = ", ".join(shown_name(one.video) for one in failed[:_MAX_NAMED])
        more = f" and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
        raise FailedWork(
            f"{len(failed)} of {count_noun(len(videos), 'video')} could not be read to the end: {named}{more}"
        )


def caption_by(captioner: TrainedCaptioner, decoding: DecodingSettings, *, source: str) -> CaptionClips:
    """Caption clips with a model; sampling depends on where a window begins."""

    def caption(clips: list[WindowClip]) -> list[Caption]:
        batch = Batch(
            input="pixels",
            position=torch.zeros(len(clips), dtype=torch.int64),
            video=torch.from_numpy(np.stack([clip.video for clip in clips])),
            colour=torch.tensor([clip.colour for clip in clips], dtype=torch.uint8),
        )
        samples = [clip.window.begin_us for clip in clips]
        texts, likelihoods = captioner.captions(batch, decoding, samples=samples)
        return [Caption(text, source, its) for text, its in zip(texts, likelihoods.tolist(), strict=True)]

    return caption


def open_captioner(
    weights: str, *, overrides: Overrides = AS_TRAINED, device: Device | None = None, say: Say = print
) -> TrainedCaptioner:
    """Open a run's latest checkpoint, or another captioner; no data is needed.

    Args:
        device: replaces the run's own.

    Raises:
        UserError: there are no such weights, they are of another task, or damaged.
    """
    opened = open_weights_as({TASK.name: lambda: TASK}, weights, Use(overrides=overrides, device=device), say=say)
    name = opened.name if opened.run is not None else Path(opened.title).name
    return TrainedCaptioner(name, opened.trained, opened.task, opened.trained.fill(opened.task.build_model()))
