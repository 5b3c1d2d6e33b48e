"""The plan of the `text` column: which shards have to be made and why.

It is a function of the manifest's table of videos, the layout, the recipe and the commits. No caption is read: a
video's row carries the digest of its captions. Nothing of the `video` column enters, so no codec changes it.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from manifests.store import read_videos
from prep.core.arrays import as_array
from prep.core.data_folder import TEXT
from prep.core.failures import TRANSIENT
from prep.core.layout import stored_or_rebuilt_layout
from prep.core.layout_repair import text_layout_of_commits
from prep.text.layout import extend_text_layout, text_layout_path, wanted_text_rows
from prep.text.recipe import ResolvedTextRecipe
from prep.video.plan import ShardPlan, ShardState
from prep.video.planning import look_at
from shards.commits import Commit, read_commits
from shards.dataset import variant_dir


@dataclass(frozen=True)
class TextPlan:
    """All shards of `text` that the manifest wants under one recipe.

    Attributes:
        layout: with every video assigned; to be written before the work begins.
        video_ids: of the videos in the plan; a shard's `rows` are a range of them.
        num_captions: of all videos.
        shards: in shard order.
    """

    recipe: ResolvedTextRecipe
    data_dir: Path
    variant_dir: Path
    layout: pa.Table
    video_ids: pa.Array
    num_captions: int
    shards: list[ShardPlan]
    commits: dict[int, Commit]

    @property
    def num_videos(self) -> int:
        """Videos with captions."""
        return len(self.video_ids)


def make_text_plan(
    data_dir: Path, recipe: ResolvedTextRecipe, *, retry_codes: frozenset[str] = frozenset()
) -> TextPlan:
    """Plans `recipe` for the manifest in `data_dir`.

    Args:
        retry_codes: failures to try again though nothing changed.

    Raises:
        UserError: there is no manifest, or the layout is damaged.
    """
    videos = read_videos(data_dir)
    folder = variant_dir(data_dir, TEXT, recipe.variant)
    found = read_commits(folder)
    problems = look_at(folder, found.commits)
    for damaged in found.damaged:
        problems[damaged.shard_id] = (ShardState.CORRUPT, str(damaged))
    num_captions = np.asarray(videos["num_captions"])
    wanted = {
        "video_ids": as_array(videos["video_id"]),
        "splits": as_array(videos["split"]),
        "num_captions": num_captions,
    }
    stored = stored_or_rebuilt_layout(
        text_layout_path(data_dir), lambda: text_layout_of_commits(data_dir, video_ids=wanted["video_ids"])
    )
    layout = extend_text_layout(stored, **wanted)
    rows, video_rows = wanted_text_rows(layout, **wanted)
    planned = _Planner(
        recipe=recipe,
        shard_ids=np.asarray(layout["shard_id"])[rows],
        videos=videos.take(pa.array(video_rows)) if len(video_rows) else videos.slice(0, 0),
        commits=found.commits,
        problems=problems,
        retry_codes=TRANSIENT | retry_codes,
    )
    return TextPlan(
        recipe=recipe,
        data_dir=data_dir,
        variant_dir=folder,
        layout=layout,
        video_ids=as_array(planned.videos["video_id"]),
        num_captions=int(num_captions.sum()),
        shards=planned.shards(),
        commits=found.commits,
    )


@dataclass(frozen=True)
class _Planner:
    """What the states of the shards are a function of.

    Attributes:
        shard_ids: of the planned videos, ascending.
        videos: rows of the manifest, in the order of the plan.
    """

    recipe: ResolvedTextRecipe
    shard_ids: np.ndarray
    videos: pa.Table
    commits: Mapping[int, Commit]
    problems: Mapping[int, tuple[ShardState, str]]
    retry_codes: frozenset[str]

    def shards(self) -> list[ShardPlan]:
        bounds = np.flatnonzero(np.diff(self.shard_ids, prepend=-1, append=-1)).tolist() if len(self.shard_ids) else [0]
        found = []
        for begin, end in pairwise(bounds):
            shard_id, part = int(self.shard_ids[begin]), self.videos.slice(begin, end - begin)
            fingerprint = self._fingerprint(part)
            state, reason = self._state(shard_id, fingerprint)
            split = part["split"][0].as_py()
            found.append(ShardPlan(shard_id, split, state, reason, fingerprint, range(begin, end), end - begin))
        wanted = set(self.shard_ids.tolist())
        for shard_id, commit in self.commits.items():
            if shard_id not in wanted:
                reason = "none of its videos is in the manifest any more"
                fingerprint = commit.plan_fingerprint
                found.append(
                    ShardPlan(shard_id, commit.split, ShardState.ORPHANED, reason, fingerprint, range(0), num_chunks=0)
                )
        return found

    def _fingerprint(self, videos: pa.Table) -> str:
        digest = hashlib.sha256(self.recipe.fingerprint.encode())
        columns = (videos[name].to_pylist() for name in ("video_id", "captions_sha256", "split"))
        for line in zip(*columns, strict=True):
            digest.update("\0".join(line).encode() + b"\n")
        return digest.hexdigest()

    def _state(self, shard_id: int, fingerprint: str) -> tuple[ShardState, str]:
        if shard_id in self.problems:
            return self.problems[shard_id]
        commit = self.commits.get(shard_id)
        if commit is None:
            return ShardState.NEW, "not committed yet"
        if commit.plan_fingerprint != fingerprint:
            return ShardState.CHANGED, "its videos or their captions have changed"
        again = Counter(failure.code for failure in commit.failures if failure.code in self.retry_codes)
        if again:
            listed = ", ".join(f"{count} x {code}" for code, count in sorted(again.items()))
            return ShardState.RETRY, f"failed before and may pass now: {listed}"
        return ShardState.CURRENT, "committed as planned"
