import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.data.http_folder import HttpFolder


@pytest.fixture
def data_server(data_dir: Path, tmp_path: Path, few_retries: None) -> Iterator[HttpFolder]:
    """Server of a copy of the data folder, which a test may damage."""
    shutil.copytree(data_dir, tmp_path / "served/data")
    server = HttpFolder(tmp_path / "served")
    yield server
    server.close()
