"""Tests that a second run makes only the changed samples again."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clipmill.prep.latents.worker import check_latents
from clipmill.shards.npy import compress_frame, npy_bytes
from clipmill.shards.reader import Variant
from tests.prep.latents.conftest import make, recipe
from tests.prep.running import Ran, contents
from tests.prep.sets import ShardSet, flip

Prep = Callable[..., Ran]
TINY = ("--vae", "tiny", "--size", "64")


def test_compressed_latents_are_the_same_files_smaller_and_are_made_again_where_damaged(
    prep: Prep, shard_set: ShardSet
) -> None:
    make(shard_set.data)
    plain = Variant.open(shard_set.data, column="latents")
    assert "compression" not in plain.recipe, "the name of a variant without compression must not change"
    make(shard_set.data, compression="zstd")
    packed = Variant.open(shard_set.data, column="latents")
    assert packed.directory != plain.directory and packed.recipe["compression"] == "zstd"
    samples = [{sample["__key__"]: sample for sample in variant.iterate()} for variant in (plain, packed)]
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


@pytest.mark.parametrize(("change", "message"), [("cut", "cannot be decompressed"), ("shape", "in the index")])
def test_what_a_compressed_member_holds_is_compared_with_its_index_row(change: str, message: str) -> None:
    array = np.zeros((4, 2, 8, 8), np.float16)
    payload = compress_frame(npy_bytes(array if change == "cut" else array.reshape(4, 2, 4, 16)))
    row = {"num_frames": 4, "channels": 2, "height": 8, "width": 8, "dtype": "float16", "source_frames": []}
    member = payload[:-5] if change == "cut" else payload
    [(_, difference)] = check_latents(row, {"latents.npy.zst": member}, "train").differences
    assert message in difference


def test_each_setting_that_changes_bytes_makes_another_variant() -> None:
    settings: list[dict[str, Any]] = [
        *({}, {"fps": "2"}, {"crop": "random"}, {"posterior": "sample"}, {"dtype": "bfloat16"}, {"size": 32}),
    ]
    made = {recipe("v", **{"vae": "tiny", "size": 64, **given}).variant for given in settings}
    assert len(made) == len(settings)


def test_what_cannot_change_the_bytes_makes_no_other_variant(shard_set: ShardSet) -> None:
    make(shard_set.data)
    assert make(shard_set.data, seed=5, segment="2s").num_shards_made == 0
    stored = json.loads((Variant.open(shard_set.data, column="latents").directory / "recipe.json").read_bytes())
    assert (stored["seed"], stored["segment"]) == (None, None)
