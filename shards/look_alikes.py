"""Chunks that look alike: perceptual hashes that differ in few bits.

Two 64-bit hashes that differ in at most 4 bits agree in at least two of six bands of 10 or 11 bits (pigeonhole). For
each of the 15 pairs of bands, hashes are sorted by these two bands, and only those with equal bands are compared.

A picture without content, such as a black frame, one colour or a gradient, looks like nothing (`is_comparable`).
ImageHash's phash compares 64 frequencies with their median, so that about half of the bits are set in the hash of a
picture with content; without content nearly all frequencies are zero, and so are nearly all bits (0 of black, 1 of any
other colour). Hashes with fewer than 24 or more than 40 bits set are left out.

Chunks of one video do not count: neighbours in a static shot look alike, and each has its own captions. `motion` and
`frozen` select among those.
"""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

MAX_DISTANCE = 4
MIN_BITS, MAX_BITS = 24, 40
_BANDS = ((0, 11), (11, 11), (22, 11), (33, 11), (44, 10), (54, 10))  # first bit, number of bits
_NONE = np.iinfo(np.int64).max


def is_comparable(phash: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """bool [N], True for hashes of pictures with content."""
    bits = np.bitwise_count(phash)
    return (bits >= MIN_BITS) & (bits <= MAX_BITS)


def pairs_alike(hashes: NDArray[np.uint64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield blocks of pairs (i, j) of distinct hashes within MAX_DISTANCE; a pair may come up to 15 times."""
    for one, other in combinations(_BANDS, 2):
        key = _bits(hashes, *one) << np.uint32(other[1]) | _bits(hashes, *other)
        order = np.argsort(key, kind="stable")
        key, in_order = key[order], hashes[order]
        # Number of further hashes in the bucket of each.
        is_last = np.append(key[1:] != key[:-1], True)
        ends = np.flatnonzero(is_last)
        num_after = np.repeat(ends, np.diff(ends, prepend=-1)) - np.arange(len(key))
        begin = np.flatnonzero(num_after)
        for step in range(1, int(num_after.max(initial=0)) + 1):
            begin = begin[num_after[begin] >= step]
            near = begin[np.bitwise_count(in_order[begin] ^ in_order[begin + step]) <= MAX_DISTANCE]
            if len(near):
                yield order[near], order[near + step]


def _bits(hashes: NDArray[np.uint64], first: int, count: int) -> NDArray[np.uint32]:
    return ((hashes >> np.uint64(first)) & np.uint64((1 << count) - 1)).astype(np.uint32)


def first_look_alikes(
    phash: NDArray[np.uint64], *, video: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The first row of an earlier video that looks like each row, and whether any row of another video does.

    Args:
        phash: uint64 [N] of comparable pictures.
        video: [N], ascending.

    Returns:
        int64 [N], -1 if there is none; bool [N].
    """
    hashes, first, group = np.unique(phash, return_index=True, return_inverse=True)
    last = np.empty(len(hashes), np.int64)
    last[group] = np.arange(len(phash))  # the last value written stays
    nearest_first, nearest_last = first.copy(), last.copy()
    for one, other in pairs_alike(hashes):
        for a, b in ((one, other), (other, one)):
            np.minimum.at(nearest_first, a, first[b])
            np.maximum.at(nearest_last, a, last[b])
    of_row = nearest_first[group]
    is_copy = video[of_row] < video
    is_alike = is_copy | (video[nearest_last[group]] > video)
    return np.where(is_copy, of_row, -1), is_alike


def first_of_each_part(phash: NDArray[np.uint64], part: NDArray[np.integer], *, num_parts: int) -> NDArray[np.int64]:
    """For each row and each part the first row of that part that looks alike: int64 [N, num_parts], -1 without any.

    Args:
        phash: uint64 [N] of comparable pictures.
        part: [N], of each row, 0 to num_parts - 1.
    """
    hashes, group = np.unique(phash, return_inverse=True)
    first = np.full((len(hashes), num_parts), _NONE)
    np.minimum.at(first, (group, part), np.arange(len(phash)))
    nearest = first.copy()
    for one, other in pairs_alike(hashes):
        np.minimum.at(nearest, one, first[other])
        np.minimum.at(nearest, other, first[one])
    return np.where(nearest == _NONE, -1, nearest)[group]
