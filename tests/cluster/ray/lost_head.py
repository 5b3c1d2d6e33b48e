"""Loss of a cluster's head during a run; the same command continues with a new head.

python -m tests.cluster.ray.lost_head
"""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.cluster.ray.cluster import BIN, made_manifest, started_head
from tests.prep.running import MARK, contents, processes, wait_until

SETTINGS = ("--len", "500ms", "--preset", "veryslow")


def trial(folder: Path) -> None:
    """Run the trial in an empty folder."""
    data = made_manifest(folder)
    shutil.copytree(data, folder / "undisturbed")
    with started_head("--num-cpus", "1") as cluster:
        cluster.run("prep", "chunk", *SETTINGS, "--data", folder / "undisturbed", "--engine", "processes")
        command = [os.fspath(BIN / "prep"), "chunk", *SETTINGS, "--data", os.fspath(data)]
        run = subprocess.Popen([*command, "--address", cluster.address], env=cluster.environment)
        wait_until(lambda: list(data.glob("video/*/commits/*.json")), seconds=300)
        for process in processes(cluster.environment[MARK]):
            if "gcs_server" in process.arguments[0]:
                process.kill()
        killed_s = time.monotonic()
        assert run.wait() == 1
        print(f"exit status 1 after {time.monotonic() - killed_s:.1f} s")
    with started_head("--num-cpus", "1") as cluster:
        cluster.run("prep", "chunk", *SETTINGS, "--data", data, "--address", cluster.address)
    assert contents(data) == contents(folder / "undisturbed")


def main() -> None:
    """Run the trial."""
    with tempfile.TemporaryDirectory() as name:
        trial(Path(name))


if __name__ == "__main__":
    main()
