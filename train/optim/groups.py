"""Which parameters share a learning rate and a weight decay. Told by their names and shapes alone.

A group is what torch.optim takes, with three keys of our own, which optimizers keep and checkpoints carry:

    lr_scale       factor of the step's learning rate (layer-wise decay)
    is_objective   whether the parameters are the objective's, whose learning rate the objective decides
    adapts         whether LAMB scales the steps of each tensor by the tensor's norm
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

# What DDP, torch.compile and activation checkpointing put into names.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|module)\.")
_BLOCK = re.compile(r"(?P<tower>(?:.*?\.)??)(?:transformer\.)?(?:resblocks|blocks|layers)\.(?P<number>\d+)\.")
# What a tower has before its first block; all else outside of blocks comes after the last.
_STEM = re.compile(r"(?:^|\.)(?:\w*embedding\w*|\w*token|conv1|ln_pre|patch\w*|embed)(?:\.|$)")
_EMBEDDING = re.compile(r"(?:^|\.)(?:\w*embedding\w*|\w*_token)(?:\.weight)?$")


def parameter_groups(
    model: nn.Module, objective: nn.Module, *, weight_decay: float, layer_decay: float, adapts_all: bool
) -> list[dict[str, Any]]:
    """Groups of all parameters that are trained, in an order that depends on names alone.

    Matrices of the model decay. Gains, biases and embeddings (of classes, places, times, tokens) do not, and nothing
    of the objective's does (a temperature, FastCLIP procedure 5).

    Args:
        adapts_all: LAMB adapts every tensor of the model, not only those that decay.
    """
    trained = {plain_name(name): one for name, one in model.named_parameters() if one.requires_grad}
    above = layers_above(trained)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in trained.items():
        decays = parameter.ndim >= 2 and not _EMBEDDING.search(name)
        # Without layer-wise decay all layers share their groups.
        height = above[name] if layer_decay != 1 else 0
        group = groups.setdefault(
            (height, decays),
            {
                "params": [],
                "weight_decay": weight_decay if decays else 0.0,
                "lr_scale": layer_decay**height,
                "is_objective": False,
                "adapts": decays or adapts_all,
            },
        )
        group["params"].append(parameter)
    found = [groups[key] for key in sorted(groups, key=lambda key: (key[0], not key[1]))]
    if not found:
        # A stage of a pipeline whose layers are frozen; an optimizer must have a group.
        found = [{"params": [], "weight_decay": 0.0, "lr_scale": 1.0, "is_objective": False, "adapts": adapts_all}]
    own = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    if own:
        found.append({"params": own, "weight_decay": 0.0, "lr_scale": 1.0, "is_objective": True, "adapts": False})
    return found


def plain_name(name: str) -> str:
    """A parameter's name without what DDP, torch.compile and checkpointing added."""
    return _WRAPPERS.sub("", name)


def layers_above(names: Iterable[str]) -> dict[str, int]:
    """How many layers of its tower lie above each parameter: 0 for a head, 1 for the last block, ...

    A tower is whatever has numbered blocks; what lies before its blocks is one layer, the lowest. The learning rate
    of a parameter is decay ** layers_above (BEiT's and VideoMAE's layer-wise decay). A tower shallower than its
    neighbour is counted from its own top.
    """
    names = list(names)
    blocks = {name: match for name in names if (match := _BLOCK.match(name))}
    depths: dict[str, int] = {}
    for match in blocks.values():
        depths[match["tower"]] = max(depths.get(match["tower"], 0), int(match["number"]) + 1)
    found = {}
    for name in names:
        if name in blocks:
            found[name] = depths[blocks[name]["tower"]] - int(blocks[name]["number"])
            continue
        towers = [tower for tower in depths if name.startswith(tower)]
        # The innermost tower that holds it.
        tower = max(towers, key=len, default=None)
        is_stem = tower is not None and _STEM.search(name[len(tower) :]) is not None
        found[name] = depths[tower] + 1 if tower is not None and is_stem else 0
    return found
