"""Ranks that were not started alike, or do not see the same data, found before one of them waits for another.

They would hang in the first exchange, abort in it, or train on without a word: each by its own learning rate.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from manifests.errors import FailedWork, UserError
from train.distributed.world import World

# How one rank was started: values by the names of flags, or of what else they must have in common.
Start = Mapping[str, object]
COMMAND = "command"

_MOST_SHOWN = 6
_ABSENT = "not there"
# Rank 0 may have the store, and then leaves last; a rank that is gone meanwhile is not waited for.
_LEAVE_TOGETHER = timedelta(seconds=10)


def require_same_start(start: Start, *, store: dist.Store, world: World, hint: str) -> None:
    """Compares how the ranks were started; each calls it with its own, before there is a process group.

    Args:
        store: in which the ranks find one another.
        hint: what to do where they differ.

    Raises:
        UserError: they differ; every rank raises the same.
        FailedWork: another rank does not say how it was started.
    """
    store = dist.PrefixStore("start", store)
    try:
        store.set(str(world.rank), json.dumps(start))
        if world.is_first:
            found = difference([json.loads(store.get(str(rank))) for rank in range(world.size)])
            store.set("found", found or "")
        else:
            found = store.get("found").decode()
    except RuntimeError as error:
        raise FailedWork(
            f"rank {world.rank} of {world.size} waits in vain for another rank to start "
            f"({str(error).splitlines()[0][:200]}); what that one said last stands in its own log"
        ) from error
    if found:
        _leave_together(store, world)
        raise UserError(f"the ranks were not started alike: {found}", hint=hint)


def difference(ranks: Sequence[Start]) -> str | None:
    """In words what is not the same on all ranks, with its values; None where all is."""
    names = list(dict.fromkeys(name for start in ranks for name in start))
    values = {name: [_shown(start, name) for start in ranks] for name in names}
    differing = {name: of_ranks for name, of_ranks in values.items() if len(set(of_ranks)) > 1}
    if COMMAND in differing:
        # Another command has other flags: they say nothing more.
        differing = {COMMAND: differing[COMMAND]}
    if not differing:
        return None
    parts = [f"{name} is {_by_rank(of_ranks)}" for name, of_ranks in differing.items()]
    more = f"; and {len(parts) - _MOST_SHOWN} more" if len(parts) > _MOST_SHOWN else ""
    return "; ".join(parts[:_MOST_SHOWN]) + more


def _shown(start: Start, name: str) -> str:
    value = start.get(name, _ABSENT)
    return value if isinstance(value, str) else json.dumps(value)


def _by_rank(values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on {_named(its)}" for value, its in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > _MOST_SHOWN else "")


def _leave_together(store: dist.Store, world: World) -> None:
    store.set(f"left-{world.rank}", "")
    if world.is_first:
        try:
            store.wait([f"left-{rank}" for rank in range(world.size)], _LEAVE_TOGETHER)
        except RuntimeError:
            pass
