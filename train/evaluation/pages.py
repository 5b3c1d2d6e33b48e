"""What the pages of runs have in common: tables of results, samples and frames spread evenly.

The sections that tasks add to a run's page are templates (clipmill.shards.pages.templates).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from clipmill.train.evaluation.tables import Table, marked

if TYPE_CHECKING:
    import numpy as np
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


def evenly_spaced(items: Sequence[One], *, at_most: int) -> list[One]:
    """Evenly spaced items, the first and the last included."""
    import numpy as np

    return [items[index] for index in np.unique(np.linspace(0, len(items) - 1, at_most).round().astype(int))]


def evenly_within(items: Sequence[One], *, at_most: int) -> list[One]:
    """The items in the middles of equal parts of the sequence."""
    count = min(len(items), at_most)
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]
