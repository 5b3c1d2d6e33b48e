"""How often the right class comes first, and how often it would by always naming the most frequent classes.

The rank of a clip's class is 1 + the number of other classes that score at least as high: ties count against what is
probed, and features that are all alike are right nowhere.

Shape suffixes: N clips, M clips of the bank, K classes.
"""

from dataclasses import asdict, dataclass

import torch


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
    """Of N >= 1 clips whose classes have these scores, which are not NaN."""
    right_N1 = scores_NK.gather(1, label_N[:, None])
    # The right class itself is not below itself: it counts as the 1.
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
    """Of always naming the most frequent classes of the bank, the lower one where two are as frequent."""
    count_K = torch.bincount(bank_M, minlength=num_classes)
    order_K = count_K.sort(descending=True, stable=True).indices
    scores_K = torch.empty(num_classes, dtype=torch.float64, device=bank_M.device)
    scores_K[order_K] = -torch.arange(num_classes, dtype=torch.float64, device=bank_M.device)
    return accuracy(scores_K.expand(len(label_N), -1), label_N)
