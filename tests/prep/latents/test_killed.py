"""SIGKILL while latents are made: nothing is half there, and the next run ends with the bytes of an undisturbed one."""

import shutil
import signal
from pathlib import Path

import pytest

from shards.dataset import current_variant
from tests.prep.running import ENGINES, chunk, contents, prep, start, wait_until

SLOW = ("--vae", "tiny", "--size", 256, "--fps", 8)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of chunks."""
    root = tmp_path_factory.mktemp("killed")
    prep("manifest", "synthetic", "--videos", 2, "--minutes", 0.15, "--data", root / "begun")
    chunk(root / "begun", "--len", "500ms", "--preset", "ultrafast", "--short-side", 64)
    return root / "begun"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_is_finished_by_the_next(begun: Path, tmp_path: Path, engine: str) -> None:
    data, undisturbed = tmp_path / "data", begun.with_name("undisturbed")
    if not undisturbed.exists():
        shutil.copytree(begun, undisturbed)
        prep("latents", *SLOW, "--data", undisturbed, "--engine", "processes")
    shutil.copytree(begun, data)
    flags = ("latents", *SLOW, "--data", data, "--engine", engine, "--workers", 1, "--json")
    run = start(*flags)
    wait_until(lambda: list(data.glob("latents/*/commits/*.json")) and list(data.glob("latents/*/.tmp-*.tar")))
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    assert len(list(data.glob("latents/*/commits/*.json"))) == 1
    assert current_variant(data, "latents") is not None  # the first variant can be read while it grows
    again = prep(*flags).summary
    assert (again["num_shards"], again["num_shards_made"], again["failures"]) == (2, 1, {})
    assert contents(data / "latents") == contents(undisturbed / "latents")
    prep("verify", "--deep", "--data", data)
