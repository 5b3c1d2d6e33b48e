"""run.sh: what is wrong with the kit or the request is said in two lines; a run that is stopped leaves nothing."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import Stopped
from scripts.gpu_kit.build import copy_checkout
from scripts.gpu_kit.run import run_kit
from scripts.gpu_kit.signals import stopping


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit that has nothing but its programs."""
    folder = tmp_path_factory.mktemp("built") / "kit"
    copy_checkout(folder)
    (folder / "data").mkdir()
    return folder


def run(kit: Path, *words: str | Path, folder: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [kit / "run.sh", *words], env={**os.environ, "PYTHON": python}, cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize("answer", ["exit 1", "exit 0", "echo Python 3.9"])
def test_what_is_no_supported_python_is_refused(kit: Path, tmp_path: Path, answer: str) -> None:
    old = tmp_path / "python-that-is-too-old"
    old.write_text(f"#!/bin/sh\n{answer}\n")
    old.chmod(0o755)
    done = run(kit, tmp_path / "out", folder=tmp_path, python=str(old))
    assert done.returncode == 2
    assert "does not run as Python 3.11, 3.12 or 3.13" in done.stderr
    assert ("it is Python 3.9" if "3.9" in answer else "it is not a working Python") in done.stderr


def test_nothing_is_imported_from_the_current_folder(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenize.py", "typing.py", "scripts/gpu_kit/run.py", "scripts/gpu_kit/start.py", "torch.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit(f'{__file__} was imported')\n")
    monkeypatch.setenv("PYTHONPATH", "::")
    done = run(kit, "", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == ("run.sh: error: argument OUT: empty; give a folder for the results")


@pytest.mark.parametrize("missing", ["data", "checkout"])
def test_an_incomplete_kit_is_named(kit: Path, tmp_path: Path, missing: str) -> None:
    part = tmp_path / "kit"
    part.mkdir()
    for name in {"data", "checkout", "run.sh"} - {missing}:
        (part / name).symlink_to(kit / name)
    done = run(part, tmp_path / "out", folder=tmp_path)
    assert done.returncode == 2
    assert f"error: this kit is incomplete: there is no {part / missing}\n" in done.stderr
    assert "hint: copy the whole kit" in done.stderr


def test_results_need_a_folder(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, problem in (
        (tmp_path / "file", "is not a folder"),
        (Path("/proc/x"), "results cannot be written to /proc/x"),
    ):
        done = run(kit, out, folder=tmp_path)
        assert done.returncode == 2
        assert problem in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_run_that_is_stopped_leaves_no_work_folder(
    kit: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(scratch)}
    running = subprocess.Popen(
        [kit / "run.sh", tmp_path / "out", "--dry-run"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    ends_s = time.monotonic() + 60
    while not any(scratch.iterdir()) and time.monotonic() < ends_s:
        time.sleep(0.02)
    running.send_signal(number)
    _, said = running.communicate()
    assert running.returncode == status, said
    assert len(said.splitlines()) == 1 and "was terminated" in said
    assert not any(scratch.iterdir())


def test_a_stop_while_the_work_folder_is_made_leaves_none(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def make_and_be_stopped(path: Path, *arguments: Any, **settings: Any) -> None:
        mkdir(path, *arguments, **settings)
        if path.parent == scratch:
            os.kill(os.getpid(), signal.SIGTERM)

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(Path, "mkdir", make_and_be_stopped)
    with pytest.raises(Stopped, match="was terminated"), stopping():
        run_kit(kit, out=tmp_path / "out", parts=[], minutes=None, is_dry_run=True)
    assert not any(scratch.iterdir())
