"""Settings of PySceneDetect's shot detectors. PySceneDetect and OpenCV are imported only when they are needed."""

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from scenedetect.detector import SceneDetector

DetectorName = Literal["adaptive", "content"]
DEFAULT_DETECTOR: DetectorName = "adaptive"  # as in PySceneDetect
DEFAULT_THRESHOLD: dict[DetectorName, float] = {"adaptive": 3.0, "content": 27.0}
PICTURE_PX = 256  # limit of the longer side of compared pictures, as in PySceneDetect; smaller pictures stay unscaled


@dataclass(frozen=True, kw_only=True)
class Detector:
    """Settings of a shot detector.

    Attributes:
        name: Name of the detector.
        threshold: Change between frames above which the detector reports a cut, in the detector's own unit.
        min_scene_frames: Minimum number of frames between two cuts.
        fps: Frame rate of the compared frames, equal to the frame rate of the chunks.
    """

    name: DetectorName
    threshold: float
    min_scene_frames: int
    fps: Fraction

    def key(self, version: str) -> str:
        """Return a string that identifies the cuts that this detector finds with PySceneDetect `version`."""
        return (
            f"scenedetect {version} {self.name} threshold={self.threshold!r} min_scene_len={self.min_scene_frames}"
            f" fps={self.fps} px={PICTURE_PX}"
        )

    def open(self) -> "SceneDetector":
        """Return a new PySceneDetect detector."""
        from scenedetect.detectors import AdaptiveDetector, ContentDetector

        if self.name == "adaptive":
            return AdaptiveDetector(adaptive_threshold=self.threshold, min_scene_len=self.min_scene_frames)
        return ContentDetector(threshold=self.threshold, min_scene_len=self.min_scene_frames)


def scenedetect_version() -> str:
    """Return the version of PySceneDetect."""
    import scenedetect

    return str(scenedetect.__version__)


def version_mismatch(version: str) -> str | None:
    """Return a message if the installed PySceneDetect is not the `version` that a plan requires; otherwise None."""
    if (installed_version := scenedetect_version()) == version:
        return None
    return f"PySceneDetect is {installed_version}, but the plan requires {version}"
