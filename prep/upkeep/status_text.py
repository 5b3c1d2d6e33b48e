"""The text output of `prep status`, including the recommended next command."""

import shlex
from collections import Counter
from pathlib import Path

from clipmill.manifests.caption_spans import is_of_model
from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line, size_text
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.prep.core.ending import length_text, retry_words
from clipmill.prep.core.failure_list import named_lines, note_lines
from clipmill.prep.core.failures import TRANSIENT
from clipmill.prep.core.selection import stored_request
from clipmill.prep.core.work import work_of
from clipmill.prep.registry import column_named
from clipmill.prep.upkeep.caption_sources import CaptionSource
from clipmill.prep.upkeep.status import ColumnStatus, Status, VariantStatus, VideosStatus
from clipmill.shards.dataset import current_variant, variant_dir
from clipmill.shards.reader import Variant

_MAX_LISTED = 20
_INDENT = " " * 10


def status_text(status: Status) -> str:
    """Return the text of the status, one fact per line."""
    lines = [f"data      {status.data_dir}"]
    lines += ["manifest  none"] if status.videos is None else _videos_lines(status.videos)
    for column in status.columns.values():
        lines += _column_lines(column, status.data_dir)
    lines += [] if status.leakage is None else status.leakage.lines()
    lines += _failure_lines(status)
    problems = [(name, problem) for name, column in status.columns.items() for problem in column.problems]
    for name, (shard_id, state, why) in problems[:_MAX_LISTED]:
        lines.append(f"{state:<10}{'' if column_named(name).is_first else f'{name} '}shard {shard_id:06d}: {why}")
    if len(problems) > _MAX_LISTED:
        lines.append(f"          ... and {count_noun(len(problems) - _MAX_LISTED, 'more shard')}")
    if (hint := _next_step(status)) is not None:
        lines.append(f"next      {hint}")
    return "\n".join(lines)


def repair_command(status: Status) -> str:
    """Return the command that makes missing and damaged shards again, for the first column that has any."""
    found = list(status.columns.values())
    column = next((of for of in found if of.problems), found[0])
    return _command_of(column, status.data_dir)


