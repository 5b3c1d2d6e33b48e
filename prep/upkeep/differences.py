"""`prep diff`: what differs between two variants of a column: recipe, samples, bytes, and the values of some arrays."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.prep.core.column import recipe_differences
from clipmill.prep.core.column_arrays import ColumnArrays
from clipmill.prep.core.report import Report
from clipmill.prep.registry import columns
from clipmill.shards.columns import COLUMNS
from clipmill.shards.dataset import variant_dir
from clipmill.shards.reader import Variant

_NUM_COMPARED = 16  # arrays, spread evenly over those that both variants have


def variants_report(data_dir: Path, first: str, second: str) -> Report:
    """Return the report on two variants, each named as in prep status.

    Raises:
        UserError: there is no such variant, or they are of different columns.
    """
    column, other_column = (_column_of(data_dir, name) for name in (first, second))
    if column != other_column:
        raise UserError(
            f"{first} is of the column {column}, and {second} of {other_column}", hint="give two of the same column"
        )
    one, other = (Variant.open(data_dir, column=column, variant=name) for name in (first, second))
    differences = recipe_differences(one.recipe, other.recipe)
    keys = [_keys(variant) for variant in (one, other)]
    num_common = len(pc.unique(keys[0].filter(pc.is_in(keys[0], value_set=keys[1]))))
    sizes = [sum(files.tar_bytes for files in _files(variant)) for variant in (one, other)]
    values: dict[str, Any] = {
        "column": column,
        "changed_settings": differences,
        "num_samples": [len(each) for each in keys],
        "num_common": num_common,
        "num_bytes": sizes,
        "values": None,
    }
    lines = [f"column    {column}", *(f"setting   {difference}" for difference in differences)]
    lines += [
        f"samples   {count_noun(len(keys[0]), 'sample')} and {len(keys[1]):,}, of which both have {num_common:,}",
        f"size      {size_text(sizes[0])} and {size_text(sizes[1])}",
    ]
    if column in COLUMNS and any(".npy" in member for member in COLUMNS[column].members):
        arrays = [ColumnArrays.open(data_dir, column, variant=name) for name in (first, second)]
        compared = _compared(arrays[0], arrays[1])
        values["values"] = vars(compared)
        lines.append(f"values    {compared}")
    return Report("\n".join(lines), values)


@dataclass(frozen=True)
class Compared:
    """Arrays of two variants that were compared.

    Attributes:
        num_arrays: number of arrays that were compared.
        num_other_shape: of further ones, those of different shapes.
        largest, mean: absolute difference of two values; None if no array was compared.
        deviation: standard deviation of the values of the first variant.
    """

    num_arrays: int
    num_other_shape: int
    largest: float | None
    mean: float | None
    deviation: float | None

    def __str__(self) -> str:
        other = f"; {count_noun(self.num_other_shape, 'array')} of other shapes" if self.num_other_shape else ""
        if self.largest is None:
            return f"no array of the same sample and shape to compare{other}"
        return (
            f"{count_noun(self.num_arrays, 'array')} compared: largest difference {self.largest:.3g}, mean"
            f" {self.mean:.3g}, at a standard deviation of {self.deviation:.3g}{other}"
        )


def _compared(first: ColumnArrays, second: ColumnArrays) -> Compared:
    rows = [_rows_by_sample(arrays) for arrays in (first, second)]
    common = [name for name in rows[0] if name in rows[1]]
    chosen = [common[number * len(common) // _NUM_COMPARED] for number in range(_NUM_COMPARED)] if common else []
    num_other_shape = num_values = 0
    largest = total = squares = sum_of_values = 0.0
    names = [*dict.fromkeys(chosen)]
    for name in names:
        one, other = (
            _numbers(arrays, arrays.array(own[name])) for arrays, own in zip((first, second), rows, strict=True)
        )
        if one.shape != other.shape:
            num_other_shape += 1
            continue
        difference = np.abs(one - other)
        largest = max(largest, float(difference.max(initial=0)))
        total += float(difference.sum())
        squares, sum_of_values = squares + float((one**2).sum()), sum_of_values + float(one.sum())
        num_values += one.size
    if not num_values:
        return Compared(0, num_other_shape, None, None, None)
    variance = max(0.0, squares / num_values - (sum_of_values / num_values) ** 2)
    return Compared(len(names) - num_other_shape, num_other_shape, largest, total / num_values, variance**0.5)


def _numbers(arrays: ColumnArrays, array: NDArray[Any]) -> NDArray[np.float64]:
    if array.dtype == np.uint16:  # the bits of bfloat16
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float64)


def _rows_by_sample(arrays: ColumnArrays) -> dict[tuple[Any, ...], int]:
    """Rows of the merged table by video and, for a column of chunks, start."""
    entries, codes = arrays.rows.dictionary_codes("video_id")
    ids = pc.take(entries, pa.array(codes)).to_pylist()
    names = ("start_ms",) if "start_ms" in arrays.rows.table.column_names else ()
    others = (arrays.rows.table[name].to_pylist() for name in names)
    return {sample: row for row, sample in enumerate(zip(ids, *others, strict=True))}


def _column_of(data_dir: Path, variant: str) -> str:
    for column in columns():
        if variant_dir(data_dir, column.name, variant).is_dir():
            return column.name
    raise UserError(f"{data_dir} has no variant {variant}", hint="see prep status and the folders of the columns")


def _keys(variant: Variant) -> pa.ChunkedArray:
    return pa.chunked_array([shard.index["key"].combine_chunks() for shard in variant.shards()], pa.string())


def _files(variant: Variant) -> list[Any]:
    return [commit.files for commit in variant.commits.values() if commit.files is not None]
