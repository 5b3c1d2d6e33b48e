"""k-NN and linear classifiers for `train eval probe`, and their accuracies.

Weighted k-NN (Wu et al. 2018, "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", section 3.4):
the score of a class is the sum of exp(cosine / temperature) over all clips with this class among the k nearest clips
in the bank of labelled clips. If clips are equally near, the first ones in the bank count. The paper uses k = 200
and a temperature of 0.07; Caron et al. 2021 (DINO, section 3.2) find that k = 20 is best.

Linear probe: multinomial logistic regression on frozen features, solved to its optimum. Features are standardised with
the mean and standard deviation of the training clips. With weights W and biases b, the objective is

    sum over clips of -log softmax(W x + b)[class]  +  l2 / 2 * |W|^2

computed in float64 (scikit-learn's C is 1 / l2). Biases are not regularised. The objective is convex, so the result
does not depend on a seed, a learning rate or a number of epochs. `choose_l2` chooses l2.

The rank of a clip's class is 1 + the number of other classes that score at least as high. Ties count as wrong, so
constant features get no credit.

Shape suffixes: N clips, M clips in the bank or the training set, D width, K classes, k neighbours; C candidates for
neighbours, or classes that occur among the training clips.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.train.config.evaluation import Method, ProbeEvaluation
from clipmill.train.data.classes import ClassList
from clipmill.train.device.random import draw_uniform
from clipmill.train.evaluation.tables import Predictions

_QUERY_BLOCK = 512
_BANK_BLOCK = 16_384


def vote(
    features_ND: torch.Tensor,
    bank_MD: torch.Tensor,
    label_M: torch.Tensor,
    *,
    num_classes: int,
    neighbours: int,
    temperature: float,
) -> torch.Tensor:
    """Return class scores, float64 [N, K], up to a constant factor for each clip. Classes without a neighbour score 0.

    Args:
        features_ND: Features of the clips to classify.
        bank_MD: Features of the clips in the bank.
        label_M: Class of each clip in the bank, int64.
        num_classes: Number of classes K.
        neighbours: Number of neighbours k, at most the size of the bank.
        temperature: Temperature of the weights.
    """
    cosine_Nk, index_Nk = find_nearest(features_ND, bank_MD, neighbours=neighbours)
    # Scale the weights so that the nearest neighbour has weight 1. Otherwise exp() could overflow.
    weight_Nk = ((cosine_Nk - cosine_Nk.amax(dim=1, keepdim=True)).double() / temperature).exp()
    votes_NK = weight_Nk.new_zeros(len(features_ND), num_classes)
    return votes_NK.scatter_add_(1, label_M[index_Nk], weight_Nk)


def find_nearest(
    features_ND: torch.Tensor, bank_MD: torch.Tensor, *, neighbours: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines [N, k] and bank indices, int64 [N, k], of the nearest neighbours, in the order of the bank.

    Similarities are computed in blocks, so that memory does not grow with N * M.
    """
    blocks = [_search_bank(block_ND, bank_MD, neighbours=neighbours) for block_ND in features_ND.split(_QUERY_BLOCK)]
    cosine_Nk, index_Nk = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return cosine_Nk, index_Nk


def _search_bank(
    features_ND: torch.Tensor, bank_MD: torch.Tensor, *, neighbours: int
) -> tuple[torch.Tensor, torch.Tensor]:
    features_ND = torch.nn.functional.normalize(features_ND, dim=1)
    best_Nk = features_ND.new_empty(len(features_ND), 0)
    index_Nk = torch.empty(len(features_ND), 0, dtype=torch.int64, device=features_ND.device)
    for start in range(0, len(bank_MD), _BANK_BLOCK):
        block_CD = torch.nn.functional.normalize(bank_MD[start : start + _BANK_BLOCK], dim=1)
        index_C = torch.arange(start, start + len(block_CD), device=index_Nk.device)
        # Keep the candidates in the order of the bank.
        cosine_NC = torch.cat([best_Nk, features_ND @ block_CD.T], dim=1)
        index_NC = torch.cat([index_Nk, index_C.expand(len(features_ND), -1)], dim=1)
        chosen_Nk = _find_largest(cosine_NC, min(neighbours, cosine_NC.shape[1]))
        best_Nk, index_Nk = cosine_NC.gather(1, chosen_Nk), index_NC.gather(1, chosen_Nk)
    return best_Nk, index_Nk


