"""`prep status`: read the status of a data folder from its records, and format the status.

Only records such as commits, indexes and probes are read, never tars. This takes seconds for a dataset of any size.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.caption_spans import is_model_source
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line, size_text
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.manifests.store import has_manifest, read_videos
from clipmill.prep.core.column import ColumnSpec, PendingWork
from clipmill.prep.core.data_folder import has_stopped, writer_of
from clipmill.prep.core.failure_list import (
    FAILURES_FILE,
    MAX_ENTRIES,
    FailureEntry,
    entry_lines,
    entry_values,
    first_failures,
    first_few,
    lost_source_lines,
    note_lines,
)
from clipmill.prep.core.failures import TRANSIENT
from clipmill.prep.core.other_splits import LostTime, lost_lines, stored_lost_times
from clipmill.prep.core.plan import NUM_CHECK_THREADS, folder_bytes, problems_of
from clipmill.prep.core.report import REPAIR, length_of, length_text, retry_arguments
from clipmill.prep.core.shard_result import ShardProgress, running_shards
from clipmill.prep.core.tables import DamagedLayout, variants_of
from clipmill.prep.core.variants import WHERE, lost_samples, read_selection, stored_request
from clipmill.prep.core.work import work_of
from clipmill.prep.registry import column_named, columns
from clipmill.prep.sources.table import add_changed_files, num_to_read, probes_of, read_probes
from clipmill.prep.upkeep.caption_sources import CaptionSource, find_late_captions, read_caption_sources
from clipmill.prep.upkeep.garbage import late_files
from clipmill.shards.columns import VIDEO, command_for, is_indexed
from clipmill.shards.commits import Failure
from clipmill.shards.dataset import current_variant, unfinished_variant, variant_dir
from clipmill.shards.marks import Readers, list_readers
from clipmill.shards.reader import Variant
from clipmill.shards.scores import Leakage, find_leakage


@dataclass(frozen=True)
class VariantStatus:
    """Status of one variant of a column.

    Attributes:
        name: Name of the variant.
        is_current: True if the variant is the current variant of its column.
        size_bytes: Total size of the files in the variant's folder.
        num_shards: Number of committed shards that contain samples.
        num_samples: Number of samples in the committed shards. A sample is a chunk or, in the column `text`, a video.
        hours: Hours of video in the committed shards with a readable index; 0 for `text`.
        failures: Number of failures in the commits, keyed by failure code.
        num_failed_videos: Number of videos with failures in the commits.
        num_wanted: Number of samples that the variant should have; None if unknown.
        num_running: Number of finished samples in shards that are not committed yet; None if no worker is running.
        where: Condition that selected the samples of the last run; None if the run selected all samples.
        num_missing: Number of missing shards; always 0 for the current variant, whose missing shards are in
            `ColumnStatus.to_make`.
        num_unread: Number of shards with an unreadable index. `hours` does not include these shards.
        lost: Number of failures that prevent the variant from becoming current (`lost_samples`), keyed by failure code.
        left_out: Lines about parts of videos that the settings omit, such as tails.
        is_late: True if a run wrote the files after `prep gc` had removed the variant (`late_files`).
        readers: Descriptions of the processes and unfinished training runs that read the variant.
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
    num_failed_videos: int = 0
    left_out: tuple[str, ...] = ()
    is_late: bool = False
    readers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ColumnStatus:
    """Status of one column.

    Attributes:
        column: Name of the column.
        variants: Status of each variant, the current variant first.
        problems: Missing and damaged shards of the current variant, as (shard ID, "missing" or "corrupt", reason).
        stale_because: Reason why the column's command would now make a different variant; None if it would not.
        to_make: Number of shards, keyed by state, that the column's command would make according to the last probes.
        num_orphaned: Number of shards that the column's command would remove.
        file_problems: Problems of files that are derived from the shards of the current variant.
        failures_file: Path of the list of failures of the last run; None if the last run had no failures.
        first_failures: First few failures of the current variant and, for the column `video`, of unusable sources.
        written_by: Command that is writing the column of a data folder in a bucket; None if there is no such command.
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
    def current_status(self) -> VariantStatus | None:
        """Status of the current variant; None if no variant is current."""
        return next((variant for variant in self.variants if variant.is_current), None)

    def values(self) -> dict[str, Any]:
        """Return the status of the column as JSON values."""
        problems = [
            {"shard_id": shard_id, "state": state, "message": message} for shard_id, state, message in self.problems
        ]
        return {
            "current": None if self.current_status is None else self.current_status.name,
            "variants": [asdict(variant) for variant in self.variants],
            "problems": problems,
            "stale_because": self.stale_because,
            "to_make": self.to_make,
            "num_orphaned": self.num_orphaned,
            "file_problems": self.file_problems,
            "failures_file": None if self.failures_file is None else os.fspath(self.failures_file),
            "first_failures": entry_values(self.first_failures),
            **({"written_by": self.written_by} if self.written_by else {}),
        }


@dataclass(frozen=True)
class VideosStatus:
    """Status of the videos in the manifest, according to their last probe.

    Attributes:
        num_videos: Number of videos in the manifest.
        num_captions: Number of captions in the manifest.
        num_usable: Number of videos from which chunks can be made.
        num_not_probed: Number of videos that have not been probed yet.
        unusable: Number of videos from which no chunks can be made, keyed by failure code.
        first_unusable: First few unusable videos.
        lost: Number of videos that were usable before but can no longer be read, keyed by failure code. Their samples
            are kept.
        first_lost: First few lost videos.
        caption_sources: Sources of captions; None if the caption table is damaged.
        is_indexed: True if the packets of the current chunks are in the sources (`prep index`). Then the size and
            modification time of each source were compared with the values in its probe.
        num_to_read: Number of failed sources that the next run probes again, because the failure is transient or the
            file has changed.
        num_with_audio: Number of usable videos with audio.
        num_noted: Number of videos with unusual properties, such as HDR or several video tracks.
        first_notes: Notes on the first few videos with unusual properties, keyed by video ID.
        num_captions_beyond: Number of captions of probed videos that begin at or after the end of their video; None if
            unknown.
        num_captions_ending_beyond: Number of other captions of probed videos that end more than a second after the end
            of their video; None if unknown.
        first_captions_beyond: First few captions that begin or end after the end of their video.
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
    is_indexed: bool = False
    num_to_read: int = 0
    num_with_audio: int = 0
    num_noted: int = 0
    first_notes: dict[str, list[str]] = field(default_factory=dict)
    num_captions_beyond: int | None = None
    num_captions_ending_beyond: int | None = None
    first_captions_beyond: list[FailureEntry] = field(default_factory=list)


