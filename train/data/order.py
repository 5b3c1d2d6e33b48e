"""Order of samples: a pure function of (seed, epoch, position), with random access in O(1), and the resume cursor.

Every epoch contains every sample exactly once, in a different order. The order is a format-preserving permutation: an
alternating Feistel network on the smallest power of two that is large enough, applied repeatedly (cycle walking) until
the result is a valid sample (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The order needs no
table, so 10^9 samples cost as much as ten, and does not depend on the number of workers or ranks.

Positions continue across epochs: if an epoch has P positions, position p is position p % P of epoch p // P. Each rank
uses every num_ranks-th group of positions (`Share`).

With groups of G samples, groups are permuted instead of samples. Group g consists of the samples g * G to
g * G + G - 1, which stay adjacent. If G does not divide the number of samples, the last group of every epoch is
incomplete, and its remaining positions are empty.
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
            # Compute all epochs together: in a small data set, the positions of a block span many epochs.
            distinct_epochs, index = np.unique(epochs[is_full], return_inverse=True)
            keys = np.stack([_round_keys(self.seed, int(epoch)) for epoch in distinct_epochs], axis=1)
            groups[is_full] = _permute_with_keys(
                groups[is_full], num_full, keys[:, index] if len(distinct_epochs) > 1 else keys
            )
        samples = groups * self.group + members
        samples[samples >= self.num_samples] = -1
        return samples


@dataclass(frozen=True)
class Share:
    """Positions that a rank uses: every `num_ranks`-th group of the order, starting with group `rank`.

    The shares of all ranks have the same size and together cover every position. Groups are always counted from the
    first position of the order, so a resumed run with the same number of ranks continues with the same shares.

    Attributes:
        rank: Rank, or an array of ranks to compute several shares in one call.
        num_ranks: Number of ranks.
        group: Number of positions in a group.
    """

    rank: int | Positions = 0
    num_ranks: int = 1
    group: int = 1

    def at(self, indices: Positions) -> Positions:
        """Return the positions at these indices of the share. Index 0 is the first position of the share."""
        return (indices // self.group * self.num_ranks + self.rank) * self.group + indices % self.group

    def count_before(self, positions: int | Positions) -> Positions:
        """Return the number of positions of the share that precede each of `positions`."""
        rows, rest = np.divmod(np.asarray(positions, dtype=np.int64), self.group * self.num_ranks)
        counts: Positions = rows * self.group + np.clip(rest - self.rank * self.group, 0, self.group)
        return counts


def permute(positions: Positions, num_samples: int, *, seed: int, epoch: int) -> Positions:
    """Map positions in [0, num_samples) to samples in [0, num_samples), one to one, for one epoch."""
    return _permute_with_keys(positions, num_samples, _round_keys(seed, epoch)[:, None])


def _permute_with_keys(positions: Positions, num_samples: int, keys: NDArray[np.uint64]) -> Positions:
    """Permute positions with round keys: [rounds, 1] for one epoch, or [rounds, N] with a column per position."""
    num_bits = max(2, (num_samples - 1).bit_length())
    samples = _feistel(positions.astype(np.uint64), num_bits, keys)
    is_invalid = samples >= num_samples
    while is_invalid.any():
        row_keys = keys if keys.shape[1] == 1 else keys[:, is_invalid]
        samples[is_invalid] = _feistel(samples[is_invalid], num_bits, row_keys)
        is_invalid = samples >= num_samples
    return samples.astype(np.int64)


def _feistel(values: NDArray[np.uint64], num_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute [0, 2**num_bits). A round is invertible: it XORs one half of the bits with a hash of the other half."""
    right_bits = np.uint64(num_bits // 2)
    left_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    right_mask = np.uint64((1 << (num_bits // 2)) - 1)
    left, right = values >> right_bits, values & right_mask
    for round_index, key in enumerate(keys):
        if round_index % 2:
            right = right ^ (splitmix64(left ^ key) & right_mask)
        else:
            left = left ^ (splitmix64(right ^ key) & left_mask)
    return (left << right_bits) | right


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return round keys from a cryptographic hash, so that neighbouring seeds and epochs are unrelated."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


# Resume cursor: the progress of a run in the endless order of samples, for any batch size and number of ranks.
#
# As long as no sample fails and each rank's batches consist of complete groups, the cursor is a single number: all
# positions before it have been used. If a sample of a rank fails, the rank uses the next position of its share instead,
# and is then ahead of the other ranks. The cursor also records the positions that such a rank has used ahead of the
# others, so that a resumed run does not use them again.


SEPARATOR = "-"  # separator between the two parts of a fingerprint


class LoaderState(TypedDict):
    """State of a loader, as stored in a checkpoint."""

    position: int  # first position that has not been used
    ahead: list[int]  # later positions that have been used; empty on a single rank without failures
    seed: int
    samples: str  # fingerprint of the sample set


class Cursor(NamedTuple):  # a dataclass takes twice as long to create
    """Positions that have been used: all positions before `position`, and later positions in `ahead` (ascending)."""

    position: int
    ahead: tuple[int, ...] = ()

    def has_passed(self, position: int) -> bool:
        """Return True if `position` has been used."""
        return position < self.position or position in self.ahead

    def positions(self, begin: int, count: int, share: Share) -> Positions:
        """Return `count` unused positions of a rank's share, in order. Skip the first `begin` unused positions."""
        first_index, used_indices = int(share.count_before(self.position)), self._indices_ahead(share)
        offsets = begin + np.arange(count, dtype=np.int64)
        num_unused = used_indices - first_index - np.arange(len(used_indices))  # unused positions before each used one
        return share.at(first_index + offsets + np.searchsorted(num_unused, offsets, side="right"))

    def advance(self, num_common: int, num_used: int, share: Share) -> "Cursor":
        """Return the cursor of a rank after a number of batches.

        Args:
            num_common: Number of positions that every rank has used if no sample has failed.
            num_used: Number of positions that this rank has used. It exceeds `num_common` if samples have failed.
        """
        if not self.ahead and num_used == num_common and share.group == 1:
            return Cursor(self.position + num_common * share.num_ranks)
        position = self._first_unused(num_common, share)
        num_before = int(share.count_before(position) - share.count_before(self.position))
        num_before -= int(np.searchsorted(share.at(self._indices_ahead(share)), position))
        used_ahead = self.positions(num_before, num_used - num_before, share).tolist()
        later = {used for used in self.ahead if used > position}
        cursor = Cursor(position, tuple(sorted(later.union(used_ahead))))
        # With several ranks, `position` must not depend on a rank's failures: `merge_cursors` compares the positions.
        return cursor if share.num_ranks > 1 else merge_cursors([cursor])

    def _first_unused(self, num_common: int, share: Share) -> int:
        """Return the first unused position after every rank has used `num_common` positions."""
        shares = replace(share, rank=np.arange(share.num_ranks))
        next_positions = shares.at(shares.count_before(self.position) + num_common)
        for rank in {used // share.group % share.num_ranks for used in self.ahead}:
            next_positions[rank] = self.positions(num_common, 1, replace(share, rank=rank))[0]
        return int(next_positions.min())

    def _indices_ahead(self, share: Share) -> Positions:
        """Return the positions in `ahead` that belong to the share, as ascending indices of the share."""
        ahead = np.array(self.ahead, dtype=np.int64)
        return share.count_before(ahead[ahead // share.group % share.num_ranks == share.rank])


def merge_cursors(cursors: Iterable[Cursor]) -> Cursor:
    """Merge the cursors of all ranks after the same number of batches.

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
    """Return the fingerprint of a set of samples, in two parts, so that an error can report which part differs.

    Args:
        order: Hash of the samples and their order.
        content: Hash of the captions' texts and of the rule that chooses among them.
    """
    return f"{order}{SEPARATOR}{content}"
