"""What must hold after a command, whatever went wrong: each check raises `Broken`."""

from collections.abc import Collection, Mapping
from pathlib import Path

from manifests.publish import TEMPORARY_PREFIX
from tests.prep.running import contents
from tests.torture.cases import Broken
from tests.torture.commands import Ran

EXIT_CODES = frozenset({0, 1, 2, 130, 143})


def ended_well(ran: Ran, *, status: int | Collection[int] = EXIT_CODES) -> Ran:
    """No traceback, and an exit status that is among `status`: never a signal, unless it is given."""
    allowed = {status} if isinstance(status, int) else status
    if "Traceback (most recent call last)" in ran.output:
        raise Broken(f"a traceback: {ran.described()}")
    if ran.status not in allowed:
        raise Broken(f"exit status {ran.status}, not {', '.join(map(str, sorted(allowed)))}: {ran.described()}")
    return ran


def same_files(found: Path, expected: Path) -> None:
    """Two folders hold the same files with the same bytes; files of locks aside."""
    same_contents(contents(found), contents(expected))


def same_contents(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Two mappings from a path to what stands for its bytes are equal."""
    differences = [
        *(f"missing: {name}" for name in sorted(expected.keys() - found.keys())),
        *(f"too many: {name}" for name in sorted(found.keys() - expected.keys())),
        *(f"differs: {name}" for name in sorted(expected.keys() & found.keys()) if found[name] != expected[name]),
    ]
    if differences:
        raise Broken(f"not what an undisturbed run makes: {_some(differences)}")


def no_litter(*folders: Path) -> None:
    """No temporary file and no empty folder lies below these folders; each of them may be missing, or be empty."""
    found = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.name.startswith(TEMPORARY_PREFIX):
                found.append(f"temporary: {name}")
            elif path.is_dir() and not any(path.iterdir()):
                found.append(f"empty folder: {name}")
    if found:
        raise Broken(f"litter: {_some(found)}")


def nothing_in(scratch: Path) -> None:
    """A command's $TMPDIR is as empty as it was, but for torch's cache of compiled code."""
    found = [str(path.relative_to(scratch)) for path in sorted(scratch.rglob("*"))]
    if found := [name for name in found if not name.startswith("torchinductor_")]:
        raise Broken(f"left in $TMPDIR: {_some(found)}")


def _some(lines: list[str]) -> str:
    return "; ".join(lines[:6]) + (f"; and {len(lines) - 6} more" if len(lines) > 6 else "")
