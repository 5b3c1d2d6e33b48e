"""Where a run stands in the endless order: exact whatever the batch and the ranks were, and will be.

While nothing fails, this is one number: everything before `position` has been seen. A rank whose sample fails takes
the next of its own, and is then ahead of the others by one; what it took early is remembered, so that nobody takes it
again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.data.order import positions_of_rank


@dataclass(frozen=True)
class Place:
    """All positions before `position` are taken, and those in `ahead` (ascending, none before `position`)."""

    position: int
    ahead: tuple[int, ...] = ()

    def positions(self, begin: int, count: int, *, rank: int, num_ranks: int) -> NDArray[np.int64]:
        """The `count` positions that a rank takes, not counting the first `begin` of its own, in order.

        Of the positions that are not taken, rank r takes every num_ranks-th beginning with the r-th.
        """
        free = positions_of_rank(begin * num_ranks, count, rank=rank, num_ranks=num_ranks)
        return self._nth_free(free)

    def after(self, num_common: int, num_own: int, *, rank: int, num_ranks: int) -> "Place":
        """The place when every rank has taken `num_common` positions, and this one `num_own`, at least as many."""
        position = int(self._nth_free(np.array([num_common * num_ranks]))[0])
        early = self.positions(num_common, num_own - num_common, rank=rank, num_ranks=num_ranks).tolist()
        place = Place(position, tuple(sorted({at for at in self.ahead if at > position}.union(early))))
        # Ranks that met different failures must still name the same position, so that `together` knows them by it.
        return place if num_ranks > 1 else together([place])

    def _nth_free(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.ahead:
            return self.position + numbers
        free_before = np.array(self.ahead) - self.position - np.arange(len(self.ahead))
        return self.position + numbers + np.searchsorted(free_before, numbers, side="right")


def together(places: Iterable[Place]) -> Place:
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
    return Place(position, tuple(sorted(ahead)))
