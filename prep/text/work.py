"""`ColumnWork` of the column `text`: the functions that its commands call, its reports, and the run of a plan.

A run first fills the bank, the temporary store of embeddings (`bank.py`): it copies the embeddings in committed shards
of the variant, and encodes every other text exactly once. The driver itself then makes the shards from the captions and
the bank, because this only copies data. A run can be killed at any time: the next run reuses the commits and the bank.
"""

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from clipmill.manifests.formatting import count_noun, size_text
from clipmill.manifests.progress import Activity
from clipmill.manifests.store import captions_path
from clipmill.prep.core.column import WEIGHTS, Addition
from clipmill.prep.core.data_folder import wait_until_seen
from clipmill.prep.core.failure_list import failure_lines, failure_values
from clipmill.prep.core.failures import FailureCode, loss_code
from clipmill.prep.core.parts import Part, PartRun
from clipmill.prep.core.plan import ShardPlan, disk_use, with_work
from clipmill.prep.core.progress import warn_refused
from clipmill.prep.core.recipe import setting_flags
from clipmill.prep.core.report import (
    NOTHING_TO_DO,
    changed_settings,
    next_line,
    retry_arguments,
    states_lines,
    states_values,
)
from clipmill.prep.core.request import Request
from clipmill.prep.core.run import Job, Summary, execute
from clipmill.prep.core.shard_result import ShardResult, begin_shard, stop_result, system_errors_as_results
from clipmill.prep.core.tables import write_layout
from clipmill.prep.core.variants import WHERE, make_variant, write_selection
from clipmill.prep.core.work import MERGED_TABLE, ColumnWork, ExtraFolder, Report
from clipmill.prep.engines import Check, Engine, Outcome, R, RefusedNode, T
from clipmill.prep.engines.admission import worker_ticket
from clipmill.prep.text.bank import (
    Bank,
    BlockResult,
    TextEncoderOptions,
    blocks_of,
    copy_embeddings,
    encode_block,
    is_intact_block,
)
from clipmill.prep.text.captions import CaptionReader, DigestSet, digests_of, owners_of
from clipmill.prep.text.column import COLUMN
from clipmill.prep.text.plan import (
    LAYOUT_FILE,
    TextPlan,
    left_out_lines,
    make_text_plan,
    pending_text,
    text_layout_path,
)
from clipmill.prep.text.recipe import BANK_FOLDER, BLOCK_FILE, MEMBER, TEXT, TextSettings, local_weights
from clipmill.prep.text.t5 import resolve_t5
from clipmill.prep.text.tower import resolve, texts_with_all
from clipmill.shards.commits import Failure
from clipmill.shards.dataset import begin_variant
from clipmill.shards.format import TEXT_FIELDS
from clipmill.shards.npy import npy_bytes
from clipmill.shards.writer import Sample

_BYTES_PER_VALUE = 4  # two in a shard and, until the run ends, two in the bank
_CAPTION_BYTES, _VIDEO_BYTES, _SHARD_BYTES = 256, 4096, 1 << 15  # maximum bytes of headers, padding and tables
_WORKER_GB = 2.5  # CLIP ViT-B-32 with a batch of 32 takes 2.1 GB on a CPU (benchmarks/README.md)
_CPU_BATCH, _GPU_BATCH = 32, 256  # batches are padded to the full size, so a CPU is slower with large batches


def _plan(data_dir: Path, settings: TextSettings, request: Request) -> TextPlan:
    settings.require_encoder()
    recipe = resolve_t5(settings) if settings.clip is None else resolve(settings)
    request.require_variant(recipe.variant, command=shlex.join(["prep", "text", *setting_flags(settings)]))
    return make_text_plan(data_dir, recipe, retry_codes=request.retry_codes)


def _run(plan: TextPlan, settings: TextSettings, request: Request, part_run: PartRun | None) -> Summary:
    gpus_per_worker = request.gpus_per_worker(has_work=any(shard.has_work for shard in plan.shards))
    encoder = TextEncoderOptions(
        plan.recipe,
        batch=request.batch or (_GPU_BATCH if gpus_per_worker and settings.clip is not None else _CPU_BATCH),
        device="cuda" if gpus_per_worker else "cpu",
    )
    engine = request.open_engine(memory_gb=_WORKER_GB, gpus_per_worker=gpus_per_worker)
    return run_text(
        plan, encoder, engine, part_run=part_run, lag_limit_s=request.lag_limit_s, request_values=request.recorded_flags
    )