def _command_of(column: ColumnStatus, data_dir: Path) -> str:
    """Return the command that reproduces the current variant's recipe; the first variant's if none is current."""
    spec = column_named(column.column)
    variant = column.current or next(iter(column.variants), None)
    if column.current is None and (deleted := current_variant(data_dir, column.column)) is not None:
        return f"prep {spec.command} with the settings of {deleted} (its folder is missing)"
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
        return (
            f"prep {spec.command} with the settings of {variant} (its recipe.json is unreadable, or of another version)"
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
        said = (
            f"{count:,} {end} more than a second after the end of the video: used up to it; are all times in seconds?"
        )
        lines.append(f"{_INDENT}{said}")
    num_beyond = (videos.num_captions_beyond or 0) + (videos.num_captions_ending_beyond or 0)
    lines += named_lines(videos.first_captions_beyond, num_all=num_beyond, listed=None, indent=f"{_INDENT}  ")
    lines += _source_lines(videos.caption_sources)
    lines += note_lines(videos.first_notes, num_all=videos.num_noted, indent=len(_INDENT))
    for code, count in videos.lost.items():
        lines.append(
            f"lost      {count_noun(count, 'source')} that can no longer be read ({code}); existing chunks are kept"
        )
    return [*lines, *named_lines(videos.first_lost, num_all=sum(videos.lost.values()), listed=None, indent=_INDENT)]


def _source_lines(sources: list[CaptionSource] | None) -> list[str]:
    """Return the number of captions of each source, if there are several; None stands for a damaged table."""
    if sources is None:
        return [f"{_INDENT}their table is damaged"]
    if len(sources) < 2 and not any(source.is_further for source in sources):
        return []
    lines = []
    for source in sources[:_MAX_LISTED]:
        by = f", by {', '.join(source.weights)}" if source.weights else ""
        lines.append(f"{_INDENT}{on_one_line(f'{source.name}: {source.num_captions:,}{by}')}")
        if is_of_model(source.name):
            lines.append(f"{_INDENT}  used in training only if --captions.sources names it")
        if source.stale_because is not None:
            lines.append(f"{_INDENT}  stale: {on_one_line(source.stale_because)}")
    if len(sources) > _MAX_LISTED:
        lines.append(f"{_INDENT}... and {count_noun(len(sources) - _MAX_LISTED, 'more source')}")
    return lines


def _column_lines(column: ColumnStatus, data_dir: Path) -> list[str]:
    lines, again = [], ""
    if column.written_by is None and not any(variant.num_running is not None for variant in column.variants):
        again = f": {_command_of(column, data_dir)}"
    for variant in column.variants:
        lines += _variant_lines(
            column.column, variant, place="on disk" if mirror_of(data_dir) is None else "in the bucket"
        )
        if variant.num_missing and variant.num_running is None and column.written_by is None:
            command = _command_of_variant(column.column, variant.name, data_dir)
            lines.append(f"{_INDENT}incomplete: {count_noun(variant.num_missing, 'shard')} not made yet: {command}")
        if variant.is_late:
            lines.append(f"{_INDENT}written by a late run, after the variant had been removed: `prep gc` removes it")
        if variant.lost and variant.num_running is None and column.current is not None:
            codes = ", ".join(f"{count} x {code}" for code, count in variant.lost.items())
            lines.append(f"{_INDENT}not current: {column.current.name} has samples that it lacks ({codes})")
        if variant.is_current and column.stale_because is not None:
            lines.append(f"{_INDENT}stale: {column.stale_because}{again}")
        if variant.is_current and column.to_make:
            shards = ", ".join(f"{count} {state}" for state, count in column.to_make.items())
            lines.append(f"{_INDENT}shards to make: {shards}{again}")
        if variant.is_current and column.num_orphaned:
            lines.append(f"{_INDENT}shards to remove: {column.num_orphaned:,}")
        if variant.is_current and variant.num_running is None:  # a running command writes them at its end
            lines += [f"{_INDENT}{on_one_line(problem)}" for problem in column.file_problems]
    if column.written_by is not None:
        label = "" if column.variants else column.column
        lines.append(f"{label:<10}in progress: written by {column.written_by}")
    if column.current is None and column.variants:
        lines.append(f"{_INDENT}no variant is current")
    return lines


def _variant_lines(column: str, variant: VariantStatus, *, place: str) -> list[str]:
    spec = column_named(column)
    hours = f" {length_text(3600 * variant.hours, num_unread=variant.num_unread)}," if spec.has_hours else ""
    total = f"{count_noun(variant.num_samples, spec.sample)} in {count_noun(variant.num_shards, 'shard')}"
    lines = [
        f"{column:<9} {variant.name}{' (current)' if variant.is_current else ''}",
        f"{_INDENT}{total},{hours} {size_text(variant.size_bytes)} {place}",
    ]
    if variant.where is not None:
        lines.append(f"{_INDENT}selected by --where {shlex.quote(variant.where)}")
    lines += [f"{_INDENT}{'  ' if number else 'left out: '}{line}" for number, line in enumerate(variant.left_out)]
    if variant.num_running is not None:
        done = variant.num_samples + variant.num_running
        if variant.num_wanted:
            share = min(done / variant.num_wanted, 1)
            lines.append(
                f"{_INDENT}in progress: {done:,} of {count_noun(variant.num_wanted, spec.sample)} ({share:.0%})"
            )
        else:
            lines.append(f"{_INDENT}in progress: {count_noun(done, spec.sample)} so far")
    return lines


def _failure_lines(status: Status) -> list[str]:
    lines = []
    for column in status.columns.values():
        is_first = column_named(column.column).is_first
        failures = Counter(status.videos.unusable if status.videos is not None and is_first else {})
        failures.update(column.current.failures if column.current is not None else {})
        where = "" if is_first else f" of {column.column}"
        lines += [f"failed    {count} x {code}{where}" for code, count in failures.most_common()]
        lines += named_lines(
            column.first_failures, num_all=failures.total(), listed=column.failures_file, indent=_INDENT
        )
        if column.current is not None and column.current.failures:
            retry = shlex.join(retry_words(column_named(column.column), data=status.data_dir))
            lines.append(f"{_INDENT}to try them again: {retry}")
    return lines


def _is_behind(column: ColumnStatus) -> bool:
    """Return True if the command of a column has something to repair or to try again."""
    failures = column.current.failures if column.current is not None else {}
    is_incomplete = column.problems or column.stale_because or column.to_make or column.file_problems
    return bool(is_incomplete or column.num_orphaned or TRANSIENT.intersection(failures))


def _next_step(status: Status) -> str | None:
    columns = status.columns.values()
    if status.damaged:
        return None  # each error has its hint
    if any(column.written_by or variant.num_running is not None for column in columns for variant in column.variants):
        return None
    first = next(iter(columns))
    if status.videos is None and not first.variants:
        return f"prep manifest folder VIDEOS --data {shlex.quote(str(status.data_dir))}"
    if first.current is None or not first.current.num_samples:
        return _command_of(first, status.data_dir)
    videos = status.videos
    if videos is not None and (videos.num_not_probed or videos.num_to_read):
        return _command_of(first, status.data_dir)
    behind = (column for column in columns if _is_behind(column))
    repair = next((_command_of(column, status.data_dir) for column in behind), None)
    unfinished = (column for column in columns if any(variant.lost for variant in column.variants))
    for column in unfinished if repair is None else ():
        repair = shlex.join(retry_words(column_named(column.column), data=status.data_dir))
    return repair or shlex.join(work_of(column_named(first.column)).next_command(status.data_dir)) or None
