"""Lists of failures: the complete list in the folder of a variant, and short lists for reports."""

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun, on_one_line
from clipmill.manifests.publish import publish_bytes, read_record, remove
from clipmill.prep.core.failures import EXPLANATIONS, SOURCE_AWAY, FailureCode
from clipmill.shards.commits import Failure

FAILURES_FILE = "failures.jsonl"
MAX_ENTRIES = 5
_SUBTITLE_SUFFIXES = (".srt", ".vtt")  # the entries of subtitle files are called cues
_MAX_REREAD_BYTES = 64 << 20


@dataclass(frozen=True)
class FailureEntry:
    """Failure, or rejected row or file, in a report.

    Attributes:
        name: Key, ID, path or location of the failed or rejected item.
        code: Failure code, or reason why a row was rejected.
        message: Message for the user.
    """

    name: str
    code: str
    message: str


def write_failures(path: Path, failures: Sequence[Failure]) -> None:
    """Publish a list of failures as JSON Lines. If there are none, remove the file."""
    if failures:
        publish_bytes(path, "".join(json.dumps(asdict(failure)) + "\n" for failure in failures).encode())
    else:
        remove(path)


def read_failures(path: Path) -> list[Failure]:
    """Read the list of failures that the last run wrote; return an empty list if the file is missing or damaged."""
    try:
        return [Failure(**json.loads(line)) for line in read_record(path).splitlines()]
    except (OSError, ValueError, TypeError):
        return []


def shard_name(shard_id: int) -> str:
    """Return the name of a shard. The failure of a complete shard has this name in place of a video ID."""
    return f"shard {shard_id:06d}"


def codes_line(failures: Iterable[Failure]) -> str:
    """Return the number of failures with each code as text, such as "10 x source_unreadable, 1 x timeout"."""
    return ", ".join(f"{count} x {code}" for code, count in Counter(failure.code for failure in failures).most_common())


def first_failures(failures: Iterable[Failure]) -> list[FailureEntry]:
    """Return the first few failures, each named by the key of the sample or, if there is none, by the video ID."""
    return first_few(
        FailureEntry(failure.key or failure.video_id, failure.code, failure.message) for failure in failures
    )


def failure_lines(
    failures: Sequence[Failure], *, list_path: Path | None, retry_command: Sequence[str] = ("prep", "retry")
) -> list[str]:
    """Return lines with the number of failures with each code, hints, and the first few failures.

    Args:
        list_path: Path of the complete list of failures; None if there is no such file.
        retry_command: Command that retries the failures of the column, as a list of arguments.
    """
    lines = []
    for code, count in Counter(failure.code for failure in failures).most_common():
        meaning, advice = EXPLANATIONS.get(code, ("", ""))
        lines.append(f"failed   {count} x {code}{': ' if meaning else ''}{meaning}")
        lines += [f"         hint: {advice.format(retry=shlex.join(retry_command))}"] if advice else []
    return [*lines, *entry_lines(first_failures(failures), num_all=len(failures), list_path=list_path, indent=" " * 9)]


def lost_source_lines(codes: Mapping[str, int], *, is_indexed: bool) -> list[str]:
    """Return a line for each failure code of sources that were readable in an earlier run but can no longer be used.

    Args:
        codes: Number of sources, keyed by failure code.
        is_indexed: True if the packets of the chunks are in the sources and not in tars (`prep index`).
    """
    effect = "their chunks cannot be read" if is_indexed else "existing chunks are kept"
    lines = []
    for code, count in codes.items():
        problem = "changed" if code == FailureCode.SOURCE_CHANGED else "can no longer be read"
        advice = f"; {EXPLANATIONS[code][1]}" if is_indexed and code in SOURCE_AWAY else ""
        lines.append(f"{count_noun(count, 'source')} that {problem} ({code}); {effect}{advice}")
    return lines


def failure_values(failures: Sequence[Failure], *, list_path: Path) -> dict[str, Any]:
    """Return the content of `failure_lines` as JSON values."""
    return {
        "failures": dict(Counter(failure.code for failure in failures).most_common()),
        "first_failures": entry_values(first_failures(failures)),
        "failures_file": os.fspath(list_path) if failures else None,
    }


