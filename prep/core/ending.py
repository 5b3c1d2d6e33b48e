"""The last lines of a run's report: the total of the variant, its folder, and the next command."""

import os
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, duration_text, size_text
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.prep.core.column import ColumnSpec, data_flags, short_path
from clipmill.prep.core.failure_list import codes_line
from clipmill.prep.core.plan import NUM_CHECK_THREADS, folder_bytes
from clipmill.prep.core.report import NOTHING_TO_DO, Report, next_line
from clipmill.prep.core.variants import lost_samples, stored_request
from clipmill.prep.core.work import work_of
from clipmill.shards.columns import LATENTS, TEXT, VIDEO
from clipmill.shards.commits import Failure, ShardFiles
from clipmill.shards.dataset import current_variant, list_variants
from clipmill.shards.format import folders_in
from clipmill.shards.index import index_seconds
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import CommittedShard, Variant

_SHARD_ENDINGS = (".tar", ".tar.idx", ".index.arrow")


def with_ending(
    report: Report, column: ColumnSpec, variant_dir: Path, *, data: Path, has_ended: bool, gave_up: bool = False
) -> Report:
    """Return the report of a run, extended by the total of its variant and the next command.

    Args:
        report: Report of the run. The report of a part includes `PartRun.values`: if other parts ended before their
            shards were made, the next command makes these shards.
        data: Data folder as passed by the user.
        has_ended: False for a part that leaves finishing the run to other parts.
        gave_up: True if the run ended before all shards were tried.
    """
    variant = Variant(variant_dir)
    files = [commit.files for commit in variant.commits.values() if commit.files is not None]
    num_samples = sum(file.num_samples for file in files)
    num_bytes = sum(file.tar_bytes + file.index_bytes for file in files)
    length = length_of(variant) if column.has_hours else None
    video_length = ""
    if length is not None:
        video_length = f" ({length_text(length.seconds, num_unread=length.num_unread)})"
    folder = short_path(variant_dir)
    lines = [
        f"total    {count_noun(num_samples, column.sample)}{video_length} in {count_noun(len(files), 'shard')},"
        f" {size_text(num_bytes)}: {folder}"
    ]
    current = current_variant(variant_dir.parent.parent, column.name)
    # The variant can be used although some videos failed, unless an earlier variant is still the current one.
    is_done = has_ended and current == variant_dir.name and not gave_up
    words: Sequence[str] = ()
    if not_made := report.values.get("part", {}).get("not_made", {}):  # shards of parts that have ended
        words = shlex.split(column.command_line(stored_request(variant), data_dir=data))
        words = [*words, "--part", *not_made] if len(not_made) == 1 else words
    if has_ended and current is not None and current != variant_dir.name:
        words = words or retry_words(column, data=data)
        lost = lost_samples(variant_dir.parent.parent, column.name, variant=variant_dir.name, former=current)
        lines += [
            f"current  {current} stays the current variant: {_why_not_current(variant_dir.name, lost)}",
            f"         to complete {variant_dir.name} and make it the current one, run: {shlex.join(words)}",
        ]
        if column.name in (VIDEO, LATENTS, TEXT):
            use = f"give the training command --variant {variant_dir.name}"
            lines.append(f"         to train on {variant_dir.name} as it is, {use}")
    elif num_samples and is_done:
        words = words or work_of(column).next_command(data)
    command = shlex.join(words) if words else None
    unused_bytes = _unused_bytes(variant, files, data=data, column=column.name) if is_done else 0
    if unused_bytes:
        gc = shlex.join(["prep", "gc", *data_flags(data)])
        lines.append(f"unused   {size_text(unused_bytes)} of earlier shards and variants; `{gc}` frees them")
    lines += [] if command is None else [next_line(command)]
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
    """Return the reason why the variant of the last run is not current, and the command that completes it."""
    data = variant_dir.parent.parent
    lost = lost_samples(data, column.name, variant=variant_dir.name, former=current)
    command = shlex.join(retry_words(column, data=data))
    with suppress(UserError):  # a different version of clipmill wrote the recipe
        command = command if lost else column.command_line(stored_request(Variant(variant_dir)), data_dir=data)
    reason = _why_not_current(variant_dir.name, lost)
    return f"{current} stays the current variant: {reason}; to complete it, run: {command}"


def retry_words(column: ColumnSpec, *, data: Path) -> list[str]:
    """Return the command that retries the failures of a column, as a list of arguments."""
    return ["prep", "retry", *([] if column.is_first else ["--column", column.name]), *data_flags(data)]


def _unused_bytes(variant: Variant, files: Sequence[ShardFiles], *, data: Path, column: str) -> int:
    """Return the size in bytes of the files that `prep gc` would remove: shards without a commit, and other variants.

    Files that have readers are not counted, because `prep gc` keeps them. Return 0 in a bucket, where listing the files
    costs requests.
    """
    if mirror_of(data) is not None:
        return 0
    directory = variant.directory
    committed_paths = {directory / path for file in files for path in (file.tar, file.energon_index, file.index)}
    others = [
        name
        for name in list_variants(data, column)
        if name != directory.name and not lost_samples(data, column, variant=directory.name, former=name)
    ]
    stray = [
        path
        for folder in (directory, *folders_in(directory))
        for path in folder.iterdir()
        if path.name.endswith(_SHARD_ENDINGS) and path not in committed_paths
    ]
    if not others and not stray:
        return 0
    from clipmill.shards.marks import read_readers

    try:
        readers = read_readers(data)
    except (OSError, UserError):  # `prep gc` reports the cause
        return 0
    unused_bytes = sum(folder_bytes(directory.parent / name) for name in others if not readers.of_variant(column, name))
    # A training run that resumes reads only committed shards, but a running process may still read shards that it has
    # opened.
    if all(reader.is_run for reader in readers.of_variant(column, directory.name)):
        for path in stray:
            with suppress(OSError):  # the file was removed after the folder was listed
                unused_bytes += path.stat().st_size
    return unused_bytes


@dataclass(frozen=True)
class Length:
    """Seconds of video in the shards with a readable index, and the number of shards with an unreadable one."""

    seconds: float
    num_unread: int


def length_text(seconds: float, *, num_unread: int) -> str:
    """Return a length of video as text, with the number of unreadable shards."""
    unread = f" without {count_noun(num_unread, 'unreadable shard')}" if num_unread else ""
    return f"{duration_text(seconds)} of video{unread}"


def length_of(variant: Variant) -> Length:
    """Return the length of the video in a variant."""
    known = variant.commits.seconds()
    unknown = [shard for shard in variant.shards() if shard.shard_id not in known]
    with ThreadPoolExecutor(NUM_CHECK_THREADS) as pool:
        lengths = [*known.values(), *pool.map(_seconds, unknown)]
    return Length(sum(seconds or 0.0 for seconds in lengths), lengths.count(None))


def _seconds(shard: CommittedShard) -> float | None:
    try:
        return index_seconds(shard.index_path)
    except (Damaged, OSError):
        return None


def with_file_problems(report: Report, column: ColumnSpec, variant_dir: Path, *, data_dir: Path) -> Report:
    """Return the report of a plan with the damaged files that the run rebuilds from the shards.

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
    lines += [f"table    {problem}; it will be written from the shards" for problem in problems]
    return Report(
        "\n".join([*lines, next_line(command)]), {**report.values, "file_problems": problems, "next": command}
    )
