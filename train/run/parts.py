"""Work that is divided into parts: all processes share it, and it continues after an interruption.

The parts depend neither on the number of processes nor on what is finished, and each one is published as a file of its
own. A plan next to them states what the work is, so that it is never continued as other work.
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

_PARTS_TOGETHER = 8
_MAX_WHOLE = 60  # characters of a value that is shown in full; a hash is longer
_MAX_SHOWN, _BEFORE = 32, 8  # characters of a longer value, and of its part before the first that differs


class PartFile(Protocol):
    """A share of the work, the rows from `begin` to `end`, published as one file."""

    @property
    def begin(self) -> int:
        """Its first row."""
        ...

    @property
    def end(self) -> int:
        """The row after its last one."""
        ...

    def path(self, folder: Path, /) -> Path:
        """Return the part's file once it is finished, in a folder of the work."""


P = TypeVar("P", bound=PartFile)


def begin_parts(parts: Path, plan: Mapping[str, Any], *, require_same: Callable[[Mapping[str, Any]], None]) -> None:
    """Publish the plan of new work, or continue interrupted work, whose lock the caller holds.

    Args:
        parts: Folder of the plan.
        require_same: Function that raises a UserError if a plan is of other work.
    """
    path = parts / PLAN
    if path.is_file():
        try:
            old = read_checked_json(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}", hint="use another --out") from error
        require_same(old)
        remove_temporaries(parts)
    parts.mkdir(parents=True, exist_ok=True)
    publish_checked_json(path, dict(plan))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, free: frozenset[str] = frozenset()) -> str:
    """Return how requested work differs from other work, in words; empty if it is the same.

    Args:
        free: Names of entries, such as `weights.source`, that may differ.
    """
    was, now = flatten(dict(old)), flatten(dict(new))
    decisive = [name for name in now if name not in free and was.get(name) != now[name]]
    return "; ".join("{} was {} and is {}".format(name, *_value_texts(was.get(name), now[name])) for name in decisive)


def _value_texts(*values: object) -> list[str]:
    """Return the values in words; where one of them is long, the part from where they differ."""
    texts = [str(value) for value in values]
    if max(map(len, texts)) <= _MAX_WHOLE:
        return texts
    first = next((at for at, pair in enumerate(zip_longest(*texts)) if len(set(pair)) > 1), 0)
    begin = max(0, first - _BEFORE)
    end = begin + _MAX_SHOWN
    return [f"{'...' if begin else ''}{text[begin:end]}{'...' if len(text) > end else ''}" for text in texts]


def missing_parts(parts: Sequence[P], out: Path, *, world: "World", progress: "Progress") -> list[P]:
    """Return the parts that are not finished; the first rank looks for all."""
    missing = world.first(lambda: [number for number, part in enumerate(parts) if not part.path(out).is_file()])
    if len(missing) < len(parts):
        progress.say(f"resumed: {len(parts) - len(missing)} of {count_noun(len(parts), 'part')} finished")
    return [parts[number] for number in missing]


def share_parts(parts: Sequence[P], make: Callable[[P], int], *, world: "World", progress: "Progress") -> None:
    """Make this rank's share of the parts, every `world.size`-th of them.

    Args:
        make: Makes and publishes a part; returns the number of its clips that failed.
    """
    share = parts[world.rank :: world.size]
    num_failed = num_rows = num_parts = 0
    began_s = time.monotonic()

    def status_text(failed: int) -> str:
        rate = f"{num_rows * world.size / (time.monotonic() - began_s):,.1f} rows/s" if num_rows else ""
        return "  ".join(filter(None, (rate, f"{count_noun(failed, 'clip')} failed" if failed else "")))

    def make_some(some: Sequence[P]) -> int:
        nonlocal num_rows, num_parts
        failed = 0
        for part in some:
            failed += make(part)
            num_rows, num_parts = num_rows + part.end - part.begin, num_parts + 1
            # Of other ranks as many, until they say.
            progress.show(min(num_parts * world.size, len(parts)), status_text(num_failed + failed))
        return failed

    progress.begin(0, len(parts))
    # Ranks that differ in speed wait for each other now and then: a collective gives up after half an hour.
    for begin in range(0, -(-len(parts) // world.size), _PARTS_TOGETHER):
        num_failed += sum(world.gather_objects(world.each(partial(make_some, share[begin : begin + _PARTS_TOGETHER]))))
        if world.size > 1:
            progress.show(min((begin + _PARTS_TOGETHER) * world.size, len(parts)), status_text(num_failed))
    progress.close()
