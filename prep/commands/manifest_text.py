"""Text and JSON output of `prep manifest`."""

import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from manifests.adapters.reading import Reading
from manifests.adapters.reasons import Reason
from manifests.quoting import on_one_line
from manifests.store import REJECTED_FILE, Written
from prep.core.failure_list import Named, first_rejected, named_lines, named_values

_INDENT = "  "
# Advice on rows rejected for a given reason, where it is the same for all data sets.
_ADVICE = {
    Reason.MALFORMED_ROW: "in a CSV, put text with a comma in double quotes",
    Reason.AMBIGUOUS_VIDEO: "name the videos by their path in the folder, with the ending",
    Reason.BAD_TIME: "times are seconds, and the end is after the begin",
}


def written_text(written: Written, *, few: Sequence[Named]) -> str:
    """Return what was written and what could not be used; `few` are the first rejected rows."""
    changes = f"{written.num_videos_added} new"
    if written.num_videos_removed:
        changes += f", {written.num_videos_removed} gone"
    lines = [
        f"{written.dataset}: {written.num_videos} videos ({changes}), "
        f"{written.num_captions} captions ({written.num_captions_added} new)"
    ]
    if written.num_rejected:
        total = sum(written.num_rejected.values())
        lines.append(f"rejected: {total} rows, and {written.num_captions_lost} captions of videos that cannot be had")
        lines += [f"  {reason}: {count}" for reason, count in sorted(written.num_rejected.items())]
        lines += named_lines(few, num_all=total, listed=written.folder / REJECTED_FILE, indent=_INDENT)
    lines.append(f"manifest: {written.folder}")
    return "\n".join(lines)


def written_values(written: Written, *, few: Sequence[Named]) -> dict[str, Any]:
    """Return the content of `written_text` as JSON values."""
    return {
        "dataset": written.dataset,
        "num_videos": written.num_videos,
        "num_videos_added": written.num_videos_added,
        "num_videos_removed": written.num_videos_removed,
        "num_captions": written.num_captions,
        "num_captions_added": written.num_captions_added,
        "num_captions_lost": written.num_captions_lost,
        "num_rejected": written.num_rejected,
        "first_rejected": named_values(few),
        "manifest": os.fspath(written.folder),
    }


def unused_files(reading: Reading) -> list[str]:
    """Return the annotation files that were given but contributed nothing."""
    return [file for file, num_rows in reading.num_rows_used.items() if not num_rows]


def unused_text(reading: Reading) -> str:
    """Return why nothing in `unused_files` could be used, with the first few rows by name and advice on what to do."""
    files = unused_files(reading)
    rejected = reading.rejected.filter(pc.is_in(reading.rejected["file"], value_set=pa.array(files, pa.string())))
    names = ", ".join(on_one_line(file) for file in files)
    what = f"no row of {names} could be used" if rejected.num_rows else f"there are no rows in {names}"
    lines = [f"{what}; the manifest was not changed"]
    counts = {entry["values"]: entry["counts"] for entry in rejected["reason"].value_counts().to_pylist()}
    lines += [f"{_INDENT}{reason}: {count}" for reason, count in sorted(counts.items())]
    lines += named_lines(first_rejected(rejected), num_all=rejected.num_rows, listed=None, indent=_INDENT)
    advice = [text for reason, text in _ADVICE.items() if reason in counts]
    if Reason.MISSING_FILE in counts and reading.example_file is not None:
        advice.insert(0, f"the video files have names such as {on_one_line(reading.example_file)}")
    if len(files) < len(reading.num_rows_used):
        advice.append("leave out a file whose videos are not here")
    return "\n".join([*lines, *(f"{_INDENT}hint: {text}" for text in advice)])


def no_video_text(reading: Reading, dataset: str) -> tuple[str, str]:
    """Return the message and hint for a data set without usable videos."""
    counts = reading.rejected["reason"].value_counts().to_pylist()
    reasons = "".join(f"; {entry['values']}: {entry['counts']}" for entry in counts)
    few = first_rejected(reading.rejected)
    hint = "do the names of the files fit the annotations? The manifest is left as it was"
    if few:
        hint += f". Rejected first: {on_one_line(f'{few[0].name}: {few[0].message}')}"
    if reading.example_file is not None:
        hint += f". The video files have names such as {on_one_line(reading.example_file)}"
    return f"no usable video for the data set {dataset}{reasons}", hint


def rejected_of(rejected: pa.Table, dataset: str) -> pa.Table:
    """Return the rows of one data set."""
    return rejected.filter(pc.equal(rejected["dataset"], dataset))
