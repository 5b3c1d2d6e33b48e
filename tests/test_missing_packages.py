"""`pip install clipmill` without extras: a command that needs one names it, in place of a traceback."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from clipmill.manifests.extras import extra_with
from tests.conftest import ROOT
from tests.prep.running import prep_here

# Runs commands one after another in a process that cannot import the modules of any extra.
PROGRAM = """
import importlib, sys
modules, program, *commands = sys.argv[1:]
sys.modules |= dict.fromkeys(modules.split())
main = importlib.import_module(f"clipmill.{program}.cli").main
for command in commands:
    sys.argv = [program, *command.split()]
    try:
        main()
    except SystemExit as ended:
        print(ended.code, file=sys.stderr)
"""


PROGRESS = re.compile(r"(\d\S+Z )?\[\d")  # with the time: no terminal


def modules_of_extras() -> dict[str, set[str]]:
    """The modules of the packages that only extras require, with the names of these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}

    base, extras = names(project["dependencies"]), project["optional-dependencies"]
    extras_by_name: dict[str, set[str]] = {}
    for module, distributions in packages_distributions().items():
        for extra in extras.keys() - {"dev", "docs"}:
            if (names(extras[extra]) - base) & names(distributions) and module.isidentifier():
                extras_by_name.setdefault(module, set()).add(extra)
    return {module: extras for module, extras in extras_by_name.items() if not module.startswith("_")}


def test_every_module_of_an_extra_leads_to_it() -> None:
    modules = modules_of_extras()
    assert {"av", "cv2", "torch", "ray", "zarr", "openai"} <= modules.keys()
    for module in (
        "av",
        "cv2",
        "ffmpeg",
        "imageio_ffmpeg",
        "jinja2",
        "open_clip",
        "openai",
        "peft",
        "ray",
        "torch",
        "zarr",
    ):
        for program in ("prep", "train"):
            extra = extra_with(f"{module}.part", program=program)
            assert extra in modules[module]
            assert program == extra or program not in modules[module]
    assert extra_with("a_module_of_a_user", program="prep") is None


@pytest.mark.parametrize(
    ("program", "commands"),
    [
        ("prep", ("manifest synthetic --data {0}/new", "plan --data {0}/data", "chunk --data {0}/data")),
        ("train", ("mae --shards {0}/data --preset tiny", "bench --shards {0}/data")),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(
    tmp_path: Path, program: str, commands: tuple[str, ...]
) -> None:
    prep_here("manifest", "synthetic", "--videos", 1, "--minutes", 0.02, "--data", tmp_path / "data")
    words = [command.format(tmp_path) for command in commands]
    command = [sys.executable, "-c", PROGRAM, " ".join(modules_of_extras()), program, *words]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in ran.stderr.splitlines() if not PROGRESS.match(line)]
    assert len(lines) == 3 * len(commands), ran.stderr
    for error, hint, status in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert re.fullmatch(r"error: the Python package \w+, which this command needs, is not installed", error)
        assert hint == f"hint: pip install 'clipmill[{program}]'" and status == "2"
