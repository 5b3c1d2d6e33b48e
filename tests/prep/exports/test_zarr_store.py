"""Tests of `prep export zarr`: the three arrays of the document hold the contents of the columns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from clipmill.manifests.publish import publish_json
from clipmill.manifests.store import read_captions
from clipmill.shards.commits import Commit, Failure, write_commit
from clipmill.shards.dataset import set_current_variant
from tests.prep.running import prep_here
from tests.train.latents.written import Chunk, Written, write_all, write_latents
from tests.train.tiny_data import Caption

SHARDS = [
    [Chunk("a", 0, 60), Chunk("a", 15000, 28), Chunk("b", 0, 40)],
    [Chunk("c", 15000, 20), Chunk("c", 0, 60), Chunk("d", 0, 60), Chunk("e", 0, 60)],
]
CAPTIONS = [
    Caption("a", 6.0, 7.0, "later"),
    Caption("a", 0.0, 5.0, "the first of a"),
    Caption("b", 0.0, 5.0, "b"),
    Caption("c", 0.0, 5.0, "has no embedding"),
    Caption("c", 5.0, 6.0, "the first of c that has one"),
    Caption("d", 0.0, 5.0, "d has no embedding"),
    Caption("e", 0.0, 5.0, "of another split"),
]
WITHOUT = frozenset({3, 5})
SPLITS = {"a": "train", "b": "train", "c": "train", "d": "train", "e": "val"}


@pytest.fixture
def written_data(tmp_path: Path) -> Written:
    return write_all(tmp_path / "data", SHARDS, CAPTIONS, without=WITHOUT, splits=SPLITS)


def open_store(store_dir: Path) -> Any:
    """Open the store with zarr itself."""
    return zarr.open_group(store_dir, mode="r")


def expected_arrays(written: Written) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the expected arrays, computed from the written data."""
    chunks = {"a": ("a_000000000", "a_000015000"), "b": ("b_000000000",), "c": ("c_000000000", "c_000015000")}
    frames, of_video = [], []
    for number, keys in enumerate(chunks.values()):
        for key in keys:
            array = written.latents[key]
            full = array[: len(array) // 20 * 20].reshape(-1, 20, *array.shape[1:])
            frames.append(full)
            of_video += [number] * len(full)
    first = {"a": "the first of a", "b": "b", "c": "the first of c that has one"}
    ids = {(row["video_id"], row["text"]): row["caption_id"] for row in read_captions(written.data_dir).to_pylist()}
    text = np.stack([written.text[ids[video, caption]] for video, caption in first.items()])
    return np.concatenate(frames), text, np.array(of_video)


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_store_has_the_documents_arrays_with_the_values_of_the_columns(
    written_data: Written, tmp_path: Path, chunk: int
) -> None:
    store_dir = tmp_path / "segments.zarr"
    ran = prep_here("export", "zarr", store_dir, "--data", written_data.data_dir, "--chunk", chunk, "--level", 3)
    frames, text, of_video = expected_arrays(written_data)
    store = open_store(store_dir)
    assert set(store.array_keys()) == {"base_frames", "clip_emb", "segment_to_video"}
    assert np.array_equal(store["base_frames"][:].view(np.uint16), frames)
    assert np.array_equal(store["clip_emb"][:].view(np.uint16), text)
    assert np.array_equal(store["segment_to_video"][:], of_video) and store["segment_to_video"].dtype == np.int64
    assert store["base_frames"].chunks == (chunk, *frames.shape[1:])
    (blosc,) = store["base_frames"].compressors
    assert (blosc.cname, blosc.clevel) == ("zstd", 3)
    assert f"exported  {len(frames)} segments" in ran.stdout
    assert "left out  3: segments of videos without an embedded caption" in ran.stdout
    assert "left out  1: ends of chunks" in ran.stdout


def test_compressed_latents_give_the_same_store(written_data: Written, tmp_path: Path) -> None:
    frames = expected_arrays(written_data)[0]
    other = write_all(tmp_path / "packed", [], CAPTIONS, without=WITHOUT, splits=SPLITS)
    write_latents(other, SHARDS, is_compressed=True)
    prep_here("export", "zarr", tmp_path / "packed.zarr", "--data", other.data_dir)
    frames_read = open_store(tmp_path / "packed.zarr")["base_frames"][:]
    assert np.array_equal(frames_read.view(np.uint16), frames)


def test_a_rerun_does_nothing_until_flags_or_columns_change(written_data: Written, tmp_path: Path) -> None:
    store_dir = tmp_path / "out" / "segments.zarr"
    line = ("export", "zarr", store_dir, "--data", written_data.data_dir)
    assert prep_here(*line, "--json").summary["num_written"] == 10
    inode = store_dir.stat().st_ino
    assert "nothing to do" in prep_here(*line).stdout and store_dir.stat().st_ino == inode
    assert prep_here(*line, "--chunk", 2, "--json").summary["num_written"] == 10
    assert open_store(store_dir)["base_frames"].chunks[0] == 2
    assert [path.name for path in store_dir.parent.iterdir()] == [store_dir.name]


def test_a_lost_chunk_of_a_store_does_not_read_as_latents_of_zeros(written_data: Written, tmp_path: Path) -> None:
    prep_here("export", "zarr", tmp_path / "segments.zarr", "--data", written_data.data_dir)
    (tmp_path / "segments.zarr" / "base_frames" / "1.0.0.0.0").unlink()
    frames = open_store(tmp_path / "segments.zarr")["base_frames"]
    assert np.isnan(frames[1]).all() and np.isfinite(frames[0]).all()


@pytest.mark.parametrize("lost", ["base_frames/1.0.0.0.0", "clip_emb/0.0", "segment_to_video/0", "clip_emb/.zarray"])
def test_a_rerun_replaces_a_store_that_has_lost_a_file(written_data: Written, tmp_path: Path, lost: str) -> None:
    store_dir = tmp_path / "segments.zarr"
    line = ("export", "zarr", store_dir, "--data", written_data.data_dir)
    prep_here(*line)
    (store_dir / lost).unlink()
    assert prep_here(*line, "--json").summary["num_written"] == 10
    assert np.array_equal(open_store(store_dir)["base_frames"][:].view(np.uint16), expected_arrays(written_data)[0])
    assert (store_dir / lost).exists() and "nothing to do" in prep_here(*line).stdout


def test_segments_with_seconds_of_another_split_are_left_out(tmp_path: Path) -> None:
    captions = [Caption("b", 0.0, 5.0, "b"), Caption("b", 6.0, 10.0, "held out", labels={"split": "val"})]
    written = write_all(tmp_path / "data", [[Chunk("b", 0, 60)]], captions, splits={"b": "train"})
    array = written.latents["b_000000000"].reshape(3, 20, *written.latents["b_000000000"].shape[1:])
    for split, segments, row in (("train", [0, 2], 0), ("val", [], 1)):
        store_dir = tmp_path / f"{split}.zarr"
        line = ("export", "zarr", store_dir, "--data", written.data_dir, "--split", split)
        if not segments:  # the second segment starts within a second of train
            assert "no 5s segment of split 'val'" in prep_here(*line, status=2).error
            prep_here(*line, "--segment", "1s")
            array, segments = written.latents["b_000000000"].reshape(15, 4, *array.shape[2:]), [6, 7, 8, 9]
        else:
            assert "left out  1: segments with seconds of other splits" in prep_here(*line).stdout
        store = open_store(store_dir)
        assert np.array_equal(store["base_frames"][:].view(np.uint16), array[segments])
        assert np.array_equal(store["clip_emb"][:].view(np.uint16)[0], written.text[row])


def test_a_store_of_one_video_is_complete(tmp_path: Path) -> None:
    of_one = write_all(tmp_path / "data", [[Chunk("b", 0, 40)]], [Caption("b", 0.0, 5.0, "b")], splits={"b": "train"})
    line = ("export", "zarr", tmp_path / "segments.zarr", "--data", of_one.data_dir)
    prep_here(*line)
    assert not open_store(tmp_path / "segments.zarr")["segment_to_video"][:].any()
    assert "nothing to do" in prep_here(*line).stdout


def test_what_a_killed_run_left_is_removed_and_a_failed_one_leaves_the_old_store(
    written_data: Written, tmp_path: Path
) -> None:
    store_dir = tmp_path / "segments.zarr"
    left = tmp_path / ".tmp-0123456789ab-segments.zarr"
    left.mkdir()
    line = ("export", "zarr", store_dir, "--data", written_data.data_dir)
    prep_here(*line)
    assert not left.exists()
    tar = next(written_data.latents_dir.glob("000001-*.tar"))
    content = bytearray(tar.read_bytes())
    content[1600] ^= 1
    tar.write_bytes(content)
    assert "does not match its checksum" in prep_here(*line, "--level", 1, status=2).error
    tar.write_bytes(content[:1600])
    assert f"{tar}: truncated" in prep_here(*line, "--level", 1, status=2).error
    tar.unlink()
    ran = prep_here(*line, "--level", 1, status=2)
    assert ran.error == f"{tar} is missing"
    assert "nothing to do" in prep_here(*line).stdout
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_folder_of_someone_else_is_not_replaced(written_data: Written, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    ran = prep_here("export", "zarr", tmp_path / "mine", "--data", written_data.data_dir, status=2)
    assert "was not written by `prep export zarr`" in ran.error
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--chunk", "0"), "--chunk is 0"),
        (("--level", "10"), "--level is 10"),
        (("--segment", "5.1s"), "--segment 5.1s is 20.4 latent frames"),
        (("--split", "tset"), "no latents of split 'tset'"),
    ],
)
def test_bad_requests_are_refused(written_data: Written, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    ran = prep_here("export", "zarr", tmp_path / "out", "--data", written_data.data_dir, *flags, status=2)
    assert message in ran.error and not (tmp_path / "out").exists()


def test_columns_without_samples_are_refused(tmp_path: Path) -> None:
    written = write_all(tmp_path / "data", SHARDS, CAPTIONS)
    empty = written.latents_dir.parent / "empty-00000000"
    (empty / "commits").mkdir(parents=True)
    write_commit(empty, Commit("latents", 0, "train", "ab" * 32, None, (Failure("a", "a_000000000", "x", "x"),)))
    publish_json(empty / "recipe.json", {"schema": 1, "column": "latents", "crop": "exact", "segment": "5s"})
    set_current_variant(written.data_dir, "latents", empty.name)
    ran = prep_here("export", "zarr", tmp_path / "out", "--data", written.data_dir, status=2)
    assert "empty-00000000 is empty" in ran.error
