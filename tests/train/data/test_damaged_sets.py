"""Commits and indexes that cannot be read are named before a run begins."""

from pathlib import Path

import pytest

from manifests.errors import UserError
from shards.index import IndexBuilder, index_bytes, index_schema
from tests.train.test_video_captions import open_set
from tests.train.tiny_data import CHUNK_FRAMES, Caption, encode_chunk, video_sample, write_captions, write_shard


def test_a_damaged_commit_is_named_before_its_samples_are_missed(tmp_path: Path) -> None:
    for number, video in enumerate(("a", "b")):
        write_shard(tmp_path, number, [video_sample(video, 0, encode_chunk(0, CHUNK_FRAMES))], split="train")
    write_captions(tmp_path, {"a": "train", "b": "train"}, [Caption("a", 0, 1, "first"), Caption("b", 0, 1, "second")])
    assert len(open_set(tmp_path)) == 2
    commit = sorted(tmp_path.glob("video/*/commits/*.json"))[1]
    commit.write_bytes(commit.read_bytes() + b"x")
    with pytest.raises(UserError, match=commit.name):
        open_set(tmp_path)


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "of another column"])
def test_a_damaged_index_is_named(tmp_path: Path, damage: str) -> None:
    write_shard(tmp_path, 0, [video_sample("a", 0, encode_chunk(0, CHUNK_FRAMES))], split="train")
    write_captions(tmp_path, {"a": "train"}, [Caption("a", 0, 1, "first"), Caption("a", 0, 2, "second")])
    [index] = tmp_path.glob("video/*/*.index.arrow")
    if damage == "gone":
        index.unlink()
    elif damage == "of another column":
        builder = IndexBuilder(index_schema(("json",), fields=[]))
        builder.append({"key": "a", "json_offset": 512, "json_size": 1, "json_crc32": 0})
        index.write_bytes(index_bytes(builder.table()))
    else:
        index.write_bytes(b"" if damage == "empty" else index.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"index\.arrow"):
        open_set(tmp_path)
