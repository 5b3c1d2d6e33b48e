"""Samples of a tar, as webdataset groups them (consecutive members with one key), and the clips that they show.

A sample is held in memory whole; its size is limited, and a sample that exceeds a limit is reported and skipped.

Samples of `prep chunk`: the json has the chunk's span in its video and its captions. Each caption is a clip: the part
of its span that lies in the chunk, since a stream cannot access the neighbouring chunk. Samples of video2dataset: the
whole video is one clip, whose caption is the txt member, or `caption` in the json.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from clipmill.shards.opening import DamagedTar
from clipmill.train.data.decoding.decoders import PlainVideo
from clipmill.train.data.frame_sampling import US_PER_S, Sampling, moments_of, to_us, view_offsets
from clipmill.train.data.outcomes import SampleFailed
from clipmill.train.data.streams.members import Member, members_of

MAX_SAMPLE_BYTES = 1 << 30
MAX_TEXT_BYTES = 8 << 20  # of a json or txt, which takes twenty times as much once it is parsed
NO_CAPTION_ID = -1

VIDEO_EXTENSIONS = ("mp4", "webm", "mkv", "mov", "avi")
_LIMITS = dict.fromkeys(VIDEO_EXTENSIONS, MAX_SAMPLE_BYTES) | dict.fromkeys(("json", "txt"), MAX_TEXT_BYTES)
_MAX_MEMBERS = 1000  # of a sample
_MAX_SHOWN = 20
_FAILED_STATUS = "failed_to_"  # video2dataset: failed_to_download, failed_to_subsample


@dataclass(frozen=True)
class Unreadable:
    """Takes the place of a sample, or of the rest of a tar, that cannot be read."""

    key: str
    detail: str


@dataclass(frozen=True)
class WithoutVideo:
    """Takes the place of a sample whose video video2dataset could not download: the tar is not damaged."""

    key: str


@dataclass
class TarSample:
    """A sample, as far as it has been read.

    Attributes:
        members: by extension in lower case; empty if they are not needed.
        places: offset in the tar (None if it is compressed) and size in bytes of each member.
        problem: why it must be skipped.
    """

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    places: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class StreamedClip:
    """A clip that has not been decoded yet.

    Attributes:
        key: of the sample in its tar.
        content: the video file.
        caption_id: from the manifest; NO_CAPTION_ID in tars of other tools.
        text: the caption.
        begin_us, end_us: the clip's span, relative to the first frame of the file; None for the end of the file. It is
            empty if the caption's is.
        is_shortened: True if the caption extends beyond the file.
    """

    key: str
    content: bytes
    caption_id: int
    text: str
    begin_us: int
    end_us: int | None
    is_shortened: bool = False


def samples_of(tar: str, path: Path, *, limits: Mapping[str, int] = _LIMITS) -> Iterator[TarSample | Unreadable]:
    """The samples of the tar at `path`, in its order, and what cannot be read of it.

    Args:
        tar: its name for messages.
        limits: maximum size of the members that are read, by extension.

    Raises:
        OSError: the tar cannot be opened or read.
    """
    sample: TarSample | None = None
    begun: str | None = None  # key of the member that is being read

    def limit_of(name: str) -> int:
        nonlocal begun
        parts = _key_and_extension(name)
        begun = None if parts is None else parts[0]
        if parts is None:
            return 0
        key, extension = parts
        is_same = sample is not None and sample.key == key
        if sample is not None and is_same and (sample.problem or extension in sample.members):
            return 0  # it is skipped: nothing more is kept of it
        held_bytes = sum(map(len, sample.members.values())) if sample is not None and is_same else 0
        # At least one byte: 0 would say that it is not needed.
        return min(limits.get(extension, 0), max(MAX_SAMPLE_BYTES - held_bytes, 1))

    try:
        for member in members_of(path, limit_of=limit_of):
            parts, begun = _key_and_extension(member.name), None
            if parts is None and member.problem is None:
                continue
            key, extension = parts or (member.name, "")
            if sample is None or key != sample.key:
                if sample is not None:
                    yield _finish_sample(sample)
                sample = TarSample(key)
            _add(sample, extension, member)
    except DamagedTar as error:
        # A sample is complete only if the next one has begun.
        if sample is not None and begun not in (None, sample.key):
            yield _finish_sample(sample)
        yield Unreadable(tar, error.why)
        return
    if sample is not None:
        yield _finish_sample(sample)


def _add(sample: TarSample, extension: str, member: Member) -> None:
    problem = member.problem
    if extension in sample.members:
        problem = "is there twice"
    elif len(sample.members) >= _MAX_MEMBERS:
        problem = f"is one of more than {_MAX_MEMBERS:,} members of its sample"
    if problem is not None and sample.problem is None:
        sample.problem = f"{member.name} {problem}"
        sample.members.clear()
    if sample.problem is None:
        sample.members[extension] = member.content or b""
        sample.places[extension] = member.offset, member.size_bytes


def _finish_sample(sample: TarSample) -> TarSample | Unreadable:
    return sample if sample.problem is None else Unreadable(sample.key, sample.problem)


def _key_and_extension(name: str) -> tuple[str, str] | None:
    """Key and extension in a member's name; None for a member that belongs to no sample.

    Those are names without an extension, hidden files, and webdataset's own files (`__name__`).
    """
    folder, slash, file_name = name.rpartition("/")
    stem, dot, extension = file_name.partition(".")
    first = name.partition("/")[0]
    if not stem or not dot or (len(first) > 4 and first.startswith("__") and first.endswith("__")):
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def clips_of(sample: TarSample) -> Sequence[StreamedClip | WithoutVideo]:
    """The clips of a sample.

    Raises:
        ValueError: it has no video, no caption, or members that cannot be read.
    """
    key, members = sample.key, sample.members
    description = description_of(sample)
    content = next((members[extension] for extension in VIDEO_EXTENSIONS if extension in members), None)
    if content is None:
        if str(description.get("status")).startswith(_FAILED_STATUS):
            return [WithoutVideo(key)]
        found = ", ".join(sorted(members)[:_MAX_SHOWN]) or "nothing"
        raise ValueError(f"no video among its members: {found}")
    if "span_fingerprint" in description:
        return _clips_of_chunk(key, content, description)
    text = caption_of(sample)
    if text is None:
        raise ValueError("it has no caption: no text in a txt member, and no caption in its json")
    return [StreamedClip(key, content, NO_CAPTION_ID, text, 0, None)]


def caption_of(sample: TarSample) -> str | None:
    """The text of a sample's txt member, or else the caption in its json; ValueError if it cannot be read."""
    # video2dataset and img2dataset write an empty txt if there was no caption.
    try:
        text = sample.members.get("txt", b"").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"its txt is not UTF-8: {error}") from error
    found = text if text.strip() else description_of(sample).get("caption")
    return found if isinstance(found, str) and found.strip() else None


