import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.data.http_folder import HttpFolder
from train.data import remote as remote_files


@pytest.fixture
def served(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpFolder]:
    """A copy of the data folder that a test may damage."""
    monkeypatch.setattr(remote_files, "_WAITS_S", (0.01, 0.01, 0.01))
    shutil.copytree(data_dir, tmp_path / "served/data")
    server = HttpFolder(tmp_path / "served")
    yield server
    server.close()
