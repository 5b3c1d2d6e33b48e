"""CLIP's pre-norm transformer with CLIP's parameter names, and low-rank adapters for its layers.

Towers that open_clip, timm or transformers build have their own layers. All other towers use the layers in this file.

Low-rank adapters (LoRA, Hu et al. 2021) compute y = W x + s B A x, where the matrix W is frozen, and A and B are
trained. The adapters are parameters of the layers that they adapt: `LAYER.lora.A` and `LAYER.lora.B` next to
`LAYER.weight`, or next to `ATTENTION.in_proj_weight` for the fused projection of self-attention. All linear layers of a
block are `Adaptable`.

Shape suffixes: B batch (1 for packed sequences, clipmill.train.models.attention), L tokens, D width, H heads, K width
of a head; I input width, O output width, R rank.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Activation, Lora, Target
from clipmill.train.models.attention import Attend, Packing

if TYPE_CHECKING:
    from peft import LoraConfig


# Name suffixes of the matrices A and B in clipmill's layers, and in peft's layers, which adapt modules from libraries.
_SUFFIXES = ((".lora.A", ".lora.B"), (".lora_A.default.weight", ".lora_B.default.weight"))
# Name prefix of a language model. Its adapters are not merged but exported separately. Some of its matrices are [I, O].
_LANGUAGE_PREFIX = "decoder."


class LowRank(nn.Module):
    """Linear layer with the matrix s B A. As in peft, B is initially zero, and A is initialised like a linear layer."""

    def __init__(self, num_inputs: int, num_outputs: int, *, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.A = nn.Parameter(torch.empty(rank, num_inputs))
        self.B = nn.Parameter(torch.zeros(num_outputs, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, x: Tensor, *, arrange: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return s B A x, [..., O] from [..., I].

        Args:
            arrange: Function that reorders the rows of B in the same way as the rows of W.
        """
        B = self.B if arrange is None else arrange(self.B)
        return linear(linear(x, self.A), B) * self.scale

    def matrix(self) -> Tensor:
        """Return the matrix s B A, [O, I]."""
        return self.B @ self.A * self.scale


class Adaptable(nn.Module):
    """Layer with a matrix that may have an adapter.

    Attributes:
        matrix_name: Name of the parameter that is the matrix W, [O, I].
        lora: Adapter of the matrix; None without an adapter.
    """

    matrix_name = "weight"
    lora: LowRank | None

    def product(
        self,
        x: Tensor,
        bias: Tensor | None,
        *,
        arrange: Callable[[Tensor], Tensor] | None = None,
        multiply: Callable[..., Tensor] = linear,
    ) -> Tensor:
        """Return W x + bias, plus the output of the adapter if there is one.

        Args:
            x: Input [..., I].
            bias: Bias, in the order of the reordered rows; None for no bias.
            arrange: Function that reorders the rows of W.
            multiply: Function that computes W x + bias.
        """
        weight: Tensor = getattr(self, self.matrix_name)
        weight = weight if arrange is None else arrange(weight)
        if self.lora is None:
            return multiply(x, weight, bias)
        # Compute the adapter first, so that the recomputation in clipmill.train.models.timesformer.linear_of ends
        # before the larger product.
        adapter_output = self.lora(x, arrange=arrange)
        return multiply(x, weight, bias) + adapter_output

    def effective_weight(self) -> Tensor:
        """Return W or, with an adapter, W + s B A, [O, I]."""
        weight: Tensor = getattr(self, self.matrix_name)
        return weight if self.lora is None else weight + self.lora.matrix()


class Linear(nn.Linear, Adaptable):
    """Linear layer of a block."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.lora = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [..., O]."""
        return self.product(x, self.bias)


