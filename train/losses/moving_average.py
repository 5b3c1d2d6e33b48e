"""FastCLIP's moving averages u of what each clip and each caption sees in its batches, kept as logarithms.

B: pairs of the batch.

exp((s_ij - s_ii) / tau) overflows single precision at tau = 0.01 as soon as another is nearer by 0.89, and is lost
below it where a sample is well told apart; log u has no such ends.
"""

import math

import torch

from train.losses.settings import Convention, GammaSchedule

UNSEEN = -math.inf  # log u before the first visit


def inner_rate(epoch: int, *, least: float, schedule: GammaSchedule, num_epochs: int, convention: Convention) -> float:
    """gamma of an epoch 0, 1, ...: the part of the new in the averages (FastCLIP, section 5).

    It is constant within an epoch. The public code begins the constant schedule, too, with an epoch of gamma = 1.
    """
    if schedule == "constant":
        return 1.0 if convention == "fast_clip" and epoch == 0 else least
    if epoch >= num_epochs:
        return least
    return 0.5 * (1 + math.cos(math.pi * epoch / num_epochs)) * (1 - least) + least


def groups(ids_B: torch.Tensor) -> torch.Tensor:
    """Numbers 0 ... B - 1, int64 [B], equal where ids are; nothing waits for the device."""
    sorted_B, order_B = ids_B.sort(stable=True)
    is_new_B = torch.ones_like(sorted_B)
    is_new_B[1:] = (sorted_B[1:] != sorted_B[:-1]).to(is_new_B)
    return torch.empty_like(order_B).scatter_(0, order_B, is_new_B.cumsum(0) - 1)


def group_means(values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """For each of B the mean over its group."""
    zeros_B = torch.zeros_like(values_B)
    sums_B = zeros_B.index_add(0, group_B, values_B)
    return (sums_B / zeros_B.index_add(0, group_B, torch.ones_like(values_B)).clamp(min=1))[group_B]


def log_group_means(log_values_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """For each of B the logarithm of the mean of exp over its group."""
    highest_B = torch.full_like(log_values_B, -math.inf).scatter_reduce(0, group_B, log_values_B, "amax")[group_B]
    return highest_B + group_means((log_values_B - highest_B).exp(), group_B).log()


def averaged(log_u_B: torch.Tensor, log_g_B: torch.Tensor, group_B: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """log of (1 - gamma) u + gamma g (FastCLIP, eq. 1), the same for all of a group; g itself on the first visit.

    Where an id occurs more than once in a batch, g is the mean over its occurrences, whatever rank they lie on.
    """
    log_g_B = log_group_means(log_g_B, group_B)
    if gamma == 1:
        return log_g_B
    moved_B = torch.logaddexp(log_u_B + math.log(1 - gamma), log_g_B + math.log(gamma))
    return torch.where(log_u_B == UNSEEN, log_g_B, moved_B)
