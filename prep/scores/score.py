"""Scoring one chunk: which frames are decoded, and how values are computed from them (defined in docs/columns.md)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import cv2
import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from clipmill.prep.core.chunk_input import decode_frames
from clipmill.prep.scores.cuts import Picture, analysis_picture, find_cuts, intervals_to_refine
from clipmill.prep.scores.frames import Chosen, Luma, choose_frames, full_luma
from clipmill.prep.scores.looks import (
    MIN_FROZEN_S,
    Active,
    Lines,
    Look,
    active_part,
    frozen_frames,
    phash,
    sharpness,
    shown_frames,
)
from clipmill.prep.scores.motion import Motion, optical_flow, split_motion, textured
from clipmill.prep.scores.speech import speech_s
from clipmill.shards.format import PACKET_KEY

NUM_SHARP = 12  # samples whose sharpness is measured, evenly spaced
_DECIMALS = 6


@dataclass(frozen=True)
class ChunkFile:
    """A chunk: the bytes of the MP4 file, and what its index row says of it (clipmill.shards.format.VIDEO_FIELDS)."""

    content: bytes
    num_frames: int
    fps: Fraction
    packet_frame: list[int]
    packet_flags: list[int]

    def decoded(self, wanted: Sequence[int]) -> Iterator[tuple[int, VideoFrame]]:
        """Yield (index, frame) of the `wanted` frames, ascending; raises SourceFailure if one cannot be decoded."""
        frames = decode_frames(
            self.content, wanted, fps=self.fps, packet_frame=self.packet_frame, packet_flags=self.packet_flags
        )
        return zip(wanted, frames, strict=True)


@dataclass(frozen=True)
class _Seen:
    """What is kept of the frames of the first pass.

    Attributes:
        looks, pictures: by frame; pictures of the samples only.
        sharp: luma of full size of the samples whose sharpness is measured.
        lines: of all samples that are not black.
    """

    looks: dict[int, Look]
    pictures: dict[int, Picture]
    sharp: list[Luma]
    lines: list[Lines]
    phash: int
    size: tuple[int, int]  # height, width


def score_chunk(chunk: ChunkFile, *, cut_threshold: float) -> dict[str, Any]:
    """Return the scores of a chunk: a value for each row of clipmill.shards.score_fields.SCORES.

    Numbers are rounded to six decimals; unknown values are None.

    Raises:
        SourceFailure: the chunk or its audio cannot be decoded.
    """
    cv2.setNumThreads(1)  # the flow depends on the number of threads, and the caller already works in parallel
    chosen = choose_frames(
        chunk.num_frames, fps=chunk.fps, packet_frame=chunk.packet_frame, packet_flags=chunk.packet_flags
    )
    colours = VideoReformatter()  # one for all frames: setting it up costs more than converting a frame
    seen = _first_pass(chunk, chosen, colours)
    looks, pictures = dict(seen.looks), dict(seen.pictures)
    intervals = intervals_to_refine(sorted(pictures.items()), threshold=cut_threshold)
    for frame, picture in chunk.decoded([frame for interval in intervals for frame in interval]):
        looks[frame] = Look.of(frame, full_luma(picture))
        pictures[frame] = _picture(picture, colours)
    cuts = find_cuts(sorted(pictures.items()), threshold=cut_threshold)
    active = active_part(seen.lines) if seen.lines else None
    motion = _mean_motion(seen, chosen, cuts=cuts, active=active, fps=chunk.fps)
    in_order = [look for _, look in sorted(looks.items())]
    shown = shown_frames(in_order, num_frames=chunk.num_frames)
    is_black = np.array([look.is_black for look in in_order])
    luma = np.array([look.luma.mean(dtype=np.float64) for look in in_order])
    values = {
        "motion": motion and motion.all,
        "camera_motion": motion and motion.camera,
        "object_motion": motion and motion.objects,
        "sharpness": float(np.mean([sharpness(active.of(luma) if active else luma) for luma in seen.sharp])),
        "brightness": float((luma * shown).sum() / chunk.num_frames / 255),
        "black": float(shown[is_black].sum() / chunk.num_frames),
        "frozen": _frozen(in_order, chunk),
        "letterbox": active and 1 - active.area / (seen.size[0] * seen.size[1]),
        "cuts": len(cuts),
        "cut_times_s": [_rounded(float(cut / chunk.fps)) for cut in cuts],
        "speech": _speech(chunk),
        "phash": seen.phash,
    }
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in values.items()}


def _first_pass(chunk: ChunkFile, chosen: Chosen, colours: VideoReformatter) -> _Seen:
    samples = set(chosen.samples)
    spread = np.linspace(0, len(chosen.samples) - 1, min(NUM_SHARP, len(chosen.samples))).round().astype(int)
    sharp_frames = {chosen.samples[number] for number in spread.tolist()}
    looks, pictures, sharp, lines, found_hash, size = {}, {}, [], [], 0, (0, 0)
    for number, frame in chunk.decoded(chosen.all):
        luma = full_luma(frame)
        looks[number] = look = Look.of(number, luma)
        size = luma.shape[0], luma.shape[1]
        if number in samples:
            pictures[number] = _picture(frame, colours)
            if not look.is_black:
                lines.append(Lines.of(luma))
        if number in sharp_frames:
            sharp.append(luma)
        if number == chosen.middle:
            found_hash = phash(np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8))
    return _Seen(looks, pictures, sharp, lines, found_hash, size)


def _picture(frame: VideoFrame, colours: VideoReformatter) -> Picture:
    return analysis_picture(np.asarray(colours.reformat(frame, format="bgr24", threads=1).to_ndarray(), np.uint8))


def _mean_motion(
    seen: _Seen, chosen: Chosen, *, cuts: list[int], active: Active | None, fps: Fraction
) -> Motion | None:
    """Return the mean over all pairs that no cut separates, in frame heights per second; None if there is none."""
    found = []
    for before, after in chosen.pairs:
        if any(before < cut <= after for cut in cuts):
            continue
        lumas = [seen.looks[frame].luma for frame in (before, after)]
        height = lumas[0].shape[0]
        if active is not None:
            part = active.of_small(lumas[0], height=seen.size[0], width=seen.size[1])
            lumas = [np.ascontiguousarray(luma[part]) for luma in lumas]
        flow = optical_flow(*lumas)
        if flow is not None:
            motion = split_motion(flow, textured(lumas[0]))
            # Bars do not move, and count as a part of the picture.
            share = lumas[0].size / seen.looks[before].luma.size
            found.append(motion.times(share * float(fps) / (after - before) / height))
    return Motion.mean(found) if found else None


def _frozen(looks: list[Look], chunk: ChunkFile) -> float | None:
    if chunk.num_frames == 1:
        return None
    min_frames = MIN_FROZEN_S * float(chunk.fps)
    keys = [frame for frame, flags in zip(chunk.packet_frame, chunk.packet_flags, strict=True) if flags & PACKET_KEY]
    found = frozen_frames(looks, num_frames=chunk.num_frames, min_frames=min_frames, key_frames=sorted(keys))
    return found / chunk.num_frames


def _speech(chunk: ChunkFile) -> float | None:
    found_s = speech_s(chunk.content)
    return None if found_s is None else min(1.0, float(found_s * chunk.fps / chunk.num_frames))


def _rounded(value: float) -> float:
    return round(value, _DECIMALS)
