"""Where a run stands in the endless order: exact whatever the batch and the ranks were, and will be.

While nothing fails, this is one number: everything before `position` has been seen. A rank whose sample fails takes
the next of its own, and is then ahead of the others by one; what it took early is remembered, so that nobody takes it
again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from manifests.errors import UserError
from train.data.order import positions_of_rank

_SEPARATOR = "-"


class LoaderState(TypedDict):
    """Where a run over a set of samples stands."""

    position: int  # every place of the order before it has been taken
    ahead: list[int]  # places after it that have been taken too: more than none only with several ranks
    seed: int
    samples: str  # fingerprint of the set


@dataclass(frozen=True)
class Cursor:
    """All positions before `position` are taken, and those in `ahead` (ascending, none before `position`)."""

    position: int
    ahead: tuple[int, ...] = ()

    def has_passed(self, position: int) -> bool:
        """Whether `position` has been taken."""
        return position < self.position or position in self.ahead

    def positions(self, begin: int, count: int, *, rank: int, num_ranks: int, group: int = 1) -> NDArray[np.int64]:
        """The `count` positions that a rank takes, not counting the first `begin` of its own, in order.

        Of the positions that are not taken, rank r takes every num_ranks-th `group` beginning with the r-th.
        """
        return self._nth_free(positions_of_rank(begin, count, rank=rank, num_ranks=num_ranks, group=group))

    def after(self, num_common: int, num_own: int, *, rank: int, num_ranks: int, group: int = 1) -> "Cursor":
        """The place when every rank has taken `num_common` positions, and this one `num_own`, at least as many."""
        whole = num_common // group * group  # of a group that is begun, the ranks have taken parts that lie apart
        position = int(self._nth_free(np.array([whole * num_ranks]))[0])
        early = self.positions(whole, num_own - whole, rank=rank, num_ranks=num_ranks, group=group).tolist()
        place = Cursor(position, tuple(sorted({at for at in self.ahead if at > position}.union(early))))
        # Ranks that met different failures must still name the same position, so that `together` knows them by it.
        return place if num_ranks > 1 else merge_cursors([place])

    def _nth_free(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.ahead:
            return self.position + numbers
        free_before = np.array(self.ahead) - self.position - np.arange(len(self.ahead))
        return self.position + numbers + np.searchsorted(free_before, numbers, side="right")


def set_fingerprint(order: str, content: str) -> str:
    """Fingerprint of a set of samples in two parts, so that an error can tell which of them differs.

    Args:
        order: hash of which samples there are and in which order.
        content: hash of what a sample shows beside its pictures. Runs of older versions have no such part.
    """
    return f"{order}{_SEPARATOR}{content}"


def resume_cursor(states: Iterable[LoaderState], *, samples: str, seed: int, what: str) -> Cursor:
    """The place that the states of all ranks describe.

    Args:
        samples, seed: of the set that goes on.
        what: describes it in the error.

    Raises:
        UserError: they are of another set of samples or another seed, in which their place means nothing, or of
            different steps.
    """
    states = list(states)
    order, _, content = samples.partition(_SEPARATOR)
    for state in states:
        old_order, _, old_content = state["samples"].partition(_SEPARATOR)
        if old_order == order and old_content and old_content != content:
            raise UserError(
                f"the captions of {what} have other words or sources than those that the run was trained with",
                hint="go on with the captions that the run began with, or begin a new run with another --out",
            )
        if old_order != order or state["seed"] != seed:
            of_other = "samples" if old_order != order else f"order: seed {state['seed']}"
            raise UserError(
                f"the loader's state is of other {of_other}, not of {what}, seed {seed}",
                hint="go on with the data, split, segment and seed that the run began with",
            )
    try:
        return merge_cursors([Cursor(state["position"], tuple(state["ahead"])) for state in states])
    except ValueError as error:
        raise UserError(
            f"the loader's states do not belong together: {error}", hint="give those of one step"
        ) from error


def merge_cursors(places: Iterable[Cursor]) -> Cursor:
    """One place for the places of all ranks, which have taken the same number of batches.

    Raises:
        ValueError: the ranks stand at different batches.
    """
    ahead: set[int] = set()
    positions = set()
    for place in places:
        ahead.update(place.ahead)
        positions.add(place.position)
    if len(positions) != 1:
        raise ValueError(f"the ranks stand at different positions: {sorted(positions)}")
    (position,) = positions
    while position in ahead:
        ahead.remove(position)
        position += 1
    return Cursor(position, tuple(sorted(ahead)))
