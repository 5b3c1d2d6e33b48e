"""All parts of the kit at tiny sizes on a CPU, as `run.sh` runs them on a machine with a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_kit.build import copy_checkout
from scripts.gpu_kit.data import DataSize, make_data
from scripts.gpu_kit.parts import PARTS
from tests.forks import Forks
from tests.train.tiny_data import encode_chunk

PACKAGES = ("benchmarks", "manifests", "prep", "shards", "train")
TINY = DataSize(num_made=5, made_s=3, num_pieces=1, piece_s=3)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit without wheels, because this environment has what they hold; and with empty data."""
    copy_checkout(tmp_path / "kit")
    (tmp_path / "kit/data").mkdir()
    return tmp_path / "kit"


def run(kit: Path, out: Path, *words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python}
    return subprocess.run([kit / "run.sh", out, *words], env=environment, capture_output=True, text=True)


@pytest.mark.timeout(3600)
def test_all_parts_pass_in_a_dry_run(kit: Path, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    natural = tmp_path / "natural.mp4"
    natural.write_bytes(encode_chunk(0, 40))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(forks.python()))
        make_data(kit / "data", natural=[natural], size=TINY, scratch=tmp_path / "scratch")
    (tmp_path / "imported").mkdir()
    for package in PACKAGES:
        with (kit / "checkout" / package / "__init__.py").open("a") as file:
            file.write(f"\nopen({str(tmp_path / 'imported' / package)!r}, 'w').close()\n")
    before = sorted(kit.rglob("*"))
    # They take a minute; on a machine that does much else, any limit of their own would be a matter of luck.
    python = forks.python(is_of_other_checkout=True)
    done = run(kit, tmp_path / "out", "--dry-run", "--minutes", "60", python=str(python))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs(tmp_path / 'out')}"
    assert "all parts passed" in done.stdout.splitlines()[-1]
    for part in PARTS[1:]:
        assert json.loads((tmp_path / "out" / part.result).read_text())["is_dry_run"]
    assert {path.name for path in (tmp_path / "imported").iterdir()} == set(PACKAGES), "not the kit's own packages"
    assert (tmp_path / "out/dry-run.md").is_file()
    assert all(path.is_file() for path in (tmp_path / "out").iterdir())
    assert sorted(kit.rglob("*")) == before


def logs(out: Path) -> str:
    return "".join(f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(out.glob("*.log")))


def test_without_a_gpu_nothing_runs_and_the_reason_is_given(kit: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(kit, tmp_path / "out", "--part", "B")
    assert done.returncode == 2
    assert "finds no GPU" in done.stderr
    assert "--dry-run" in done.stderr
    assert not (tmp_path / "out/speed.json").exists()
