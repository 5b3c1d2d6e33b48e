"""Each task learns on the device what it learns on a CPU; every training mode agrees with the plain one to a bound."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from clipmill.train.device import precision
from clipmill.train.optim.ema import Ema
from tests.gpu.runs import TASKS, Runs, deviation, numbers
from tests.train.running import losses, weights_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

# Largest relative differences of a loss. In float32 two devices add numbers up in other orders, which thirty steps of
# AdamW enlarge: on a CPU another implementation of attention, or halves of batches, makes 2e-5.
FIRST, ALL = 1e-4, 5e-3
# In bfloat16 a CPU's losses go off by 0.06 (dual-encoder), in float16 by 0.004.
FIRST_HALF = {"bf16": 5e-3, "fp16": 1e-3}
ALL_HALF = {"bf16": 0.2, "fp16": 0.05}
CPU = torch.device("cpu")
Record = Callable[[str, object], None]
SHOWN = "dual-encoder-latents"  # the task of the dry run


@pytest.fixture
def chosen_task(request: pytest.FixtureRequest, is_dry_run: bool) -> str:
    """A task; the dry run runs one of them."""
    task: str = request.param
    if is_dry_run and task != SHOWN:
        pytest.skip(f"not in the dry run, which runs {SHOWN} alone")
    return task


def assert_near(values: list[float], expected: list[float], *, first: float, every: float, record: Record) -> None:
    """Two curves of losses, which move."""
    off = deviation(values[:1], expected[:1]), deviation(values, expected)
    record("relative_difference", f"{off[0]:.2g} in the first step, {off[1]:.2g} in the worst of {len(values)}")
    assert off[0] <= first and off[1] <= every, off
    assert len(set(expected)) > len(expected) / 2


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_the_losses_of_a_cpu(task: str, runs: Runs, device: torch.device, record_property: Record) -> None:
    values, expected = losses(runs.make(task, device)), losses(runs.make(task, CPU))
    assert_near(values, expected, first=FIRST, every=ALL, record=record_property)


@pytest.mark.parametrize("chosen_task", TASKS, indirect=True)
def test_bfloat16_learns_what_float32_learns(
    chosen_task: str, runs: Runs, device: torch.device, record_property: Record
) -> None:
    values, expected = (
        losses(runs.make(chosen_task, device, "--precision", "bf16")),
        losses(runs.make(chosen_task, device)),
    )
    bounds = {"first": FIRST_HALF["bf16"], "every": ALL_HALF["bf16"]}
    assert_near(values, expected, **bounds, record=record_property)
    assert values != expected, "bf16 rounds nothing"


# The latents' first gradients overflow at the usual scale, and a step that is left out moves the curve.
@pytest.mark.parametrize("chosen_task", [task for task in TASKS if task != "dual-encoder-latents"], indirect=True)
def test_float16_with_its_scale_learns_what_float32_learns(
    chosen_task: str, runs: Runs, device: torch.device, record_property: Record
) -> None:
    run = runs.make(chosen_task, device, "--precision", "fp16")
    record_property("num_skipped", numbers(run, "num_skipped")[-1])
    bounds = {"first": FIRST_HALF["fp16"], "every": ALL_HALF["fp16"]}
    assert_near(losses(run), losses(runs.make(chosen_task, device)), **bounds, record=record_property)


def test_an_overflow_is_left_out_and_the_scale_halves_and_grows_again(
    runs: Runs, device: torch.device, is_dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_INITIAL_SCALE", 2.0**17 if is_dry_run else 2.0**40)
    monkeypatch.setattr(precision, "_STEPS_TO_DOUBLE", 2)
    num_steps = 8 if is_dry_run else 50
    # A CPU is slow in float16.
    flags = ("--steps", str(num_steps), "--precision", "fp16", "--batch", "2" if is_dry_run else "8")
    run = runs.make("dual-encoder-latents", device, *flags)
    scales, skipped = numbers(run, "loss_scale"), numbers(run, "num_skipped")
    assert 1 < skipped[-1] < num_steps - 3, "float16 ends at 65504, and such a scale is beyond it"
    for (before, after), (num_before, num_after) in zip(pairwise(scales), pairwise(skipped), strict=True):
        # A line has the scale that its own step was taken with.
        was_skipped = num_before > 0 and before > after
        assert after in (before / 2, before, before * 2)
        assert num_after >= num_before and (not was_skipped or after == before / 2)
    assert any(after == 2 * before for before, after in pairwise(scales)), "it never grew again"
    values = losses(run)
    assert is_dry_run or values[-1] < 0.9 * values[0]
    assert all(bool(weight.isfinite().all()) for weight in weights_of(run).values())


@pytest.mark.parametrize("chosen_task", TASKS, indirect=True)
@pytest.mark.parametrize(
    "flags",
    [
        ("--towers.activation-checkpointing",),
        ("--microbatch", "4"),
        ("--attention", "auto"),
        ("--attention", "xformers"),
    ],
    ids=["activation-checkpointing", "microbatch", "auto", "xformers"],
)
def test_how_a_step_is_computed_changes_no_loss(
    flags: tuple[str, ...], chosen_task: str, runs: Runs, device: torch.device, record_property: Record
) -> None:
    if device.type == "cpu" and "xformers" in flags:
        pytest.skip("xformers needs CUDA by nature: not in the dry run")
    values, expected = losses(runs.make(chosen_task, device, *flags)), losses(runs.make(chosen_task, device))
    assert_near(values, expected, first=FIRST, every=ALL, record=record_property)


def test_an_average_of_weights_changes_no_loss_and_is_another_set_of_weights(
    runs: Runs, device: torch.device, record_property: Record
) -> None:
    plain = runs.make(SHOWN, device)
    averaged = runs.make(SHOWN, device, "--optimizer.ema", "0.9")
    assert_near(losses(averaged), losses(plain), first=FIRST, every=ALL, record=record_property)
    averages, latest = weights_of(averaged), weights_of(plain)
    assert averages.keys() == latest.keys()
    assert any(not torch.allclose(tensor, latest[name], atol=1e-4) for name, tensor in averages.items())


def test_averages_of_weights_are_those_of_the_formula(device: torch.device) -> None:
    model: Any = nn.Linear(33, 17).to(device)
    ema = Ema(model, decay=0.9)
    expected = {name: parameter.detach().double().cpu() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 30):
        decay = min(0.9, (1 + step) / (10 + step))
        for name, parameter in model.named_parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach().double().cpu()
        ema.update(model, step=step)
    for name, parameter in ema.state_dict().items():
        assert parameter.device.type == device.type
        torch.testing.assert_close(parameter.double().cpu(), expected[name], atol=1e-5, rtol=0)