def text_summary(summary: Summary, *, list_path: Path) -> Report:
    """Return the report of a run; `list_path` is the path of the list of failures."""
    facts, num_texts = summary.added.values, summary.num_encoded + summary.num_reused
    lines = [f"variant  {summary.variant}", f"captions {facts['num_captions']:,} of the selected videos"]
    if summary.num_shards_made or summary.num_encoded:
        lines.append(
            f"made     {count_noun(summary.num_shards_made, 'shard')}: {count_noun(num_texts, 'unique text')},"
            f" {summary.num_encoded:,} encoded, {summary.num_reused:,} copied,"
            f" {size_text(summary.num_bytes_written)} in {summary.wall_s:.1f} s"
        )
        lines += summary.added.lines
    else:
        lines.append("nothing was encoded" if summary.failures else "nothing to encode: all shards are up to date")
    lines += [f"left out {line}" for line in left_out_lines(facts["num_left_out"])]
    lines += failure_lines(
        summary.failures, list_path=list_path, retry_command=retry_arguments(COLUMN, data=list_path.parents[2])
    )
    values = {
        "variant": summary.variant,
        "num_videos": summary.num_chunks,
        "num_captions": facts["num_captions"],
        "num_shards": summary.num_shards,
        "num_shards_made": summary.num_shards_made,
        "num_texts": num_texts,
        "num_encoded": summary.num_encoded,
        "num_taken_over": summary.num_reused,
        "num_cut": facts["num_cut"],
        "num_left_out": facts["num_left_out"],
        "num_bytes_written": summary.num_bytes_written,
        "wall_s": round(summary.wall_s, 3),
        "num_failed_videos": summary.num_failed_videos,
        "unchanged": len(summary.unchanged),
        **failure_values(summary.failures, list_path=list_path),
        "gave_up": summary.gave_up,
        "refused_workers": [refused.values() for refused in summary.refused_workers],
    }
    return Report("\n".join(lines), values)


def text_report(plan: TextPlan) -> Report:
    """Return the report of a plan: the shards by state and reason, and the disk use.

    The number of new texts is not reported, because it is unknown until a run reads the captions.

    Raises:
        UserError: The table of captions is damaged.
    """
    captions_path(plan.data_dir)  # verify the table of captions, because a run needs it
    recipe = plan.recipe
    differences = changed_settings(plan.data_dir, TEXT, variant=recipe.variant, recipe=recipe.values)
    num_videos = sum(shard.num_chunks for shard in plan.shards if shard.has_work)
    caption_bytes = recipe.values.get("max_tokens", 1) * recipe.values["width"] * _BYTES_PER_VALUE + _CAPTION_BYTES
    max_bytes = plan.num_captions * caption_bytes + plan.num_videos * _VIDEO_BYTES + len(plan.shards) * _SHARD_BYTES
    added_bytes = (0.0, float(max_bytes) if num_videos else 0.0)
    disk = disk_use(plan.data_dir, column=TEXT, variant=recipe.variant, added_bytes=added_bytes)
    flags = {name: value for name, value in ((WHERE, recipe.settings.where), (WEIGHTS, local_weights(recipe))) if value}
    command = COLUMN.command_line({**recipe.values, **flags}, data_dir=plan.data_dir)
    lines = [f"variant  {plan.recipe.variant}", *(f"setting  {difference}" for difference in differences)]
    left_out = (f"left out {line}" for line in left_out_lines(plan.num_left_out))
    lines += [*states_lines(plan.shards, sample="video"), *left_out]
    if num_videos:
        lines.append(f"estimate encode the unique captions of {count_noun(num_videos, 'video')}, unless already stored")
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
    summary_report=lambda summary, recipe, list_path: text_summary(summary, list_path=list_path),
    pending=pending_text,
    layout_file=lambda stored: LAYOUT_FILE,
    extra_folders=(ExtraFolder(BANK_FOLDER, BLOCK_FILE, is_intact_block),),
    extra_files=(MERGED_TABLE,),
    next_command=lambda data: [
        *("train", "dual-encoder", "--shards", str(data), "--text-tower", "frozen", "--out", "runs/frozen-text")
    ],
)


EXTENSIONS = (MEMBER, "json")
# Maximum number of texts to read from the bank at a time: a text takes a kilobyte with CLIP, and megabytes with T5.
_MAX_TEXTS, _MAX_SEQUENCES = 1 << 16, 64


