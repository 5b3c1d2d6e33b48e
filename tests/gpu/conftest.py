"""What needs a GPU, on the one that is there: `pytest tests/gpu -m gpu --gpu-device cuda`.

With `--gpu-device cpu` the same tests run at tiny sizes on a CPU, so that they do not rot; what needs CUDA by nature is
skipped there by name. A plain `pytest` skips everything here where torch finds no CUDA device.
"""

from pathlib import Path

import pytest
import torch

from tests.gpu.data import write_latents_folder
from tests.gpu.runs import Runs
from tests.train.classify.moving import write_moving

# Minutes of a GPU may be over before the last test: those that compile take longest and come last.
_LAST = "test_compiled.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == _LAST)


@pytest.fixture(scope="session", autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    choice = request.config.getoption("--gpu-device")
    if choice == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if choice == "cuda":
            pytest.fail("torch finds no CUDA device (requested by --gpu-device cuda)", pytrace=False)
        pytest.skip("torch finds no CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def is_dry_run(device: torch.device) -> bool:
    """Whether there is no GPU: everything tiny, and compared with itself."""
    return device.type == "cpu"


@pytest.fixture(scope="session")
def cuda(device: torch.device) -> torch.device:
    """The device under test, where it is a GPU."""
    if device.type != "cuda":
        pytest.skip("needs CUDA by nature: not in the dry run")
    return device


@pytest.fixture(scope="session")
def clips_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of bars that move, with captions and labels: 37 captions in split train, 12 in val."""
    folder = tmp_path_factory.mktemp("clips")
    write_moving(folder)
    return folder


@pytest.fixture(scope="session")
def latents_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of latents and text, without videos."""
    return write_latents_folder(tmp_path_factory.mktemp("latents"))


@pytest.fixture(scope="session")
def runs(is_dry_run: bool, clips_dir: Path, latents_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of all tasks: thirty steps, or a few in the dry run."""
    return Runs(
        folder=tmp_path_factory.mktemp("runs"),
        clips_dir=clips_dir,
        latents_dir=latents_dir,
        num_steps=4 if is_dry_run else 30,
    )
