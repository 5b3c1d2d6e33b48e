"""The towers inside torch's wrappers for many ranks; one rank suffices to test their hooks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from clipmill.train.config.model import Towers
from clipmill.train.models.dual_encoder import DualEncoder
from clipmill.train.models.transformer import blocks_of
from tests.train.models.small_towers import captions, clips, small_encoder

TOWERS = Towers(activation_checkpointing=True, patch_dropout=0.5, drop_path=0.3, temporal="random")


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients_of_steps(model: torch.nn.Module, towers: DualEncoder) -> dict[str, torch.Tensor]:
    """Return gradients accumulated over two steps with captions of different lengths."""
    for seed, lengths in enumerate([(2, 5, 12), (7, 3, 3)]):
        torch.manual_seed(seed)
        video, text = model.train()(clips(3), captions(*lengths))
        ((video @ text.T) ** 2).sum().backward()
    outcomes = {}
    for name, parameter in towers.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        outcomes[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return outcomes


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_wrapped_towers_have_the_gradients_of_plain_ones(wrapper: str) -> None:
    plain, towers = small_encoder(TOWERS), small_encoder(TOWERS)
    wrapped: torch.nn.Module = towers
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(towers)
    else:
        mesh = init_device_mesh("cpu", (1,))
        for block in blocks_of(towers):
            fully_shard(block, mesh=mesh)
        fully_shard(towers, mesh=mesh)
    expected = gradients_of_steps(plain, plain)
    torch.testing.assert_close(gradients_of_steps(wrapped, towers), expected, atol=1e-12, rtol=0)
