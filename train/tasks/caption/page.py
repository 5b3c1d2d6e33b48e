"""Writes the page: one file that loads nothing, whatever captions and names contain."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manifests.publish import published
from train.tasks.caption.metrics.scores import LABELS

_FOLDER = Path(__file__).parent
_PAGES = Path(__file__).parents[2]  # the style that all pages have


@dataclass(frozen=True)
class CaptionedVideo:
    """One row of the page.

    Attributes:
        name: of the video, or of the clip where a video has several.
        detail: what else is said of it, such as its times.
        scores: metric to value, with keys of LABELS.
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
        means={name: means[name] for name in LABELS if name in means},
        labels=LABELS,
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
