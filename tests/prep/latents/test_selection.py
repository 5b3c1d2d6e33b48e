"""Tests of `prep latents --where`: which chunks are encoded, and the effect of a different condition."""

from collections.abc import Callable

import pytest

from clipmill.manifests.errors import UserError
from clipmill.shards.commits import commit_path
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant
from tests.prep.latents.conftest import make
from tests.prep.running import Ran, identities
from tests.prep.scores.conftest import make as make_scores
from tests.prep.sets import ShardSet
from tests.shards.made_scores import write_scores

Prep = Callable[..., Ran]
TINY = ("--vae", "tiny", "--size", "64")
MOTION = {"long_000000000": 0.1, "long_000002000": 0.9, "long_000004000": 0.8, "short_000000000": 0.1}


def keys(shard_set: ShardSet) -> list[str]:
    variant = Variant.open(shard_set.data, column="latents")
    return sorted(key for shard in variant.shards() for key in shard.index["key"].to_pylist())


def test_another_condition_encodes_what_is_missing_and_drops_the_rest(prep: Prep, shard_set: ShardSet) -> None:
    scores = {key: {"motion": motion} for key, motion in MOTION.items()}
    write_scores(shard_set.data, scores, failed=["short_000002000"])
    where = "motion > 0.5"
    first = make(shard_set.data, where=where)
    assert (first.num_encoded, first.num_shards) == (2, 1)
    assert keys(shard_set) == ["long_000002000", "long_000004000"]
    variant = current_variant(shard_set.data, "latents")

    # No chunk is missing, because the selection is part of the request.
    status = prep("status", "--data", shard_set.data).stdout
    assert f"selected by --where '{where}'" in status
    assert "shards to make" not in status
    assert "next      train quickstart" in status
    before = identities(shard_set.data)
    assert make(shard_set.data, where=where).num_shards_made == 0
    assert identities(shard_set.data) == before
    prep("verify", "--column", "latents", "--data", shard_set.data)
    kept = [line for line in prep("gc", "--dry-run", "--data", shard_set.data).stdout.splitlines() if "latents" in line]
    assert kept == [f"kept       latents/{variant}: the current variant"]
    plan = prep("plan", "latents", *TINY, "--where", where, "--data", shard_set.data).stdout
    assert f"where    {where}: 2 chunks selected" in plan

    # The wider condition takes over the encoded chunks in the same variant.
    wider = make(shard_set.data, where="motion > 0.05")
    assert (wider.num_encoded, wider.num_reused) == (2, 2)
    assert keys(shard_set) == sorted(MOTION)
    narrower = make(shard_set.data, where="motion > 0.85")
    assert (narrower.num_encoded, narrower.num_reused, narrower.num_shards) == (0, 1, 1)
    assert keys(shard_set) == ["long_000002000"]
    everything = make(shard_set.data)
    assert (everything.num_encoded, everything.num_chunks) == (4, 5)
    assert current_variant(shard_set.data, "latents") == variant
    assert "selected by" not in prep("status", "--data", shard_set.data).stdout


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("motion > 0.5", "has no scores shards"),
        ("words > 3", "--where uses words, but prep latents selects chunks"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(shard_set: ShardSet, where: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(shard_set.data, where=where)
    assert not (shard_set.data / "latents").exists()


def test_latents_whose_condition_cannot_be_evaluated_are_stale_and_kept(prep: Prep, shard_set: ShardSet) -> None:
    scores = {key: {"motion": motion} for key, motion in MOTION.items()}
    directory = write_scores(shard_set.data, scores, failed=["short_000002000"])
    make(shard_set.data, where="motion > 0.5")
    (directory / "chunks.arrow").unlink()
    assert "stale: its --where cannot be evaluated" in prep("status", "--data", shard_set.data).stdout
    assert "kept" in prep("gc", "--dry-run", "--data", shard_set.data).stdout
    assert keys(shard_set) == ["long_000002000", "long_000004000"]


def test_the_scores_that_prep_makes_select(prep: Prep, shard_set: ShardSet) -> None:
    make_scores(shard_set.data)
    first = make(shard_set.data, where="sharpness > 0 and brightness < 1 and not frozen > 0.9 and duration_s == 2")
    # The last chunk of each video is shorter.
    assert keys(shard_set) == ["long_000000000", "long_000002000", "short_000000000"]
    assert first.num_encoded == 3
    late = commit_path(shard_set.data / "scores" / str(current_variant(shard_set.data, "scores")), 1)
    late.unlink()
    with pytest.raises(UserError, match="commit record is missing"):
        make(shard_set.data, where="sharpness > 0")
