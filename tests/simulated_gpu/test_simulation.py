"""Every task on a machine that says it has GPUs (README.md); each file of `inside` in a process of its own."""

from pathlib import Path

import pytest

from tests.simulated_gpu.runtime import run_simulated

INSIDE = Path(__file__).parent / "inside"
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", sorted(path.name for path in INSIDE.glob("test_*.py")))
def test_the_simulated_gpu_is_used_as_a_gpu_must_be(name: str, tmp_path: Path) -> None:
    words = ("-m", "pytest", str(INSIDE / name), "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = run_simulated(words, folder=tmp_path)
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.stdout[-8000:]}{done.stderr[-3000:]}"
