"""Tests of `prep diff`: settings, samples, bytes, and the differences between the values of two variants."""

from collections.abc import Callable

import numpy as np
import pytest

from clipmill.shards.dataset import current_variant
from tests.prep.latents.conftest import make
from tests.prep.latents.test_column import stored_latents
from tests.prep.running import Ran
from tests.prep.sets import ShardSet

Prep = Callable[..., Ran]


def test_two_variants_of_latents(prep: Prep, shard_set: ShardSet) -> None:
    names, arrays = [], []
    for dtype in ("float16", "bfloat16"):
        make(shard_set.data, dtype=dtype, num_threads=1)
        names.append(current_variant(shard_set.data, "latents"))
        arrays.append(stored_latents(shard_set))
    text = prep("diff", *names, "--data", shard_set.data).stdout
    assert "setting   dtype: float16 → bfloat16" in text
    assert "samples   5 samples and 5; both have 5" in text
    values = prep("diff", *names, "--data", shard_set.data, "--json").summary
    half = np.concatenate([latents.astype(np.float64) for latents in arrays[0].values()])
    bits = np.concatenate([*arrays[1].values()]).astype(np.uint32) << np.uint32(16)
    difference = np.abs(half - bits.view(np.float32))
    assert values["values"]["largest"] == difference.max() > 0
    assert values["values"]["mean"] == pytest.approx(difference.mean())
    assert values["values"]["deviation"] == pytest.approx(half.std())
    assert values["num_bytes"][0] > 0 and values["values"]["num_arrays"] == 5
    make(shard_set.data, size=32, num_threads=1)
    smaller = current_variant(shard_set.data, "latents")
    assert "5 arrays of different shapes" in prep("diff", names[0], smaller, "--data", shard_set.data).stdout
    assert (
        "is a variant of video"
        in prep("diff", shard_set.variant.name, names[0], "--data", shard_set.data, status=2).error
    )
    assert "has no variant none" in prep("diff", names[0], "none", "--data", shard_set.data, status=2).error
    same = prep("diff", names[0], names[0], "--data", shard_set.data).stdout
    assert "largest difference 0, mean 0" in same and "setting" not in same
    assert (
        "samples   5 samples"
        in prep("diff", shard_set.variant.name, shard_set.variant.name, "--data", shard_set.data).stdout
    )
