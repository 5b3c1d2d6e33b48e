"""Runs of `train` of a few steps, as small as they can be."""

from pathlib import Path

import pytest

from clipmill.train.commands import launch
from tests.train.running import train

NUM_STEPS = 3
SMALL = "--model tiny --num-frames 2 --warmup-steps 2 --lr 1e-3 --workers 1 --max-grad-norm 1e6"
PIXELS = f"{SMALL} --size-px 32 --batch 4 --towers.depth 1"
LATENTS = f"{SMALL} --input latents --segment 2s --batch 4 --towers.depth 1"
DECODER = "--decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280"
# A run of each task to evaluate.
TASKS = {
    "dual-encoder": f"dual-encoder {PIXELS}",
    "classify": f"classify {PIXELS} --label class",
    "mae": f"mae {PIXELS} --mask-ratio 0.75 --decoder-depth 1",
    # One that does not end each caption at once.
    "caption": f"caption {PIXELS.replace('--towers.depth 1', '--towers.depth 2')} {DECODER}",
}


def train_all(folder: Path, *, shards: Path) -> dict[str, Path]:
    """Train every task for a step on the CPU; the folder of each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "write_page", lambda _: None)
        for task, flags in TASKS.items():
            words = (*flags.split(), "--steps", "1", "--precision", "fp32", "--device", "cpu")
            assert train(*words, "--shards", shards, "--out", folder / task) == 0
    return {task: folder / task for task in TASKS}
