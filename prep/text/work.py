"""The `ColumnWork` of `text`: the functions that its commands call, and its reports."""

import shlex
from pathlib import Path

from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.store import captions_path
from clipmill.prep.core.column import WEIGHTS
from clipmill.prep.core.ending import retry_words
from clipmill.prep.core.failure_list import failure_lines, failure_values
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.plan import disk_use
from clipmill.prep.core.recipe import setting_flags
from clipmill.prep.core.report import NOTHING_TO_DO, Report, changed_settings, next_line, states_lines, states_values
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Summary
from clipmill.prep.core.variants import WHERE
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork, ExtraFolder
from clipmill.prep.text.bank import TowerUse, is_intact_block
from clipmill.prep.text.column import COLUMN
from clipmill.prep.text.plan import LAYOUT_FILE, TextPlan, left_out_lines, make_text_plan, pending_text
from clipmill.prep.text.recipe import BANK_FOLDER, BLOCK_FILE, TEXT, TextSettings, local_weights
from clipmill.prep.text.run import run_text
from clipmill.prep.text.t5 import resolve_t5
from clipmill.prep.text.tower import resolve

_BYTES_PER_NUMBER = 2
_WORKER_GB = 2.5  # measured (benchmarks/README.md): CLIP ViT-B-32, batch of 32 on a CPU: 2.1 GB
_CPU_BATCH, _GPU_BATCH = 32, 256  # batches are padded to full size, so on a CPU large batches cost more than they save


def _plan(data_dir: Path, settings: TextSettings, request: Request) -> TextPlan:
    settings.require_encoder()
    recipe = resolve_t5(settings) if settings.clip is None else resolve(settings)
    request.require_variant(recipe.variant, command=shlex.join(["prep", "text", *setting_flags(settings)]))
    return make_text_plan(data_dir, recipe, retry_codes=request.retry_codes)


def _run(plan: TextPlan, settings: TextSettings, request: Request, part_run: PartRun | None) -> Summary:
    gpus_per_worker = request.gpus_per_worker(has_work=any(shard.has_work for shard in plan.shards))
    use = TowerUse(
        plan.recipe,
        batch=request.batch or (_GPU_BATCH if gpus_per_worker and settings.clip is not None else _CPU_BATCH),
        device="cuda" if gpus_per_worker else "cpu",
    )
    engine = request.open_engine(memory_gb=_WORKER_GB, gpus_per_worker=gpus_per_worker)
    return run_text(plan, use, engine, part_run=part_run, lag_limit_s=request.lag_limit_s, asked=request.recorded_flags)


def text_summary(summary: Summary, *, listed: Path) -> Report:
    """Return the report of a run; `listed` is the path of the list of failures."""
    added, num_texts = summary.added.values, summary.num_encoded + summary.num_reused
    lines = [f"variant  {summary.variant}", f"captions {added['num_captions']:,} in the manifest"]
    if summary.num_shards_made or summary.num_encoded:
        lines.append(
            f"made     {count_noun(summary.num_shards_made, 'shard')}: {count_noun(num_texts, 'unique text')},"
            f" {summary.num_encoded:,} encoded, {summary.num_reused:,} copied,"
            f" {size_text(summary.num_bytes_written)} in {summary.wall_s:.1f} s"
        )
        lines += summary.added.lines
    else:
        lines.append("nothing was encoded" if summary.failures else "nothing to encode: all shards are up to date")
    lines += [f"left out {line}" for line in left_out_lines(added["num_left_out"])]
    lines += failure_lines(summary.failures, listed=listed, retry=retry_words(COLUMN, data=listed.parents[2]))
    values = {
        "variant": summary.variant,
        "num_videos": summary.num_chunks,
        "num_captions": added["num_captions"],
        "num_shards": summary.num_shards,
        "num_shards_made": summary.num_shards_made,
        "num_texts": num_texts,
        "num_encoded": summary.num_encoded,
        "num_taken_over": summary.num_reused,
        "num_cut": added["num_cut"],
        "num_left_out": added["num_left_out"],
        "num_bytes_written": summary.num_bytes_written,
        "wall_s": round(summary.wall_s, 3),
        "num_failed_videos": summary.num_failed_videos,
        "unchanged": len(summary.unchanged),
        **failure_values(summary.failures, listed=listed),
        "gave_up": summary.gave_up,
        "refused_workers": [refused.values() for refused in summary.refused_workers],
    }
    return Report("\n".join(lines), values)


def text_report(plan: TextPlan) -> Report:
    """Return the report of a plan: the work by state and reason.

    The number of new texts is not reported, because it is unknown until the captions are read.

    Raises:
        UserError: The table of captions is damaged.
    """
    captions_path(plan.data_dir)  # verified, because a run needs them
    recipe = plan.recipe
    differences = changed_settings(plan.data_dir, TEXT, variant=recipe.variant, recipe=recipe.values)
    num_videos = sum(shard.num_chunks for shard in plan.shards if shard.has_work)
    most_bytes = plan.num_captions * recipe.values["width"] * _BYTES_PER_NUMBER if num_videos else 0
    disk = disk_use(plan.data_dir, column=TEXT, variant=recipe.variant, added_bytes=(0.0, float(most_bytes)))
    further = {WHERE: recipe.settings.where, WEIGHTS: local_weights(recipe)}
    asked = {name: value for name, value in further.items() if value is not None}
    command = COLUMN.command_line({**recipe.values, **asked}, data_dir=plan.data_dir)
    lines = [f"variant  {plan.recipe.variant}", *(f"setting  {difference}" for difference in differences)]
    lines += states_lines(plan.shards, sample="video")
    lines += [f"left out {line}" for line in left_out_lines(plan.num_left_out)]
    if num_videos:
        lines.append(f"estimate at most the captions of {count_noun(num_videos, 'video')} to encode, each text once")
        lines.append("         the duration is unknown until the captions are read; a GPU is many times faster")
        lines += [*disk.lines(), next_line(command)]
    else:
        lines.append(NOTHING_TO_DO)
    values = {
        "variant": plan.recipe.variant,
        "changed_settings": differences,
        "num_videos": plan.num_videos,
        "num_captions": plan.num_captions,
        "num_left_out": plan.num_left_out,
        **states_values(plan.shards, sample="video"),
        "estimate": {"num_videos": num_videos},
        "disk": disk.values(),
        "next": command if num_videos else None,
    }
    return Report("\n".join(lines), values)


WORK = ColumnWork(
    plan=_plan,
    run=_run,
    plan_report=text_report,
    summary_report=lambda summary, recipe, listed: text_summary(summary, listed=listed),
    pending=pending_text,
    layout_file=lambda stored: LAYOUT_FILE,
    extra_folders=(ExtraFolder(BANK_FOLDER, BLOCK_FILE, is_intact_block),),
    extra_files=(MERGED_TABLE,),
    next_command=lambda data: [
        *("train", "dual-encoder", "--shards", str(data), "--text-tower", "frozen", "--out", "runs/frozen-text")
    ],
)
