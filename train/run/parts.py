"""Divide work into parts that several processes share, and continue the work after an interruption.

The division depends neither on the number of processes nor on the finished parts, and each part is published as a
separate file. A plan next to the parts describes the work, so that the work is never continued with different settings
or data.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import publish_checked_json, read_checked_json, remove_temporaries
from clipmill.train.config.training import flatten

if TYPE_CHECKING:
    from clipmill.train.distributed.world import World
    from clipmill.train.run.tracking import Progress

PLAN = "plan.json"

_PARTS_PER_GROUP = 8  # number of parts that a rank makes between two synchronisations
_MAX_FULL = 60  # maximum length of a value that is shown in full, in characters; a hash is longer
_MAX_SHOWN, _LEAD = 32, 8  # length of the excerpt of a longer value, and number of characters before the difference


class PartFile(Protocol):
    """Part of the work: rows from `begin` to `end`, published as one file."""

    @property
    def begin(self) -> int:
        """First row of the part."""
        ...

    @property
    def end(self) -> int:
        """Row after the last row of the part."""
        ...

    def path(self, folder: Path, /) -> Path:
        """Return the path of the part's file in the folder of the work. The file exists once the part is finished."""


P = TypeVar("P", bound=PartFile)


def begin_parts(parts: Path, plan: Mapping[str, Any], *, require_same: Callable[[Mapping[str, Any]], None]) -> None:
    """Publish the plan of new work, or prepare to continue interrupted work. The caller must hold the folder's lock.

    Args:
        parts: Folder of the plan.
        plan: Description of the requested work.
        require_same: Function that raises a UserError if the existing plan describes different work.
    """
    path = parts / PLAN
    if path.is_file():
        try:
            old_plan = read_checked_json(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}", hint="use another --out") from error
        require_same(old_plan)
        remove_temporaries(parts)
    parts.mkdir(parents=True, exist_ok=True)
    publish_checked_json(path, dict(plan))


def differences(
    old_plan: Mapping[str, Any], new_plan: Mapping[str, Any], *, ignored: frozenset[str] = frozenset()
) -> str:
    """Describe how the plan of the requested work differs from an existing plan; return "" if it does not differ.

    Args:
        ignored: Names of entries, such as `weights.source`, that may differ.
    """
    old_entries, new_entries = flatten(dict(old_plan)), flatten(dict(new_plan))
    names = [name for name in new_entries if name not in ignored and old_entries.get(name) != new_entries[name]]
    return "; ".join(
        "{} was {} and is {}".format(name, *_shorten(old_entries.get(name), new_entries[name])) for name in names
    )


def _shorten(*values: object) -> list[str]:
    """Format values as text. If a value is long, use an excerpt of each around the first difference."""
    texts = [str(value) for value in values]
    if max(map(len, texts)) <= _MAX_FULL:
        return texts
    difference_start = next((index for index, pair in enumerate(zip_longest(*texts)) if len(set(pair)) > 1), 0)
    start = max(0, difference_start - _LEAD)
    end = start + _MAX_SHOWN
    return [f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}" for text in texts]


def missing_parts(parts: Sequence[P], out: Path, *, world: "World", progress: "Progress") -> list[P]:
    """Return the unfinished parts. Only rank 0 looks for the files, so that all ranks get the same parts."""
    missing_indices = world.first(lambda: [index for index, part in enumerate(parts) if not part.path(out).is_file()])
    if len(missing_indices) < len(parts):
        progress.say(f"resumed: {len(parts) - len(missing_indices)} of {count_noun(len(parts), 'part')} finished")
    return [parts[index] for index in missing_indices]


def share_parts(parts: Sequence[P], make: Callable[[P], int], *, world: "World", progress: "Progress") -> None:
    """Make every `world.size`-th part on this rank, and show the progress of all ranks.

    Args:
        make: Function that makes and publishes a part, and returns the number of clips that failed.
    """
    rank_parts = parts[world.rank :: world.size]
    num_failed = num_rows = num_parts = 0
    began_s = time.monotonic()

    def status_text(num_clips: int) -> str:
        rate = f"{num_rows * world.size / (time.monotonic() - began_s):,.1f} rows/s" if num_rows else ""
        return "  ".join(filter(None, (rate, f"{count_noun(num_clips, 'clip')} failed" if num_clips else "")))

    def make_group(group: Sequence[P]) -> int:
        nonlocal num_rows, num_parts
        num_failed_in_group = 0
        for part in group:
            num_failed_in_group += make(part)
            num_rows, num_parts = num_rows + part.end - part.begin, num_parts + 1
            # Assume that every rank has made the same number of parts, until the next synchronisation.
            progress.show(min(num_parts * world.size, len(parts)), status_text(num_failed + num_failed_in_group))
        return num_failed_in_group

    progress.begin(0, len(parts))
    # Fast ranks wait for slow ranks after every group of parts, because a collective times out after half an hour.
    for start in range(0, -(-len(parts) // world.size), _PARTS_PER_GROUP):
        group = rank_parts[start : start + _PARTS_PER_GROUP]
        num_failed += sum(world.gather_objects(world.each(partial(make_group, group))))
        if world.size > 1:
            progress.show(min((start + _PARTS_PER_GROUP) * world.size, len(parts)), status_text(num_failed))
    progress.close()
