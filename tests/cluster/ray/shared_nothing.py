"""Two Ray nodes that share only a bucket: `prep chunk` and `prep scores` with `--data s3://`.

    python -m tests.cluster.ray.shared_nothing [FOLDER]

The bucket is on a real S3 server (moto) on this machine. The second node has a separate mount namespace in which the
scratch folder is empty (this requires root). The shards must equal the shards of a run on one machine, both nodes must
have made some of them, and a run after the loss of the second node must have nothing to do. The trial takes a few
minutes. FOLDER must have a short path (default: a new folder in /tmp).
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from ray.util.state import list_tasks

from clipmill.manifests.storage.objects import open_objects
from tests.cluster.ray.cluster import BIN, started_head
from tests.object_storage.folders import contents_of
from tests.object_storage.server import s3_server
from tests.prep.running import contents

COMMANDS = (("chunk", "--len", "1s", "--preset", "veryslow"), ("scores",))


def trial(folder: Path) -> None:
    """Run the trial in an empty folder."""
    videos, scratch, local = folder / "videos", folder / "scratch", folder / "local"
    scratch.mkdir(parents=True)
    with s3_server() as server:
        os.environ.update(server.environment(), TMPDIR=os.fspath(scratch), CLIPMILL_DATA="")
        data = f"{server.make_bucket('trial')}/data"
        with started_head("--num-cpus", "1") as cluster:
            mount = f"mount -t tmpfs tmpfs {shlex.quote(os.fspath(scratch))} && exec "
            node = shlex.join([os.fspath(BIN / "ray"), "start", "--address", cluster.address, "--num-cpus", "1"])
            subprocess.run(
                ["unshare", "--mount", "sh", "-c", mount + node],
                env=cluster.environment,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            made = ("manifest", "synthetic", "--videos", "4", "--minutes", "0.5", "--out", videos)
            cluster.run("prep", *made, "--data", data)
            cluster.run("prep", *made, "--data", local)
            for command in COMMANDS:
                cluster.run("prep", *command, "--data", data, "--address", cluster.address)
                cluster.run("prep", *command, "--data", local, "--engine", "processes", "--workers", "1")
            names = Counter[tuple[str, str]]()
            for task in list_tasks(address=cluster.dashboard, limit=1000):
                if task.name.split()[0] in ("chunk", "scores") and task.state == "FINISHED":
                    names[task.name.split()[0], (task.node_id or "")[:8]] += 1
            print("shards by column and node:", dict(names))
            assert len(names) == 2 * len(COMMANDS), names
            assert contents_of(data) == contents(local)
            cluster.run("prep", "verify", "--data", data)
            ran = cluster.run("prep", *COMMANDS[0], "--data", data, "--address", cluster.address)
            assert "0 shards" in ran.stdout or "nothing" in ran.stdout, ran.stdout
            print(sum(1 for _ in open_objects(data).list()), "objects, the same as on one machine")


def main() -> None:
    """Run the trial."""
    if len(sys.argv) > 1:
        trial(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        trial(Path(name))


if __name__ == "__main__":
    main()
