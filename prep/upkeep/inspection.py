"""The reports of `prep inspect`: a shard set as a table, or one sample in detail."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.keys import split_key
from clipmill.manifests.store import read_videos
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.plan import is_readable, problems_of
from clipmill.prep.core.report import Report
from clipmill.prep.core.work import work_of
from clipmill.shards.reader import CommittedShard, Variant

_MAX_SHARD_ROWS = 30
_MAX_VALUE_CHARS = 80
_NUM_NEAREST = 4


def set_report(variant: Variant, *, column: ColumnSpec) -> Report:
    """Return the report on a variant: its shards, totals and settings."""
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
    """Return the report on one sample, written by its column or, by default, from its index row.

    Raises:
        UserError: no readable shard contains the key, or the sample cannot be read.
    """
    shard, number = find_sample(variant, key, column=column, data_dir=data_dir)
    if (own_report := work_of(column).sample_report) is not None:
        return own_report(shard, number, data_dir)
    members = {
        extension: dict(zip(("offset", "size"), shard.member_range(number, extension), strict=True))
        for extension in shard.extensions
    }
    own = [name for name in shard.index.column_names if not any(name.startswith(f"{known}_") for known in members)]
    fields = {name: shard.index[name][number].as_py() for name in own}
    fields |= work_of(column).sample_facts(data_dir, str(fields["key"]))
    lines = [f"tar       {shard.tar_path} ({shard.split})"]
    lines += [
        f"  .{name:<12} bytes {member['offset']} to {member['offset'] + member['size']}"
        for name, member in members.items()
    ]
    for name, value in fields.items():
        text = str(_plain(value))
        lines.append(f"{name:<20}{text if len(text) <= _MAX_VALUE_CHARS else f'{text[:_MAX_VALUE_CHARS]}...'}")
    values = {
        "variant": variant.directory.name,
        "shard_id": shard.shard_id,
        "tar": str(shard.tar_path),
        "members": members,
        **{name: _plain(value) for name, value in fields.items()},
    }
    return Report("\n".join(lines), values)


def _plain(value: Any) -> Any:
    """Convert an index value to JSON: bytes become hexadecimal digits."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value.hex() if isinstance(value, bytes) else value


def find_sample(variant: Variant, name: str, *, column: ColumnSpec, data_dir: Path) -> tuple[CommittedShard, int]:
    """Return the shard and row of a sample.

    Args:
        name: its key; or the beginning of its key or the file name of its video, if no other sample matches.

    Raises:
        UserError: no sample matches, or several do; the hint lists them, or the nearest keys.
    """
    shards = [shard for shard in variant.shards() if is_readable(shard)]
    for shard in shards:
        row = pc.index(shard.index["key"], name).as_py()
        if row >= 0:
            return shard, row
    unread = len(variant.shards()) - len(shards) + len(variant.damaged)
    matching = _matching(shards, name, data_dir=data_dir)
    if len(matching) == 1 and not unread:
        return matching[0]
    if unread:
        hint = f"{count_noun(unread, 'shard')} cannot be read; run `prep verify`"
    elif matching:
        keys = sorted(shard.index["key"][row].as_py() for shard, row in matching)
        more = f", and {len(keys) - _NUM_NEAREST:,} more" if len(keys) > _NUM_NEAREST else ""
        hint = f"matching keys: {', '.join(keys[:_NUM_NEAREST])}{more}"
    else:
        hint = _nearest(shards, name)
    raise UserError(f'no {column.sample} "{name}" in variant {variant.directory.name}', hint=hint)


def _matching(shards: list[CommittedShard], name: str, *, data_dir: Path) -> list[tuple[CommittedShard, int]]:
    """Return the shards and rows of the samples whose key begins so or whose video has this file name, in any case."""
    video_ids = _videos_named(name, data_dir)
    found = []
    for shard in shards:
        matches = pc.starts_with(shard.index["key"], pattern=name, ignore_case=True)
        if "video_id" in shard.index.column_names:
            matches = pc.or_(matches, pc.is_in(shard.index["video_id"], value_set=video_ids))
        found += [(shard, row) for row in pc.indices_nonzero(matches).to_pylist()]
    return found


def _videos_named(name: str, data_dir: Path) -> pa.Array:
    """Return the IDs of the videos with a file name, with or without extension."""
    try:
        videos = read_videos(data_dir)
    except UserError:  # without a manifest, only keys are known
        return pa.array([], pa.string())
    paths = pc.utf8_lower(videos["path"])
    with_or_without = (paths, pc.replace_substring_regex(paths, pattern=r"\.[^./]+$", replacement=""))
    pattern = f"/{name.lower().removeprefix('/')}"
    is_named = pc.or_(*(pc.ends_with(path, pattern=pattern) for path in with_or_without))
    return videos["video_id"].filter(is_named).combine_chunks()


def _nearest(shards: list[CommittedShard], key: str) -> str:
    try:
        video_id, start_ms = split_key(key)
    except ValueError:
        video_id, start_ms = key, 0
    found: list[tuple[int, str]] = []
    for shard in shards:
        if "start_ms" not in shard.index.column_names:
            continue
        mine = shard.index.select(["video_id", "key", "start_ms"]).filter(pc.equal(shard.index["video_id"], video_id))
        found += zip(mine["start_ms"].to_pylist(), mine["key"].to_pylist(), strict=True)
    if found:
        nearest = sorted(found, key=lambda entry: abs(entry[0] - start_ms))[:_NUM_NEAREST]
        return f"nearest keys of this video: {', '.join(name for _, name in sorted(nearest))}"
    first = [shard.index["key"][0].as_py() for shard in shards[:_NUM_NEAREST]]
    return f"no video has this ID; keys look like {', '.join(first)}" if first else "there are no readable shards"
