"""Tables of the results of `train eval`, with protocols and results by class, for the console and the results page.

Results by class show how many clips of each class are recognised and which classes are confused. They also show the
majority baseline, which always predicts the most frequent classes of the evaluated clips. No model that ignores the
clips has a higher top-1 accuracy.

Shape suffixes: N clips, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.formatting import percent
from clipmill.train.run.folder import other_data

if TYPE_CHECKING:
    import torch


CLASSES_SECTION = Path(__file__).with_name("classes.html.j2")  # section of a page for results with `by_class`
_LABEL_WIDTH, _CELL_WIDTH = 14, 13
_INCOMPLETE = "(incomplete)"
FEW_CLASSES = 5  # with this many classes or fewer, top-5 accuracy is always 100 %
# References for the metrics of a table: random rankings, or a model that always predicts the most frequent classes.
CHANCE, MAJORITY = "chance", "majority baseline"


@dataclass(frozen=True)
class Cell:
    """Cell of a table.

    Attributes:
        text: Value, as text.
        reference: Reference value, as text; '' without one.
        share: Value as a fraction in [0, 1]; None for other values.
        reference_share: Reference as a fraction in [0, 1]; None for other values.
        baseline: Name and value of a trivial model; '' if the table has no column for such a model.
    """

    text: str
    reference: str = ""
    share: float | None = None
    reference_share: float | None = None
    baseline: str = ""


@dataclass(frozen=True)
class Row:
    """Row of a table.

    Attributes:
        label: First column.
        detail: Numbers of queries, items or classes.
        cells: Other columns.
        is_baseline: True if the row shows a trivial model for comparison.
    """

    label: str
    detail: str
    cells: tuple[Cell, ...]
    is_baseline: bool = False


@dataclass(frozen=True)
class Table:
    """Metrics, with the protocol that makes them comparable.

    Attributes:
        title: Title.
        columns: Names of the columns.
        rows: Rows.
        protocol: Lines of the protocol, by name.
        headline: Index of the row that represents the table in overviews.
        reference: Reference of the cells, `CHANCE` or `MAJORITY`.
        averaged_items: Number and noun of the items over which the metrics are averaged; None for clips.
        cautions: Short descriptions of limitations of the metrics.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    protocol: dict[str, str]
    headline: int = 0
    reference: str = CHANCE
    averaged_items: tuple[int, str] | None = None
    cautions: tuple[str, ...] = ()

    @property
    def baseline(self) -> Row | None:
        """Row of the trivial model; None if the table has no such row."""
        return next((row for row in self.rows if row.is_baseline), None)

    @property
    def baseline_text(self) -> str:
        """Reference for the first metric (from the cell, a trivial model, or the row's detail), and limitations."""
        row = self.rows[self.headline]
        text = row.cells[0].baseline or row.detail
        if row.cells[0].reference:
            text = f"{self.reference} {row.cells[0].reference}"
        elif self.baseline is not None:
            text = f"{self.baseline.label} {self.baseline.cells[0].text}"
        return "; ".join([text, *self.cautions])


def table_of(make: Callable[[dict[str, Any]], Table], result: dict[str, Any]) -> Table:
    """Return the table of a result, with the limitations of its metrics: few clips, or similar training clips.

    The title and rows of an incomplete result are marked.
    """
    table = make(result)
    from clipmill.train.data.held_out import HeldOut

    held_out = HeldOut(**result["held_out"]) if "held_out" in result else None
    share = table.rows[table.headline].cells[0].share
    if held_out is not None and (cautions := held_out.cautions(share, items=table.averaged_items)):
        protocol = {"caution": "; ".join(cautions), **table.protocol}
        table = replace(table, protocol=protocol, cautions=tuple(held_out.cautions(items=table.averaged_items)))
    if not (incomplete := result.get("incomplete", "")):
        return table
    rows = tuple(replace(row, label=mark_title(row.label)) for row in table.rows)
    return replace(
        table, title=mark_title(table.title), rows=rows, protocol={"incomplete": incomplete, **table.protocol}
    )


