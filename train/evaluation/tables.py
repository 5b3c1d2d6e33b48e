"""Results of `train eval` as tables with their protocols, for the console and the results page."""

from dataclasses import dataclass
from typing import Any

from train.run.folder import other_data

_LABEL_WIDTH, _CELL_WIDTH = 14, 13
FEW_CLASSES = 5  # top-5 of so many classes cannot be wrong


@dataclass(frozen=True)
class Cell:
    """A number as text, and what chance reaches; shares in [0, 1] where it is one."""

    text: str
    chance: str = ""
    share: float | None = None
    chance_share: float | None = None


@dataclass(frozen=True)
class Row:
    """One direction of a protocol; `detail` says how many were asked among how many."""

    label: str
    detail: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Numbers, and everything that must be known to compare them with others."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    protocol: dict[str, str]
    headline: int = 0  # the row that stands for all of them


def describe(table: Table) -> str:
    """The table as text, chance under each row and the protocol under all."""
    width = max(_LABEL_WIDTH, *(len(row.label) for row in table.rows))
    lines = [_line("", table.columns, width=width)]
    for row in table.rows:
        lines.append(_line(row.label, [cell.text for cell in row.cells], width=width))
        if any(cell.chance for cell in row.cells):
            lines.append(_line("  by chance", [cell.chance for cell in row.cells], width=width))
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in table.protocol.items())])


def percent(share: float | None) -> str:
    """A share in percent, or a dash where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def share_cell(value: float | None, chance: float | None = None) -> Cell:
    """A share in [0, 1], or a dash for None, beside what chance reaches."""
    return Cell(percent(value), "" if chance is None else percent(chance), value, chance)


def protocol_of(result: dict[str, Any], sizes: str, **more: str) -> dict[str, str]:
    """What must be known to compare a result with others: data, protocol, clips, checkpoint."""
    data = f"{result['data']}; {result['variant']}"
    if address := other_data(result):
        data += f"; of {address}, which is not the run's own data"
    lines = {"data": data, "protocol": f"{sizes}; {result['protocol']}"}
    lines |= {name.replace("_", " "): text for name, text in more.items() if text}
    return lines | {"clip": result["clip"], "checkpoint": f"step {result['step']}, {result['weights']}"}


def _line(label: str, cells: tuple[str, ...] | list[str], *, width: int) -> str:
    return f"{label:{width}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)