@dataclass(frozen=True)
class Status:
    """Status of a data folder.

    Attributes:
        data_dir: Data folder.
        videos: Status of the videos; None if the data folder has no manifest.
        columns: Status of each column, keyed by column name, including columns without variants.
        leakage: Chunks in different splits that look alike; None if there are no scores.
        lost: Time that each split loses because its videos have captions of other splits, keyed by split.
        damaged: Errors about damaged records. All other records were read.
    """

    data_dir: Path
    videos: VideosStatus | None
    columns: dict[str, ColumnStatus]
    leakage: Leakage | None = None
    lost: Mapping[str, LostTime] = field(default_factory=dict)
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
            "of_other_splits": {split: asdict(time) for split, time in self.lost.items()},
        }


def read_status(data_dir: Path) -> Status:
    """Read the status of a data folder.

    Raises:
        UserError: A required record cannot be read, or has a different version.
    """
    has_videos = has_manifest(data_dir)
    damaged: list[UserError] = []
    videos = _videos_status(data_dir, damaged) if has_videos else None
    unusable = [] if videos is None else videos.first_unusable
    readers = list_readers(data_dir)
    return Status(
        data_dir,
        videos=videos,
        columns={
            column.name: _column_status(
                data_dir, column, damaged, unusable=unusable if column.is_first else [], readers=readers
            )
            for column in columns()
        },
        leakage=find_leakage(data_dir) if has_videos else None,
        lost=stored_lost_times(data_dir) if has_videos else {},
        damaged=tuple(damaged),
    )