def description_of(sample: TarSample) -> dict[str, Any]:
    """The json of a sample, {} without one; raises ValueError if it cannot be read."""
    try:
        description = json.loads(sample.members.get("json") or b"{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its json cannot be read: {error}") from error
    if not isinstance(description, dict):
        raise ValueError("its json is not an object")
    return description


def _clips_of_chunk(key: str, content: bytes, description: dict[str, Any]) -> list[StreamedClip]:
    try:
        begin_us, end_us = (Fraction(*description[name]) * US_PER_S for name in ("begin_s", "end_s"))
        chunk = int(begin_us), int(end_us)
        return [_clip_of_caption(key, content, caption, chunk=chunk) for caption in description["captions"]]
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"its json is not as prep writes it: {type(error).__name__}: {error}") from error


def _clip_of_caption(key: str, content: bytes, caption: dict[str, Any], *, chunk: tuple[int, int]) -> StreamedClip:
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


def frames_on_screen(
    video: PlainVideo, clip: StreamedClip, sampling: Sampling, *, rng: np.random.Generator | None, num_views: int = 1
) -> list[int]:
    """Numbers of the frames of `video` on screen at the clip's moments; its frame rate need not be constant.

    Moments are random with `rng`, as in training (clipmill.train.data.frame_sampling). Without it, as in evaluation,
    they are of `num_views` views, one view after another.

    Raises:
        SampleFailed: no moment of the clip lies in the file.
    """
    tick_us = video.time_base * US_PER_S
    length_us = (video.end_pts - video.pts[0]) * tick_us
    # Rounded up: a stride of whole frames would not fit into a span that is shorter than the file's frames.
    end_of_file_us = math.ceil(length_us)
    end_us = end_of_file_us if clip.end_us is None else min(clip.end_us, end_of_file_us)
    if end_us <= clip.begin_us:
        detail = f"its span from {clip.begin_us} us to {end_us} us is empty; the file ends at {end_of_file_us} us"
        raise SampleFailed(clip.key, reason="empty_span", detail=detail)
    fps = Fraction(len(video.pts) * US_PER_S) / length_us
    rate = {"fps_num": fps.numerator, "fps_den": fps.denominator}
    ticks: list[int] = []
    for at in view_offsets(sampling.rule, 1 if rng is not None else num_views):
        moments = moments_of(clip.begin_us, end_us, sampling, **rate, rng=rng, at=at)
        divisor = moments.denominator * tick_us.numerator
        ticks += [numerator * tick_us.denominator // divisor for numerator in moments.numerators]
    frames = np.searchsorted(np.array(video.pts) - video.pts[0], ticks, side="right") - 1
    return [int(frame) for frame in frames]
