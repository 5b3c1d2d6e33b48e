"""Which packages the kit brings."""

from pathlib import Path

import pytest
from packaging.tags import compatible_tags, cpython_tags

from manifests.errors import UserError
from scripts.gpu_kit.machine import wheels_for
from scripts.gpu_kit.requirements import needs_of
from scripts.gpu_kit.wheels import EXCLUDED, PRESENT, TARGET, choose, read_lock, with_their_needs

TAGS_OF_312 = [
    *cpython_tags((3, 12), platforms=["manylinux_2_28_x86_64", "manylinux_2_17_x86_64"]),
    *compatible_tags((3, 12), interpreter="cp312", platforms=["manylinux_2_28_x86_64"]),
]


def chosen(repository: Path) -> set[str]:
    return {pin.name for pin in choose(repository / "pyproject.toml", repository / "requirements.lock")}


def test_the_kit_brings_what_a_machine_with_cuda_usually_lacks(repository: Path) -> None:
    assert {"av", "webdataset", "cyclopts", "xformers", "open-clip-torch", "diffusers", "packaging"} <= chosen(
        repository
    )


def test_the_kit_brings_nothing_that_has_to_fit_the_driver(repository: Path) -> None:
    names = chosen(repository)
    assert not names & set(PRESENT)
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]


def test_what_a_brought_package_needs_is_brought_or_there(repository: Path) -> None:
    names = chosen(repository)
    assert with_their_needs(names) <= names | with_their_needs(PRESENT) | EXCLUDED
    for need in needs_of(repository / "pyproject.toml"):
        assert need.name in names | with_their_needs(PRESENT), need.name


def test_brought_packages_have_the_versions_and_hashes_of_the_lock(repository: Path) -> None:
    lock = (repository / "requirements.lock").read_text()
    for pin in choose(repository / "pyproject.toml", repository / "requirements.lock"):
        assert f"\n{pin.name}=={pin.version}" in lock
        assert pin.hashes and all(f"--hash={one}" in lock for one in pin.hashes)


def test_a_lock_is_read_for_the_target(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    one, other = (f"sha256:{digit * 64}" for digit in "ab")
    lock.write_text(
        "# made by hand\n"
        f"numpy==2.4.6 ; python_full_version < '3.12' \\\n    --hash={one}\n"
        f"numpy==2.5.5 ; python_full_version >= '3.12' \\\n    --hash={one} \\\n    --hash={other}\n"
        f"pywin32==311 ; sys_platform == 'win32' \\\n    --hash={one}\n"
    )
    pins = read_lock(lock)
    assert {name: pin.version for name, pin in pins.items()} == {"numpy": "2.5.5"}
    assert pins["numpy"].hashes == (one, other)
    older = read_lock(lock, target={**TARGET, "python_version": "3.11", "python_full_version": "3.11.0"})
    assert older["numpy"].version == "2.4.6"


def test_a_lock_that_lacks_a_package_is_refused(repository: Path, tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    text = (repository / "requirements.lock").read_text()
    lock.write_text(text.replace("\nbraceexpand==", "\nbraces=="))
    with pytest.raises(UserError, match="has no braceexpand"):
        choose(repository / "pyproject.toml", lock)


def test_only_wheels_that_this_python_can_use_are_taken() -> None:
    names = [
        "av-18.1.0-cp311-abi3-manylinux_2_28_x86_64.whl",
        "braceexpand-0.1.7-py2.py3-none-any.whl",
        "charset_normalizer-3.5.2-cp313-cp313-manylinux_2_17_x86_64.whl",
        "regex-2026.11.15-cp312-cp312-win_amd64.whl",
        "wcwidth-0.9.4-cp312-cp312-manylinux_2_35_x86_64.whl",
        "xformers-0.0.35-py39-none-manylinux_2_28_x86_64.whl",
    ]
    assert wheels_for(TAGS_OF_312, map(Path, names)).keys() == {"av", "braceexpand", "xformers"}