def _column_status(
    data_dir: Path, column: ColumnSpec, damaged: list[UserError], *, unusable: list[FailureEntry], readers: Readers
) -> ColumnStatus:
    current, unfinished = current_variant(data_dir, column.name), unfinished_variant(data_dir, column.name)
    variants, status = [], ColumnStatus(column.name, first_failures=unusable)
    is_abandoned = has_stopped(data_dir, column=column.name)
    for variant in variants_of(data_dir, column.name):
        name, pending = variant.directory.name, PendingWork()
        try:
            pending = work_of(column).pending(data_dir, variant)
        except DamagedLayout:
            raise
        except UserError:
            pass  # the remaining work is unknown
        if name == current:
            try:
                _ = variant.recipe
            except UserError as error:
                damaged.append(error)
            failures_file = variant.directory / FAILURES_FILE
            status = ColumnStatus(
                column.name,
                problems=[(shard_id, state, why) for shard_id, (state, why) in problems_of(variant).items()],
                stale_because=pending.stale_because,
                to_make=pending.to_make,
                num_orphaned=pending.num_orphaned,
                file_problems=work_of(column).file_problems(variant),
                failures_file=failures_file if failures_file.exists() else None,
                first_failures=first_few([*unusable, *first_failures(_failures(variant))]),
            )
        progress = [] if is_abandoned else running_shards(variant.directory)
        lost = lost_samples(data_dir, column.name, variant=name, former_variant=current) if name == unfinished else []
        variants.append(
            replace(
                _variant_status(variant, pending, is_current=name == current, progress=progress),
                lost=dict(Counter(failure.code for failure in lost).most_common()),
                readers=tuple(reader.text for reader in readers.find(column.name, name)),
            )
        )
    variants.sort(key=lambda entry: not entry.is_current)
    return replace(status, variants=variants, written_by=writer_of(data_dir, column=column.name))


def _failures(variant: Variant) -> Iterator[Failure]:
    return (failure for commit in variant.commits.values() for failure in commit.failures)


def _videos_status(data_dir: Path, damaged: list[UserError]) -> VideosStatus:
    videos = read_videos(data_dir, columns=["video_id", "path", "num_captions"])
    names = ["path", "size_bytes", "mtime_ns", "code", "message", "end_s", "num_audio", "notes"]
    probes = read_probes(data_dir, paths=videos["path"], columns=names)
    probes, is_known = probes_of(videos["path"], probes)
    ids = videos["video_id"] if is_known.all() else videos["video_id"].filter(pa.array(is_known))
    probes = probes.append_column("video_id", ids)
    if reads_sources := is_indexed(current_variant(data_dir, VIDEO)):
        probes = add_changed_files(probes, num_threads=NUM_CHECK_THREADS)
    ends_s = np.full(len(videos), np.inf)
    ends_s[is_known] = pc.fill_null(probes["end_s"], np.inf).to_numpy()
    # Only usable videos have an end. Do not read fingerprints, because ten million of them take a gigabyte of memory.
    is_usable = pc.is_valid(probes["end_s"])
    unusable_probes = probes.filter(pc.invert(is_usable))
    lost_probes = probes.filter(pc.and_(is_usable, pc.is_valid(probes["code"])))
    noted_probes = probes.filter(pc.fill_null(pc.not_equal(probes["notes"], ""), False))
    sources, late_captions = None, None
    try:
        sources = read_caption_sources(data_dir)
    except UserError as error:
        damaged.append(error)
    try:
        late_captions = find_late_captions(data_dir, video_ids=videos["video_id"], end_s=ends_s)
    except UserError as error:
        damaged.append(error)
    except (OSError, pa.ArrowException):
        pass  # `read_caption_sources` has already reported the damage
    return VideosStatus(
        num_videos=len(videos),
        num_captions=pc.sum(videos["num_captions"]).as_py() or 0,
        num_usable=pc.sum(is_usable).as_py() or 0,
        num_not_probed=len(videos) - len(probes),
        unusable=dict(Counter[str](unusable_probes["code"].to_pylist()).most_common()),
        first_unusable=_first_sources(unusable_probes),
        lost=dict(Counter[str](lost_probes["code"].to_pylist()).most_common()),
        first_lost=_first_sources(lost_probes),
        caption_sources=sources,
        is_indexed=reads_sources,
        num_to_read=num_to_read(probes),
        num_with_audio=pc.sum(pc.greater(probes["num_audio"], 0)).as_py() or 0,
        num_noted=len(noted_probes),
        first_notes={
            row["video_id"]: row["notes"].splitlines() for row in noted_probes.slice(0, MAX_ENTRIES).to_pylist()
        },
        num_captions_beyond=None if late_captions is None else late_captions.num_begin,
        num_captions_ending_beyond=None if late_captions is None else late_captions.num_end,
        first_captions_beyond=[] if late_captions is None else late_captions.first,
    )


