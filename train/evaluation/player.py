"""Encode clips as small H.264 videos and JPEG images in data URIs, for result and search pages."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from clipmill.manifests.errors import UserError
from clipmill.shards.pages.figures import CLIP_FPS, data_uri, jpeg_uri, middle_items, small_clip, small_frame
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.shards import kind_of
from clipmill.train.data.caption_rows import usable_captions
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.data_folder import open_data_folder, rows_of
from clipmill.train.data.frame_sampling import Sampling, frame_indices
from clipmill.train.data.outcomes import SampleFailed

if TYPE_CHECKING:
    import av
    from numpy.typing import NDArray

_MAX_CLIP_S = 15.0  # longer clips are shortened
_BUDGET_BYTES = 24 << 20
_RESULT_BUDGET_BYTES = 8 << 20  # smaller, because the page of a run may contain several results


class PlayedClip(Protocol):
    """Part of a video that a page can play."""

    @property
    def row(self) -> int:
        """Index of the clip, unique on the page."""
        ...

    @property
    def key(self) -> str:
        """Key of the chunk in which the clip starts."""
        ...

    @property
    def video(self) -> str:
        """Name of the video."""
        ...

    @property
    def begin_s(self) -> float:
        """Start of the clip in the video, in seconds."""
        ...

    @property
    def end_s(self) -> float:
        """End of the clip in the video, in seconds."""
        ...


@dataclass(frozen=True)
class SampleClip:
    """Sample of a split as a `PlayedClip`."""

    row: int
    key: str
    begin_s: float
    end_s: float

    @property
    def video(self) -> str:
        """Name of the video: the part of the chunk's key before the last underscore."""
        return self.key.rpartition("_")[0]


class PicturedSamples(Protocol):
    """Samples of a split that can be shown on a page."""

    def text(self, sample: int) -> str:
        """Return the caption."""
        ...

    def key(self, sample: int) -> str:
        """Return the key of the chunk in which the clip starts."""
        ...

    def span_s(self, sample: int) -> tuple[float, float]:
        """Return the start and end of the clip in its video, in seconds."""
        ...

    def shown_frames(self, sample: int, *, num_frames: int) -> "list[NDArray[np.uint8]]":
        """Return frames of the clip, uint8 RGB [H, W, 3]; an empty list if the clip cannot be decoded."""
        ...


@dataclass(frozen=True)
class ShownClip:
    """Clip as it is shown on a page.

    Attributes:
        video: Data URI of an mp4 file; empty once the budget of the page is used up.
        picture: Data URI of the middle frame; empty if the clip cannot be read or decoded.
        missing: Reason why the clip cannot be read or decoded.
        is_cut: True if the video contains only the start of the clip.
    """

    video: str = ""
    picture: str = ""
    missing: str = ""
    is_cut: bool = False


