"""What `--attention auto` becomes: by what is measured, by what a run began with, and what is never measured."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from clipmill.train.config.training import ClipSettings
from clipmill.train.engine import attention_choice
from clipmill.train.engine.attention_choice import Choice, as_before, choose_attention, kernels_fact
from clipmill.train.models.attention import Attend, attend_naively, attend_with_sdpa, open_attention
from clipmill.train.models.attention_kernels import Workload, fastest, measure
from clipmill.train.registry import task_named
from clipmill.train.tasks.caption.settings import CaptionerSettings
from clipmill.train.tasks.dual_encoder.settings import DualEncoderSettings
from clipmill.train.tasks.dual_encoder.task import workloads_of
from clipmill.train.tasks.mae.settings import MaeSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = Workload(num_items=2, num_tokens=9, num_heads=2, head_width=8, num_blocks=3)
PACKED = Workload(num_items=1, num_tokens=9, num_heads=2, head_width=8, num_blocks=1, lengths=(2, 3, 4))
MEASURED = Choice("cudnn", {"xformers": 4.0, "cudnn": 2.5}, {"flash": "no kernel"})


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        ({"xformers": 4.0, "sdpa": 3.0, "cudnn": 2.0}, "cudnn"),
        ({"xformers": 4.0, "sdpa": 3.95, "cudnn": 3.9}, "xformers"),  # no clear gain
        ({"xformers": 4.0, "sdpa": 3.0, "cudnn": 2.95}, "sdpa"),
        ({"sdpa": 1.0}, "sdpa"),
    ],
)
def test_the_fastest_is_taken_where_the_gain_is_clear(milliseconds: dict[str, float], expected: str) -> None:
    assert fastest(milliseconds) == expected


ON_CUDA: dict[str, Any] = {"workloads": workloads_of, "device": CUDA, "products": torch.bfloat16}


def test_what_fails_is_left_out_and_named() -> None:
    def fails(*_: torch.Tensor, **__: object) -> torch.Tensor:
        raise NotImplementedError("no kernel\nfor such a shape")

    candidates: dict[str, Attend] = {"sdpa": attend_with_sdpa, "naive": attend_naively, "broken": fails}
    speeds = measure(candidates, [SMALL, PACKED], dtype=torch.float32, device=CPU)
    assert speeds.milliseconds.keys() == {"sdpa", "naive"} and min(speeds.milliseconds.values()) > 0
    assert speeds.failed == {"broken": "no kernel"}


def test_a_measurement_draws_no_random_numbers_of_the_run() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    measure({"sdpa": attend_with_sdpa}, [SMALL], dtype=torch.float32, device=CPU)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (DualEncoderSettings(), ["8 x 785 tokens, 12 heads of 64", "1 x 103 packed tokens, 8 heads of 64"]),
        (DualEncoderSettings(text_tower="frozen"), ["8 x 785 tokens, 12 heads of 64"]),
        (MaeSettings(), ["8 x 160 tokens, 12 heads of 64"]),
        (CaptionerSettings(), ["8 x 8 tokens, 2352 heads of 64", "64 x 197 tokens, 12 heads of 64"]),
    ],
)
def test_the_shapes_are_those_of_the_runs_towers(settings: ClipSettings, expected: list[str]) -> None:
    assert [str(workload) for workload in task_named(settings.command).workloads(settings, 8)] == expected


def test_a_large_batch_is_measured_by_a_part_of_it() -> None:
    for settings in (DualEncoderSettings(), MaeSettings(), CaptionerSettings()):
        for workload in task_named(settings.command).workloads(settings, 100_000):
            width = workload.num_heads * workload.head_width
            assert workload.num_items * workload.num_tokens * width <= 16_384 * 768


@pytest.mark.parametrize(
    ("settings", "device", "name"),
    [
        (DualEncoderSettings(), CPU, "sdpa"),
        (DualEncoderSettings(compile=True), CUDA, "sdpa"),
        (DualEncoderSettings(attention="naive"), CUDA, "naive"),
        (DualEncoderSettings(attention="cudnn"), CUDA, "cudnn"),
    ],
)
def test_only_auto_on_a_gpu_is_measured(
    settings: DualEncoderSettings, device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "_measure", None)  # whoever calls it fails
    attention, kept = choose_attention(
        settings, workloads=workloads_of, device=device, products=None, facts={"attention_choice": asdict(MEASURED)}
    )
    assert attention.name == name
    assert kept == {"attention_choice": asdict(MEASURED)}  # a run that goes on elsewhere for a while does not forget


def test_a_run_begins_with_what_was_measured_and_goes_on_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "_measure", lambda *_, **__: MEASURED)
    attention, kept = choose_attention(DualEncoderSettings(), **ON_CUDA)
    assert attention.name == "cudnn"
    assert attention.reason == "the fastest here: xformers 4.00 ms, cudnn 2.50 ms; not flash: no kernel"
    monkeypatch.setattr(attention_choice, "_measure", None)
    again, kept_again = choose_attention(DualEncoderSettings(), **ON_CUDA, facts=kept)
    assert (again.name, again.reason, kept_again) == ("cudnn", "as when the run began", kept)


@pytest.mark.parametrize("facts", [{}, {"attention": "sdpa"}, {"attention_choice": {"name": "?"}}])
def test_a_run_that_names_no_kernel_that_is_here_is_measured(facts: dict[str, Any]) -> None:
    assert as_before(facts, device_type="cuda") is None


def test_the_kernels_of_a_run_are_named() -> None:
    settings = DualEncoderSettings(model="tiny", size_px=32)
    said = kernels_fact(
        open_attention("auto", device_type="cpu"), settings, workloads=workloads_of, device=CPU, products=None
    )
    assert said == "flash (CPU) of torch (17 tokens); flash (CPU) of torch (captions)"
