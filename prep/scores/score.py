"""Compute the scores of a chunk (defined in docs/columns.md), make its sample, and check it for `verify --deep`."""

import json
from dataclasses import astuple, dataclass
from fractions import Fraction
from statistics import fmean
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from clipmill.manifests.publish import parse_json
from clipmill.prep.core.chunk_content import ChunkContent
from clipmill.prep.core.chunk_input import Chunk
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.scores.measures import (
    MIN_FROZEN_S,
    WINDOW_MS,
    Active,
    Chosen,
    Lines,
    Look,
    Luma,
    Motion,
    Picture,
    active_part,
    analysis_picture,
    choose_frames,
    decode_audio,
    find_cuts,
    frozen_frames,
    full_luma,
    intervals_to_refine,
    is_speech,
    optical_flow,
    phash,
    sharpness,
    shown_frames,
    split_motion,
    texture_mask,
)
from clipmill.shards.format import PACKET_KEY
from clipmill.shards.score_fields import SCORES, SCORES_FIELDS
from clipmill.shards.writer import Sample

NUM_SHARP = 12  # number of evenly spaced samples whose sharpness is measured
_DECIMALS = 6
EXTENSION = "scores.json"
_HASH_DIGITS = 16


@dataclass(frozen=True)
class _Seen:
    """Data that the first pass collects from its frames.

    Attributes:
        looks, pictures: Looks of all frames, and pictures of the samples, by frame index.
        sharp: Full-resolution luma of the samples whose sharpness is measured.
        lines: Line means of all samples that are not black.
        size: Resolution of the frames, (height, width).
    """

    looks: dict[int, Look]
    pictures: dict[int, Picture]
    sharp: list[Luma]
    lines: list[Lines]
    phash: int
    size: tuple[int, int]


def score_chunk(chunk: ChunkContent, *, cut_threshold: float) -> dict[str, Any]:
    """Return the scores of a chunk: a value for each score in clipmill.shards.score_fields.SCORES.

    Numbers are rounded to six decimals; unknown values are None.

    Raises:
        SourceFailure: The chunk or its audio cannot be decoded.
    """
    cv2.setNumThreads(1)  # the flow depends on the number of threads, and callers already use all cores
    chosen = choose_frames(
        chunk.num_frames, fps=chunk.fps, packet_frame=chunk.packet_frame, packet_flags=chunk.packet_flags
    )
    colours = VideoReformatter()  # shared by all frames, since creating it costs more than converting a frame
    seen = _first_pass(chunk, chosen, colours)
    looks, pictures = dict(seen.looks), dict(seen.pictures)
    # A second pass decodes all frames of the intervals that may contain a cut. Most chunks have few such frames.
    intervals = intervals_to_refine(sorted(pictures.items()), threshold=cut_threshold)
    to_refine = [frame for interval in intervals for frame in interval]
    for frame, picture in zip(to_refine, chunk.frames(to_refine), strict=True):
        looks[frame] = Look.of(frame, full_luma(picture))
        pictures[frame] = _picture(picture, colours)
    cuts = find_cuts(sorted(pictures.items()), threshold=cut_threshold)
    active = active_part(seen.lines) if seen.lines else None
    motion = _mean_motion(seen, chosen, cuts=cuts, active=active, fps=chunk.fps)
    # Looks are denser in refined intervals, so weight each look by the number of frames that it represents.
    in_order = [look for _, look in sorted(looks.items())]
    shown = shown_frames(in_order, num_frames=chunk.num_frames)
    is_black = np.array([look.is_black for look in in_order])
    luma = np.array([look.luma.mean(dtype=np.float64) for look in in_order])
    frozen = None
    if chunk.num_frames > 1:
        flags = zip(chunk.packet_frame, chunk.packet_flags, strict=True)
        num_frozen = frozen_frames(
            in_order,
            num_frames=chunk.num_frames,
            min_frames=MIN_FROZEN_S * float(chunk.fps),
            key_frames=sorted(frame for frame, flag in flags if flag & PACKET_KEY),
        )
        frozen = num_frozen / chunk.num_frames
    samples, speech = decode_audio(chunk.mp4), None
    if samples is not None:
        speech_s = Fraction(int(is_speech(samples).sum()) * WINDOW_MS, 1000)
        speech = min(1.0, float(speech_s * chunk.fps / chunk.num_frames))
    sharp, letterbox = seen.sharp, None
    if active is not None:
        sharp = [luma[active.top : active.bottom, active.left : active.right] for luma in seen.sharp]
        area = (active.bottom - active.top) * (active.right - active.left)
        letterbox = 1 - area / (seen.size[0] * seen.size[1])
    values = {
        "motion": motion and motion.all,
        "camera_motion": motion and motion.camera,
        "object_motion": motion and motion.objects,
        "sharpness": float(np.mean([sharpness(luma) for luma in sharp])),
        "brightness": float((luma * shown).sum() / chunk.num_frames / 255),
        "black": float(shown[is_black].sum() / chunk.num_frames),
        "frozen": frozen,
        "letterbox": letterbox,
        "cuts": len(cuts),
        "cut_times_s": [round(float(cut / chunk.fps), _DECIMALS) for cut in cuts],
        "speech": speech,
        "phash": seen.phash,
    }
    return {name: round(value, _DECIMALS) if isinstance(value, float) else value for name, value in values.items()}


