"""Choice of `--attention auto`, which a run keeps."""

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clipmill.train.models.attention import open_attention
from clipmill.train.models.attention_choice import choose_attention, kernels_fact, previous_backend
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
with_xformers = pytest.mark.skipif(
    torch.version.cuda is None or sys.platform != "linux", reason="xformers dispatches by a torch with CUDA"
)


@pytest.mark.parametrize(
    ("settings", "device", "name"),
    [
        (DualEncoderSettings(), CPU, "sdpa"),
        (DualEncoderSettings(compile=True), CUDA, "sdpa"),
        (DualEncoderSettings(attention="naive"), CUDA, "naive"),
        (DualEncoderSettings(attention="cudnn"), CUDA, "cudnn"),
    ],
)
def test_only_auto_on_a_gpu_has_a_choice(settings: DualEncoderSettings, device: torch.device, name: str) -> None:
    facts = {"attention_choice": "xformers"}
    attention, kept = choose_attention(settings, device=device, products=None, facts=facts)
    assert attention.name == name
    assert kept == facts  # a run that is temporarily resumed on a different machine keeps its choice


@with_xformers
@pytest.mark.parametrize(
    ("capability", "products", "name", "reason"),
    [
        ((9, 0), torch.bfloat16, "xformers", "the device is a GPU"),
        ((7, 5), None, "xformers", "the device is a GPU"),
        ((7, 5), torch.bfloat16, "sdpa", "xformers has no kernel for this precision, GPU and model: No operator found"),
    ],
)
def test_a_gpu_has_xformers_where_it_has_a_kernel(
    capability: tuple[int, int],
    products: torch.dtype | None,
    name: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("xformers.ops")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with FakeTensorMode():
        attention, kept = choose_attention(DualEncoderSettings(), device=CUDA, products=products)
    assert attention.name == name and attention.reason.startswith(reason)
    assert kept == {"attention_choice": name}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    again, kept_again = choose_attention(DualEncoderSettings(), device=CUDA, products=products, facts=kept)
    assert (again.name, again.reason, kept_again) == (name, "the same as when the run started", kept)


@pytest.mark.parametrize(
    "facts", [{}, {"attention": "sdpa"}, {"attention_choice": "?"}, {"attention_choice": ["sdpa"]}]
)
def test_a_run_that_names_no_backend_that_is_here_gets_one(facts: dict[str, Any]) -> None:
    assert previous_backend(facts, device_type="cuda") is None


def test_the_kernels_of_a_run_are_named() -> None:
    settings = DualEncoderSettings(model="tiny", size_px=32)
    fact = kernels_fact(open_attention("auto", device_type="cpu"), settings, device=CPU, products=None)
    assert fact == "flash (CPU) of torch (clips); flash (CPU) of torch (packed captions)"
