"""Bytes that change after they are written: failures are reported, counted and budgeted, and nothing replaces them."""

import faulthandler
import os
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from clipmill.manifests import mapped_files
from clipmill.manifests.keys import split_key
from clipmill.shards.reader import Variant
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples
from tests.forked import run_forked
from tests.train.latents.querying import segments
from tests.train.latents.written import Caption, Chunk, Written, write_all


def flip(data_dir: Path, *, column: str, key: str) -> None:
    """Change one byte in the array of a sample."""
    shard, row = Variant.open(data_dir, column=column).find(key)
    offset, size = shard.member_range(row, f"{column}.npy")
    with shard.tar_path.open("r+b") as file:
        file.seek(offset + size - 1)
        byte = file.read(1)[0]
        file.seek(offset + size - 1)
        file.write(bytes([byte ^ 0x40]))


def loader(written: Written, **settings: Any) -> Samples[Any]:
    return open_latent_segments(segments(written.data_dir, split="train", **{"can_keep": True, "batch": 4, **settings}))


def positions(batches: list[LoadedBatch]) -> list[int]:
    return [place for loaded in batches if loaded.batch for place in loaded.batch["position"].tolist()]


@pytest.mark.parametrize("batch", [1, 4, 5])
def test_the_second_time_everything_comes_as_the_first_time(written_data: Written, batch: int) -> None:
    """By the second epoch, all bytes are known to be good. The last batch of an evaluation is smaller."""
    checked = loader(written_data, batch=batch)
    first, second = (list(checked.evaluation_batches()) for _ in range(2))
    assert [loaded.cursor for loaded in second] == [loaded.cursor for loaded in first]
    for first_batch, other in zip(first, second, strict=True):
        assert first_batch.batch.keys() == other.batch.keys()
        assert all((first_batch.batch[name] == other.batch[name]).all() for name in ("position", "latents", "text"))
        assert list(first_batch.batch["key"]) == list(other.batch["key"])
    assert positions(second) == list(range(len(checked)))


@pytest.mark.parametrize(("column", "damaged"), [("latents", "b_000000000"), ("text", "b")])
def test_a_flipped_byte_is_named_and_the_next_sample_takes_the_place(
    data_copy: Written, column: str, damaged: str
) -> None:
    flip(data_copy.data_dir, column=column, key=damaged)
    batches = list(islice(loader(data_copy).batches(), 15))
    failed = [failure for loaded in batches for failure in loaded.failed]
    assert failed and {(failure.key, failure.reason) for failure in failed} == {("b_000000000", "checksum")}
    assert all(f"in the {column} column" in failure.detail for failure in failed)
    shown = [key for loaded in batches for key in loaded.batch["key"]]
    assert len(shown) == 15 * 4 and not any(split_key(key)[0] == "b" for key in shown)
    seen = positions(batches) + [failure.position for failure in failed]
    assert sorted(seen) == list(range(batches[-1].cursor.position))


def test_tars_of_equal_size_that_changed_places_are_not_shown(tmp_path: Path) -> None:
    """The indexes of both tars, including every offset, differ only in the checksums."""
    chunks = [[Chunk("a", 0, 60)], [Chunk("b", 0, 60)]]
    swapped_data = write_all(tmp_path / "data", chunks, [Caption("a", 0, 15, "one"), Caption("b", 0, 15, "other")])
    first_tar, other = (shard.tar_path for shard in Variant.open(swapped_data.data_dir, column="latents").shards())
    swapped = first_tar.read_bytes(), other.read_bytes()
    assert len(swapped[0]) == len(swapped[1]) and swapped[0] != swapped[1]
    other.write_bytes(swapped[0])
    first_tar.write_bytes(swapped[1])
    (last,) = loader(swapped_data).evaluation_batches()
    assert not last.batch and {(failure.key, failure.reason) for failure in last.failed} == {
        ("a_000000000", "checksum"),
        ("b_000000000", "checksum"),
    }
    assert {str(first_tar), str(other)} == {
        failure.detail.partition("(")[2].partition(")")[0] for failure in last.failed
    }


def test_a_record_is_compared_at_its_first_visit_only(written_data: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []  # a list, because threads that increment a number may lose updates

    def count_checksum(content: memoryview) -> int:
        compared.append(len(content))
        return crc32(content)

    monkeypatch.setattr("clipmill.train.data.mapped_tars.zlib.crc32", count_checksum)
    running = loader(written_data)
    compared.clear()  # captions are checked when they are opened
    batches = running.batches()
    for loaded in batches:
        if loaded.cursor.position >= 2 * len(running):
            break
    chunks = {key for loaded in running.evaluation_batches() for key in loaded.batch["key"]}
    num_first = len(compared)
    # The chunks that are shown, and the text embeddings of their videos.
    assert num_first == len(chunks) + len({split_key(key)[0] for key in chunks})
    for loaded in batches:
        if loaded.cursor.position >= 5 * len(running):
            break
    list(running.evaluation_batches())
    assert len(compared) == num_first


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_tar_that_is_cut_short_after_it_was_opened_is_a_named_failure(data_copy: Written, is_mapped: bool) -> None:
    """Accessing its mapped pages would kill the process."""
    running, keys = loader(data_copy, captions="none"), {"a_000000000", "a_000015000", "a_000030000", "b_000000000"}
    if is_mapped:
        assert len(list(running.outcomes([0]))) == 1
        keys.remove("a_000000000")
    tar = Variant.open(data_copy.data_dir, column="latents").shards()[0].tar_path
    os.truncate(tar, 0)
    batches = list(running.evaluation_batches(begin=3 if is_mapped else 0))
    failed = {failure.key: failure for loaded in batches for failure in loaded.failed}
    assert set(failed) == keys
    assert {failure.reason for failure in failed.values()} == {"shard_unreadable"}
    assert all(str(tar) in failure.detail for failure in failed.values())
    assert {key for loaded in batches if loaded.batch for key in loaded.batch["key"]} == {"c_000015000", "e_000000000"}


def test_a_tar_that_is_cut_short_after_it_was_verified_ends_the_process_with_its_name(data_copy: Written) -> None:
    running = loader(data_copy, captions="none")
    tar = Variant.open(data_copy.data_dir, column="latents").shards()[0].tar_path

    def run() -> None:
        # pytest, or a test that ran after this process began to report unreadable files, may have enabled these.
        faulthandler.disable()
        mapped_files._previous_action = None
        list(running.evaluation_batches())
        os.truncate(tar, 0)
        list(running.evaluation_batches())

    status, stderr = run_forked(run)
    assert status == 1 and stderr.startswith(f"failed: {tar} became unreadable while in use"), (status, stderr)


def test_pictures_of_damaged_latents_are_not_shown(data_copy: Written) -> None:
    samples = open_latent_segments(segments(data_copy.data_dir, split="train", segment="5s", batch=2, seed=0))
    flip(data_copy.data_dir, column="latents", key=samples.key(0))
    assert samples.shown_frames(0, num_frames=2) == []
    intact = next(at for at in range(len(samples)) if samples.key(at) != samples.key(0))
    assert len(samples.shown_frames(intact, num_frames=2)) == 2
