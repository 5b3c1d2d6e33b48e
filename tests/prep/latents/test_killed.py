"""SIGKILL while latents are made: nothing is half there, and the next run ends with the bytes of an undisturbed one."""

import secrets
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.prep.core.run import Summary
from clipmill.shards.dataset import current_variant
from tests.prep.latents.conftest import make
from tests.prep.running import MARK, Process, Ran, chunk, contents, prep_here, processes, start, wait_until

# Without a GPU to look for, the command itself does without torch.
SLOW = ("--vae", "tiny", "--size", 256, "--fps", 8, "--workers", 1, "--num-gpus", 0)


def make_here(data: Path) -> Summary:
    """What `SLOW` says, in this process, which has imported what a worker needs."""
    return make(data, size=256, fps="8", num_threads=1)


def is_worker(process: Process) -> bool:
    """Whether it may still write a shard."""
    return "multiprocessing.spawn" in " ".join(process.arguments)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of chunks."""
    root = tmp_path_factory.mktemp("killed")
    prep_here("manifest", "synthetic", "--videos", 2, "--minutes", 0.1, "--data", root / "begun")
    chunk(root / "begun", "--len", "500ms", "--preset", "ultrafast", "--short-side", 64)
    return root / "begun"


@pytest.fixture(scope="module")
def undisturbed(begun: Path) -> dict[str, str]:
    """What the folder of latents holds when nothing disturbs the run."""
    data = begun.with_name("undisturbed")
    shutil.copytree(begun, data)
    make_here(data)
    return contents(data / "latents")


def test_a_killed_run_is_finished_by_the_next(
    prep: Callable[..., Ran], begun: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    data, mark = tmp_path / "data", secrets.token_hex(8)
    shutil.copytree(begun, data)
    run = start("latents", *SLOW, "--data", data, "--engine", "processes", **{MARK: mark})
    wait_until(lambda: list(data.glob("latents/*/commits/*.json")) and list(data.glob("latents/*/.tmp-*.tar")))
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    wait_until(lambda: not any(is_worker(process) for process in processes(mark)))
    assert len(list(data.glob("latents/*/commits/*.json"))) == 1
    assert current_variant(data, "latents") is not None  # the first variant can be read while it grows
    again = make_here(data)
    assert (again.num_shards, again.num_shards_made, again.failures) == (2, 1, [])
    assert contents(data / "latents") == undisturbed
    prep("verify", "--deep", "--data", data)
