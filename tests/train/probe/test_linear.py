"""The linear probe: its optimum computed by other means, and the choice of its regularization."""

import numpy as np
import pytest
import torch

from clipmill.train.evaluation.probe_classifiers import (
    FALLBACK,
    GRID,
    LinearProbe,
    choose_held_out,
    choose_l2,
    fit_linear,
)

CLASSES = torch.tensor([1, 4, 5])


def clips(num: int, *, seed: int, noise: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of very different sizes, two of them nearly equal, and classes that nearly follow from them."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num, 4, generator=draw)
    label = CLASSES[(hidden[:, :3] + noise * torch.randn(num, 3, generator=draw)).argmax(dim=1)]
    alike = hidden[:, :1] + 1e-3 * torch.randn(num, 1, generator=draw)
    return torch.cat([hidden, alike], dim=1) * torch.tensor([1.0, 1e3, 1e-2, 1.0, 5.0]) + 7, label


def objective(
    features: torch.Tensor, label: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, l2: float
) -> torch.Tensor:
    """Return the minimized objective from its definition, divided by the number of clips."""
    x = features.double()
    x = (x - x.mean(dim=0)) / x.std(dim=0, correction=0)
    target = torch.searchsorted(CLASSES, label)
    logits = x @ weight.T + bias
    return -logits.log_softmax(dim=1)[range(len(x)), target].mean() + l2 / len(x) / 2 * (weight**2).sum()


def newton(features: torch.Tensor, label: torch.Tensor, *, l2: float) -> torch.Tensor:
    """Return weights and biases [C, D + 1], computed by Newton's method on the complete Hessian."""
    num_classes, width = len(CLASSES), features.shape[1]
    theta = torch.zeros(num_classes * (width + 1), dtype=torch.float64)

    def value(flat: torch.Tensor) -> torch.Tensor:
        table = flat.view(num_classes, width + 1)
        # A common offset of all biases changes nothing, so this term makes the Hessian nonsingular.
        return objective(features, label, table[:, :-1], table[:, -1], l2=l2) + 0.5 * table[:, -1].sum() ** 2

    for _ in range(30):
        hessian = torch.autograd.functional.hessian(value, theta)
        gradient = torch.autograd.functional.jacobian(value, theta)
        theta = theta - torch.linalg.solve(hessian, gradient)
    return theta.view(num_classes, width + 1)


@pytest.mark.parametrize("l2", [1.0, 30.0, 1e3])
def test_it_is_the_optimum_that_newton_finds(l2: float) -> None:
    features, label = clips(200, seed=0)
    layer = fit_linear(features, label, l2=l2)
    expected = newton(features, label, l2=l2)
    assert layer.classes_C.tolist() == CLASSES.tolist() and layer.gradient < 1e-6
    assert torch.allclose(layer.weight_CD, expected[:, :-1], atol=1e-4)
    # Biases are determined only up to a common offset.
    assert torch.allclose(layer.bias_C - layer.bias_C.mean(), expected[:, -1] - expected[:, -1].mean(), atol=1e-4)


def test_the_gradient_of_the_objective_is_zero_where_it_says_so() -> None:
    features, label = clips(60, seed=1)
    layer = fit_linear(features, label, l2=2.0)
    weight, bias = (value.clone().requires_grad_() for value in (layer.weight_CD, layer.bias_C))
    objective(features, label, weight, bias, l2=2.0).backward()
    assert weight.grad is not None and bias.grad is not None
    largest = max(weight.grad.abs().max().item(), bias.grad.abs().max().item())
    assert largest < 1e-6 and layer.gradient == pytest.approx(largest, abs=1e-9)


def test_it_does_not_depend_on_chance_or_on_the_scale_of_features() -> None:
    features, label = clips(80, seed=2)
    fit = fit_linear(features, label, l2=10.0)
    torch.rand(3)
    assert torch.equal(fit_linear(features, label, l2=10.0).weight_CD, fit.weight_CD)
    other = fit_linear(features * torch.tensor([10.0, 1e-3, 1.0, 3.0, 1.0]) - 4, label, l2=10.0)
    assert torch.allclose(other.weight_CD, fit.weight_CD, atol=1e-3)


def test_logits_of_classes_without_clips_are_below_all_and_constant_features_say_nothing() -> None:
    features, label = clips(50, seed=3)
    features[:, 2] = 0.3
    layer = fit_linear(features, label, l2=2.0)
    scores = layer.scores(features, num_classes=7)
    assert scores.shape == (50, 7) and (scores[:, [0, 2, 3, 6]] == -torch.inf).all()
    assert scores[:, CLASSES].isfinite().all() and layer.weight_CD[:, 2].abs().max() < 1e-6


def test_whole_videos_are_held_out() -> None:
    video = np.repeat(np.arange(12), 7)
    held = choose_held_out(video)
    assert len(np.unique(video[held])) == 3  # a fifth of 12, rounded up
    assert not set(video[held]) & set(video[~held])
    assert choose_held_out(np.zeros(10, np.int64)).tolist() == [False, False, False, False, True] * 2


def test_l2_is_the_one_with_which_held_out_videos_are_told_best() -> None:
    features, label = clips(150, seed=4, noise=8.0)
    video = np.arange(150) // 3
    held = torch.from_numpy(choose_held_out(video))

    def naive(l2: float) -> float:
        layer: LinearProbe = fit_linear(features[~held], label[~held], l2=l2)
        probabilities = layer.scores(features[held], num_classes=6).softmax(dim=1)
        return -sum(probabilities[row, label[held][row]].log().item() for row in range(int(held.sum())))

    chosen = choose_l2(features, label, video)
    assert chosen == min(GRID, key=naive)
    # The data are almost noise, so strong regularization is best.
    assert chosen >= 10


def test_where_nothing_can_be_compared_l2_is_a_stated_one() -> None:
    features, label = clips(20, seed=5)
    one_video_left = np.array([0] * 10 + [1] * 10)
    label[torch.from_numpy(~choose_held_out(one_video_left))] = 4
    assert choose_l2(features, label, one_video_left) == FALLBACK
