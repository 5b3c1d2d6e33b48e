"""Moments, each a row of a list of videos and a time in it, as one integer, so that they are sorted and searched fast.

The times of some moments span a range, and the integers are dense: row times range plus time. 10^9 videos of up to 100
days fit into 64 bits. Moments that do not fit are refused, since their numbers would be those of other videos.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError

_MAX = 2**63 - 1


@dataclass(frozen=True)
class Moments:
    """The numbering of some moments, and of any others among them.

    Attributes:
        num_rows: number of rows up to the last one with a moment.
        low, high: the first and the last time, in the unit of the times.
    """

    num_rows: int
    low: int
    high: int

    @classmethod
    def of(cls, rows: NDArray[np.integer], *times: NDArray[np.integer]) -> "Moments":
        """Return the numbering of the moments (row, time), for each array of times; row -1 stands for no video.

        Raises:
            UserError: there are more videos, or longer ones, than 64 bits can number.
        """
        if not len(rows):
            return cls(0, 0, 0)
        low, high = min(int(one.min()) for one in times), max(int(one.max()) for one in times)
        found = cls(int(rows.max()) + 1, low, high)
        if (found.num_rows + 1) * found.span > _MAX:
            raise UserError(
                f"{found.num_rows:,} videos with times from {found.low:,} to {found.high:,} are too many to be told "
                "apart by 64 bits",
                hint="look for chunks at impossible times, or divide the videos among several data folders",
            )
        return found

    @property
    def span(self) -> int:
        """Numbers of a row: its times, and one on each side for those before and after."""
        return self.high - self.low + 3

    def numbers(self, rows: NDArray[np.integer], times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of any moments, int64.

        A row after the last one, and a time outside the range, have numbers that no moment has, at the right place
        among those of the moments.
        """
        row = np.minimum(rows.astype(np.int64), self.num_rows)
        return row * self.span + (np.clip(times, self.low - 1, self.high + 1) - (self.low - 1))


def order_of(rows: NDArray[np.integer], times: NDArray[np.integer]) -> NDArray[np.int64] | None:
    """Return the stable order of moments by row and time; None if they are in order."""
    later_row, same_row = rows[1:] > rows[:-1], rows[1:] == rows[:-1]
    if bool((later_row | (same_row & (times[1:] >= times[:-1]))).all()):
        return None
    return np.lexsort((times, rows))
