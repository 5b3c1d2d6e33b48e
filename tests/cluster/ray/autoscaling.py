"""GPU nodes that an autoscaler starts for `prep`, and that the head does not have.

    python -m tests.cluster.ray.autoscaling

The nodes are processes of Ray's fake multi-node provider, which pretend to have a GPU each; so the tasks tell where
they run instead of using one. It takes about a minute. All nodes have the address of the head, by which Ray 2.60 counts
what they offer and take: its autoscaler starts one of them, and cannot tell that a second is wanted.
"""

import os
import time
from collections.abc import Iterator

from clipmill.prep.engines import Outcome
from clipmill.prep.engines.execution import Execution, Need
from clipmill.prep.engines.ray import isolated_ray_engine
from tests.cluster.ray.cluster import started_head, where

GPU_NODES = {"gpu": {"resources": {"CPU": 4, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}}


def outcomes(address: str) -> Iterator[tuple[int, str | None, str]]:
    """Run tasks that take one GPU each."""
    engine = isolated_ray_engine(
        num_workers=None, address=address, need=Need(0, 1, 0), execution=Execution(wait_for_nodes=300)
    )
    for outcome in engine.run(where, range(40)):
        if isinstance(outcome, Outcome):
            assert outcome.result is not None, outcome
            yield outcome.result


def main() -> None:
    """Run the trial."""
    with started_head("--num-cpus", "1", autoscaling=GPU_NODES) as cluster:
        begin_s = time.monotonic()
        os.environ.update(cluster.environment)
        nodes = set()
        for number, visible, node in outcomes(cluster.address):
            print(f"{time.monotonic() - begin_s:5.1f} s: task {number} on node {node} with GPU {visible}", flush=True)
            nodes.add(node)
        assert nodes


if __name__ == "__main__":
    main()
