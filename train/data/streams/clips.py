"""What a sample of a tar is: which clips it shows, with which captions. Our samples, and those of video2dataset.

Ours (`prep chunk`): the json has the chunk's place in its video and its captions. Each caption is a clip: the part of
its span that lies in the chunk, since a stream cannot reach for the neighbour. video2dataset's: the whole video is one
clip, its caption the txt member, or `caption` in the json.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from train.data.decoding.plain import PlainVideo
from train.data.frame_sampling import US_PER_S, Sampling, moments_of, to_us
from train.data.outcomes import SampleFailed
from train.data.streams.samples import TarSample

VIDEO_EXTENSIONS = ("mp4", "webm", "mkv", "mov", "avi")
NO_CAPTION_ID = -1
_MAX_SHOWN = 20
_FAILED_STATUS = "failed_to_"  # video2dataset: failed_to_download, failed_to_subsample


@dataclass(frozen=True)
class StreamedClip:
    """A clip that has not been decoded yet.

    Attributes:
        key: of the sample in its tar.
        content: the video file.
        caption_id: of the manifest, NO_CAPTION_ID for a tar of another tool.
        text: the caption.
        begin_us, end_us: the clip's span, from the first frame of the file on; None for the end of the file. It is
            empty where the caption's is.
        is_shortened: whether the caption reaches beyond the file.
    """

    key: str
    content: bytes
    caption_id: int
    text: str
    begin_us: int
    end_us: int | None
    is_shortened: bool = False


@dataclass(frozen=True)
class WithoutVideo:
    """Stands for a sample whose video video2dataset could not have: nothing is wrong with the tar."""

    key: str


def clips_of(sample: TarSample) -> Sequence[StreamedClip | WithoutVideo]:
    """The clips of a sample.

    Raises:
        ValueError: it has no video, no caption, or members that cannot be read.
    """
    key, members = sample.key, sample.members
    try:
        description = json.loads(members.get("json") or b"{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its json cannot be read: {error}") from error
    if not isinstance(description, dict):
        raise ValueError("its json is no object")
    content = next((members[extension] for extension in VIDEO_EXTENSIONS if extension in members), None)
    if content is None:
        if str(description.get("status")).startswith(_FAILED_STATUS):
            return [WithoutVideo(key)]
        there = ", ".join(sorted(members)[:_MAX_SHOWN]) or "nothing"
        raise ValueError(f"no video among its members: {there}")
    if "span_fingerprint" in description:
        return _of_chunk(key, content, description)
    # video2dataset writes an empty txt where there was no caption.
    texts = members.get("txt", b"").decode("utf-8", "replace"), description.get("caption")
    text = next((text for text in texts if isinstance(text, str) and text.strip()), None)
    if text is None:
        raise ValueError("it has no caption: no words in a txt, and no caption in its json")
    return [StreamedClip(key, content, NO_CAPTION_ID, text, 0, None)]


def _of_chunk(key: str, content: bytes, description: dict[str, Any]) -> list[StreamedClip]:
    try:
        begin_us, end_us = (Fraction(*description[name]) * US_PER_S for name in ("begin_s", "end_s"))
        chunk = int(begin_us), int(end_us)
        return [_of_caption(key, content, caption, chunk=chunk) for caption in description["captions"]]
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"its json is not as prep writes it: {type(error).__name__}: {error}") from error


def _of_caption(key: str, content: bytes, caption: dict[str, Any], *, chunk: tuple[int, int]) -> StreamedClip:
    begin_us, end_us = to_us(caption["begin_s"]), chunk[1]
    # An open end is stored as null.
    if caption["end_s"] is not None and math.isfinite(caption["end_s"]):
        end_us = to_us(caption["end_s"])
    first, last = max(begin_us, chunk[0]), min(end_us, chunk[1])
    return StreamedClip(
        key=key,
        content=content,
        caption_id=int(caption["caption_id"]),
        text=str(caption["text"]),
        begin_us=first - chunk[0],
        end_us=last - chunk[0],
        is_shortened=(first, last) != (begin_us, end_us),
    )


# Which frames of a file a clip shows: those on screen at its moments, at a constant rate or not.


def frames_on_screen(
    video: PlainVideo, clip: StreamedClip, sampling: Sampling, *, rng: np.random.Generator | None
) -> list[int]:
    """Numbers of the frames of `video` that `clip` shows; with `rng` as in training, without as in evaluation.

    Raises:
        SampleFailed: no moment of the clip lies in the file.
    """
    tick_us = video.time_base * US_PER_S
    length_us = (video.end_pts - video.pts[0]) * tick_us
    # Rounded up: in a span that is shorter than the file's frames, a stride of whole frames would not fit.
    end_of_file_us = math.ceil(length_us)
    end_us = end_of_file_us if clip.end_us is None else min(clip.end_us, end_of_file_us)
    if end_us <= clip.begin_us:
        detail = f"its span from {clip.begin_us} us to {end_us} us is empty; the file ends at {end_of_file_us} us"
        raise SampleFailed(clip.key, reason="empty_span", detail=detail)
    fps = Fraction(len(video.pts) * US_PER_S) / length_us
    moments = moments_of(clip.begin_us, end_us, sampling, fps_num=fps.numerator, fps_den=fps.denominator, rng=rng)
    ticks = [
        numerator * tick_us.denominator // (moments.denominator * tick_us.numerator) for numerator in moments.numerators
    ]
    found = np.searchsorted(np.array(video.pts) - video.pts[0], ticks, side="right") - 1
    return [int(frame) for frame in found]
