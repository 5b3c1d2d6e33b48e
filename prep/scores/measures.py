"""Measures for the scores of a chunk: motion, cuts, focus, black and frozen frames, bars, perceptual hash, speech.

These frames of a chunk are analysed:

    samples      frames about half a second apart, including the first and the last frame; if possible, reference
                 frames, which the decoder needs anyway
    neighbours   the frame a tenth of a second after each sample, for motion
    middle       the middle frame, for the perceptual hash
    refined      all frames between two samples whose difference may be due to a cut

Luma always has the full range (0 black, 255 white), regardless of the range that the codec stores.

Motion: the optical flow between a sample and its neighbour is computed with OpenCV's implementation of DIS (Kroeger et
al., Fast Optical Flow using Dense Inverse Search, ECCV 2016), on luma that is scaled down to a longer side of 128
pixels ("small luma"). The camera motion is the similarity transform (translation, rotation, zoom) that explains the
flow at the textured points of a grid, by least median of squares. All other flow is object motion. Without texture,
flow cannot be observed, so pixels without texture are assumed to follow the camera. If texture covers too little of the
picture to distinguish a moving camera from a moving object, the camera is assumed to be still.

Cuts: PySceneDetect's ContentDetector compares each frame with the previous frame that it received. The detector
receives all samples. If two samples differ by less than `REFINE_FRACTION` of the threshold, it receives no frames
between them. Otherwise, it receives every frame between them, so that a cut is found at its exact frame. The method
misses a short shot between two similar samples. It also misses a cut between two samples that differ too little, even
if the consecutive frames at the cut differ enough.

Speech: WebRTC's voice activity detector decides for each window of 30 ms whether it is loud in the frequency bands of
speech. Tones and noise may be loud in these bands too, but the loudness of speech changes with every syllable, about
four times a second (Scheirer and Slaney, Construction and Evaluation of a Robust Multifeature Speech/Music
Discriminator, ICASSP 1997). Therefore, a window counts only if the loudness varies within the second around it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from io import BytesIO
from math import ceil, floor
from typing import Any

import av
import av.error
import cv2
import numpy as np
import webrtcvad
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange
from numpy.typing import NDArray
from scenedetect import FrameTimecode
from scenedetect.detectors import ContentDetector
from scenedetect.scene_manager import compute_downscale_factor

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.shards.format import PACKET_REFERENCE

# 16 frames at 30 frames per second: the distance of P frames in chunks with the default `--gop comb`
SAMPLE_STEP_S = Fraction(8, 15)
NEIGHBOUR_STEP_S = Fraction(1, 10)  # long enough for a new frame, even in a source with 10 frames per second
SMALL_SIDE_PX = 128  # longer side of small luma
Luma = NDArray[np.uint8]  # [H, W]

# Lookup table from luma in limited range (16 to 235) to luma in full range.
_FULL_RANGE = np.clip(np.round((np.arange(256) - 16) * (255 / 219)), 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class FrameChoice:
    """Indices of the frames to decode in the first pass, in ascending order.

    Attributes:
        samples: Samples, including the first and the last frame of the chunk.
        pairs: Pairs (sample, neighbour); empty if the chunk has a single frame.
        middle: Middle frame.
    """

    samples: list[int]
    pairs: list[tuple[int, int]]
    middle: int

    @property
    def all_frames(self) -> list[int]:
        return sorted({*self.samples, *(neighbour for _, neighbour in self.pairs), self.middle})


def choose_frames(
    num_frames: int, *, fps: Fraction, packet_frame: Sequence[int], packet_flags: Sequence[int]
) -> FrameChoice:
    """Choose the frames of a chunk to analyse, from its packet table (clipmill.shards.format.VIDEO_FIELDS).

    The sample after a given sample is the last reference frame within SAMPLE_STEP_S. If no reference frame is that
    close, the next sample is the first reference frame within twice SAMPLE_STEP_S. Otherwise, it is the frame after
    SAMPLE_STEP_S, even if decoding that frame is expensive.
    """
    step = max(1, int(SAMPLE_STEP_S * fps))
    references = sorted(
        frame for frame, flags in zip(packet_frame, packet_flags, strict=True) if flags & PACKET_REFERENCE
    )
    samples, last_frame = [0], num_frames - 1
    while samples[-1] < last_frame:
        frame = samples[-1]
        next_reference = bisect_right(references, frame)
        end_reference = bisect_right(references, frame + step)
        if end_reference > next_reference:
            frame = references[end_reference - 1]
        elif next_reference < len(references) and references[next_reference] < frame + 2 * step:
            frame = references[next_reference]
        else:
            frame += step
        samples.append(min(frame, last_frame))
    gap = min(max(1, round(NEIGHBOUR_STEP_S * fps)), max(last_frame, 1))
    pairs = [(sample, sample + gap) for sample in samples if sample + gap <= last_frame]
    return FrameChoice(samples, pairs, num_frames // 2)


def full_luma(frame: VideoFrame) -> Luma:
    """Return the luma of a frame with the full range, uint8 [H, W]."""
    if frame.format.name not in ("yuv420p", "yuvj420p"):
        frame = frame.reformat(format="yuv420p")
    plane = frame.planes[0]
    lines = np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)
    luma = lines[:, : plane.width]
    if frame.format.name == "yuvj420p" or frame.color_range == ColorRange.JPEG:
        return luma.copy()  # the decoder will reuse the memory of the plane
    return np.asarray(cv2.LUT(luma, _FULL_RANGE), np.uint8)


def small_luma(luma: Luma) -> Luma:
    """Scale luma down to a longer side of SMALL_SIDE_PX by area averaging. Smaller luma is not scaled up."""
    height, width = luma.shape
    scale = min(1.0, SMALL_SIDE_PX / max(width, height))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(cv2.resize(luma, size, interpolation=cv2.INTER_AREA), np.uint8)


Flow = NDArray[np.float32]  # [H, W, 2]: x and y in pixels
Mask = NDArray[np.bool_]  # [H, W]

_GRID_PX = 6
_MIN_TEXTURE = 4.0  # minimum mean absolute luma gradient around a textured pixel, in levels per pixel
_TEXTURE_WINDOW_PX = 9
_CELLS = 3  # the picture is divided into 3 x 3 cells
_MIN_CELLS = 6  # minimum number of cells with texture for estimating the camera motion
_MIN_CELL_POINTS = 2  # minimum number of textured points in a cell with texture
_MIN_GAIN_PX = 0.03  # minimum decrease of the median error that counts as evidence of a moving camera
_MIN_SIDE_PX = 16  # minimum side length of a picture; DIS needs a few patches of 8 pixels


@dataclass(frozen=True)
class Motion:
    """Mean displacements over the picture, in pixels or in frame heights per second.

    Attributes:
        all: Displacement by the camera and by objects.
        camera: Displacement by the camera.
        objects: Remaining displacement.
    """

    all: float
    camera: float
    objects: float


def optical_flow(first: Luma, second: Luma) -> Flow | None:
    """Return the optical flow from `first` to `second` (small luma), float32 [H, W, 2]; None if they are too small."""
    if min(first.shape) < _MIN_SIDE_PX:
        return None
    dis: Any = cv2.DISOpticalFlow  # the type stub lacks the optional initial flow
    flow = dis.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM).calc(first, second, None)
    return np.asarray(flow, np.float32)


def texture_mask(luma: Luma) -> Mask:
    """Return True for each pixel that is surrounded by texture, bool [H, W]."""
    gradients = [cv2.convertScaleAbs(cv2.Sobel(luma, cv2.CV_16S, dx, dy, scale=1 / 8)) for dx, dy in ((1, 0), (0, 1))]
    window = (_TEXTURE_WINDOW_PX, _TEXTURE_WINDOW_PX)
    return np.asarray(sum(cv2.blur(gradient.astype(np.float32), window) for gradient in gradients) >= _MIN_TEXTURE)


def split_motion(flow: Flow, texture: Mask) -> Motion:
    """Split a flow into camera motion and object motion, in pixels."""
    camera = camera_flow(flow, texture)
    object_flow = (flow - camera) * texture[..., None]
    return Motion(_mean_length(camera + object_flow), _mean_length(camera), _mean_length(object_flow))


def camera_flow(flow: Flow, texture: Mask) -> Flow:
    """Estimate the flow that a moving camera causes, [H, W, 2]; zero if the camera is assumed to be still."""
    grid = np.zeros_like(texture)
    grid[_GRID_PX // 2 :: _GRID_PX, _GRID_PX // 2 :: _GRID_PX] = True
    rows, columns = np.nonzero(grid & texture)
    height, width = texture.shape
    cells = np.bincount(rows * _CELLS // height * _CELLS + columns * _CELLS // width, minlength=_CELLS**2)
    if (cells >= _MIN_CELL_POINTS).sum() < _MIN_CELLS:
        return np.zeros_like(flow)
    points = np.stack([columns, rows], axis=1).astype(np.float32)
    transform: Any = cv2.estimateAffinePartial2D(points, points + flow[rows, columns], method=cv2.LMEDS)[0]
    if transform is None:
        return np.zeros_like(flow)
    a, b, c, d, e, f = np.asarray(transform, np.float32).ravel()
    x, y = np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32)[:, None]
    camera = np.stack([(a - 1) * x + (b * y + c), d * x + ((e - 1) * y + f)], axis=2)
    # Assume a still camera unless a moving camera clearly reduces the median error over the points.
    moving_error, still_error = (
        _lengths((flow - estimate)[rows, columns]) for estimate in (camera, np.zeros_like(flow))
    )
    return camera if np.median(still_error) - np.median(moving_error) > _MIN_GAIN_PX else np.zeros_like(flow)


def _lengths(flow: Flow) -> NDArray[np.float32]:
    return np.sqrt(flow[..., 0] ** 2 + flow[..., 1] ** 2)  # three times as fast as np.hypot


def _mean_length(flow: Flow) -> float:
    return float(_lengths(flow).mean(dtype=np.float64))


REFINE_FRACTION = 0.5  # if two samples differ by this fraction of the threshold, all frames between them are analysed
MIN_SHOT_FRAMES = 15  # PySceneDetect's default; cuts that are closer together are merged
_DETECTOR_FPS = 30.0  # the value has no effect, because the detector counts frames
Picture = NDArray[np.uint8]  # [H, W, 3], BGR


def analysis_picture(picture: Picture) -> Picture:
    """Scale a picture down for the detector, as PySceneDetect does."""
    height, width = picture.shape[:2]
    factor = compute_downscale_factor(max(width, height))
    if factor <= 1:
        return picture
    size = (max(1, round(width / factor)), max(1, round(height / factor)))
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_LINEAR), np.uint8)


def intervals_to_refine(samples: Sequence[tuple[int, Picture]], *, threshold: float) -> list[range]:
    """Return the ranges of frames between consecutive samples that may contain a cut.

    Args:
        samples: (index, picture) of the samples, in ascending order.
        threshold: Threshold of the detector.
    """
    detector = ContentDetector(threshold=REFINE_FRACTION * threshold, min_scene_len=0)
    intervals = []
    for previous, (frame, picture) in zip([0, *(frame for frame, _ in samples)], samples, strict=False):
        if detector.process_frame(FrameTimecode(frame, _DETECTOR_FPS), picture) and frame - previous > 1:
            intervals.append(range(previous + 1, frame))
    return intervals


def find_cuts(frames: Iterable[tuple[int, Picture]], *, threshold: float) -> list[int]:
    """Return the index of the first frame of each new shot, in ascending order.

    Args:
        frames: (index, picture) of frames in order, beginning with frame 0.
        threshold: Threshold of the detector.
    """
    detector = ContentDetector(threshold=threshold, min_scene_len=MIN_SHOT_FRAMES)
    cuts: list[int] = []
    for frame, picture in frames:
        # The chunk may begin in the middle of a shot, so the detector must not treat its first frames as a short shot.
        time = FrameTimecode(frame + MIN_SHOT_FRAMES if frame else 0, _DETECTOR_FPS)
        cuts += [cut.frame_num - MIN_SHOT_FRAMES for cut in detector.process_frame(time, picture)]
    return cuts


BLACK_LEVEL = 25  # maximum luma of a black pixel: 0.10 of the range, as in ffmpeg's blackdetect
BLACK_PIXELS = 0.98  # minimum fraction of black pixels in a black frame, as in blackdetect
BAR_LEVEL = 9.3  # maximum mean luma of a line in a bar: 24 in limited range, as in ffmpeg's cropdetect
# Maximum mean absolute difference between two blocks of frozen pictures, in levels. Compression causes about 0.9.
STILL_DIFFERENCE = 3.0
MAX_KEY_FRAME_DIFFERENCE = 2.0  # maximum median difference of the blocks that is attributed to a key frame, in levels
_BLOCK_PX = 8  # side length of a block; the longer side of small luma has 16 blocks
MIN_FROZEN_S = 1.0  # minimum duration of a freeze
_HASH_SIDE, _PICTURE_SIDE = 8, 32
# Basis vectors of the 8 lowest frequencies of the DCT-II, [8, 32], scaled as in scipy.fftpack.
_COSINES = 2 * np.cos(
    np.arange(_HASH_SIDE)[:, None] * ((2 * np.arange(_PICTURE_SIDE) + 1) * np.pi / (2 * _PICTURE_SIDE))
)


@dataclass(frozen=True)
class FrameSummary:
    """Summary of a decoded frame: its index, its small luma, and whether it is black."""

    frame: int
    luma: Luma
    is_black: bool

    @classmethod
    def from_luma(cls, frame: int, luma: Luma) -> "FrameSummary":
        """Return the summary of the frame with index `frame` and full-resolution luma `luma`."""
        num_black = np.count_nonzero(luma <= BLACK_LEVEL)
        return cls(frame, small_luma(luma), bool(num_black >= BLACK_PIXELS * luma.size))


def frames_per_summary(summaries: Sequence[FrameSummary], *, num_frames: int) -> NDArray[np.float64]:
    """Return the number of frames that each summary represents, float64 [summaries]; the sum is `num_frames`.

    A summary represents the frames up to halfway to the previous and the next summary.
    """
    frames = np.array([summary.frame for summary in summaries], np.float64)
    boundaries = np.concatenate([[0.0], (frames[:-1] + frames[1:] + 1) / 2, [float(num_frames)]])
    return np.diff(boundaries)


def frozen_frames(
    summaries: Sequence[FrameSummary], *, num_frames: int, min_frames: float, key_frames: Sequence[int]
) -> float:
    """Return the total number of frames in freezes.

    A freeze has at least `min_frames` frames, or covers the complete chunk.
    As in ffmpeg's freezedetect, a freeze lasts as long as frames look like its first frame, so a slow change ends the
    freeze. Unlike in freezedetect, a change in a single block also ends a freeze, because a small object may move.
    Compression changes all blocks after a key frame, so frames are also compared with the first frame after the last
    key frame.

    Args:
        summaries: Summaries of frames, in ascending order of index.
        num_frames: Number of frames in the chunk.
        key_frames: Indices of the key frames, in ascending order.
    """
    boundaries = np.concatenate([[0.0], np.cumsum(frames_per_summary(summaries, num_frames=num_frames))])
    groups = [bisect_right(key_frames, summary.frame) for summary in summaries]
    lumas = [summary.luma for summary in summaries]
    # `begin` is the index of the first summary of the freeze; `first` is the index of its first summary after the last
    # key frame. Frames between two key frames have the same number in `groups`.
    num_frozen, begin, first = 0.0, 0, 0
    for index in range(1, len(summaries) + 1):
        if index < len(summaries):
            is_same_group = groups[index] == groups[first]
            if (not is_same_group or _is_still(lumas[first], lumas[index])) and (
                groups[index] == groups[begin] or _is_still(lumas[begin], lumas[index], has_key_frame=True)
            ):
                first = first if is_same_group else index
                continue
        length = float(boundaries[index] - boundaries[begin])
        if index - begin > 1 and length >= min(min_frames, num_frames):
            num_frozen += length
        begin = first = index
    return num_frozen


def _is_still(first: Luma, second: Luma, *, has_key_frame: bool = False) -> bool:
    """Return True if nothing moves between two frames.

    Args:
        has_key_frame: True if there is a key frame between the frames. Then, up to MAX_KEY_FRAME_DIFFERENCE of the
            median difference is attributed to compression.
    """
    difference = cv2.absdiff(first, second).astype(np.float32)
    size = (max(1, first.shape[1] // _BLOCK_PX), max(1, first.shape[0] // _BLOCK_PX))
    blocks = cv2.resize(difference, size, interpolation=cv2.INTER_AREA)
    compression = min(float(np.median(blocks)), MAX_KEY_FRAME_DIFFERENCE) if has_key_frame else 0.0
    return bool(blocks.max() <= STILL_DIFFERENCE + compression)


def sharpness(luma: Luma) -> float:
    """Return the variance of the Laplacian, a measure of focus (Pech-Pacheco et al., ICPR 2000)."""
    _, deviation = cv2.meanStdDev(cv2.Laplacian(luma, cv2.CV_16S))
    return float(deviation[0, 0]) ** 2


@dataclass(frozen=True)
class LineMeans:
    """Mean luma of each row, float32 [H], and of each column, float32 [W], of a frame."""

    rows: NDArray[np.float32]
    columns: NDArray[np.float32]

    @classmethod
    def from_luma(cls, luma: Luma) -> "LineMeans":
        rows, columns = (cv2.reduce(luma, axis, cv2.REDUCE_AVG, dtype=cv2.CV_32F) for axis in (1, 0))
        return cls(np.asarray(rows.ravel(), np.float32), np.asarray(columns.ravel(), np.float32))


@dataclass(frozen=True)
class ActiveArea:
    """The part of the picture between the bars, in pixels. `bottom` and `right` are exclusive."""

    top: int
    bottom: int
    left: int
    right: int

    def slice_small(self, luma: Luma, *, height: int, width: int) -> tuple[slice, slice]:
        """Return the slices of the rows and columns of small luma that are entirely between the bars.

        Args:
            height, width: Full resolution of the frame.
        """
        y_scale, x_scale = luma.shape[0] / height, luma.shape[1] / width
        return (
            slice(ceil(self.top * y_scale), floor(self.bottom * y_scale)),
            slice(ceil(self.left * x_scale), floor(self.right * x_scale)),
        )


def find_active_area(lines: Sequence[LineMeans]) -> ActiveArea | None:
    """Find the part of the picture between the bars; return None if all lines are black.

    Bars are the outer lines that are black in all frames.
    """
    rows = np.flatnonzero(np.max([line.rows for line in lines], axis=0) > BAR_LEVEL)
    columns = np.flatnonzero(np.max([line.columns for line in lines], axis=0) > BAR_LEVEL)
    if not len(rows) or not len(columns):
        return None
    return ActiveArea(int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)


def phash(rgb: NDArray[np.uint8]) -> int:
    """Return the 64-bit perceptual hash of a picture, equal to ImageHash's `phash`, most significant bit first.

    Each bit represents one of the lowest 8 x 8 frequencies in the cosine transform of the 32 x 32 luma. It is set if
    the frequency exceeds the median of these frequencies. Grey conversion and the Lanczos filter use the integer
    arithmetic of Pillow, so hashes are bit-identical.

    Args:
        rgb: Picture, uint8 [H, W, 3].
    """
    weights = np.array([19595, 38470, 7471], np.int64)  # Pillow's conversion to L
    grey = ((rgb.astype(np.int64) @ weights + 0x8000) >> 16).astype(np.int64)
    for _ in range(2):  # along the width, then along the height
        coefficients = _lanczos(grey.shape[1])
        grey = np.clip((grey @ coefficients + (1 << 21)) >> 22, 0, 255).T
    # Round, so that frequencies that vanish by symmetry are exactly zero, regardless of the order of summation.
    frequencies = np.round(_COSINES @ grey.astype(np.float64) @ _COSINES.T, 6)
    bits = (frequencies > np.median(frequencies)).ravel()
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


@lru_cache(maxsize=64)
def _lanczos(length: int) -> NDArray[np.int64]:
    """Return Pillow's coefficients for reducing `length` pixels to 32 with a Lanczos filter, in units of 2^-22.

    The shape is [length, 32].
    """
    scale = length / _PICTURE_SIDE
    stretch = max(scale, 1.0)
    support = 3 * stretch
    table = np.zeros((length, _PICTURE_SIDE), np.int64)
    for column in range(_PICTURE_SIDE):
        centre = (column + 0.5) * scale
        begin, end = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), length)
        distances = (np.arange(begin, end) - centre + 0.5) / stretch
        weights = np.where(np.abs(distances) < 3, np.sinc(distances) * np.sinc(distances / 3), 0.0)
        scaled_weights = weights / weights.sum() * (1 << 22)
        table[begin:end, column] = np.trunc(scaled_weights + np.where(scaled_weights < 0, -0.5, 0.5))
    return table


RATE_HZ = 16_000
WINDOW_MS = 30
_WINDOW_SAMPLES = RATE_HZ * WINDOW_MS // 1000
_AGGRESSIVENESS = 3  # mode of the detector, 0 to 3; mode 3 has the fewest false alarms
_NUM_CONTEXT = 16  # number of windows before and after a window, about a second in total
_MIN_VARIATION_DB = 3.0  # minimum standard deviation of the loudness; a tone has 0, white noise 0.3
_FLOOR_DB = -60.0  # relative to full scale; lower values are silence


def is_speech(samples: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return True for each complete window of 30 ms that contains speech, bool [windows].

    Args:
        samples: Mono samples at RATE_HZ.
    """
    windows = samples[: len(samples) // _WINDOW_SAMPLES * _WINDOW_SAMPLES].reshape(-1, _WINDOW_SAMPLES)
    detector = webrtcvad.Vad(_AGGRESSIVENESS)
    is_voiced = np.array([detector.is_speech(window.tobytes(), RATE_HZ) for window in windows], bool)
    power = (windows.astype(np.float64) ** 2).mean(axis=1) / 2.0**30
    loudness_db = 10 * np.log10(np.maximum(power, 10 ** (_FLOOR_DB / 10)))
    # Compute the standard deviation of the loudness around each window.
    index = np.arange(len(loudness_db))
    begin, end = np.maximum(index - _NUM_CONTEXT, 0), np.minimum(index + _NUM_CONTEXT + 1, len(loudness_db))
    sums, squares = (np.concatenate([[0.0], np.cumsum(terms)]) for terms in (loudness_db, loudness_db**2))
    mean = (sums[end] - sums[begin]) / (end - begin)
    deviation_db = np.sqrt(np.maximum((squares[end] - squares[begin]) / (end - begin) - mean**2, 0.0))
    return is_voiced & (deviation_db >= _MIN_VARIATION_DB)


def decode_audio(content: bytes) -> NDArray[np.int16] | None:
    """Decode the first audio track of an MP4 file to mono samples at RATE_HZ; None if there is no audio.

    Raises:
        SourceFailure: The audio cannot be decoded (decode_errors).
    """
    parts = []
    if not content:
        return None
    try:
        with av.open(BytesIO(content), "r", format="mp4") as container:
            if not container.streams.audio:
                return None
            stream = container.streams.audio[0]
            stream.codec_context.thread_count = 1
            resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
            for frame in [*container.decode(stream), None]:
                parts += [resampled.to_ndarray()[0] for resampled in resampler.resample(frame)]
    except av.error.FFmpegError as error:
        raise SourceFailure(FailureCode.DECODE_ERRORS, f"the audio cannot be decoded: {error}") from None
    return np.concatenate(parts).astype(np.int16, copy=False) if parts else None
