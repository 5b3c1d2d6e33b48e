"""Compute the scores of a chunk (defined in docs/columns.md), make samples, and check them for `prep verify --deep`."""

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

from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import parse_json
from clipmill.prep.core.chunk_content import ChunkContent
from clipmill.prep.core.chunk_input import Chunk
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.scores.measures import (
    MIN_FROZEN_S,
    WINDOW_MS,
    ActiveArea,
    FrameChoice,
    FrameSummary,
    LineMeans,
    Luma,
    Motion,
    Picture,
    analysis_picture,
    choose_frames,
    decode_audio,
    find_active_area,
    find_cuts,
    frames_per_summary,
    frozen_frames,
    full_luma,
    intervals_to_refine,
    is_speech,
    optical_flow,
    phash,
    sharpness,
    split_motion,
    texture_mask,
)
from clipmill.shards.format import PACKET_KEY
from clipmill.shards.score_fields import SCORES, SCORES_FIELDS
from clipmill.shards.writer import Sample

NUM_SHARP = 12  # maximum number of evenly spaced sampled frames from which the sharpness is computed
_DECIMALS = 6
EXTENSION = "scores.json"
_HASH_DIGITS = 16


@dataclass(frozen=True)
class _FirstPass:
    """Results of the first pass over the frames of a chunk.

    Attributes:
        summaries: Summaries of all decoded frames, keyed by frame index.
        pictures: Pictures of the sampled frames (`FrameChoice.samples`), keyed by frame index.
        sharp_lumas: Full-resolution luma of the sampled frames from which the sharpness is computed.
        lines: Mean luma of the rows and columns of each sampled frame that is not black.
        phash: Perceptual hash of the middle frame.
        size: Height and width of the frames.
    """

    summaries: dict[int, FrameSummary]
    pictures: dict[int, Picture]
    sharp_lumas: list[Luma]
    lines: list[LineMeans]
    phash: int
    size: tuple[int, int]


def score_chunk(chunk: ChunkContent, *, cut_threshold: float) -> dict[str, Any]:
    """Compute the scores of a chunk (clipmill.shards.score_fields.SCORES); return their values, keyed by name.

    Numbers are rounded to six decimals. Unknown values are None.

    Args:
        cut_threshold: Threshold of PySceneDetect's ContentDetector.

    Raises:
        SourceFailure: The chunk or its audio cannot be decoded.
    """
    cv2.setNumThreads(1)  # the flow depends on the number of threads, and callers already use all cores
    choice = choose_frames(
        chunk.num_frames, fps=chunk.fps, packet_frame=chunk.packet_frame, packet_flags=chunk.packet_flags
    )
    colours = VideoReformatter()  # shared by all frames, because creating it takes longer than converting a frame
    first_pass = _run_first_pass(chunk, choice, colours)
    summaries, pictures = dict(first_pass.summaries), dict(first_pass.pictures)
    # A second pass decodes all frames in the intervals that may contain a cut. Most chunks have few such frames.
    intervals = intervals_to_refine(sorted(pictures.items()), threshold=cut_threshold)
    to_refine = [frame for interval in intervals for frame in interval]
    for frame, picture in zip(to_refine, chunk.frames(to_refine), strict=True):
        summaries[frame] = FrameSummary.from_luma(frame, full_luma(picture))
        pictures[frame] = _picture(picture, colours)
    cuts = find_cuts(sorted(pictures.items()), threshold=cut_threshold)
    area = find_active_area(first_pass.lines) if first_pass.lines else None
    motion = _mean_motion(first_pass, choice, cuts=cuts, area=area, fps=chunk.fps)
    # The second pass makes summaries denser in places, so weight each by the number of frames that it represents.
    sorted_summaries = [summary for _, summary in sorted(summaries.items())]
    weights = frames_per_summary(sorted_summaries, num_frames=chunk.num_frames)
    is_black = np.array([summary.is_black for summary in sorted_summaries])
    luma = np.array([summary.luma.mean(dtype=np.float64) for summary in sorted_summaries])
    frozen = None
    if chunk.num_frames > 1:
        flags = zip(chunk.packet_frame, chunk.packet_flags, strict=True)
        num_frozen = frozen_frames(
            sorted_summaries,
            num_frames=chunk.num_frames,
            min_frames=MIN_FROZEN_S * float(chunk.fps),
            key_frames=sorted(frame for frame, flag in flags if flag & PACKET_KEY),
        )
        frozen = num_frozen / chunk.num_frames
    samples, speech = decode_audio(chunk.mp4), None
    if samples is not None:
        speech_s = Fraction(int(is_speech(samples).sum()) * WINDOW_MS, 1000)
        speech = min(1.0, float(speech_s * chunk.fps / chunk.num_frames))
    sharp_lumas, letterbox = first_pass.sharp_lumas, None
    if area is not None:
        sharp_lumas = [luma[area.top : area.bottom, area.left : area.right] for luma in sharp_lumas]
        num_pixels = (area.bottom - area.top) * (area.right - area.left)
        letterbox = 1 - num_pixels / (first_pass.size[0] * first_pass.size[1])
    values = {
        "motion": motion and motion.all,
        "camera_motion": motion and motion.camera,
        "object_motion": motion and motion.objects,
        "sharpness": float(np.mean([sharpness(luma) for luma in sharp_lumas])),
        "brightness": float((luma * weights).sum() / chunk.num_frames / 255),
        "black": float(weights[is_black].sum() / chunk.num_frames),
        "frozen": frozen,
        "letterbox": letterbox,
        "cuts": len(cuts),
        "cut_times_s": [round(float(cut / chunk.fps), _DECIMALS) for cut in cuts],
        "speech": speech,
        "phash": first_pass.phash,
    }
    return {name: round(value, _DECIMALS) if isinstance(value, float) else value for name, value in values.items()}


