"""Text and JSON output of `prep verify` and `prep gc`."""

import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import FOLDER_IN_PLACE, UserError
from clipmill.manifests.formatting import count_noun, on_one_line, size_text
from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.core.selection import stored_request
from clipmill.prep.upkeep.bucket_garbage import BucketGarbage
from clipmill.prep.upkeep.garbage import Garbage, Item, Removed
from clipmill.prep.upkeep.records import RecordFinding
from clipmill.prep.upkeep.verify import Verified
from clipmill.shards.commits import commit_path
from clipmill.shards.reader import Variant


def verified_text(found: Verified, *, column: ColumnSpec, max_findings: int) -> str:
    """Return the findings, one per line, and a summary of what was checked."""
    listed = [*found.findings, *found.deep_findings, *found.inaccessible]
    lines = [
        f"shard {finding.shard_id:06d}  {finding.code}  {finding.key or '-'}  "
        f"{finding.message.removeprefix(f'{finding.key}: ')}"
        for finding in listed[:max_findings]
    ]
    if len(listed) > max_findings:
        lines.append(f"... and {len(listed) - max_findings:,} more; use --json for the full list")
    total = f"{count_noun(found.num_samples, column.sample)} in {count_noun(found.num_shards, 'shard')}"
    deep = f", {count_noun(found.num_deep, column.checked_noun)}" if found.num_deep else ""
    state = "damaged" if found.num_damaged else "not read completely" if found.inaccessible else "OK"
    lines.append(f"{column.name} {found.variant}: {total}, {size_text(found.num_bytes)} read{deep}: {state}")
    if not found.num_shards and not found.num_problems:
        lines[-1] += "; no shard is made yet, and prep status shows what is to be made"
    return "\n".join(lines)


def records_text(records: list[RecordFinding]) -> list[str]:
    """Return one line per missing or damaged record."""
    return [
        f"record  {record.message}" if record.path in record.message else f"record  {record.path}: {record.message}"
        for record in records
    ]


def repairs_text(records: list[RecordFinding]) -> list[str]:
    """Return the commands that repair the damaged records, without duplicates."""
    if not records:
        return []
    commands = dict.fromkeys(record.repair for record in records)
    repair = repair_text("; ".join(commands), (record.message for record in records))
    return [f"{count_noun(len(records), 'missing or damaged record')}; {repair}"]


def repair_text(command: str, messages: Iterable[str]) -> str:
    """Return how to repair what `messages` describe: no command replaces a folder that is in place of a file."""
    has_folder = any(FOLDER_IN_PLACE in message for message in messages)
    first = "remove or move away the folders that are in place of files, then " if has_folder else ""
    return f"to repair, {first}run: {command}"


def failure_text(found: Verified, variant: Variant, *, column: ColumnSpec, data_dir: Path) -> str:
    """Return how much is damaged and how to repair it, and how much the bucket does not give."""
    num_shards = len({finding.shard_id for finding in (*found.findings, *found.deep_findings)})
    name, parts = variant.directory.name, []
    if found.num_damaged:
        parts.append(f"{count_noun(found.num_damaged, 'problem')} in {count_noun(num_shards, 'shard')} of {name}")
    if found.findings:
        try:
            command = column.command_line(stored_request(variant), data_dir=data_dir)
        except UserError:
            command = f"prep {column.command} with the settings of the variant"
        parts.append(repair_text(command, (finding.message for finding in found.findings)))
    # A run does not notice the damage of these shards: their commits have to be removed by hand.
    by_hand = sorted({*found.unseen, *(finding.shard_id for finding in found.deep_findings)})
    if by_hand:
        paths = ", ".join(str(commit_path(variant.directory, shard_id)) for shard_id in by_hand[:5])
        more = f" and {len(by_hand) - 5} more" if len(by_hand) > 5 else ""
        parts.append(f"to remake shards whose damage only verify detects, first remove their commits: {paths}{more}")
    if found.inaccessible:
        shards = count_noun(len(found.inaccessible), "shard")
        parts.append(f"{shards} of {name} cannot be accessed, which is no sign of damage: verify again later")
    return "; ".join(parts)


def garbage_text(garbage: Garbage, in_bucket: BucketGarbage, removed: Removed | None, *, data_dir: Path) -> str:
    """Return what is removed, with sizes (one line per variant), and what is kept, with reasons.

    `removed` is None in a dry run.
    """
    verb = "to remove" if removed is None else "removed"
    lines = []
    for variant, items in groupby(garbage.items, key=lambda item: item.variant):
        if variant is None:
            lines += [
                f"{verb:<11}{_name(item.path, data_dir)} ({size_text(item.size_bytes)}): {item.reason}"
                for item in items
            ]
        else:
            listed = list(items)
            files = count_noun(len(listed), "file")
            lines.append(f"{verb:<11}{variant} ({files}, {_total(listed)}): {listed[0].reason}")
    lines += [
        f"{verb:<11}{upload.key} (begun {upload.begun or 'at an unknown time'}): upload of a killed command"
        for upload in in_bucket.uploads
    ]
    left = [*(_name(path, data_dir) for path in garbage.unknown), *in_bucket.foreign]
    lines += [f"{'left':<11}{on_one_line(name)}: not part of the format" for name in left]
    if in_bucket.unknown_because is not None:
        lines.append(f"{'kept':<11}unfinished uploads, which cannot be listed: {in_bucket.unknown_because}")
    for what, why in garbage.kept_because.items():
        lines.append(f"{'kept':<11}{what if '/' in what else f'all variants and shards of {what}'}: {why}")
    if not (in_bucket.uploads or (garbage.items if removed is None else removed.num_files)):
        lines.append("nothing to remove")
    elif removed is None:
        lines.append(f"{_total(garbage.items)} would be freed")
    else:
        lines.append(f"{size_text(removed.num_bytes)} freed")
    return "\n".join(lines)


def garbage_values(garbage: Garbage, in_bucket: BucketGarbage, removed: Removed | None) -> dict[str, Any]:
    """Return the content of `garbage_text` as JSON values."""
    return {
        "dry_run": removed is None,
        "items": [
            {
                "path": os.fspath(item.path),
                "size_bytes": item.size_bytes,
                "reason": item.reason,
                "variant": item.variant,
            }
            for item in garbage.items
        ],
        "uploads": [upload.key for upload in in_bucket.uploads],
        "unknown": [*map(os.fspath, garbage.unknown), *in_bucket.foreign],
        "kept_because": garbage.kept_because,
        "num_bytes": sum(item.size_bytes for item in garbage.items) if removed is None else removed.num_bytes,
        "failed": [] if removed is None else [{"path": os.fspath(path), "why": why} for path, why in removed.failed],
    }


def _total(items: list[Item]) -> str:
    return size_text(sum(item.size_bytes for item in items))


def _name(path: Path, data_dir: Path) -> str:
    return str(path.relative_to(data_dir))
