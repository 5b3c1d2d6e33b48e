"""Read the inputs of a `video` plan, turn the plan into a job for `clipmill.prep.core.run`, and find pending chunks.

`make_plan` probes the sources; on a cluster, it probes them in the workers. `add_missing_shots` detects the shots that
are missing from a plan, and plans again. `pending_chunks` serves the commands that maintain a data folder, and uses
only stored records.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.manifests.progress import Activity
from clipmill.manifests.store import VIDEOS_FILE, captions_path, has_manifest, manifest_dir, open_videos, read_videos
from clipmill.prep.core.column import PendingWork
from clipmill.prep.core.failure_list import MAX_ENTRIES
from clipmill.prep.core.plan import NUM_CHECK_THREADS, ShardPlan, ShardState, StoredShards, pending_of, stored_shards
from clipmill.prep.core.tables import (
    as_array,
    read_layout,
    stored_or_rebuilt_layout,
    variants_of,
    video_rows_of,
    write_layout,
)
from clipmill.prep.core.variants import make_variant, stored_recipe
from clipmill.prep.engines.admission import worker_ticket
from clipmill.prep.sources.table import failed_sources, probe_sources, probes_of, read_probes
from clipmill.prep.video.column import COLUMN, INDEX, column_of
from clipmill.prep.video.plan import Plan, ShardChange, Videos, find_changes
from clipmill.prep.video.settings import ResolvedRecipe
from clipmill.prep.video.spans import (
    cutting_of,
    detector_key,
    frames_of,
    layout_path,
    required_rows,
    shots_of,
    video_layout_of_commits,
)
from clipmill.shards.columns import VIDEO
from clipmill.shards.commits import Commit
from clipmill.shards.dataset import variant_dir
from clipmill.shards.reader import Variant

if TYPE_CHECKING:
    from clipmill.prep.core.parts import PartRun
    from clipmill.prep.core.run import Job
    from clipmill.prep.engines import Engine, Outcome, RefusedNode
    from clipmill.prep.sources.probe_processes import ProbeResults, ProbeTask
    from clipmill.prep.sources.shot_table import Detection
    from clipmill.prep.video.worker import ShardTask

_IDS_AT_ONCE = 1 << 20  # number of IDs per lookup; it is large because each lookup builds a hash table of all videos


@dataclass(frozen=True)
class PlanWithInputs:
    """A plan and its inputs.

    Attributes:
        commits: Commits of the variant, by shard ID.
        probes: One row per video, in the order of `videos` (clipmill.prep.sources.table.PROBES, without paths).
        shots: Stored shots (clipmill.prep.sources.shot_table.SHOTS); None with `--cut even`.
        retry_codes: Codes of failures to retry even if nothing changed.
        changes: Differences between the shards to write and the stored shards, by shard ID.
        detection: Result of the shot detection; None if no shots were detected for this plan.
        read_again: IDs of the videos whose unchanged source was read again and failed again.
    """

    plan: Plan
    data_dir: Path
    variant_dir: Path
    commits: dict[int, Commit]
    videos: Videos
    probes: pa.Table
    shots: pa.Table | None
    retry_codes: frozenset[str]
    changes: dict[int, ShardChange]
    detection: "Detection | None" = None
    read_again: frozenset[str] = frozenset()

    @property
    def shards(self) -> list[ShardPlan]:
        return self.plan.shards

    @property
    def num_videos(self) -> int:
        return self.plan.num_videos

    def rows_to_encode(self) -> np.ndarray:
        """Return the rows of the plan whose spans are encoded, not copied, int64."""
        rows = [np.zeros(0, np.int64)]
        # If a changed shard is not in `changes`, its index cannot be read, and its rows to encode are unknown.
        for shard in self.shards:
            if shard.has_work and shard.shard_id in self.changes:
                rows.append(np.asarray(self.changes[shard.shard_id].rows, np.int64))
            elif shard.has_work and shard.state != ShardState.CHANGED:
                rows.append(np.asarray(shard.rows, np.int64))
        return np.concatenate(rows)


def make_plan(
    data_dir: Path,
    recipe: ResolvedRecipe,
    *,
    retry_codes: frozenset[str] = frozenset(),
    engine: "Engine | None" = None,
    part_run: "PartRun | None" = None,
) -> PlanWithInputs:
    """Plan `recipe` for the manifest in `data_dir`. If an engine is passed, the caller must hold the column's lock.

    Args:
        retry_codes: Codes of failures to retry even if nothing changed. If the set is not empty, failed sources are
            probed again.
        engine: Engine of a cluster whose workers probe the sources; None to probe them on this machine.
        part_run: Part of a run in which all parts share the probing; None for a command without `--part`.
    """
    videos = Videos(open_videos(data_dir), path=manifest_dir(data_dir) / VIDEOS_FILE)
    divide = None
    if part_run is not None:
        from clipmill.prep.sources.probe_parts import probe_in_parts

        divide = partial(probe_in_parts, part_run=part_run)
    with Activity(title := f"inspecting {count_noun(len(videos), 'video')}") as activity:
        probes = probe_sources(
            data_dir,
            videos.column("path"),
            num_workers=NUM_CHECK_THREADS,
            retry_failed=bool(retry_codes),
            run=None if engine is None else partial(_run_probes, data_dir, recipe, engine),
            divide=divide,
            on_progress=activity.counter(title),
        )
    failed_rows = failed_sources(probes, only_temporary=not retry_codes)
    read_again = frozenset(videos.ids.take(pa.array(failed_rows)).to_pylist())
    probes = probes.drop_columns(["path", "mtime_ns"])  # these columns take half a gigabyte for ten million videos
    shots = _stored_shots(data_dir, recipe)
    full_plan = _plan_shards(data_dir, recipe, videos, probes, shots=shots, retry_codes=retry_codes)
    return replace(full_plan, read_again=read_again)


def _stored_shots(data_dir: Path, recipe: ResolvedRecipe) -> pa.Table | None:
    """Read the stored shots; return None with `--cut even`."""
    if recipe.settings.cut == "even":
        return None
    from clipmill.prep.sources.shot_table import read_shots

    return read_shots(data_dir)


def _run_probes(
    data_dir: Path, recipe: ResolvedRecipe, engine: "Engine", tasks: "Sequence[ProbeTask]"
) -> "Iterator[Outcome[ProbeTask, ProbeResults] | RefusedNode | None]":
    from clipmill.prep.sources.probe_processes import probe_group

    folder = variant_dir(data_dir, VIDEO, recipe.variant)
    make_variant(folder, dict(recipe.values))  # the ticket that admits workers to the run is written to this folder
    with worker_ticket(folder, package=COLUMN.package) as ticket:
        yield from engine.run(probe_group, tasks, check=ticket, name=lambda task: task.name)


def _plan_shards(
    data_dir: Path,
    recipe: ResolvedRecipe,
    videos: Videos,
    probes: pa.Table,
    *,
    shots: pa.Table | None,
    retry_codes: frozenset[str],
    detection: "Detection | None" = None,
) -> PlanWithInputs:
    folder = variant_dir(data_dir, VIDEO, recipe.variant)
    stored = stored_shards(folder)
    video_shots = shots_of(recipe, probes, shots=shots, retry_failed=bool(retry_codes) and detection is None)
    plan = Plan(
        recipe=recipe,
        videos=videos,
        probes=probes,
        shots=video_shots,
        layout=stored_or_rebuilt_layout(
            layout_path(data_dir, recipe.settings),
            lambda: video_layout_of_commits(
                data_dir,
                recipe.settings,
                video_ids=videos.ids,
                cutting=cutting_of(recipe.settings, frames_of(recipe, probes), video_shots),
            ),
            video_ids=videos.ids,
            splits=videos.splits,
        ),
        stored=stored,
        retry_codes=retry_codes,
    )
    changes = find_changes(plan, stored.commits, folder)
    return PlanWithInputs(
        plan, data_dir, folder, stored.commits, videos, probes, shots, retry_codes, changes, detection
    )


def add_missing_shots(full_plan: PlanWithInputs, engine: "Engine") -> PlanWithInputs:
    """Detect the shots that are missing from the plan, and plan again; return `full_plan` if no shots are missing.

    The caller must hold the lock of the column.
    """
    plan, recipe = full_plan.plan, full_plan.plan.recipe
    if plan.shots is None or full_plan.shots is None or not len(plan.shots.undetected_rows):
        return full_plan
    from clipmill.prep.sources.shot_table import detect_shots

    # The folder of the variant holds the ticket that admits workers to the run, and its recipe records the detector.
    make_variant(full_plan.variant_dir, dict(recipe.values))
    # Keep the stored shots that any variant uses.
    used_detectors = set()
    for variant in variants_of(full_plan.data_dir, VIDEO):
        with suppress(UserError):  # the variant has a different schema
            variant_recipe = _stored_recipe(variant)
            if variant_recipe.settings.cut == "shots":
                used_detectors.add(detector_key(variant_recipe))
    needs = ("clipmill.prep.sources.detector:version_mismatch", recipe.values["scenedetect"])
    title = "detecting shots"
    with (
        worker_ticket(full_plan.variant_dir, package=COLUMN.package, needs=needs) as ticket,
        Activity(title) as activity,
    ):
        detection = detect_shots(
            full_plan.data_dir,
            list(plan.detection_tasks()),
            shots=full_plan.shots,
            key=detector_key(recipe),
            used_detectors=used_detectors,
            engine=engine,
            check=ticket,
            on_progress=activity.counter(title),
        )
    new_plan = _plan_shards(
        full_plan.data_dir,
        recipe,
        full_plan.videos,
        full_plan.probes,
        shots=detection.shots,
        retry_codes=full_plan.retry_codes,
        detection=detection,
    )
    return replace(new_plan, read_again=full_plan.read_again)


def left_out_values(plan: Plan) -> dict[str, Any]:
    """Return totals of the omitted shots or tails, as JSON values; empty if the settings never omit frames."""
    if plan.shots is None and plan.recipe.settings.tail != "drop":
        return {}
    cutting = plan.cutting
    return {
        "num_left_out": cutting.num_left_out,
        "left_out_s": float(cutting.frames_left_out / plan.recipe.settings.fps_exact),
        "num_left_out_videos": len(cutting.videos_left_out),
        "first_left_out_videos": plan.video_ids(cutting.videos_left_out[:MAX_ENTRIES]),
    }


def left_out_lines(values: Mapping[str, Any], *, cut: str) -> list[str]:
    """Return lines about parts of videos that no chunk contains, with the first few videos; empty without such parts.

    Args:
        values: Result of `left_out_values`.
        cut: Value of `--cut`.
    """
    if not values.get("num_left_out"):
        return []
    seconds, noun = values["left_out_s"], "shot" if cut == "shots" else "tail"
    length = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
    reason = "shorter than --min-len, and no neighbour has room" if cut == "shots" else "dropped by --tail drop"
    return [
        f"{count_noun(values['num_left_out'], noun)}, {length}: {reason}",
        f"in {video_list_text(values['first_left_out_videos'], num_all=values['num_left_out_videos'])}",
    ]


def video_list_text(video_ids: Sequence[str], *, num_all: int) -> str:
    """Return the IDs of the first few videos and the number of other videos, as text."""
    more = f", and {num_all - len(video_ids):,} more" if num_all > len(video_ids) else ""
    return f"{on_one_line(', '.join(video_ids))}{more}"


def _stored_recipe(variant: Variant) -> ResolvedRecipe:
    recipe = stored_recipe(COLUMN, variant)
    return replace(recipe, settings=recipe.settings.settings())


def chunk_job(full_plan: PlanWithInputs, *, scratch_bytes: int | None = None) -> "Job[ShardTask]":
    """Write the layout of the plan, and return the plan as a job for `clipmill.prep.core.run.execute`.

    Args:
        scratch_bytes: Maximum total size of the copies of remote sources on a node; None to use most of the free space.
    """
    from clipmill.prep.core.run import Job
    from clipmill.prep.video.worker import ShardTask, make_shard

    column = column_of(full_plan.plan.recipe)
    plan, version = full_plan.plan, full_plan.plan.recipe.values.get("ffmpeg")  # None for `prep index`
    write_layout(layout_path(full_plan.data_dir, plan.recipe.settings), plan.layout)
    has_work = any(shard.has_work for shard in plan.shards)
    captions_file = captions_path(full_plan.data_dir) if plan.has_captions and has_work else None
    groups = None
    if captions_file is not None:
        groups = caption_groups(captions_file, full_plan.videos.ids)

    def task(shard: ShardPlan) -> "ShardTask":
        return ShardTask(
            variant_dir=full_plan.variant_dir,
            shard_id=shard.shard_id,
            split=shard.split,
            plan_fingerprint=shard.plan_fingerprint,
            recipe=plan.recipe,
            spans=tuple(plan.spans(shard.rows)),
            old_commit=full_plan.commits.get(shard.shard_id),
            other_tars=full_plan.changes[shard.shard_id].other_tars if shard.shard_id in full_plan.changes else (),
            captions_file=captions_file,
            caption_groups=()
            if groups is None
            else groups.of_videos(plan.video_rows[shard.rows.start : shard.rows.stop]),
            scratch_bytes=scratch_bytes,
        )

    return Job(
        column=column,
        data_dir=full_plan.data_dir,
        variant_dir=full_plan.variant_dir,
        recipe=dict(plan.recipe.values),
        shards=plan.shards,
        make=make_shard,
        task=task,
        video_ids=lambda shard: [span.video_id for span in plan.spans(shard.rows)],
        planning_failures=[*plan.failed_sources(), *(plan.lost_sources() if column is INDEX else ())],
        read_again=full_plan.read_again,
        chunk_s=plan.mean_chunk_s,
        needs=None if version is None else ("clipmill.prep.video.ffmpeg:version_mismatch", version),
    )


@dataclass(frozen=True)
class CaptionGroups:
    """Row groups of the caption table that contain the captions of each video, so that workers read no other groups.

    Attributes:
        begins: First entry of each video in `groups`, followed by the total number of entries, int64 [videos + 1].
        groups: Row groups of all videos, one video after another, in ascending order for each video, int32 [entries].
    """

    begins: np.ndarray
    groups: np.ndarray

    def of_videos(self, videos: np.ndarray) -> tuple[int, ...]:
        """Return the row groups that contain captions of the videos in the given rows, in ascending order."""
        parts = [self.groups[self.begins[video] : self.begins[video + 1]] for video in np.unique(videos)]
        return tuple(np.unique(np.concatenate(parts)).tolist()) if parts else ()


def caption_groups(captions_file: Path, video_ids: pa.Array) -> CaptionGroups:
    """Find the row groups that contain captions of each video, by reading the ID column of the caption table once."""
    videos, groups = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
    pending_ids: list[pa.Array] = []  # distinct video IDs of each row group that has not been looked up yet
    pending_groups: list[int] = []  # indices of these row groups
    with pq.ParquetFile(captions_file, read_dictionary=["video_id"]) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["video_id"], use_threads=False)
            ids = pc.unique(table["video_id"].unify_dictionaries()).cast(pa.string())
            pending_ids.append(ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids)
            pending_groups.append(group)
            if sum(map(len, pending_ids)) < _IDS_AT_ONCE and group < file.num_row_groups - 1:
                continue
            group_of_id = np.repeat(np.asarray(pending_groups, np.int32), list(map(len, pending_ids)))
            positions = pc.index_in(pa.chunked_array(pending_ids, pa.string()), value_set=video_ids)
            rows = np.asarray(pc.fill_null(positions, -1)).astype(np.int64)
            videos.append(rows[rows >= 0])
            groups.append(group_of_id[rows >= 0])
            pending_ids, pending_groups = [], []
    all_videos, all_groups = np.concatenate(videos), np.concatenate(groups)
    begins = np.concatenate([[0], np.cumsum(np.bincount(all_videos, minlength=len(video_ids)))])
    return CaptionGroups(begins, all_groups[np.argsort(all_videos, kind="stable")])


def _known_chunks(data_dir: Path, recipe: ResolvedRecipe) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (number of chunks of each video, mask of the known numbers, number of videos whose shots are undetected).

    Paths and probes, which take gigabytes for millions of videos, stay in memory only during this function.
    """
    paths = read_videos(data_dir, columns=["path"])["path"]
    columns = ["path", "end_s", *(["fingerprint"] if recipe.settings.cut == "shots" else [])]
    probes, is_known = probes_of(paths, read_probes(data_dir, paths=paths, columns=columns))
    known_shots = shots_of(recipe, probes, shots=_stored_shots(data_dir, recipe), retry_failed=False)
    num_chunks = np.zeros(len(is_known), np.int64)
    num_chunks[is_known] = cutting_of(recipe.settings, frames_of(recipe, probes), known_shots).num_chunks
    undetected = known_shots.undetected_rows if known_shots is not None else np.zeros(0, np.int64)
    is_known[np.flatnonzero(is_known)[undetected]] = False
    return num_chunks, is_known, len(undetected)