def add_adapters(
    tower: nn.Module, *, rank: int, scale: float, targets: Collection[Target], frozen_ids: Collection[int] = ()
) -> None:
    """Add adapters to the layers of a tower's blocks, and freeze all other parameters.

    Args:
        tower: Tower to change.
        rank: Rank R of the adapters.
        scale: Scale s of the adapters.
        targets: Layers to adapt. "attention" means the projections of self- and cross-attention (and TimeSformer's
            `time_proj`), and "mlp" means both layers of the MLPs.
        frozen_ids: IDs (`id`) of parameters whose layers get no adapters.
    """
    layers = {name: module for name, module in tower.named_modules() if isinstance(module, Adaptable)}
    tower.requires_grad_(False)
    for name, layer in layers.items():
        matrix: Tensor = getattr(layer, layer.matrix_name)
        target: Target = "mlp" if ".mlp." in name else "attention"
        if target in targets and id(matrix) not in frozen_ids:
            layer.lora = LowRank(matrix.shape[1], matrix.shape[0], rank=rank, scale=scale).to(matrix.device)


def peft_config(
    model: nn.Module,
    lora: Lora,
    *,
    blocks: Iterable[nn.Module],
    frozen_ids: Collection[int] = (),
    transposed_classes: tuple[type[nn.Module], ...] = (),
    **options: Any,
) -> "LoraConfig":
    """Return peft's configuration of adapters for the linear layers and attention in the blocks of a library's module.

    Args:
        model: Module to adapt.
        lora: Settings of the adapters.
        blocks: Blocks of the module.
        frozen_ids: IDs of parameters whose layers get no adapters, as in `add_adapters`.
        transposed_classes: Classes of linear layers with a matrix [I, O].
        options: Additional arguments for peft.

    Raises:
        UserError: peft is not installed, or no layer can be adapted.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("adapters of a library's model need peft", hint="run `pip install 'clipmill[lora]'`") from error
    block_modules = {id(module) for block in blocks for module in block.modules()}
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_attention = isinstance(module, nn.MultiheadAttention)
        if id(module) not in block_modules or not (
            is_attention or isinstance(module, (nn.Linear, *transposed_classes))
        ):
            continue
        matrix = module.in_proj_weight if is_attention else module.weight
        target: Target = "attention" if is_attention or "attn" in name.lower() or "attention" in name.lower() else "mlp"
        # The layers of a MultiheadAttention are adapted as a unit.
        is_within = any(name.startswith(f"{layer_name}.") for layer_name in layers)
        if target in lora.targets and id(matrix) not in frozen_ids and not is_within:
            layers[name] = module
    if not layers:
        raise UserError(
            f"--lora.targets {' '.join(lora.targets)} matches no linear layer in the blocks of this "
            f"{type(model).__name__}",
            hint="use different --lora.targets, omit --lora.rank, or select a different tower with --lora.towers",
            flags=("--lora.targets",),
        )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or lora.rank,
        target_modules=list(layers),
        fan_in_fan_out=any(isinstance(layer, transposed_classes) for layer in layers.values()),
        **options,
    )


def add_library_adapters(
    tower: nn.Module, lora: Lora, *, blocks: Iterable[nn.Module], frozen_ids: Collection[int] = ()
) -> None:
    """Add adapters to a library's module with peft, as `add_adapters` does for our towers.

    Raises:
        UserError: See `peft_config`.
    """
    config = peft_config(tower, lora, blocks=blocks, frozen_ids=frozen_ids)
    from peft import inject_adapter_in_model

    tower.requires_grad_(False)
    inject_adapter_in_model(config, tower)


def remove_adapters(model: nn.Module) -> None:
    """Remove the adapters of a model, except those in a language model."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Adaptable):
            module.lora = None
        for name, child in [] if path.startswith(_LANGUAGE_PREFIX) else list(module.named_children()):
            while hasattr(child, "lora_A") and isinstance(inner_layer := getattr(child, "base_layer", None), nn.Module):
                child = inner_layer  # layer that peft has wrapped
                setattr(module, name, child)


