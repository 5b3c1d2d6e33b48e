"""Data folder with all columns, made once, and commands that run in this process, with the plug-in installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import iter_modules

import pytest
import torch

from clipmill.prep import cli, commands
from clipmill.prep.sources import probe_processes
from clipmill.prep.text import tower
from tests.plugins import example_installed, installed_here
from tests.prep.captions.server import Server, run_server
from tests.prep.columns.cases import CASES, Case, Folder, copy_folder, with_tiers, write_video
from tests.prep.here import Here

# Commands list columns and datasets when they are imported.
_COMMANDS = [module.name for module in iter_modules(commands.__path__)]


@contextmanager
def commands_here(folder: Path) -> Iterator[None]:
    """Let commands find the plug-in's column and do their work in this process, without workers."""
    with installed_here(folder), pytest.MonkeyPatch.context() as patch:
        for name in _COMMANDS:
            patch.delitem(sys.modules, f"{commands.__name__}.{name}", raising=False)
        before = {name: vars(commands).pop(name) for name in _COMMANDS if name in vars(commands)}
        patch.setattr(cli, "app", cli.build_app())
        for module in ("engines.processes", "upkeep.verify"):
            patch.setattr(f"clipmill.prep.{module}.ProcessEngine", lambda num_workers, gpus=None: Here())
        # Otherwise, every command would start a process that reads its sources.
        readers: list[probe_processes.Reader] = []
        patch.setattr(probe_processes, "probe_each", partial(probe_processes.probe_each, pool=readers))
        yield
        for reader in readers:
            reader.end()
        tower.load_tower.cache_clear()
        for name in _COMMANDS:
            sys.modules.pop(f"{commands.__name__}.{name}", None)
            vars(commands).pop(name, None)
        vars(commands).update(before)


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the plug-in is declared."""
    example_installed(folder := tmp_path_factory.mktemp("installed"))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _plugin(plugin_folder: Path) -> Iterator[None]:
    """Show the plug-in only to the tests of this folder; `finished_folder`, set up earlier, installs it itself."""
    with commands_here(plugin_folder):
        yield


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restore the number of torch's threads, which models change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with run_server() as server:
        yield server


@pytest.fixture(scope="session")
def finished_folder(tmp_path_factory: pytest.TempPathFactory, server: Server, plugin_folder: Path) -> Path:
    """Create the folder with all columns."""
    root = tmp_path_factory.mktemp("columns") / "made"
    write_video(root / "videos" / "long.mp4", num_frames=150)
    write_video(root / "videos" / "short.mp4", num_frames=90, first_number=1000)
    folder = Folder(root, CASES[0], server)
    with commands_here(plugin_folder):
        folder.read_manifest()
        for case in CASES:
            folder.of(case.name).make()
    return root


@pytest.fixture
def folder(finished_folder: Path, case: Case, server: Server, tmp_path: Path) -> Iterator[Folder]:
    """Return a copy of the folder for the column under test."""
    server.log.clear()
    yield Folder(copy_folder(finished_folder, tmp_path / "set"), case, server)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on every column unless it says otherwise; only `make nightly` runs the columns in `NIGHTLY`."""
    is_parametrized = any("case" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "case" in metafunc.fixturenames and not is_parametrized:
        metafunc.parametrize("case", with_tiers(CASES), ids=str)
