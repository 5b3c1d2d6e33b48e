"""Making one shard of the `scores` column in a worker.

Scores of unchanged chunks are copied from the old shard; all other chunks are scored. A failed chunk is recorded in the
commit and does not affect the others.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from clipmill.prep.core.chunk_shards import OldSamples, chunk_fingerprints, seconds_of
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.shard_result import Heartbeat, ShardResult, cpu_s, stopped, system_errors_as_results
from clipmill.prep.scores.recipe import SCORES
from clipmill.prep.scores.sample import EXTENSION, scores_sample
from clipmill.shards.commits import Commit, Failure, write_commit
from clipmill.shards.damage import Damaged
from clipmill.shards.reader import open_shard
from clipmill.shards.score_fields import SCORES_FIELDS
from clipmill.shards.writer import ShardWriter


@dataclass(frozen=True)
class ScoresTask:
    """Input of a worker: paths and small values only.

    Attributes:
        video_dir: folder of the `video` variant to score.
        video_commit: commit of the shard with the chunks, as planned.
        old_commits: Commits of the column with samples of unchanged chunks.
    """

    variant_dir: Path
    shard_id: int
    plan_fingerprint: str
    cut_threshold: float
    video_dir: Path
    video_commit: Commit
    old_commits: tuple[Commit, ...]


def make_scores(task: ScoresTask) -> ShardResult:
    """Make, publish and commit one shard."""
    return system_errors_as_results(_make, task)


def _make(task: ScoresTask) -> ShardResult:
    begin_cpu_s = cpu_s()
    try:
        video = open_shard(task.video_dir, task.video_commit)
        fingerprints = chunk_fingerprints(video.index)
    except (Damaged, FileNotFoundError) as error:
        return stopped(task, FailureCode.CHUNK_DAMAGED, f"the chunks cannot be read: {error}")
    old = OldSamples(task.variant_dir, task.old_commits, fields=SCORES_FIELDS, wanted=fingerprints)
    failures: list[Failure] = []
    scored_s, files = 0.0, None
    writer = ShardWriter(task.variant_dir, shard_id=task.shard_id, extensions=[EXTENSION], fields=SCORES_FIELDS)
    with Heartbeat(task.variant_dir, task.shard_id, num_chunks=video.num_samples) as beat, writer:
        for row, fingerprint in enumerate(fingerprints):
            if fingerprint in old:
                writer.add(old.sample(fingerprint, video.index, row))
            else:
                try:
                    sample = scores_sample(video, row, fingerprint=fingerprint, cut_threshold=task.cut_threshold)
                except SourceFailure as failure:
                    video_id, key = (video.index[name][row].as_py() for name in ("video_id", "key"))
                    failures.append(Failure(video_id, key, str(failure.code), failure.message))
                    continue
                writer.add(sample)
                scored_s += float(seconds_of(video.index, row))
            beat.show(writer.num_samples)
        num_chunks = writer.num_samples
        if num_chunks:
            content = hashlib.sha256(task.plan_fingerprint.encode())
            content.update(" ".join(failure.key or "" for failure in failures).encode())
            files = writer.publish(content.hexdigest())
    commit = Commit(SCORES, task.shard_id, task.video_commit.split, task.plan_fingerprint, files, tuple(failures))
    write_commit(task.variant_dir, commit)
    return ShardResult(
        task.shard_id,
        num_chunks=num_chunks,
        num_reused=sum(fingerprint in old for fingerprint in fingerprints),
        num_bytes=files.tar_bytes if files else 0,
        failures=commit.failures,
        encoded_s=scored_s,
        cpu_s=cpu_s() - begin_cpu_s,
    )
