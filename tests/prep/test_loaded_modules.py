"""Tests that a process of `prep` loads only the modules that its work needs. The limits only go down."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.forked import forget, run_forked
from tests.imports import count_statements

ROOT = Path(__file__).parents[2]
MAX_MODULES_OF_HELP = 19
MAX_MODULES_OF_A_DRIVER, MAX_STATEMENTS_OF_A_DRIVER = 102, 8_986
MAX_MODULES_OF_A_WORKER, MAX_STATEMENTS_OF_A_WORKER = 41, 3_042
LIST_VARIABLE = "CLIPMILL_TEST_LOADED_MODULES"  # file to which a worker writes the modules that it has loaded


def loaded_modules() -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] == "clipmill")


def call_prep(*arguments: str) -> None:
    sys.argv = ["prep", *arguments]
    with suppress(SystemExit):
        importlib.import_module("clipmill.prep.cli").main()


def statements_of(modules: Sequence[str]) -> int:
    specs = (importlib.util.find_spec(name) for name in modules)
    return count_statements(Path(str(spec.origin)) for spec in specs if spec and spec.has_location)


def make_shard_and_list_modules(task: Any) -> Any:
    result = importlib.import_module("clipmill.prep.video.worker").make_shard(task)
    Path(os.environ[LIST_VARIABLE]).write_text("\n".join(loaded_modules()))
    return result


def run_driver(data: str) -> None:
    worker: Any = importlib.import_module("clipmill.prep.video.worker")
    worker.make_shard = make_shard_and_list_modules
    call_prep("chunk", "--data", data, "--len", "1s", "--engine", "processes", "--workers", "1")
    print(*loaded_modules(), sep="\n")


@pytest.fixture(scope="module")
def modules_of_a_run(
    tmp_path_factory: pytest.TempPathFactory, write_video: Callable[..., Path]
) -> tuple[list[str], list[str]]:
    """Return the modules that `prep chunk` loads to encode a video: in the driver, and in the worker."""
    folder = tmp_path_factory.mktemp("loaded")
    (folder / "videos").mkdir()
    write_video(folder / "videos" / "v.mp4", seconds=1)
    data, listed = folder / "data", folder / "worker.txt"
    reading = ("manifest", "folder", str(folder / "videos"), "--data", str(data))
    subprocess.run([sys.executable, "-m", "clipmill.prep.cli", *reading], cwd=ROOT, check=True, capture_output=True)
    code = f"from {__name__} import run_driver; run_driver({str(data)!r})"
    env = {**os.environ, LIST_VARIABLE: str(listed)}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "1 chunk" in ran.stdout, ran.stderr
    driver = [line for line in ran.stdout.splitlines() if line.split(".")[0] == "clipmill"]
    return driver, listed.read_text().splitlines()


def test_a_driver_loads_what_it_uses(modules_of_a_run: tuple[list[str], list[str]]) -> None:
    driver, _ = modules_of_a_run
    assert 60 < len(driver) <= MAX_MODULES_OF_A_DRIVER, driver
    assert statements_of(driver) <= MAX_STATEMENTS_OF_A_DRIVER
    packages = {".".join(name.split(".")[:3]) for name in driver}
    others = {f"clipmill.prep.{name}" for name in ("captions", "exports", "latents", "scores", "text", "upkeep")}
    assert not packages & others
    assert not [name for name in driver if name.startswith("clipmill.prep.engines.ray")]


def test_a_worker_loads_its_task_and_neither_plan_nor_driver(modules_of_a_run: tuple[list[str], list[str]]) -> None:
    _, worker = modules_of_a_run
    assert 20 < len(worker) <= MAX_MODULES_OF_A_WORKER, worker
    assert statements_of(worker) <= MAX_STATEMENTS_OF_A_WORKER
    assert not {"clipmill.prep.cli", "clipmill.prep.core.run", "clipmill.prep.core.plan"} & {*worker}


def test_help_loads_few_modules() -> None:
    def run() -> None:
        forget("clipmill")
        call_prep("--help")
        print(*loaded_modules(), sep="\n", file=sys.stderr)

    status, output = run_forked(run)
    assert status == 0, output
    assert 10 < len(output.splitlines()) <= MAX_MODULES_OF_HELP, output
