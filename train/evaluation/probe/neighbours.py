"""Weighted k-NN classification (Wu et al. 2018, "Unsupervised Feature Learning via Non-Parametric Instance
Discrimination", section 3.4), and the accuracy of class scores.

The score of a class is the sum of exp(cosine / temperature) over those of the k nearest clips of the bank that belong
to it. Of equally near clips, those that come first in the bank are taken. The paper uses k = 200 and a temperature of
0.07; Caron et al. 2021 (DINO, section 3.2) find k = 20 best.

The rank of a clip's class is 1 + the number of other classes that score at least as high: ties count as wrong, so that
features that are all equal get no credit.

Shape suffixes: N clips, M clips of the bank, D width, K classes, k neighbours, C candidates.
"""

from dataclasses import asdict, dataclass

import torch

_QUERIES_AT_ONCE = 512
_BANK_AT_ONCE = 16_384


def vote(
    features_ND: torch.Tensor,
    bank_MD: torch.Tensor,
    label_M: torch.Tensor,
    *,
    num_classes: int,
    neighbours: int,
    temperature: float,
) -> torch.Tensor:
    """Class scores, float64 [N, K], up to a factor per clip; 0 for classes without a neighbour.

    Args:
        label_M: int64, classes of the bank's clips.
        neighbours: k, or the size of the bank if that is smaller.
    """
    cosine_Nk, place_Nk = nearest(features_ND, bank_MD, neighbours=neighbours)
    # The nearest neighbour's weight is 1: exp() of large numbers would overflow.
    weight_Nk = ((cosine_Nk - cosine_Nk.amax(dim=1, keepdim=True)).double() / temperature).exp()
    votes_NK = weight_Nk.new_zeros(len(features_ND), num_classes)
    return votes_NK.scatter_add_(1, label_M[place_Nk], weight_Nk)


def nearest(features_ND: torch.Tensor, bank_MD: torch.Tensor, *, neighbours: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosines [N, k], indices into the bank int64 [N, k]) of the nearest neighbours, in the order of the bank.

    Similarities are computed in blocks, so that memory does not grow with N * M.
    """
    blocks = [
        _nearest_of_block(block_ND, bank_MD, neighbours=neighbours) for block_ND in features_ND.split(_QUERIES_AT_ONCE)
    ]
    cosine_Nk, place_Nk = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return cosine_Nk, place_Nk


def _nearest_of_block(
    features_ND: torch.Tensor, bank_MD: torch.Tensor, *, neighbours: int
) -> tuple[torch.Tensor, torch.Tensor]:
    features_ND = torch.nn.functional.normalize(features_ND, dim=1)
    best_Nk = features_ND.new_empty(len(features_ND), 0)
    place_Nk = torch.empty(len(features_ND), 0, dtype=torch.int64, device=features_ND.device)
    for begin in range(0, len(bank_MD), _BANK_AT_ONCE):
        block_CD = torch.nn.functional.normalize(bank_MD[begin : begin + _BANK_AT_ONCE], dim=1)
        places_C = torch.arange(begin, begin + len(block_CD), device=place_Nk.device)
        # Candidates stay in the order of the bank.
        cosine_NC = torch.cat([best_Nk, features_ND @ block_CD.T], dim=1)
        place_NC = torch.cat([place_Nk, places_C.expand(len(features_ND), -1)], dim=1)
        chosen_Nk = _largest(cosine_NC, min(neighbours, cosine_NC.shape[1]))
        best_Nk, place_Nk = cosine_NC.gather(1, chosen_Nk), place_NC.gather(1, chosen_Nk)
    return best_Nk, place_Nk


def _largest(values_NC: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest values of each row, int64 [N, k] ascending; of equal ones the first."""
    least_N1 = values_NC.topk(count, dim=1).values[:, -1:]
    # topk takes any of equal values.
    is_more, is_equal = values_NC > least_N1, values_NC == least_N1
    num_missing_N1 = count - is_more.sum(dim=1, keepdim=True)
    is_chosen = is_more | (is_equal & (is_equal.cumsum(dim=1) <= num_missing_N1))
    return is_chosen.nonzero()[:, 1].view(-1, count)


@dataclass(frozen=True)
class Accuracy:
    """Shares in [0, 1].

    Attributes:
        top1, top5: of the clips whose class is first, or among the first five.
        mean_class: top1 of each class that has clips, averaged over these classes.
    """

    top1: float
    top5: float
    mean_class: float

    def as_json(self) -> dict[str, float]:
        """Plain values by name."""
        return asdict(self)


def accuracy(scores_NK: torch.Tensor, label_N: torch.Tensor) -> Accuracy:
    """Accuracy of N >= 1 clips from scores of their classes, which are not NaN."""
    right_N1 = scores_NK.gather(1, label_N[:, None])
    # The right class scores at least as high as itself: it is the 1.
    rank_N = (scores_NK >= right_N1).sum(dim=1)
    is_first = (rank_N == 1).double()
    num_classes = scores_NK.shape[1]
    num_of_class = torch.bincount(label_N, minlength=num_classes)
    first_of_class = torch.bincount(label_N, weights=is_first, minlength=num_classes)
    there = num_of_class > 0
    return Accuracy(
        top1=is_first.mean().item(),
        top5=(rank_N <= 5).double().mean().item(),
        mean_class=(first_of_class[there] / num_of_class[there]).mean().item(),
    )


def chance(bank_M: torch.Tensor, label_N: torch.Tensor, *, num_classes: int) -> Accuracy:
    """Accuracy of always predicting the most frequent classes of the bank; of equally frequent ones, the lower."""
    count_K = torch.bincount(bank_M, minlength=num_classes)
    order_K = count_K.sort(descending=True, stable=True).indices
    scores_K = torch.empty(num_classes, dtype=torch.float64, device=bank_M.device)
    scores_K[order_K] = -torch.arange(num_classes, dtype=torch.float64, device=bank_M.device)
    return accuracy(scores_K.expand(len(label_N), -1), label_N)
