"""Results of `train eval` as tables with their protocols, for the console and the results page."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipmill.manifests.formatting import percent
from clipmill.train.run.result_names import other_data

CLASSES_SECTION = Path(__file__).with_name("classes.html.j2")  # of a page, for results with `by_class`
_LABEL_WIDTH, _CELL_WIDTH = 14, 13
_INCOMPLETE = "(incomplete)"
FEW_CLASSES = 5  # with so few classes, top-5 accuracy is always 100 %


# What the metrics of a table are compared with: random rankings, or the model that always predicts the classes that are
# most frequent among the evaluated clips.
CHANCE, MAJORITY = "chance", "majority baseline"


@dataclass(frozen=True)
class Cell:
    """A value as text, with that of the table's reference; also as fractions in [0, 1] if they are.

    Attributes:
        baseline: name and value of a trivial model, where the table has a column of it.
    """

    text: str
    reference: str = ""
    share: float | None = None
    reference_share: float | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a result.

    Attributes:
        detail: numbers of queries, items or classes.
        is_baseline: whether it is that of another, trivial model.
    """

    label: str
    detail: str
    cells: tuple[Cell, ...]
    is_baseline: bool = False


@dataclass(frozen=True)
class Table:
    """Metrics with their protocol, which is needed to compare them with others.

    Attributes:
        headline: the row that represents the table in overviews.
        reference: what its cells are compared with, `CHANCE` or `MAJORITY`.
        means_of: number and noun of what its metrics are means of, if not of clips.
        cautions: what limits its metrics, in few words.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    protocol: dict[str, str]
    headline: int = 0
    reference: str = CHANCE
    means_of: tuple[int, str] | None = None
    cautions: tuple[str, ...] = ()

    @property
    def baseline(self) -> Row | None:
        """The row of a trivial model; None without one."""
        return next((row for row in self.rows if row.is_baseline), None)

    @property
    def baseline_text(self) -> str:
        """What the first metric is compared with (the table's reference, or a trivial model; else its detail), and what
        limits it."""
        row = self.rows[self.headline]
        text = row.cells[0].baseline or row.detail
        if row.cells[0].reference:
            text = f"{self.reference} {row.cells[0].reference}"
        elif self.baseline is not None:
            text = f"{self.baseline.label} {self.baseline.cells[0].text}"
        return "; ".join([text, *self.cautions])


def table_of(make: Callable[[dict[str, Any]], Table], result: dict[str, Any]) -> Table:
    """The table that an evaluation makes of a result, with what limits its metrics: few clips, and look-alikes.

    Title and rows of one that is incomplete say so.
    """
    table = make(result)
    from clipmill.train.data.held_out import HeldOut

    held = HeldOut(**result["held_out"]) if "held_out" in result else None
    share = table.rows[table.headline].cells[0].share
    if held is not None and (cautions := held.cautions(share, of=table.means_of)):
        protocol = {"caution": "; ".join(cautions), **table.protocol}
        table = replace(table, protocol=protocol, cautions=tuple(held.cautions(of=table.means_of)))
    if not (incomplete := result.get("incomplete", "")):
        return table
    rows = tuple(replace(row, label=mark_title(row.label)) for row in table.rows)
    return replace(
        table, title=mark_title(table.title), rows=rows, protocol={"incomplete": incomplete, **table.protocol}
    )


def mark_title(title: str) -> str:
    """A title or label with the mark of a result in which samples are missing."""
    return title if _INCOMPLETE in title else f"{title} {_INCOMPLETE}"


def describe(table: Table) -> str:
    """The table as text, with the reference below each row, and the protocol below all rows."""
    reference = f"  {table.reference}"
    width = max(_LABEL_WIDTH, len(reference), *(len(row.label) for row in table.rows))
    lines = [_line("", table.columns, width=width)]
    for row in table.rows:
        lines.append(_line(row.label, [cell.text for cell in row.cells], width=width))
        if any(cell.reference for cell in row.cells):
            lines.append(_line(reference, [cell.reference for cell in row.cells], width=width))
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in table.protocol.items())])


def share_cell(value: float | None, reference: float | None = None) -> Cell:
    """A fraction in [0, 1] in percent, or a dash for None, with that of the table's reference."""
    return Cell(percent(value), "" if reference is None else percent(reference), value, reference)


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
        is_interpolated = not {"num_frames", "size_px"}.isdisjoint(overrides)
        interpolated = "; embeddings of time and place are interpolated" if is_interpolated else ""
        lines["overrides"] = f"{changed}, unlike in training{interpolated}"
    origin = result["weights"] if result["step"] is None else f"step {result['step']}, {result['weights']}"
    return lines | {"clip": result["clip"], "checkpoint": origin}


def _line(label: str, cells: tuple[str, ...] | list[str], *, width: int) -> str:
    return f"{label:{width}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)
