"""The clips that every variant reads: the same frames of the same chunks, with the same crop rectangles.

A folder contains `clips.json` and, for each set of chunks, `<set>/000.mp4, 001.mp4, ...`. Every set has the same frames
in a different encoding, so that one list of clips applies to all sets. A set that `prep chunk` encoded also has a data
folder, `<set>.data`. This module needs only NumPy, because clipmill is not installed in the environment of `make
peers`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

SIZE_PX = 224
FPS, CHUNK_FRAMES = 30, 450
SHORT, MAE = "4 frames of 1-4 s", "16 frames, stride 4"
MIN_AREA = 0.5  # minimum area of RandomResizedCrop
_CLIPS_FILE = "clips.json"


@dataclass(frozen=True)
class Clip:
    """Clip: ascending frame indices in a chunk, and the crop rectangle in pixels.

    Attributes:
        seed: Seed of the generator that drew the rectangle.
    """

    chunk: int
    frames: tuple[int, ...]
    seed: int
    left: int
    top: int
    width: int
    height: int


Clips = dict[str, list[Clip]]  # clips by kind


def draw_span(random: np.random.Generator) -> tuple[float, float]:
    """Draw a span of 1 to 4 s in a chunk: start and length in seconds."""
    length_s = random.uniform(1, 4)
    return random.uniform(0, CHUNK_FRAMES / FPS - length_s), length_s


def frames_of_short(random: np.random.Generator) -> tuple[int, ...]:
    """Draw four frames, one from each quarter of a span."""
    begin_s, length_s = draw_span(random)
    return tuple(int((begin_s + (number + random.uniform()) * length_s / 4) * FPS) for number in range(4))


def frames_of_mae(random: np.random.Generator) -> tuple[int, ...]:
    """Draw sixteen frames of a chunk with a stride of four."""
    begin = int(random.integers(CHUNK_FRAMES - 16 * 4))
    return tuple(range(begin, begin + 16 * 4, 4))


def write_clips(folder: Path, clips: Clips) -> None:
    """Write clips.json."""
    content = {kind: [asdict(clip) for clip in of_kind] for kind, of_kind in clips.items()}
    (folder / _CLIPS_FILE).write_text(json.dumps(content))


def read_clips(folder: Path) -> Clips:
    """Read clips.json."""
    content = json.loads((folder / _CLIPS_FILE).read_text())
    return {
        kind: [Clip(**{**clip, "frames": tuple(clip["frames"])}) for clip in of_kind]
        for kind, of_kind in content.items()
    }


def chunk_path(folder: Path, name: str, chunk: int) -> Path:
    """Return the path of a chunk in a set."""
    return folder / name / f"{chunk:03d}.mp4"


def data_folder(folder: Path, name: str) -> Path:
    """Return the data folder of a set that `prep chunk` encoded."""
    return folder / f"{name}.data"


def crop_rgb(frames: Sequence[np.ndarray], clip: Clip) -> np.ndarray:
    """Crop and resize RGB frames [H, W, 3] to uint8 [T, SIZE_PX, SIZE_PX, 3]."""
    import cv2

    cropped = np.empty((len(frames), SIZE_PX, SIZE_PX, 3), np.uint8)
    rows, columns = slice(clip.top, clip.top + clip.height), slice(clip.left, clip.left + clip.width)
    for frame, target in zip(frames, cropped, strict=True):
        cv2.resize(frame[rows, columns], (SIZE_PX, SIZE_PX), dst=target, interpolation=cv2.INTER_LINEAR)
    return cropped
