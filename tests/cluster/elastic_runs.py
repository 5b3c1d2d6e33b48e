"""Runs on two nodes, and the comparison with their references: the parts of the cases of tests.cluster.elastic."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clipmill.train.run.checkpoint import all_checkpoints, read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from tests.cluster.elastic_nodes import Launch, launch, wait_until
from tests.train.latents.columns import FLAGS

_SHARED = ("--warmup-steps", "2", "--device", "cpu", "--workers", "1", "--checkpoint-every", "20", "--resume", "auto")
DUAL = ("dual-encoder", *FLAGS, "--batch", "8", "--steps", "300", *_SHARED)
_SMALL = "caption --model tiny --size-px 32 --num-frames 2 --batch 4 --microbatch 2 --lr 1e-3 --steps 80"
_DECODER = "--decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280"
CAPTION = (*_SMALL.split(), *_DECODER.split(), *_SHARED)


class Skipped(Exception):
    """The case needs a program that is not installed."""


@dataclass(frozen=True)
class Case:
    """Folder of a case, with the logs of the nodes and the training data."""

    folder: Path
    root: Path

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.out)

    def launch(self, node: int, *added: object, command: Sequence[str] = DUAL, **how: Any) -> Launch:
        """Start `command` on a node; its output is appended to the log of the node."""
        data = self.root / ("columns" if command[0] == "dual-encoder" else "videos")
        words = (*command, "--shards", data, "--out", self.out, *added)
        return launch(node, words, log=self.folder / f"node{node}.log", **how)

    def launch_both(self, *added: object, **how: Any) -> tuple[Launch, Launch]:
        return self.launch(0, *added, **how), self.launch(1, *added, **how)

    def wait_for_steps(self, count: int) -> None:
        wait_until(lambda: len(read_lines(self.run.metrics)) >= count, what=f"{count} steps of {self.out}")

    def wait_for_output(self, node: int, text: str, *, times: int = 1) -> float:
        """Wait for a text in the log of a node; return the seconds that it took."""
        log = self.folder / f"node{node}.log"
        return wait_until(lambda: log.read_text().count(text) >= times, what=f"{times} x {text!r} in {log}")

    def wait_for_restart(self, node: int = 0, *, restarts: int = 1) -> float:
        """Wait until rank 0, on this node, has restarted; return the seconds that it took."""
        return self.wait_for_output(node, "attention: ", times=restarts + 1)

    def require_same(self, reference: str = "reference") -> str:
        """Check that weights and steps are bit-identical to the reference."""
        weights, expected = self._weights(reference)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in weights.items()), "the weights differ"
        return "the same bits"

    def require_same_losses(self, reference: str = "reference") -> str:
        """Compare the losses of all steps with the reference, up to rounding, for a different number of processes.

        The weights agree less well: AdamW scales up gradients that are zero except for rounding, such as the gradient
        of a key's bias.
        """
        flat_weights, expected = (
            torch.cat([tensor.double().flatten() for tensor in w.values()]) for w in self._weights(reference)
        )
        lines = zip(read_lines(self.run.metrics), read_lines(self._reference(reference).metrics), strict=True)
        worst = max(abs(line["loss"] - other["loss"]) / other["loss"] for line, other in lines)
        assert worst < 1e-4, f"losses differ by {worst:.1g}"
        apart = float((flat_weights - expected).norm() / expected.norm())
        return f"losses equal to {worst:.0e}, weights to {apart:.0e} of their norm"

    def _reference(self, name: str) -> RunFolder:
        return RunFolder(self.root / name / "run")

    def _weights(self, reference: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        runs = self.run, self._reference(reference)
        steps = [[line["step"] for line in read_lines(run.metrics)] for run in runs]
        assert steps[0] == steps[1] == list(range(1, len(steps[1]) + 1))
        first, second = (read_weights(all_checkpoints(run.checkpoints)[steps[1][-1]]) for run in runs)
        return first, second


def end_well(*launches: Launch) -> None:
    for process in launches:
        status = process.end()
        assert status == 0, f"node {process.node} ended with {status}:\n{process.output[-4000:]}"
