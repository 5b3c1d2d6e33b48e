"""Tests of arrays of digests: sets of digests, and indices of digests, including digests that end with zero bytes."""

import hashlib

import numpy as np

from clipmill.prep.text.captions import DIGESTS, DigestSet, digests_of, positions_in, text_digest


def test_a_set_keeps_each_digest_once_in_order() -> None:
    digests = np.frombuffer(np.random.default_rng(0).bytes(16 * 30_000), DIGESTS).copy()
    digests[::7] = np.frombuffer(bytes(16) + bytes([255]) * 14 + bytes(2), DIGESTS)[np.arange(len(digests[::7])) % 2]
    digest_set = DigestSet()
    digest_set._MAX_BUFFERED = 5000
    for begin in range(0, len(digests), 1700):
        digest_set.add(digests[begin : begin + 1700])
    digest_set.add(digests[:4000])
    assert np.array_equal(digest_set.pop_sorted(), np.unique(digests))


def test_places_are_those_of_equal_digests_alone() -> None:
    ordered = np.unique(digests_of(f"text {n}" for n in range(1000)))
    digests = digests_of(["text 5", "no such text", "text 999", ""])
    places = positions_in(ordered, digests)
    assert (places >= 0).tolist() == [True, False, True, False]
    assert ordered[places[0] : places[0] + 1].tobytes() == text_digest("text 5")
    assert positions_in(ordered[:0], digests).tolist() == [-1] * 4


def test_a_digest_is_blake2b_of_the_utf8_text() -> None:
    assert text_digest("é") == hashlib.blake2b(b"\xc3\xa9", digest_size=16).digest()
