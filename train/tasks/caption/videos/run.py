"""What `train caption-video` does, once its flags are read."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from manifests.errors import FailedWork, UserError
from train.data.batch import Batch
from train.data.frame_sampling import Sampling
from train.tasks.caption.settings import DecodingSettings
from train.tasks.caption.trained import TrainedCaptioner, open_captioner
from train.tasks.caption.videos.captioning import CaptionClips, VideoEnd, VideoProgress, caption_videos
from train.tasks.caption.videos.clips import WindowClip, length_us
from train.tasks.caption.videos.files import Format, find_videos, shown_name
from train.tasks.caption.videos.outputs import Printed, open_sink

_MAX_NAMED = 5


def caption_files(
    run: Path,
    paths: Sequence[Path],
    *,
    length: str,
    out: Path | None,
    wanted: Format | None,
    batch: int,
    decoding: DecodingSettings | None,
) -> None:
    """Captions videos, and writes or prints what is said of each window.

    Raises:
        UserError: a flag, the run or a path does not work.
        FailedWork: some videos could not be read, or not to their ends (all others are done), or what is said of them
            could not be written.
    """
    if batch < 1:
        raise UserError(f"--batch is {batch}", hint="it must be 1 or more")
    if wanted is not None and out is None:
        raise UserError(f"--format {wanted} is of a file", hint="add --out, or leave it out to print lines")
    window_us, videos = length_us(length), find_videos(paths)
    sink = Printed() if out is None else open_sink(out, videos, wanted=wanted)
    captioner = open_captioner(run)
    settings, how = captioner.trained.settings, captioner.task.decoding(decoding)
    sampling = Sampling(num_frames=settings.num_frames, rule=settings.sampling, stride=settings.stride)
    failed = []
    with sink, VideoProgress(num_videos=len(videos)) as progress:
        for event in caption_videos(
            videos,
            caption_by(captioner, how),
            sampling=sampling,
            size_px=settings.size_px,
            length_us=window_us,
            batch=batch,
        ):
            sink.take(event)
            progress.show(event)
            if isinstance(event, VideoEnd) and event.failure is not None:
                failed.append(event)
    if failed:
        named = ", ".join(shown_name(one.video) for one in failed[:_MAX_NAMED])
        more = f" and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
        raise FailedWork(f"{len(failed)} of {len(videos)} videos could not be read to their ends: {named}{more}")


def caption_by(captioner: TrainedCaptioner, decoding: DecodingSettings) -> CaptionClips:
    """Captions by a model; what is drawn for a window depends on where it begins."""

    def caption(clips: list[WindowClip]) -> list[str]:
        batch = Batch(
            input="pixels",
            position=torch.zeros(len(clips), dtype=torch.int64),
            video=torch.from_numpy(np.stack([clip.video for clip in clips])),
            colour=torch.tensor([clip.colour for clip in clips], dtype=torch.uint8),
        )
        return captioner.captions(batch, decoding, samples=[clip.window.begin_us for clip in clips])

    return caption
