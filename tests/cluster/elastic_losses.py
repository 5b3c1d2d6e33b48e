"""Cases of tests.cluster.elastic_runs in which a rank, a node or the link between the nodes is lost during the run."""

import os
import signal
import time

from tests.cluster.elastic_nodes import kill_node, lose_node, ranks_of, set_link
from tests.cluster.elastic_runs import CAPTION, Case, end_well

_AT_STEP = 100


def rank_killed(case: Case) -> str:
    """Kill a rank of node 1; both launches restart their ranks."""
    launches = case.launch_both()
    case.wait_for_steps(_AT_STEP)
    os.kill(ranks_of(1)[0], signal.SIGKILL)
    restarted_s = case.wait_for_restart()
    end_well(*launches)
    return f"{case.require_same()}; restarted after {restarted_s:.0f} s"


def node_replaced(case: Case) -> str:
    """Kill node 1 with its torchrun, and start it again 5 s later."""
    first, second = case.launch_both()
    case.wait_for_steps(_AT_STEP)
    kill_node(1)
    second.end()
    noticed_s = case.wait_for_output(0, "failed: ")
    time.sleep(5)
    second = case.launch(1)
    restarted_s = case.wait_for_restart()
    end_well(first, second)
    return (
        f"{case.require_same()}; noticed after {noticed_s:.0f} s, restarted {restarted_s:.0f} s after node 1 came back"
    )


def fewer_nodes(case: Case) -> str:
    """With --nnodes 1:2, kill node 1; node 0 continues alone."""
    first, second = case.launch_both(nodes="1:2")
    case.wait_for_steps(_AT_STEP)
    kill_node(1)
    second.end()
    restarted_s = case.wait_for_restart()
    end_well(first)
    return f"{case.require_same_losses()}; restarted after {restarted_s:.0f} s"


def node_comes_back(case: Case) -> str:
    """With --nnodes 1:2, let node 0 continue alone until node 1 returns."""
    first, second = case.launch_both(nodes="1:2")
    case.wait_for_steps(60)
    kill_node(1)
    second.end()
    case.wait_for_restart()
    case.wait_for_steps(120)
    second = case.launch(1, nodes="1:2")
    end_well(first, second)
    assert first.output.count("attention: ") == 3, "node 1 did not rejoin"
    assert "stopped: step" in first.output, "the run was not saved when node 1 returned"
    return case.require_same_losses()


def power_cut(case: Case) -> str:
    """With --nnodes 1:2, remove node 1 so that its connections stay open on the other side."""
    first, _ = case.launch_both(nodes="1:2")
    case.wait_for_steps(_AT_STEP)
    lose_node(1)
    noticed_s = case.wait_for_output(0, "failed: ")
    restarted_s = noticed_s + case.wait_for_restart()
    end_well(first)
    return f"{case.require_same_losses()}; noticed after {noticed_s:.0f} s, restarted after {restarted_s:.0f} s"


def link_lost(case: Case) -> str:
    """With --nnodes 1:2, cut the link between running nodes: only one of them may continue to train."""
    first, second = case.launch_both(nodes="1:2")
    case.wait_for_steps(_AT_STEP)
    set_link(1, "down")
    noticed_s = case.wait_for_output(0, "failed: ")
    other_s = noticed_s + case.wait_for_output(1, "failed: ")
    end_well(first)
    assert second.output.count("attention: ") == 0 and "done: " not in second.output
    return f"{case.require_same_losses()}; noticed after {noticed_s:.0f} s and, without the store, {other_s:.0f} s"


def link_lost_to_rank_0(case: Case) -> str:
    """Cut the link with the rendezvous on node 1.

    Rank 0, which holds the run's folder, is on the isolated node.
    """
    first, second = case.launch_both(nodes="1:2", host=1)
    case.wait_for_steps(_AT_STEP)
    assert "attention: " in first.output, "rank 0 must be on node 0"
    set_link(0, "down")
    case.wait_for_output(1, "failed: ")
    restarted_s = case.wait_for_restart(1, restarts=0)
    end_well(second)
    return f"{case.require_same_losses()}; restarted {restarted_s:.0f} s after it was noticed"


def link_blinks(case: Case) -> str:
    """Take the link down for 15 s; the run continues as if nothing had happened."""
    launches = case.launch_both()
    case.wait_for_steps(_AT_STEP)
    set_link(1, "down")
    time.sleep(15)
    set_link(1, "up")
    end_well(*launches)
    assert launches[0].output.count("attention: ") == 1, "the run was restarted"
    return case.require_same()


def first_node_lost(case: Case) -> str:
    """Kill node 0, which hosts the rendezvous: node 1 exits too, and the same command continues the run later."""
    first, second = case.launch_both()
    case.wait_for_steps(_AT_STEP)
    kill_node(0)
    first.end()
    noticed_s = case.wait_for_output(1, "failed: ")
    began_s = time.monotonic()
    status = second.end(within_s=600)
    ended_s = time.monotonic() - began_s + noticed_s
    assert status != 0
    end_well(*case.launch_both())
    return f"{case.require_same()}; node 1 noticed after {noticed_s:.0f} s, its torchrun ended after {ended_s:.0f} s"


def stages(case: Case) -> str:
    """Train a captioner in pipeline stages on both nodes, undisturbed; the reference of the following cases."""
    end_well(*case.launch_both("--parallel.stages", "2", command=CAPTION))
    return "a stage on each node"


def stage_killed(case: Case) -> str:
    """Kill the second stage, which is on node 1."""
    launches = case.launch_both("--parallel.stages", "2", command=CAPTION)
    case.wait_for_steps(30)
    os.kill(ranks_of(1)[0], signal.SIGKILL)
    restarted_s = case.wait_for_restart()
    end_well(*launches)
    return f"{case.require_same('stages')}; restarted after {restarted_s:.0f} s"


def stages_and_replicas(case: Case) -> str:
    """Train with two stages and two replicas, one on each node, and replace one of the nodes."""
    words = ("--parallel.stages", "2", "--parallel.strategy", "zero1")
    at = CAPTION.index("--microbatch") + 1
    command = (*CAPTION[:at], "1", *CAPTION[at + 1 :])  # half of the batch per replica
    first, second = case.launch_both(*words, command=command, processes=2)
    case.wait_for_steps(30)
    kill_node(1)
    second.end()
    second = case.launch(1, *words, command=command, processes=2)
    end_well(first, second)
    return case.require_same_losses("stages")


def fsdp_rank_killed(case: Case) -> str:
    """Kill a rank while weights and optimizer state are sharded over both nodes."""
    launches = case.launch_both("--parallel.strategy", "fsdp")
    case.wait_for_steps(_AT_STEP)
    os.kill(ranks_of(1)[0], signal.SIGKILL)
    case.wait_for_restart()
    end_well(*launches)
    return case.require_same_losses()


CASES = (
    rank_killed,
    node_replaced,
    fewer_nodes,
    node_comes_back,
    power_cut,
    link_lost,
    link_lost_to_rank_0,
    link_blinks,
    first_node_lost,
    stages,
    stage_killed,
    stages_and_replicas,
    fsdp_rank_killed,
)
