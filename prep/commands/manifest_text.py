"""Text and JSON output of `prep manifest`."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.adapters.annotations import Reason
from clipmill.manifests.adapters.reading import Reading
from clipmill.manifests.adapters.table_formats import TEXT_SUFFIXES
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.manifests.store import REJECTED_LIST
from clipmill.manifests.write import WriteResult
from clipmill.prep.core.column import data_flags
from clipmill.prep.core.failure_list import MAX_ENTRIES, FailureEntry, entry_lines, entry_values, first_rejected
from clipmill.prep.registry import column_named
from clipmill.shards.columns import INDEXED, VIDEO, command_for
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant

_INDENT = "  "
# Advice on rejected rows, keyed by reason. The advice applies to all datasets.
ADVICE = {
    Reason.MALFORMED_ROW: "in CSV files, enclose text that contains commas in double quotes",
    Reason.AMBIGUOUS_VIDEO: "use the path of each video relative to the folder, with the extension",
    Reason.MISSING_CHUNK: "if the videos have no chunks yet, for example because they were added again, first run "
    f"`prep {command_for(VIDEO)}` or `prep {command_for(VIDEO, INDEXED)}`, then this command again",
    Reason.BAD_SPLIT: "use train, val or test as the split, and a different data folder (--data) for other splits of "
    "the same videos",
    Reason.BAD_TIME: "use times in seconds, with the end after the start",
}


def written_text(written: WriteResult, *, rejected: Sequence[FailureEntry], notes: Sequence[str] = ()) -> str:
    """Return a summary of the written dataset and its rejected rows.

    Args:
        rejected: First few rejected rows.
        notes: Notes of the adapter that read the dataset.
    """
    changes = f"{written.num_videos_added:,} new"
    if written.num_videos_removed:
        changes += f", {written.num_videos_removed:,} removed"
    if written.num_splits_changed:
        changes += f", {written.num_splits_changed:,} in a different split than before"
    caption_changes = f"{written.num_captions_added:,} new"
    if written.num_captions_removed:
        caption_changes += f", {written.num_captions_removed:,} removed"
    lines = [
        f"{written.dataset}: {count_noun(written.num_videos, 'video')} ({changes}), "
        f"{count_noun(written.num_captions, 'caption')} ({caption_changes})"
    ]
    split_counts = (
        f"{name} {count_noun(num_videos, 'video')} with {count_noun(num_captions, 'caption')}"
        for name, (num_videos, num_captions) in written.splits.items()
    )
    lines.append(f"splits: {', '.join(split_counts)}")
    if written.num_rejected:
        lines += rejected_lines(
            written.num_rejected,
            rejected,
            num_files=written.num_files_rejected,
            num_captions_lost=written.num_captions_lost,
            folder=written.folder,
        )
    lines += [f"note: {on_one_line(note)}" for note in notes]
    if written.num_further_kept or written.num_further_removed:
        lines.append(
            f"added sources: {count_noun(written.num_further_kept, 'caption')} kept"
            + (f", {written.num_further_removed:,} removed with their videos" if written.num_further_removed else "")
        )
    lines.append(f"manifest: {written.folder}")
    return "\n".join(lines)


def rejected_lines(
    num_rejected: Mapping[str, int],
    rejected: Sequence[FailureEntry],
    *,
    num_files: int,
    num_captions_lost: int,
    folder: Path,
) -> list[str]:
    """Return lines about rejected files and rows: their numbers by reason, and the first few.

    Args:
        num_rejected: Number of rejected files and rows, keyed by reason.
        rejected: First few rejected files and rows.
        num_files: Number of rejected files.
        num_captions_lost: Number of captions whose videos are unavailable.
        folder: Folder of the manifest.
    """
    total = sum(num_rejected.values())
    counts = [count_noun(count, noun) for count, noun in ((num_files, "file"), (total - num_files, "row")) if count]
    lost_text = f", and {count_noun(num_captions_lost, 'caption')} of unavailable videos" if num_captions_lost else ""
    return [
        f"rejected: {' and '.join(counts)}{lost_text}",
        *(f"{_INDENT}{reason}: {count}" for reason, count in sorted(num_rejected.items())),
        *entry_lines(rejected, num_all=total, list_path=folder / REJECTED_LIST, indent=_INDENT),
    ]


def written_values(
    written: WriteResult, *, rejected: Sequence[FailureEntry], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the content of `written_text` as a JSON-serialisable dict."""
    return {
        "dataset": written.dataset,
        "num_videos": written.num_videos,
        "num_videos_added": written.num_videos_added,
        "num_videos_removed": written.num_videos_removed,
        "num_splits_changed": written.num_splits_changed,
        "num_captions": written.num_captions,
        "num_captions_added": written.num_captions_added,
        "num_captions_removed": written.num_captions_removed,
        "num_captions_lost": written.num_captions_lost,
        "splits": {
            name: {"num_videos": num_videos, "num_captions": num_captions}
            for name, (num_videos, num_captions) in written.splits.items()
        },
        "num_further_captions": written.num_further_kept,
        "num_further_captions_removed": written.num_further_removed,
        "notes": list(notes),
        "num_rejected": written.num_rejected,
        "first_rejected": entry_values(rejected),
        "manifest": os.fspath(written.folder),
    }


