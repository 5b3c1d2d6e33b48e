from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.data import write_latents_folder
from tests.simulated_gpu.device import simulation
from tests.simulated_gpu.inside.runs import train_all
from tests.simulated_gpu.journal import Journal
from tests.simulated_gpu.runtime import is_simulated
from tests.train.classify.moving import write_moving
from tests.train.conftest import _arguments_are_made_once  # noqa: F401 - for every test


@pytest.fixture(scope="session", autouse=True)
def _is_simulated() -> None:
    torch.set_num_threads(1)
    assert is_simulated(), "this process has no simulated GPU"


@pytest.fixture
def journal() -> Iterator[Journal]:
    """What happens on the GPU during a test."""
    with simulation() as journal:
        yield journal


@pytest.fixture(scope="session")
def clips_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of bars that move, with captions and labels: 13 captions in split train, 4 in val."""
    folder = tmp_path_factory.mktemp("clips")
    write_moving(folder, num_videos=4)
    return folder


@pytest.fixture(scope="session")
def latents_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of latents and text, without videos."""
    return write_latents_folder(tmp_path_factory.mktemp("latents"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, clips_dir: Path) -> dict[str, Path]:
    """A run of every task, trained on the CPU."""
    return train_all(tmp_path_factory.mktemp("trained"), shards=clips_dir)
