from pathlib import Path

import pytest

from tests.train.mixture.folders import write_folder


@pytest.fixture(scope="session")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three videos to train on and two held out, of 64 pixels and 10 frames a second."""
    splits = {"a": "train", "b": "train", "c": "train", "d": "val", "e": "val"}
    return write_folder(tmp_path_factory.mktemp("mixture") / "near", splits, fps=10, size_px=64, moves=("up", "down"))


@pytest.fixture(scope="session")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two videos to train on and two held out, of 48 pixels and 5 frames a second; one has the name of one of `near`."""
    splits = {"a": "train", "q": "train", "r": "val", "s": "val"}
    return write_folder(tmp_path_factory.mktemp("mixture") / "far", splits, fps=5, size_px=48, moves=("up", "left"))
