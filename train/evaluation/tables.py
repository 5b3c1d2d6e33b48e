"""Results of `train eval` as tables with their protocols, for the console and the results page."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipmill.manifests.units import percent
from clipmill.train.run.result_names import other_data

CLASSES_SECTION = Path(__file__).with_name("classes.html.j2")  # of a page, for results with `by_class`
_LABEL_WIDTH, _CELL_WIDTH = 14, 13
_INCOMPLETE = "(incomplete)"
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
    """Metrics with their protocol, which is needed to compare them with others."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    protocol: dict[str, str]
    headline: int = 0  # the row that represents the table in overviews
    baseline: int | None = None  # the row of a trivial model

    @property
    def baseline_text(self) -> str:
        """What the first metric is compared with: its chance level, or a trivial model; else its detail."""
        row = self.rows[self.headline]
        if row.cells[0].chance:
            return f"chance {row.cells[0].chance}"
        if self.baseline is not None:
            other = self.rows[self.baseline]
            return f"{other.label} {other.cells[0].text}"
        return row.cells[0].baseline or row.detail


def table_of(make: Callable[[dict[str, Any]], Table], result: dict[str, Any]) -> Table:
    """The table that an evaluation makes of a result; title and rows of one that is incomplete say so."""
    table = make(result)
    if not (incomplete := result.get("incomplete", "")):
        return table
    rows = tuple(replace(row, label=marked(row.label)) for row in table.rows)
    return replace(table, title=marked(table.title), rows=rows, protocol={"incomplete": incomplete, **table.protocol})


def marked(title: str) -> str:
    """A title or label with the mark of a result in which samples are missing."""
    return title if _INCOMPLETE in title else f"{title} {_INCOMPLETE}"


def describe(table: Table) -> str:
    """The table as text, with chance levels below each row, and the protocol below all rows."""
    width = max(_LABEL_WIDTH, *(len(row.label) for row in table.rows))
    lines = [_line("", table.columns, width=width)]
    for row in table.rows:
        lines.append(_line(row.label, [cell.text for cell in row.cells], width=width))
        if any(cell.chance for cell in row.cells):
            lines.append(_line("  chance", [cell.chance for cell in row.cells], width=width))
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in table.protocol.items())])


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
