"""Selection of parameters by name and shape: frozen parts, and groups for learning rate and weight decay.

In addition to the keys of torch.optim, groups have three keys, which are also saved in checkpoints:

    lr_scale       factor of the learning rate (layer-wise decay)
    is_objective   True if the parameters belong to the objective, which determines their learning rate
    adapts         True if LAMB applies its trust ratio to the parameters
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.train.config.model import FrozenPart

# Parts of parameter names that DDP, torch.compile, activation checkpointing and peft add.
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|module|base_layer)\.")
# Names of blocks in clipmill and in libraries. Stages of convolutional networks (`stages.0`, `layer1`) count as blocks.
_BLOCK = re.compile(
    r"(?P<tower>(?:.*?\.)??)(?:(?:transformer|encoder)\.)?"
    r"(?:(?:resblocks|blocks|layers?|stages|block|h)\.|layer(?=\d))(?P<number>\d+)\."
)
# Names of layers before the first block of a tower. All other layers outside blocks count as after the last block.
_STEM = re.compile(
    r"(?:^|\.)(?:\w*embedding\w*|\w*token|conv\d|bn\d|ln_pre|norm_pre|pre_\w*norm|patch\w*|pos_embed|embedder"
    r"|embed|embed_\w+|wte|wpe|word_embeddings)(?:\.|$)"
)
# Names of embeddings, which get no weight decay.
_EMBEDDING = re.compile(r"(?:^|\.)(?:\w*embedding\w*|\w*_token|pos_embed|embed_\w+|wte|wpe|embed_in)(?:\.weight)?$")

# Substrings in the names of cross-attention parameters, which a GPT-2 trained only on text lacks.
CROSS_ATTENTION = (".cross_attn.", ".ln_cross.")


def parameter_groups(
    model: nn.Module, objective: nn.Module, *, weight_decay: float, layer_decay: float, adapts_all: bool
) -> list[dict[str, Any]]:
    """Return parameter groups with all trainable parameters, in an order that depends only on parameter names.

    Weight decay applies to the model's matrices. It does not apply to gains, biases and embeddings (class, positional,
    temporal, token), nor to the objective (a temperature, FastCLIP procedure 5).

    Args:
        adapts_all: True to apply LAMB's trust ratio to all tensors of the model, not only to tensors with weight decay.
    """
    trained_parameters = {
        plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    heights = layers_above(trained_parameters, depths=block_counts(model))
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in trained_parameters.items():
        decays = parameter.ndim >= 2 and not _EMBEDDING.search(name)
        # Without layer-wise decay, all layers share the same groups.
        height = heights[name] if layer_decay != 1 else 0
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
    ordered_groups = [groups[key] for key in sorted(groups, key=lambda key: (key[0], not key[1]))]
    if not ordered_groups:
        # All layers of this pipeline stage are frozen, but an optimizer needs at least one group.
        ordered_groups = [
            {"params": [], "weight_decay": 0.0, "lr_scale": 1.0, "is_objective": False, "adapts": adapts_all}
        ]
    objective_parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    if objective_parameters:
        ordered_groups.append(
            {
                "params": objective_parameters,
                "weight_decay": 0.0,
                "lr_scale": 1.0,
                "is_objective": True,
                "adapts": False,
            }
        )
    return ordered_groups


def rename_as_in(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors from plain names to the names that the model uses."""
    names = {plain_name(name): name for name in model.state_dict()}
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers such as DDP and torch.compile add."""
    return _WRAPPERS.sub("", name)


def block_counts(model: nn.Module) -> dict[str, int]:
    """Return the number of blocks of each tower of a model, keyed by the name of the tower with a trailing dot.

    The numbers come from the modules, because a pipeline stage lacks the parameters of other stages.
    """
    return _largest_numbers(f"{plain_name(name)}." for name, _ in model.named_modules())


def _largest_numbers(names: Iterable[str]) -> dict[str, int]:
    depths: dict[str, int] = {}
    for match in filter(None, map(_BLOCK.match, names)):
        depths[match["tower"]] = max(depths.get(match["tower"], 0), int(match["number"]) + 1)
    return depths


def layers_above(names: Iterable[str], *, depths: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the number of layers above each parameter in its tower: 0 for a head, 1 for the last block, ...

    A tower is any module with numbered blocks. All layers before the first block form the lowest layer. Layer-wise
    decay (BEiT, VideoMAE) multiplies a parameter's learning rate by decay ** layers_above.

    Args:
        depths: Number of blocks of each tower; required if `names` lacks some blocks. Default: derived from `names`.
    """
    names = list(names)
    blocks = {name: match for name in names if (match := _BLOCK.match(name))}
    depths = _largest_numbers(names) if depths is None else depths
    layers = {}
    for name in names:
        if name in blocks:
            layers[name] = depths[blocks[name]["tower"]] - int(blocks[name]["number"])
            continue
        towers = [tower for tower in depths if name.startswith(tower)]
        # A parameter belongs to the innermost tower that contains it.
        tower = max(towers, key=len, default=None)
        is_stem = tower is not None and _STEM.search(name[len(tower) :]) is not None
        layers[name] = depths[tower] + 1 if tower is not None and is_stem else 0
    return layers


def set_training_mode(model: nn.Module) -> None:
    """Put a model into training mode, but keep modules whose parameters are all frozen in evaluation mode.

    Frozen batch norms then keep their statistics, and frozen parts apply no dropout.
    """
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def freeze(model: nn.Module, parts: Iterable[FrozenPart]) -> None:
    """Freeze parts of a complete model. Frozen parameters have no gradient, no optimizer state and no moving average.

    The first blocks of a tower are frozen together with all layers before them (embeddings, `ln_pre`), so that no layer
    below the trained blocks needs an autograd graph.

    Raises:
        UserError: A tower has fewer blocks than --freeze specifies.
    """
    parameters, depths = dict(model.named_parameters()), block_counts(model)
    heights = layers_above(parameters, depths=depths)
    for part in parts:
        prefix = f"{part.tower}."
        # In language models and towers from libraries, blocks are nested deeper.
        depth = max((count for tower, count in depths.items() if tower.startswith(prefix)), default=0)
        if part.num_blocks is not None and part.num_blocks > depth:
            raise UserError(
                f"--freeze {part.value} is too large: the {part.tower} tower has only {count_noun(depth, 'block')}",
                hint=f"freeze at most {count_noun(depth, 'block')}, or the complete tower with --freeze {part.tower}",
                flags=("--freeze",),
            )
        for name, parameter in parameters.items():
            is_cross = any(substring in name for substring in CROSS_ATTENTION)
            if not name.startswith(prefix) or (part.trains_cross_attention and is_cross):
                continue
            if part.num_blocks is None or heights[name] > depth - part.num_blocks:
                parameter.requires_grad_(False)
