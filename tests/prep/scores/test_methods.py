"""Tests of the methods behind the scores: their values equal plain calls of the libraries."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import cv2
import imagehash
import numpy as np
import pytest
from PIL import Image
from scenedetect import ContentDetector, detect

from clipmill.prep.core.chunk_content import ChunkContent, read_chunk
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.scores.measures import (
    MIN_SHOT_FRAMES,
    RATE_HZ,
    FrameSummary,
    choose_frames,
    frames_per_summary,
    frozen_frames,
    full_luma,
    is_speech,
    optical_flow,
    phash,
    sharpness,
    split_motion,
    texture_mask,
)
from clipmill.prep.scores.score import score_chunk
from clipmill.shards.format import PACKET_KEY, PACKET_REFERENCE
from clipmill.shards.reader import Variant
from tests.prep.scores.conftest import FPS, texture, voice

THIRTY = Fraction(30)


def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (90, 160, 3)).astype(np.uint8)
    ramp = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None], (77, 200, 3))
    flat = np.full((50, 50, 3), 128, np.uint8)
    shapes = np.zeros((288, 512, 3), np.uint8)
    cv2.circle(shapes, (100, 90), 60, (200, 40, 90), -1)
    tiny = rng.integers(0, 256, (7, 5, 3)).astype(np.uint8)
    return [noise, ramp.copy(), flat, shapes, tiny, *(texture(seed, width=333, blur=9) for seed in range(4))]


@pytest.mark.parametrize("number", range(9))
def test_the_hash_is_that_of_imagehash(number: int) -> None:
    picture = pictures()[number]
    assert phash(picture) == int(str(imagehash.phash(Image.fromarray(picture))), 16)


def chunk_of(data: Path, key: str) -> ChunkContent:
    return read_chunk(*Variant.open(data).find(key))


@pytest.mark.parametrize("clip", ["shots", "pan", "dark"])
def test_cuts_are_those_of_scenedetect_on_the_whole_file(clips: Path, tmp_path: Path, clip: str) -> None:
    chunk = chunk_of(clips, f"{clip}_000000000")
    (tmp_path / "chunk.mp4").write_bytes(chunk.mp4)
    plain = [begin.frame_num for begin, _ in detect(str(tmp_path / "chunk.mp4"), ContentDetector(), backend="pyav")[1:]]
    cut_frames = [round(time_s * FPS) for time_s in score_chunk(chunk, cut_threshold=27.0)["cut_times_s"]]
    # Only the library omits cuts in the first half second of a file.
    assert [frame for frame in cut_frames if frame >= MIN_SHOT_FRAMES] == plain


def test_a_threshold_below_all_differences_cuts_often_and_still_ends(clips: Path) -> None:
    scores = score_chunk(chunk_of(clips, "pan_000000000"), cut_threshold=1.0)
    assert scores["cuts"] == len(scores["cut_times_s"]) and scores["cuts"] >= 1
    assert scores["motion"] is None or np.isfinite(scores["motion"])


def test_the_hash_and_the_sharpness_are_those_of_the_decoded_frames(clips: Path) -> None:
    chunk = chunk_of(clips, "blurred_000000000")
    frames = [*chunk.frames(range(chunk.num_frames))]
    scores = score_chunk(chunk, cut_threshold=27.0)
    middle = frames[chunk.num_frames // 2].to_image()
    assert scores["phash"] == int(str(imagehash.phash(middle)), 16)
    plain = [cv2.Laplacian(full_luma(frame), cv2.CV_64F).var() for frame in frames]
    assert scores["sharpness"] == pytest.approx(np.mean(plain), rel=0.05)


def test_samples_are_frames_that_the_decoder_needs_anyway() -> None:
    flags = [
        PACKET_KEY | PACKET_REFERENCE if n % 90 == 0 else PACKET_REFERENCE * (n % 90 % 16 == 0) for n in range(180)
    ]
    chosen = choose_frames(180, fps=THIRTY, packet_frame=range(180), packet_flags=flags)
    assert chosen.samples == [0, 16, 32, 48, 64, 80, 90, 106, 122, 138, 154, 170, 179]
    assert chosen.pairs[:2] == [(0, 3), (16, 19)] and chosen.middle == 90
    assert all(later < 180 for _, later in chosen.pairs)


@pytest.mark.parametrize(
    ("num_frames", "fps", "every", "samples"),
    [
        (40, 30, 1, [0, 16, 32, 39]),  # every frame is a reference
        (40, 30, 1000, [0, 16, 32, 39]),  # only the first frame is a reference
        (40, 25, 16, [0, 16, 32, 39]),  # references are slightly further apart than samples should be
        (6, 2, 16, [0, 1, 2, 3, 4, 5]),
        (1, 30, 1, [0]),
        (2, 30, 1, [0, 1]),
    ],
)
def test_samples_are_about_half_a_second_apart_for_any_gop(
    num_frames: int, fps: int, every: int, samples: list[int]
) -> None:
    flags = [PACKET_REFERENCE if frame % every == 0 else 0 for frame in range(num_frames)]
    chosen = choose_frames(num_frames, fps=Fraction(fps), packet_frame=range(num_frames), packet_flags=flags)
    assert chosen.samples == samples
    assert chosen.all_frames == sorted(set(chosen.all_frames)) and max(chosen.all_frames) < num_frames


def looks(*luma: tuple[int, int]) -> list[FrameSummary]:
    return [FrameSummary.from_luma(frame, np.full((72, 128), level, np.uint8)) for frame, level in luma]


def test_every_frame_of_the_time_belongs_to_one_look() -> None:
    shown = frames_per_summary(looks((0, 9), (4, 9), (5, 9), (9, 9)), num_frames=12)
    assert shown.tolist() == [2.5, 2.5, 2.5, 4.5] and shown.sum() == 12


def test_slow_changes_and_short_standstills_are_not_frozen() -> None:
    fading = looks(*((frame, 2 * frame) for frame in range(0, 60, 5)))
    assert frozen_frames(fading, num_frames=60, min_frames=30, key_frames=[0]) == 0
    still = looks((0, 9), (5, 9), (10, 90), (15, 90), (20, 90), (60, 9))
    assert frozen_frames(still, num_frames=61, min_frames=30, key_frames=[0]) == pytest.approx(32.5)
    assert frozen_frames(looks((0, 9), (1, 9)), num_frames=2, min_frames=30, key_frames=[0]) == 2
    assert frozen_frames(looks((0, 9), (40, 90)), num_frames=80, min_frames=30, key_frames=[0]) == 0, (
        "no standstill was observed"
    )


@pytest.mark.parametrize(
    ("everywhere", "in_a_block", "behind_a_key_frame", "frozen"),
    [
        (1, 4, True, 60),  # static content that is encoded again
        (1, 4, False, 0),  # frames between key frames copy static content
        (0, 4, True, 0),  # a small object has moved
        (9, 12, True, 0),  # the complete image has changed
    ],
)
def test_a_standstill_lasts_across_key_frames(
    everywhere: int, in_a_block: int, behind_a_key_frame: bool, frozen: int
) -> None:
    before = np.full((72, 128), 100, np.uint8)
    after = before + np.uint8(everywhere)
    after[8:16, 8:16] = 100 + in_a_block
    pictures = [before] * 3 + [after] * 3
    seen = [FrameSummary.from_luma(10 * number, picture) for number, picture in enumerate(pictures)]
    keys = [0, 30] if behind_a_key_frame else [0]
    assert frozen_frames(seen, num_frames=60, min_frames=40, key_frames=keys) == frozen


@pytest.mark.parametrize("zoom", [1.0, 1.04])
def test_a_turning_and_zooming_camera_is_a_camera(zoom: float) -> None:
    before = texture(0, width=128, height=72)[..., 0]
    matrix = cv2.getRotationMatrix2D((64, 36), 2.0, zoom)
    after = np.asarray(cv2.warpAffine(before, matrix, (128, 72), borderMode=cv2.BORDER_REFLECT), np.uint8)
    flow = optical_flow(before, after)
    assert flow is not None
    motion = split_motion(flow, texture_mask(before))
    y, x = np.mgrid[0:72, 0:128]
    moved = np.tensordot(matrix, np.stack([x, y, np.ones_like(x)]), axes=1) - np.stack([x, y])
    assert motion.camera == pytest.approx(np.hypot(*moved).mean(), rel=0.1)
    assert motion.objects < 0.2 * motion.camera


def test_a_moving_object_before_a_blank_wall_is_no_camera() -> None:
    before, after = (np.full((72, 128), 90, np.uint8) for _ in range(2))
    square = texture(3, width=20, height=20, blur=1)[..., 0]
    before[20:40, 30:50], after[20:40, 34:54] = square, square
    flow = optical_flow(before, after)
    assert flow is not None
    motion = split_motion(flow, texture_mask(before))
    assert motion.camera == 0 and motion.objects > 0.5 * 4 * 20 * 20 / (72 * 128)
    assert optical_flow(before[:8, :8], after[:8, :8]) is None, "the image is too small for optical flow"


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    luma = texture(0)[..., 0]
    assert sharpness(luma) == pytest.approx(cv2.Laplacian(luma, cv2.CV_64F).var(), rel=1e-6)


def test_speech_that_ends_is_speech_until_then() -> None:
    sound = np.concatenate([voice(2), np.zeros(2 * 48_000)])[::3]
    is_spoken = is_speech((sound * 32767).astype(np.int16))
    assert RATE_HZ == 16_000 and is_spoken.mean() == pytest.approx(0.5, abs=0.1)
    assert len(is_speech(np.zeros(100, np.int16))) == 0


def test_a_chunk_that_cannot_be_decoded_fails_by_name(clips: Path) -> None:
    chunk = chunk_of(clips, "pan_000000000")
    broken = replace(chunk, mp4=chunk.mp4[:2000])
    with pytest.raises(SourceFailure) as caught:
        score_chunk(broken, cut_threshold=27.0)
    assert caught.value.code == FailureCode.DECODE_ERRORS
