"""Losses that open_clip also implements."""

import math

import open_clip.loss
import pytest
import torch

from clipmill.train.distributed.world import Step
from clipmill.train.losses.settings import Loss
from tests.train.losses.pairs import Table, batch_of, objective_of, settings_of


@pytest.mark.parametrize("kind", ["infonce", "siglip"])
def test_open_clip_has_the_same_loss_and_gradients(kind: str) -> None:
    theirs, ours = Table(6), Table(6)
    scale = torch.tensor(-math.log(0.125), dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-10.0, dtype=torch.float64, requires_grad=True)
    if kind == "infonce":
        loss = open_clip.loss.ClipLoss()(theirs.video, theirs.text, scale.exp())
    else:
        loss = open_clip.loss.SigLipLoss()(theirs.video, theirs.text, scale.exp(), bias)
    loss.backward()
    objective = objective_of(settings_of(kind), table=True)
    numbers = objective.backward(ours, batch_of(0), Step(number=1))
    assert numbers["loss"] == pytest.approx(loss.item(), rel=1e-9)
    torch.testing.assert_close(ours.video.grad, theirs.video.grad)
    torch.testing.assert_close(ours.text.grad, theirs.text.grad)
    parameters = dict(objective.named_parameters())
    torch.testing.assert_close(parameters["logit_scale"].grad, scale.grad)
    if kind == "siglip":
        torch.testing.assert_close(parameters["logit_bias"].grad, bias.grad)


def test_infonce_is_half_of_mbcl_and_a_constant() -> None:
    """The relation is published. OpenCLIP's loss is v0 without memory, with epsilon = 1 / (B - 1)."""
    losses: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    for name, settings in {
        "infonce": settings_of("infonce"),
        "mbcl": settings_of("mbcl", "paper"),
        "v0": settings_of("fastclip-v0", "paper", gamma=1.0, epsilon=1 / 5),
    }.items():
        model = Table(6)
        objective = objective_of(settings, table=True)
        losses[name] = float(objective.backward(model, batch_of(0), Step(number=1))["loss"])
        assert model.video.grad is not None
        gradients[name] = model.video.grad
    assert losses["infonce"] == pytest.approx(losses["mbcl"] / 2 + math.log(5))
    assert losses["v0"] == pytest.approx(losses["mbcl"])
    torch.testing.assert_close(gradients["v0"], gradients["mbcl"])
    torch.testing.assert_close(2 * gradients["infonce"], gradients["mbcl"])


def test_equal_captions_cost_infonce_the_log_of_their_number_and_no_more() -> None:
    """Two clips share one caption. At best, each clip gets half of the probability (log 2), for any temperature."""
    model = Table(4)
    with torch.no_grad():
        eye = torch.eye(5, dtype=torch.float64)[[0, 0, 1, 2]]
        model.video.copy_(eye)
        model.text.copy_(eye)
    batch = batch_of(0)
    batch["caption_id"] = batch["caption_id"][:4]
    objective = objective_of(Loss(kind="infonce", temperature=0.01), table=True)
    numbers = objective.backward(model, batch, Step(number=1))
    assert numbers["loss"] == pytest.approx(math.log(2) / 2, abs=1e-9)  # two of four rows have a loss of log 2
    assert numbers["batch_accuracy"] == 1  # any equal caption counts as correct


def test_half_precision_embeddings_are_compared_in_single() -> None:
    model = Table(6).to(torch.bfloat16)
    objective = objective_of(Loss(kind="infonce", temperature=0.01), table=True)
    with torch.autocast("cpu", torch.bfloat16):
        numbers = objective.backward(model, batch_of(0), Step(number=1))
    video, text = model.video.detach().double(), model.text.detach().double()
    expected = open_clip.loss.ClipLoss()(video, text, 100.0)
    assert numbers["loss"] == pytest.approx(expected.item(), rel=1e-5)
