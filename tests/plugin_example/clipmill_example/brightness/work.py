"""Plan, worker and reports of the column `brightness`."""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa

from clipmill.prep.core.column import CheckedSample, DeepCode, Pending, recipe_fingerprint
from clipmill.prep.core.failures import FailureCode
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.plan import ShardPlan, WantedShard, pending_of, plan_shards, stored_shards
from clipmill.prep.core.report import Report, states_lines, states_values, summary_report
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Job, Summary, execute
from clipmill.prep.core.shard_result import Heartbeat, ShardResult, system_errors_as_results
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Commit, Failure, read_commits, write_commit
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.npy import load_npy, npy_bytes
from clipmill.shards.reader import Variant, open_shard
from clipmill.shards.writer import Sample, ShardWriter
from clipmill_example.brightness.column import (
    BRIGHTNESS,
    COLUMN,
    VERB,
    BrightnessRecipe,
    BrightnessSettings,
    recipe_from_dict,
)

EXTENSION = "brightness.npy"
FIELDS = [
    pa.field("video_id", pa.string(), nullable=False),
    pa.field("start_ms", pa.int64(), nullable=False),
    pa.field("num_frames", pa.int32(), nullable=False),
    pa.field("fps_num", pa.int32(), nullable=False),
    pa.field("fps_den", pa.int32(), nullable=False),
    pa.field("brightness_mean", pa.float64(), nullable=False),  # of all measured frames
]
_OF_VIDEO = ("video_id", "start_ms", "num_frames", "fps_num", "fps_den")


@dataclass(frozen=True)
class BrightnessPlan:
    """Which shards have to be made."""

    recipe: BrightnessRecipe
    data_dir: Path
    variant_dir: Path
    video_dir: Path
    video_commits: dict[int, Commit]
    shards: list[ShardPlan]
    num_videos: int


@dataclass(frozen=True)
class BrightnessTask:
    """What a worker has to know of a shard."""

    variant_dir: Path
    shard_id: int
    plan_fingerprint: str
    every: int
    video_dir: Path
    video_commit: Commit


def make_plan(data_dir: Path, recipe: BrightnessRecipe, *, retry_codes: frozenset[str] = frozenset()) -> BrightnessPlan:
    video_dir, folder = (
        variant_dir(data_dir, column, variant)
        for column, variant in ((VIDEO, recipe.video), (BRIGHTNESS, recipe.variant))
    )
    commits, stored = read_commits(video_dir).commits, stored_shards(folder)

    def wanted() -> Iterator[WantedShard]:
        for commit in commits.values():
            if commit.files is not None:
                text = f"{recipe_fingerprint(recipe.as_dict())} {commit.files.tar}"
                digest = hashlib.sha256(text.encode()).hexdigest()
                yield WantedShard(commit.shard_id, commit.split, digest, commit.files.num_samples)

    shards = plan_shards(
        wanted(),
        stored,
        what_changed="its chunks",
        orphaned_because="the chunks are no longer in the video column",
        retry_codes=retry_codes,
    )
    return BrightnessPlan(recipe, data_dir, folder, video_dir, commits, list(shards), num_videos=len(commits))


def brightness_job(plan: BrightnessPlan) -> Job[BrightnessTask]:
    def task(shard: ShardPlan) -> BrightnessTask:
        return BrightnessTask(
            plan.variant_dir,
            shard.shard_id,
            shard.plan_fingerprint,
            plan.recipe.settings.every,
            plan.video_dir,
            plan.video_commits[shard.shard_id],
        )

    return Job(
        column=COLUMN,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=make_brightness,
        task=task,
        video_ids=lambda shard: (
            open_shard(plan.video_dir, plan.video_commits[shard.shard_id]).index["video_id"].to_pylist()
        ),
        failed_before=[],
        chunk_s=None,
    )


def make_brightness(task: BrightnessTask) -> ShardResult:
    """Makes, publishes and commits one shard."""
    return system_errors_as_results(_make, task)