def _run_first_pass(chunk: ChunkContent, choice: FrameChoice, colours: VideoReformatter) -> _FirstPass:
    """Decode the chosen frames and keep only the data that the measures need, because frames are large."""
    samples = set(choice.samples)
    sharp_indices = np.linspace(0, len(choice.samples) - 1, min(NUM_SHARP, len(choice.samples))).round().astype(int)
    sharp_frames = {choice.samples[index] for index in sharp_indices.tolist()}
    summaries, pictures, sharp_lumas, lines, middle_hash, size = {}, {}, [], [], 0, (0, 0)
    for index, frame in zip(choice.all_frames, chunk.frames(choice.all_frames), strict=True):
        luma = full_luma(frame)
        summaries[index] = summary = FrameSummary.from_luma(index, luma)
        size = luma.shape[0], luma.shape[1]
        if index in samples:
            pictures[index] = _picture(frame, colours)
            if not summary.is_black:
                lines.append(LineMeans.from_luma(luma))
        if index in sharp_frames:
            sharp_lumas.append(luma)
        if index == choice.middle:
            middle_hash = phash(np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8))
    return _FirstPass(summaries, pictures, sharp_lumas, lines, middle_hash, size)


def _picture(frame: VideoFrame, colours: VideoReformatter) -> Picture:
    return analysis_picture(np.asarray(colours.reformat(frame, format="bgr24", threads=1).to_ndarray(), np.uint8))


def _mean_motion(
    first_pass: _FirstPass, choice: FrameChoice, *, cuts: list[int], area: ActiveArea | None, fps: Fraction
) -> Motion | None:
    """Return the mean motion of the pairs without a cut, in frame heights per second; None if it is unknown.

    The motion is unknown if there are no such pairs, or if the frames between the bars are too small.
    """
    motions = []
    for first, second in choice.pairs:
        if any(first < cut <= second for cut in cuts):
            continue
        lumas = [first_pass.summaries[frame].luma for frame in (first, second)]
        height = lumas[0].shape[0]
        if area is not None:
            slices = area.slice_small(lumas[0], height=first_pass.size[0], width=first_pass.size[1])
            lumas = [np.ascontiguousarray(luma[slices]) for luma in lumas]
        flow = optical_flow(*lumas)
        if flow is not None:
            # Average over the complete picture, including the bars, which do not move.
            fraction = lumas[0].size / first_pass.summaries[first].luma.size
            factor = fraction * float(fps) / (second - first) / height
            motions.append([value * factor for value in astuple(split_motion(flow, texture_mask(lumas[0])))])
    return Motion(*(fmean(values) for values in zip(*motions, strict=True))) if motions else None


def scores_sample(chunk: Chunk, *, cut_threshold: float) -> Sample:
    """Score a chunk and return its sample.

    Raises:
        SourceFailure: The chunk is damaged or cannot be decoded, or a value is not finite.
    """
    fields = chunk.fields(score_chunk(chunk.read(), cut_threshold=cut_threshold))
    values = {"key": chunk.key, **fields, "phash": f"{fields['phash']:0{_HASH_DIGITS}x}"}
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    return chunk.sample({EXTENSION: text.encode("utf-8", "replace")}, fields)


def check_scores(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Compare the member of a sample with its index row, and check the ranges of its values."""
    try:
        values = parse_json(members[EXTENSION])
        digits = values["phash"]
        values["phash"] = None if digits is None else int(digits, 16)
        # The index stores some numbers with 32 bits, so round the values of the member in the same way.
        rounded_values = pa.Table.from_pylist([values], pa.schema(SCORES_FIELDS))
        member_values = {"key": values["key"], **rounded_values.to_pylist()[0]}
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        return CheckedSample([(DeepCode.JSON_DIFFERS, f"the member cannot be read: {error!r}")], 0)
    differences = [
        (DeepCode.JSON_DIFFERS, f"{name} is {value!r} in the member, but {row[name]!r} in the index")
        for name, value in member_values.items()
        if value != row[name]
    ]
    differences += [
        (DeepCode.JSON_DIFFERS, f"{score.name} is {row[score.name]!r}, which is out of range")
        for score in SCORES
        if score.is_number and row[score.name] is not None and not 0 <= row[score.name] <= score.upper_bound
    ]
    if row["cuts"] != len(row["cut_times_s"] or ()):
        message = f"cuts is {row['cuts']!r}, but cut_times_s has {count_noun(len(row['cut_times_s'] or ()), 'value')}"
        differences.append((DeepCode.JSON_DIFFERS, message))
    return CheckedSample(differences, 1)
