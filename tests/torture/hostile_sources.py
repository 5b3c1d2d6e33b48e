"""Hostile input of `prep`: sources, links, names and annotation files. Each is processed exactly, or named; nothing
is read outside, or opened on the network.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from tests.torture import bases
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well
from tests.torture.workspace import Workspace, copy

PART = "hostile"


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """The cases of each kind of input, in an order that `seed` decides."""
    return {"source": partial(_sources, seed, workspace)}


def _sources(seed: int, workspace: Workspace) -> Iterator[Case]:
    noise = Random(f"{seed}/source").randbytes(5000)
    for name, content in (("noise.mp4", noise), ("text.mkv", b"not a video\n")):
        yield Case(f"{PART}/source/{name}", "source", partial(_bad_source, workspace, name, content))


def _bad_source(workspace: Workspace, name: str, content: bytes, folder: Path) -> None:
    """One bad source is one failure, by name, and the others go on."""
    copy(bases.videos(workspace) / "first", folder / "videos")
    (folder / "videos" / name).write_bytes(content)
    where = ("--data", folder / "data")
    for arguments in (("manifest", "folder", folder / "videos"), (*bases.CHUNK, *bases.ENGINE)):
        ran = ended_well(workspace.commands.run("prep", [*arguments, *where], scratch=folder / "tmp"))
    failures = list((folder / "data").glob("video/*/failures.jsonl"))
    if ran.status != 1 or not failures or f'"{Path(name).stem}"' not in failures[0].read_text():
        raise Broken(f"not named: {ran.described()}")
    if len(list((folder / "data").glob("video/*/*.tar"))) == 0:
        raise Broken(f"the others did not go on: {ran.described()}")
