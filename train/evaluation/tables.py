"""Results of `train eval` as tables with their protocols, for the console and the results page."""

from dataclasses import dataclass
from typing import Any

from train.run.folder import other_data

_LABEL_WIDTH, _CELL_WIDTH = 14, 13
FEW_CLASSES = 5  # with so few classes, top-5 accuracy is always 100 %


@dataclass(frozen=True)
class Cell:
    """A value as text, with chance level; also as fractions in [0, 1] if they are."""

    text: str
    chance: str = ""
    share: float | None = None
    chance_share: float | None = None


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


def describe(table: Table) -> str:
    """The table as text, with chance levels below each row, and the protocol below all rows."""
    width = max(_LABEL_WIDTH, *(len(row.label) for row in table.rows))
    lines = [_line("", table.columns, width=width)]
    for row in table.rows:
        lines.append(_line(row.label, [cell.text for cell in row.cells], width=width))
        if any(cell.chance for cell in row.cells):
            lines.append(_line("  chance", [cell.chance for cell in row.cells], width=width))
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in table.protocol.items())])


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
        data += f"; of {address}, which is not the run's own data"
    lines = {"data": data, "protocol": f"{sizes}; {result['protocol']}"}
    lines |= {name.replace("_", " "): text for name, text in more.items() if text}
    return lines | {"clip": result["clip"], "checkpoint": f"step {result['step']}, {result['weights']}"}


def _line(label: str, cells: tuple[str, ...] | list[str], *, width: int) -> str:
    return f"{label:{width}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)
