"""What is found on a machine, what is brought to it, and what is said of versions that do not fit."""

import importlib
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
from packaging.requirements import Requirement

from manifests.errors import UserError
from scripts.gpu_kit.machine import FROM_KIT, HERE, MISSING, conflicts, find_packages, fits, unpack_missing
from scripts.gpu_kit.requirements import EVERYTHING, Need, needs_of


def wheel(folder: Path, name: str, *, requires: str = "", tag: str = "py3-none-any", version: str = "1.0") -> Path:
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "IS_OF_THE_KIT = True\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(
            f"{name}-{version}.dist-info/METADATA", metadata + (f"Requires-Dist: {requires}\n" * bool(requires))
        )
    return path


def need(line: str, *, loss: str = EVERYTHING) -> Need:
    requirement = Requirement(line)
    return Need(name=requirement.name, requirement=requirement, import_name=requirement.name, loss=loss)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages that are brought; the path of this process is as before after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def test_a_missing_package_is_brought(tmp_path: Path, site: Path) -> None:
    unpack_missing([wheel(tmp_path, "brought_by_the_kit")], site)
    (package,) = find_packages([need("brought_by_the_kit>=1")], site=site)
    assert (package.version, package.source, package.problem) == ("1.0", FROM_KIT, None)
    assert importlib.import_module("brought_by_the_kit").IS_OF_THE_KIT


@pytest.mark.parametrize("damage", ["truncated", "a wrong byte"])
def test_a_damaged_wheel_is_named(tmp_path: Path, site: Path, damage: str) -> None:
    path = wheel(tmp_path, "damaged_on_its_way")
    content = bytearray(path.read_bytes())
    place = content.index(b"IS_OF_THE_KIT")
    content[place] ^= 1
    path.write_bytes(content[:200] if damage == "truncated" else content)
    with pytest.raises(UserError, match=r"damaged_on_its_way-1\.0-py3-none-any\.whl is damaged"):
        unpack_missing([path], site)


def test_a_package_that_is_there_in_another_version_is_used_and_named(tmp_path: Path, site: Path) -> None:
    unpack_missing([wheel(tmp_path, "numpy")], site)
    assert not (site / "numpy").exists()
    (package,) = find_packages([need("numpy<1", loss="part A")], site=site)
    assert (package.version, package.source) == (numpy.__version__, HERE)
    assert package.problem == f"found numpy {numpy.__version__}, clipmill requires <1; may affect part A"


def test_a_package_without_metadata_is_there(tmp_path: Path, site: Path) -> None:
    folder = tmp_path / "elsewhere" / "built_from_source"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    sys.path.append(str(folder.parent))
    unpack_missing([wheel(tmp_path, "built_from_source")], site)
    assert not (site / "built_from_source").exists()
    (package,) = find_packages([need("built_from_source>=4")], site=site)
    assert (package.version, package.source, package.problem) == (None, HERE, None)


def test_a_wheel_for_another_python_is_not_brought_and_its_package_is_named(tmp_path: Path, site: Path) -> None:
    unpack_missing([wheel(tmp_path, "of_another_python", tag="cp27-cp27m-manylinux1_x86_64")], site)
    (package,) = find_packages([need("of_another_python>=1", loss="part B")], site=site)
    assert package.source == MISSING
    assert package.problem is not None
    assert "of_another_python is missing" in package.problem
    assert package.problem.endswith("part B")


def test_a_brought_package_that_wants_another_version_of_what_is_there_is_named(tmp_path: Path, site: Path) -> None:
    unpack_missing([wheel(tmp_path, "wants_old_numpy", requires="numpy<1")], site)
    assert conflicts(site) == [f"wants_old_numpy 1.0 requires numpy<1, found {numpy.__version__}"]


@pytest.mark.parametrize(
    ("version", "line", "does_fit"),
    [
        ("2.11.0+cu130", "torch>=2.11", True),
        ("2.11.0a0+nv26.3", "torch>=2.11", True),  # NVIDIA's containers
        ("2.10.1", "torch>=2.11", False),
        ("18.1.0", "av>=18.1,<19", True),
        ("19.0.0", "av>=18.1,<19", False),
        ("0.0.35", "xformers", True),
        ("built-by-hand", "xformers>=0.0.35", False),
    ],
)
def test_ranges_of_versions(version: str, line: str, does_fit: bool) -> None:
    assert fits(version, Requirement(line)) == does_fit


def test_the_ranges_are_those_of_pyproject(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[project]\ndependencies = ["numpy>=2"]\n'
        "[project.optional-dependencies]\n"
        'train = ["av>=18.1,<19", "opencv-python-headless>=4.10"]\ncolumns = ["diffusers>=0.36"]\n'
        'dev = ["mypy>=2", "pytest>=9"]\ntrack = ["wandb>=0.22"]\n'
    )
    needs = {need.name: need for need in needs_of(path)}
    assert needs.keys() == {"av", "diffusers", "numpy", "opencv-python-headless", "pytest"}
    assert needs["av"].requirement.specifier == ">=18.1,<19"
    assert needs["opencv-python-headless"].import_name == "cv2"
    assert (needs["numpy"].loss, needs["pytest"].loss) == (EVERYTHING, "part A")
