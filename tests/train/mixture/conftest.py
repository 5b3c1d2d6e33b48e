from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.mixture.folders import FAR, NEAR, write_folder


@pytest.fixture(scope="session")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos to train on and two held out, of 64 pixels and 10 frames a second."""
    return write_folder(tmp_path_factory.mktemp("mixture") / "near", NEAR)


@pytest.fixture(scope="session")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two videos to train on and two held out, of 48 pixels and 5 frames a second; one is named as one of `near`."""
    return write_folder(tmp_path_factory.mktemp("mixture") / "far", FAR)


@pytest.fixture(scope="session")
def merged_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The videos of both in one folder, those of `far` under other names."""
    others = [replace(video, name=f"far-{video.name}") for video in FAR]
    return write_folder(tmp_path_factory.mktemp("mixture") / "merged", [*NEAR, *others])
