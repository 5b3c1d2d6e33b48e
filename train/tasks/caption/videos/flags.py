"""`train caption-video` and its flags."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clipmill.manifests.progress import Activity
from clipmill.train.config.clips import AS_TRAINED, Overrides
from clipmill.train.config.shards import require_named_weights
from clipmill.train.tasks.caption.settings import DECODING, DecodingSettings, VideoFormat


def caption_video(
    weights: str,
    videos: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    len: str = "10s",
    out: Path | None = None,
    form: Annotated[VideoFormat | None, Parameter(name="--format")] = None,
    batch: int = 16,
    shown: Overrides = AS_TRAINED,
    decoding: Annotated[DecodingSettings | None, DECODING] = None,
) -> None:
    """Caption video files in windows of fixed length; folders are searched for videos.

    Examples:

        train caption-video runs/captions holiday.mp4
        train caption-video runs/captions films --len 5s --out captions.json

    Parameters
    ----------
    weights
        Run folder of train caption, or a folder of a captioner of TimeSformer and GPT-2 with its tokenizer.
    videos
        Video files, or folders of them.
    len
        Window length. A remainder shorter than a quarter of it is merged into the last window.
    out
        New file to write. Default: lines on standard output. For subtitles of several videos, a folder.
    form
        Output format. Default: by the suffix of --out.
    batch
        Number of windows per batch.
    decoding
        How captions are generated. Default: as in training.
    """
    require_named_weights(weights, takes_tags=False)
    with Activity("importing torch"):
        from clipmill.train.tasks.caption.videos.run import caption_files

    caption_files(weights, videos, length=len, out=out, wanted=form, batch=batch, overrides=shown, decoding=decoding)
