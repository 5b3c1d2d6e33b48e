"""In each step, the host waits for the device only once, to read the metrics of the previous step.

clipmill.train.device.transfer implements this.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clipmill.train.config.clips import OPERATIONS
from tests.train.augment.reference import apply_operation
from tests.train.classify.moving import write_moving
from tests.train.device_reads import DeviceReads, Look, device_reads
from tests.train.running import train

SMALL = "--model tiny --num-frames 2 --warmup-steps 2 --lr 1e-3 --steps 4 --workers 1 --device cpu"
PIXELS = f"{SMALL} --size-px 32 --batch 4"
LATENTS = f"{SMALL} --input latents --segment 2s --batch 4"
STORED = f"{LATENTS} --text-tower frozen"
AUGMENTED = "--augment.flip 0.5 --augment.hue 0.1 --augment.contrast 0.2 --augment.blur 0.5"
FINE_TUNING = (
    "--towers.kind videomae --repeats 2 --optimizer.layer-decay 0.75 --mixup 0.8 --cutmix 1 --label-smoothing 0.1"
    " --augment.rand-ops 4 --augment.erase 0.5 --towers.drop-path 0.1"
)
DECODER = "--decoder.name tiny --decoder.depth 1 --decoder.max-tokens 12 --decoder.vocabulary 280"
RUNS = {
    "infonce": f"dual-encoder {PIXELS} {AUGMENTED} --towers.patch-dropout 0.5 --max-grad-norm 1e6",
    "padded captions": f"dual-encoder {PIXELS} --towers.no-packed-text --loss.kind siglip --attention naive",
    "microbatches": f"dual-encoder {LATENTS} --microbatch 2 --towers.activation-checkpointing --precision bf16",
    "max-margin": f"dual-encoder {STORED} --loss.kind max-margin --optimizer.name sgd --optimizer.ema 0.9",
    "isogclr": f"dual-encoder {STORED} --loss.kind isogclr --loss.convention paper --microbatch 2",
    "fastclip-v2": f"dual-encoder {STORED} --loss.kind fastclip-v2 --optimizer.name lamb",
    "fastclip-v3": f"dual-encoder {STORED} --loss.kind fastclip-v3 --optimizer.ema 0.9",
    "fastclip-v3, lion": f"dual-encoder {STORED} --loss.kind fastclip-v3 --optimizer.name lion",
    "fp16": f"dual-encoder {STORED} --precision fp16",
    "fp16, lamb": f"dual-encoder {STORED} --precision fp16 --optimizer.name lamb",
    "mae": f"mae {PIXELS} --mask-ratio 0.75 --augment.flip 0.5 --decoder-mask running-cell --microbatch 2",
    "mae on latents": f"mae {LATENTS} --mask-ratio 0.75 --decoder-mask random",
    "classifier": f"classify {PIXELS} {FINE_TUNING}",
    "captioner": f"caption {PIXELS} {DECODER} --captions-per-visit 2 --microbatch 2 --towers.kind timesformer",
}


# The simulated GPU runs a case like each of the other cases.
ALWAYS = ("infonce",)


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.nightly) for name in RUNS]
)
def test_each_step_looks_once_at_the_device_and_sees_the_step_before(
    data_dir: Path, columns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    flags = RUNS[name]
    shards = columns if "--input latents" in flags else data_dir
    if name == "classifier":
        shards = tmp_path / "labelled"
        write_moving(shards, num_videos=4)
    with device_reads(monkeypatch) as reads:
        assert train(*flags.split(), "--shards", shards, "--out", tmp_path / "run") == 0
    # The first step of a process also sends constant values. The metrics of the last step are read immediately.
    looks = [look for look in reads.looks if 2 <= look.step < 4]
    assert [(look.step, look.numbers_of) for look in looks] == [(2, 1), (3, 2)], looks


def test_no_operation_of_rand_augment_looks_at_a_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run draws only a few of the operations."""
    clip = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    with device_reads(monkeypatch) as reads:
        reads.take(clip)
        for name in OPERATIONS:
            apply_operation(clip, name, 0.3, fill=(0.5, 0.5, 0.5))
            seen = len(reads.looks)
            apply_operation(clip, name, -0.7, fill=(0.5, 0.5, 0.5))
            assert reads.looks[seen:] == [], name


def test_a_look_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of read of device values is recorded, and operations without a wait are not.

    The other tests of this file rely on this.
    """
    host = torch.arange(6.0)
    with device_reads(monkeypatch) as reads:
        values_there = torch.arange(6.0)
        reads.take(values_there)
        ways: list[Callable[[], object]] = [
            lambda: values_there.sum().item(),
            lambda: float(values_there[0] + host[0]),
            lambda: bool((values_there > 2).all()),
            lambda: int(host.clone().copy_(values_there)[1]),
            lambda: (values_there * 2).tolist(),
            lambda: values_there.view(2, 3).numpy(),
            lambda: values_there.cpu(),
            lambda: values_there[values_there > 2],
            lambda: values_there.clone().masked_select(host > 2),
            lambda: values_there.nonzero(),
            lambda: values_there.unique(),
            lambda: torch.equal(values_there, host),
            lambda: torch.tensor([1.0], device=torch.device("cpu")),
            lambda: host.to(torch.device("cpu")),
        ]
        for number, look in enumerate(ways, start=1):
            look()
            assert len(reads.looks) == number, number
        seen = len(reads.looks)
        _ = (
            values_there.sum() * 2,
            values_there[host.long()],
            values_there.masked_fill(host > 2, 0.0),
            values_there.to(torch.float64),
            host.tolist(),
        )
        values_there[values_there > 2] = 0
        values_there.requires_grad_().square().sum().backward()
        assert len(reads.looks) == seen
    assert isinstance(reads, DeviceReads) and {type(look) for look in reads.looks} == {Look}
