"""Reports of plans and runs as text and JSON, and HTML pages. All columns use this module."""

import json as json_module
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, size_text
from clipmill.manifests.locks import folder_lock
from clipmill.manifests.publish import publish_bytes, remove_temporaries
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.prep.core.column import ColumnSpec, data_flags, recipe_differences, short_path
from clipmill.prep.core.failure_list import codes_line, failure_lines, failure_values
from clipmill.prep.core.failures import TRANSIENT
from clipmill.prep.core.plan import NUM_CHECK_THREADS, ShardPlan, ShardState, folder_bytes
from clipmill.prep.core.run import Summary
from clipmill.prep.core.variants import lost_samples, stored_request
from clipmill.prep.core.work import Report, work_of
from clipmill.shards.columns import LATENTS, TEXT, VIDEO
from clipmill.shards.commits import Failure, ShardFiles
from clipmill.shards.dataset import current_variant, list_variants
from clipmill.shards.format import folders_in
from clipmill.shards.index import index_seconds
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import CommittedShard, Variant

NOTHING_TO_DO = "nothing to do"
REPAIR = "repair or replace the failed videos, then run: "  # precedes a command
MAX_LISTED = 20
_SHARD_ENDINGS = (".tar", ".tar.idx", ".index.arrow")
_REASONS = {
    ShardState.NEW: "not made yet",
    ShardState.MISSING: "files are missing",
    ShardState.CORRUPT: "files are damaged; intact samples are copied",
}
# States in which each shard is listed with its reason.
_LISTED_STATES = (ShardState.MISSING, ShardState.CORRUPT)


def show(report: Report, *, json: bool) -> None:
    """Print a report."""
    print(json_module.dumps(report.values, indent=1) if json else report.text)


@dataclass
class _Group:
    num_shards: int = 0
    num_made: int = 0
    num_copied: int = 0
    is_known: bool = True


def states_lines(
    shards: Sequence[ShardPlan],
    *,
    sample: str = "chunk",
    verb: str = "encode",
    reasons: Mapping[int, str] | None = None,
) -> list[str]:
    """Return lines about the shards that a plan keeps, makes and removes, and about shards with damaged files.

    Args:
        sample: Noun for a sample of the column, singular.
        verb: Regular verb for making a sample, such as "encode".
        reasons: Reasons to show instead of the reasons in the plan, keyed by shard ID.
    """
    lines = []
    kept_shards = [shard for shard in shards if shard.state == ShardState.CURRENT]
    if kept_shards:
        num_failed = sum(shard.num_failed for shard in kept_shards)
        num_kept = sum(shard.num_chunks for shard in kept_shards) - num_failed
        kept_samples = f"{count_noun(num_kept, sample)} in {count_noun(len(kept_shards), 'shard')}"
        lines.append(f"kept     {kept_samples}{f'; {num_failed:,} failed, see prep status' if num_failed else ''}")
        keep_reasons = {shard.reason for shard in kept_shards if shard.reason.startswith("kept, ")}
        lines += [f"         {reason.removeprefix('kept, ')}" for reason in sorted(keep_reasons)]
    # Shards with the same reason share a line, because a plan may have thousands of shards.
    groups: dict[str, _Group] = {}
    for shard in shards:
        if shard.has_work:
            reason = _REASONS.get(shard.state, shard.reason)
            if shard.state == ShardState.CHANGED:
                reason = f"{shard.reason}; unchanged samples are copied"
            group = groups.setdefault((reasons or {}).get(shard.shard_id, reason), _Group())
            group.num_shards += 1
            group.num_copied += shard.num_copied or 0
            group.num_made += shard.num_chunks - (shard.num_copied or 0)
            group.is_known &= shard.num_copied is not None or shard.state == ShardState.NEW
    lines += [f"to do    {_work_text(group, sample, verb)}: {reason}" for reason, group in groups.items()]
    orphaned_shards = [shard for shard in shards if shard.state == ShardState.ORPHANED]
    removals = Counter((reasons or {}).get(shard.shard_id, shard.reason) for shard in orphaned_shards)
    lines += [f"to do    {count_noun(count, 'shard')} removed: {reason}" for reason, count in removals.items()]
    listed_shards = [shard for shard in shards if shard.state in _LISTED_STATES]
    lines += [f"shard {shard.shard_id:06d}  {shard.state}: {shard.reason}" for shard in listed_shards[:MAX_LISTED]]
    if len(listed_shards) > MAX_LISTED:
        lines.append(f"... and {count_noun(len(listed_shards) - MAX_LISTED, 'more shard')}")
    return lines


