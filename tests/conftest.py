"""Fixtures of all tests: the root of the checkout, its files and servers; and the same environment for every user."""

import atexit
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.arguments import made_once
from tests.environment import fix_environment, leave_wandb_out_of_timm
from tests.forks import Forks
from tests.hashes import hash_once
from tests.object_storage.fixtures import _proxy, bucket, faults, few_retries, other_machine, s3  # noqa: F401 - for every test
from tests.workers import ForkedContext, fork_from, fsync_at_once

fix_environment()
leave_wandb_out_of_timm()
# A user may keep Python from writing bytecode; the many programs that tests start would compile the packages each time.
sys.dont_write_bytecode = False

# torch writes hundreds of records for each checkpoint, which pytest would format and keep.
logging.disable(logging.DEBUG)

# A worker of pytest-xdist has nothing to tell once its tests are done; to take its modules apart takes seconds.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # the first to be registered, and the last to be called

# Imports and the collection make millions of objects that stay; see `pytest_collection_finish`.
gc.disable()

ROOT = Path(__file__).parent.parent
# Files that take a quarter of a minute or more. They run first, because at the end of the suite the other cores would
# wait for them: a file stays in one process.
LONG = (
    "test_credentials.py",
    "test_signals.py",
    "test_simulation.py",
    "test_stages.py",
    "test_ranks.py",
    "test_tutorials.py",
    "test_weights_anywhere.py",
    "test_cluster.py",
    "test_ray.py",
    "test_timelines.py",
    "test_endpoint.py",
    "test_remote_sources.py",
    "test_killed.py",
    "test_distribution.py",
    "test_export_programs.py",
    "test_frames.py",
    "test_parts.py",
    "test_caption_chunks.py",
    "test_results_kept.py",
    "test_adapted.py",
    "test_embed.py",
    "test_caption_runs.py",
    "test_gpu_dry_run.py",
)
# Folders whose tests do not train; the simulated GPU's do so in a process of their own.
WITHOUT_TRAINING = ("manifests", "prep", "shards", *(() if "SIMULATED_GPUS" in os.environ else ("simulated_gpu",)))


# Folders whose files share what only one process can have, a cluster of Ray, or what takes seconds to make or import.
TOGETHER = (
    "tests/prep/columns",
    "tests/prep/engines",
    "tests/prep/latents",
    "tests/prep/scores",
    "tests/train/inference",
    "tests/train/library",
    "tests/train/search",
    "tests/train/tuning",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives a file to one process, as `--dist loadfile` does, and all files of a folder in `TOGETHER`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            folder = file.rpartition("/")[0]
            return folder if folder in TOGETHER else file

    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here, because pytest asks the conftest.py of tests/gpu too late for options."""
    parser.addoption(
        "--gpu-device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="Device of tests/gpu: auto skips them where there is no GPU, cuda fails there, cpu is a dry run.",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves tests/gpu out without a driver, unless it is asked for: its imports take seconds in each process."""
    if collection_path != ROOT / "tests" / "gpu" or Path("/dev/nvidiactl").exists():
        return None
    is_asked = config.getoption("gpu_device") != "auto" or any("gpu" in word for word in config.args)
    return None if is_asked else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the files of `LONG` to the front, in that order."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes runs cheaper for tests that may train, which is not worth the import of torch to the others.

    Keeps the garbage collector from looking, again and again, at what stays until the end, or for long.
    """
    if any(item.path.relative_to(ROOT / "tests").parts[0] not in WITHOUT_TRAINING for item in session.items):
        from tests.small_tiny import shrink
        from tests.torch_work import omit_torch_work

        shrink()
        omit_torch_work()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Lets modules be freed at exit, which extensions of theirs complain about otherwise.

    It is the first cleanup to be added and the last to run: pytest collects garbage twice before, which takes a second
    each time where it looks at what stays.
    """
    config.add_cleanup(gc.unfreeze)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root folder of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def repository_files() -> list[Path]:
    """Every file that git tracks or would track, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    return sorted(path for path in map(Path, filter(None, listed)) if (ROOT / path).is_file())


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """The server that commands are forked from, one for all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = folder / "forks" if run is None else folder.parent / "forks"
    with closing(Forks(folder, address=f"clipmill-forks-{run or os.getpid()}")) as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def _workers_are_forked(forks: Forks) -> Iterator[None]:
    """Workers of `prep` in this process are forked; those of commands in processes of their own are spawned."""
    fork_from(forks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipmill.prep.engines.processes._CONTEXT", ForkedContext())
        yield


@pytest.fixture(scope="session", autouse=True)
def _arguments_are_made_once() -> Iterator[None]:
    """Reading the words of a command takes longer than a step of training."""
    with made_once():
        yield


@pytest.fixture(scope="session", autouse=True)
def _sources_are_hashed_once() -> Iterator[None]:
    """Each run, and each of its workers, would read and hash all modules of the packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipmill.prep.engines.admission.source_sha256", hash_once)
        patch.setattr("clipmill.prep.core.parts.source_sha256", hash_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _fsync_at_once() -> Iterator[None]:
    """A run of the smallest model would wait for the disk for as long as for everything else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", fsync_at_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_thread_keeps_a_core_busy() -> Iterator[None]:
    """The thread of a server whose socket was closed before it was shut down polls until the process ends."""
    yield
    others = [thread for thread in threading.enumerate() if thread.native_id != threading.get_native_id()]
    assert not [thread for thread in others if _keeps_a_core_busy(thread)]


def _keeps_a_core_busy(thread: threading.Thread) -> bool:
    """Whether a thread has run for a fifth of its life, and for seconds."""
    try:
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return False
    used, began = (number / os.sysconf("SC_CLK_TCK") for number in (int(fields[11]) + int(fields[12]), int(fields[19])))
    return used > max(5.0, 0.2 * (time.clock_gettime(time.CLOCK_BOOTTIME) - began))


@pytest.fixture(scope="session", autouse=True)
def _interruptions_arrive() -> None:
    """A script hands SIGINT on as ignored to what it starts in the background; what tests start must hear it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