def pending_chunks(data_dir: Path, variant: Variant) -> PendingWork:
    """Return the missing part of a variant, without checking whether its sources have changed.

    Raises:
        UserError: The manifest is missing, the recipe has a different schema, or the layout is damaged.
    """
    if not has_manifest(data_dir):
        raise UserError(
            f"{data_dir} has no manifest, so the required chunks are unknown",
            hint="run `prep manifest` to create the manifest again",
        )
    recipe = _stored_recipe(variant)
    videos = Videos(open_videos(data_dir), path=manifest_dir(data_dir) / VIDEOS_FILE)
    paths = videos.column("path")
    probes, is_known = probes_of(paths, read_probes(data_dir, paths=paths))
    shots = _stored_shots(data_dir, recipe)
    video_shots = shots_of(recipe, probes, shots=shots, retry_failed=False) if is_known.all() else None
    if not is_known.all() or (video_shots is not None and len(video_shots.undetected_rows)):
        # The required chunks are unknown, so it is unknown whether the variant is complete.
        return _pending_of_known_videos(data_dir, variant, recipe)
    plan = Plan(
        recipe=recipe,
        videos=videos,
        probes=probes.drop_columns(["path", "mtime_ns"]),
        shots=video_shots,
        layout=read_layout(layout_path(data_dir, recipe.settings)),
        stored=StoredShards(dict(variant.commits), {}),
    )
    pending_work = pending_of(plan.shards)
    left_out = tuple(left_out_lines(left_out_values(plan), cut=recipe.settings.cut))
    state_names = {str(ShardState.NEW): str(ShardState.MISSING)}  # in a variant, a shard without a commit is missing
    to_make = {state_names.get(state, state): count for state, count in pending_work.to_make.items()}
    return replace(pending_work, to_make=to_make, left_out=left_out)


def _pending_of_known_videos(data_dir: Path, variant: Variant, recipe: ResolvedRecipe) -> PendingWork:
    """Return the missing part of a variant, as far as the known probes and shots determine it.

    If the probe or the shots of a video are unknown, all of its spans in the layout count as required.
    """
    num_chunks, is_known, num_undetected = _known_chunks(data_dir, recipe)
    layout = read_layout(layout_path(data_dir, recipe.settings))
    videos = read_videos(data_dir, columns=["video_id", "split"])
    ids, splits = as_array(videos["video_id"]), as_array(videos["split"])
    max_chunks = np.where(is_known, num_chunks, np.iinfo(np.int64).max)
    layout_videos = video_rows_of(layout, ids)
    layout_rows, _ = required_rows(layout, video_rows=layout_videos, splits=splits, num_chunks=max_chunks)
    shard_ids = frozenset(np.asarray(layout["shard_id"])[layout_rows].tolist())
    num_missing = len(shard_ids - variant.commits.keys())
    to_make = {"missing": num_missing} if num_missing else {}
    return PendingWork(to_make=to_make) if num_undetected else PendingWork(int(num_chunks.sum()), shard_ids, to_make)