def states_values(shards: Sequence[ShardPlan], *, sample: str = "chunk") -> dict[str, Any]:
    """Return the content of `states_lines` as JSON values."""
    states, num_samples = Counter(str(shard.state) for shard in shards), Counter[str]()
    for shard in shards:
        num_samples[str(shard.state)] += shard.num_chunks
    work = [
        {
            "shard_id": shard.shard_id,
            "state": str(shard.state),
            "reason": shard.reason,
            f"num_{sample}s": shard.num_chunks,
            "num_copied": shard.num_copied,
        }
        for shard in shards
        if shard.state != ShardState.CURRENT
    ]
    return {"shards": dict(states), f"{sample}s": dict(num_samples), "work": work}


def next_line(command: str) -> str:
    """Return the line of a report that shows the next command."""
    return f"next     {command}"


def changed_settings(data_dir: Path, column: str, *, variant: str, recipe: Mapping[str, Any]) -> list[str]:
    """Return the differences between the recipe of the current variant and a planned recipe, as lines of text."""
    current = current_variant(data_dir, column)
    if current is None or current == variant:
        return []
    return recipe_differences(Variant.open(data_dir, column=column, variant=current).recipe, recipe)


def summary_report(
    summary: Summary,
    *,
    list_path: Path,
    speed: str | None = None,
    no_work_reason: str | None = None,
    verb: str = "encode",
    retry_command: Sequence[str] = ("prep", "retry"),
    **extra_values: object,
) -> Report:
    """Return the report of a run.

    Args:
        list_path: Path of the list of failures.
        speed: Speed of the work as text; None to omit it.
        no_work_reason: Reason why there was no work; None to derive the reason from the summary.
        verb: Regular verb for making a sample, such as "encode".
        retry_command: Command that retries the failures of the column, as a list of arguments.
        extra_values: Further JSON values, placed before the common values.
    """
    lines = [f"variant  {summary.variant}"]
    if summary.num_shards_made and summary.failures and not summary.num_encoded + summary.num_reused:
        lines.append(
            f"made     no chunks in {count_noun(summary.num_shards_made, 'shard')}: "
            f"{count_noun(summary.num_failed_videos, 'video')} skipped ({', '.join(summary.failures_by_code())})"
        )
    elif summary.num_shards_made:
        empty = f", and {summary.num_shards_empty:,} without chunks" if summary.num_shards_empty else ""
        size = f", {size_text(summary.num_bytes_written)}" if summary.num_bytes_written else ""
        lines.append(
            f"made     {count_noun(summary.num_shards_made - summary.num_shards_empty, 'shard')}{empty}:"
            f" {count_noun(summary.num_encoded, 'chunk')} {verb.removesuffix('e')}ed,"
            f" {summary.num_reused:,} copied{size}"
        )
        lines += [f"speed    {speed}"] if speed else []
    elif summary.failures:
        lines.append(f"nothing was {verb.removesuffix('e')}ed")
    else:
        reason = "all shards are up to date" if summary.num_shards else "no shard belongs to this command"
        lines.append(f"nothing to {verb}: {no_work_reason or reason}")
    lines += [f"excluded {refused.node}: {refused.reason}" for refused in summary.refused_workers]
    lines += [*failure_lines(summary.failures, list_path=list_path, retry_command=retry_command), *summary.added.lines]
    values = {
        **extra_values,
        **{name: value for name, value in asdict(summary).items() if name not in ("added", "exit_code")},
        **failure_values(summary.failures, list_path=list_path),
        "num_failed_videos": summary.num_failed_videos,
        "unchanged": len(summary.unchanged),
        "refused_workers": [refused.values() for refused in summary.refused_workers],
        **summary.added.values,
    }
    return Report("\n".join(lines), values)


def _work_text(group: _Group, sample: str, verb: str) -> str:
    """Describe the work of a group of shards, such as "12 chunks encoded and 6 copied into 2 shards"."""
    into = f"into {count_noun(group.num_shards, 'shard')}"
    made = f"{count_noun(group.num_made, sample)} {verb.removesuffix('e')}ed"
    if not group.is_known:
        return f"at most {made} {into}"
    if not group.num_copied:
        return f"{made} {into}"
    if not group.num_made:
        return f"{count_noun(group.num_copied, sample)} copied {into}"
    return f"{made} and {group.num_copied:,} copied {into}"


