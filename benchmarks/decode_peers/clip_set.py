"""The clips that every way delivers: the same frames of the same chunks, cropped by the same rectangles.

A folder holds `clips.json` and, for each set of chunks, `<set>/000.mp4, 001.mp4, ...`: every set shows the same
pictures, encoded in another way, so that one list of clips serves all. Sets that `prep chunk` made also have their
data folder, `<set>.data`. Needs NumPy only, because the other ways' Python has no clipmill.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

SIZE_PX = 224
FPS, CHUNK_FRAMES = 30, 450
SHORT, MAE = "4 frames of 1-4 s", "16 frames, stride 4"
MIN_AREA = 0.5  # of RandomResizedCrop
_CLIPS_FILE = "clips.json"


@dataclass(frozen=True)
class Clip:
    """One clip: frames of a chunk, ascending, and what is cut out of all of them, in pixels.

    Attributes:
        seed: of the generator that drew the rectangle.
    """

    chunk: int
    frames: tuple[int, ...]
    seed: int
    left: int
    top: int
    width: int
    height: int


Clips = dict[str, list[Clip]]  # by kind


def draw_span(random: np.random.Generator) -> tuple[float, float]:
    """Begin and length in seconds of 1 to 4 s anywhere in a chunk."""
    length_s = random.uniform(1, 4)
    return random.uniform(0, CHUNK_FRAMES / FPS - length_s), length_s


def frames_of_short(random: np.random.Generator) -> tuple[int, ...]:
    """Four frames, one from each quarter of a span."""
    begin_s, length_s = draw_span(random)
    return tuple(int((begin_s + (number + random.uniform()) * length_s / 4) * FPS) for number in range(4))


def frames_of_mae(random: np.random.Generator) -> tuple[int, ...]:
    """Sixteen frames, four apart, anywhere in a chunk."""
    begin = int(random.integers(CHUNK_FRAMES - 16 * 4))
    return tuple(range(begin, begin + 16 * 4, 4))


def write_clips(folder: Path, clips: Clips) -> None:
    """Writes clips.json."""
    content = {kind: [asdict(clip) for clip in of_kind] for kind, of_kind in clips.items()}
    (folder / _CLIPS_FILE).write_text(json.dumps(content))


def read_clips(folder: Path) -> Clips:
    """Reads clips.json."""
    content = json.loads((folder / _CLIPS_FILE).read_text())
    return {
        kind: [Clip(**{**clip, "frames": tuple(clip["frames"])}) for clip in of_kind]
        for kind, of_kind in content.items()
    }


def chunk_path(folder: Path, name: str, chunk: int) -> Path:
    """The file of one chunk of a set."""
    return folder / name / f"{chunk:03d}.mp4"


def data_folder(folder: Path, name: str) -> Path:
    """Where `prep chunk` made a set."""
    return folder / f"{name}.data"


def crop_rgb(frames: Sequence[np.ndarray], clip: Clip) -> np.ndarray:
    """Cuts and resizes RGB frames [H, W, 3]: uint8 [T, SIZE_PX, SIZE_PX, 3]."""
    import cv2

    cropped = np.empty((len(frames), SIZE_PX, SIZE_PX, 3), np.uint8)
    rows, columns = slice(clip.top, clip.top + clip.height), slice(clip.left, clip.left + clip.width)
    for frame, target in zip(frames, cropped, strict=True):
        cv2.resize(frame[rows, columns], (SIZE_PX, SIZE_PX), dst=target, interpolation=cv2.INTER_LINEAR)
    return cropped
