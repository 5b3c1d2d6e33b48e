"""Tests of merged tables of video, latents and text: their contents, their validity, and reads without them."""

import shutil
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.chunk_table import chunk_table_problem, missing_parts, read_chunk_rows, update_chunk_table
from clipmill.shards.commit_table import (
    Contents,
    committed_tars,
    open_commits,
    open_table_commits,
    read_commits,
    write_contents,
)
from clipmill.shards.commits import commit_path
from clipmill.shards.format import RECIPE_FILE
from clipmill.shards.lists import finish_run
from clipmill.shards.merged_table import CHUNKS_FILE
from clipmill.shards.reader import Variant
from tests.train.latents.written import Chunk, Written, write_latents, write_text
from tests.train.tiny_data import VARIANT, Caption, encode_chunk, video_sample, write_captions, write_shard

COLUMNS = ("video", "latents", "text")


def make(data: Path) -> Path:
    """Make a data folder with two shards of each column, in two splits, and without merged tables."""
    starts_ms = (0, 1000)
    splits = {"first": "train", "other": "val"}
    for shard_id, (name, split) in enumerate(splits.items()):
        payload = encode_chunk(0, 30, fps=30)
        samples = [video_sample(name, start_ms, payload, fps=30) for start_ms in starts_ms]
        write_shard(data, shard_id, samples, split=split)
    chunks = [[Chunk(name, start_ms, 30, fps=Fraction(30)) for start_ms in starts_ms] for name in splits]
    captions = [Caption(name, begin_s, begin_s + 1, f"{name} {begin_s}") for name in splits for begin_s in (0, 1)]
    write_captions(data, splits, captions)
    (data / "video" / VARIANT / RECIPE_FILE).write_text("{}")
    written = Written(data)
    write_latents(written, chunks)
    write_text(written, captions, videos_per_shard=1)
    return data


@pytest.fixture(scope="session")
def made_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def data(made_data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_data, tmp_path / "data"))


def merge_table(data: Path, column: str = "video") -> pa.Table:
    variant = Variant.open(data, column=column)
    update_chunk_table(variant, column=column)
    assert not missing_parts(variant)
    return read_chunk_rows(variant).table


@pytest.mark.parametrize("column", COLUMNS)
def test_a_table_has_the_values_of_all_indexes(data: Path, column: str) -> None:
    variant = Variant.open(data, column=column)
    assert missing_parts(variant) == [CHUNKS_FILE]
    of_indexes = read_chunk_rows(variant).table.to_pylist()
    assert update_chunk_table(variant, column=column)
    assert not update_chunk_table(variant, column=column), "the table is already up to date"
    table = merge_table(data, column)
    assert table.to_pylist() == of_indexes
    member = {"video": "mp4", "latents": "latents.npy", "text": "text.npy"}[column]
    rows_by_place = {(row["shard"], row["row"]): row for row in table.to_pylist()}
    assert len(rows_by_place) == len(table) == variant.num_samples
    for shard in variant.shards():
        for number, row in enumerate(shard.index.to_pylist()):
            fields = rows_by_place[shard.shard_id, number]
            for name in ("offset", "size", "crc32"):
                assert fields[name] == row[f"{member}_{name}"]
            rest = fields.keys() - {"shard", "row", "offset", "size", "crc32"}
            assert {name: fields[name] for name in rest} == {name: row[name] for name in rest}
    assert list(rows_by_place) == sorted(rows_by_place)


def test_a_table_of_other_commits_is_not_used(data: Path) -> None:
    """Such a table remains if a run was killed before it could write the table, or only some of its parts."""
    before = merge_table(data)
    variant = Variant.open(data)
    gone = variant.shards()[0]
    commit_path(variant.directory, gone.shard_id).unlink()
    write_contents(variant.directory, Contents(frozenset(set(variant.commits) - {gone.shard_id}), {}))
    fewer = Variant.open(data)
    assert missing_parts(fewer) and chunk_table_problem(fewer) is None
    assert len(merge_table(data)) == len(before) - gone.num_samples