def publish_page(path: Path, template: Path, **values: Any) -> int:
    """Render a template, and publish the page.

    Args:
        path: HTML file to write. Temporary files that killed commands left beside it are removed.
        template: Path of the template.
        values: Values for the template.

    Returns:
        Size of the page in bytes.

    Raises:
        UserError: The page cannot be written.
    """
    from clipmill.shards.pages.templates import load_template

    content = load_template(template).render(**values).encode()
    try:
        with folder_lock(path.parent):
            remove_temporaries(path.parent, matches=path.name.__eq__)
            publish_bytes(path, content)
    except OSError as error:
        raise UserError(f"--html {path} cannot be written: {error.strerror}", hint="use a different path") from None
    return len(content)


def with_ending(
    report: Report,
    column: ColumnSpec,
    variant_dir: Path,
    *,
    data: Path,
    num_videos: int,
    has_ended: bool,
    gave_up: bool = False,
) -> Report:
    """Append the totals of the variant and the next command to the report of a run.

    Args:
        report: Report of the run. The report of a part contains `PartRun.values`: if other parts ended before their
            shards were made, the next command makes these shards.
        column: Column of the run.
        variant_dir: Folder of the variant.
        data: Data folder as passed by the user.
        num_videos: Number of videos in the plan. If most of them failed, repairing the videos is the next step.
        has_ended: False for a part that is not the last one, because another part will then finish the run.
        gave_up: True if the run ended before all shards were attempted.
    """
    variant = Variant(variant_dir)
    files = [commit.files for commit in variant.commits.values() if commit.files is not None]
    num_samples = sum(file.num_samples for file in files)
    num_bytes = sum(file.tar_bytes + file.index_bytes for file in files)
    length = length_of(variant) if column.has_hours else None
    video_length = "" if length is None else f" ({length_text(length.seconds, num_unread=length.num_unread)})"
    lines = [
        f"total    {count_noun(num_samples, column.sample)}{video_length} in {count_noun(len(files), 'shard')},"
        f" {size_text(num_bytes)}: {short_path(variant_dir)}"
    ]
    current = current_variant(variant_dir.parent.parent, column.name)
    # The variant is usable even if some videos failed, unless a former variant is still the current one.
    is_done = has_ended and current == variant_dir.name and not gave_up
    next_command: Sequence[str] = ()
    # The same command makes shards of parts that have ended, and retries failures that may not occur again.
    if (not_made := report.values.get("part", {}).get("not_made", {})) or (
        is_done and TRANSIENT.intersection(report.values.get("failures", ()))
    ):
        next_command = shlex.split(column.command_line(stored_request(variant), data_dir=data))
        next_command = [*next_command, "--part", *not_made] if len(not_made) == 1 else next_command
    needs_repair = (
        is_done and not next_command and column.is_first and 2 * report.values["num_failed_videos"] > num_videos
    )
    if has_ended and current is not None and current != variant_dir.name:
        next_command = next_command or retry_arguments(column, data=data)
        lost = lost_samples(variant_dir.parent.parent, column.name, variant=variant_dir.name, former_variant=current)
        lines += [
            f"current  {current} stays the current variant: {_why_not_current(variant_dir.name, lost)}",
            f"         to complete {variant_dir.name} and make it the current one, run: {shlex.join(next_command)}",
        ]
        if column.name in (VIDEO, LATENTS, TEXT):
            lines.append(
                f"         to train on {variant_dir.name} as it is, add --variant {variant_dir.name} to the training"
                " command"
            )
    elif is_done and not next_command and (num_samples or needs_repair):
        next_command = retry_arguments(column, data=data) if needs_repair else work_of(column).next_command(data)
    command = shlex.join(next_command) if next_command else None
    unused_bytes = _unused_bytes(variant, files, data=data, column=column.name) if is_done else 0
    if unused_bytes:
        lines.append(
            f"unused   {size_text(unused_bytes)} of earlier shards and variants; "
            f"`{shlex.join(['prep', 'gc', *data_flags(data)])}` removes them"
        )
    lines += [] if command is None else [next_line(f"{REPAIR if needs_repair else ''}{command}")]
    values = {
        "variant_dir": os.fspath(variant_dir),
        "current": current,
        "total_bytes": num_bytes,
        "total_video_s": None if length is None else length.seconds,
        "freed_by_gc_bytes": unused_bytes,
        "next": command,
    }
    return Report("\n".join([report.text, *lines]), {**report.values, **values})


def _why_not_current(variant: str, lost: Sequence[Failure]) -> str:
    return f"it has samples that {variant} lacks ({codes_line(lost)})" if lost else f"{variant} is incomplete"


