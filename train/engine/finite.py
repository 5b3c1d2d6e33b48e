"""Whether the numbers of a run are finite: what has become NaN or infinite is no state to go on from, nor to keep."""

from collections.abc import Mapping

import torch

from train.distributed.sharded import local_part
from train.distributed.world import World

_MANY = 3


def not_finite(tensors: Mapping[str, torch.Tensor], *, world: World) -> str | None:
    """Names of the tensors that hold NaN or infinity, a few of them; None where there are none. All ranks call it.

    Each rank looks at its own parts, without copies, and the device is waited for once. Losses keep logarithms, which
    are -inf before the first visit: there only NaN and +inf count.

    Args:
        tensors: by the names of checkpoints, whole or spread over ranks.
    """
    parts = {name: local_part(one) for name, one in tensors.items() if one.is_floating_point()}
    parts = {name: one.detach() for name, one in parts.items() if one.numel()}
    found: set[str] = set()
    by_device: dict[torch.device, list[str]] = {}
    for name, part in parts.items():
        by_device.setdefault(part.device, []).append(name)
    for names in by_device.values():
        # NaN is the least and the highest of what it is in.
        ends_N2 = torch.stack([torch.stack(parts[name].aminmax()).double() for name in names]).cpu()
        is_log_N = torch.tensor([name.startswith("objective.") for name in names])
        is_good_N2 = ends_N2.isfinite() | (is_log_N[:, None] & (ends_N2 == -torch.inf))
        found |= {name for name, is_good in zip(names, is_good_N2.all(dim=1).tolist(), strict=True) if not is_good}
    num_found = world.sum(torch.tensor([float(len(found))]))
    if not num_found.item():
        return None
    all_found = sorted({name for of_rank in world.gather_objects(found) for name in of_rank})
    more = f" and {len(all_found) - _MANY} more" if len(all_found) > _MANY else ""
    return ", ".join(all_found[:_MANY]) + more