def run_text(
    plan: TextPlan,
    encoder: TextEncoderOptions,
    engine: Engine,
    *,
    part_run: PartRun | None = None,
    lag_limit_s: float = 0.0,
    request_values: Mapping[str, str] = MappingProxyType({}),
) -> Summary:
    """Make every shard of the plan that needs work. The caller must hold the lock of the column.

    With `--part`, the texts are divided among the parts rather than the shards, because most shards share texts with
    other shards. The last part makes all shards.

    Args:
        encoder: Text encoder of the plan's recipe.
        engine: Engine that encodes the texts.
        part_run: Part that encodes only its share of the texts; None to encode all texts.
        lag_limit_s: Maximum time in seconds until embeddings from workers are visible on this machine.
        request_values: Additional values of the request to record with the variant, keyed by flag name.
    """
    begin_s = time.monotonic()
    if part_run is not None:
        part_run.agree(plan.variant_dir.name, where=plan.recipe.settings.where, package=COLUMN.package)
    write_layout(text_layout_path(plan.data_dir), plan.layout)
    make_variant(plan.variant_dir, dict(plan.recipe.values))
    write_selection(
        plan.variant_dir, plan.recipe.settings.where, {WEIGHTS: local_weights(plan.recipe), **request_values}
    )
    is_only_writer = part_run is None or part_run.is_first
    bank = Bank(plan.variant_dir / BANK_FOLDER, width=plan.recipe.values["width"], is_only_writer=is_only_writer)
    if part_run is not None:
        begin_variant(plan.data_dir, TEXT, plan.recipe.variant)
        part_run.begin()
    with CaptionReader(plan.data_dir, where=plan.where) as reader:
        with Activity("reading captions"):
            texts = collect_texts(plan, reader)
        part_texts = texts if part_run is None else texts.select_part(part_run.part)
        bank_result = fill_bank(bank, part_texts, plan=plan, reader=reader, encoder=encoder, engine=engine)
        if lag_limit_s and bank_result.error is None and bank_result.num_encoded:
            subject = f"embeddings in {bank.folder}"
            wait_until_seen(subject, lambda: _is_filled(bank, part_texts, bank_result.not_finite), limit_s=lag_limit_s)
        if part_run is not None and not _can_make_shards(bank, texts, bank_result, part_run):
            # A different part makes the shards, or texts are missing.
            files = [commit.files for commit in plan.commits.values() if commit.files is not None]
            summary = Summary(
                plan.recipe.variant,
                num_shards=len(files),
                num_chunks=sum(file.num_samples for file in files),
                gave_up=None if bank_result.error is None else f"{bank_result.error[0]}: {bank_result.error[1]}",
                refused_workers=list(bank_result.refused),
            )
            return _add_texts(summary, plan, part_texts, bank_result, begin_s=begin_s)
        maker = ShardMaker(plan, reader, bank, texts.row_groups, bank_result.not_finite, bank_result.error)
        summary = execute(_job(plan, maker, request_values), _LocalEngine())
    if summary.num_shards_made == len(with_work(plan.shards)):
        bank.remove()
    summary.refused_workers = [*bank_result.refused, *summary.refused_workers]
    return _add_texts(summary, plan, texts, bank_result, begin_s=begin_s)


def _can_make_shards(bank: Bank, texts: "ShardTexts", bank_result: "BankResult", part_run: PartRun) -> bool:
    """Return True if this is the last part and the bank has rows for all texts (NaN for texts without an embedding)."""
    if bank_result.not_finite:
        bank.add_nan_rows(bank_result.not_finite)
    num_parts = part_run.part.count
    if not part_run.end():
        part_run.report_made(_num_encoded(bank, texts, num_parts)[part_run.part.number - 1])
        return False
    part_run.await_others(lambda: _num_encoded(bank, texts, num_parts))
    missing_digests = bank.find_missing(texts.digests)
    part_run.unit = "text"
    for owner, count in Counter(owners_of(missing_digests, num_parts=num_parts).tolist()).items():
        part_run.count_not_made(owner, count=count)
    return not len(missing_digests)


def _num_encoded(bank: Bank, texts: "ShardTexts", num_parts: int) -> Counter[int]:
    """Return the number of texts of each part that this node can read in the bank, keyed by the index of the part."""
    bank.refresh()
    return Counter(owners_of(texts.digests[bank.has(texts.digests)], num_parts=num_parts).tolist())


