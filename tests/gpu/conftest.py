"""What needs a GPU, on the one that is there: `pytest tests/gpu -m gpu --gpu-device cuda`.

With `--gpu-device cpu` the same tests run at tiny sizes on a CPU, so that they do not rot; what needs CUDA by nature is
skipped there by name. With `--gpu-until TIME`, tests that have not begun by then are skipped, and so is the one that is
interrupted (SIGINT) after that. A plain `pytest` skips everything here where torch finds no CUDA device.
"""

import signal
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.gpu.data import write_latents_folder
from tests.gpu.runs import Runs
from tests.train.classify.moving import write_moving

# Minutes of a GPU may be over before the last test: those that compile take longest and come last.
_LAST = "test_compiled.py"
_NO_TIME = "no time was left"  # scripts/gpu_kit/parts.py looks for it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == _LAST)


@pytest.hookimpl(wrapper=True, trylast=True)  # within those of pytest, which tear down what they have set up
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    if _is_over(item.config):
        pytest.skip(_NO_TIME)
    with _interruption_skips(item.config):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _interruption_skips(item.config):
        return (yield)


def _is_over(config: pytest.Config) -> bool:
    ends_s: float | None = config.getoption("--gpu-until")
    return ends_s is not None and time.time() > ends_s


@contextmanager
def _interruption_skips(config: pytest.Config) -> Iterator[None]:
    """Makes SIGINT end the test alone where the time is over, so that the others and their results are kept."""

    def interrupt(number: int, frame: object) -> None:
        if _is_over(config):
            pytest.skip(f"{_NO_TIME} to finish it")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    choice = request.config.getoption("--gpu-device")
    if choice == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if choice == "cuda":
            pytest.fail("torch finds no CUDA device (asked for by --gpu-device cuda)", pytrace=False)
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
