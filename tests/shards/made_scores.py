"""Column `scores` with given values, written through the real writers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clipmill.manifests.keys import split_key
from clipmill.manifests.publish import publish_json
from clipmill.shards.commits import Commit, Failure, write_commit
from clipmill.shards.dataset import current_variant, set_current_variant, variant_dir
from clipmill.shards.reader import Variant
from clipmill.shards.score_fields import SCORES_FIELDS
from clipmill.shards.scores import publish_score_table
from clipmill.shards.writer import Sample, ShardWriter

VARIANT = "scores-01234567"
_KNOWN = ("video_id", "start_ms")


def phash(number: int, *, flipped: Sequence[int] = ()) -> int:
    """Return the hash of a random image: 32 random bits are set, then the `flipped` bits are inverted."""
    bits = np.random.default_rng(number).permutation(64)[:32]
    return sum(1 << int(bit) for bit in bits) ^ sum(1 << bit for bit in flipped)


def write_scores(
    data_dir: Path,
    scores: Mapping[str, Mapping[str, Any]],
    *,
    shard_id: int = 0,
    failed: Sequence[str] = (),
    video: str | None = None,
    publish: bool = True,
) -> Path:
    """Write one shard of scores, its commit and, by default, the merged table; return the variant's folder.

    Args:
        scores: Values of the fields by chunk key; missing values are unknown.
        failed: Keys of chunks whose scores could not be computed.
        video: Variant of `video` that was scored; by default the current one.
    """
    directory = variant_dir(data_dir, "scores", VARIANT)
    directory.mkdir(parents=True, exist_ok=True)
    recipe = {"column": "scores", "schema": 3, "video": video or current_variant(data_dir, "video")}
    publish_json(directory / "recipe.json", recipe)
    with ShardWriter(directory, shard_id=shard_id, extensions=("scores.json",), fields=SCORES_FIELDS) as writer:
        for key, values in scores.items():
            fields = (
                dict.fromkeys(field.name for field in SCORES_FIELDS) | {"chunk_fingerprint": "ef" * 16} | dict(values)
            )
            fields |= dict(zip(_KNOWN, split_key(key), strict=True))
            content = json.dumps({name: repr(value) for name, value in values.items()}).encode()
            writer.add(Sample(key=key, members={"scores.json": content}, fields=fields))
        files = writer.publish("cd" * 32)
    failures = tuple(Failure(split_key(key)[0], key, "decode_failed", "made to fail") for key in failed)
    write_commit(directory, Commit("scores", shard_id, "train", "cd" * 32, files, failures))
    set_current_variant(data_dir, "scores", VARIANT)
    if publish:
        publish_score_table(Variant(directory))
    return directory
