"""The wheel and the source distribution: built from a clean copy, installed into empty environments, and run."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import clipmill
from tests.plugins import EXAMPLE

ROOT = Path(__file__).parents[1]
# As installers write it.
_PROGRAM = """#!{python}
import sys
from {module} import {function}
if __name__ == "__main__":
    sys.exit({function}())
"""
# A program of a user that runs every command with --help: its folder is the first in which Python looks for modules.
_HELP = """
import sys
from clipmill.prep.cli import app as prep
from clipmill.train.cli import app as train
from clipmill.manifests.help_text import help_text
def commands(app):
    for name in app:
        if not name.startswith("-"):
            inner = list(commands(app[name]))
            yield from [[name, *words] for words in inner] or [[name]]
for app in (prep, train):
    for words in commands(app):
        assert "Usage" in help_text(app, [*words, "--help"]), words
        print(app.name[0], *words)
"""
# Runs several commands of a program with --help-all.
_HELP_ALL = """
import importlib, sys
program, *commands = sys.argv[1:]
main = importlib.import_module(f"clipmill.{program}.cli").main
for command in commands:
    sys.argv = [program, *command.split(), "--help-all"]
    try:
        main()
    except SystemExit as left:
        assert not left.code, left
"""
# Names that users give to files of their own, beside those of the packages.
_THEIR_MODULES = ("train", "prep", "shards", "manifests", "clips", "data", "models", "utils")
_TRAINS = """
import sys
from clipmill import load_model, open_clips
from clipmill.train.cli import main
flags = "--model tiny --size-px 32 --num-frames 2 --batch 2 --steps 1 --warmup-steps 0 --workers 1 --device cpu"
sys.argv = ["train", "dual-encoder", "--out", "run", *flags.split()]
try:
    main()
except SystemExit as left:
    assert left.code == 0, left
model = load_model("run")
with open_clips("data", batch=2, num_frames=2, size_px=32) as clips:
    print([tuple(model.encode_video(batch["video"]).shape) for batch in clips])
"""
_USES_EVERY_NAME = """
from clipmill import (
    Batches,
    Chunk,
    Chunks,
    FailedWork,
    LoadedModel,
    UserError,
    chunks_table,
    load_model,
    open_clips,
    open_latents,
    read_chunks,
    read_clips,
)


def brightness(chunk: Chunk) -> float:
    return float(chunk.frames.mean())


def count(batches: Batches) -> int:
    return sum(len(batch["key"]) for batch in batches)


def main() -> None:
    try:
        with open_clips("data", batch=8, augment={"flip": 0.5}, sources={"human": 1.0}) as clips:
            print(count(clips), len(clips), clips.state_dict())
        with open_latents("data", captions=None) as segments:
            print(count(segments))
        with read_clips("data", {"video_id": ["a"], "time_s": [1.5]}, offsets_s=(-0.1, 0.0)) as moments:
            print(count(moments))
        chunks: Chunks = read_chunks("data")
        print([brightness(chunk) for chunk in chunks], chunks_table("data").num_rows)
        model: LoadedModel = load_model("runs/first", num_frames=4)
        print(model.encode_text(["a dog"]).shape, model.logit_scale)
    except UserError as error:
        print(error, error.hint)
    except FailedWork as failed:
        print(failed)
"""
# The types of other libraries are not what is tested, and reading those of torch takes a minute.
_STRICT = """[mypy]
strict = True
[mypy-torch.*,numpy.*,pyarrow.*,cyclopts.*,av.*,transformers.*,open_clip.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, repository_files: list[Path]) -> Path:
    """The files of the repository alone."""
    folder = tmp_path_factory.mktemp("source")
    for path in repository_files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((ROOT / path).read_bytes())
    for path in (ROOT / "clipmill").iterdir():
        if path.is_symlink():
            (folder / "clipmill" / path.name).symlink_to(path.readlink())
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(source, out=tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", out, cwd=source)
    [path] = out.glob("*.tar.gz")
    return path


def install(archive: Path, folder: Path) -> Path:
    """The interpreter of a new environment with the distribution and, by a path file, the packages of this one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = next((folder / "lib").glob("python3*/site-packages"))
    with zipfile.ZipFile(archive) as content:
        content.extractall(packages)
    # What it depends on; of its own packages, those of the wheel come first.
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    [entry_points] = packages.glob("clipmill-*/entry_points.txt")
    for line in entry_points.read_text().splitlines():
        if match := re.fullmatch(r"(\w+) = ([\w.]+):(\w+)", line):
            program = folder / "bin" / match[1]
            program.write_text(_PROGRAM.format(python=python, module=match[2], function=match[3]))
            program.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which the wheel is installed."""
    return install(wheel, tmp_path_factory.mktemp("installed") / "environment").parent


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A folder in which a user has modules with the names of our packages, and others."""
    for name in _THEIR_MODULES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was imported')\n")
    return tmp_path


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=True).stdout


def wheel_of(source: Path, *, out: Path) -> Path:
    """A wheel that is built from a folder."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", out, cwd=source)
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.mark.nightly
def test_a_source_distribution_makes_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    contents = []
    for path in (wheel, wheel_of(unpacked, out=tmp_path / "again")):
        with zipfile.ZipFile(path) as archived:
            contents.append({info.filename: info.CRC for info in archived.infolist()})
    assert contents[0] == contents[1] and len(contents[0]) > 100


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_distribution_installs_and_runs_without_the_repository(
    request: pytest.FixtureRequest, environment: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "wheel":
        python = environment / "python"
    else:
        sdist: Path = request.getfixturevalue("sdist")
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path / "unpacked", filter="data")
        [unpacked] = (tmp_path / "unpacked").iterdir()
        python = install(wheel_of(unpacked, out=tmp_path / "again"), tmp_path / "environment")
    code = "from clipmill import prep, train; print(train.__file__, prep.__file__)"
    where = run(python, "-I", "-c", code, cwd=tmp_path)
    assert str(ROOT) not in where and where.count(str(python.parents[1])) == 2
    for program in ("prep", "train"):
        assert "Commands:" in run(python, "-I", "-m", f"clipmill.{program}.cli", "--help", cwd=tmp_path)
    # Scripts and styles of pages are files beside the code.
    code = "from clipmill.train.report.results import chart_values; print(len(chart_values([])['scripts']))"
    assert run(python, "-I", "-c", code, cwd=tmp_path) == "2\n"
    synthetic = ("manifest", "synthetic", "--videos", "1", "--minutes", "0.05", "--data", "data")
    assert "1 video" in run(python, "-I", "-m", "clipmill.prep.cli", *synthetic, cwd=tmp_path)


