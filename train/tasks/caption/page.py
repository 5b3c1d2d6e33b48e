"""Writes the page: one file that loads nothing, whatever captions and names contain."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manifests.publish import published
from train.evaluation.pages import evenly_within
from train.tasks.caption.settings import METRIC_LABELS

_FOLDER = Path(__file__).parent
_PAGES = Path(__file__).parents[2] / "report"  # the style that all pages have


@dataclass(frozen=True)
class CaptionedVideo:
    """One row of the page.

    Attributes:
        name: of the video, or of the clip where a video has several.
        detail: what else is said of it, such as its times.
        scores: metric to value, with keys of METRIC_LABELS.
        picture: a data URI, or nothing.
    """

    name: str
    detail: str
    caption: str
    references: Sequence[str]
    scores: Mapping[str, float]
    picture: str = ""


def write_captions_page(
    path: Path,
    videos: Iterable[CaptionedVideo],
    *,
    title: str,
    means: Mapping[str, float],
    absent: Mapping[str, str],
    protocol: Mapping[str, str],
) -> None:
    """Publishes the page.

    Args:
        videos: in the order in which the page shows them first; drawn one at a time.
        means: metric to value of all of them.
        absent: metric to the reason why it is not there.
        protocol: what the numbers are of, by name.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader([_FOLDER, _PAGES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"score": score_text}
    script = (_FOLDER / "captions.js").read_text(encoding="utf-8")
    # The browser runs this script and no other: not one that came with a caption.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = environment.get_template("captions.html.j2").stream(
        title=title,
        videos=videos,
        means={name: means[name] for name in METRIC_LABELS if name in means},
        labels=METRIC_LABELS,
        absent=absent,
        protocol=protocol,
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )
    with published(path) as temporary:
        parts.dump(str(temporary), encoding="utf-8", errors="replace")


def score_text(value: float) -> str:
    """A score as people print it: times 100."""
    return f"{100 * value:.1f}"


# A few frames of a clip as one small picture.


_NUM_COLUMNS = 2
_MAX_FRAMES = 4
_HEIGHT_PX = 96
_QUALITY = 78
_GAP_PX = 2
_GAP_GREY = 128


def sheet_uri(frames: Sequence[NDArray[np.uint8]]) -> str:
    """Four of the frames in two rows, from left to right, as the data URI of a JPEG of some 8 kB.

    Args:
        frames: uint8 RGB [H, W, 3], all of one size; fewer than four stand in one row. Without any, the URI is empty.
    """
    import cv2

    chosen = evenly_within(list(frames), at_most=_MAX_FRAMES)
    if not chosen:
        return ""
    height, width = chosen[0].shape[:2]
    size = (max(1, round(width * _HEIGHT_PX / height)), _HEIGHT_PX)
    gap = ((0, _GAP_PX), (0, _GAP_PX), (0, 0))
    small = [
        np.pad(cv2.resize(frame, size, interpolation=cv2.INTER_AREA), gap, constant_values=_GAP_GREY)
        for frame in chosen
    ]
    columns = _NUM_COLUMNS if len(small) == _MAX_FRAMES else len(small)
    rows = [np.hstack(small[place : place + columns]) for place in range(0, len(small), columns)]
    sheet = np.vstack(rows)[:-_GAP_PX, :-_GAP_PX]
    # OpenCV writes blue first.
    _, jpeg = cv2.imencode(".jpg", sheet[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    return "data:image/jpeg;base64," + base64.b64encode(jpeg.tobytes()).decode()