def test_only_new_indexes_are_read(data: Path) -> None:
    everything = merge_table(data).to_pylist()
    variant = Variant.open(data)
    first, second = variant.shards()
    record = commit_path(variant.directory, second.shard_id)
    content = record.read_bytes()
    record.unlink()
    write_contents(variant.directory, Contents(frozenset({first.shard_id}), {}))
    assert {row["shard"] for row in merge_table(data).to_pylist()} == {first.shard_id}
    record.write_bytes(content)
    first.index_path.unlink()  # the table has the rows of this index
    assert merge_table(data).to_pylist() == everything
    (variant.directory / CHUNKS_FILE).unlink()
    with pytest.raises(UserError, match=r"chunks\.arrow was not written"):
        merge_table(data)


def test_a_change_writes_only_the_parts_of_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipmill.shards.format.SHARDS_PER_FOLDER", 1)  # one shard per part
    data = make(tmp_path)
    everything = merge_table(data)
    variant = Variant.open(data)
    first = variant.shards()[0]
    parts = [variant.directory / name for name in (CHUNKS_FILE, f"001/{CHUNKS_FILE}")]
    whole, other = (path.read_bytes() for path in parts)
    kept = parts[0].stat()
    assert read_chunk_rows(variant).table["shard"].num_chunks == 2
    record = commit_path(variant.directory, 1)
    content = record.read_bytes()
    record.unlink()
    write_contents(variant.directory, Contents(frozenset({first.shard_id}), {}))
    assert {row["shard"] for row in merge_table(data).to_pylist()} == {first.shard_id}
    assert not parts[1].exists(), "the shards of this part are gone"
    record.write_bytes(content)
    first.index_path.unlink()
    assert missing_parts(variant) == [f"001/{CHUNKS_FILE}"]
    assert read_chunk_rows(variant).table.to_pylist() == everything.to_pylist(), (
        "one shard is read from the table, one from its index"
    )
    assert merge_table(data).to_pylist() == everything.to_pylist()
    assert [path.read_bytes() for path in parts] == [whole, other]
    assert (parts[0].stat().st_ino, parts[0].stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns), (
        "the part must not be written again"
    )


def test_the_bytes_of_a_part_do_not_depend_on_how_it_was_made(data: Path) -> None:
    merge_table(data)
    variant = Variant.open(data)
    path = variant.directory / CHUNKS_FILE
    whole = path.read_bytes()
    first, second = variant.shards()
    record = commit_path(variant.directory, first.shard_id)
    content = record.read_bytes()
    record.unlink()
    write_contents(variant.directory, Contents(frozenset({second.shard_id}), {}))
    merge_table(data)
    record.write_bytes(content)  # the rows of this record precede the rows in the table
    merge_table(data)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["flipped", "short", "empty"])
def test_a_damaged_table_is_found_and_replaced(data: Path, kind: str) -> None:
    whole = merge_table(data).to_pylist()
    variant = Variant.open(data)
    path = variant.directory / CHUNKS_FILE
    content = bytearray(path.read_bytes())
    at = content.index((30).to_bytes(4, "little") * 2)  # num_frames of the first chunks
    content[at] ^= 4
    path.write_bytes({"flipped": bytes(content), "short": bytes(content[:-100]), "empty": b""}[kind])
    assert "chunks.arrow is damaged" in str(chunk_table_problem(variant))
    assert merge_table(data).to_pylist() == whole
    assert chunk_table_problem(variant) is None


def test_an_index_that_is_not_the_committed_one_makes_no_table(data: Path) -> None:
    variant = Variant.open(data)
    path = variant.shards()[1].index_path
    content = bytearray(path.read_bytes())
    content[content.index((30).to_bytes(4, "little"))] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match="differs from the commit"):
        update_chunk_table(variant, column="video")
    assert not (variant.directory / CHUNKS_FILE).exists()


def test_commits_of_a_table_are_those_of_the_records(data: Path) -> None:
    directory = Variant.open(data).directory
    records = read_commits(directory).commits
    assert open_table_commits(directory) is None
    tars, (of_records, _) = list(committed_tars(directory)), open_commits(directory)
    finish_run(directory, dropped_ids=(), planned_ids=records)
    commits = Variant.open(data).commits
    assert open_table_commits(directory) is not None and dict(commits) == records and dict(commits.items()) == records
    assert commits.digest == of_records.digest
    assert list(committed_tars(directory)) == tars
    assert [shard.commit for shard in Variant.open(data).shards()] == list(records.values())
    with pytest.raises(KeyError):
        commits[99]
    commit_path(directory, 0).touch()
    commit_path(directory, 7).write_text("{}")  # a record that is not in the table
    assert open_table_commits(directory) is None and Variant.open(data).damaged
