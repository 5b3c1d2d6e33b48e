from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.mixture.folders import FAR, NEAR, write_folder


@pytest.fixture(scope="session")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos for training and two held out, with 64 px and 10 frames per second."""
    return write_folder(tmp_path_factory.mktemp("mixture") / "near", NEAR)


@pytest.fixture(scope="session")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two videos for training and two held out, with 48 px and 5 frames per second.

    One video has the name of a video of `near`.
    """
    return write_folder(tmp_path_factory.mktemp("mixture") / "far", FAR)


@pytest.fixture(scope="session")
def merged_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the videos of `near` and `far`; the videos of `far` have different names."""
    others = [replace(video, name=f"far-{video.name}") for video in FAR]
    return write_folder(tmp_path_factory.mktemp("mixture") / "merged", [*NEAR, *others])
