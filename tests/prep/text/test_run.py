"""Tests that every distinct text is encoded once, in one or many runs, and that shards map captions to rows exactly."""

import shutil
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from clipmill.prep.core.plan import ShardState
from clipmill.prep.text.captions import text_digest
from clipmill.prep.text.recipe import BANK_FOLDER
from clipmill.shards.commit_table import read_commits
from clipmill.shards.dataset import current_variant
from clipmill.shards.format import BLOCK_BYTES, COMMIT_TABLE_FILE
from clipmill.shards.merged_table import CHUNKS_FILE
from clipmill.shards.npy import data_offset
from clipmill.shards.reader import Variant
from clipmill.shards.verify import verify_shard
from tests.prep.running import contents
from tests.prep.text.conftest import Checkpoints
from tests.prep.text.sets import (
    CAPTIONS,
    SPLITS,
    Encoding,
    embedding_of_captions,
    encode,
    plan_of,
    recipe_in,
    samples,
    texts_of_captions,
    write_captions,
)

DISTINCT = {"a dog runs", "a cat", "", "the end", "a bird"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_captions(folder, CAPTIONS, splits=SPLITS)
    return folder


def variant(data: Path) -> Path:
    name = current_variant(data, "text")
    assert name is not None
    return data / "text" / name


def states(data: Path) -> list[str]:
    return [shard.state for shard in plan_of(data).shards]


def test_every_distinct_text_is_encoded_once(data: Path) -> None:
    engine = Encoding()
    summary = encode(data, engine=engine)
    assert sorted(engine.texts) == sorted(DISTINCT)
    assert (summary.num_encoded, summary.num_reused) == (5, 0)
    assert (summary.num_chunks, summary.num_shards, summary.added.lines) == (3, 2, [])
    assert summary.added.values == {"num_captions": 9, "num_cut": 0, "num_left_out": 1}
    assert not (variant(data) / BANK_FOLDER).exists()


def test_a_video_stores_each_of_its_texts_once_and_every_caption_has_its_row(data: Path) -> None:
    encode(data)
    texts = texts_of_captions(data)
    samples_read = samples(variant(data))
    assert list(samples_read) == ["long", "short", "other"]  # a video without captions has no sample
    row_of: dict[str, np.ndarray] = {}
    ids = []
    for key, sample in samples_read.items():
        told = sample["json"]
        assert told["texts"] == list(dict.fromkeys(CAPTIONS[key]))
        assert sample["text.npy"].shape == (len(told["texts"]), 256) and sample["text.npy"].dtype == np.float16
        assert [told["texts"][row] for row in told["caption_row"]] == [texts[n] for n in told["caption_id"]]
        assert told["caption_id"] == sorted(told["caption_id"])
        ids += told["caption_id"]
        for text, row in zip(told["texts"], sample["text.npy"], strict=True):
            assert np.array_equal(row_of.setdefault(text, row), row)
    assert sorted(ids) == sorted(texts) and row_of.keys() == DISTINCT
    assert len({row.tobytes() for row in row_of.values()}) == len(DISTINCT)


def test_the_index_says_what_the_samples_say(data: Path) -> None:
    encode(data)
    samples_read = samples(variant(data))
    opened = Variant.open(data, column="text")
    for shard in opened.shards():
        for number, row in enumerate(shard.index.to_pylist()):
            told = samples_read[row["key"]]["json"]
            assert row["text_digest"] == [text_digest(text) for text in told["texts"]]
            assert (row["caption_id"], row["caption_row"]) == (told["caption_id"], told["caption_row"])
            assert (row["video_id"], row["num_rows"], row["width"]) == (row["key"], len(told["texts"]), 256)
            payload = shard.read(number, "text.npy")
            assert (row["text.npy_offset"] + data_offset(payload)) % BLOCK_BYTES == 0
            assert zlib.crc32(payload) == row["text.npy_crc32"]
    assert {shard.split for shard in opened.shards()} == {"train", "val"}
    assert recipe_in(variant(data)).items() >= {"column": "text", "encoder": "tiny", "width": 256}.items()


def test_a_changed_caption_encodes_the_new_text_alone(data: Path) -> None:
    encode(data)
    before = embedding_of_captions(variant(data))
    texts_before = texts_of_captions(data)
    write_captions(data, {**CAPTIONS, "short": ["a bird", "the beginning"]}, splits=SPLITS)
    assert states(data) == [ShardState.CHANGED, ShardState.CURRENT]
    engine = Encoding()
    summary = encode(data, engine=engine)
    # The shard of the other split already contains "a bird".
    assert engine.texts == ["the beginning"]
    assert (summary.num_encoded, summary.num_reused, summary.num_shards_made) == (1, 4, 1)
    after = embedding_of_captions(variant(data))
    for caption_id, text in texts_of_captions(data).items():
        same = [before[other] for other, old_text in texts_before.items() if old_text == text]
        assert all(np.array_equal(after[caption_id], row) for row in same)
    assert "the beginning" in samples(variant(data))["short"]["json"]["texts"]


def test_a_renamed_video_keeps_its_embeddings(data: Path) -> None:
    encode(data)
    renamed = {f"{name}-again": texts for name, texts in CAPTIONS.items()}
    write_captions(data, renamed, splits={f"{name}-again": split for name, split in SPLITS.items()})
    engine = Encoding()
    summary = encode(data, engine=engine)
    assert not engine.texts and (summary.num_encoded, summary.num_reused) == (0, 5)
    assert sorted(samples(variant(data))) == ["long-again", "other-again", "short-again"]


def test_a_new_video_goes_into_a_new_shard_and_moves_no_other(data: Path) -> None:
    encode(data)
    before = contents(variant(data))
    write_captions(data, {"first": ["a dog runs", "new"], **CAPTIONS}, splits=SPLITS)
    assert states(data) == [ShardState.CURRENT, ShardState.CURRENT, ShardState.NEW]
    engine = Encoding()
    encode(data, engine=engine)
    assert engine.texts == ["new"]
    after = contents(variant(data))
    lists = {"contents.json", CHUNKS_FILE, COMMIT_TABLE_FILE, *(name for name in before if "shards" in name)}
    assert {name: after[name] for name in before.keys() - lists} == {
        name: before[name] for name in before.keys() - lists
    }


def test_a_video_that_goes_takes_its_shard_with_it(data: Path) -> None:
    encode(data)
    write_captions(data, {key: value for key, value in CAPTIONS.items() if key != "other"}, splits=SPLITS)
    assert states(data) == [ShardState.CURRENT, ShardState.ORPHANED]
    encode(data)
    assert list(read_commits(variant(data)).commits) == [0]
    assert list(samples(variant(data))) == ["long", "short"]


def test_a_run_cut_off_encodes_the_rest_and_ends_with_the_same_bytes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipmill.prep.text.bank.MAX_BLOCK_TEXTS", 100)
    captions = {"v": [f"text number {n}" for n in range(245)], **CAPTIONS}
    write_captions(data, captions, splits=SPLITS)
    other = tmp_path / "other"
    shutil.copytree(data, other)
    encode(other)
    first, second = Encoding(max_blocks=2), Encoding()
    with pytest.raises(KeyboardInterrupt):
        encode(data, engine=first)
    summary = encode(data, engine=second)
    assert len(first.texts) == 200 and not set(first.texts) & set(second.texts)
    assert (summary.num_reused, summary.num_encoded) == (200, 50)
    assert contents(data / "text") == contents(other / "text")


def test_a_damaged_block_of_the_bank_is_made_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipmill.prep.text.bank.MAX_BLOCK_TEXTS", 100)
    write_captions(data, {"v": [f"text number {n}" for n in range(150)]})
    with pytest.raises(KeyboardInterrupt):
        encode(data, engine=Encoding(max_blocks=1))
    (block,) = (data / "text").glob("*/bank/*.arrow")
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 1
    block.write_bytes(content)
    (block.parent / ".tmp-0123456789ab-x.arrow").write_bytes(b"half")
    engine = Encoding()
    encode(data, engine=engine)
    assert len(engine.texts) == 150
    assert not block.parent.exists()


def test_a_flipped_byte_is_not_taken_over(data: Path) -> None:
    encode(data)
    rows = embedding_of_captions(variant(data))
    shard = Variant.open(data, column="text").shards()[0]
    offset, _ = shard.member_range(0, "text.npy")  # the sample of the video "long"
    with shard.tar_path.open("r+b") as tar:
        tar.seek(offset + BLOCK_BYTES + 3)
        (byte,) = tar.read(1)
        tar.seek(-1, 1)
        tar.write(bytes([byte ^ 0x40]))
    assert [problem.code for problem in verify_shard(variant(data), shard.commit)], "verify must find the damage"
    write_captions(data, {**CAPTIONS, "short": ["a cat", "the beginning"]}, splits=SPLITS)
    engine = Encoding()
    encode(data, engine=engine)
    assert sorted(engine.texts) == ["", "the beginning"]  # the other texts of "long" are in intact samples
    after = embedding_of_captions(variant(data))
    texts = texts_of_captions(data)
    assert all(np.array_equal(after[n], rows[n]) for n in rows if n in texts)


def test_another_tower_is_another_variant_that_takes_over_when_it_is_whole(
    data: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(data)
    clip = f"{checkpoints.model}:{checkpoints.safetensors}"
    monkeypatch.setattr("clipmill.prep.text.bank.MAX_BLOCK_TEXTS", 2)
    with pytest.raises(KeyboardInterrupt):
        encode(data, clip, engine=Encoding(max_blocks=1))
    assert variant(data).name.startswith("tiny-")
    encode(data, clip)
    assert variant(data).name.startswith(f"{checkpoints.model}-{checkpoints.model}-safetensors-")
    # The same weights at a different path have the same recipe.
    moved = checkpoints.folder / "moved" / checkpoints.safetensors.name
    moved.parent.mkdir(exist_ok=True)
    shutil.copy(checkpoints.safetensors, moved)
    engine = Encoding()
    encode(data, f"{checkpoints.model}:{moved}", engine=engine)
    assert engine.texts == []


def test_captions_over_many_row_groups_and_shards_find_their_rows(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipmill.manifests.caption_table.ROWS_PER_GROUP", 7)
    monkeypatch.setattr("clipmill.prep.text.plan.MAX_SHARD_CAPTIONS", 20)
    captions = {f"v{n:02d}": [f"text {(n * step) % 13}" for step in range(n % 6)] for n in range(30)}
    write_captions(data, captions)
    engine = Encoding()
    summary = encode(data, engine=engine)
    assert sorted(engine.texts) == sorted({text for texts in captions.values() for text in texts})
    assert summary.num_shards > 3
    samples_read = samples(variant(data))
    assert list(samples_read) == [name for name, texts in captions.items() if texts]
    stored, texts = embedding_of_captions(variant(data)), texts_of_captions(data)
    assert stored.keys() == texts.keys()
    row_of: dict[str, np.ndarray] = {}
    assert all(np.array_equal(row_of.setdefault(texts[n], row), row) for n, row in stored.items())


def test_the_layout_limits_videos_and_captions_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    from clipmill.prep.core.tables import LAYOUT
    from clipmill.prep.text.plan import extend_text_layout

    monkeypatch.setattr("clipmill.prep.text.plan.MAX_SHARD_VIDEOS", 2)
    monkeypatch.setattr("clipmill.prep.text.plan.MAX_SHARD_CAPTIONS", 10)
    ids, splits = pa.array(list("abcdefg")), pa.array(["train", "train", "val", "train", "train", "train", "train"])
    numbers = np.array([1, 1, 1, 0, 99, 4, 6])
    layout = extend_text_layout(LAYOUT.empty_table(), video_ids=ids, splits=splits, num_captions=numbers)
    placed = dict(zip(layout["video_id"].to_pylist(), layout["shard_id"].to_pylist(), strict=True))
    assert placed == {"a": 0, "b": 0, "e": 1, "f": 2, "g": 2, "c": 3}
    again = extend_text_layout(layout, video_ids=ids, splits=splits, num_captions=np.array([1, 1, 1, 5, 99, 4, 6]))
    assert again.slice(0, len(layout)).equals(layout)
    assert again.slice(len(layout)).to_pylist() == [{"shard_id": 4, "split": "train", "video_id": "d", "span_index": 0}]
