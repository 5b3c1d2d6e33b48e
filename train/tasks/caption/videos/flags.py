"""`train caption-video` and its flags."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from train.tasks.caption.settings import DecodingSettings

Format = Literal["csv", "json", "srt"]


def caption_video(
    run: Path,
    videos: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    len: str = "10s",
    out: Path | None = None,
    form: Annotated[Format | None, Parameter(name="--format")] = None,
    batch: int = 16,
    decoding: Annotated[DecodingSettings | None, Parameter(group="Decoding")] = None,
) -> None:
    """Captions video files, a window at a time; folders are searched for videos.

    Examples:

        train caption-video runs/captions holiday.mp4
        train caption-video runs/captions films --len 5s --out captions.csv

    Parameters
    ----------
    run
        Folder that train caption --out made.
    videos
        Video files, or folders of them.
    len
        Length of a window; a rest shorter than a quarter of it joins the last one.
    out
        File to write, which is not there yet; lines on standard output when left out. Subtitles of several videos are
        files in this folder.
    form
        csv, json or srt; by the suffix of --out when left out.
    batch
        Windows that are captioned at once.
    decoding
        How captions are written; as the run says when left out.
    """
    from train.tasks.caption.videos.run import caption_files

    caption_files(run, videos, length=len, out=out, wanted=form, batch=batch, decoding=decoding)
