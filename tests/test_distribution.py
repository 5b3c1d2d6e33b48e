"""The wheel and the source distribution: built from a clean copy, installed into empty environments, and run."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, repository_files: list[Path]) -> Path:
    """A folder with both distributions, built from the files of the repository alone."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in repository_files:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    for path in (ROOT / "clipmill").iterdir():
        if path.is_symlink():
            (source / "clipmill" / path.name).symlink_to(path.readlink())
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
    return out


def installed(archive: Path, folder: Path) -> Path:
    """The interpreter of a new environment with the distribution and, by a path file, the packages of this one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = next((folder / "lib").glob("python3*/site-packages"))
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(packages)
    # What it depends on; of its own packages, those of the wheel come first.
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return python


def run(*command: str | Path, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def wheel_of(source: Path, *, out: Path) -> Path:
    """A wheel that is built from an unpacked source distribution."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", out, cwd=source)
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_distribution_installs_and_runs_without_the_repository(built: Path, tmp_path: Path, kind: str) -> None:
    if kind == "wheel":
        [wheel] = built.glob("*.whl")
    else:
        [sdist] = built.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path / "unpacked", filter="data")
        [unpacked] = (tmp_path / "unpacked").iterdir()
        wheel = wheel_of(unpacked, out=tmp_path / "again")
    python = installed(wheel, tmp_path / "environment")
    code = "from clipmill import prep, train; print(train.__file__, prep.__file__)"
    where = run(python, "-I", "-c", code, cwd=tmp_path)
    assert str(ROOT) not in where and where.count(str(tmp_path)) == 2
    for program in ("prep", "train"):
        assert "Commands:" in run(python, "-I", "-m", f"clipmill.{program}.cli", "--help", cwd=tmp_path)
    # Scripts and styles of pages are files beside the code.
    code = "from clipmill.train.report.charts import chart_values; print(len(chart_values([])['scripts']))"
    assert run(python, "-I", "-c", code, cwd=tmp_path) == "2\n"
    synthetic = ("manifest", "synthetic", "--videos", "1", "--minutes", "0.05", "--data", "data")
    assert "1 video" in run(python, "-I", "-m", "clipmill.prep.cli", *synthetic, cwd=tmp_path)


def test_the_wheel_has_the_programs_licences_and_files_beside_the_code(built: Path) -> None:
    [wheel] = built.glob("*.whl")
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