def why_unfinished(column: ColumnSpec, variant_dir: Path, *, current: str) -> str:
    """Explain why the variant of the last run is not the current variant, and which command completes it."""
    data = variant_dir.parent.parent
    lost = lost_samples(data, column.name, variant=variant_dir.name, former_variant=current)
    command = shlex.join(retry_arguments(column, data=data))
    with suppress(UserError):  # the recipe was written by a different version of clipmill
        command = command if lost else column.command_line(stored_request(Variant(variant_dir)), data_dir=data)
    return (
        f"{current} stays the current variant: {_why_not_current(variant_dir.name, lost)}; "
        f"to complete {variant_dir.name}, run: {command}"
    )


def retry_arguments(column: ColumnSpec, *, data: Path) -> list[str]:
    """Return the command that retries the failures of a column, as a list of arguments."""
    return ["prep", "retry", *([] if column.is_first else ["--column", column.name]), *data_flags(data)]


def _unused_bytes(variant: Variant, files: Sequence[ShardFiles], *, data: Path, column: str) -> int:
    """Return the size in bytes of the files that `prep gc` would remove: files without a commit, and other variants.

    Files in use do not count, because `prep gc` keeps them. For a bucket, return 0, because each listing is a paid
    request.
    """
    if mirror_of(data) is not None:
        return 0
    directory = variant.directory
    committed_paths = {directory / path for file in files for path in (file.tar, file.energon_index, file.index)}
    other_variants = [
        name
        for name in list_variants(data, column)
        if name != directory.name and not lost_samples(data, column, variant=directory.name, former_variant=name)
    ]
    uncommitted_paths = [
        path
        for folder in (directory, *folders_in(directory))
        for path in folder.iterdir()
        if path.name.endswith(_SHARD_ENDINGS) and path not in committed_paths
    ]
    if not other_variants and not uncommitted_paths:
        return 0
    from clipmill.shards.marks import list_readers

    try:
        readers = list_readers(data)
    except (OSError, UserError):  # `prep gc` reports the cause
        return 0
    unused_bytes = sum(
        folder_bytes(directory.parent / name) for name in other_variants if not readers.find(column, name)
    )
    # A resumed training run reads only committed shards, but a running process may still read other files that it has
    # opened.
    if all(reader.is_run for reader in readers.find(column, directory.name)):
        for path in uncommitted_paths:
            with suppress(OSError):  # the file was removed after the folder was listed
                unused_bytes += path.stat().st_size
    return unused_bytes


@dataclass(frozen=True)
class Length:
    """Duration of the video in a variant.

    Attributes:
        seconds: Seconds of video in the shards with a readable index.
        num_unread: Number of shards with an unreadable index.
    """

    seconds: float
    num_unread: int


def length_text(seconds: float, *, num_unread: int) -> str:
    """Return the duration of video as text, with the number of unreadable shards."""
    unread = f", not counting {count_noun(num_unread, 'unreadable shard')}" if num_unread else ""
    return f"{duration_text(seconds)} of video{unread}"


def length_of(variant: Variant) -> Length:
    """Return the duration of the video in a variant."""
    known_seconds = variant.commits.shard_seconds()
    other_shards = [shard for shard in variant.shards() if shard.shard_id not in known_seconds]
    with ThreadPoolExecutor(NUM_CHECK_THREADS) as pool:
        lengths = [*known_seconds.values(), *pool.map(_read_seconds, other_shards)]
    return Length(sum(seconds or 0.0 for seconds in lengths), lengths.count(None))


def _read_seconds(shard: CommittedShard) -> float | None:
    try:
        return index_seconds(shard.index_path)
    except (Damaged, OSError):
        return None


def with_file_problems(report: Report, column: ColumnSpec, variant_dir: Path, *, data_dir: Path) -> Report:
    """Append lines about unusable files that a run would rebuild from the shards, if the plan has no other work.

    Raises:
        UserError: The records of the variant are damaged.
    """
    if not variant_dir.is_dir():
        return report
    variant = Variant(variant_dir)
    stored, problems = stored_request(variant), work_of(column).file_problems(variant)
    if not problems or report.values.get("next") is not None:
        return report
    command = column.command_line(stored, data_dir=data_dir)
    lines = [line for line in report.text.splitlines() if line != NOTHING_TO_DO]
    lines += [f"table    {problem}; the run rebuilds it from the shards" for problem in problems]
    return Report(
        "\n".join([*lines, next_line(command)]), {**report.values, "file_problems": problems, "next": command}
    )
