"""What all pages are made with: templates, pictures as data URIs, samples and frames spread evenly.

A page is one file that loads nothing, and text from outside never becomes markup. The sections that tasks add to a
run's page are templates too.
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import counted, visible
from clipmill.train.evaluation.tables import Table, baseline_text, marked, percent

if TYPE_CHECKING:
    import av
    import numpy as np
    from jinja2 import Environment, Template
    from numpy.typing import NDArray

    from clipmill.train.spec import EvaluationSpec

CLASSES_SECTION = Path(__file__).with_name("classes.html.j2")  # of a page, for results with `by_class`


def table_of(evaluation: "EvaluationSpec", result: dict[str, Any]) -> Table:
    """The table of a result; title and rows of one that is incomplete say so."""
    table = evaluation.table(result)
    if not (incomplete := result.get("incomplete", "")):
        return table
    rows = tuple(replace(row, label=marked(row.label)) for row in table.rows)
    return replace(table, title=marked(table.title), rows=rows, protocol={"incomplete": incomplete, **table.protocol})


One = TypeVar("One")
_TITLE, _TITLE_WITHIN = re.compile("<title>([^<]*) · clipmill</title>"), 4096  # in the head of every page


class PicturedSamples(Protocol):
    """Samples of a split as pages show them."""

    def text(self, sample: int) -> str:
        """The caption."""
        ...

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        ...

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the clip in its video, in seconds."""
        ...

    def pictures(self, sample: int, *, num_frames: int) -> "list[NDArray[np.uint8]]":
        """Frames of the clip, uint8 RGB [H, W, 3]; an empty list if it cannot be decoded."""
        ...


def page_title(path: Path) -> str | None:
    """The title of a page of clipmill; None if the file is not one. OSError if it cannot be read."""
    with path.open("rb") as file:
        found = _TITLE.search(file.read(_TITLE_WITHIN).decode(errors="replace"))
    return None if found is None else html.unescape(found[1])


def require_page_path(path: Path, *, flag: str) -> None:
    """Raise a UserError if there is no folder for a page, or a file that is not a page of clipmill in its place."""
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} ({flag})", hint=f"make it first, or use another {flag}")
    if path.exists() and not (path.is_file() and page_title(path) is not None):
        raise UserError(f"{path} exists and is not a page of clipmill", hint=f"use another {flag}")


def load_template(path: Path) -> "Template":
    """A jinja2 template, which may include the style sheet here. It escapes values, and shows hidden characters."""
    return _environment(path.parent).get_template(path.name)


@cache
def _environment(folder: Path) -> "Environment":
    """The templates of a folder, each of which is compiled once per process."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from clipmill.train.evaluation.by_class import class_view

    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        finalize=lambda value: Markup(visible(value)) if isinstance(value, Markup) else visible(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # `markup`: charts, scripts and rendered sections, which clipmill made itself.
    environment.filters |= {
        "percent": percent,
        "counted": counted,
        "markup": Markup,
        "baseline": baseline_text,
        "class_view": class_view,
        "times_100": lambda value: f"{100 * value:.1f}",
    }
    return environment


def evenly_spaced(items: Sequence[One], *, at_most: int) -> list[One]:
    """Evenly spaced items, the first and the last included."""
    import numpy as np

    return [items[index] for index in np.unique(np.linspace(0, len(items) - 1, at_most).round().astype(int))]


def evenly_within(items: Sequence[One], *, at_most: int) -> list[One]:
    """The items in the middles of equal parts of the sequence."""
    count = min(len(items), at_most)
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]


def jpeg_uri(frame: "NDArray[np.uint8]") -> str:
    """A picture (uint8 RGB [H, W, 3]) as a data URI."""
    import av
    import numpy as np

    picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24").reformat(format="yuvj420p")
    return _uri(picture, codec="mjpeg", kind="jpeg", options={"qscale": "3"})


def png_uri(frame: "NDArray[np.uint8]") -> str:
    """A picture (uint8 RGB [H, W, 3]) as a lossless data URI."""
    import av
    import numpy as np

    picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
    return _uri(picture, codec="png", kind="png", options={})


def _uri(picture: "av.VideoFrame", *, codec: Literal["mjpeg", "png"], kind: str, options: Mapping[str, str]) -> str:
    import av

    encoder = av.CodecContext.create(codec, "w")
    encoder.height, encoder.width = picture.height, picture.width
    encoder.pix_fmt = picture.format.name
    encoder.time_base = 1  # type: ignore[assignment]
    encoder.options = dict(options)
    packets = [*encoder.encode(picture), *encoder.encode(None)]
    return f"data:image/{kind};base64," + base64.b64encode(b"".join(bytes(packet) for packet in packets)).decode()
