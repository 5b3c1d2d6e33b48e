"""Windows of videos through a captioner, in batches that go on from one video to the next."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from train.data.frame_sampling import Sampling
from train.data.tokenizer import one_line
from train.tasks.caption.videos.clips import WindowClip, window_clips
from train.tasks.caption.videos.source import VideoFailed

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


Clip = tuple[Path, WindowClip]
Group = list[Clip | VideoEnd]


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
    for group in _ahead(_groups(clips, batch=batch)):
        yield from _captioned(group, caption)


def _ahead(groups: Iterator[Group]) -> Iterator[Group]:
    """The next group is decoded while the model works on this one."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
    try:
        coming = pool.submit(next, groups, None)
        while (group := coming.result()) is not None:
            coming = pool.submit(next, groups, None)
            yield group
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _groups(clips: Iterator[Clip | VideoEnd], *, batch: int) -> Iterator[Group]:
    """So many clips in a row, with the ends of videos between them."""
    group: Group = []
    num_clips = 0
    for one in clips:
        group.append(one)
        num_clips += not isinstance(one, VideoEnd)
        if num_clips == batch or not num_clips:
            yield group
            group, num_clips = [], 0
    if group:
        yield group


def _clips(videos: Iterable[Path], *, sampling: Sampling, size_px: int, length_us: int) -> Iterator[Clip | VideoEnd]:
    for video in videos:
        failure = None
        try:
            for clip in window_clips(video, sampling, size_px=size_px, length_us=length_us):
                yield video, clip
        except VideoFailed as error:
            failure = str(error)
        yield VideoEnd(video, failure)


def _captioned(group: Group, caption: CaptionClips) -> Iterator[CaptionedWindow | VideoEnd]:
    clips = [one[1] for one in group if not isinstance(one, VideoEnd)]
    captions = iter(caption(clips) if clips else [])
    for one in group:
        if isinstance(one, VideoEnd):
            yield one
        else:
            video, clip = one
            window = clip.window
            yield CaptionedWindow(video, window.begin_us, window.end_us, one_line(next(captions)), clip.video_us)
