"""Packages with plug-ins, as an installation leaves them: a folder for `PYTHONPATH` with the entry points of each."""

import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from clipmill.manifests import plugins
from tests.conftest import ROOT

EXAMPLE = ROOT / "tests" / "plugin_example"


def declare(folder: Path, package: str, groups: Mapping[str, Mapping[str, str]], *, version: str = "1.0") -> None:
    """Record in `folder` what an installed package declares: group -> name -> import path."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    sections = (
        "\n".join([f"[clipmill.{group}]", *(f"{name} = {path}" for name, path in parts.items())])
        for group, parts in groups.items()
    )
    (info / "entry_points.txt").write_text("\n\n".join(sections) + "\n")


def example_installed(folder: Path) -> dict[str, str]:
    """An environment in which `tests/plugin_example` is installed as by `pip install --editable`."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    groups = {group.removeprefix("clipmill."): parts for group, parts in project["entry-points"].items()}
    declare(folder, project["name"], groups, version=project["version"])
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, EXAMPLE, ROOT)))}


@contextmanager
def installed_here(folder: Path) -> Iterator[None]:
    """Let this process find the packages that are declared in `folder`."""
    sys.path.insert(0, str(folder))
    _look_again()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _look_again()


def _look_again() -> None:
    plugins._all_entries.cache_clear()
    plugins._entries.cache_clear()
    plugins._warn_once.cache_clear()
