"""The `ColumnWork` of `video`: the functions that the commands call, and parts of the reports about plans and runs."""

import math
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, on_one_line, size_text
from clipmill.manifests.plugins import import_late
from clipmill.prep.core.column import Addition
from clipmill.prep.core.failure_list import MAX_ENTRIES, codes_line
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.report import changed_settings, retry_arguments, summary_report
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary, execute
from clipmill.prep.core.variants import lost_samples
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork, Report
from clipmill.prep.video.column import COLUMN, IndexRecipe, Recipe
from clipmill.prep.video.ffmpeg import find_ffmpeg, require_encoder
from clipmill.prep.video.plan import Plan
from clipmill.prep.video.plan_inputs import (
    PlanWithInputs,
    add_missing_shots,
    chunk_job,
    left_out_lines,
    left_out_values,
    make_plan,
    pending_chunks,
    video_list_text,
)
from clipmill.prep.video.spans import EvenCutting, layout_file
from clipmill.prep.video.worker import remove_abandoned
from clipmill.shards.columns import INDEXED, VIDEO
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant

_WORKER_GB = 0.5  # memory per worker; 0.27 GB were measured for a 2160p source (benchmarks/README.md)
_SLOW_BYTES_PER_S = 1e8  # speed of a slow disk, or of one connection to a bucket
_UNINDEXED = '"is_indexed":false'  # part of the JSON of a timeline
_SHORT_TAIL_S = 1  # a shorter tail is too short for most clips


