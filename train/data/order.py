"""Sample order: a pure function of (seed, epoch, position), with random access in O(1).

Every epoch contains every sample exactly once, in a different order. The order is a format-preserving permutation: an
alternating Feistel network on the smallest power of two that is large enough, with cycle walking until it reaches a
valid sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The permutation does not use a table,
so 10^9 samples cost as much as ten, and it does not depend on the number of workers or ranks.

Positions continue across epochs: position p is position p % num_samples of epoch p // num_samples.

With groups of G samples, the groups are permuted. Group g has the samples g * G to g * G + G - 1, which stay adjacent.
If G does not divide the number of samples, the last group of every epoch is incomplete, and its remaining positions are
empty.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from clipmill.train.device.random import Positions, splitmix64

_NUM_ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """Order of `num_samples` samples under `seed`, in groups of `group` consecutive samples."""

    num_samples: int
    seed: int
    group: int = 1

    def __post_init__(self) -> None:
        if self.num_samples <= 0:
            raise ValueError(f"an order needs at least one sample, got num_samples={self.num_samples}")
        if self.group <= 0:
            raise ValueError(f"a group needs at least one sample, got group={self.group}")

    @property
    def positions_per_epoch(self) -> int:
        """Number of positions in an epoch: the samples and the empty positions of the last group."""
        return -(-self.num_samples // self.group) * self.group

    def at(self, positions: Positions) -> Positions:
        """Return the samples, in [0, num_samples), at `positions` (int64, any shape, >= 0); -1 for empty positions."""
        epochs, in_epoch = np.divmod(np.asarray(positions, dtype=np.int64), self.positions_per_epoch)
        groups, members = np.divmod(in_epoch, self.group)
        num_full = self.num_samples // self.group
        is_full = groups < num_full
        if is_full.any():
            # All epochs are computed at once, because many positions of a small set belong to many epochs.
            distinct, number = np.unique(epochs[is_full], return_inverse=True)
            keys = np.stack([_round_keys(self.seed, int(epoch)) for epoch in distinct], axis=1)
            groups[is_full] = _permute_with_keys(
                groups[is_full], num_full, keys[:, number] if len(distinct) > 1 else keys
            )
        samples = groups * self.group + members
        samples[samples >= self.num_samples] = -1
        return samples


@dataclass(frozen=True)
class Share:
    """Positions of a rank: every `num_ranks`-th group of the order, starting with group `rank`.

    The shares of all ranks have the same size and together cover every position. They are counted from the first
    position of the order, wherever a run is resumed, so the same number of ranks continues with the same shares.

    Attributes:
        rank: Rank, or an array of ranks for several shares at once.
    """

    rank: int | Positions = 0
    num_ranks: int = 1
    group: int = 1

    def at(self, numbers: Positions) -> Positions:
        """Return the positions with these numbers in the share, counted from 0."""
        return (numbers // self.group * self.num_ranks + self.rank) * self.group + numbers % self.group

    def count_before(self, positions: int | Positions) -> Positions:
        """Return how many positions of the share precede each of `positions`."""
        rows, rest = np.divmod(np.asarray(positions, dtype=np.int64), self.group * self.num_ranks)
        counts: Positions = rows * self.group + np.clip(rest - self.rank * self.group, 0, self.group)
        return counts


def permute(positions: Positions, num_samples: int, *, seed: int, epoch: int) -> Positions:
    """Map positions in [0, num_samples) to samples in [0, num_samples), one to one, for one epoch."""
    return _permute_with_keys(positions, num_samples, _round_keys(seed, epoch)[:, None])


def _permute_with_keys(positions: Positions, num_samples: int, keys: NDArray[np.uint64]) -> Positions:
    """Permute with round keys [rounds, 1], or [rounds, N] for positions of several epochs."""
    num_bits = max(2, (num_samples - 1).bit_length())
    samples = _feistel(positions.astype(np.uint64), num_bits, keys)
    is_invalid = samples >= num_samples
    while is_invalid.any():
        row_keys = keys if keys.shape[1] == 1 else keys[:, is_invalid]
        samples[is_invalid] = _feistel(samples[is_invalid], num_bits, row_keys)
        is_invalid = samples >= num_samples
    return samples.astype(np.int64)


def _feistel(values: NDArray[np.uint64], num_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute [0, 2**num_bits): each round XORs one half with a hash of the other, which is invertible."""
    right_bits = np.uint64(num_bits // 2)
    left_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    right_mask = np.uint64((1 << (num_bits // 2)) - 1)
    left, right = values >> right_bits, values & right_mask
    for number, key in enumerate(keys):
        if number % 2:
            right = right ^ (splitmix64(left ^ key) & right_mask)
        else:
            left = left ^ (splitmix64(right ^ key) & left_mask)
    return (left << right_bits) | right


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return round keys from a cryptographic hash, so that neighbouring seeds and epochs are unrelated."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


# Resume cursor: the progress of a run in the endless sample order, for any batch size and number of ranks.
#
# As long as no sample fails and a rank's batch consists of complete groups, the cursor is a single number: all
# positions before it have been used. If a rank's sample fails, the rank uses the next position of its share, and is
# then ahead of the other ranks. Positions that were used early are recorded, so that no rank uses them again after
# resuming.


SEPARATOR = "-"  # separates the two parts of a fingerprint


class LoaderState(TypedDict):
    """State of a loader, as stored in a checkpoint."""

    position: int  # all positions before it have been used
    ahead: list[int]  # further used positions; only with several ranks, after failures
    seed: int
    samples: str  # fingerprint of the sample set


class Cursor(NamedTuple):  # a NamedTuple for the same reason as `LoadedBatch`
    """Positions that have been used: all positions before `position`, and later positions in `ahead` (ascending)."""

    position: int
    ahead: tuple[int, ...] = ()

    def has_passed(self, position: int) -> bool:
        """Return True if `position` has been used."""
        return position < self.position or position in self.ahead

    def positions(self, begin: int, count: int, share: Share) -> Positions:
        """Return `count` unused positions of a rank's share, in order, without the first `begin` unused positions."""
        first, taken = int(share.count_before(self.position)), self._numbers_ahead(share)
        numbers = begin + np.arange(count, dtype=np.int64)
        num_unused = taken - first - np.arange(len(taken))  # number of unused positions before each taken one
        return share.at(first + numbers + np.searchsorted(num_unused, numbers, side="right"))

    def after(self, num_common: int, num_own: int, share: Share) -> "Cursor":
        """Return the cursor after every rank has used `num_common` positions, and this rank `num_own` or more."""
        if not self.ahead and num_own == num_common and share.group == 1:
            return Cursor(self.position + num_common * share.num_ranks)
        position = self._after_all(num_common, share)
        num_before = int(share.count_before(position) - share.count_before(self.position))
        num_before -= int(np.searchsorted(share.at(self._numbers_ahead(share)), position))
        early = self.positions(num_before, num_own - num_before, share).tolist()
        cursor = Cursor(position, tuple(sorted({at for at in self.ahead if at > position}.union(early))))
        # Ranks with different failures must report the same position, by which `merge_cursors` matches them.
        return cursor if share.num_ranks > 1 else merge_cursors([cursor])

    def _after_all(self, num_common: int, share: Share) -> int:
        """Return the first unused position after every rank has used `num_common` positions."""
        shares = replace(share, rank=np.arange(share.num_ranks))
        next_positions = shares.at(shares.count_before(self.position) + num_common)
        for rank in {at // share.group % share.num_ranks for at in self.ahead}:
            next_positions[rank] = self.positions(num_common, 1, replace(share, rank=rank))[0]
        return int(next_positions.min())

    def _numbers_ahead(self, share: Share) -> Positions:
        """Return the numbers in the share of the positions in `ahead`, ascending."""
        ahead = np.array(self.ahead, dtype=np.int64)
        return share.count_before(ahead[ahead // share.group % share.num_ranks == share.rank])


def merge_cursors(cursors: Iterable[Cursor]) -> Cursor:
    """Merge the cursors of all ranks, which must have used the same number of batches.

    Raises:
        ValueError: The ranks are at different batches.
    """
    ahead: set[int] = set()
    positions = set()
    for cursor in cursors:
        ahead.update(cursor.ahead)
        positions.add(cursor.position)
    if len(positions) != 1:
        raise ValueError(f"the ranks are at different positions: {sorted(positions)}")
    (position,) = positions
    while position in ahead:
        ahead.remove(position)
        position += 1
    return Cursor(position, tuple(sorted(ahead)))


def set_fingerprint(order: str, content: str) -> str:
    """Return the fingerprint of a sample set in two parts, so that an error can report which part differs.

    Args:
        order: Hash of the samples and their order.
        content: Hash of the content of samples other than their frames.
    """
    return f"{order}{SEPARATOR}{content}"
