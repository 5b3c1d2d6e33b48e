"""The repository keeps its own promises: locks, extras, sizes, names, documents."""

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.conftest import LONG

PYTHONS = ("3.11", "3.12", "3.13")
MAX_FILE_LINES = 600
MAX_README_LINES = 60
MAX_WORDS_OF_DOCUMENTS = 84_700  # of all Markdown files, without the bars of tables; it only goes down
NAMES_THAT_SAY_NOTHING = {"common", "helper", "helpers", "misc", "tools", "util", "utils"}
# Parts with a lock, and their extras.
PARTS = {"prep": ("prep", "cluster"), "columns": ("prep", "cluster", "columns"), "train": ("train",)}
LOCKS = ("requirements.lock", "requirements-uv.lock", *(f"requirements-{part}.lock" for part in PARTS))
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
# Brackets keep these lines from finding themselves.
REGISTRY = re.compile(r"pypi[.]org|python[h]osted|--(extra-)?[i]ndex-url|--[f]ind-links|://\S*[/]simple\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}{-])/(work|root|home|opt|mnt|tmp|Users)/\w")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")


def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


def locked_requirements(lock: Path) -> list[tuple[Requirement, str]]:
    """(requirement, its hashes as written) for each entry of a lock."""
    lines = "\n".join(line for line in lock.read_text().splitlines() if not line.startswith("#"))
    entries = re.split(r"\n(?=\S)", lines.replace("\\\n", " ").strip())
    split = [re.split(r"\s(?=--hash)", entry, maxsplit=1) for entry in entries]
    return [(Requirement(parts[0]), parts[1] if len(parts) == 2 else "") for parts in split]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normal(Requirement(line).name) for line in requirements}


