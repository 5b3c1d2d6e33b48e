"""Damage: random flips, cuts, swaps and deletions in every kind of durable file.

It is found by `verify` or refused by the file's reader, repaired by a rerun, and never served.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from tests.prep.sets import flip
from tests.torture import bases
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well, same_files
from tests.torture.workspace import Workspace, copy

PART = "damage"
_NUM_FLIPS = 20


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """The cases of each kind of file, in an order that `seed` decides."""
    return {"video-tar": partial(_flips, seed, workspace, pattern="video/*/*.tar")}


def _flips(seed: int, workspace: Workspace, *, pattern: str) -> Iterator[Case]:
    whole = bases.with_chunks(workspace) / "data"
    random = Random(f"{seed}/{pattern}")
    for _ in range(_NUM_FLIPS):
        path = random.choice(sorted(whole.glob(pattern)))
        name, offset = path.relative_to(whole), random.randrange(path.stat().st_size)
        run = partial(_flip_in_tar, workspace, name, offset)
        yield Case(f"{PART}/video-tar/flip:{name}@{offset}", "flip", run)


def _flip_in_tar(workspace: Workspace, name: Path, offset: int, folder: Path) -> None:
    whole = bases.with_chunks(workspace)
    copy(whole, folder)
    flip(folder / "data" / name, offset)
    where = ("--data", folder / "data")
    found = workspace.commands.run("prep", ["verify", *where], scratch=folder / "tmp")
    if ended_well(found).status != 1 or name.name.split("-")[0] not in found.output:
        raise Broken(f"not found: {found.described()}")
    again = workspace.commands.run("prep", [*bases.CHUNK, *bases.ENGINE, *where], scratch=folder / "tmp")
    ended_well(again)
    repaired = workspace.commands.run("prep", ["verify", *where], scratch=folder / "tmp")
    ended_well(repaired, status=0)
    same_files(folder / "data", whole / "data")
