"""Commands of runs that train parts of a model, and readers of their checkpoints."""

import shutil
from pathlib import Path

import torch

from clipmill.train.run.checkpoint import latest_checkpoint, read_table
from clipmill.train.run.folder import RunFolder
from clipmill.train.weights.sources import complete_weights

TINY = ["--model", "tiny", "--num-frames", 2, "--size-px", 32, "--batch", 4, "--warmup-steps", 1, "--workers", 1]
SHORT = [*TINY, "--lr", "1e-2", "--steps", 2]
SMALL = [*TINY, "--lr", "1e-2", "--steps", 4, "--checkpoint-every", 2, "--optimizer.ema", 0.9]
LORA = ("--lora.rank", 2, "--lora.alpha", 4)
CROSS = "decoder.transformer.resblocks.0.cross_attn.kv_proj.weight"


def latest(out: Path) -> Path:
    path = latest_checkpoint(RunFolder(out).checkpoints)
    assert path is not None
    return path


def weights(out: Path) -> dict[str, torch.Tensor]:
    return complete_weights(latest(out))


def stored_names(out: Path, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in read_table(latest(out)) if name.startswith(prefix)}


def kill_copy(out: Path, copy: Path) -> Path:
    """Copy a run in its state after its first checkpoint."""
    shutil.copytree(out, copy)
    for path in sorted((copy / "checkpoints").iterdir())[1:]:
        shutil.rmtree(path)
    return copy
