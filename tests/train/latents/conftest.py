from pathlib import Path

import pytest

from tests.train.latents.written import Caption, Chunk, Written, write_all

# At 4 frames per second: full chunks of 15 s, a last chunk of 2 s, and a video that is shorter than a segment.
SHARDS = [
    [Chunk("a", 0, 60), Chunk("a", 15000, 60), Chunk("a", 30000, 28), Chunk("b", 0, 60)],
    [Chunk("c", 15000, 40), Chunk("d", 0, 12)],
    [Chunk("e", 0, 60)],
]
CAPTIONS = [
    Caption("a", 0.0, float("inf"), "all of a"),
    Caption("a", 4.9, 10.0, "the second segment of a, and the end of the first"),
    Caption("a", 10.0, 30.0, "three segments of a"),
    Caption("b", 3.0, 3.0, "no time at all"),
    Caption("b", 6.0, 7.0, "a moment of b"),
    Caption("b", 6.5, 7.5, "a moment of b"),
    Caption("c", 0.0, 16.0, "c begins before its first chunk"),
    Caption("c", 100.0, 110.0, "after the end of c"),
    Caption("d", 0.0, 3.0, "the tail that is all of d"),
    Caption("e", 0.0, 15.0, "has no embedding"),
    Caption("e", 5.0, 9.0, "the second segment of e"),
]
WITHOUT_EMBEDDING = frozenset({9})


@pytest.fixture(scope="session")
def written_data(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Five videos that cover everything that a loader could get wrong."""
    return write_all(tmp_path_factory.mktemp("latents"), SHARDS, CAPTIONS, without=WITHOUT_EMBEDDING)


@pytest.fixture
def data_copy(tmp_path: Path) -> Written:
    """Copy of `written_data` for a test that damages it."""
    return write_all(tmp_path / "data", SHARDS, CAPTIONS, without=WITHOUT_EMBEDDING)
