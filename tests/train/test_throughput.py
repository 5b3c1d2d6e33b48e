"""Speed metrics: FLOPs compared with formulas, and a counter that does not affect the step."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from clipmill.train.engine.metrics import FlopCounter, Throughput, efficient_flops, peak_flops
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import SIZES, DualEncoder

CPU = torch.device("cpu")


def speed_of() -> Throughput:
    return Throughput(device=CPU, precision="fp32")


def transformer_flops(num_tokens: int, width: int, depth: int) -> int:
    """Return the FLOPs of a forward pass.

    Per token, matrices need 12 D^2 products and attention 2 T D products; a product is 2 FLOPs.
    """
    return depth * num_tokens * 2 * (12 * width**2 + 2 * num_tokens * width)


def test_the_flops_of_a_dual_encoder_are_those_of_the_formula() -> None:
    batch, num_frames, num_text = 3, 2, 9
    model = DualEncoder(SIZES["tiny"], image_px=32, num_frames=num_frames, attend=attend_with_sdpa)
    size = SIZES["tiny"]
    width, patches = size.video.trunk.width, num_frames * 4
    tokens = torch.zeros(batch, num_text, dtype=torch.long)
    tokens[:, -1] = 40_000
    speed = speed_of()
    with speed.count_flops(model):
        video_BE, text_BE = model(torch.randn(batch, 3, num_frames, 32, 32), tokens)
        (video_BE * text_BE).sum().backward()
    text_width = size.text.trunk.width
    video = transformer_flops(1 + patches, width, size.video.trunk.depth) + 2 * patches * 3 * 16 * 16 * width
    text = transformer_flops(num_text, text_width, size.text.trunk.depth)
    heads = 2 * (width + text_width) * size.embedding_width
    assert speed.flops_per_step == 3 * batch * (video + text + heads)


class Twice(nn.Module):
    """Blocks with dropout that are computed twice to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: nn.functional.dropout(block(x), 0.5), x, use_reentrant=False)
        return x


def test_what_is_computed_twice_counts_once_and_what_has_no_gradient_not_at_all() -> None:
    model, x = Twice(), torch.randn(8, 16, requires_grad=True)
    speed = speed_of()
    with speed.count_flops(model):
        with torch.no_grad():
            model(x)
        for part in x.chunk(2):
            model(part).sum().backward()
    counter = FlopCounterMode(display=False)
    with counter:
        for part in x.chunk(2):
            model(part).sum().backward()
    forward = 3 * 2 * 8 * 16 * 16
    assert speed.flops_per_step == 3 * forward
    # torch counts the recomputed forward pass of the blocks, too.
    assert counter.get_total_flops() == 4 * forward


def test_counting_does_not_change_the_step() -> None:
    model, x = Twice(), torch.randn(8, 16)
    results = []
    for counts in (False, True):
        speed = speed_of()
        model.zero_grad()
        torch.manual_seed(5)
        if counts:
            with speed.count_flops(model):
                model(x).square().sum().backward()
        else:
            model(x).square().sum().backward()
        results.append([*(parameter.grad for parameter in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(tensor, other) for tensor, other in zip(*results, strict=True))
    assert not model._forward_pre_hooks


def test_the_flops_of_xformers_kernel_are_those_of_the_formula() -> None:
    """The kernel takes [B, M, H, K]; cross-attention of a captioner has different numbers of queries and keys."""
    query, key = torch.empty(2, 12, 4, 8), torch.empty(2, 9, 4, 8)
    assert efficient_flops(query, key, key) == 2 * 2 * (2 * 4 * 12 * 9 * 8)


def test_numbers_of_a_step() -> None:
    speed = speed_of()
    assert speed.metrics(step_s=2.0, waited_s=0.5, num_samples=64) == {
        "samples_per_s": 32.0,
        "step_s": 2.0,
        "data_wait_s": 0.5,
        "data_wait_share": 0.25,
    }
    speed.flops_per_step = 4 * 10**12
    metrics = speed.metrics(step_s=2.0, waited_s=0.5, num_samples=64)
    assert metrics["tflops"] == 2.0 and "mfu" not in metrics


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H800 PCIe", "bf16", 756.0),
        ("Tesla V100S-PCIE-32GB", "fp16", 130.0),
        ("Tesla V100-PCIE-32GB", "tf32", None),
        ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "tf32", None),
        ("NVIDIA L40S", "bf16", 362.1),
        ("NVIDIA H200", "fp32", None),
        ("NVIDIA Unheard-of", "bf16", None),
    ],
)
def test_the_peak_of_a_gpu_is_told_by_its_name(device: str, precision: str, tflops: float | None) -> None:
    peak = peak_flops(device, precision)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_flops_are_counted_in_inference_mode_as_without_it() -> None:
    layer, x = nn.Linear(4, 8), torch.randn(2, 4)
    with torch.inference_mode(), FlopCounter() as counter:
        layer(x)
    assert counter.num_flops == 2 * 2 * 4 * 8