def _make(task: BrightnessTask) -> ShardResult:
    video = open_shard(task.video_dir, task.video_commit)
    failures, files = [], None
    writer = ShardWriter(task.variant_dir, shard_id=task.shard_id, extensions=[EXTENSION], fields=FIELDS)
    with Heartbeat(task.variant_dir, task.shard_id, num_chunks=video.num_samples) as beat, writer:
        for number in range(video.num_samples):
            row = {name: video.index[name][number].as_py() for name in ("key", "mp4_crc32", *_OF_VIDEO)}
            content = video.read(number, "mp4")
            if zlib.crc32(content) != row.pop("mp4_crc32"):
                code = str(FailureCode.DECODE_ERRORS)
                failures.append(Failure(row["video_id"], row["key"], code, "its bytes are not those that were written"))
                continue
            measured = measure(content, every=task.every)
            row |= {"num_frames": len(measured), "brightness_mean": float(measured.mean())}
            writer.add(Sample(row.pop("key"), {EXTENSION: npy_bytes(measured)}, row))
            beat.show(writer.num_samples)
        num_chunks = writer.num_samples
        if num_chunks:
            content_text = " ".join([task.plan_fingerprint, *(failure.key or "" for failure in failures)])
            files = writer.publish(hashlib.sha256(content_text.encode()).hexdigest())
    commit = Commit(BRIGHTNESS, task.shard_id, task.video_commit.split, task.plan_fingerprint, files, tuple(failures))
    write_commit(task.variant_dir, commit)
    num_bytes = files.tar_bytes if files else 0
    return ShardResult(task.shard_id, num_chunks=num_chunks, num_bytes=num_bytes, failures=commit.failures)


def measure(content: bytes, *, every: int) -> np.ndarray:
    """Mean luma of every n-th frame, float32 [frames]."""
    with av.open(BytesIO(content), "r", format="mp4") as container:
        frames = [frame.to_ndarray(format="gray").mean() for frame in container.decode(video=0)]
    return np.asarray(frames[::every], np.float32)


def check_sample(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    array = load_npy(members[EXTENSION])
    if array is None or array.shape != (row["num_frames"],) or not bool(((array >= 0) & (array <= 255)).all()):
        return CheckedSample([(DeepCode.ARRAY_DIFFERS, "the array is not as its row says")], 0)
    return CheckedSample([], len(array))


def _plan(data_dir: Path, settings: BrightnessSettings, request: Request) -> BrightnessPlan:
    recipe = BrightnessRecipe(settings=settings, video=str(current_variant(data_dir, VIDEO)))
    request.require_variant(recipe.variant, command="prep brightness")
    return make_plan(data_dir, recipe, retry_codes=request.retry_codes)


def _run(plan: BrightnessPlan, settings: BrightnessSettings, request: Request, part_run: PartRun | None) -> Summary:
    engine = request.open_engine(memory_gb=0.0)
    return execute(brightness_job(plan), engine, part_run=part_run)


def _plan_report(plan: BrightnessPlan) -> Report:
    return Report("\n".join(states_lines(plan.shards)), states_values(plan.shards))


def _summary_report(summary: Summary, settings: BrightnessSettings, listed: Path) -> Report:
    return summary_report(summary, listed=listed, verb=VERB)


def _pending(data_dir: Path, variant: Variant) -> Pending:
    recipe = recipe_from_dict(variant.recipe)
    if recipe.video != (video := current_variant(data_dir, VIDEO)):
        return Pending(stale_because=f"made from {recipe.video}; the current variant of video is {video}")
    return pending_of(make_plan(data_dir, recipe).shards)


WORK = ColumnWork(
    plan=_plan,
    run=_run,
    plan_report=_plan_report,
    summary_report=_summary_report,
    pending=_pending,
    extra_files=(MERGED_TABLE,),  # of columns with fields
)