def require_usable_rows(reading: Reading, *, as_json: bool) -> None:
    """Check that every annotation file has a usable row.

    Args:
        as_json: True to print all rejected rows of a file without usable rows as JSON before the error.

    Raises:
        FailedWork: A file has no usable row. The message has reasons, the first few rejected rows, and advice.
    """
    files = [file for file, num_rows in reading.num_rows_used.items() if not num_rows]
    if not files:
        return
    is_unused = pc.is_in(reading.rejected["file"], value_set=pa.array(files, pa.string()))
    for file in files:  # a path may be a folder of annotation files
        is_unused = pc.or_(is_unused, pc.starts_with(reading.rejected["file"], pattern=f"{file}/"))
    rejected = reading.rejected.filter(is_unused)
    names = ", ".join(on_one_line(file) for file in files)
    problem = f"no valid rows in {names}" if rejected.num_rows else f"no rows in {names}"
    lines = [f"{problem}; the manifest was not changed"]
    counts = {entry["values"]: entry["counts"] for entry in rejected["reason"].value_counts().to_pylist()}
    lines += [f"{_INDENT}{reason}: {count}" for reason, count in sorted(counts.items())]
    lines += entry_lines(first_rejected(rejected), num_all=rejected.num_rows, list_path=None, indent=_INDENT)
    if as_json:
        entries = rejected.set_column(rejected.column_names.index("row"), "entry", pc.add(rejected["row"], 1))
        print(json.dumps({"rejected": entries.to_pylist()}, indent=1))
    elif rejected.num_rows > MAX_ENTRIES:
        lines[-1] += "; run the same command with --json for all of them"
    malformed = rejected.filter(pc.equal(rejected["reason"], Reason.MALFORMED_ROW))["file"].to_pylist()
    if not any(Path(file).suffix.lower() in TEXT_SUFFIXES for file in malformed):
        counts.pop(Reason.MALFORMED_ROW, None)  # the advice applies only to CSV files
    advice = [text for reason, text in ADVICE.items() if reason in counts]
    if Reason.MISSING_FILE in counts and reading.example_file is not None:
        advice.insert(0, f"the video files have names such as {on_one_line(reading.example_file)}")
    if len(files) < len(reading.num_rows_used):
        advice.append("omit annotation files whose videos are not available")
    raise FailedWork("\n".join([*lines, *(f"{_INDENT}hint: {text}" for text in advice)]))


def no_video_text(reading: Reading, dataset: str) -> tuple[str, str]:
    """Return the message and the hint of the error for a dataset without usable videos."""
    counts = reading.rejected["reason"].value_counts().to_pylist()
    reasons = "".join(f"; {entry['values']}: {entry['counts']}" for entry in counts)
    rejected = first_rejected(reading.rejected)
    hint = "make sure that the names of the video files match the annotations; the manifest was not changed"
    if rejected:
        hint += f"; first rejected: {on_one_line(f'{rejected[0].name}: {rejected[0].message}')}"
    if reading.example_file is not None:
        hint += f"; the video files have names such as {on_one_line(reading.example_file)}"
    return f"no usable videos in dataset {dataset}{reasons}", hint


def chunk_command(data: Path) -> str:
    """Return the command that makes chunks of the videos, with the settings of existing chunks."""
    with suppress(UserError, OSError):  # `prep status` reports damaged records
        if current_variant(data, VIDEO) is not None:
            stored = Variant.open(data, column=VIDEO).recipe
            return column_named(VIDEO).command_line(stored, data_dir=data)
    return shlex.join(["prep", "chunk", "--len", "15s", *data_flags(data)])
