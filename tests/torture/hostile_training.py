"""Hostile input of `train`: streamed tars, YAML and checkpoints. Each is used exactly, or refused by name."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.torture import bases
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well
from tests.torture.workspace import Workspace

PART = "hostile"
_CONFIGS = {"list": "- 1\n", "object": "!!python/object/apply:os.getcwd []\n", "unknown": "stepz: 3\n"}


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """The cases of each kind of input, in an order that `seed` decides."""
    return {"config": partial(_configs, workspace)}


def _configs(workspace: Workspace) -> Iterator[Case]:
    for name, text in _CONFIGS.items():
        yield Case(f"{PART}/config/{name}", "config", partial(_bad_config, workspace, text))


def _bad_config(workspace: Workspace, text: str, folder: Path) -> None:
    path = folder / "settings.yaml"
    path.write_text(text)
    data = bases.with_chunks(workspace) / "data"
    where = ("--shards", data, "--out", folder / "run", "--config", path)
    ran = workspace.commands.run("train", [*bases.TRAIN, *where], scratch=folder / "tmp")
    if str(path) not in ended_well(ran, status=2).stderr:
        raise Broken(f"the file is not named: {ran.described()}")
    if (folder / "run").exists():
        raise Broken("a refused command left a folder")
