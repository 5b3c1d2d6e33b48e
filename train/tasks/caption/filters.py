"""Which tokens may be drawn, and how likely each is: pure functions of logits.

Shape suffixes: R rows, W words of the vocabulary. What must not be drawn has the logit -inf.
"""

import torch


def warmed(logits_RW: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits at a temperature: below 1 the likely becomes likelier."""
    return logits_RW / temperature


def among_likeliest(logits_RW: torch.Tensor, top_k: int) -> torch.Tensor:
    """The K likeliest tokens alone (Fan et al. 2018, section 5.4), and those that are as likely as the K-th."""
    if top_k >= logits_RW.shape[1]:
        return logits_RW
    least_R1 = logits_RW.topk(top_k, dim=1).values[:, -1:]
    return logits_RW.masked_fill(logits_RW < least_R1, -torch.inf)


def in_nucleus(logits_RW: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest likeliest tokens whose probabilities have `top_p` as their sum (Holtzman et al. 2020, section 3.1)."""
    if top_p >= 1:
        return logits_RW
    sorted_RW, order_RW = logits_RW.sort(dim=1, descending=True, stable=True)
    probabilities_RW = sorted_RW.softmax(dim=1)
    # Those before it do not have enough yet; the first is always in.
    before_RW = probabilities_RW.cumsum(dim=1) - probabilities_RW
    is_out_RW = before_RW >= top_p
    is_out_RW[:, 0] = False
    return logits_RW.masked_fill(is_out_RW.gather(1, order_RW.argsort(dim=1)), -torch.inf)


def drawn(logits_RW: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The token that a number from [0, 1) draws, int64 [R]: tokens share the interval by their probabilities."""
    sums_RW = logits_RW.double().softmax(dim=1).cumsum(dim=1)
    # Sums of probabilities end near 1, not at it.
    wanted_R1 = (uniform_R[:, None] * sums_RW[:, -1:]).to(sums_RW.dtype)
    return torch.searchsorted(sums_RW, wanted_R1, right=True)[:, 0].clamp(max=logits_RW.shape[1] - 1)
