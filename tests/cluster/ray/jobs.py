"""`prep` as a Ray job: submitted, stopped, submitted again, with a runtime environment, and twice at the same time.

python -m tests.cluster.ray.jobs
"""

import json
import shutil
import tempfile
import time
from pathlib import Path

from ray.util.state import list_tasks

from tests.cluster.ray.cluster import RayCluster, made_manifest, started_head
from tests.conftest import ROOT
from tests.prep.running import contents, wait_until

SETTINGS = ("--len", "500ms", "--preset", "veryslow")


def submit(cluster: RayCluster, *words: object, options: tuple[object, ...] = (), check: bool = True) -> str:
    """Run `ray job submit`; return its output."""
    address = ("--address", cluster.dashboard)
    return cluster.run("ray", "job", "submit", *address, *options, "--", *words, check=check).stdout


def trial(folder: Path) -> None:
    """Run the trial in an empty folder."""
    data = made_manifest(folder)
    shutil.copytree(data, folder / "undisturbed")
    with started_head("--num-cpus", "1") as cluster:
        cluster.start_node("--num-cpus", "1")
        chunk = ("prep", "chunk", *SETTINGS, "--data")
        cluster.run(*chunk, folder / "undisturbed", "--engine", "processes")

        submit(cluster, *chunk, data, options=("--no-wait", "--submission-id", "first"))
        wait_until(lambda: list(data.glob("video/*/commits/*.json")), seconds=300)
        assert "another command is writing to" in submit(cluster, *chunk, data, check=False)
        cluster.run("ray", "job", "stop", "--address", cluster.dashboard, "first")
        assert (
            "finished work is kept" in cluster.run("ray", "job", "logs", "--address", cluster.dashboard, "first").stdout
        )
        time.sleep(1)
        submit(cluster, *chunk, data)
        assert contents(data) == contents(folder / "undisturbed")
        names = {task.name for task in list_tasks(address=cluster.dashboard, limit=1000)}
        assert "chunk 000000" in names, names

        shutil.copytree(ROOT / "clipmill", folder / "code" / "clipmill")
        (folder / "code" / "clipmill" / "prep" / "__init__.py").write_text('"""Another version."""\n')
        environment = {"working_dir": str(folder / "code"), "env_vars": {"CLIPMILL_DATA": str(data)}}
        options = ("--runtime-env-json", json.dumps(environment))
        submit(cluster, "python", "-m", "clipmill.prep.cli", "chunk", "--len", "5s", options=options)


def main() -> None:
    """Run the trial."""
    with tempfile.TemporaryDirectory() as name:
        trial(Path(name))


if __name__ == "__main__":
    main()
