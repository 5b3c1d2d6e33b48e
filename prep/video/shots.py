"""The shots of a plan's videos for `--cut shots`: what is known of them, and how the videos are cut with them."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.prep.core.table_file import as_array
from clipmill.prep.sources.shot_table import shot_rows
from clipmill.prep.video.cutting import Cutting, EvenCutting, shot_cutting
from clipmill.prep.video.settings import SPAN_CHUNKS, ChunkSettings, ResolvedRecipe
from clipmill.prep.video.spans import num_output_frames


@dataclass(frozen=True)
class VideoShots:
    """What is known of the shots of videos.

    Attributes:
        cuts: list<int32> [videos]: first frame of every shot but the first; null if they are unknown.
        failures: row of a video -> (failure code, message) of its last detection.
        undetected: rows of the videos whose shots have to be detected, ascending.
    """

    cuts: pa.ListArray
    failures: dict[int, tuple[str, str]]
    undetected: np.ndarray

    @property
    def is_known(self) -> np.ndarray:
        """Whether the shots of each video are known, bool [videos]."""
        return np.asarray(pc.is_valid(self.cuts))


def frames_of(recipe: ResolvedRecipe, probes: pa.Table) -> np.ndarray:
    """Return the number of output frames of each video, int64; 0 if it is unusable.

    Args:
        probes: probes of the videos (clipmill.prep.sources.table.PROBES).
    """
    ends_s = probes["end_s"]  # null if the video is unusable, as is its fingerprint
    num_frames = num_output_frames(np.asarray(pc.fill_null(ends_s, 0.0)), fps=recipe.settings.fps_exact)
    return np.where(np.asarray(pc.is_valid(ends_s)), num_frames, 0)


def shots_of(recipe: ResolvedRecipe, probes: pa.Table, *, shots: pa.Table, retry_failed: bool) -> VideoShots | None:
    """Look up the shots of videos; return None with `--cut even`.

    Args:
        probes: probes of the videos (clipmill.prep.sources.table.PROBES).
        shots: the stored shots (clipmill.prep.sources.shot_table.SHOTS).
        retry_failed: whether a failed detection is to be tried again.
    """
    if recipe.settings.cut == "even":
        return None
    fingerprints = as_array(probes["fingerprint"])
    rows = shot_rows(shots, key=detector_key(recipe), fingerprints=fingerprints, num_frames=frames_of(recipe, probes))
    found = shots.take(pa.array(rows, mask=rows < 0))
    has_failed = np.asarray(pc.is_valid(found["code"]))
    is_undetected = np.asarray(pc.is_valid(fingerprints)) & ((rows < 0) | (has_failed & retry_failed))
    failed = np.flatnonzero(has_failed & ~is_undetected)
    names = found.select(["code", "message"]).take(pa.array(failed)).to_pylist()
    return VideoShots(
        cuts=as_array(found["cuts"]),
        failures={row: (name["code"], name["message"]) for row, name in zip(failed.tolist(), names, strict=True)},
        undetected=np.flatnonzero(is_undetected),
    )


def detector_key(recipe: ResolvedRecipe) -> str:
    """Return the key of a recipe's detector in the stored shots."""
    assert recipe.scenedetect is not None, "the recipe has --cut shots"
    return recipe.settings.shot_detector.key(recipe.scenedetect)


def cutting_of(settings: ChunkSettings, num_frames: np.ndarray, shots: VideoShots | None) -> Cutting:
    """Return the chunks of all videos.

    Args:
        num_frames: number of frames of each video, int64; 0 if it is unusable.
        shots: the known shots of the videos; required by `--cut shots`.
    """
    if settings.cut == "even":
        return EvenCutting(num_frames, settings.chunk_frames, settings.tail, SPAN_CHUNKS)
    assert shots is not None, "the shots of the videos are required"
    return shot_cutting(
        shots.cuts.to_pylist(),
        num_frames,
        max_frames=settings.chunk_frames,
        min_frames=settings.min_frames,
        span_chunks=SPAN_CHUNKS,
    )
