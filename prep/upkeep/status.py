"""The status of a data folder, from its records alone: it takes seconds for a dataset of any size."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import has_manifest, read_videos
from clipmill.prep.core.column import ColumnSpec, Pending
from clipmill.prep.core.disk_use import folder_bytes
from clipmill.prep.core.ending import length_of
from clipmill.prep.core.failure_list import (
    FAILURES_FILE,
    MAX_NAMED,
    FailureEntry,
    first_failures,
    first_few,
    named_values,
)
from clipmill.prep.core.layout import DamagedLayout, variants_of
from clipmill.prep.core.lost_samples import lost_samples
from clipmill.prep.core.plan import problems_of
from clipmill.prep.core.selection import WHERE, read_selection
from clipmill.prep.core.shard_result import ShardProgress, running_shards
from clipmill.prep.core.work import work_of
from clipmill.prep.core.writers import has_stopped, writer_of
from clipmill.prep.registry import columns
from clipmill.prep.sources.table import num_to_read, probes_of, read_probes
from clipmill.prep.upkeep.caption_sources import CaptionsBeyond, CaptionSource, captions_beyond, read_caption_sources
from clipmill.prep.upkeep.own_names import late_files
from clipmill.shards.commits import Failure
from clipmill.shards.dataset import current_variant, unfinished_variant
from clipmill.shards.reader import Variant
from clipmill.shards.scores import Leakage, find_leakage


@dataclass(frozen=True)
class VariantStatus:
    """Status of one variant of a column.

    Attributes:
        num_shards: number of committed shards that hold samples. num_samples counts their samples: chunks, or videos
            for `text`.
        hours: hours of video in the shards whose length is known; 0 for `text`.
        failures: code -> number of spans, chunks or videos that failed, from the commits.
        num_wanted: number of samples that the recipe requires; None if unknown.
        where: condition on the samples that the last run wanted; None for all.
        num_running: number of samples made so far in shards that are not committed yet; None if no worker is running.
        num_missing: number of shards that a variant which is not current lacks; `ColumnStatus.to_make` has those of the
            current one.
        num_unread: number of shards that `hours` lacks: their index cannot be read since before the last run ended.
        lost: code -> number of failures that keep the variant from becoming the current one (`lost_samples`).
        left_out: What its settings leave out, such as tails, in lines.
        is_late: whether a late run has written it after `prep gc` had removed the variant (`late_files`).
    """

    name: str
    is_current: bool
    size_bytes: int
    num_shards: int
    num_samples: int
    hours: float
    failures: dict[str, int]
    num_wanted: int | None
    num_running: int | None
    where: str | None = None
    num_missing: int = 0
    num_unread: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    is_late: bool = False


@dataclass(frozen=True)
class ColumnStatus:
    """Status of one column.

    Attributes:
        problems: (shard id, "missing" or "corrupt", reason) for the current variant.
        stale_because: why the current variant differs from what would be made now, or None.
        to_make: state -> number of shards that the column's command would make, by what is known of the sources.
        num_orphaned: number of shards that it would remove.
        file_problems: why files of the current variant that are derived from its shards cannot be used.
        failures_file: list of the last run's failures, if there were any.
        first_failures: the first few failures of the current variant; for `video`, also of unusable sources.
        written_by: the command that writes the column of a data folder in a bucket, or None.
    """

    column: str
    variants: list[VariantStatus] = field(default_factory=list)
    problems: list[tuple[int, str, str]] = field(default_factory=list)
    stale_because: str | None = None
    to_make: dict[str, int] = field(default_factory=dict)
    num_orphaned: int = 0
    file_problems: list[str] = field(default_factory=list)
    failures_file: Path | None = None
    first_failures: list[FailureEntry] = field(default_factory=list)
    written_by: str | None = None

    @property
    def current(self) -> VariantStatus | None:
        return next((variant for variant in self.variants if variant.is_current), None)

    def values(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        problems = [
            {"shard_id": shard_id, "state": state, "message": message} for shard_id, state, message in self.problems
        ]
        return {
            "current": None if self.current is None else self.current.name,
            "variants": [asdict(variant) for variant in self.variants],
            "problems": problems,
            "stale_because": self.stale_because,
            "to_make": self.to_make,
            "num_orphaned": self.num_orphaned,
            "file_problems": self.file_problems,
            "failures_file": None if self.failures_file is None else os.fspath(self.failures_file),
            "first_failures": named_values(self.first_failures),
            **({"written_by": self.written_by} if self.written_by else {}),
        }


@dataclass(frozen=True)
class VideosStatus:
    """Status of the manifest's videos, from their last probe.

    Attributes:
        unusable: code -> number of videos from which nothing can be made.
        first_unusable: the first few of them.
        lost: code -> number of videos that were usable before and cannot be read now; what was made from them is kept.
        first_lost: the first few of them.
        num_to_read: number of failed sources that a plan reads again: their failure may pass, or the file has changed.
        num_with_audio: number of usable videos whose source has audio.
        num_noted: number of videos with something that may surprise, such as HDR or several video tracks.
        first_notes: what it is in the first few of them, by ID.
        num_captions_beyond: captions that begin after the end of their video, among the probed ones; None if unknown.
        num_captions_ending_beyond: the others that end more than a second after it, likewise.
        first_captions_beyond: the first few of both.
        caption_sources: None if the table of captions is damaged.
    """

    num_videos: int
    num_captions: int
    num_usable: int
    num_not_probed: int
    unusable: dict[str, int]
    first_unusable: list[FailureEntry]
    lost: dict[str, int]
    first_lost: list[FailureEntry]
    caption_sources: list[CaptionSource] | None
    num_to_read: int = 0
    num_with_audio: int = 0
    num_noted: int = 0
    first_notes: dict[str, list[str]] = field(default_factory=dict)
    num_captions_beyond: int | None = None
    num_captions_ending_beyond: int | None = None
    first_captions_beyond: list[FailureEntry] = field(default_factory=list)


@dataclass(frozen=True)
class Status:
    """Everything that `prep status` reports; `columns` holds all columns, including those without variants.

    Attributes:
        leakage: None without scores.
        damaged: errors of damaged records that the status itself can do without.
    """

    data_dir: Path
    videos: VideosStatus | None
    columns: dict[str, ColumnStatus]
    leakage: Leakage | None = None
    damaged: tuple[UserError, ...] = ()

    @property
    def num_problems(self) -> int:
        return sum(len(column.problems) for column in self.columns.values())

    def values(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        return {
            "data": os.fspath(self.data_dir),
            "videos": None if self.videos is None else asdict(self.videos),
            "columns": {name: column.values() for name, column in self.columns.items()},
            "leakage": None if self.leakage is None else self.leakage.values(),
        }


def read_status(data_dir: Path) -> Status:
    """Read the status of the data folder.

    Raises:
        UserError: a record is unreadable or of another version.
    """
    is_written = has_manifest(data_dir)
    damaged: list[UserError] = []
    videos = _videos_status(data_dir, damaged) if is_written else None

    def column_status(column: ColumnSpec) -> ColumnStatus:
        unusable = videos.first_unusable if videos is not None and column.is_first else []
        return _column_status(data_dir, column, damaged, unusable=unusable)

    return Status(
        data_dir,
        videos=videos,
        columns={column.name: column_status(column) for column in columns()},
        leakage=find_leakage(data_dir) if is_written else None,
        damaged=tuple(damaged),
    )


def _column_status(
    data_dir: Path, column: ColumnSpec, damaged: list[UserError], *, unusable: list[FailureEntry]
) -> ColumnStatus:
    current, unfinished = current_variant(data_dir, column.name), unfinished_variant(data_dir, column.name)
    variants, status = [], ColumnStatus(column.name, first_failures=unusable)
    is_abandoned = has_stopped(data_dir, column=column.name)
    for opened in variants_of(data_dir, column.name):
        name, pending = opened.directory.name, _pending(data_dir, column, opened)
        if name == current:
            try:
                _ = opened.recipe
            except UserError as error:
                damaged.append(error)
            listed = opened.directory / FAILURES_FILE
            status = ColumnStatus(
                column.name,
                problems=[(shard_id, state, why) for shard_id, (state, why) in problems_of(opened).items()],
                stale_because=pending.stale_because,
                to_make=pending.to_make,
                num_orphaned=pending.num_orphaned,
                file_problems=work_of(column).file_problems(opened),
                failures_file=listed if listed.exists() else None,
                first_failures=first_few([*unusable, *first_failures(_failures(opened))]),
            )
        running = [] if is_abandoned else running_shards(opened.directory)
        lost = lost_samples(data_dir, column.name, variant=name, former=current) if name == unfinished else []
        found = _variant_status(opened, pending, is_current=name == current, running=running)
        variants.append(replace(found, lost=dict(Counter(failure.code for failure in lost).most_common())))
    variants.sort(key=lambda variant: not variant.is_current)
    return replace(status, variants=variants, written_by=writer_of(data_dir, column=column.name))


def _pending(data_dir: Path, column: ColumnSpec, variant: Variant) -> Pending:
    try:
        return work_of(column).pending(data_dir, variant)
    except DamagedLayout:
        raise
    except UserError:
        return Pending()


def _failures(variant: Variant) -> Iterator[Failure]:
    return (failure for commit in variant.commits.values() for failure in commit.failures)


def _sources(data_dir: Path, damaged: list[UserError]) -> list[CaptionSource] | None:
    try:
        return read_caption_sources(data_dir)
    except UserError as error:
        damaged.append(error)
        return None


def _beyond(
    data_dir: Path, video_ids: pa.ChunkedArray, ends_s: np.ndarray, damaged: list[UserError]
) -> CaptionsBeyond | None:
    try:
        return captions_beyond(data_dir, video_ids=video_ids, end_s=ends_s)
    except UserError as error:
        damaged.append(error)
    except (OSError, pa.ArrowException):
        pass  # `_sources` names the damage
    return None


def _videos_status(data_dir: Path, damaged: list[UserError]) -> VideosStatus:
    videos = read_videos(data_dir, columns=["video_id", "path", "num_captions"])
    columns = ["path", "size_bytes", "mtime_ns", "code", "message", "end_s", "num_audio", "notes"]
    probes = read_probes(data_dir, paths=videos["path"], columns=columns)
    mine, is_known = probes_of(videos["path"], probes)
    ids = videos["video_id"] if is_known.all() else videos["video_id"].filter(pa.array(is_known))
    mine = mine.append_column("video_id", ids)
    ends_s = np.full(len(videos), np.inf)
    ends_s[is_known] = pc.fill_null(mine["end_s"], np.inf).to_numpy()
    is_usable = pc.is_valid(mine["end_s"])  # as is its fingerprint, a gigabyte of ten million videos
    unusable = mine.filter(pc.invert(is_usable))
    lost = mine.filter(pc.and_(is_usable, pc.is_valid(mine["code"])))
    noted = mine.filter(pc.fill_null(pc.not_equal(mine["notes"], ""), False))
    sources, beyond = _sources(data_dir, damaged), _beyond(data_dir, videos["video_id"], ends_s, damaged)
    return VideosStatus(
        num_videos=len(videos),
        num_captions=pc.sum(videos["num_captions"]).as_py() or 0,
        num_usable=pc.sum(is_usable).as_py() or 0,
        num_not_probed=len(videos) - len(mine),
        unusable=dict(Counter[str](unusable["code"].to_pylist()).most_common()),
        first_unusable=_first_sources(unusable),
        lost=dict(Counter[str](lost["code"].to_pylist()).most_common()),
        first_lost=_first_sources(lost),
        caption_sources=sources,
        num_to_read=num_to_read(mine),
        num_with_audio=pc.sum(pc.greater(mine["num_audio"], 0)).as_py() or 0,
        num_noted=len(noted),
        first_notes={row["video_id"]: row["notes"].splitlines() for row in noted.slice(0, MAX_NAMED).to_pylist()},
        num_captions_beyond=None if beyond is None else beyond.num_begin,
        num_captions_ending_beyond=None if beyond is None else beyond.num_end,
        first_captions_beyond=[] if beyond is None else beyond.first,
    )


def _first_sources(probes: pa.Table) -> list[FailureEntry]:
    """Return the first few failed sources of each code."""
    of_code = (probes.filter(pc.equal(probes["code"], code)).slice(0, MAX_NAMED) for code in probes["code"].unique())
    rows = (row for table in of_code for row in table.select(["video_id", "code", "path", "message"]).to_pylist())
    return first_few(FailureEntry(row["video_id"], row["code"], f"{row['path']}: {row['message']}") for row in rows)


def _variant_status(
    variant: Variant, pending: Pending, *, is_current: bool, running: list[ShardProgress]
) -> VariantStatus:
    shards, length = variant.shards(), length_of(variant)
    codes = Counter(failure.code for failure in _failures(variant))
    done = sum(shard.num_done for shard in running if shard.shard_id not in variant.commits)
    return VariantStatus(
        name=variant.directory.name,
        is_current=is_current,
        size_bytes=folder_bytes(variant.directory),
        num_shards=len(shards),
        num_samples=sum(shard.num_samples for shard in shards),
        hours=length.seconds / 3600,
        failures=dict(codes.most_common()),
        num_wanted=pending.num_wanted,
        num_running=done if running else None,
        where=_where_of(variant),
        num_missing=0 if is_current else len((pending.wanted_shards or frozenset()) - variant.commits.keys()),
        num_unread=length.num_unread,
        left_out=pending.left_out,
        is_late=not is_current and bool(late_files(variant.directory, variant.directory.parent.name)),
    )


def _where_of(variant: Variant) -> str | None:
    try:
        return read_selection(variant.directory).get(WHERE)
    except UserError:
        return "unknown: the record is damaged"
