"""Tests of folders that must not contain data."""

from pathlib import Path

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.store import check_data_dir


def test_the_source_tree_and_its_packages_are_refused(repository: Path) -> None:
    for folder in (
        repository,
        repository / "manifests",
        repository / "shards" / "data",
        repository / "train" / "models",
    ):
        with pytest.raises(UserError, match="source code of clipmill"):
            check_data_dir(folder)


def test_a_data_folder_in_the_source_tree_but_in_no_package_will_do(repository: Path) -> None:
    check_data_dir(repository / "data")


def test_the_folder_of_the_videos_is_refused_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "videos")
    with pytest.raises(UserError, match="folder of the videos"):
        check_data_dir(tmp_path / "link", videos=tmp_path / "videos")
    check_data_dir(tmp_path / "videos" / "data", videos=tmp_path / "videos")


def test_a_file_is_no_data_folder(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    (tmp_path / "loop").symlink_to("loop")
    for path, what in (("data", "is a file"), ("loop", "form a loop"), ("loop/data", "form a loop")):
        with pytest.raises(UserError, match=what):
            check_data_dir(tmp_path / path)