class Player:
    """Encoder for the clips on a page, with a limit on the total size of their videos.

    Args:
        shards: Data folder.
        split: Split that contains the chunks of the clips.
        cache: Cache folder for downloaded tars.
        budget_bytes: Maximum total size of the videos, 24 MB by default. Clips beyond this limit are shown as images.

    Raises:
        UserError: The folder cannot be opened.
    """

    def __init__(self, shards: str, *, split: str, cache: Path | None = None, budget_bytes: int | None = None) -> None:
        folder = open_data_folder(shards, cache=cache)
        self._chunks = ChunkSet(folder.path, split=split, rule="packets", tars=folder.tars)
        self._left_bytes = _BUDGET_BYTES if budget_bytes is None else budget_bytes
        self._clips: dict[int, ShownClip] = {}

    @property
    def num_missing(self) -> int:
        """Number of clips that could not be read or decoded."""
        return sum(bool(shown.missing) for shown in self._clips.values())

    def has_chunks(self, clip: PlayedClip) -> bool:
        """Return True if the split contains chunks of the clip's video."""
        return bool((rows_of(pa.chunked_array([pa.array([clip.video])]), self._chunks.video_ids) >= 0).all())

    def show(self, clip: PlayedClip) -> ShownClip:
        """Return the clip as data URIs. Each clip is encoded only once."""
        if clip.row not in self._clips:
            try:
                self._clips[clip.row] = self._encode(clip)
            except SampleFailed as error:
                self._clips[clip.row] = ShownClip(missing=error.detail)
        return self._clips[clip.row]

    def _encode(self, clip: PlayedClip) -> ShownClip:
        end_s = min(clip.end_s, clip.begin_s + _MAX_CLIP_S)
        num_frames = max(1, round((end_s - clip.begin_s) * CLIP_FPS)) if self._left_bytes > 0 else 1
        frames = self._frames(clip, end_s=end_s, num_frames=num_frames)
        picture = jpeg_uri(
            small_frame(frames[len(frames) // 2]).to_ndarray(format="rgb24").astype(np.uint8, copy=False)
        )
        if self._left_bytes <= 0:
            return ShownClip(picture=picture)
        content = small_clip(frames, fps=Fraction(num_frames / (end_s - clip.begin_s)).limit_denominator(1000))
        self._left_bytes -= len(content)
        return ShownClip(video=data_uri(content, "video/mp4"), picture=picture, is_cut=end_s < clip.end_s)

    def _frames(self, clip: PlayedClip, *, end_s: float, num_frames: int) -> "list[av.VideoFrame]":
        """Decode evenly spaced frames of a clip."""
        chunks = self._chunks
        usable_clip = usable_captions(
            video_row=rows_of(pa.chunked_array([pa.array([clip.video])]), chunks.video_ids),
            begin_s=np.array([clip.begin_s]),
            end_s=np.array([end_s]),
            chunks=chunks.table,
        )
        if not len(usable_clip.caption):
            reason = ", ".join(usable_clip.num_unusable).replace("_", " ")
            raise SampleFailed(clip.key, reason="shard_unreadable", detail=reason)
        first, last = int(usable_clip.first_chunk[0]), int(usable_clip.last_chunk[0])
        times = [chunks.times(chunk) for chunk in range(first, last + 1)]
        sampling = Sampling(num_frames=num_frames)
        positions = frame_indices(int(usable_clip.begin_us[0]), int(usable_clip.end_us[0]), sampling, times, rng=None)
        frames_of_chunk: dict[int, set[int]] = {}
        for position in positions:
            frames_of_chunk.setdefault(first + position.chunk, set()).add(position.frame)
        frames_by_chunk = {
            chunk: chunks.decoder.decode(chunks.read(chunk, frames)) for chunk, frames in frames_of_chunk.items()
        }
        return [frames_by_chunk[first + position.chunk][position.frame] for position in positions]


def open_player(settings: ClipSettings, *, split: str) -> Player | None:
    """Open a player for the examples of a result (at most 8 MB). Return None for tars and for data without videos."""
    if not kind_of(settings.folder).has_manifest:
        return None
    try:
        return Player(settings.folder, split=split, cache=settings.cache, budget_bytes=_RESULT_BUDGET_BYTES)
    except UserError:  # for example, latents without videos: their examples are shown as images
        return None


def clip_figure(
    samples: PicturedSamples, sample: int, *, num_frames: int, player: Player | None, max_frames: int = 4
) -> dict[str, Any]:
    """Return the entry for a clip in a result file: key of the chunk, times in seconds, and data URIs.

    In the entry, `frames` are JPEGs of the model's input. `video` and `picture` are the playable clip and its middle
    frame; both are empty without a player.

    Args:
        samples: Samples of the evaluation.
        sample: Index of the sample.
        num_frames: Number of frames to sample from the clip.
        player: Player that encodes the clip; None for frames only.
        max_frames: Maximum number of sampled frames to return.
    """
    begin_s, end_s = samples.span_s(sample)
    clip = SampleClip(sample, samples.key(sample), begin_s, end_s)
    pictures = samples.shown_frames(sample, num_frames=num_frames)
    shown_clip = ShownClip() if player is None else player.show(clip)
    return {
        **{"key": clip.key, "begin_s": begin_s, "end_s": end_s},
        "frames": [jpeg_uri(frame) for frame in middle_items(pictures, at_most=max_frames)],
        **{"video": shown_clip.video, "picture": shown_clip.picture if shown_clip.video else ""},
    }
