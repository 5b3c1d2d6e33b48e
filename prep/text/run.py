"""Carrying a plan of `text` out: every distinct text through the tower once, then shards from the bank.

What is known lies in commits and bank, so the run can be killed at any moment. The next one takes over what both hold.
"""

import time
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from prep.core.data_folder import TEXT
from prep.core.layout import write_layout
from prep.core.run import Job, execute, make_variant, with_work
from prep.engines import Check, Engine, Outcome, R, T
from prep.text.bank import BANK_FOLDER, Bank
from prep.text.blocks import TowerUse
from prep.text.captions import CaptionReader
from prep.text.filling import fill, needed
from prep.text.layout import text_layout_path
from prep.text.plan import TextPlan
from prep.text.report import TextSummary
from prep.text.worker import ShardMaker, TextShardTask
from prep.video.plan import ShardPlan


def run_text(
    plan: TextPlan,
    tower: TowerUse,
    engine: Engine,
    *,
    on_encoded: Callable[[int, int], None] = lambda done, total: None,
) -> TextSummary:
    """Makes every shard of the plan that has work; call it while holding the column.

    Args:
        tower: of the plan's recipe.
        engine: where texts are encoded.
        on_encoded: called with (encoded, to encode) now and then.
    """
    begin_s = time.monotonic()
    write_layout(text_layout_path(plan.data_dir), plan.layout)
    make_variant(plan.variant_dir, plan.recipe.as_dict())
    bank = Bank(plan.variant_dir / BANK_FOLDER, width=plan.recipe.width)
    with CaptionReader(plan.data_dir) as reader:
        need = needed(plan, reader)
        filled = fill(bank, need, plan=plan, reader=reader, tower=tower, engine=engine, on_encoded=on_encoded)
        maker = ShardMaker(plan, reader, bank, need.row_groups, filled.not_finite, filled.trouble)
        ran = execute(_job(plan, maker), _Here())
    if ran.num_shards_made == len(with_work(plan.shards)):
        bank.remove()
    return TextSummary(
        variant=plan.recipe.variant,
        num_videos=ran.num_chunks,
        num_captions=plan.num_captions,
        num_shards=ran.num_shards,
        num_shards_made=ran.num_shards_made,
        num_texts=len(need.digests),
        num_encoded=filled.num_encoded,
        num_cut=filled.num_cut,
        num_bytes_written=ran.num_bytes_written,
        wall_s=time.monotonic() - begin_s,
        failures=ran.failures,
        gave_up=ran.gave_up,
        refused_workers=[*filled.refused, *ran.refused_workers],
    )


class _Here:
    """The engine that runs tasks in the driver, one after another: shards are copied from the bank, not computed."""

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None
    ) -> Iterator[Outcome[T, R] | None]:
        for task in tasks:
            yield Outcome(task, function(task))


def _job(plan: TextPlan, maker: ShardMaker) -> Job[TextShardTask]:
    def video_ids(shard: ShardPlan) -> pa.Array:
        return plan.video_ids[shard.rows.start : shard.rows.stop]

    def task(shard: ShardPlan) -> TextShardTask:
        return TextShardTask(shard.shard_id, shard.split, shard.plan_fingerprint, video_ids(shard))

    return Job(
        column=TEXT,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=maker.make,
        task=task,
        video_ids=lambda shard: video_ids(shard).to_pylist(),
        failed_before=[],
        chunk_s=None,
    )