def _first_sources(probes: pa.Table) -> list[FailureEntry]:
    """Return up to MAX_ENTRIES failed sources, with as many different failure codes as possible."""
    tables = (probes.filter(pc.equal(probes["code"], code)).slice(0, MAX_ENTRIES) for code in probes["code"].unique())
    rows = (row for table in tables for row in table.select(["video_id", "code", "path", "message"]).to_pylist())
    return first_few(FailureEntry(row["video_id"], row["code"], f"{row['path']}: {row['message']}") for row in rows)


def _variant_status(
    variant: Variant, pending: PendingWork, *, is_current: bool, progress: list[ShardProgress]
) -> VariantStatus:
    shards, length = variant.shards(), length_of(variant)
    codes = Counter(failure.code for failure in _failures(variant))
    num_done = sum(shard.num_done for shard in progress if shard.shard_id not in variant.commits)
    try:
        where = read_selection(variant.directory).get(WHERE)
    except UserError:
        where = "unknown: the record is damaged"
    return VariantStatus(
        name=variant.directory.name,
        is_current=is_current,
        size_bytes=folder_bytes(variant.directory),
        num_shards=len(shards),
        num_samples=sum(shard.num_samples for shard in shards),
        hours=length.seconds / 3600,
        failures=dict(codes.most_common()),
        num_failed_videos=len({failure.video_id for failure in _failures(variant)}),
        num_wanted=pending.num_wanted,
        num_running=num_done if progress else None,
        where=where,
        num_missing=0 if is_current else len((pending.wanted_shards or frozenset()) - variant.commits.keys()),
        num_unread=length.num_unread,
        left_out=pending.left_out,
        is_late=not is_current and bool(late_files(variant.directory, variant.directory.parent.name)),
    )


_MAX_LISTED = 20
_INDENT = " " * 10


def status_text(status: Status) -> str:
    """Return the status as text for the terminal."""
    lines = [f"data      {status.data_dir}"]
    lines += ["manifest  none"] if status.videos is None else _videos_lines(status.videos)
    for column in status.columns.values():
        lines += _column_lines(column, status.data_dir)
    lines += lost_lines(status.lost, indent=len(_INDENT))
    lines += [] if status.leakage is None else status.leakage.lines()
    for column in status.columns.values():
        is_first = column_named(column.column).is_first
        failures = Counter(status.videos.unusable if status.videos is not None and is_first else {})
        failures.update(column.current_status.failures if column.current_status is not None else {})
        owner = "" if is_first else f" of {column.column}"
        lines += [f"failed    {count} x {code}{owner}" for code, count in failures.most_common()]
        lines += entry_lines(
            column.first_failures, num_all=failures.total(), list_path=column.failures_file, indent=_INDENT
        )
        if column.current_status is not None and column.current_status.failures:
            retry = shlex.join(retry_arguments(column_named(column.column), data=status.data_dir))
            lines.append(f"{_INDENT}to retry: {retry}")
    problems = [(name, problem) for name, column in status.columns.items() for problem in column.problems]
    for name, (shard_id, state, why) in problems[:_MAX_LISTED]:
        lines.append(f"{state:<10}{'' if column_named(name).is_first else f'{name} '}shard {shard_id:06d}: {why}")
    if len(problems) > _MAX_LISTED:
        lines.append(f"          ... and {count_noun(len(problems) - _MAX_LISTED, 'more shard')}")
    if (hint := _next_step(status)) is not None:
        lines.append(f"next      {hint}")
    return "\n".join(lines)


def repair_command(status: Status) -> str:
    """Return the command that repairs the first column with missing or damaged shards."""
    statuses = list(status.columns.values())
    column = next((column for column in statuses if column.problems), statuses[0])
    return _command_of(column, status.data_dir)


