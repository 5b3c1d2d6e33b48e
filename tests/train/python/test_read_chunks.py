"""`read_chunks`: whole chunks, decoded, in order."""

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
    found = list(chunks)
    assert len(chunks) == len(found) == 3 and not chunks.failures
    assert [one.key for one in found] == ["d_000000000", "d_000002000", "d_000004000"]
    assert [(one.video_id, one.begin_s, one.end_s) for one in found] == [("d", 0, 2), ("d", 2, 4), ("d", 4, 5.5)]
    assert found[0].frames.shape == (20, 64, 64, 3) and found[0].frames.dtype == np.uint8
    read = [read_frame_number(frame[..., 1]) for one in found for frame in one.frames]
    assert read == list(range(55))
    np.testing.assert_allclose(np.concatenate([one.time_s for one in found]), np.arange(55) / 10)


def test_every_nth_frame_is_decoded(data_dir: Path) -> None:
    whole, some = read_chunks(data_dir, split="val"), read_chunks(data_dir, split="val", every=7)
    for one, other in zip(whole, some, strict=True):
        assert np.array_equal(one.frames[::7], other.frames) and np.array_equal(one.time_s[::7], other.time_s)


def test_a_damaged_chunk_is_named_and_the_others_are_read(data_dir: Path, tmp_path: Path) -> None:
    own = tmp_path / "data"
    shutil.copytree(data_dir, own)
    [tar] = (own / "video" / VARIANT).glob("000001*.tar")
    content = bytearray(tar.read_bytes())
    begin = content.find(b"mdat", content.find(b"d_000002000.mp4"))
    content[begin + 4 : begin + 1024] = bytes(1020)
    tar.write_bytes(content)
    chunks = read_chunks(own, split="val")
    assert [one.key for one in chunks] == ["d_000000000", "d_000004000"]
    assert [(one.key, one.reason) for one in chunks.failures] == [("d_000002000", "checksum")]
    with pytest.raises(FailedWork, match="1 failed, more than max_failures=0; the last one: d_000002000"):
        list(read_chunks(own, split="val", max_failures=0))


def test_another_split_is_refused(data_dir: Path) -> None:
    with pytest.raises(UserError, match="has no videos of split 'test'"):
        read_chunks(data_dir, split="test")
    with pytest.raises(UserError, match="every is 0"):
        read_chunks(data_dir, every=0)
    with pytest.raises(UserError, match="every is '2'"):
        read_chunks(data_dir, every="2")  # type: ignore[arg-type]