def merge_adapters(tensors: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """Return the weights of an equivalent model without adapters: W + s B A, computed in float64.

    The adapters of a language model are not merged.
    """
    language_names = {name for name in tensors if name.startswith(_LANGUAGE_PREFIX) and name.endswith(_SUFFIXES[1])}
    suffixes = tuple(chain(*_SUFFIXES))
    merged_tensors = {
        name: tensor for name, tensor in tensors.items() if name in language_names or not name.endswith(suffixes)
    }
    for name, a_RI in tensors.items():
        for a_suffix, b_suffix in _SUFFIXES:
            if name in language_names or not name.endswith(a_suffix):
                continue
            layer = name.removesuffix(a_suffix)
            matrix = next(
                weight for weight in (f"{layer}.weight", f"{layer}.in_proj_weight") if weight in merged_tensors
            )
            added_OI = tensors[layer + b_suffix].double() @ a_RI.double() * scale
            merged_tensors[matrix] = (merged_tensors[matrix].double() + added_OI).to(merged_tensors[matrix].dtype)
    return merged_tensors


NORM_EPS = 1e-5  # CLIP's value
MlpActivation = Activation | Literal["gelu_tanh"]  # gelu_tanh is the tanh approximation of GELU (GPT-2)
_MAX_GRAPHS = 32  # torch.compile's limit on graphs per function is raised to this number


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """Dimensions of a transformer, and the activation and epsilon of its blocks.

    Attributes:
        width: Width D of the tokens.
        depth: Number of blocks.
        num_heads: Number of attention heads.
        activation: Activation of the MLPs.
        norm_eps: Epsilon of layer norms.
        has_key_bias: True for one bias for queries, keys and values (CLIP); False for separate biases for queries and
            values (BEiT). A bias for keys does not change the attention.
        mlp_ratio: Hidden width of the MLPs divided by the width.
    """

    width: int
    depth: int
    num_heads: int
    activation: Activation = "gelu"
    norm_eps: float = NORM_EPS
    has_key_bias: bool = True
    mlp_ratio: float = 4.0

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLPs."""
        return round(self.mlp_ratio * self.width)

    def resize(self, *, width: int | None, depth: int | None, heads: int | None, flag: str) -> "TransformerSize":
        """Return this size with different dimensions. None leaves a dimension unchanged.

        Args:
            width: Width D of the tokens.
            depth: Number of blocks.
            heads: Number of heads; None for heads of the same width as before.
            flag: Prefix of the flags for the dimensions, for the error message.

        Raises:
            UserError: The width is not a multiple of the number of heads.
        """
        new_width = width or self.width
        heads = heads or max(1, new_width * self.num_heads // self.width)
        if new_width % heads:
            raise UserError(
                f"{flag}width {new_width} is not a multiple of the number of heads, {heads}",
                hint=f"use a multiple of {heads}, or a different {flag}heads",
                flags=(f"{flag}width",),
            )
        return replace(self, width=new_width, depth=depth or self.depth, num_heads=heads)


class LayerNorm(nn.LayerNorm):
    """Layer norm that keeps the dtype of its input. Statistics are computed in float32 or wider.

    Autocast would convert input and output to float32, and thus also the residual stream. The inputs of the blocks
    would then take twice the memory, and activation checkpointing keeps little else.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class SelfAttention(Adaptable):
    """Multi-head self-attention with one projection matrix for queries, keys and values."""

    matrix_name = "in_proj_weight"

    def __init__(self, width: int, num_heads: int, *, attend: Attend, has_key_bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_width = num_heads, width // num_heads
        self.attend = attend
        self.has_key_bias = has_key_bias
        self.lora: LowRank | None = None
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        if has_key_bias:
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        else:
            self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        self.out_proj = Linear(width, width)

    def forward(self, x_BLD: Tensor, *, causal: bool, packing: Packing | None) -> Tensor:
        num_items, num_tokens, width = x_BLD.shape
        if self.has_key_bias:
            bias: Tensor = self.in_proj_bias
        else:
            bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = self.product(x_BLD, bias)
        q_BLHK, k_BLHK, v_BLHK = qkv.view(num_items, num_tokens, 3, self.num_heads, -1).unbind(2)
        out_BLHK = self.attend(q_BLHK, k_BLHK, v_BLHK, causal=causal, packing=packing)
        projected: Tensor = self.out_proj(out_BLHK.reshape(num_items, num_tokens, width))
        return projected


class Mlp(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, hidden_width: int, activation: MlpActivation) -> None:
        super().__init__()
        self.c_fc = Linear(width, hidden_width)
        self.c_proj = Linear(hidden_width, width)
        self.activate = _ACTIVATIONS[activation]

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = self.c_proj(self.activate(self.c_fc(x_BLD)))
        return x_BLD


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), as in OpenAI's CLIP; the result differs from GELU by at most 0.021."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[MlpActivation, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "quick_gelu": quick_gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
}