def _command_of(column: ColumnStatus, data_dir: Path) -> str:
    """Return a column's command with the settings of the current variant or, if none is current, of the first one."""
    spec = column_named(column.column)
    variant = column.current_status or next(iter(column.variants), None)
    if column.current_status is None and (deleted_variant := current_variant(data_dir, column.column)) is not None:
        command = command_for(spec.name, deleted_variant)
        return f"prep {command} with the settings of {deleted_variant} (its folder is missing)"
    if variant is None:
        length = " --len 15s" if spec.is_first else ""
        return f"prep {spec.command}{length} --data {shlex.quote(str(data_dir))}"
    return _command_of_variant(column.column, variant.name, data_dir)


def _command_of_variant(column: str, variant: str, data_dir: Path) -> str:
    spec = column_named(column)
    try:
        stored = stored_request(Variant(variant_dir(data_dir, column, variant)))
        return spec.command_line(stored, data_dir=data_dir)
    except UserError:
        command = command_for(column, variant)
        return (
            f"prep {command} with the settings of {variant} (its recipe.json is unreadable or has a different version)"
        )


def _videos_lines(videos: VideosStatus) -> list[str]:
    parts = [f"{videos.num_usable:,} usable"]
    if videos.num_with_audio:
        parts[0] += f" ({videos.num_with_audio:,} with audio)"
    if videos.lost:
        parts[0] += f", including {sum(videos.lost.values()):,} that can no longer be read"
    if videos.unusable:
        parts.append(f"{sum(videos.unusable.values()):,} unusable")
    if videos.num_not_probed:
        parts.append(f"{videos.num_not_probed:,} not probed yet")
    lines = [f"videos    {videos.num_videos:,}: {', '.join(parts)}", f"captions  {videos.num_captions:,}"]
    if count := videos.num_captions_beyond:
        begin = "begins" if count == 1 else "begin"
        lines.append(f"{_INDENT}{count:,} {begin} after the end of the video: not used in training")
    if count := videos.num_captions_ending_beyond:
        end = "ends" if count == 1 else "end"
        text = f"{count:,} {end} more than a second after the end of the video"
        lines.append(f"{_INDENT}{text}: used up to the end; check that all times are in seconds")
    num_beyond = (videos.num_captions_beyond or 0) + (videos.num_captions_ending_beyond or 0)
    lines += entry_lines(videos.first_captions_beyond, num_all=num_beyond, list_path=None, indent=f"{_INDENT}  ")
    sources = videos.caption_sources
    if sources is None:
        lines.append(f"{_INDENT}the caption table is damaged")
    elif len(sources) > 1 or any(source.is_further for source in sources):
        for source in sources[:_MAX_LISTED]:
            authors = f", by {', '.join(source.weights)}" if source.weights else ""
            lines.append(f"{_INDENT}{on_one_line(f'{source.name}: {source.num_captions:,}{authors}')}")
            if is_model_source(source.name):
                lines.append(f"{_INDENT}  used in training only if --captions.sources lists it")
            if source.stale_because is not None:
                lines.append(f"{_INDENT}  stale: {on_one_line(source.stale_because)}")
        if len(sources) > _MAX_LISTED:
            lines.append(f"{_INDENT}... and {count_noun(len(sources) - _MAX_LISTED, 'more source')}")
    lines += note_lines(videos.first_notes, num_all=videos.num_noted, indent=len(_INDENT))
    lines += [f"lost      {line}" for line in lost_source_lines(videos.lost, is_indexed=videos.is_indexed)]
    return [*lines, *entry_lines(videos.first_lost, num_all=sum(videos.lost.values()), list_path=None, indent=_INDENT)]