def _add_texts(
    summary: Summary, plan: TextPlan, texts: "ShardTexts", bank_result: "BankResult", *, begin_s: float
) -> Summary:
    """Replace the counts in a summary with counts of texts: samples are videos, but a run encodes texts."""
    summary.num_encoded, summary.wall_s = bank_result.num_encoded, time.monotonic() - begin_s
    # All other texts were copied from a shard, or were in the bank of a killed run.
    summary.num_reused = len(texts.digests) - bank_result.num_encoded
    note = f"note     {count_noun(bank_result.num_cut, 'text')} truncated to the encoder's maximum length"
    values = {"num_captions": plan.num_captions, "num_cut": bank_result.num_cut, "num_left_out": plan.num_left_out}
    summary.added = Addition([note] if bank_result.num_cut else [], values)
    return summary


class _LocalEngine:
    """Engine that runs tasks one after another in the driver, because making a shard only copies data."""

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


def _job(plan: TextPlan, maker: "ShardMaker", request_values: Mapping[str, str]) -> "Job[TextShardTask]":
    """Return the job that makes the shards of a plan."""

    def task(shard: ShardPlan) -> TextShardTask:
        ids = plan.ids_of(shard)
        return TextShardTask(plan.variant_dir, shard.shard_id, shard.split, shard.plan_fingerprint, ids)

    return Job(
        column=COLUMN,
        data_dir=plan.data_dir,
        variant_dir=plan.variant_dir,
        recipe=dict(plan.recipe.values),
        shards=plan.shards,
        make=partial(system_errors_as_results, maker.make),
        task=task,
        video_ids=lambda shard: plan.ids_of(shard).to_pylist(),
        planning_failures=[],
        chunk_s=None,
        where=plan.recipe.settings.where,
        request_values={WEIGHTS: local_weights(plan.recipe), **request_values},
    )


@dataclass(frozen=True)
class ShardTexts:
    """Videos and texts of the shards that need work.

    Attributes:
        video_ids: IDs of the videos.
        digests: Digests of the texts of the videos, unique and in ascending order, DIGESTS [texts].
        row_groups: Row groups of the caption table that contain captions of a shard, keyed by shard ID.
    """

    video_ids: pa.Array
    digests: np.ndarray
    row_groups: dict[int, list[int]]

    def select_part(self, part: Part) -> "ShardTexts":
        """Return a copy with only the texts that a part encodes."""
        owners = owners_of(self.digests, num_parts=part.count)
        return replace(self, digests=self.digests[owners == part.number - 1])


@dataclass(frozen=True)
class BankResult:
    """Result of filling the bank.

    Attributes:
        num_encoded: Number of encoded texts.
        num_cut: Number of encoded texts that were truncated to the maximum length of the encoder.
        not_finite: Digests of texts without a finite embedding.
        error: Failure code, and reason why other texts are missing from the bank; None if no other text is missing.
        refused: Workers that failed the admission check and received no tasks.
    """

    num_encoded: int
    num_cut: int
    not_finite: frozenset[bytes]
    error: tuple[FailureCode, str] | None
    refused: tuple[RefusedNode, ...] = ()


def collect_texts(plan: TextPlan, reader: CaptionReader) -> ShardTexts:
    """Read the captions of the shards that need work, and return the digests and row groups."""
    work = sorted(with_work(plan.shards), key=lambda shard: shard.shard_id)
    video_ids = pa.concat_arrays([plan.video_ids[:0], *(plan.ids_of(shard) for shard in work)])
    if not work:
        return ShardTexts(video_ids, DigestSet().pop_sorted(), {})
    shard_ids = np.repeat([shard.shard_id for shard in work], [len(shard.rows) for shard in work])
    digests = DigestSet()
    row_groups: dict[int, list[int]] = {}
    for batch in reader.batches(video_ids):
        digests.add(np.unique(digests_of(batch.texts.to_pylist())))
        for shard_id in np.unique(shard_ids[batch.videos]).tolist():
            row_groups.setdefault(shard_id, []).append(batch.row_group)
    return ShardTexts(video_ids, digests.pop_sorted(), row_groups)