class Block(nn.Module):
    """Pre-norm residual block with attention and an MLP."""

    num_branches = 2

    def __init__(self, size: TransformerSize, *, attend: Attend) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(size.width, eps=size.norm_eps)
        self.attn = SelfAttention(size.width, size.num_heads, attend=attend, has_key_bias=size.has_key_bias)
        self.ln_2 = LayerNorm(size.width, eps=size.norm_eps)
        self.mlp = Mlp(size.width, size.mlp_width, size.activation)
        # CLIP's initialisation: the weights at the end of residual branches are smaller in deeper models.
        residual_std = size.width**-0.5 * (2 * size.depth) ** -0.5
        nn.init.normal_(self.attn.in_proj_weight, std=size.width**-0.5)
        nn.init.normal_(self.attn.out_proj.weight, std=residual_std)
        nn.init.zeros_(self.attn.out_proj.bias)
        nn.init.normal_(self.mlp.c_fc.weight, std=(2 * size.width) ** -0.5)
        nn.init.normal_(self.mlp.c_proj.weight, std=residual_std)

    def forward(
        self, x_BLD: Tensor, *, causal: bool = False, packing: Packing | None = None, branches: Tensor | None = None
    ) -> Tensor:
        """Compute the block's output [B, L, D]; `branches` are the scales from `draw_branch_scales`, [2, B, 1, 1]."""
        attended_BLD = self.attn(self.ln_1(x_BLD), causal=causal, packing=packing)
        x_BLD = x_BLD + (attended_BLD if branches is None else attended_BLD * branches[0])
        mlp_BLD = self.mlp(self.ln_2(x_BLD))
        return x_BLD + (mlp_BLD if branches is None else mlp_BLD * branches[1])


class HasBlocks(nn.Module):
    """Part of a model that consists of blocks, which are the units of sharding, checkpointing and compilation."""

    def blocks(self) -> list[nn.Module]:
        """Return the blocks in order."""
        raise NotImplementedError

    def checkpoint(self) -> None:
        """Enable activation checkpointing of each block."""
        raise NotImplementedError


