"""Stop a run whose loss, gradients or state are not finite, before anything is saved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manifests.errors import FailedWork
from manifests.publish import publish_json
from train.distributed.sharded import local_part
from train.distributed.step import Step
from train.distributed.world import World
from train.run.folder import RunFolder

_MAX_NAMED = 3


@dataclass(frozen=True)
class BatchIds:
    """Which samples a rank had in a step, for the error message; it holds no pictures, which would fill a GPU.

    Attributes:
        keys: of chunks, as in the batch.
        caption_id: int64 [B] on the CPU; None for batches without captions.
    """

    keys: Sequence[str]
    caption_id: torch.Tensor | None


def require_finite(what: str, value: float, batch: BatchIds, *, step: Step, world: World, run: RunFolder) -> None:
    """Stop all ranks if a value that they share is not finite, and list the samples of all in bad_batch.json.

    Raises:
        FailedWork: the value is NaN or infinite.
    """
    if math.isfinite(value):
        return
    path = run.path / "bad_batch.json"
    own: dict[str, list[Any]] = {"keys": list(batch.keys)}
    if batch.caption_id is not None:
        own["caption_ids"] = batch.caption_id.tolist()
    ranks = step.world.gather_objects(own)
    if world.is_first:
        publish_json(path, {"step": step.number, what: str(value), "ranks": ranks})
    raise FailedWork(f"the {what} is {value} at step {step.number}; the keys of its batch are in {path}")


def require_finite_state(tensors: Mapping[str, torch.Tensor], *, step: int, world: World, run: RunFolder) -> None:
    """Refuse to save a state that no run could continue from; all ranks call it before they save a checkpoint.

    Raises:
        FailedWork: a tensor holds NaN or infinity; all ranks raise it.
    """
    if (names := not_finite(tensors, world=world)) is not None:
        raise FailedWork(
            f"after step {step} these tensors hold values that are not finite (NaN or infinity): {names}; "
            f"no checkpoint is made of them, and those of earlier steps stay in {run.checkpoints}"
        )


def not_finite(tensors: Mapping[str, torch.Tensor], *, world: World) -> str | None:
    """Names of the tensors that hold NaN or infinity, abbreviated; None if all are finite. All ranks call it.

    Each rank checks its own shards without copying them, and waits for the device once. Losses keep logarithms, which
    are -inf until a sample is first seen: there, only NaN and +inf count.

    Args:
        tensors: by their names in checkpoints, whole or sharded.
    """
    parts = {name: local_part(one) for name, one in tensors.items() if one.is_floating_point()}
    parts = {name: one.detach() for name, one in parts.items() if one.numel()}
    found: set[str] = set()
    by_device: dict[torch.device, list[str]] = {}
    for name, part in parts.items():
        by_device.setdefault(part.device, []).append(name)
    for names in by_device.values():
        # aminmax propagates NaN.
        ends_N2 = torch.stack([torch.stack(parts[name].aminmax()).double() for name in names]).cpu()
        is_log_N = torch.tensor([name.startswith("objective.") for name in names])
        is_good_N2 = ends_N2.isfinite() | (is_log_N[:, None] & (ends_N2 == -torch.inf))
        found |= {name for name, is_good in zip(names, is_good_N2.all(dim=1).tolist(), strict=True) if not is_good}
    num_found = world.sum(torch.tensor([float(len(found))]))
    if not num_found.item():
        return None
    all_found = sorted({name for of_rank in world.gather_objects(found) for name in of_rank})
    more = f" and {len(all_found) - _MAX_NAMED} more" if len(all_found) > _MAX_NAMED else ""
    return ", ".join(all_found[:_MAX_NAMED]) + more
