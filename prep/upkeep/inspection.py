"""Reports: a variant or a sample for `prep inspect`, and the differences between two variants for `prep diff`."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.keys import split_key
from clipmill.manifests.store import read_videos
from clipmill.prep.core.column import ColumnSpec, recipe_differences
from clipmill.prep.core.column_arrays import ColumnArrays
from clipmill.prep.core.plan import is_readable, problems_of
from clipmill.prep.core.work import Report, work_of
from clipmill.prep.registry import columns
from clipmill.shards.columns import COLUMNS
from clipmill.shards.dataset import variant_dir
from clipmill.shards.reader import CommittedShard, Variant

_MAX_SHARD_ROWS = 30
_MAX_VALUE_CHARS = 80
_NUM_NEAREST = 4


def variant_report(variant: Variant, *, column: ColumnSpec) -> Report:
    """Return the report on a variant: its settings, totals and shards."""
    problems, recipe = problems_of(variant), variant.recipe
    num_samples = f"num_{column.sample}s"
    rows: list[dict[str, Any]] = []
    for shard_id, commit in variant.commits.items():
        files = commit.files
        rows.append(
            {
                "shard_id": shard_id,
                "split": commit.split,
                num_samples: files.num_samples if files else 0,
                "tar": files.tar if files else None,
                "tar_bytes": files.tar_bytes if files else 0,
                "num_failures": len(commit.failures),
                "state": problems.get(shard_id, ("committed", ""))[0],
            }
        )
    rows += [
        {"shard_id": damaged.shard_id, "split": "?", num_samples: 0, "tar": None, "tar_bytes": 0}
        | {"num_failures": 0, "state": "corrupt"}
        for damaged in variant.damaged
    ]
    num_chunks, num_bytes = (sum(row[name] for row in rows) for name in (num_samples, "tar_bytes"))
    num_shards = sum(row["tar"] is not None for row in rows)
    lines = [
        f"variant   {variant.directory.name}",
        f"settings  {column.settings_line(recipe)}",
        f"total     {count_noun(num_chunks, column.sample)} in {count_noun(num_shards, 'shard')}, "
        f"{size_text(num_bytes)}",
        "",
        f" shard  split {column.sample + 's':>8}      size  failed  state",
    ]
    lines += [
        f"{row['shard_id']:06d}  {row['split']:<6}{row[num_samples]:>8}{size_text(row['tar_bytes']):>10}"
        f"{row['num_failures']:>8}  {row['state']}"
        for row in rows[:_MAX_SHARD_ROWS]
    ]
    if len(rows) > _MAX_SHARD_ROWS:
        lines.append(f"... and {count_noun(len(rows) - _MAX_SHARD_ROWS, 'more shard')}")
    values = {
        "variant": variant.directory.name,
        "recipe": recipe,
        num_samples: num_chunks,
        "tar_bytes": num_bytes,
        "shards": rows,
    }
    return Report("\n".join(lines), values)


def sample_report(variant: Variant, key: str, *, column: ColumnSpec, data_dir: Path) -> Report:
    """Return the report on a sample: the column's own report if it defines one, otherwise the fields of the index row.

    Args:
        key: Key or other name of the sample (see `find_sample`).

    Raises:
        UserError: No sample or several samples match, or the sample cannot be read.
    """
    shard, row = find_sample(variant, key, column=column, data_dir=data_dir)
    if (report := work_of(column).sample_report) is not None:
        return report(shard, row, data_dir)
    members = {
        extension: dict(zip(("offset", "size"), shard.member_range(row, extension), strict=True))
        for extension in shard.extensions
    }
    names = [name for name in shard.index.column_names if not any(name.startswith(f"{known}_") for known in members)]
    fields = {name: shard.index[name][row].as_py() for name in names}
    fields |= work_of(column).sample_facts(data_dir, str(fields["key"]))
    lines = [f"tar       {shard.tar_path} ({shard.split})"]
    lines += [
        f"  .{name:<12} bytes {member['offset']} to {member['offset'] + member['size']}"
        for name, member in members.items()
    ]
    for name, value in fields.items():
        text = str(_json_value(value))
        lines.append(f"{name:<20}{text if len(text) <= _MAX_VALUE_CHARS else f'{text[:_MAX_VALUE_CHARS]}...'}")
    values = {
        "variant": variant.directory.name,
        "shard_id": shard.shard_id,
        "tar": str(shard.tar_path),
        "members": members,
        **{name: _json_value(value) for name, value in fields.items()},
    }
    return Report("\n".join(lines), values)


def _json_value(value: Any) -> Any:
    """Convert an index value to a JSON value, with bytes as hexadecimal digits."""
    if isinstance(value, list):
        return [_json_value(entry) for entry in value]
    return value.hex() if isinstance(value, bytes) else value


def find_sample(variant: Variant, name: str, *, column: ColumnSpec, data_dir: Path) -> tuple[CommittedShard, int]:
    """Return the shard and row of a sample.

    Args:
        name: Key of the sample, beginning of the key, or file name of the video. If the name is not a complete key,
            exactly one sample must match.

    Raises:
        UserError: No sample or several samples match. The hint lists the matching or the nearest keys.
    """
    shards = [shard for shard in variant.shards() if is_readable(shard)]
    for shard in shards:
        row = pc.index(shard.index["key"], name).as_py()
        if row >= 0:
            return shard, row
    num_unread = len(variant.shards()) - len(shards) + len(variant.damaged)
    # The name is not a key, so compare it with the beginnings of keys and with the file names of videos, ignoring case.
    video_ids = pa.array([], pa.string())
    with suppress(UserError):  # without a manifest, the file names are unknown
        videos = read_videos(data_dir)
        paths = pc.utf8_lower(videos["path"])
        without_extension = pc.replace_substring_regex(paths, pattern=r"\.[^./]+$", replacement="")
        pattern = f"/{name.lower().removeprefix('/')}"
        is_match = pc.or_(*(pc.ends_with(names, pattern=pattern) for names in (paths, without_extension)))
        video_ids = videos["video_id"].filter(is_match).combine_chunks()
    matching_rows: list[tuple[CommittedShard, int]] = []
    for shard in shards:
        matches = pc.starts_with(shard.index["key"], pattern=name, ignore_case=True)
        if "video_id" in shard.index.column_names:
            matches = pc.or_(matches, pc.is_in(shard.index["video_id"], value_set=video_ids))
        matching_rows += [(shard, row) for row in pc.indices_nonzero(matches).to_pylist()]
    if len(matching_rows) == 1 and not num_unread:
        return matching_rows[0]
    if num_unread:
        hint = f"{count_noun(num_unread, 'shard')} cannot be read; run `prep verify`"
    elif matching_rows:
        keys = sorted(shard.index["key"][row].as_py() for shard, row in matching_rows)
        suffix = f", and {len(keys) - _NUM_NEAREST:,} more" if len(keys) > _NUM_NEAREST else ""
        hint = f"matching keys: {', '.join(keys[:_NUM_NEAREST])}{suffix}"
    else:
        hint = _nearest_keys(shards, name)
    raise UserError(f'variant {variant.directory.name} has no {column.sample} with the key "{name}"', hint=hint)


def _nearest_keys(shards: list[CommittedShard], key: str) -> str:
    try:
        video_id, start_ms = split_key(key)
    except ValueError:
        video_id, start_ms = key, 0
    starts: list[tuple[int, str]] = []
    for shard in shards:
        if "start_ms" not in shard.index.column_names:
            continue
        rows = shard.index.select(["video_id", "key", "start_ms"]).filter(pc.equal(shard.index["video_id"], video_id))
        starts += zip(rows["start_ms"].to_pylist(), rows["key"].to_pylist(), strict=True)
    if starts:
        nearest_starts = sorted(starts, key=lambda entry: abs(entry[0] - start_ms))[:_NUM_NEAREST]
        return f"use a key of this video, such as {', '.join(name for _, name in sorted(nearest_starts))}"
    first = [shard.index["key"][0].as_py() for shard in shards[:_NUM_NEAREST]]
    return f"use a key such as {', '.join(first)}" if first else "run `prep status`; there are no readable shards"


_NUM_COMPARED = 16  # maximum number of arrays to compare, spread evenly over the common samples


def variants_report(data_dir: Path, first: str, second: str) -> Report:
    """Return the report on the differences between two variants.

    Args:
        first: Name of the first variant, as shown by `prep status`.
        second: Name of the second variant.

    Raises:
        UserError: A variant does not exist, or the variants belong to different columns.
    """
    column, other_column = (_column_of(data_dir, name) for name in (first, second))
    if column != other_column:
        raise UserError(
            f"{first} is a variant of {column}, but {second} is a variant of {other_column}",
            hint="use two variants of the same column",
        )
    variants = [Variant.open(data_dir, column=column, variant=name) for name in (first, second)]
    differences = recipe_differences(variants[0].recipe, variants[1].recipe)
    keys = [
        pa.chunked_array([shard.index["key"].combine_chunks() for shard in variant.shards()], pa.string())
        for variant in variants
    ]
    num_common = len(pc.unique(keys[0].filter(pc.is_in(keys[0], value_set=keys[1]))))
    sizes = [
        sum(commit.files.tar_bytes for commit in variant.commits.values() if commit.files is not None)
        for variant in variants
    ]
    values: dict[str, Any] = {
        "column": column,
        "changed_settings": differences,
        "num_samples": [len(variant_keys) for variant_keys in keys],
        "num_common": num_common,
        "num_bytes": sizes,
        "values": None,
    }
    lines = [f"column    {column}", *(f"setting   {difference}" for difference in differences)]
    lines += [
        f"samples   {count_noun(len(keys[0]), 'sample')} and {len(keys[1]):,}; both have {num_common:,}",
        f"size      {size_text(sizes[0])} and {size_text(sizes[1])}",
    ]
    # Values can be compared only in columns that store arrays.
    if column in COLUMNS and any(".npy" in member for member in COLUMNS[column].members):
        arrays = [ColumnArrays.open(data_dir, column, variant=name) for name in (first, second)]
        comparison = _compare_arrays(arrays[0], arrays[1])
        values["values"] = vars(comparison)
        lines.append(f"values    {comparison}")
    return Report("\n".join(lines), values)


@dataclass(frozen=True)
class Comparison:
    """Comparison of the arrays of two variants.

    Attributes:
        num_arrays: Number of compared arrays.
        num_other_shape: Number of arrays that were not compared because their shapes differ.
        largest: Largest absolute difference between two values; None if no array was compared.
        mean: Mean absolute difference between two values; None if no array was compared.
        deviation: Standard deviation of the values in the first variant; None if no array was compared.
    """

    num_arrays: int
    num_other_shape: int
    largest: float | None
    mean: float | None
    deviation: float | None

    def __str__(self) -> str:
        suffix = f"; {count_noun(self.num_other_shape, 'array')} of different shapes" if self.num_other_shape else ""
        if self.largest is None:
            return f"no arrays to compare: no sample has arrays of the same shape in both variants{suffix}"
        return (
            f"{count_noun(self.num_arrays, 'array')} compared: largest difference {self.largest:.3g}, mean"
            f" {self.mean:.3g}; standard deviation of the values {self.deviation:.3g}{suffix}"
        )


def _compare_arrays(first: ColumnArrays, second: ColumnArrays) -> Comparison:
    # Rows of the merged tables, keyed by video ID and, in a column of chunks, start time.
    rows: list[dict[tuple[Any, ...], int]] = []
    for arrays in (first, second):
        entries, codes = arrays.rows.dictionary_codes("video_id")
        ids = pc.take(entries, pa.array(codes)).to_pylist()
        names = ("start_ms",) if "start_ms" in arrays.rows.table.column_names else ()
        starts = (arrays.rows.table[name].to_pylist() for name in names)
        rows.append({sample: row for row, sample in enumerate(zip(ids, *starts, strict=True))})
    common = [sample for sample in rows[0] if sample in rows[1]]
    selection = [common[index * len(common) // _NUM_COMPARED] for index in range(_NUM_COMPARED)] if common else []
    num_other_shape = num_values = 0
    largest = total = sum_of_squares = sum_of_values = 0.0
    samples = [*dict.fromkeys(selection)]
    for sample in samples:
        pair = []
        for arrays, variant_rows in zip((first, second), rows, strict=True):
            array: NDArray[Any] = arrays.array(variant_rows[sample])
            if array.dtype == np.uint16:  # bits of bfloat16 values
                array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
            pair.append(array.astype(np.float64))
        values, other_values = pair
        if values.shape != other_values.shape:
            num_other_shape += 1
            continue
        difference = np.abs(values - other_values)
        largest = max(largest, float(difference.max(initial=0)))
        total += float(difference.sum())
        sum_of_squares += float((values**2).sum())
        sum_of_values += float(values.sum())
        num_values += values.size
    if not num_values:
        return Comparison(0, num_other_shape, None, None, None)
    variance = max(0.0, sum_of_squares / num_values - (sum_of_values / num_values) ** 2)
    return Comparison(len(samples) - num_other_shape, num_other_shape, largest, total / num_values, variance**0.5)


def _column_of(data_dir: Path, variant: str) -> str:
    for column in columns():
        if variant_dir(data_dir, column.name, variant).is_dir():
            return column.name
    raise UserError(f"{data_dir} has no variant {variant}", hint="run `prep status` to see the variants")