def test_the_wheel_has_the_programs_licences_and_files_beside_the_code(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert {"prep = clipmill.prep.cli:main", "train = clipmill.train.cli:main"} <= set(
            archive.read(entry_points).decode().splitlines()
        )
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for name in ("report/uplot/LICENSE", "report/charts.js"):
        assert f"clipmill/train/{name}" in names
    assert "clipmill/shards/pages/page.css" in names
    assert any(name.startswith("clipmill/train/presets/") and name.endswith(".yaml") for name in names)
    assert {name.partition("/")[0] for name in names} == {"clipmill", entry_points.partition("/")[0]}


@pytest.mark.nightly
def test_every_command_starts_where_the_user_has_modules_of_our_names(environment: Path, own_folder: Path) -> None:
    (own_folder / "program.py").write_text(_HELP)
    listed = run(environment / "python", "program.py", cwd=own_folder).splitlines()
    assert {"prep manifest folder", "prep chunk", "prep status", "train dual-encoder", "train eval mir"} <= {*listed}


@pytest.mark.nightly
def test_the_example_of_plug_ins_is_built_and_known_to_both_programs(environment: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    with zipfile.ZipFile(wheel_of(EXAMPLE, out=tmp_path / "example")) as example:
        example.extractall(packages)
    for program, commands, parts in (
        ("prep", ["", "manifest"], ["brightness", "names"]),
        ("train", ["", "dual-encoder"], ["frame-order", "decoupled", "mean-frame"]),
    ):
        python = environment / "python"
        stdout = run(python, "-c", _HELP_ALL, program, *commands, cwd=tmp_path, PYTHONPATH=str(packages))
        assert [part for part in parts if part not in stdout] == []


@pytest.mark.nightly
def test_chunks_are_made_by_ray_and_trained_on_there(environment: Path, own_folder: Path) -> None:
    # What a user's own program imports from its folder, the commands and Ray's workers do not.
    theirs = [own_folder / f"{name}.py" for name in ("clipmill", "numpy", "ray")]
    for module in theirs:
        module.write_text(f"raise SystemExit('{module.name} of the user was imported')\n")
    run(environment / "prep", "manifest", "synthetic", "--videos", "2", "--minutes", "0.1", cwd=own_folder)
    assert "2 chunks encoded" in run(environment / "prep", "chunk", "--engine", "ray", "--workers", "1", cwd=own_folder)
    for module in theirs:
        module.unlink()
    (own_folder / "program.py").write_text(_TRAINS)
    assert run(environment / "python", "program.py", cwd=own_folder).endswith("[(2, 128)]\n")


def test_the_program_for_mypy_uses_every_public_name() -> None:
    assert [name for name in clipmill.__all__ if name not in _USES_EVERY_NAME] == []


@pytest.mark.nightly
def test_a_program_that_uses_every_public_name_passes_mypy_strict(environment: Path, own_folder: Path) -> None:
    (own_folder / "mypy.ini").write_text(_STRICT)
    (own_folder / "program.py").write_text(_USES_EVERY_NAME)
    (own_folder / "wrong.py").write_text("from clipmill import open_clips\nopen_clips('data', bath=8)\n")
    check = [sys.executable, "-m", "mypy", "--python-executable", str(environment / "python"), "--cache-dir", "cache"]
    checked = subprocess.run([*check, "program.py", "wrong.py"], cwd=own_folder, capture_output=True, text=True)
    error_lines = [line for line in checked.stdout.splitlines() if " error: " in line]
    assert error_lines and all(line.startswith("wrong.py:2: ") for line in error_lines), checked.stdout
    assert any('did you mean "batch"?' in line for line in error_lines) and "checked 2 source files" in checked.stdout
