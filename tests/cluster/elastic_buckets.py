"""Cases of tests.cluster.elastic with the run in a bucket: the nodes share no folder, and have separate scratch space.

The server runs on the node that is not lost. As a program, this module copies a run from a URL to a folder; it must run
on the network of the server: python -m tests.cluster.elastic_buckets URL FOLDER
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipmill.manifests.storage.objects import open_objects
from clipmill.train.run.folder import read_lines
from tests.cluster.elastic_nodes import Launch, address_of, kill_node, launch, lose_node, name_of, wait_until
from tests.cluster.elastic_runs import DUAL, Case, end_well
from tests.object_storage.server import S3Server

_AT_STEP = 100
_ADDRESS = "s3://elastic/run"


@dataclass(frozen=True)
class BucketCase(Case):
    """Case with the run in a bucket, whose server is on one of the nodes.

    Attributes:
        server: URL of the server.
        node: Number of the server's node.
    """

    server: str = ""
    node: int = 0

    def launch(self, node: int, *added: object, command: Sequence[str] = DUAL, **how: Any) -> Launch:
        """Start `command` on a node, with a separate $TMPDIR."""
        scratch = self.folder / f"scratch{node}"
        scratch.mkdir(exist_ok=True)
        words = (*command, "--shards", self.root / "columns", "--out", _ADDRESS, *added)
        environment = {**self.environment(), "TMPDIR": str(scratch)}
        return launch(node, words, log=self.folder / f"node{node}.log", environment=environment, **how)

    def environment(self) -> dict[str, str]:
        return S3Server(0).environment(endpoint=self.server)

    def wait_for_steps(self, count: int) -> None:
        def is_there() -> bool:
            local = self.folder.glob("scratch*/data-clipmill-*/*/*/metrics.jsonl")
            return any(len(read_lines(path)) >= count for path in local)

        wait_until(is_there, what=f"{count} steps of {_ADDRESS}")

    def fetch(self) -> None:
        """Copy the run to the folder of the case."""
        self.inside(sys.executable, "-m", __name__, _ADDRESS, str(self.out))

    def inside(self, *words: str) -> None:
        """Run a program on the node of the server."""
        command = ["ip", "netns", "exec", name_of(self.node), *words]
        subprocess.run(command, check=True, env={**os.environ, **self.environment()})


@contextmanager
def in_bucket(case: Case, *, node: int) -> Iterator[BucketCase]:
    """Start a server on a node, with an empty bucket."""
    command = ["ip", "netns", "exec", name_of(node), sys.executable, "-m", "tests.object_storage.server"]
    environment = {**os.environ, "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, address_of(node)], env=environment, **pipes) as server:
        assert server.stdin is not None and server.stdout is not None
        url = f"http://{address_of(node)}:{server.stdout.readline().strip()}"
        of_bucket = BucketCase(case.folder, case.root, url, node)
        make = f"import urllib.request as r; r.urlopen(r.Request('{url}/elastic', method='PUT', data=b''))"
        of_bucket.inside(sys.executable, "-c", make)
        yield of_bucket
        server.stdin.close()


def bucket_undisturbed(case: Case) -> str:
    """Train with one process per node, and the run in a bucket."""
    with in_bucket(case, node=0) as of_bucket:
        end_well(*of_bucket.launch_both())
        of_bucket.fetch()
    return case.require_same()


def bucket_node_replaced(case: Case) -> str:
    """Kill node 1, and replace it with an empty node."""
    with in_bucket(case, node=0) as of_bucket:
        first, second = of_bucket.launch_both()
        of_bucket.wait_for_steps(_AT_STEP)
        kill_node(1)
        second.end()
        noticed_s = of_bucket.wait_for_output(0, "failed: ")
        (case.folder / "scratch1").rename(case.folder / "scratch-of-the-lost-node")
        second = of_bucket.launch(1)
        restarted_s = of_bucket.wait_for_restart()
        end_well(first, second)
        of_bucket.fetch()
    return (
        f"{case.require_same()}; noticed after {noticed_s:.0f} s, restarted {restarted_s:.0f} s after the replacement"
    )


def bucket_lock_moves(case: Case) -> str:
    """With --nnodes 1:2, cut the power of rank 0's node, which holds the run's lock; the other node continues alone."""
    with in_bucket(case, node=1) as of_bucket:
        first, second = of_bucket.launch_both(nodes="1:2", host=1)
        of_bucket.wait_for_steps(_AT_STEP)
        assert "attention: " in first.output, "rank 0 must be on node 0"
        lose_node(0)
        noticed_s = of_bucket.wait_for_output(1, "failed: ")
        restarted_s = noticed_s + of_bucket.wait_for_restart(1, restarts=0)
        end_well(second)
        of_bucket.fetch()
    return f"{case.require_same_losses()}; noticed after {noticed_s:.0f} s, restarted after {restarted_s:.0f} s"


CASES = (bucket_undisturbed, bucket_node_replaced, bucket_lock_moves)


if __name__ == "__main__":
    objects, target = open_objects(sys.argv[1]), Path(sys.argv[2])
    for info in list(objects.list()):
        (target / info.key).parent.mkdir(parents=True, exist_ok=True)
        objects.fetch(info.key, target / info.key)