def _require(recipe: Recipe | IndexRecipe) -> None:
    # Only workers import these packages, but the command should report a missing package before it starts workers.
    for package in ("av", "ffmpeg"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    codec = recipe.settings().codec
    if codec == INDEXED:
        return
    ffmpeg = find_ffmpeg()
    if ffmpeg.outdated_program:
        sys.stderr.write(
            f"using the ffmpeg from the imageio-ffmpeg package, because {ffmpeg.outdated_program} is too old\n"
        )
    require_encoder(ffmpeg, codec)


def _plan(data_dir: Path, recipe: Recipe | IndexRecipe, request: Request) -> PlanWithInputs:
    resolved = recipe.resolve()
    engine = None if request.cluster is None else request.open_engine(memory_gb=_WORKER_GB)
    return make_plan(data_dir, resolved, retry_codes=request.retry_codes, engine=engine, part_run=request.part_run)


def _run(plan: PlanWithInputs, recipe: Recipe | IndexRecipe, request: Request, part_run: PartRun | None) -> Summary:
    engine = request.open_engine(memory_gb=_WORKER_GB)
    for line in (*other_settings_lines(plan), *audio_lines(plan)):
        sys.stderr.write(f"{line}\n")
    plan = add_missing_shots(plan, engine)
    job = replace(
        chunk_job(plan, scratch_bytes=request.scratch_bytes),
        lag_limit_s=request.lag_limit_s,
        request_values=request.recorded_flags,
    )
    summary = execute(job, engine, part_run=part_run)
    if plan.detection is not None:
        summary.refused_workers = list(dict.fromkeys([*plan.detection.refused_nodes, *summary.refused_workers]))
    video_plan, detection = plan.plan, plan.detection
    values, lines = left_out_values(video_plan), left_out_report(video_plan)
    if video_plan.shots is not None:
        num_searched, cpu_s = (0, 0.0) if detection is None else (detection.num_videos, detection.cpu_s)
        values = {"num_searched": num_searched, "detection_cpu_s": cpu_s, **values}
        if num_searched:
            lines.insert(0, f"shots    detected in {count_noun(num_searched, 'source')} ({cpu_s:.1f} s of CPU time)")
    summary.added = Addition(lines, values)
    remove_abandoned()  # folders of workers that were lost in this run or an earlier run
    return summary


def audio_lines(full_plan: PlanWithInputs) -> list[str]:
    """Return the lines about omitted audio that are printed before the first run of a variant."""
    plan = full_plan.plan
    if full_plan.commits or plan.recipe.settings.audio != "drop" or not plan.num_with_audio:
        return []
    videos = f"{plan.num_with_audio:,} of {count_noun(plan.num_videos, 'video')}"
    return [f"audio    {videos} have audio, which is omitted; the score `speech` requires --audio keep"]


def other_settings_lines(full_plan: PlanWithInputs) -> list[str]:
    """Return the lines to print before a run if its settings differ from the settings of the current variant."""
    try:
        differences, current_name = differences_from_current(full_plan), current_variant(full_plan.data_dir, VIDEO)
    except UserError:
        return []  # the record is damaged, and the run rewrites it
    if not differences or current_name is None:
        return []
    plan, variant = full_plan.plan, full_plan.plan.recipe.variant
    rows = full_plan.rows_to_encode()
    lines = [f"setting  {difference}" for difference in differences]
    if len(rows) or any(shard.has_work for shard in plan.shards):
        chunks = count_noun(sum(len(span.span.chunk_frames) for span in plan.spans(rows.tolist())), "chunk")
        videos = count_noun(len(np.unique(plan.video_rows[rows])), "video")
        length = duration_text(plan.workload(rows).seconds.sum())
        lines.append(f"variant  {variant}: {chunks} of {videos} to encode, {length} of video")
        command = COLUMN.command_line(plan.recipe.values, data_dir=full_plan.data_dir)
        plan_line = command.replace("prep chunk", "prep plan", 1).replace("prep index", "prep plan index", 1)
        lines.append(f"         `{plan_line}` estimates time and disk")
    else:
        lost = lost_samples(full_plan.data_dir, VIDEO, variant=variant, former_variant=current_name)
        incomplete_state = f"lacks samples of the current variant ({codes_line(lost)}), and does not become current"
        state = incomplete_state if lost else "is complete, and becomes the current variant again"
        lines.append(f"variant  {variant} {state}")
    with suppress(UserError):  # the recipe is from a different version of clipmill
        command = COLUMN.command_line(
            Variant.open(full_plan.data_dir, column=VIDEO).recipe, data_dir=full_plan.data_dir
        )
        lines.append(f"         {current_name} is kept until you run `prep gc`; to use its settings: {command}")
    return lines


def differences_from_current(full_plan: PlanWithInputs) -> list[str]:
    """Return the settings of a plan that differ from the settings of the current variant."""
    recipe = full_plan.plan.recipe
    return changed_settings(full_plan.data_dir, VIDEO, variant=recipe.variant, recipe=recipe.values)


def chunk_summary(summary: Summary, recipe: Recipe | IndexRecipe, list_path: Path) -> Report:
    """Return the report of a run; `list_path` is the path of the list of failures."""
    speed = None
    if summary.cpu_s and summary.encoded_s:
        speed = f"{summary.encoded_s / summary.cpu_s:.1f}x real time per core ({summary.cpu_s:.1f} s of CPU time)"
    retry, verb = retry_arguments(COLUMN, data=list_path.parents[2]), getattr(recipe, "verb", COLUMN.verb)
    return summary_report(summary, list_path=list_path, speed=speed, retry_command=retry, verb=verb)


def left_out_report(plan: Plan) -> list[str]:
    """Return the report lines about the parts of videos that no chunk contains."""
    lines = left_out_lines(left_out_values(plan), cut=plan.recipe.settings.cut)
    return [f"{'' if number else 'left out':<8} {line}" for number, line in enumerate(lines)]


def sources_read_twice(full_plan: PlanWithInputs) -> Addition:
    """Return the report lines about sources without an index. A plan and a run each read these sources completely."""
    plan = full_plan.plan
    videos = np.unique(plan.video_rows[full_plan.rows_to_encode()])
    timelines = plan.probes["timeline"].take(pa.array(videos))
    rows = videos[np.asarray(pc.fill_null(pc.match_substring(timelines, _UNINDEXED), False))]
    size_bytes = int(np.asarray(plan.probes["size_bytes"])[rows].sum())
    first_ids = plan.video_ids(rows[:MAX_ENTRIES].tolist())
    values = {"num_read_twice": len(rows), "read_twice_bytes": size_bytes, "first_read_twice": first_ids}
    duration = f"{duration_text(size_bytes / _SLOW_BYTES_PER_S)} at {size_text(round(_SLOW_BYTES_PER_S))}/s"
    lines = [
        f"twice    {count_noun(len(rows), 'video')} without an index (MKV, TS and others), {size_text(size_bytes)}:"
        f" read completely by a plan, for exact times, and again by the run; each read takes {duration}",
        f"         {video_list_text(first_ids, num_all=len(rows))}",
    ]
    return Addition(lines if len(rows) else [], values)


def short_tails(plan: Plan) -> Addition:
    """Return the report lines about videos whose last chunk is very short; empty with `--cut shots`."""
    if not isinstance(plan.cutting, EvenCutting):
        return Addition([], {})
    fps = plan.recipe.settings.fps_exact
    tails = plan.cutting.short_tails(max_frames=math.ceil(_SHORT_TAIL_S * fps))
    rows = list(tails)[:MAX_ENTRIES]
    first_tails = dict(zip(plan.video_ids(rows), (float(tails[row] / fps) for row in rows), strict=True))
    videos = [f"{on_one_line(video)} {length_s:.2g} s" for video, length_s in first_tails.items()]
    more = ", ..." if len(tails) > len(first_tails) else ""
    lines = [
        f"tails    {count_noun(len(tails), 'video')} with a last chunk shorter than {_SHORT_TAIL_S} s:"
        f" {', '.join(videos)}{more}",
        "         kept, so no frame is lost; --tail merge adds tails to the previous chunk, and --tail drop omits them",
    ]
    return Addition(lines if tails else [], {"num_short_tails": len(tails), "first_short_tails_s": first_tails})


WORK = ColumnWork(
    require=_require,
    plan=_plan,
    run=_run,
    plan_report=import_late("clipmill.prep.video.plan_report:plan_report"),
    explain=import_late("clipmill.prep.video.plan_report:explanation"),
    summary_report=chunk_summary,
    pending=pending_chunks,
    layout_file=lambda stored: layout_file(COLUMN.stored_settings(stored).settings()),
    extra_files=(MERGED_TABLE,),
    sample_report=import_late("clipmill.prep.video.inspection:chunk_report"),
    write_page=import_late("clipmill.prep.video.page.write:write_chunk_page"),
    next_command=lambda data: ["train", "quickstart", str(data)],
)