def mark_title(title: str) -> str:
    """Mark a title or label of a result that lacks samples."""
    return title if _INCOMPLETE in title else f"{title} {_INCOMPLETE}"


def describe(table: Table) -> str:
    """Return the table as text, with the reference below each row, and the protocol below all rows."""
    reference = f"  {table.reference}"
    width = max(_LABEL_WIDTH, len(reference), *(len(row.label) for row in table.rows))
    lines = [_line("", table.columns, width=width)]
    for row in table.rows:
        lines.append(_line(row.label, [cell.text for cell in row.cells], width=width))
        if any(cell.reference for cell in row.cells):
            lines.append(_line(reference, [cell.reference for cell in row.cells], width=width))
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in table.protocol.items())])


def share_cell(value: float | None, reference: float | None = None) -> Cell:
    """Return the cell for a fraction in [0, 1], shown in percent (a dash for None), with its reference."""
    return Cell(percent(value), "" if reference is None else percent(reference), value, reference)


def protocol_of(result: dict[str, Any], sizes: str, **entries: str) -> dict[str, str]:
    """Return the lines that make a result comparable: data, protocol, `entries`, overrides, clips, checkpoint."""
    data = f"{result['data']}; {result['variant']}"
    if address := other_data(result):
        data += f"; of {address}"
        data += "" if result.get("is_part_of_own_data") else ", which is not the run's own data"
    elif "source" in result:  # the weights are not a run
        data += f"; of {result['shards']}"
    lines = {"data": data, "protocol": f"{sizes}; {result['protocol']}"}
    lines |= {name.replace("_", " "): text for name, text in entries.items() if text}
    if overrides := result.get("overrides"):
        changes = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in overrides.items())
        is_interpolated = not {"num_frames", "size_px"}.isdisjoint(overrides)
        note = "; temporal and positional embeddings are interpolated" if is_interpolated else ""
        lines["overrides"] = f"{changes}, unlike in training{note}"
    source = result["weights"] if result["step"] is None else f"step {result['step']}, {result['weights']}"
    return lines | {"clip": result["clip"], "checkpoint": source}


def _line(label: str, cells: tuple[str, ...] | list[str], *, width: int) -> str:
    return f"{label:{width}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)


_TOP = 5
_NUM_IN_MATRIX = 12
_NUM_PAIRS = 15