def fill_bank(
    bank: Bank,
    texts: ShardTexts,
    *,
    plan: TextPlan,
    reader: CaptionReader,
    encoder: TextEncoderOptions,
    engine: Engine,
) -> BankResult:
    """Copy embeddings from committed shards to the bank, and encode all other texts."""
    num_encoded = num_cut = 0
    not_finite: set[bytes] = set()
    error: tuple[FailureCode, str] | None = None
    missing_digests = bank.find_missing(texts.digests)
    if len(missing_digests) and copy_embeddings(
        plan.variant_dir, missing_digests=missing_digests, bank_dir=bank.folder, width=plan.recipe.values["width"]
    ):
        bank.refresh()
        missing_digests = bank.find_missing(texts.digests)
    if not len(missing_digests):
        return BankResult(0, 0, frozenset(), None)
    blocks = blocks_of(reader, texts.video_ids, missing_digests=missing_digests, bank_dir=bank.folder, encoder=encoder)
    refused: list[RefusedNode] = []
    activity_text = "encoding texts"
    with worker_ticket(plan.variant_dir, package=COLUMN.package) as ticket, Activity(activity_text) as activity:
        on_encoded = activity.counter(activity_text)
        for outcome in engine.run(encode_block, blocks, check=ticket, name=lambda block: f"text {block.index:06d}"):
            if isinstance(outcome, RefusedNode):
                refused.append(outcome)
                warn_refused(outcome)
            elif outcome is not None:
                result = outcome.result or BlockResult(stop=(loss_code(crashed=outcome.crashed), outcome.lost or ""))
                num_encoded += result.num_encoded
                num_cut += result.num_cut
                not_finite.update(result.not_finite)
                error = result.stop or error
                if error is not None and error[0] == FailureCode.DISK_FULL:
                    break
            on_encoded(num_encoded, len(missing_digests))
    bank.refresh()
    return BankResult(num_encoded, num_cut, frozenset(not_finite), error, tuple(refused))


def _is_filled(bank: Bank, texts: ShardTexts, not_finite: frozenset[bytes]) -> bool:
    bank.refresh()
    return len(bank.find_missing(texts.digests)) <= len(not_finite)


@dataclass(frozen=True)
class TextShardTask:
    """Task that makes one shard from the videos in `video_ids`."""

    variant_dir: Path
    shard_id: int
    split: str
    plan_fingerprint: str
    video_ids: pa.Array


@dataclass(frozen=True)
class ShardMaker:
    """Maker of shards from captions and from embeddings in the bank. It runs in the driver.

    Attributes:
        row_groups: Row groups of the caption table that contain captions of a shard, keyed by shard ID.
        not_finite: Digests of texts without a finite embedding.
        error: Failure code, and reason why other texts are missing from the bank; None if no other text is missing.
    """

    plan: TextPlan
    reader: CaptionReader
    bank: Bank
    row_groups: Mapping[int, Sequence[int]]
    not_finite: frozenset[bytes]
    error: tuple[FailureCode, str] | None

    def make(self, task: TextShardTask) -> ShardResult:
        """Make, publish and commit a shard. Its bytes are reproducible."""
        videos = self._videos(task)
        with begin_shard(
            task,
            column=TEXT,
            split=task.split,
            extensions=EXTENSIONS,
            fields=TEXT_FIELDS,
            num_planned=len(videos),
        ) as shard:
            for video, vectors, lengths in self._read_rows(videos):
                if not len(video.digests) and self.plan.where is not None:
                    continue  # no caption of the video is selected
                if not len(video.digests):
                    message = f"the caption table has no captions of video {video.video_id}"
                    return stop_result(task, FailureCode.IO_ERROR, message)
                is_valid = (lengths > 0) & texts_with_all(np.isfinite(vectors).all(axis=1), lengths)
                if not is_valid.all():
                    missing_digests = [video.digest(row) for row in np.flatnonzero(lengths == 0).tolist()]
                    if not self.not_finite.issuperset(missing_digests):
                        error = (FailureCode.IO_ERROR, "embeddings are missing from the bank")
                        return stop_result(task, *(self.error or error))
                    invalid_rows = np.flatnonzero(~is_valid)
                    text = video.texts[int(invalid_rows[0])]
                    message = (
                        f"non-finite embeddings of {count_noun(len(invalid_rows), 'text')}, for example {text[:80]!r}"
                    )
                    failure = Failure(video.video_id, None, str(FailureCode.NOT_FINITE), message)
                    shard.fail(failure, content=f" {video.video_id} failed")
                    continue
                is_sequence = self.plan.recipe.settings.encoder is not None
                row_tokens = lengths.tolist() if is_sequence else []
                shard.add(video.sample(vectors, split=task.split, row_tokens=row_tokens))
            return shard.commit()

    def _read_rows(self, videos: list["_VideoTexts"]) -> Iterator[tuple["_VideoTexts", np.ndarray, np.ndarray]]:
        """Yield each video with the rows and lengths of its texts. The bank is read for several videos at a time."""
        max_texts = _MAX_TEXTS if self.plan.recipe.settings.encoder is None else _MAX_SEQUENCES
        for group in _groups(videos, max_texts=max_texts):
            vectors, lengths = self.bank.rows(np.concatenate([video.digests for video in group]))
            text_ends = np.cumsum([len(video.digests) for video in group])
            row_ends = np.concatenate([[0], np.cumsum(lengths)])
            for video, end in zip(group, text_ends.tolist(), strict=True):
                start = end - len(video.digests)
                yield video, vectors[row_ends[start] : row_ends[end]], lengths[start:end]

    def _videos(self, task: TextShardTask) -> "list[_VideoTexts]":
        """Read the texts of a shard's videos, in order."""
        batches = list(self.reader.batches(task.video_ids, row_groups=self.row_groups.get(task.shard_id, ())))
        if not batches:
            return [_VideoTexts.of(video_id, np.empty(0, np.int64), []) for video_id in task.video_ids.to_pylist()]
        videos = np.concatenate([batch.videos for batch in batches])
        ids = np.concatenate([batch.ids for batch in batches])
        order = np.lexsort((ids, videos))
        ids = ids[order]
        texts = pa.concat_arrays([batch.texts for batch in batches]).take(pa.array(order))
        bounds = np.searchsorted(videos[order], np.arange(len(task.video_ids) + 1)).tolist()
        return [
            _VideoTexts.of(video_id.as_py(), ids[start:end], texts[start:end].to_pylist())
            for video_id, start, end in zip(task.video_ids, bounds[:-1], bounds[1:], strict=True)
        ]


