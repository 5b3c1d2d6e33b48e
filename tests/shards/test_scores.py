import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.commits import read_commit, write_commit
from clipmill.shards.dataset import set_current_variant
from clipmill.shards.reader import Variant
from clipmill.shards.scores import (
    CHUNKS_FILE,
    MAX_DISTANCE,
    first_look_alikes,
    first_look_alikes_by_part,
    is_comparable,
    open_scores,
    publish_score_table,
)
from tests.shards.made_scores import phash, write_scores
from tests.train.tiny_data import write_captions

ORDER = {"b": "train", "a": "train", "c": "val"}  # order of the manifest


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    write_captions(tmp_path, ORDER, [])
    (tmp_path / "video" / "h264-1").mkdir(parents=True)
    set_current_variant(tmp_path, "video", "h264-1")
    return tmp_path


def test_the_table_is_ordered_by_video_and_start_and_marks_what_looks_alike(data_dir: Path) -> None:
    black, grey = 0, 1 << 63
    write_scores(
        data_dir,
        {
            "c_000002000": {"phash": phash(1, flipped=(3, 9)), "motion": 0.5},
            "c_000000000": {"phash": black},
            "unknown_000000000": {"phash": phash(2)},
            "a_000000000": {"phash": phash(1), "cuts": 1, "cut_times_s": [0.5]},
            "a_000002000": {"phash": phash(1)},
            "a_000004000": {"phash": grey},
        },
    )
    write_scores(
        data_dir,
        {"b_000002000": {"phash": phash(2)}, "b_000000000": {"phash": black}, "b_000004000": {"phash": grey}},
        failed=["b_000006000"],
        shard_id=1,
    )
    table = open_scores(data_dir).table
    keys = list(zip(table["video_id"].to_pylist(), table["start_ms"].to_pylist(), strict=True))
    assert keys == [
        *[("b", 0), ("b", 2000), ("b", 4000), ("b", 6000)],
        *[("a", 0), ("a", 2000), ("a", 4000)],
        *[("c", 0), ("c", 2000), ("unknown", 0)],
    ]
    # Chunks of the same video do not count as duplicates, nor do black and gray ones.
    assert table["duplicate_of"].to_pylist() == [-1, -1, -1, -1, -1, -1, -1, -1, 4, 1]
    assert np.flatnonzero(table["has_look_alike"].to_numpy()).tolist() == [1, 4, 5, 8, 9]
    assert table["motion"].to_pylist()[3] is None  # the scores of this chunk could not be computed
    assert table["motion"].to_pylist()[8] == 0.5
    assert all(column.num_chunks == 1 for column in table.columns)
    assert pa.types.is_dictionary(table["video_id"].type)


def test_equal_scores_give_equal_bytes(data_dir: Path) -> None:
    scores = {"a_000000000": {"motion": 0.5, "phash": phash(1)}, "b_000000000": {"motion": 0.25}}
    path = write_scores(data_dir, scores) / CHUNKS_FILE
    before = path.read_bytes()
    assert publish_score_table(Variant(path.parent)) == path
    assert path.read_bytes() == before
    write_scores(data_dir, dict(reversed(scores.items())))
    assert read_table(path) == read_table(path)


def read_table(path: Path) -> pa.Table:
    return pa.ipc.open_file(path).read_all()


def test_without_scores_the_command_that_makes_them_is_named(data_dir: Path) -> None:
    with pytest.raises(UserError, match="has no scores shards") as error:
        open_scores(data_dir)
    assert error.value.hint == f"run prep scores --data {data_dir}"


def test_scores_of_another_variant_of_the_chunks_are_refused(data_dir: Path) -> None:
    write_scores(data_dir, {"a_000000000": {"motion": 0.5}}, video="h264-old")
    with pytest.raises(
        UserError, match="scores was made from the chunks of h264-old, but the current variant of video is h264-1"
    ):
        open_scores(data_dir)