def text_of(path: Path) -> str | None:
    """Text of a file, or None for one that is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_is_pinned_and_hashed(repository: Path, name: str) -> None:
    entries = locked_requirements(repository / name)
    assert entries
    for requirement, hashes in entries:
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert hashes and all(HASH.fullmatch(word) for word in hashes.split()), requirement


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_address(repository: Path, name: str) -> None:
    text = (repository / name).read_text()
    assert "://" not in text
    assert not re.search(r"^\s*-(?!-hash=sha256:)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_satisfies_pyproject_on_every_python(repository: Path, python: str) -> None:
    system = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pins: dict[str, str] = {}
    for requirement, _ in locked_requirements(repository / "requirements.lock"):
        if requirement.marker is None or requirement.marker.evaluate(system):
            assert pins.setdefault(normal(requirement.name), str(requirement.specifier)) == str(requirement.specifier)
    asked = project(repository)
    for line in sum(asked["optional-dependencies"].values(), asked["dependencies"]):
        requirement = Requirement(line)
        pinned = pins[normal(requirement.name)].removeprefix("==")
        assert requirement.specifier.contains(pinned), f"{line}: the lock has {pinned}; run `make lock`"


@pytest.mark.parametrize("part", PARTS)
def test_the_lock_of_a_part_has_its_packages_with_the_pins_of_the_complete_lock(repository: Path, part: str) -> None:
    complete = {
        (normal(pin.name), str(pin.specifier)) for pin, _ in locked_requirements(repository / "requirements.lock")
    }
    pins = {
        (normal(pin.name), str(pin.specifier))
        for pin, _ in locked_requirements(repository / f"requirements-{part}.lock")
    }
    assert pins <= complete, pins - complete
    asked = project(repository)
    lines = sum((asked["optional-dependencies"][extra] for extra in PARTS[part]), asked["dependencies"])
    others = {"prep": {"torch"}, "columns": {"xformers"}, "train": {"ray", "imageio-ffmpeg"}}
    assert names(lines) | {"hatchling"} <= {name for name, _ in pins}
    assert not others[part] & {name for name, _ in pins}


def test_each_side_installs_without_the_others_parts(repository: Path) -> None:
    asked = project(repository)
    base, extras = names(asked["dependencies"]), asked["optional-dependencies"]
    assert not (base | names(extras["train"])) & {"ray", "ffmpeg-python", "imageio-ffmpeg"}
    assert not (base | names(extras["prep"])) & {"torch", "xformers", "open-clip-torch", "torchvision"}


def test_the_version_is_the_same_everywhere(repository: Path) -> None:
    version = project(repository)["version"]
    assert metadata.version("clipmill") == version
    changelog = (repository / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[^]]*)\]", changelog, flags=re.MULTILINE)
    assert "## [Unreleased]" in changelog
    assert not released or released[0] == version


def test_no_python_file_is_long(repository: Path, repository_files: list[Path]) -> None:
    for path in repository_files:
        if path.suffix == ".py":
            num_lines = len((repository / path).read_text().splitlines())
            assert num_lines <= MAX_FILE_LINES, f"{path}: {num_lines} lines; split it by meaning"


def test_every_module_has_a_name_that_says_something(repository_files: list[Path]) -> None:
    for path in repository_files:
        if path.suffix == ".py":
            assert not NAMES_THAT_SAY_NOTHING & {*path.parent.parts, path.stem}, path


def test_the_test_files_that_come_first_are_there(repository_files: list[Path]) -> None:
    assert set(LONG) <= {path.name for path in repository_files if path.parts[0] == "tests"}


def test_no_file_names_a_registry_or_a_path_of_one_machine(repository: Path, repository_files: list[Path]) -> None:
    for path in repository_files:
        for number, line in enumerate((text_of(repository / path) or "").splitlines(), start=1):
            for pattern in (REGISTRY, MACHINE_PATH):
                assert not pattern.search(line), f"{path}:{number}: {line.strip()}"


@pytest.mark.parametrize("package", ["manifests", "shards", "prep", "train"])
def test_every_package_has_a_readme_that_names_its_files(repository: Path, package: str) -> None:
    folders = {path.parent for path in (repository / package).rglob("*.py")}
    for folder in sorted(folders):
        readme = folder / "README.md"
        where = folder.relative_to(repository)
        assert readme.is_file(), f"{where} has no README.md"
        text = readme.read_text()
        assert len(text.splitlines()) <= MAX_README_LINES, f"{where}/README.md is more than a screen"
        for module in sorted(folder.glob("*.py")):
            assert module.name == "__init__.py" or module.name in text, f"{where}/README.md leaves out {module.name}"


def test_links_between_documents_lead_somewhere(repository: Path, repository_files: list[Path]) -> None:
    for path in repository_files:
        if path.suffix == ".md":
            for target in LINK.findall((repository / path).read_text()):
                assert (repository / path.parent / target).exists(), f"{path}: {target}"


def test_every_document_is_in_the_index(repository: Path, repository_files: list[Path]) -> None:
    index = (repository / "docs/README.md").read_text()
    for path in repository_files:
        if path.parts[0] == "docs" and path.suffix == ".md" and path.name != "README.md":
            assert f"({path.relative_to('docs').as_posix()})" in index, path


def test_the_documents_stay_short(repository: Path, repository_files: list[Path]) -> None:
    words = {
        path: sum(any(map(str.isalnum, word)) for word in (repository / path).read_text().split())
        for path in repository_files
        if path.suffix == ".md"
    }
    longest = ", ".join(f"{path} {words[path]:,}" for path in sorted(words, key=words.__getitem__)[:-6:-1])
    hint = "tell a fact once, and link to it"
    assert sum(words.values()) <= MAX_WORDS_OF_DOCUMENTS, f"{sum(words.values()):,} words ({longest}): {hint}"


def test_pre_commit_fetches_nothing(repository: Path) -> None:
    sources = re.findall(r"repo:\s*(\S+)", (repository / ".pre-commit-config.yaml").read_text())
    assert sources and set(sources) == {"local"}