def _column_lines(column: ColumnStatus, data_dir: Path) -> list[str]:
    lines, command_hint = [], ""
    if column.written_by is None and not any(variant.num_running is not None for variant in column.variants):
        command_hint = f": {_command_of(column, data_dir)}"
    spec, location = column_named(column.column), "on disk" if mirror_of(data_dir) is None else "in the bucket"
    for variant in column.variants:
        hours = f" {length_text(3600 * variant.hours, num_unread=variant.num_unread)}," if spec.has_hours else ""
        total = f"{count_noun(variant.num_samples, spec.sample)} in {count_noun(variant.num_shards, 'shard')}"
        lines += [
            f"{column.column:<9} {variant.name}{' (current)' if variant.is_current else ''}",
            f"{_INDENT}{total},{hours} {size_text(variant.size_bytes)} {location}",
        ]
        if variant.where is not None:
            lines.append(f"{_INDENT}selected by --where {shlex.quote(variant.where)}")
        lines += [f"{_INDENT}read by {on_one_line(reader)}" for reader in variant.readers[:_MAX_LISTED]]
        if len(variant.readers) > _MAX_LISTED:
            lines.append(f"{_INDENT}... and {count_noun(len(variant.readers) - _MAX_LISTED, 'more reader')}")
        lines += [f"{_INDENT}{'  ' if index else 'left out: '}{line}" for index, line in enumerate(variant.left_out)]
        if variant.num_running is not None:
            done = variant.num_samples + variant.num_running
            progress = f"{count_noun(done, spec.sample)} so far"
            if variant.num_wanted:
                fraction = min(done / variant.num_wanted, 1)
                progress = f"{done:,} of {count_noun(variant.num_wanted, spec.sample)} ({fraction:.0%})"
            lines.append(f"{_INDENT}in progress: {progress}")
        if variant.num_missing and variant.num_running is None and column.written_by is None:
            command = _command_of_variant(column.column, variant.name, data_dir)
            lines.append(f"{_INDENT}incomplete: {count_noun(variant.num_missing, 'shard')} not made yet: {command}")
        if variant.is_late:
            lines.append(f"{_INDENT}written by a late run after the variant had been removed; `prep gc` removes it")
        if variant.lost and variant.num_running is None and column.current_status is not None:
            codes = ", ".join(f"{count} x {code}" for code, count in variant.lost.items())
            lines.append(
                f"{_INDENT}not current: {column.current_status.name} has samples that this variant lacks ({codes})"
            )
        if variant.is_current and column.stale_because is not None:
            lines.append(f"{_INDENT}stale: {column.stale_because}{command_hint}")
        if variant.is_current and column.to_make:
            shards = ", ".join(f"{count} {state}" for state, count in column.to_make.items())
            lines.append(f"{_INDENT}shards to make: {shards}{command_hint}")
        if variant.is_current and column.num_orphaned:
            lines.append(f"{_INDENT}shards to remove: {column.num_orphaned:,}")
        if variant.is_current and variant.num_running is None:  # a running command writes derived files at its end
            lines += [f"{_INDENT}{on_one_line(problem)}" for problem in column.file_problems]
    if column.written_by is not None:
        label = "" if column.variants else column.column
        lines.append(f"{label:<10}in progress: written by {column.written_by}")
    if column.current_status is None and column.variants:
        lines.append(f"{_INDENT}no variant is current")
    return lines


def _next_step(status: Status) -> str | None:
    """Return the command to run next; None while a command is running, or if no command would help."""
    statuses = status.columns.values()
    if status.damaged:
        return None  # the errors have hints
    if any(column.written_by or variant.num_running is not None for column in statuses for variant in column.variants):
        return None
    first = next(iter(statuses))
    if status.videos is None and not first.variants:
        return f"prep manifest folder VIDEOS --data {shlex.quote(str(status.data_dir))}"
    videos, current = status.videos, first.current_status
    num_failed = 0 if current is None or videos is None else current.num_failed_videos + sum(videos.unusable.values())
    if current is None or not (current.num_samples or num_failed):
        return _command_of(first, status.data_dir)
    if videos is not None and (videos.num_not_probed or videos.num_to_read):
        return _command_of(first, status.data_dir)
    if videos is not None and videos.is_indexed and videos.lost:
        return None  # no command can restore the sources
    for column in statuses:
        failures = column.current_status.failures if column.current_status is not None else {}
        is_incomplete = column.problems or column.stale_because or column.to_make or column.file_problems
        if is_incomplete or column.num_orphaned or TRANSIENT.intersection(failures):
            return _command_of(column, status.data_dir)
        if column is first and videos is not None and 2 * num_failed > videos.num_videos:
            return REPAIR + shlex.join(retry_arguments(column_named(first.column), data=status.data_dir))
    if not current.num_samples:
        return _command_of(first, status.data_dir)
    unfinished = [column for column in statuses if any(variant.lost for variant in column.variants)]
    if unfinished:
        return shlex.join(retry_arguments(column_named(unfinished[-1].column), data=status.data_dir))
    return shlex.join(work_of(column_named(first.column)).next_command(status.data_dir)) or None
