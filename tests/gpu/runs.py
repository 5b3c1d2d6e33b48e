"""Whole runs of `train` in this process, on either device, through its command line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.running import train

SMALL = "--model tiny --num-frames 2 --size-px 32 --batch 8 --lr 1e-3 --warmup-steps 4 --workers 2"
JITTER = "--augment.flip 0.5 --augment.brightness 0.2 --augment.hue 0.1 --augment.blur 0.3"
DECODER = "--decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280 --decoder.dropout 0"
# What draws from a generator of the device (dropout and what leaves out parts of a model) is off: CPUs and GPUs have
# different ones. All else is drawn alike on both.
TASKS = {
    "dual-encoder": f"dual-encoder {SMALL} {JITTER}",
    "dual-encoder-latents": f"dual-encoder {SMALL} --input latents --text-tower frozen --segment 2s",
    "mae": f"mae {SMALL} {JITTER} --mask-ratio 0.75 --decoder-depth 1 --decoder-mask random --optimizer.lr-batch 8",
    "classify": f"classify {SMALL} {JITTER} --towers.kind videomae --label class --mixup 0.8 --cutmix 1 --dropout 0",
    "caption": f"caption {SMALL} {JITTER} {DECODER} --captions-per-visit 1",
}


@dataclass
class Runs:
    """Runs that have been made, by their flags: several tests look at the same ones.

    Attributes:
        folder: where they lie.
    """

    folder: Path
    clips_dir: Path
    latents_dir: Path
    num_steps: int
    _made: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def command(self, task: str, device: torch.device, *flags: str, out: Path) -> list[str]:
        """Command line of the run of a task: in float32, by SDPA, of the usual length where flags say nothing else."""
        data = self.latents_dir if task.endswith("latents") else self.clips_dir
        command = [*TASKS[task].split(), "--precision", "fp32", "--attention", "sdpa", "--steps", str(self.num_steps)]
        command += ["--shards", str(data), "--device", device.type, "--out", str(out)]
        for name, *value in _by_name(flags):
            if value and name in command:
                command[command.index(name) + 1] = value[0]
            else:
                command += [name, *value]
        return command

    def make(self, task: str, device: torch.device, *flags: str, again: int = 0) -> Path:
        """The folder of a run of a task with some more flags.

        Args:
            again: another run of the same flags for each number.
        """
        key = (task, device.type, *flags, str(again))
        if key not in self._made:
            out = self.folder / f"run-{len(self._made)}"
            command = self.command(task, device, *flags, out=out)
            status = train(*command)
            assert not status, f"train {' '.join(command)} ended with {status}"
            self._made[key] = out
        return self._made[key]


def _by_name(flags: Sequence[str]) -> list[list[str]]:
    """Each flag with its value, if it has one."""
    lines_read: list[list[str]] = []
    for word in flags:
        if word.startswith("--"):
            lines_read.append([word])
        else:
            lines_read[-1].append(word)
    return lines_read


def numbers(out: Path, name: str) -> list[float]:
    """Another number of each step."""
    return [line[name] for line in read_lines(RunFolder(out).metrics)]


def deviation(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    assert len(losses) == len(expected) > 0
    # NaN is larger than any bound.
    differences = [abs(first - other) / abs(other) for first, other in zip(losses, expected, strict=True)]
    return max(difference if difference == difference else float("inf") for difference in differences)
