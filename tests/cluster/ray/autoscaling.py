"""GPU nodes that an autoscaler starts for `prep`, while the head has no GPU.

    python -m tests.cluster.ray.autoscaling

The nodes are processes of Ray's fake multi-node provider. Each of them only pretends to have a GPU, so the tasks return
their location instead of using the GPU. The trial takes about a minute. All nodes have the address of the head, by
which Ray 2.60 counts the resources of nodes: its autoscaler starts one node, and cannot tell that a second one is
required.
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
    """Run tasks that need one GPU each."""
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
