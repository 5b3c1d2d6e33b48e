"""What a second run makes again: what changed, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clipmill.prep.latents.sample import check_latents
from clipmill.shards.commits import commit_path, read_commits
from clipmill.shards.dataset import current_variant
from clipmill.shards.lists import finish_run
from clipmill.shards.npy import compress_frame, npy_bytes
from clipmill.shards.reader import Variant
from tests.prep.latents.conftest import make
from tests.prep.running import Ran, contents, identities
from tests.prep.sets import LEN, ShardSet, flip, rerun

Prep = Callable[..., Ran]
TINY = ("--vae", "tiny", "--size", "64")


def test_a_second_run_touches_no_file(prep: Prep, shard_set: ShardSet) -> None:
    first = make(shard_set.data)
    assert (first.num_shards, first.num_chunks, first.num_encoded, first.failures) == (2, 5, 5, [])
    before = identities(shard_set.data)
    assert make(shard_set.data).num_shards_made == 0
    ran = prep("latents", *TINY, "--data", shard_set.data, "--engine", "processes")
    assert "all shards are up to date" in ran.stdout
    assert identities(shard_set.data) == before
    assert "nothing to do" in prep("plan", "latents", *TINY, "--data", shard_set.data).stdout


def test_changed_captions_change_no_latents(prep: Prep, shard_set: ShardSet, made_set: Path, tmp_path: Path) -> None:
    make(shard_set.data)
    before = contents(shard_set.data / "latents")
    captions, tars = tmp_path / "captions.csv", {tar.name for tar in shard_set.variant.glob("*.tar")}
    captions.write_text("video,text,begin_s,end_s,split\nlong,other words,0,1,train\nshort,all,0,3,val\n")
    prep("manifest", "folder", made_set.parent / "videos", "--captions", captions, "--data", shard_set.data)
    rerun(prep, shard_set, *LEN)
    assert {commit.files.tar for commit in shard_set.commits.values() if commit.files} - tars
    assert make(shard_set.data).num_shards_made == 0
    assert contents(shard_set.data / "latents") == before


def test_latents_follow_the_video_column_while_it_grows(shard_set: ShardSet) -> None:
    late = commit_path(shard_set.variant, 1)
    aside = late.with_name("aside")
    late.rename(aside)
    first = make(shard_set.data)
    assert (first.num_shards_made, first.num_shards) == (1, 1)
    aside.rename(late)
    second = make(shard_set.data)
    assert (second.num_shards_made, second.num_shards, second.num_chunks) == (1, 2, 5)


def test_a_damaged_sample_is_made_again_and_its_neighbours_are_kept(prep: Prep, shard_set: ShardSet) -> None:
    make(shard_set.data)
    latents = Variant.open(shard_set.data, column="latents")
    whole = contents(latents.directory)
    shard = latents.shards()[0]
    flip(shard.tar_path, shard.index["latents.npy_offset"][1].as_py() + 1000)
    key = shard.index["key"][1].as_py()
    ran = prep("verify", "--column", "latents", "--data", shard_set.data, status=1)
    assert f"member_checksum  {key}" in ran.stdout and "prep latents --vae tiny --size 64" in ran.stderr
    summary = make(shard_set.data)
    assert (summary.num_shards_made, summary.num_encoded, summary.num_reused) == (1, 1, shard.num_samples - 1)
    assert contents(latents.directory) == whole
    prep("verify", "--deep", "--data", shard_set.data)


def test_compressed_latents_are_the_same_files_smaller_and_are_made_again_where_damaged(
    prep: Prep, shard_set: ShardSet
) -> None:
    make(shard_set.data)
    plain = Variant.open(shard_set.data, column="latents")
    assert "compression" not in plain.recipe, "a variant without compression keeps the name that it has had"
    make(shard_set.data, compression="zstd")
    packed = Variant.open(shard_set.data, column="latents")
    assert packed.directory != plain.directory and packed.recipe["compression"] == "zstd"
    samples = [{sample["__key__"]: sample for sample in one.iterate()} for one in (plain, packed)]
    assert samples[0].keys() == samples[1].keys()
    for key, sample in samples[0].items():
        array, content = sample["latents.npy"], samples[1][key]["latents.npy.zst"]
        assert pa.decompress(content, decompressed_size=len(array), codec="zstd", asbytes=True) == array
        assert len(content) < len(array)
    whole, shard = contents(packed.directory), packed.shards()[0]
    flip(shard.tar_path, shard.index["latents.npy.zst_offset"][1].as_py() + 1000)
    assert "member_checksum" in prep("verify", "--column", "latents", "--data", shard_set.data, status=1).stdout
    summary = make(shard_set.data, compression="zstd")
    assert (summary.num_shards_made, summary.num_encoded, summary.num_reused) == (1, 1, shard.num_samples - 1)
    assert contents(packed.directory) == whole
    prep("verify", "--deep", "--data", shard_set.data)


@pytest.mark.parametrize(("change", "found"), [("cut", "cannot be decompressed"), ("shape", "in the index")])
def test_what_a_compressed_member_holds_is_compared_with_its_index_row(change: str, found: str) -> None:
    array = np.zeros((4, 2, 8, 8), np.float16)
    payload = compress_frame(npy_bytes(array if change == "cut" else array.reshape(4, 2, 4, 16)))
    row = {"num_frames": 4, "channels": 2, "height": 8, "width": 8, "dtype": "float16", "source_frames": []}
    member = payload[:-5] if change == "cut" else payload
    [(_, said)] = check_latents(row, {"latents.npy.zst": member}, "train").differences
    assert found in said


def test_a_tar_cut_short_is_made_again(prep: Prep, shard_set: ShardSet) -> None:
    make(shard_set.data)
    latents = Variant.open(shard_set.data, column="latents")
    whole, tar = contents(latents.directory), latents.shards()[0].tar_path
    tar.write_bytes(tar.read_bytes()[:-20_000])
    assert "corrupt   latents shard 000000" in prep("status", "--data", shard_set.data, status=1).stdout
    assert make(shard_set.data).num_shards_made == 1
    assert contents(latents.directory) == whole


def test_another_codec_makes_latents_stale_until_they_are_made_again(prep: Prep, shard_set: ShardSet) -> None:
    make(shard_set.data)
    old_video, old = shard_set.variant.name, current_variant(shard_set.data, "latents")
    rerun(prep, shard_set, *LEN, "--crf", "40")
    status = prep("status", "--data", shard_set.data, "--json").summary["columns"]["latents"]
    assert status["current"] == old and old_video in status["stale_because"]
    text = prep("status", "--data", shard_set.data).stdout
    assert "next      prep latents --vae tiny --size 64" in text
    kept = prep("gc", "--data", shard_set.data, "--json").summary
    assert "stale" in kept["kept_because"]["latents"]
    assert f"video: {old_video}" in prep("plan", "latents", *TINY, "--data", shard_set.data).stdout
    assert make(shard_set.data).num_encoded == 5
    new = current_variant(shard_set.data, "latents")
    assert new != old
    status = prep("status", "--data", shard_set.data, "--json").summary["columns"]["latents"]
    assert (status["stale_because"], status["to_make"]) == (None, {})
    removed = prep("gc", "--data", shard_set.data, "--json").summary
    assert {item["variant"] for item in removed["items"]} == {f"latents/{old}"}
    assert [path.name for path in (shard_set.data / "latents").iterdir()] == [new]


def test_a_video_that_leaves_takes_its_latents_along(shard_set: ShardSet) -> None:
    make(shard_set.data)
    finish_run(shard_set.variant, dropped={1}, wanted={0})  # as `prep chunk` does when a video has left
    summary = make(shard_set.data)
    assert (summary.num_shards_made, summary.num_shards) == (0, 1)
    folder = Variant.open(shard_set.data, column="latents").directory
    assert list(read_commits(folder).commits) == [0]


def test_a_damaged_commit_of_video_costs_no_latents(shard_set: ShardSet) -> None:
    make(shard_set.data)
    before = contents(shard_set.data / "latents")
    commit_path(shard_set.variant, 1).write_text("{}")
    assert make(shard_set.data).num_shards_made == 0
    assert contents(shard_set.data / "latents") == before


@pytest.mark.parametrize("setting", [{"fps": "2"}, {"crop": "random"}, {"posterior": "sample"}, {"dtype": "bfloat16"}])
def test_other_settings_make_another_variant_beside(shard_set: ShardSet, setting: dict[str, Any]) -> None:
    make(shard_set.data)
    old = current_variant(shard_set.data, "latents")
    assert make(shard_set.data, **setting).num_encoded == 5
    assert current_variant(shard_set.data, "latents") != old
    assert len(list((shard_set.data / "latents").iterdir())) == 2


def test_what_cannot_change_the_bytes_makes_no_other_variant(shard_set: ShardSet) -> None:
    make(shard_set.data)
    assert make(shard_set.data, seed=5, segment="2s").num_shards_made == 0
    recipe = json.loads((Variant.open(shard_set.data, column="latents").directory / "recipe.json").read_bytes())
    assert (recipe["seed"], recipe["segment"]) == (None, None)