@dataclass(frozen=True)
class Predictions:
    """Predictions for clips. All tensors are [N], on one device.

    Attributes:
        label_N: Class of each clip, int64.
        predicted_N: Predicted class of each clip, int64.
        is_among_N: True if the class is among the first five predictions, bool.
    """

    label_N: torch.Tensor
    predicted_N: torch.Tensor
    is_among_N: torch.Tensor

    @staticmethod
    def of(scores_NK: torch.Tensor, label_N: torch.Tensor, *, rank_N: torch.Tensor) -> Predictions:
        """Derive predictions from class scores and the rank (1 is best) of each clip's class.

        If the class of a clip does not rank first, the best other class is the prediction, even if the scores are tied.
        """
        best_other_N = scores_NK.scatter(1, label_N[:, None], float("-inf")).argmax(dim=1)
        return Predictions(label_N, label_N.where(rank_N == 1, best_other_N), rank_N <= _TOP)

    @staticmethod
    def join(parts: Sequence[Predictions]) -> Predictions:
        """Concatenate one or more sets of predictions."""
        import torch

        names = ("label_N", "predicted_N", "is_among_N")
        return Predictions(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def by_class(self, names: Sequence[str], *, title: str) -> dict[str, Any]:
        """Count clips and confusions by class, for a result file.

        Args:
            names: Names of all classes.
            title: Description of the classes.

        Returns:
            `names`: classes of the clips, and predicted classes. `num`, `num_first` and `num_among`: for each class,
            the number of clips, of recognised clips, and of clips whose class is among the first five predictions.
            `confused`: rows [class, predicted class, number of clips], with indices into `names`, most frequent first.
        """
        label_N, predicted_N = self.label_N.cpu().numpy(), self.predicted_N.cpu().numpy()
        classes = np.unique(np.concatenate([label_N, predicted_N]))
        label_N, predicted_N = np.searchsorted(classes, label_N), np.searchsorted(classes, predicted_N)
        is_right_N, is_among_N = label_N == predicted_N, self.is_among_N.cpu().numpy()

        def count_by_class(class_N: NDArray[np.int64]) -> list[int]:
            return [int(count) for count in np.bincount(class_N, minlength=len(classes))]

        pairs, pair_counts = np.unique(
            np.stack([label_N[~is_right_N], predicted_N[~is_right_N]]), axis=1, return_counts=True
        )
        order = np.argsort(-pair_counts, kind="stable")
        return {
            "title": title,
            "names": [names[index] for index in classes.tolist()],
            "num": count_by_class(label_N),
            "num_first": count_by_class(label_N[is_right_N]),
            "num_among": count_by_class(label_N[is_among_N]),
            "confused": np.concatenate([pairs, pair_counts[None]])[:, order].T.tolist(),
        }


BASELINE_KEYS = ("top1", "top5", "mean_class")


def majority_baseline(by_class: Mapping[str, Any]) -> dict[str, float]:
    """Return the top-1, top-5 and mean class accuracy of always predicting the most frequent classes of the clips."""
    counts = sorted(by_class["num"], reverse=True)
    total, num_seen = sum(counts), sum(count > 0 for count in counts)
    return dict(zip(BASELINE_KEYS, (counts[0] / total, sum(counts[:_TOP]) / total, 1 / num_seen), strict=True))


def class_view(by_class: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for the page section about `Predictions.by_class`, with the most frequent classes first.

    Returns:
        `rows`: all classes with clips. `matrix`: the confusion matrix of the 12 most frequent classes; each row has its
        cells, and the number of clips that are mistaken for classes outside of the matrix. `pairs`: the most confused
        classes; empty if the matrix contains all classes.
    """
    names, num = by_class["names"], by_class["num"]
    confusions: dict[int, list[tuple[int, int]]] = {}
    for label, predicted_class, count in by_class["confused"]:
        confusions.setdefault(label, []).append((predicted_class, count))
    order = sorted((index for index in range(len(names)) if num[index]), key=lambda index: -num[index])
    rows = [
        {
            "name": names[index],
            "num": num[index],
            "first": by_class["num_first"][index] / num[index],
            "among": by_class["num_among"][index] / num[index],
            "taken_for": names[confusions[index][0][0]] if index in confusions else "",
            "num_taken": confusions[index][0][1] if index in confusions else 0,
        }
        for index in order
    ]
    matrix_classes = order[:_NUM_IN_MATRIX]
    matrix = []
    for index in matrix_classes:
        counts = {**dict(confusions.get(index, [])), index: by_class["num_first"][index]}
        row_counts = [counts.get(other, 0) for other in matrix_classes]
        cells = [
            {"count": count, "share": count / num[index], "is_own": column == index}
            for column, count in zip(matrix_classes, row_counts, strict=True)
        ]
        matrix.append({"name": names[index], "cells": cells, "others": num[index] - sum(row_counts)})
    pairs = [
        {"name": names[label], "taken_for": names[predicted_class], "count": count, "share": count / num[label]}
        for label, predicted_class, count in by_class["confused"][:_NUM_PAIRS]
    ]
    is_complete = len(matrix_classes) == len(order) and not any(row["others"] for row in matrix)
    return {
        "title": by_class["title"],
        "rows": rows,
        "has_among": len(names) > _TOP,
        "matrix": matrix,
        "has_others": not is_complete,
        "pairs": [] if is_complete else pairs,
        "num_shown": len(matrix_classes),
    }
