"""Invariants that hold after a command, whatever fault was injected; each check raises `Broken`."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

from clipmill.manifests.publish import TEMPORARY_PREFIX
from clipmill.shards.commit_table import read_commits
from clipmill.shards.commits import commit_path
from clipmill.shards.reader import Variant
from clipmill.shards.verify import verify_shard
from tests.prep.running import contents
from tests.torture.cases import Broken
from tests.torture.commands import Ran

EXIT_CODES = frozenset({0, 1, 2, 3, 130, 143})


def ended_well(ran: Ran, *, status: int | Collection[int] = EXIT_CODES) -> Ran:
    """Check that a command printed no traceback and exited with a status in `status`.

    A signal is allowed only if its negative number is in `status`.
    """
    allowed = {status} if isinstance(status, int) else status
    if "Traceback (most recent call last)" in ran.output:
        raise Broken(f"a traceback: {ran.describe()}")
    if ran.status not in allowed:
        raise Broken(f"exit status {ran.status}, not {', '.join(map(str, sorted(allowed)))}: {ran.describe()}")
    return ran


def same_files(actual: Path, expected: Path) -> None:
    """Check that two folders contain the same files with the same bytes, except lock files."""
    same_contents(contents(actual), contents(expected))


def same_contents(actual: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Check that two mappings from paths to content digests are equal."""
    differences = [
        *(f"missing: {name}" for name in sorted(expected.keys() - actual.keys())),
        *(f"too many: {name}" for name in sorted(actual.keys() - expected.keys())),
        *(f"differs: {name}" for name in sorted(expected.keys() & actual.keys()) if actual[name] != expected[name]),
    ]
    if differences:
        raise Broken(f"not what an undisturbed run makes: {_some(differences)}")


def samples(data: Path, *, column: str = "video") -> dict[str, str]:
    """Return the SHA-256 of each member of a column, by the name of the member."""
    return {
        f"{sample['__key__']}.{extension}": hashlib.sha256(content).hexdigest()
        for sample in Variant.open(data, column=column).require_complete().iterate()
        for extension, content in sample.items()
        if isinstance(content, bytes)
    }


def whole_shards(data: Path) -> None:
    """Check that the files of each commit have the bytes that it records; readers rely only on this record."""
    for folder in sorted(data.glob("*/*/commits")):
        for commit in read_commits(folder.parent).commits.values():
            if problems := verify_shard(folder.parent, commit):
                raise Broken(f"committed, but not whole: {commit_path(folder.parent, commit.shard_id)}: {problems[0]}")


def no_litter(*folders: Path) -> None:
    """Check that there are no temporary files and no empty folders below `folders`.

    The folders themselves may be missing or empty.
    """
    problems = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.name.startswith(TEMPORARY_PREFIX):
                problems.append(f"temporary: {name}")
            elif path.is_dir() and not any(path.iterdir()):
                problems.append(f"empty folder: {name}")
    if problems:
        raise Broken(f"litter: {_some(problems)}")


def nothing_in(scratch: Path) -> None:
    """Check that a command's $TMPDIR is empty, except for torch's compilation cache."""
    leftovers = [str(path.relative_to(scratch)) for path in sorted(scratch.rglob("*"))]
    if leftovers := [name for name in leftovers if not name.startswith("torchinductor_")]:
        raise Broken(f"left in $TMPDIR: {_some(leftovers)}")


def _some(lines: list[str]) -> str:
    return "; ".join(lines[:6]) + (f"; and {len(lines) - 6} more" if len(lines) > 6 else "")