def _first_pass(chunk: ChunkContent, chosen: Chosen, colours: VideoReformatter) -> _Seen:
    """Decode the chosen frames once, one at a time, and keep what the measures need."""
    samples = set(chosen.samples)
    spread = np.linspace(0, len(chosen.samples) - 1, min(NUM_SHARP, len(chosen.samples))).round().astype(int)
    sharp_frames = {chosen.samples[number] for number in spread.tolist()}
    looks, pictures, sharp, lines, middle_hash, size = {}, {}, [], [], 0, (0, 0)
    for number, frame in zip(chosen.all, chunk.frames(chosen.all), strict=True):
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
            middle_hash = phash(np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8))
    return _Seen(looks, pictures, sharp, lines, middle_hash, size)


def _picture(frame: VideoFrame, colours: VideoReformatter) -> Picture:
    return analysis_picture(np.asarray(colours.reformat(frame, format="bgr24", threads=1).to_ndarray(), np.uint8))


def _mean_motion(
    seen: _Seen, chosen: Chosen, *, cuts: list[int], active: Active | None, fps: Fraction
) -> Motion | None:
    """Return the mean motion over all pairs without a cut, in frame heights per second; None without pairs."""
    motions = []
    for first, second in chosen.pairs:
        if any(first < cut <= second for cut in cuts):
            continue
        lumas = [seen.looks[frame].luma for frame in (first, second)]
        height = lumas[0].shape[0]
        if active is not None:
            part = active.of_small(lumas[0], height=seen.size[0], width=seen.size[1])
            lumas = [np.ascontiguousarray(luma[part]) for luma in lumas]
        flow = optical_flow(*lumas)
        if flow is not None:
            # Bars count as a part of the picture that does not move.
            fraction = lumas[0].size / seen.looks[first].luma.size
            factor = fraction * float(fps) / (second - first) / height
            motions.append([value * factor for value in astuple(split_motion(flow, texture_mask(lumas[0])))])
    return Motion(*(fmean(values) for values in zip(*motions, strict=True))) if motions else None


def scores_sample(chunk: Chunk, *, cut_threshold: float) -> Sample:
    """Score a chunk and return its sample.

    Raises:
        SourceFailure: The chunk is damaged or cannot be decoded, or a value is not finite.
    """
    fields = chunk.fields(score_chunk(chunk.read(), cut_threshold=cut_threshold))
    shown = {"key": chunk.key, **fields, "phash": f"{fields['phash']:0{_HASH_DIGITS}x}"}
    text = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    return chunk.sample({EXTENSION: text.encode("utf-8", "replace")}, fields)


def check_scores(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Compare the member of a sample with its index row, and its values with their ranges."""
    try:
        stated = parse_json(members[EXTENSION])
        digits = stated["phash"]
        stated["phash"] = None if digits is None else int(digits, 16)
        # The index stores some numbers as 32-bit values, so the member's values are rounded to them.
        rounded = pa.Table.from_pylist([stated], pa.schema(SCORES_FIELDS))
        in_member = {"key": stated["key"], **rounded.to_pylist()[0]}
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        return CheckedSample([(DeepCode.JSON_DIFFERS, f"the member cannot be read: {error!r}")], 0)
    differences = [
        (DeepCode.JSON_DIFFERS, f"{name}: {value!r} in the member, {row[name]!r} in the index")
        for name, value in in_member.items()
        if value != row[name]
    ]
    differences += [
        (DeepCode.JSON_DIFFERS, f"{score.name}: {row[score.name]!r} is out of range")
        for score in SCORES
        if score.is_number and row[score.name] is not None and not 0 <= row[score.name] <= score.upper_bound
    ]
    if row["cuts"] != len(row["cut_times_s"] or ()):
        message = f"cuts: {row['cuts']!r}, but {len(row['cut_times_s'] or ())} cut_times_s"
        differences.append((DeepCode.JSON_DIFFERS, message))
    return CheckedSample(differences, 1)
