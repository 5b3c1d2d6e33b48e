"""Gathering what a plan is a function of: manifest, probes, layout, recipe, commits, and the state of the files."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manifests.store import read_videos
from prep.core.arrays import as_array
from prep.core.data_folder import VIDEO
from prep.core.layout import layout_path, stored_or_rebuilt_layout
from prep.core.layout_repair import video_layout_of_commits
from prep.video.estimate import Estimate, estimate
from prep.video.plan import Plan, ShardState
from prep.video.recipe import ResolvedRecipe
from prep.video.sources import probe_sources
from shards.commits import Commit, read_commits
from shards.damage import DamagedIndex
from shards.dataset import variant_dir
from shards.index import open_index
from shards.verify import Code, quick_check

_MISSING = frozenset({Code.TAR_MISSING, Code.INDEX_MISSING})
_MANY_THREADS = 8  # looking at files waits more than it computes


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    data_dir: Path
    variant_dir: Path
    commits: dict[int, Commit]

    def estimate(self) -> Estimate:
        """Cost of the shards that have to be encoded; those that are only written anew count as nothing."""
        ranges = [
            np.asarray(shard.rows) for shard in self.plan.shards if shard.has_work and shard.state != ShardState.CHANGED
        ]
        work = self.plan.workload(np.concatenate([np.zeros(0, np.int64), *ranges]).astype(np.int64))
        return estimate(work, settings=self.plan.recipe.settings, bytes_per_second=self._bytes_per_second())

    def _bytes_per_second(self) -> float | None:
        """Measured on one committed shard of this variant."""
        for commit in self.commits.values():
            if commit.files is None:
                continue
            try:
                frames = open_index(self.variant_dir / commit.files.index)["num_frames"].to_numpy().sum()
            except (DamagedIndex, OSError):
                continue  # its shard is planned anew; another one will do
            return float(commit.files.tar_bytes * self.plan.recipe.settings.fps_exact / int(frames))
        return None


def make_plan(
    data_dir: Path,
    recipe: ResolvedRecipe,
    *,
    retry_codes: frozenset[str] = frozenset(),
    on_probe: Callable[[int, int], None] = lambda done, total: None,
) -> Planned:
    """Plans `recipe` for the manifest in `data_dir`.

    Args:
        retry_codes: failures to try again though nothing changed; any code at all also probes failed sources again.
        on_probe: called with (probed, to probe) while sources are probed.
    """
    videos = read_videos(data_dir)
    probes = probe_sources(
        data_dir,
        videos["path"],
        num_workers=_MANY_THREADS,
        again_failed=bool(retry_codes),
        on_progress=on_probe,
    )
    folder = variant_dir(data_dir, VIDEO, recipe.variant)
    found = read_commits(folder)
    problems = look_at(folder, found.commits)
    for damaged in found.damaged:
        problems[damaged.shard_id] = (ShardState.CORRUPT, str(damaged))
    plan = Plan(
        recipe=recipe,
        videos=videos,
        probes=probes,
        layout=stored_or_rebuilt_layout(
            layout_path(data_dir, recipe.settings),
            lambda: video_layout_of_commits(data_dir, recipe.settings, video_ids=as_array(videos["video_id"])),
        ),
        commits=found.commits,
        problems=problems,
        retry_codes=retry_codes,
    )
    return Planned(plan, data_dir, folder, found.commits)


def look_at(folder: Path, commits: dict[int, Commit]) -> dict[int, tuple[ShardState, str]]:
    """Shards whose files are missing or damaged, by a quick look at each."""
    with ThreadPoolExecutor(_MANY_THREADS) as pool:
        checked = zip(commits, pool.map(lambda commit: quick_check(folder, commit), commits.values()), strict=True)
        return {
            shard_id: (ShardState.MISSING if problems[0].code in _MISSING else ShardState.CORRUPT, problems[0].message)
            for shard_id, problems in checked
            if problems
        }
