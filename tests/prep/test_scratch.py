import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from prep.scratch import scratch_folder
from tests.conftest import ROOT

HOLD = "from prep.scratch import scratch_folder\nwith scratch_folder() as f: print(f, flush=True); input()"


def test_scratch_of_a_killed_worker_goes_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = tmp_path / "clipmill-notes"
    foreign.write_text("a file of somebody's")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = [Path(worker.stdout.readline().strip()) for worker in workers if worker.stdout]
    killed, living = workers
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    with scratch_folder() as own:
        (own / "bytes").write_bytes(b"1")
        assert [folder.exists() for folder in folders] == [False, True]
        assert folders[1].parent == own.parent == tmp_path
    living.communicate("\n")
    assert list(tmp_path.iterdir()) == [foreign]
