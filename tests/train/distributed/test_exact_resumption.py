"""Exact resumption: resumed ranks end bit-identical to ranks that were never stopped, for any number of ranks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from clipmill.train.distributed.parallel import Replicated
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Captioner, Gpt2, Gpt2Size
from clipmill.train.models.timesformer import TimeSformer
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.run.checkpoint import all_checkpoints, read_metadata, read_weights
from clipmill.train.run.folder import RunFolder, read_lines
from tests.train.distributed.forked import end_well, fork_ranks
from tests.train.distributed.runs import STRATEGIES, run_and_resume
from tests.train.models import small_captioners, small_towers


@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_that_resume_a_run_end_with_its_bits(tmp_path: Path, num_ranks: int) -> None:
    """Two ranks can sum in only one order, but three can sum in several."""
    end_well(fork_ranks(run_and_resume, tmp_path, size=num_ranks, folder=tmp_path))
    for strategy in STRATEGIES:
        whole, resumed = RunFolder(tmp_path / "whole" / strategy), RunFolder(tmp_path / "resumed" / strategy)
        weights, expected = (
            read_weights(all_checkpoints(run_folder.checkpoints)[4]) for run_folder in (resumed, whole)
        )
        assert [name for name, value in weights.items() if not torch.equal(value, expected[name])] == [], strategy
        for name in ("step", "loss", "epoch", "num_failed"):
            values = ([line[name] for line in read_lines(run_folder.metrics)] for run_folder in (resumed, whole))
            assert next(values) == next(values)
        begun = read_metadata(all_checkpoints(resumed.checkpoints)[2])
        assert any(loader_state["ahead"] for loader_state in begun.loader), (
            "no rank was ahead, so the test does not cover this case"
        )


def dual_encoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return small_towers.small_encoder(), (small_towers.clips(2), small_towers.captions(3, 5))


def captioner() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Make a captioner whose towers have different widths, with a projection between them."""
    trunks = [TransformerSize(width=width, depth=2, num_heads=4) for width in (32, 24)]
    size = replace(small_towers.small_size().video, trunk=trunks[0])
    tower = TimeSformer(size, image_px=32, num_frames=4, attend=attend_with_sdpa)
    decoder = Gpt2(Gpt2Size(trunk=trunks[1], vocabulary_size=61), attend=attend_with_sdpa)
    return Captioner(tower, decoder).double(), (small_towers.clips(2), small_captioners.targets(3, 3))


@pytest.mark.parametrize("make", [dual_encoder, captioner])
def test_buckets_are_those_of_the_first_step_and_fill_in_the_order_of_the_backward_pass(
    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]],
) -> None:
    """Gradients are sent during the backward pass if the parts of a model are defined in the order of their use."""
    model, inputs = make()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ready: list[str] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter_: ready.append(names[id(parameter_)].partition(".")[0])
        )
    steps: list[list[str]] = []

    def note(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        steps[-1] += [names[id(parameter)] for parameter in bucket.parameters()]
        done = torch.futures.Future[torch.Tensor]()
        done.set_result(bucket.buffer())
        return done

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replicated = Replicated(model)
        replicated.register_comm_hook(None, note)
        for _ in range(3):
            steps.append([])
            output = replicated(*inputs)
            sum(tensor.sum() for tensor in (output if isinstance(output, tuple) else (output,))).backward()
    finally:
        dist.destroy_process_group()
    assert steps[0] == steps[1] == steps[2] == [*names.values()][::-1]
    parts = [part for part, _ in groupby(name.partition(".")[0] for name in steps[0])]
    assert [part for part, _ in groupby(ready)] == 3 * parts
