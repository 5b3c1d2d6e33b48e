"""Linear probe: multinomial logistic regression on frozen features, solved to its optimum.

Features are standardised by mean and standard deviation of the training clips. With weights W and biases b, the
objective is

    sum over clips of -log softmax(W x + b)[class]  +  l2 / 2 * |W|^2

in float64 (scikit-learn's C is 1 / l2); biases are not regularised. It is convex, so the result depends on no seed,
learning rate or number of epochs. `choose_l2` chooses l2.

Shape suffixes: M training clips, N clips, D width, K classes, C classes that occur among the training clips.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from train.device.random import uniform

GRID = (1.0, 10.0, 1e2, 1e3, 1e4)
FALLBACK = 10.0
_HELD_OUT = 5  # one video in five
_MAX_STEPS = 2000
_SMALL_GRADIENT = 1e-7


@dataclass(frozen=True)
class LinearProbe:
    """A trained layer.

    Attributes:
        mean_D, scale_D: float64, standardise the features.
        weight_CD, bias_C: float64, on standardised features.
        classes_C: int64, the classes that occur among the training clips.
        gradient: largest absolute entry of the objective's gradient at the solution, divided by the number of clips.
    """

    mean_D: torch.Tensor
    scale_D: torch.Tensor
    weight_CD: torch.Tensor
    bias_C: torch.Tensor
    classes_C: torch.Tensor
    l2: float
    gradient: float

    def scores(self, features_ND: torch.Tensor, *, num_classes: int) -> torch.Tensor:
        """Logits float64 [N, K]; -inf for classes without training clips."""
        logits_NC = (features_ND.double() - self.mean_D) / self.scale_D @ self.weight_CD.T + self.bias_C
        scores_NK = logits_NC.new_full((len(features_ND), num_classes), -torch.inf)
        scores_NK[:, self.classes_C] = logits_NC
        return scores_NK


def fit_linear(features_MD: torch.Tensor, label_M: torch.Tensor, *, l2: float) -> LinearProbe:
    """Train a layer on clips of at least two classes; `label_M` is int64."""
    x_MD = features_MD.double()
    mean_D = x_MD.mean(dim=0)
    scale_D = x_MD.std(dim=0, correction=0)
    # A constant feature becomes 0, not 0 / 0.
    scale_D = torch.where(scale_D > 1e-12 * x_MD.abs().amax(dim=0), scale_D, torch.ones_like(scale_D))
    x_MD = (x_MD - mean_D) / scale_D
    classes_C, target_M = label_M.unique(return_inverse=True)
    decay = l2 / len(x_MD)
    weight_CD, bias_C = _solve(x_MD, target_M, num_classes=len(classes_C), decay=decay)
    gradient = _gradient(x_MD, target_M, weight_CD, bias_C, decay=decay)
    return LinearProbe(mean_D, scale_D, weight_CD, bias_C, classes_C, l2, gradient)


def choose_l2(
    features_MD: torch.Tensor, label_M: torch.Tensor, video_M: NDArray[np.int64], *, grid: Sequence[float] = GRID
) -> float:
    """Choose the l2 of `grid` with the lowest cross-entropy on a held-out fifth of the videos.

    Held-out clips whose class does not occur among the others are ignored. If nothing can be compared (no clip is left,
    or the others are of a single class), l2 is 10.
    """
    held_out_M = torch.from_numpy(held_out(video_M)).to(label_M.device)
    seen = torch.isin(label_M, label_M[~held_out_M])
    scored_M = held_out_M & seen
    if not scored_M.any() or len(label_M[~held_out_M].unique()) < 2:
        return FALLBACK
    num_classes = int(label_M.max()) + 1

    def cross_entropy(l2: float) -> float:
        layer = fit_linear(features_MD[~held_out_M], label_M[~held_out_M], l2=l2)
        scores = layer.scores(features_MD[scored_M], num_classes=num_classes)
        return torch.nn.functional.cross_entropy(scores, label_M[scored_M]).item()

    # Of equal ones, the strongest regularisation.
    return min(sorted(grid, reverse=True), key=cross_entropy)


def held_out(video_M: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which clips are held out: those of a fifth of the videos (rounded up), at random; every fifth of a single video.

    Whole videos, because clips of one video are more similar than clips of two.
    """
    videos = np.unique(video_M)
    if len(videos) < 2:
        return np.arange(len(video_M)) % _HELD_OUT == _HELD_OUT - 1
    drawn = uniform(videos, 1, seed=0, purpose="held out of a probe's training")[:, 0]
    return np.isin(video_M, videos[np.argsort(drawn)[: -(-len(videos) // _HELD_OUT)]])


@torch.enable_grad()
def _solve(
    x_MD: torch.Tensor, target_M: torch.Tensor, *, num_classes: int, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """L-BFGS on the mean over clips, preconditioned.

    At W = 0 the Hessian is (covariance / classes + decay) for each class. In coordinates in which it is the identity,
    nearly collinear features do not slow down the convergence.
    """
    variance_D, axes_DD = torch.linalg.eigh(x_MD.T @ x_MD / len(x_MD))
    stretch_D = (variance_D.clamp(min=0) / num_classes + decay).rsqrt()
    z_MD = x_MD @ axes_DD * stretch_D
    # Zero weights, and the biases that are optimal with them.
    u_CD = x_MD.new_zeros(num_classes, x_MD.shape[1], requires_grad=True)
    v_C = (torch.bincount(target_M, minlength=num_classes).double() / len(target_M)).log() / num_classes**0.5
    v_C.requires_grad_()
    search = torch.optim.LBFGS(
        [u_CD, v_C],
        max_iter=_MAX_STEPS,
        max_eval=2 * _MAX_STEPS,
        history_size=20,
        tolerance_grad=_SMALL_GRADIENT,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def objective() -> torch.Tensor:
        search.zero_grad()
        loss: torch.Tensor = torch.nn.functional.cross_entropy(z_MD @ u_CD.T + v_C * num_classes**0.5, target_M)
        loss = loss + decay / 2 * (u_CD * stretch_D).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    step: Any = search.step
    step(objective)
    return (u_CD.detach() * stretch_D) @ axes_DD.T, v_C.detach() * num_classes**0.5


def _gradient(
    x_MD: torch.Tensor, target_M: torch.Tensor, weight_CD: torch.Tensor, bias_C: torch.Tensor, *, decay: float
) -> float:
    error_MC = (x_MD @ weight_CD.T + bias_C).softmax(dim=1)
    error_MC[torch.arange(len(error_MC), device=error_MC.device), target_M] -= 1
    by_weight = error_MC.T @ x_MD / len(x_MD) + decay * weight_CD
    return max(by_weight.abs().max().item(), error_MC.mean(dim=0).abs().max().item())
