"""Runs on two nodes that lose one, are restarted, and have to end with the weights of an undisturbed run. As root:

    python -m tests.cluster.elastic_runs              # all cases, about ten minutes
    python -m tests.cluster.elastic_runs rank_killed  # one of them

Prints a line for each case, with what was measured, and exits with 1 if one failed. The output of the ranks is in
`node*.log` of the case's folder, which is kept if it failed.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.cluster.elastic_nodes import (
    Launch,
    kill_node,
    launch,
    lose_node,
    nodes,
    ranks_of,
    remove_nodes,
    set_link,
    wait_until,
)
from tests.train.test_latents_training import FLAGS, write_columns
from train.run.checkpoint import all_checkpoints, read_weights
from train.run.folder import RunFolder, read_lines

NUM_STEPS = 300
_TRAIN = ("dual-encoder", *FLAGS, "--batch", "8", "--warmup-steps", "2", "--device", "cpu", "--workers", "1")
_STEPS = ("--steps", str(NUM_STEPS), "--checkpoint-every", "20", "--resume", "auto")


@dataclass(frozen=True)
class Case:
    """The folder of a case, the data, and the reference run of two processes."""

    folder: Path
    data: Path
    reference: Path

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "run")

    def launch(self, node: int, *added: object, command: Sequence[object] = (), **how: object) -> Launch:
        words = command or (*_TRAIN, *_STEPS, "--shards", self.data, "--out", self.run.path, *added)
        return launch(node, words, log=self.folder / f"node{node}.log", **how)  # type: ignore[arg-type]

    def wait_for_steps(self, count: int) -> None:
        wait_until(lambda: len(read_lines(self.run.metrics)) >= count, what=f"{count} steps of {self.run.path}")

    def wait_for_resumed(self, node: int, text: str = "attention: ") -> None:
        log = self.folder / f"node{node}.log"
        wait_until(lambda: log.read_text().count(text) >= 2, what=f"a second {text!r} in {log}", within_s=240)

    def require_same(self) -> str:
        """Compare weights and steps with the reference: equal in every bit."""
        self._require_all_steps()
        found, expected = weights(self.run), weights(RunFolder(self.reference))
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items()), "the weights differ"
        return "the same bits"

    def require_same_losses(self) -> str:
        """Compare the losses of all steps with the reference, up to rounding, for another number of processes.

        The weights agree less well: AdamW scales a gradient that is zero but for rounding, as that of a key's bias.
        """
        self._require_all_steps()
        lines = zip(read_lines(self.run.metrics), read_lines(RunFolder(self.reference).metrics), strict=True)
        worst = max(abs(one["loss"] - other["loss"]) / other["loss"] for one, other in lines)
        assert worst < 1e-4, f"losses differ by {worst:.1g}"
        found, expected = (torch.cat([w.flatten() for w in weights(run).values()]) for run in (self.run, RunFolder(self.reference)))
        apart = float((found - expected).norm() / expected.norm())
        return f"losses equal up to {worst:.0e}, weights up to {apart:.0e} of their norm"

    def _require_all_steps(self) -> None:
        assert [line["step"] for line in read_lines(self.run.metrics)] == list(range(1, NUM_STEPS + 1))


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    checkpoints = all_checkpoints(run.checkpoints)
    assert max(checkpoints) == NUM_STEPS
    return {name: value.double() for name, value in read_weights(checkpoints[NUM_STEPS]).items()}


def end_well(*launches: Launch) -> None:
    for one in launches:
        status = one.end()
        assert status == 0, f"node {one.node} ended with {status}:\n{one.said[-4000:]}"


def undisturbed(case: Case) -> str:
    end_well(case.launch(0), case.launch(1))
    return case.require_same()


def rank_killed(case: Case) -> str:
    """A rank of node 1; both launches restart theirs."""
    launches = case.launch(0), case.launch(1)
    case.wait_for_steps(100)
    import os, signal
    os.kill(ranks_of(1)[0], signal.SIGKILL)
    killed_s = time.monotonic()
    case.wait_for_resumed(0)
    restarted_s = time.monotonic() - killed_s
    end_well(*launches)
    return f"{case.require_same()}; restarted after {restarted_s:.0f} s"


def node_killed(case: Case) -> str:
    """Node 1 with its torchrun, which is started again."""
    first, second = case.launch(0), case.launch(1)
    case.wait_for_steps(100)
    kill_node(1)
    second.end()
    killed_s = time.monotonic()
    time.sleep(5)
    second = case.launch(1)
    case.wait_for_resumed(0)
    restarted_s = time.monotonic() - killed_s
    end_well(first, second)
    return f"{case.require_same()}; restarted after {restarted_s:.0f} s"


def fewer_nodes(case: Case) -> str:
    """--nnodes 1:2: node 0 goes on alone."""
    first, second = case.launch(0, nodes="1:2"), case.launch(1, nodes="1:2")
    case.wait_for_steps(100)
    kill_node(1)
    second.end()
    killed_s = time.monotonic()
    case.wait_for_resumed(0)
    restarted_s = time.monotonic() - killed_s
    end_well(first)
    return f"{case.require_same_losses()}; restarted after {restarted_s:.0f} s"


def node_comes_back(case: Case) -> str:
    """--nnodes 1:2: node 0 goes on alone until node 1 is there again."""
    first, second = case.launch(0, nodes="1:2"), case.launch(1, nodes="1:2")
    case.wait_for_steps(60)
    kill_node(1)
    second.end()
    case.wait_for_resumed(0)
    case.wait_for_steps(120)
    second = case.launch(1, nodes="1:2")
    end_well(first, second)
    assert first.said.count("attention: ") == 3
    return case.require_same_losses()


def power_cut(case: Case) -> str:
    first, second = case.launch(0, nodes="1:2"), case.launch(1, nodes="1:2")
    case.wait_for_steps(100)
    lose_node(1)
    lost_s = time.monotonic()
    wait_until(lambda: "failed: " in first.said, what="node 0 notices")
    noticed_s = time.monotonic() - lost_s
    case.wait_for_resumed(0)
    restarted_s = time.monotonic() - lost_s
    end_well(first)
    return f"{case.require_same_losses()}; noticed after {noticed_s:.0f} s, restarted after {restarted_s:.0f} s"


def link_lost(case: Case) -> str:
    """The link goes down and both nodes run on: neither may write what the other one writes."""
    first, second = case.launch(0, nodes="1:2"), case.launch(1, nodes="1:2")
    case.wait_for_steps(100)
    set_link(1, "down")
    lost_s = time.monotonic()
    wait_until(lambda: "failed: " in first.said, what="node 0 notices")
    noticed_s = time.monotonic() - lost_s
    wait_until(lambda: "failed: " in second.said, what="node 1 notices")
    other_s = time.monotonic() - lost_s
    status = second.end()
    end_well(first)
    assert status != 0
    return f"{case.require_same_losses()}; noticed after {noticed_s:.0f} s and {other_s:.0f} s"


def link_blinks(case: Case) -> str:
    """For 15 s; then the run goes on as if nothing had happened."""
    launches = case.launch(0), case.launch(1)
    case.wait_for_steps(100)
    set_link(1, "down")
    time.sleep(15)
    set_link(1, "up")
    end_well(*launches)
    assert launches[0].said.count("attention: ") == 1
    return case.require_same()


def first_node_lost(case: Case) -> str:
    """It hosts the rendezvous: node 1 ends too, and the same command goes on later."""
    first, second = case.launch(0), case.launch(1)
    case.wait_for_steps(100)
    kill_node(0)
    first.end()
    killed_s = time.monotonic()
    status = second.end()
    ended_s = time.monotonic() - killed_s
    assert status != 0
    end_well(case.launch(0), case.launch(1))
    return f"{case.require_same()}; node 1 ended after {ended_s:.0f} s"


CASES: tuple[Callable[[Case], str], ...] = (
    undisturbed,
    rank_killed,
    node_killed,
    fewer_nodes,
    node_comes_back,
    power_cut,
    link_lost,
    link_blinks,
    first_node_lost,
)


def main(names: Sequence[str]) -> int:
    wanted = [case for case in CASES if not names or case.__name__ in names]
    root = Path(tempfile.mkdtemp(prefix="elastic-"))
    data = write_columns(root / "data")
    num_failed = 0
    for at, run in enumerate((undisturbed, *(case for case in wanted if case is not undisturbed))):
        case = Case(root / run.__name__, data, root / undisturbed.__name__ / "run")
        case.folder.mkdir()
        began_s = time.monotonic()
        try:
            with nodes():
                found = run(case)
        except AssertionError as error:
            num_failed += 1
            found = f"FAILED: {error}"
        print(f"{run.__name__:18} {time.monotonic() - began_s:4.0f} s  {found}", flush=True)
    if not num_failed:
        shutil.rmtree(root)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
