"""Precision: the loss scale of fp16 compared with torch's, and the dtype of each computation."""

import pytest
import torch
from torch import nn

from clipmill.train.device.precision import Precision, open_precision
from clipmill.train.optim.optimizer import clip_gradients


def test_without_a_gpu_a_model_computes_in_float32_and_says_why() -> None:
    precision = open_precision("auto", device_type="cpu")
    assert (precision.name, precision.reason) == ("fp32", "the device is a CPU")
    assert open_precision("bf16", device_type="cpu").reason == "requested by --precision bf16"


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)])
def test_products_are_in_the_precision_and_weights_in_float32(name: str, dtype: torch.dtype | None) -> None:
    precision = open_precision(name, device_type="cpu")  # type: ignore[arg-type]
    model = nn.Linear(4, 4)
    with precision.autocast():
        output = model(torch.full((1, 4), 0.5))
    assert output.dtype == (dtype or torch.float32)
    loss = precision.scale(output.float().mean())
    loss.backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32
    assert 8 * model.weight.grad.max() == precision.loss_scale == (65536 if name == "fp16" else 1)


def test_only_tf32_rounds_float32() -> None:
    try:
        for name, matmul in (("tf32", "high"), ("bf16", "highest"), ("fp32", "highest")):
            open_precision(name, device_type="cpu")  # type: ignore[arg-type]
            assert torch.get_float32_matmul_precision() == matmul
            assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
    finally:
        open_precision("fp32", device_type="cpu")


def test_the_scale_moves_as_torchs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with finite and non-finite gradients are taken with clipmill's scale and with torch.amp.GradScaler."""
    monkeypatch.setattr("clipmill.train.device.precision._STEPS_TO_DOUBLE", 3)
    ours, theirs = nn.Linear(3, 1), nn.Linear(3, 1)
    theirs.load_state_dict(ours.state_dict())
    our_optimizer, their_optimizer = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs))
    precision = open_precision("fp16", device_type="cpu")
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    num_skipped = 0
    for factor in (1.0, float("inf"), 2.0, 3.0, *[1.0] * 7, float("nan"), 1.0):
        x = torch.full((2, 3), factor)
        our_optimizer.zero_grad()
        precision.scale(ours(x).sum()).backward()
        norm = clip_gradients(ours.parameters(), max_norm=1.0, loss_scale=precision.loss_scale)
        if precision.accepts(norm):
            our_optimizer.step()
        else:
            num_skipped += 1
        their_optimizer.zero_grad()
        scaler.scale(theirs(x).sum()).backward()
        scaler.unscale_(their_optimizer)
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        scaler.step(their_optimizer)
        scaler.update()
        assert precision.loss_scale == scaler.get_scale()
        torch.testing.assert_close(ours.weight, theirs.weight)
    assert precision.num_skipped == num_skipped == 2
    resumed = Precision("fp16", "", "cpu")
    resumed.load_state_dict(precision.state_dict())
    assert resumed.state_dict() == precision.state_dict() == {"loss_scale": 131072.0, "num_skipped": 2, "num_good": 1}


def test_other_precisions_leave_out_no_step() -> None:
    precision = open_precision("fp32", device_type="cpu")
    assert precision.accepts(float("inf"))
    assert precision.state_dict() == {"loss_scale": 1.0, "num_skipped": 0, "num_good": 0}