@dataclass(frozen=True)
class _VideoTexts:
    """Unique texts of a video, in the order of their first captions.

    Attributes:
        texts: Unique texts.
        digests: Digests of the texts, DIGESTS [texts].
        caption_ids: IDs of the captions, in ascending order.
        caption_rows: Index into `texts` for each caption.
    """

    video_id: str
    texts: list[str]
    digests: np.ndarray
    caption_ids: list[int]
    caption_rows: list[int]

    @classmethod
    def of(cls, video_id: str, ids: np.ndarray, texts: list[str]) -> "_VideoTexts":
        text_rows: dict[str, int] = {}
        rows = [text_rows.setdefault(text, len(text_rows)) for text in texts]
        return cls(video_id, list(text_rows), digests_of(text_rows), ids.tolist(), rows)

    def digest(self, row: int) -> bytes:
        """Return the digest of the text in a row."""
        return self.digests[row : row + 1].tobytes()

    def sample(self, vectors: np.ndarray, *, split: str, row_tokens: list[int]) -> Sample:
        """Return the sample of the video.

        Args:
            vectors: Embeddings or sequences of the texts, float16 [texts or tokens, width].
            split: Split of the shard.
            row_tokens: Number of tokens of each text; empty for embeddings.
        """
        description = {
            "video_id": self.video_id,
            "split": split,
            "texts": self.texts,
            "caption_id": self.caption_ids,
            "caption_row": self.caption_rows,
            **({"row_tokens": row_tokens} if row_tokens else {}),
        }
        return Sample(
            key=self.video_id,
            members={MEMBER: npy_bytes(vectors), "json": json.dumps(description, ensure_ascii=False).encode()},
            fields={
                "video_id": self.video_id,
                "num_rows": len(self.texts),
                "width": vectors.shape[1],
                "row_tokens": row_tokens,
                "text_digest": [self.digest(row) for row in range(len(self.texts))],
                "caption_id": self.caption_ids,
                "caption_row": self.caption_rows,
            },
        )


def _groups(videos: list[_VideoTexts], *, max_texts: int) -> Iterator[list[_VideoTexts]]:
    """Yield the videos in groups of at most `max_texts` texts; a video with more texts forms its own group."""
    group: list[_VideoTexts] = []
    num_texts = 0
    for video in videos:
        if group and num_texts + len(video.texts) > max_texts:
            yield group
            group, num_texts = [], 0
        group.append(video)
        num_texts += len(video.texts)
    if group:
        yield group
