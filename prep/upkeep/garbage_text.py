"""What `prep gc` says to people and to scripts."""

import os
from itertools import groupby
from pathlib import Path
from typing import Any

from prep.upkeep.garbage import Garbage, Item, Removed
from prep.upkeep.status_text import size_text


def garbage_text(garbage: Garbage, removed: Removed | None, *, data_dir: Path) -> str:
    """What goes, with sizes, a variant as one line; what is left and why. `removed` is None in a dry run."""
    verb = "would go" if removed is None else "removed"
    lines = []
    for variant, items in groupby(garbage.items, key=lambda item: item.variant):
        if variant is None:
            lines += [
                f"{verb:<10}{_name(item.path, data_dir)} ({size_text(item.size_bytes)}): {item.reason}"
                for item in items
            ]
        else:
            listed = list(items)
            lines.append(f"{verb:<10}{variant} ({len(listed)} files, {_total(listed)}): {listed[0].reason}")
    lines += [f"{'left':<10}{_name(path, data_dir)}: not a file of the format" for path in garbage.unknown]
    for column, why in garbage.kept_because.items():
        lines.append(f"{'kept':<10}all variants and shards of {column}: {why}")
    if removed is None:
        lines.append(f"{_total(garbage.items)} would be freed")
    else:
        lines.append(f"{size_text(removed.num_bytes)} freed" if removed.num_files else "nothing to remove")
    return "\n".join(lines)


def garbage_values(garbage: Garbage, removed: Removed | None) -> dict[str, Any]:
    """The same for scripts."""
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
        "unknown": [os.fspath(path) for path in garbage.unknown],
        "kept_because": garbage.kept_because,
        "num_bytes": sum(item.size_bytes for item in garbage.items) if removed is None else removed.num_bytes,
        "failed": [] if removed is None else [{"path": os.fspath(path), "why": why} for path, why in removed.failed],
    }


def _total(items: list[Item]) -> str:
    return size_text(sum(item.size_bytes for item in items))


def _name(path: Path, data_dir: Path) -> str:
    return str(path.relative_to(data_dir))
