"""How much disk a data folder takes before and after a run, with all variants that are kept side by side."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.formatting import count_noun, range_text, size_text
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.shards.dataset import list_variants, variant_dir


@dataclass(frozen=True)
class DiskUse:
    """Disk use of a plan, in bytes.

    Attributes:
        data_bytes: size of the whole data folder now.
        variant_bytes: size of each variant of the planned column, by name.
        has_variant: whether the planned variant is one of them.
        added_bytes: lowest and highest size of what the run writes, copies included; None if unknown.
        freed_bytes: what `prep gc` frees once the planned variant is complete: the column's other variants, and the
            shards of this one that are replaced or removed.
        free_bytes: free space of the disk; None in a bucket.
    """

    data_bytes: int
    variant_bytes: dict[str, int]
    has_variant: bool
    added_bytes: tuple[float, float] | None
    freed_bytes: int
    free_bytes: int | None

    @property
    def fits(self) -> bool:
        """False if the disk may be too small."""
        return self.free_bytes is None or self.added_bytes is None or self.added_bytes[1] <= self.free_bytes

    def values(self) -> dict[str, Any]:
        """Return the disk use as JSON values."""
        added = None if self.added_bytes is None else list(self.added_bytes)
        return {
            "data_bytes": self.data_bytes,
            "variant_bytes": self.variant_bytes,
            "added_bytes_range": added,
            "freed_by_gc_bytes": self.freed_bytes,
            "free_bytes": self.free_bytes,
            "fits": self.fits,
        }

    def lines(self) -> list[str]:
        """Return the disk use in words."""
        variants = f" in {count_noun(len(self.variant_bytes), 'variant')}" if self.variant_bytes else ""
        column_bytes = sum(self.variant_bytes.values())
        now = f"{size_text(column_bytes)}{variants} now" if variants else "nothing of this column yet"
        parts = [now]
        if self.added_bytes is None:
            parts.append("how much is added is unknown")
        elif self.added_bytes[1]:
            low, high = (size_text(round(one)) for one in self.added_bytes)
            parts.append(f"{range_text(low, high) if self.added_bytes[0] else f'at most {high}'} to be added")
        if self.free_bytes is not None:
            parts.append(f"{size_text(self.free_bytes)} free")
        lines = [f"disk     {'; '.join(parts)} (whole data folder: {size_text(self.data_bytes)})"]
        if self.freed_bytes:
            num_others = len(self.variant_bytes) - self.has_variant
            what = f"{count_noun(num_others, 'other variant')}" if num_others else "earlier shards"
            kept = f"{what} {'is' if num_others == 1 else 'are'} kept beside it"
            lines.append(f"         {kept}; then `prep gc` frees {size_text(self.freed_bytes)}")
        if not self.fits:
            lines.append("warning  this may not fit on the disk: free some space, or give a folder on another disk")
        return lines


def disk_use(
    data_dir: Path,
    *,
    column: str,
    variant: str,
    added_bytes: tuple[float, float] | None,
    replaced_bytes: int = 0,
) -> DiskUse:
    """Measure the data folder.

    Args:
        variant: name of the planned variant.
        added_bytes: lowest and highest size of what the run writes, copies included; None if unknown.
        replaced_bytes: size of the shards that the run replaces or removes.
    """
    sizes = {name: folder_bytes(variant_dir(data_dir, column, name)) for name in list_variants(data_dir, column)}
    free_bytes = None
    if mirror_of(data_dir) is None:
        with suppress(OSError):
            free_bytes = shutil.disk_usage(data_dir).free
    return DiskUse(
        data_bytes=folder_bytes(data_dir),
        variant_bytes=sizes,
        has_variant=variant in sizes,
        added_bytes=added_bytes,
        freed_bytes=sum(size for name, size in sizes.items() if name != variant) + replaced_bytes,
        free_bytes=free_bytes,
    )


def folder_bytes(folder: Path) -> int:
    """Return the total size in bytes of all readable files in a folder and its subfolders."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    with suppress(OSError):  # removed since the folder was listed
                        total += entry.stat(follow_symlinks=False).st_size
    return total