def test_a_table_that_was_not_written_yet_or_is_of_other_shards_is_refused(data_dir: Path) -> None:
    directory = write_scores(data_dir, {"a_000000000": {"motion": 0.5}}, publish=False)
    with pytest.raises(UserError, match=r"chunks\.arrow is missing\n"):
        open_scores(data_dir)
    publish_score_table(Variant(directory))
    open_scores(data_dir)
    write_scores(data_dir, {"b_000000000": {"motion": 0.5}}, shard_id=1, publish=False)
    with pytest.raises(UserError, match="is stale"):
        open_scores(data_dir)
    commit = read_commit(directory / "commits" / "000001.json")
    (directory / "commits" / "000001.json").unlink()
    open_scores(data_dir)
    write_commit(directory, dataclasses.replace(commit, shard_id=2))
    with pytest.raises(UserError):
        open_scores(data_dir)


@pytest.mark.parametrize("column", ["motion", "video_id", "phash", "cut_times_s", "duplicate_of"])
def test_a_changed_byte_is_found_in_the_columns_that_are_used(data_dir: Path, column: str) -> None:
    directory = write_scores(
        data_dir,
        {
            f"a_video_of_its_own_00000{n}000": {"motion": n / 3, "phash": phash(n), "cut_times_s": [n / 7]}
            for n in range(9)
        },
    )
    path = directory / CHUNKS_FILE
    table = read_table(path)
    chunk = table[column].chunk(0)
    if column == "video_id":
        buffer = chunk.dictionary.buffers()[2]
    else:
        buffer = chunk.flatten().buffers()[1] if column == "cut_times_s" else chunk.buffers()[1]
    content = path.read_bytes()
    assert content.count(buffer.to_pybytes()) == 1
    offset = content.index(buffer.to_pybytes())
    path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
    with pytest.raises(UserError, match=f"damaged: {column} does not match its checksum|not a readable"):
        open_scores(data_dir)
    open_scores(data_dir, columns=["sharpness"])


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"not a table at all"])
def test_a_file_that_is_no_table_is_refused(data_dir: Path, content: bytes) -> None:
    directory = write_scores(data_dir, {"a_000000000": {"motion": 0.5}})
    (directory / CHUNKS_FILE).write_bytes(content)
    with pytest.raises(UserError, match="not a readable table of scores"):
        open_scores(data_dir)


def test_a_nan_is_refused_by_name(data_dir: Path) -> None:
    with pytest.raises(UserError, match="sharpness is NaN"):
        write_scores(data_dir, {"a_000000000": {"sharpness": float("nan")}})


def test_look_alikes_are_those_that_comparing_all_pairs_finds() -> None:
    draw = np.random.default_rng(0)
    base = draw.integers(0, 1 << 64, 700, np.uint64)
    flipped = np.zeros(700, np.uint64)
    for _ in range(MAX_DISTANCE + 1):
        flipped ^= np.uint64(1) << draw.integers(0, 64, 700, np.uint64)
    phashes = draw.permutation(np.concatenate([base, base ^ flipped, base[:100]]))
    video = np.sort(draw.integers(0, 200, len(phashes)))
    part = draw.integers(0, 3, len(phashes))
    alike = np.bitwise_count(phashes[:, None] ^ phashes) <= MAX_DISTANCE
    assert 0 < alike.sum() - len(phashes) < len(phashes) * 4

    def first(mask: np.ndarray) -> list[int]:
        return np.where(mask.any(1), mask.argmax(1), -1).tolist()

    earlier_looks, has_other = first_look_alikes(phashes, video=video)
    assert earlier_looks.tolist() == first(alike & (video[:, None] > video))
    assert has_other.tolist() == (alike & (video[:, None] != video)).any(1).tolist()
    of_part = first_look_alikes_by_part(phashes, part, num_parts=3)
    assert [of_part[:, number].tolist() for number in range(3)] == [
        first(alike & (part == part_number)) for part_number in range(3)
    ]


def test_pictures_without_content_look_like_nothing() -> None:
    black, grey, step = 0, 1 << 63, 0x9100000000000000
    assert not is_comparable(np.array([black, grey, step, (1 << 64) - 1], np.uint64)).any()
    assert is_comparable(np.array([phash(number) for number in range(20)], np.uint64)).all()
