"""Damaged or missing columns, and columns of different datasets: opening the set reports them and does not crash."""

import os
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.commits import write_commit
from clipmill.shards.reader import Variant
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.samples import Samples
from tests.train.latents.conftest import CAPTIONS, SHARDS, WITHOUT_EMBEDDING
from tests.train.latents.querying import segments
from tests.train.latents.written import Caption, Chunk, Written, write_all, write_latents
from tests.train.tiny_data import write_captions


def open_segments(data_dir: Path, **settings: Any) -> Samples[Any]:
    return open_latent_segments(segments(data_dir, split="train", **settings))


def tar(written: Written, column: str, shard_id: int = 0) -> Path:
    return Variant.open(written.data_dir, column=column).shards()[shard_id].tar_path


@pytest.mark.parametrize("column", ["latents", "text"])
@pytest.mark.parametrize("left", [0, 1, 4096, 10_239])
def test_a_tar_that_was_cut_short_is_named(data_copy: Written, column: str, left: int) -> None:
    path = tar(data_copy, column, shard_id=1)
    size = path.stat().st_size
    os.truncate(path, left)
    with pytest.raises(UserError) as caught:
        open_segments(data_copy.data_dir)
    assert f"{path} cannot be used: it has {left:,} bytes, but {size:,} were committed" in str(caught.value)
    assert f"prep {column}" in str(caught.value.hint)


def test_a_tar_that_grew_or_is_gone_is_named(data_copy: Written) -> None:
    path = tar(data_copy, "latents", shard_id=2)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match="were committed"):
        open_segments(data_copy.data_dir)
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        open_segments(data_copy.data_dir)


def test_an_index_of_another_tar_never_leads_beyond_the_end(data_copy: Written) -> None:
    first, other = Variant.open(data_copy.data_dir, column="latents").shards()[:2]
    shutil.copy(first.index_path, other.index_path)
    with pytest.raises(UserError, match="its content differs from the commit"):
        open_segments(data_copy.data_dir, captions="none")
    # The commit record has a matching checksum.
    assert first.commit.files is not None and other.commit.files is not None
    files = replace(other.commit.files, index_sha256=first.commit.files.index_sha256)
    write_commit(data_copy.latents_dir, replace(other.commit, files=files))
    with pytest.raises(UserError, match="it states an impossible position for the array of"):
        open_segments(data_copy.data_dir, captions="none")


def test_a_damaged_index_is_named(data_copy: Written) -> None:
    for column in ("latents", "text"):
        path = Variant.open(data_copy.data_dir, column=column).shards()[0].index_path
        content = path.read_bytes()
        path.write_bytes(content[:100])
        with pytest.raises(UserError, match=r"index\.arrow"):
            open_segments(data_copy.data_dir)
        path.write_bytes(content)
    open_segments(data_copy.data_dir)


def test_a_damaged_commit_is_named_before_its_segments_are_missed(data_copy: Written) -> None:
    (data_copy.latents_dir / "commits" / "000002.json").write_text("{")
    with pytest.raises(UserError, match=r"000002\.json"):
        open_segments(data_copy.data_dir)


def test_missing_columns_are_named_with_the_command_that_makes_them(data_copy: Written) -> None:
    shutil.rmtree(data_copy.data_dir / "text")
    with pytest.raises(UserError) as caught:
        open_segments(data_copy.data_dir)
    assert "text" in str(caught.value) and "prep text" in str(caught.value.hint)
    assert len(open_segments(data_copy.data_dir, captions="none")) > 0
    shutil.rmtree(data_copy.data_dir / "latents")
    with pytest.raises(UserError) as caught:
        open_segments(data_copy.data_dir, captions="none")
    assert "prep latents" in str(caught.value.hint)
    with pytest.raises(UserError, match="no data folder"):
        open_segments(data_copy.data_dir / "nothing")


