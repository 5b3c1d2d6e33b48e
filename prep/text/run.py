"""Running a plan of `text`: encode every distinct text once, then write the shards from the bank.

First the bank is filled: embeddings in committed shards of the variant are copied, all other texts are encoded exactly
once. Every text of the shards to be made then has an embedding in the bank, or a recorded reason why not. All state is
in the commits and the bank, so the run can be killed at any time; the next one reuses both.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from clipmill.manifests.progress import Activity
from clipmill.prep.core.column import WEIGHTS
from clipmill.prep.core.failures import FailureCode, loss_code
from clipmill.prep.core.lag import wait_until_seen
from clipmill.prep.core.layout import write_layout
from clipmill.prep.core.part_locks import Part
from clipmill.prep.core.parts import PartRun
from clipmill.prep.core.plan import ShardPlan, with_work
from clipmill.prep.core.progress import warn_refused
from clipmill.prep.core.run import Job, execute
from clipmill.prep.core.selection import make_variant, write_selection
from clipmill.prep.engines import Check, Engine, Outcome, R, Refused, T
from clipmill.prep.engines.admission import worker_ticket
from clipmill.prep.text.bank import Bank, copy_embeddings
from clipmill.prep.text.blocks import Block, BlockResult, TowerUse, blocks_of, encode_block
from clipmill.prep.text.captions import CaptionReader
from clipmill.prep.text.column import COLUMN
from clipmill.prep.text.digests import DigestSet, digests_of, owners_of
from clipmill.prep.text.layout import text_layout_path
from clipmill.prep.text.plan import TextPlan
from clipmill.prep.text.recipe import BANK_FOLDER, TEXT
from clipmill.prep.text.report import TextSummary
from clipmill.prep.text.worker import ShardMaker, TextShardTask
from clipmill.shards.dataset import begin_variant


def run_text(
    plan: TextPlan,
    tower: TowerUse,
    engine: Engine,
    *,
    part_run: PartRun | None = None,
    lag_limit_s: float = 0.0,
    asked: Mapping[str, str] = MappingProxyType({}),
) -> TextSummary:
    """Make every shard of the plan that needs work; call it while holding the lock of the column.

    Parts divide the texts and not the shards, because most shards need texts that occur in several of them. The last
    part makes the shards, which is a matter of copying.

    Args:
        tower: text tower of the plan's recipe.
        engine: engine that encodes the texts.
        part_run: the part whose texts to encode; None for all.
        lag_limit_s: how long to wait for embeddings that workers report and that are not visible here.
        asked: further values of the request that the records keep, by the names of their flags.
    """
    begin_s = time.monotonic()
    if part_run is not None:
        part_run.agree(plan.variant_dir.name, where=plan.recipe.where, package=COLUMN.package)
    write_layout(text_layout_path(plan.data_dir), plan.layout)
    make_variant(plan.variant_dir, plan.recipe.as_dict())
    write_selection(plan.variant_dir, plan.recipe.where, {WEIGHTS: plan.recipe.weights, **asked})
    is_alone = part_run is None or part_run.is_first
    bank = Bank(plan.variant_dir / BANK_FOLDER, width=plan.recipe.width, is_alone=is_alone)
    if part_run is not None:
        begin_variant(plan.data_dir, TEXT, plan.recipe.variant)
        part_run.begin()
    with CaptionReader(plan.data_dir, where=plan.where) as reader:
        with Activity("reading captions"):
            need = needed(plan, reader)
        own = need if part_run is None else need.of_part(part_run.part)
        filled = fill(bank, own, plan=plan, reader=reader, tower=tower, engine=engine)
        if lag_limit_s and filled.error is None and filled.num_encoded:
            what = f"embeddings in {bank.folder}"
            wait_until_seen(what, lambda: _is_filled(bank, own, filled.not_finite), limit_s=lag_limit_s)
        if part_run is not None and not _can_make_shards(bank, need, filled, part_run):
            return _part_summary(plan, own, filled, wall_s=time.monotonic() - begin_s)
        maker = ShardMaker(plan, reader, bank, need.row_groups, filled.not_finite, filled.error)
        job = _job(plan, maker)
        ran = execute(replace(job, asked={**job.asked, **asked}), _LocalEngine())
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
        unchanged=ran.unchanged,
        gave_up=ran.gave_up,
        refused_workers=[*filled.refused, *ran.refused_workers],
    )


def _can_make_shards(bank: Bank, need: "Needed", filled: "Filled", part_run: PartRun) -> bool:
    """Return True for the last part, if the bank has all texts by then; texts that have no embedding count as well."""
    if filled.not_finite:
        bank.add_not_finite(filled.not_finite)
    num_parts = part_run.part.count
    if not part_run.end():
        part_run.tell(_num_encoded(bank, need, num_parts)[part_run.part.number - 1])
        return False
    part_run.await_others(lambda: _num_encoded(bank, need, num_parts))
    missing = _missing(bank, need)
    part_run.unit = "text"
    for owner, count in Counter(owners_of(missing, num_parts=num_parts).tolist()).items():
        part_run.leave_to(owner, count=count)
    return not len(missing)


def _num_encoded(bank: Bank, need: "Needed", num_parts: int) -> Counter[int]:
    """Return the number of texts in the bank that this node sees, by the part that encodes them."""
    bank.refresh()
    return Counter(owners_of(need.digests[bank.has(need.digests)], num_parts=num_parts).tolist())


def _part_summary(plan: TextPlan, own: "Needed", filled: "Filled", *, wall_s: float) -> TextSummary:
    """Return the result of a part that has encoded its texts and makes no shards."""
    files = [commit.files for commit in plan.commits.values() if commit.files is not None]
    return TextSummary(
        variant=plan.recipe.variant,
        num_videos=sum(one.num_samples for one in files),
        num_captions=plan.num_captions,
        num_shards=len(files),
        num_shards_made=0,
        num_texts=len(own.digests),
        num_encoded=filled.num_encoded,
        num_cut=filled.num_cut,
        num_bytes_written=0,
        wall_s=wall_s,
        gave_up=None if filled.error is None else f"{filled.error[0]}: {filled.error[1]}",
        refused_workers=list(filled.refused),
    )


class _LocalEngine:
    """Engine that runs tasks sequentially in the driver: shards are copied from the bank, not computed."""

    def run(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        check: Check | None = None,
        name: Callable[[T], str] | None = None,
    ) -> Iterator[Outcome[T, R] | None]:
        for task in tasks:
            yield Outcome(task, function(task))


def _job(plan: TextPlan, maker: ShardMaker) -> Job[TextShardTask]:
    def video_ids(shard: ShardPlan) -> pa.Array:
        return plan.video_ids[shard.rows.start : shard.rows.stop]

    def task(shard: ShardPlan) -> TextShardTask:
        return TextShardTask(plan.variant_dir, shard.shard_id, shard.split, shard.plan_fingerprint, video_ids(shard))

    return Job(
        column=COLUMN,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=plan.recipe.as_dict(),
        shards=plan.shards,
        make=maker.make,
        task=task,
        video_ids=lambda shard: video_ids(shard).to_pylist(),
        failed_before=[],
        chunk_s=None,
        where=plan.recipe.where,
        asked={WEIGHTS: plan.recipe.weights},
    )


@dataclass(frozen=True)
class Needed:
    """Inputs of the shards that need work.

    Attributes:
        video_ids: ids of the videos in these shards.
        digests: digests of their texts, ascending and unique.
        row_groups: for each shard, the row groups of the table of captions that contain captions of it.
    """

    video_ids: pa.Array
    digests: np.ndarray
    row_groups: dict[int, list[int]]

    def of_part(self, part: Part) -> "Needed":
        """Return the inputs with the texts of a part only."""
        owners = owners_of(self.digests, num_parts=part.count)
        return replace(self, digests=self.digests[owners == part.number - 1])


@dataclass(frozen=True)
class Filled:
    """Result of filling the bank.

    Attributes:
        num_encoded: number of texts encoded.
        num_cut: number of these longer than the tower's context length.
        not_finite: digests of texts that have no embedding.
        error: why the bank lacks other texts, or None if it is complete.
        refused: workers that failed the admission check and received no tasks.
    """

    num_encoded: int
    num_cut: int
    not_finite: frozenset[bytes]
    error: tuple[FailureCode, str] | None
    refused: tuple[Refused, ...] = ()


def needed(plan: TextPlan, reader: CaptionReader) -> Needed:
    """Read the captions of the shards that need work once, for their digests and row groups."""
    work = sorted(with_work(plan.shards), key=lambda shard: shard.shard_id)
    video_ids = pa.concat_arrays([plan.video_ids[:0], *(_ids(plan, shard) for shard in work)])
    if not work:
        return Needed(video_ids, DigestSet().ordered(), {})
    shard_ids = np.repeat([shard.shard_id for shard in work], [len(shard.rows) for shard in work])
    digests = DigestSet()
    row_groups: dict[int, list[int]] = {}
    for piece in reader.pieces(video_ids):
        digests.add(np.unique(digests_of(piece.texts.to_pylist())))
        for shard_id in np.unique(shard_ids[piece.videos]).tolist():
            row_groups.setdefault(shard_id, []).append(piece.row_group)
    return Needed(video_ids, digests.ordered(), row_groups)


def fill(
    bank: Bank,
    need: Needed,
    *,
    plan: TextPlan,
    reader: CaptionReader,
    tower: TowerUse,
    engine: Engine,
) -> Filled:
    """Fill the bank with the embeddings of all needed texts."""
    num_encoded = num_cut = 0
    not_finite: set[bytes] = set()
    error: tuple[FailureCode, str] | None = None
    missing = _missing(bank, need)
    if len(missing) and copy_embeddings(
        plan.variant_dir, missing=missing, bank_dir=bank.folder, width=plan.recipe.width
    ):
        bank.refresh()
        missing = _missing(bank, need)
    if not len(missing):
        return Filled(0, 0, frozenset(), None)
    blocks = blocks_of(reader, need.video_ids, missing=missing, bank_dir=bank.folder, tower=tower)
    refused: list[Refused] = []
    encoding = "encoding texts"
    with worker_ticket(plan.variant_dir, package=COLUMN.package) as ticket, Activity(encoding) as now:
        on_encoded = now.counter(encoding)
        for outcome in engine.run(encode_block, blocks, check=ticket, name=_name):
            if isinstance(outcome, Refused):
                refused.append(outcome)
                warn_refused(outcome)
            elif outcome is not None:
                result = outcome.result or BlockResult(stopped=(loss_code(crashed=outcome.crashed), outcome.lost or ""))
                num_encoded += result.num_encoded
                num_cut += result.num_cut
                not_finite.update(result.not_finite)
                error = result.stopped or error
                if error is not None and error[0] == FailureCode.DISK_FULL:
                    break
            on_encoded(num_encoded, len(missing))
    bank.refresh()
    return Filled(num_encoded, num_cut, frozenset(not_finite), error, tuple(refused))


def _name(block: Block) -> str:
    return f"text {block.number:06d}"


def _is_filled(bank: Bank, need: Needed, not_finite: frozenset[bytes]) -> bool:
    bank.refresh()
    return len(_missing(bank, need)) <= len(not_finite)


def _missing(bank: Bank, need: Needed) -> np.ndarray:
    return np.asarray(need.digests[~bank.has(need.digests)])


def _ids(plan: TextPlan, shard: ShardPlan) -> pa.Array:
    return plan.video_ids[shard.rows.start : shard.rows.stop]
