"""Windows of videos through a captioner, in batches that go on from one video to the next."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from train.caption.tokenizer import one_line
from train.caption.videos.clips import WindowClip, window_clips
from train.caption.videos.source import VideoFailed
from train.data.clips import Sampling

# Captions of clips, one each.
CaptionClips = Callable[[list[WindowClip]], list[str]]


@dataclass(frozen=True)
class CaptionedWindow:
    """A window with its caption, which is one line; `video_us` is how long the whole video is."""

    video: Path
    begin_us: int
    end_us: int
    caption: str
    video_us: int


@dataclass(frozen=True)
class VideoEnd:
    """A video is done, or has failed for a reason. Windows that came before are good."""

    video: Path
    failure: str | None = None


def caption_videos(
    videos: Iterable[Path],
    caption: CaptionClips,
    *,
    sampling: Sampling,
    size_px: int,
    length_us: int,
    batch: int,
) -> Iterator[CaptionedWindow | VideoEnd]:
    """The captioned windows of videos in their order, each video's followed by its end.

    Args:
        batch: windows that are captioned at once.
    """
    clips = _clips(videos, sampling=sampling, size_px=size_px, length_us=length_us)
    waiting: list[tuple[Path, WindowClip] | VideoEnd] = []
    num_clips = 0
    for one in clips:
        waiting.append(one)
        num_clips += isinstance(one, tuple)
        if num_clips == batch or not num_clips:
            yield from _captioned(waiting, caption)
            waiting, num_clips = [], 0
    yield from _captioned(waiting, caption)


def _clips(
    videos: Iterable[Path], *, sampling: Sampling, size_px: int, length_us: int
) -> Iterator[tuple[Path, WindowClip] | VideoEnd]:
    for video in videos:
        failure = None
        try:
            for clip in window_clips(video, sampling, size_px=size_px, length_us=length_us):
                yield video, clip
        except VideoFailed as error:
            failure = str(error)
        yield VideoEnd(video, failure)


def _captioned(
    waiting: list[tuple[Path, WindowClip] | VideoEnd], caption: CaptionClips
) -> Iterator[CaptionedWindow | VideoEnd]:
    clips = [one[1] for one in waiting if isinstance(one, tuple)]
    captions = iter(caption(clips) if clips else [])
    for one in waiting:
        if isinstance(one, VideoEnd):
            yield one
        else:
            video, clip = one
            window = clip.window
            yield CaptionedWindow(video, window.begin_us, window.end_us, one_line(next(captions)), clip.video_us)
