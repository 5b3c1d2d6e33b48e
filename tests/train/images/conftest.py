import pytest

from tests.train.images.tars import write_tars


@pytest.fixture(scope="session")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pattern of three tars with six images each."""
    return write_tars(tmp_path_factory.mktemp("images") / "tars")
