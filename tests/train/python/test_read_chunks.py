"""`read_chunks`: complete chunks, decoded, in order."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from clipmill import read_chunks
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.prep.synthetic import read_frame_number
from tests.train.tiny_data import VARIANT


def test_chunks_come_in_order_with_the_frames_that_are_stored(data_dir: Path) -> None:
    chunks = read_chunks(data_dir, split="val")
    chunks_read = list(chunks)
    assert len(chunks) == len(chunks_read) == 3 and not chunks.failures
    assert [chunk.key for chunk in chunks_read] == ["d_000000000", "d_000002000", "d_000004000"]
    assert [(chunk.video_id, chunk.begin_s, chunk.end_s) for chunk in chunks_read] == [
        ("d", 0, 2),
        ("d", 2, 4),
        ("d", 4, 5.5),
    ]
    assert chunks_read[0].frames.shape == (20, 64, 64, 3) and chunks_read[0].frames.dtype == np.uint8
    read = [read_frame_number(frame[..., 1]) for chunk in chunks_read for frame in chunk.frames]
    assert read == list(range(55))
    np.testing.assert_allclose(np.concatenate([chunk.time_s for chunk in chunks_read]), np.arange(55) / 10)


def test_every_nth_frame_is_decoded(data_dir: Path) -> None:
    whole, some = read_chunks(data_dir, split="val"), read_chunks(data_dir, split="val", every=7)
    for chunk, other in zip(whole, some, strict=True):
        assert np.array_equal(chunk.frames[::7], other.frames) and np.array_equal(chunk.time_s[::7], other.time_s)


def test_a_damaged_chunk_is_named_and_the_others_are_read(data_dir: Path, tmp_path: Path) -> None:
    data_copy = tmp_path / "data"
    shutil.copytree(data_dir, data_copy)
    [tar] = (data_copy / "video" / VARIANT).glob("000001*.tar")
    content = bytearray(tar.read_bytes())
    begin = content.find(b"mdat", content.find(b"d_000002000.mp4"))
    content[begin + 4 : begin + 1024] = bytes(1020)
    tar.write_bytes(content)
    chunks = read_chunks(data_copy, split="val")
    assert [chunk.key for chunk in chunks] == ["d_000000000", "d_000004000"]
    assert [(failure.key, failure.reason) for failure in chunks.failures] == [("d_000002000", "checksum")]
    with pytest.raises(FailedWork, match="1 failure, more than max_failures=0; the last one: d_000002000"):
        list(read_chunks(data_copy, split="val", max_failures=0))


def test_another_split_is_refused(data_dir: Path) -> None:
    with pytest.raises(UserError, match="has no videos of split 'test'"):
        read_chunks(data_dir, split="test")
    with pytest.raises(UserError, match="every is 0"):
        read_chunks(data_dir, every=0)
    with pytest.raises(UserError, match="every is '2'"):
        read_chunks(data_dir, every="2")  # type: ignore[arg-type]
