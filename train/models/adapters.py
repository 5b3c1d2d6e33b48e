"""Low-rank adapters (LoRA, Hu et al. 2021): y = W x + s B A x, with the matrix W frozen and A and B trained.

Adapters are parameters of the layers that they adapt: `LAYER.lora.A` and `LAYER.lora.B` beside `LAYER.weight`, and for
the fused projection of self-attention beside `ATTENTION.in_proj_weight`. All linear layers of a block are `Adaptable`.

Shape suffixes: I input width, O output width, R rank.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Lora, Target

if TYPE_CHECKING:
    from peft import LoraConfig

# Names of the two matrices: of our layers, and of peft's, which adapt those of libraries.
_SUFFIXES = ((".lora.A", ".lora.B"), (".lora_A.default.weight", ".lora_B.default.weight"))
# A language model keeps its adapters, which are exported beside it; some of its matrices are [I, O].
_LANGUAGE = "decoder."


class LowRank(nn.Module):
    """The product s B A as a linear layer. As in peft, B is initially zero, and A like the weight of a linear layer."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.A = nn.Parameter(torch.empty(rank, num_inputs))
        self.B = nn.Parameter(torch.zeros(num_outputs, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, x: Tensor, *, arranged: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """s B A x, [..., O] of [..., I]; `arranged` reorders the rows of a matrix, as the caller did with W."""
        B = self.B if arranged is None else arranged(self.B)
        return linear(linear(x, self.A), B) * self.scale

    def matrix(self) -> Tensor:
        """s B A, [O, I]."""
        return self.B @ self.A * self.scale


class Adaptable(nn.Module):
    """A layer with one matrix, and an adapter of it or None.

    Attributes:
        matrix_name: of the matrix [O, I] among the parameters.
    """

    matrix_name = "weight"
    lora: LowRank | None

    def product(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        arranged: Callable[[Tensor], Tensor] | None = None,
        multiply: Callable[..., Tensor] = linear,
    ) -> Tensor:
        """W x + bias, with the adapter if there is one; `arranged` reorders the rows of W, but not `bias`."""
        weight: Tensor = getattr(self, self.matrix_name)
        weight = weight if arranged is None else arranged(weight)
        if self.lora is None:
            return multiply(x, weight, bias)
        # First, so that a recomputation need not repeat the larger product
        # (clipmill.train.models.timesformer.linear_of).
        added = self.lora(x, arranged=arranged)
        return multiply(x, weight, bias) + added

    def whole_matrix(self) -> Tensor:
        """W, or W + s B A, [O, I]."""
        weight: Tensor = getattr(self, self.matrix_name)
        return weight if self.lora is None else weight + self.lora.matrix()


class Linear(nn.Linear, Adaptable):
    """A linear layer of a block."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.lora = None

    def forward(self, x: Tensor) -> Tensor:
        """Its output [..., O]."""
        return self.product(x, self.bias)


def add_adapters(
    tower: nn.Module, *, rank: int, scale: float, targets: Collection[Target], frozen: Collection[int] = ()
) -> None:
    """Add adapters to the layers of a tower's blocks, and freeze everything else.

    Args:
        targets: attention: the projections of self- and cross-attention (and TimeSformer's `time_proj`); mlp: both
            layers of MLPs.
        frozen: ids of parameters whose layers get none.
    """
    layers = {name: one for name, one in tower.named_modules() if isinstance(one, Adaptable)}
    tower.requires_grad_(False)
    for name, layer in layers.items():
        matrix: Tensor = getattr(layer, layer.matrix_name)
        target: Target = "mlp" if ".mlp." in name else "attention"
        if target in targets and id(matrix) not in frozen:
            layer.lora = LowRank(matrix.shape[1], matrix.shape[0], rank=rank, scale=scale).to(matrix.device)


def peft_config(
    model: nn.Module,
    lora: Lora,
    *,
    blocks: Iterable[nn.Module],
    frozen: Collection[int] = (),
    transposed: tuple[type[nn.Module], ...] = (),
    **more: Any,
) -> "LoraConfig":
    """peft's adapters of a module of a library: of the linear layers and attention of its blocks.

    Args:
        frozen: as in `add_adapters`.
        transposed: classes of linear layers with a matrix [I, O].
        more: for peft.

    Raises:
        UserError: peft is not installed, or no layer is left.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("adapters of a library's model need peft", hint="pip install 'clipmill[lora]'") from error
    inside = {id(module) for block in blocks for module in block.modules()}
    wanted: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        attends = isinstance(module, nn.MultiheadAttention)
        if id(module) not in inside or not (attends or isinstance(module, (nn.Linear, *transposed))):
            continue
        matrix = module.in_proj_weight if attends else module.weight
        target: Target = "attention" if attends or "attn" in name.lower() or "attention" in name.lower() else "mlp"
        is_within = any(name.startswith(f"{one}.") for one in wanted)  # of attention that is adapted as a whole
        if target in lora.targets and id(matrix) not in frozen and not is_within:
            wanted[name] = module
    if not wanted:
        raise UserError(
            f"--lora.targets {' '.join(lora.targets)}: the blocks of this {type(model).__name__} have no linear layers "
            "of that kind",
            hint="use other --lora.targets, train it without --lora.rank, or name another tower with --lora.towers",
            flags=("--lora.targets",),
        )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or lora.rank,
        target_modules=list(wanted),
        fan_in_fan_out=any(isinstance(one, transposed) for one in wanted.values()),
        **more,
    )


def add_library_adapters(
    tower: nn.Module, lora: Lora, *, blocks: Iterable[nn.Module], frozen: Collection[int] = ()
) -> None:
    """`add_adapters` for a module of a library, by peft.

    Raises:
        UserError: as `peft_config`.
    """
    config = peft_config(tower, lora, blocks=blocks, frozen=frozen)
    from peft import inject_adapter_in_model

    tower.requires_grad_(False)
    inject_adapter_in_model(config, tower)


def remove_adapters(model: nn.Module) -> None:
    """Remove the adapters of a model, except for those of a language model."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Adaptable):
            module.lora = None
        for name, child in [] if path.startswith(_LANGUAGE) else list(module.named_children()):
            while hasattr(child, "lora_A") and isinstance(inner := getattr(child, "base_layer", None), nn.Module):
                child = inner  # of peft
                setattr(module, name, child)


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter's two matrices."""
    return name.endswith(tuple(chain(*_SUFFIXES)))


def merge_adapters(tensors: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """The weights of a model without adapters that computes the same: W + s B A, computed in float64.

    Those of a language model stay as they are.
    """
    kept = {name for name in tensors if name.startswith(_LANGUAGE) and name.endswith(_SUFFIXES[1])}
    found = {name: one for name, one in tensors.items() if name in kept or not is_of_adapter(name)}
    for name, a_RI in tensors.items():
        for first, second in _SUFFIXES:
            if name in kept or not name.endswith(first):
                continue
            layer = name.removesuffix(first)
            matrix = next(one for one in (f"{layer}.weight", f"{layer}.in_proj_weight") if one in found)
            added_OI = tensors[layer + second].double() @ a_RI.double() * scale
            found[matrix] = (found[matrix].double() + added_OI).to(found[matrix].dtype)
    return found