def note_lines(notes: Mapping[str, Sequence[str]], *, num_all: int, indent: int) -> list[str]:
    """Return a line for each note about an unexpected property of a video.

    Args:
        notes: Notes on the first few videos, keyed by video ID.
        num_all: Total number of videos with notes.
        indent: Width of the column of labels, in characters.
    """
    lines = [on_one_line(f"{video}: {note}") for video, video_notes in notes.items() for note in video_notes]
    if num_all > len(notes):
        lines.append(f"... and {num_all - len(notes):,} more; `prep plan --explain VIDEO` shows the notes of a video")
    return [f"{'' if number else 'notes':<{indent}}{line}" for number, line in enumerate(lines)]


def first_rejected(rejected: pa.Table, *, dataset: str | None = None) -> list[FailureEntry]:
    """Return the first few rejected rows and files, each with its location.

    Args:
        rejected: Table with schema REJECTED.
        dataset: Name of the dataset whose rows to include; None for all datasets.
    """
    if dataset is not None:
        rejected = rejected.filter(pc.equal(rejected["dataset"], dataset))
    rows: list[dict[str, Any]] = []
    for reason in pc.unique(rejected["reason"]):
        rows += rejected.filter(pc.equal(rejected["reason"], reason)).slice(0, MAX_ENTRIES).to_pylist()
    from clipmill.manifests.adapters.table_formats import LINE_SUFFIXES, TEXT_SUFFIXES, line_numbers

    numbers: dict[str, set[int]] = {}
    for row in rows:
        if row["row"] is not None and Path(row["file"]).suffix.lower() in TEXT_SUFFIXES | LINE_SUFFIXES:
            numbers.setdefault(row["file"], set()).add(row["row"])
    lines: dict[tuple[str, int], int] = {}
    for file, file_rows in numbers.items():
        with suppress(OSError, UserError):
            if Path(file).stat().st_size <= _MAX_REREAD_BYTES:  # reading larger tables again would take too long
                lines |= {(file, row): line for row, line in line_numbers(Path(file), file_rows).items()}
    return first_few(
        FailureEntry(_location(row, line=lines.get((row["file"], row["row"]))), row["reason"], row["detail"])
        for row in rows
    )


def first_few(entries: Iterable[FailureEntry]) -> list[FailureEntry]:
    """Return up to MAX_ENTRIES failures: the first failure of each code, then the second of each code, and so on."""
    entries_by_code: dict[str, list[FailureEntry]] = {}
    for entry in entries:
        same_code = entries_by_code.setdefault(entry.code, [])
        if len(same_code) < MAX_ENTRIES:
            same_code.append(entry)
    interleaved = (entry for rank in zip_longest(*entries_by_code.values()) for entry in rank if entry is not None)
    return list(islice(interleaved, MAX_ENTRIES))


def entry_lines(entries: Sequence[FailureEntry], *, num_all: int, list_path: Path | None, indent: str) -> Iterator[str]:
    """Yield a line for each entry, then a line with the number of other failures and the path of the complete list.

    Args:
        num_all: Total number of failures.
        list_path: Path of the complete list; None if there is no such file.
        indent: Spaces before each line.
    """
    for entry in entries:
        yield f"{indent}{on_one_line(f'{entry.name}: {entry.code}: {entry.message}')}"
    parts = [f"and {num_all - len(entries):,} more"] if num_all > len(entries) else []
    if num_all and list_path is not None:
        parts.append(f"complete list: {list_path}")
    if parts:
        yield f"{indent}{'; '.join(parts)}"


def entry_values(entries: Sequence[FailureEntry]) -> list[dict[str, Any]]:
    """Return entries as JSON values."""
    return [asdict(entry) for entry in entries]


def _location(row: dict[str, Any], *, line: int | None) -> str:
    """Return the location of a rejected row, such as `captions.csv, line 5: clip.mp4`, or the path of a rejected file.

    Args:
        line: Line number, from 1; None if unknown.
    """
    file, source_id = Path(row["file"]), row["source_id"]
    if row["row"] is None and (source_id is None or file.stem == Path(source_id).name):
        return str(file)
    location = file.name
    if line is not None:
        location += f", line {line}"
    elif row["row"] is not None:
        location += f", {'cue' if file.suffix.lower() in _SUBTITLE_SUFFIXES else 'entry'} {row['row'] + 1}"
    return location if source_id is None else f"{location}: {source_id}"
