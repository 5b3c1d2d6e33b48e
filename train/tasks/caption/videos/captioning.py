"""Caption the windows of videos in batches that span several videos, and show the progress."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from clipmill.manifests.formatting import count_noun
from clipmill.manifests.progress import Activity, ProgressRate, amount_text, join_parts
from clipmill.train.data.frame_sampling import US_PER_S, Sampling
from clipmill.train.tasks.caption.tokenizer import one_line
from clipmill.train.tasks.caption.video_windows import VideoFailed, WindowClip, shown_name, window_clips


@dataclass(frozen=True)
class Caption:
    """A generated caption.

    Attributes:
        source: the model, as a source of captions.
        likelihood: see clipmill.train.tasks.caption.decoding.
    """

    text: str
    source: str = ""
    likelihood: float | None = None


# Generates one caption per clip.
CaptionClips = Callable[[list[WindowClip]], list[Caption]]


@dataclass(frozen=True)
class CaptionedWindow:
    """A window with its caption, a single line; `video_us` is the duration of the whole video."""

    video: Path
    begin_us: int
    end_us: int
    caption: str
    video_us: int
    source: str = ""
    likelihood: float | None = None


@dataclass(frozen=True)
class VideoEnd:
    """A video is finished, or has failed for a reason. Its windows before that are valid."""

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
    """The captioned windows of videos in order; a `VideoEnd` follows those of each video.

    Args:
        batch: number of windows that are captioned at once.
    """
    clips = _clips(videos, sampling=sampling, size_px=size_px, length_us=length_us)
    for group in _decode_ahead(_groups(clips, batch=batch)):
        yield from _caption_group(group, caption)


def _decode_ahead(groups: Iterator[Group]) -> Iterator[Group]:
    """Decode the next group while the model runs on this one."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
    try:
        coming = pool.submit(next, groups, None)
        while (group := coming.result()) is not None:
            coming = pool.submit(next, groups, None)
            yield group
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _groups(clips: Iterator[Clip | VideoEnd], *, batch: int) -> Iterator[Group]:
    """Groups of `batch` clips, with the ends of videos between them."""
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


def _caption_group(group: Group, caption: CaptionClips) -> Iterator[CaptionedWindow | VideoEnd]:
    clips = [one[1] for one in group if not isinstance(one, VideoEnd)]
    captions = iter(caption(clips) if clips else [])
    for one in group:
        if isinstance(one, VideoEnd):
            yield one
        else:
            video, clip = one
            window, found = clip.window, next(captions)
            yield CaptionedWindow(
                video=video,
                begin_us=window.begin_us,
                end_us=window.end_us,
                caption=one_line(found.text),
                video_us=clip.video_us,
                source=found.source,
                likelihood=found.likelihood,
            )


class VideoProgress:
    """Progress on standard error; failures immediately.

    Args:
        num_videos: number of videos to caption.
    """

    def __init__(self, *, num_videos: int) -> None:
        self._num_videos, self._num_done, self._num_failed = num_videos, 0, 0
        self._before_us = self._now_us = self._num_windows = self._num_empty = 0
        self._begin_s, self._pace = time.monotonic(), ProgressRate()
        self._activity = Activity("decoding and captioning the first windows")

    def __enter__(self) -> Self:
        self._activity.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity.__exit__(kind, error, trace)

    def say_done(self, where: str) -> None:
        """Say how much was captioned, where the captions are, and how many are empty."""
        windows, videos = count_noun(self._num_windows, "window"), count_noun(self._num_videos, "video")
        rates = f"{self._seen_s():.0f} s of video, {self._speed()}"
        empty = (
            f"; {self._num_empty:,} of {count_noun(self._num_windows, 'caption')} are empty" if self._num_empty else ""
        )
        print(f"done: captions of {windows} of {videos}{where}{empty}; {rates}", file=sys.stderr, flush=True)

    def show(self, event: CaptionedWindow | VideoEnd) -> None:
        """Show a captioned window, or the end of a video."""
        share = 0.0
        if isinstance(event, CaptionedWindow):
            self._num_windows += 1
            self._num_empty += not event.caption
            self._now_us, share = event.end_us, min(event.end_us / event.video_us, 1.0)
        else:
            self._num_done += 1
            self._before_us, self._now_us = self._before_us + self._now_us, 0
            if event.failure is not None:
                self._num_failed += 1
                print(f"{shown_name(event.video)}: {event.failure}", file=sys.stderr, flush=True)
        done = self._num_done + share
        self._pace.add(done)
        shown = amount_text(round(done, 1), self._num_videos, "video")
        self._activity.say(
            lambda: join_parts(shown, self._speed(), self._pace.time_left(self._num_videos)),
            what="captioning",
            share=done / self._num_videos,
        )

    def _seen_s(self) -> float:
        return (self._before_us + self._now_us) / US_PER_S

    def _speed(self) -> str:
        speed = self._seen_s() / max(time.monotonic() - self._begin_s, 1e-9)
        return join_parts(f"{speed:.1f}x real time", f"{self._num_failed} failed" if self._num_failed else "")