@pytest.mark.parametrize(
    "other",
    [
        Chunk("e", 0, 60, (4, 4, 4)),
        Chunk("e", 0, 60, dtype="bfloat16"),
        Chunk("e", 0, 60, fps=Fraction(8)),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_latents_of_two_shapes_are_refused(tmp_path: Path, other: Chunk, together: bool) -> None:
    chunks = [Chunk("a", 0, 60)]
    shards = [[*chunks, other]] if together else [chunks, [other]]
    written = write_all(tmp_path / "data", shards, [Caption("a", 0, 9, "a"), Caption("e", 0, 9, "e")])
    with pytest.raises(UserError) as caught:
        open_segments(written.data_dir)
    message = str(caught.value)
    assert "2 x 4 x 4 float16 at 4 frames a second" in message
    assert "x".join(map(str, other.frame)) in message.replace(" ", "")
    assert other.dtype in message and f"at {other.fps} frames" in message and message.count(".tar") == 2


def test_latents_of_another_data_set_are_named(data_copy: Written) -> None:
    write_latents(data_copy, [[replace(chunk, video_id=f"other-{chunk.video_id}") for chunk in SHARDS[0]]])
    for shard_id in (1, 2):
        (data_copy.latents_dir / "commits" / f"{shard_id:06d}.json").unlink()
    with pytest.raises(UserError) as caught:
        open_segments(data_copy.data_dir, captions="none")
    assert "the manifest lists 'a', 'b', 'c'" in str(caught.value)
    assert "'other-a', 'other-b'" in str(caught.value)


def test_text_of_another_data_set_is_named(data_copy: Written, tmp_path: Path) -> None:
    captions = [replace(caption, video_id=f"other-{caption.video_id}") for caption in CAPTIONS]
    chunks = [replace(chunk, video_id=f"other-{chunk.video_id}") for chunk in SHARDS[0]]
    videos = {caption.video_id: "train" for caption in captions}
    other = write_all(tmp_path / "other", [chunks], captions, splits=videos)
    shutil.rmtree(data_copy.text_dir)
    shutil.copytree(other.text_dir, data_copy.text_dir)
    with pytest.raises(UserError) as caught:
        open_segments(data_copy.data_dir)
    assert "the manifest lists 'a', 'b', 'c'" in str(caught.value) and "'other-a'" in str(caught.value)


def test_text_whose_captions_are_of_other_videos_is_named(data_copy: Written, tmp_path: Path) -> None:
    # The same ids are in a different order, as in a manifest that is built again in a different folder.
    other = write_all(tmp_path / "other", SHARDS, CAPTIONS[::-1], without=WITHOUT_EMBEDDING)
    shutil.rmtree(data_copy.text_dir)
    shutil.copytree(other.text_dir, data_copy.text_dir)
    with pytest.raises(UserError, match="caption 0 belongs to video 'a' in the manifest, but to video 'e' in"):
        open_segments(data_copy.data_dir)


def test_only_videos_of_the_split_are_shown(tmp_path: Path) -> None:
    splits = {"a": "train", "b": "val"}
    chunks = [Chunk("a", 0, 60), Chunk("b", 0, 40)]
    captions = [Caption("a", 0, 9, "a"), Caption("b", 0, 9, "b")]
    written = write_all(tmp_path / "data", [chunks], captions, splits=splits)
    for split, key in (("train", "a_000000000"), ("val", "b_000000000")):
        loader = open_latent_segments(segments(written.data_dir, split=split))
        assert {key for loaded in loader.evaluation_batches() for key in loaded.batch["key"]} == {key}
    with pytest.raises(UserError, match="no videos of split 'test'"):
        open_latent_segments(segments(written.data_dir, split="test"))


def test_a_split_without_captions_says_what_there_is(data_copy: Written) -> None:
    write_captions(data_copy.data_dir, dict.fromkeys("abcde", "train"), [])
    with pytest.raises(UserError, match="no segment of split 'train' is usable"):
        open_segments(data_copy.data_dir)
    assert len(open_segments(data_copy.data_dir, captions="none")) > 0


def test_chunks_of_videos_that_left_the_manifest_are_counted(data_copy: Written) -> None:
    captions = [caption for caption in CAPTIONS if caption.video_id != "c"]
    write_captions(data_copy.data_dir, dict.fromkeys("abde", "train"), captions)
    loader = open_segments(data_copy.data_dir)
    assert "1 chunk of videos that are not in the manifest left out" in loader.describe()
    shown = {key for loaded in loader.evaluation_batches() for key in loaded.batch["key"]}
    assert shown and "c_000015000" not in shown
