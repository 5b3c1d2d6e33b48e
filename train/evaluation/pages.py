"""What all pages are made with: templates, pictures as data URIs, samples and frames spread evenly.

A page is one file that loads nothing, and text from outside never becomes markup. The sections that tasks add to a
run's page are templates too.
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from clipmill.manifests.errors import UserError
from clipmill.manifests.quoting import visible
from clipmill.train.run.folder import other_data

if TYPE_CHECKING:
    import av
    import numpy as np
    from jinja2 import Environment, Template
    from numpy.typing import NDArray

    from clipmill.train.spec import EvaluationSpec

# Results of `train eval` as tables with their protocols, for the console and the results page.


_LABEL_WIDTH, _CELL_WIDTH = 14, 13
_INCOMPLETE = "(incomplete)"
CLASSES_SECTION = Path(__file__).with_name("classes.html.j2")  # of a page, for results with `by_class`
FEW_CLASSES = 5  # with so few classes, top-5 accuracy is always 100 %


@dataclass(frozen=True)
class Cell:
    """A value as text, with chance level; also as fractions in [0, 1] if they are.

    Attributes:
        baseline: name and value of a trivial model, where the table has a column of it.
    """

    text: str
    chance: str = ""
    share: float | None = None
    chance_share: float | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a result; `detail` has numbers of queries, items or classes."""

    label: str
    detail: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Metrics with their protocol: everything that is needed to compare them with others."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    protocol: dict[str, str]
    headline: int = 0  # the row that represents the table in overviews
    baseline: int | None = None  # the row of a trivial model


def baseline_text(table: Table) -> str:
    """What the first metric of a table is compared with: its chance level, or a trivial model; else its detail."""
    row = table.rows[table.headline]
    if row.cells[0].chance:
        return f"chance {row.cells[0].chance}"
    if table.baseline is not None:
        other = table.rows[table.baseline]
        return f"{other.label} {other.cells[0].text}"
    return row.cells[0].baseline or row.detail


def marked(title: str) -> str:
    """A title or label with the mark of a result in which samples are missing."""
    return title if _INCOMPLETE in title else f"{title} {_INCOMPLETE}"


def table_of(evaluation: "EvaluationSpec", result: dict[str, Any]) -> Table:
    """The table of a result; title and rows of one that is incomplete say so."""
    table = evaluation.table(result)
    if not (incomplete := result.get("incomplete", "")):
        return table
    rows = tuple(replace(row, label=marked(row.label)) for row in table.rows)
    return replace(table, title=marked(table.title), rows=rows, protocol={"incomplete": incomplete, **table.protocol})


def describe(table: Table) -> str:
    """The table as text, with chance levels below each row, and the protocol below all rows."""
    width = max(_LABEL_WIDTH, *(len(row.label) for row in table.rows))
    lines = [_line("", table.columns, width=width)]
    for row in table.rows:
        lines.append(_line(row.label, [cell.text for cell in row.cells], width=width))
        if any(cell.chance for cell in row.cells):
            lines.append(_line("  chance", [cell.chance for cell in row.cells], width=width))
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in table.protocol.items())])


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 clip`, `2 clips`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def percent(share: float | None) -> str:
    """A fraction in percent; a dash for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def share_cell(value: float | None, chance: float | None = None) -> Cell:
    """A fraction in [0, 1] in percent, or a dash for None, with its chance level."""
    return Cell(percent(value), "" if chance is None else percent(chance), value, chance)


def protocol_of(result: dict[str, Any], sizes: str, **more: str) -> dict[str, str]:
    """Data, protocol, clips and checkpoint of a result, which are needed to compare it with others."""
    data = f"{result['data']}; {result['variant']}"
    if address := other_data(result):
        data += f"; of {address}"
        data += "" if result.get("is_part_of_own_data") else ", which is not the run's own data"
    elif "source" in result:  # of weights that are not a run
        data += f"; of {result['shards']}"
    lines = {"data": data, "protocol": f"{sizes}; {result['protocol']}"}
    lines |= {name.replace("_", " "): text for name, text in more.items() if text}
    if overrides := result.get("overrides"):
        changed = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in overrides.items())
        lines["overrides"] = f"{changed}, unlike in training; embeddings of time and place are interpolated"
    origin = result["weights"] if result["step"] is None else f"step {result['step']}, {result['weights']}"
    return lines | {"clip": result["clip"], "checkpoint": origin}


def _line(label: str, cells: tuple[str, ...] | list[str], *, width: int) -> str:
    return f"{label:{width}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)


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