class Stack(HasBlocks):
    """Sequence of residual blocks.

    Args:
        blocks: Blocks that take tokens [B, L, D] and `branches`, the scales of the block's `num_branches` residual
            branches.
        drop_path: Probability, for each block, of skipping a branch for a sample in training; empty for none.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, drop_path: Sequence[float] = ()) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(blocks)
        self.drop_path = tuple(drop_path) or (0.0,) * len(self.resblocks)
        if len(self.drop_path) != len(self.resblocks):
            raise ValueError(f"{len(self.drop_path)} probabilities for {len(self.resblocks)} blocks")
        self.checkpointing = False  # True for activation checkpointing of each block

    def blocks(self) -> list[nn.Module]:
        """Return the blocks in order."""
        return list(self.resblocks)

    def checkpoint(self) -> None:
        """Enable activation checkpointing of each block."""
        self.checkpointing = True

    def forward(self, x_BLD: Tensor, *context: Tensor, **options: Any) -> Tensor:
        """Run all blocks on tokens [B, L, D]. Each block also gets `context` and `options`."""
        for index in range(len(self.resblocks)):
            x_BLD = self.run(index, x_BLD, *context, **options)
        return x_BLD

    def run(self, index: int, x_BLD: Tensor, *context: Tensor, **options: Any) -> Tensor:
        """Run the block with this index."""
        block: Any = self.resblocks[index]
        # Draw the scales outside of the block, so that compiled or recomputed blocks get the same values. Draw them for
        # all blocks or for none, because blocks share compiled code only if their arguments have the same types.
        is_dropping = block.training and any(self.drop_path)
        branches = draw_branch_scales(x_BLD, self.drop_path[index], count=block.num_branches) if is_dropping else None
        run = partial(block, branches=branches, **options)
        if not self.checkpointing:
            return cast(Tensor, run(x_BLD, *context))
        # Preserve the generator's state only if the block has dropout, because reading it from a GPU costs a copy.
        is_random = self.training and any(isinstance(part, nn.Dropout) and part.p > 0 for part in block.modules())
        return cast(Tensor, checkpoint(run, x_BLD, *context, use_reentrant=False, preserve_rng_state=is_random))


class Transformer(Stack):
    """Stack of CLIP blocks."""

    def __init__(self, size: TransformerSize, *, attend: Attend, drop_path: Sequence[float] = ()) -> None:
        super().__init__((Block(size, attend=attend) for _ in range(size.depth)), drop_path=drop_path)


def draw_branch_scales(x_BLD: Tensor, probability: float, *, count: int = 2) -> Tensor:
    """Draw the scales of a block's branches for each sample, [count, B, 1, 1], from torch's generator.

    A scale is 0 with the given probability, and otherwise 1 / (1 - probability) (stochastic depth, Huang et al. 2016).
    The probability is adjusted so that the mean is 1 in the precision of the tokens. Without the adjustment, the mean
    in bfloat16 would be 0.16 % too small for a probability of 0.1, because 1 / 0.9 is rounded to 1.109.
    """
    scale = float(torch.ones((), dtype=x_BLD.dtype) / (1 - probability))
    kept_nB11 = torch.rand(count, len(x_BLD), 1, 1, device=x_BLD.device) >= 1 - 1 / scale
    return kept_nB11.to(x_BLD.dtype) * scale


def drop_path_of(probability: float, *, depth: int, is_rising: bool) -> tuple[float, ...]:
    """Return the drop-path probability of each block: constant, or rising linearly from 0 to `probability`."""
    if not is_rising or depth == 1:
        return (probability,) * depth
    return tuple(probability * index / (depth - 1) for index in range(depth))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return all blocks of a model, which are the units of sharding, checkpointing and compilation.

    Blocks without parameters on this rank, such as blocks of other pipeline stages, are omitted.
    """
    parts = (module for module in model.modules() if isinstance(module, HasBlocks))
    return [block for part in parts for block in part.blocks() if next(block.parameters(), None) is not None]


def checkpoint_blocks(model: nn.Module) -> None:
    """Enable activation checkpointing of all blocks of a model."""
    for module in list(model.modules()):
        if isinstance(module, HasBlocks):
            module.checkpoint()


def compile_blocks(model: nn.Module, *, backend: str = "inductor", fullgraph: bool = False) -> None:
    """Compile each block in place when it first runs. Parameter names do not change.

    Args:
        model: Model to compile.
        backend: Backend of torch.compile.
        fullgraph: True to raise an error instead of breaking a graph.
    """
    # Training, evaluation, pixels, captions and the last batch need separate graphs, which all blocks share.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
    for block in blocks_of(model):
        block.compile(backend=backend, fullgraph=fullgraph)