def _find_largest(values_NC: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ascending indices of each row's largest values, int64 [N, k]. Earlier values win ties."""
    smallest_N1 = values_NC.topk(count, dim=1).values[:, -1:]
    # topk breaks ties arbitrarily, so only the smallest of its values is used, as a threshold.
    is_larger, is_equal = values_NC > smallest_N1, values_NC == smallest_N1
    num_ties_N1 = count - is_larger.sum(dim=1, keepdim=True)
    is_chosen = is_larger | (is_equal & (is_equal.cumsum(dim=1) <= num_ties_N1))
    return is_chosen.nonzero()[:, 1].view(-1, count)


@dataclass(frozen=True)
class Accuracy:
    """Accuracies in [0, 1].

    Attributes:
        top1: Fraction of the clips whose class ranks first.
        top5: Fraction of the clips whose class is among the first five.
        mean_class: Mean of `top1` over the classes that have clips.
    """

    top1: float
    top5: float
    mean_class: float


def class_ranks(scores_NK: torch.Tensor, label_N: torch.Tensor) -> torch.Tensor:
    """Return the rank of each clip's class, int64 [N]; 1 is best."""
    # The class of the clip also counts itself, so the best rank is 1.
    return (scores_NK >= scores_NK.gather(1, label_N[:, None])).sum(dim=1)


def accuracy(scores_NK: torch.Tensor, label_N: torch.Tensor) -> Accuracy:
    """Compute the accuracies for one or more clips from class scores, which must not be NaN."""
    rank_N = class_ranks(scores_NK, label_N)
    is_first = (rank_N == 1).double()
    num_classes = scores_NK.shape[1]
    num_by_class = torch.bincount(label_N, minlength=num_classes)
    first_by_class = torch.bincount(label_N, weights=is_first, minlength=num_classes)
    has_clips = num_by_class > 0
    return Accuracy(
        top1=is_first.mean().item(),
        top5=(rank_N <= 5).double().mean().item(),
        mean_class=(first_by_class[has_clips] / num_by_class[has_clips]).mean().item(),
    )


GRID = (1.0, 10.0, 1e2, 1e3, 1e4)  # candidates for l2
FALLBACK = 10.0  # l2 if the candidates cannot be compared
_NUM_FOLDS = 5  # number of folds of the videos; one fold is held out
_MAX_STEPS = 2000
_GRADIENT_TOLERANCE = 1e-7


@dataclass(frozen=True)
class LinearProbe:
    """Trained linear layer.

    Attributes:
        mean_D: Mean of the training features, float64.
        scale_D: Standard deviation of the training features, float64; 1 for constant features.
        weight_CD: Weights for standardised features, float64.
        bias_C: Biases, float64.
        classes_C: Classes that occur among the training clips, int64.
        l2: Strength of the regularisation.
        gradient: Largest absolute entry of the objective's gradient at the solution, divided by the number of clips.
    """

    mean_D: torch.Tensor
    scale_D: torch.Tensor
    weight_CD: torch.Tensor
    bias_C: torch.Tensor
    classes_C: torch.Tensor
    l2: float
    gradient: float

    def scores(self, features_ND: torch.Tensor, *, num_classes: int) -> torch.Tensor:
        """Return logits, float64 [N, K]; -inf for classes that have no training clips."""
        logits_NC = (features_ND.double() - self.mean_D) / self.scale_D @ self.weight_CD.T + self.bias_C
        scores_NK = logits_NC.new_full((len(features_ND), num_classes), -torch.inf)
        scores_NK[:, self.classes_C] = logits_NC
        return scores_NK


def fit_linear(features_MD: torch.Tensor, label_M: torch.Tensor, *, l2: float) -> LinearProbe:
    """Train a linear layer on clips from at least two classes; `label_M` is int64."""
    x_MD = features_MD.double()
    mean_D = x_MD.mean(dim=0)
    scale_D = x_MD.std(dim=0, correction=0)
    # A constant feature gets the scale 1, so that it becomes 0 instead of 0 / 0.
    scale_D = torch.where(scale_D > 1e-12 * x_MD.abs().amax(dim=0), scale_D, torch.ones_like(scale_D))
    x_MD = (x_MD - mean_D) / scale_D
    classes_C, target_M = label_M.unique(return_inverse=True)
    decay = l2 / len(x_MD)
    weight_CD, bias_C = _solve(x_MD, target_M, num_classes=len(classes_C), decay=decay)
    error_MC = (x_MD @ weight_CD.T + bias_C).softmax(dim=1)
    error_MC[torch.arange(len(error_MC), device=error_MC.device), target_M] -= 1
    weight_gradient_CD = error_MC.T @ x_MD / len(x_MD) + decay * weight_CD
    gradient = max(weight_gradient_CD.abs().max().item(), error_MC.mean(dim=0).abs().max().item())
    return LinearProbe(mean_D, scale_D, weight_CD, bias_C, classes_C, l2, gradient)


def choose_l2(
    features_MD: torch.Tensor, label_M: torch.Tensor, video_M: NDArray[np.int64], *, grid: Sequence[float] = GRID
) -> float:
    """Return the l2 in `grid` with the lowest cross-entropy on a held-out fifth of the videos.

    Held-out clips are ignored if their class does not occur among the other clips. If a comparison is impossible (no
    held-out clip remains, or the other clips have a single class), the result is 10.
    """
    held_out_M = torch.from_numpy(choose_held_out(video_M)).to(label_M.device)
    has_seen_class_M = torch.isin(label_M, label_M[~held_out_M])
    scored_M = held_out_M & has_seen_class_M
    if not scored_M.any() or len(label_M[~held_out_M].unique()) < 2:
        return FALLBACK
    num_classes = int(label_M.max()) + 1

    def cross_entropy(l2: float) -> float:
        layer = fit_linear(features_MD[~held_out_M], label_M[~held_out_M], l2=l2)
        scores = layer.scores(features_MD[scored_M], num_classes=num_classes)
        return torch.nn.functional.cross_entropy(scores, label_M[scored_M]).item()

    # On a tie, the strongest regularisation wins.
    return min(sorted(grid, reverse=True), key=cross_entropy)


def choose_held_out(video_M: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of held-out clips: all clips of a random fifth of the videos, or every fifth clip of one video.

    Complete videos are held out, because clips of the same video are more similar than clips of different videos.
    """
    videos = np.unique(video_M)
    if len(videos) < 2:
        return np.arange(len(video_M)) % _NUM_FOLDS == _NUM_FOLDS - 1
    draws = draw_uniform(videos, 1, seed=0, purpose="held out of a probe's training")[:, 0]
    return np.isin(video_M, videos[np.argsort(draws)[: -(-len(videos) // _NUM_FOLDS)]])


@torch.enable_grad()
def _solve(
    x_MD: torch.Tensor, target_M: torch.Tensor, *, num_classes: int, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimise the objective, divided by the number of clips, with preconditioned L-BFGS.

    At W = 0, the Hessian for each class is covariance / num_classes + decay. The solver works in coordinates in which
    this Hessian is the identity, so nearly collinear features do not slow down convergence.
    """
    variance_D, axes_DD = torch.linalg.eigh(x_MD.T @ x_MD / len(x_MD))
    stretch_D = (variance_D.clamp(min=0) / num_classes + decay).rsqrt()
    z_MD = x_MD @ axes_DD * stretch_D
    # Start from zero weights, and from the biases that are optimal for zero weights.
    u_CD = x_MD.new_zeros(num_classes, x_MD.shape[1], requires_grad=True)
    v_C = (torch.bincount(target_M, minlength=num_classes).double() / len(target_M)).log() / num_classes**0.5
    v_C.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [u_CD, v_C],
        max_iter=_MAX_STEPS,
        max_eval=2 * _MAX_STEPS,
        history_size=20,
        tolerance_grad=_GRADIENT_TOLERANCE,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = torch.nn.functional.cross_entropy(z_MD @ u_CD.T + v_C * num_classes**0.5, target_M)
        loss = loss + decay / 2 * (u_CD * stretch_D).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    step: Any = optimizer.step
    step(objective)
    return (u_CD.detach() * stretch_D) @ axes_DD.T, v_C.detach() * num_classes**0.5


@dataclass(frozen=True)
class LabelledFeatures:
    """Features from a tower, with the labels of the clips.

    Attributes:
        features_ND: Features, float32.
        label_NL: Class of each clip for each label, int64, on the device of the features; -1 for no class.
        video_N: Index of each clip's video, int64.
    """

    features_ND: torch.Tensor
    label_NL: torch.Tensor
    video_N: NDArray[np.int64]

    def select_label(self, index: int) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
        """Return the features, classes and videos of the clips that have a class for the label with this index."""
        has_label = self.label_NL[:, index] >= 0
        return self.features_ND[has_label], self.label_NL[has_label, index], self.video_N[has_label.cpu().numpy()]


@dataclass(frozen=True)
class ProbeResult:
    """Accuracy of a method on a label. All fields except `predictions` are stored in result files.

    Attributes:
        label: Name of the label.
        method: Classifier.
        accuracies: Accuracies of the probe, stored as `found`.
        num_samples: Number of queries.
        num_bank: Number of labelled clips in the bank.
        num_classes: Number of classes that occur in the split of the queries or in the split of the bank.
        num_unseen: Number of queries whose class does not occur in the bank. Their predictions are always wrong.
        num_unseen_classes: Number of classes that occur among the queries, but not in the bank.
        predictions: Predictions for the queries.
        l2: See `LinearProbe`; None for k-NN.
        gradient: See `LinearProbe`; None for k-NN.
    """

    label: str
    method: Method
    accuracies: Accuracy
    num_samples: int
    num_bank: int
    num_classes: int
    num_unseen: int
    num_unseen_classes: int
    predictions: Predictions
    l2: float | None = None
    gradient: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the entry of a result file, without the predictions."""
        names = [field.name for field in fields(self) if field.name not in ("accuracies", "predictions")]
        return {**{name: getattr(self, name) for name in names}, "found": asdict(self.accuracies)}


def probe(
    queries: LabelledFeatures, bank: LabelledFeatures, *, evaluation: ProbeEvaluation, classes: Sequence[ClassList]
) -> list[ProbeResult]:
    """Probe the features of a tower with every method on every label.

    Raises:
        FailedWork: For one of the labels, no query could be decoded, or the decoded clips of the bank have fewer than
            two classes.
    """
    # Disable autocast, because it would change the cosines in the third digit.
    with torch.autocast(queries.features_ND.device.type, enabled=False):
        return [
            _probe(queries, bank, index=index, label=label, method=method, evaluation=evaluation)
            for index, label in enumerate(classes)
            for method in evaluation.methods
        ]


def _probe(
    queries: LabelledFeatures,
    bank: LabelledFeatures,
    *,
    index: int,
    label: ClassList,
    method: Method,
    evaluation: ProbeEvaluation,
) -> ProbeResult:
    features_ND, label_N, _ = queries.select_label(index)
    bank_MD, bank_label_M, bank_video_M = bank.select_label(index)
    num_bank_classes = len(bank_label_M.unique())
    if not len(label_N) or num_bank_classes < 2:
        raise FailedWork(
            f"label {label.label}: only {count_noun(len(label_N), 'clip')} to score and training clips of only "
            f"{count_noun(num_bank_classes, 'class', 'classes')} could be decoded"
        )
    l2 = gradient = None
    if method == "knn":
        scores_NK = vote(
            features_ND,
            bank_MD,
            bank_label_M,
            num_classes=len(label),
            neighbours=evaluation.neighbours,
            temperature=evaluation.temperature,
        )
    else:
        l2 = choose_l2(bank_MD, bank_label_M, bank_video_M)
        layer = fit_linear(bank_MD, bank_label_M, l2=l2)
        scores_NK, gradient = layer.scores(features_ND, num_classes=len(label)), layer.gradient
    unseen_N = label_N[~torch.isin(label_N, bank_label_M)]
    return ProbeResult(
        label=label.label,
        method=method,
        accuracies=accuracy(scores_NK, label_N),
        num_samples=len(label_N),
        num_bank=len(bank_label_M),
        num_classes=len(label),
        num_unseen=len(unseen_N),
        num_unseen_classes=len(unseen_N.unique()),
        predictions=Predictions.of(scores_NK, label_N, rank_N=class_ranks(scores_NK, label_N)),
        l2=l2,
        gradient=gradient,
    )
