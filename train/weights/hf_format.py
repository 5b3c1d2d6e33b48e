"""Names of Hugging Face's CLIPModel. q, k and v are matrices of their own there, and projections are transposed.

ours                                    CLIPModel
video.conv1.weight                      vision_model.embeddings.patch_embedding.weight
video.ln_pre.*                          vision_model.pre_layrnorm.*            (spelled so)
video.transformer.resblocks.N.*         vision_model.encoder.layers.N.*
...attn.in_proj_weight, in_proj_bias    ...self_attn.{q,k,v}_proj.{weight,bias}
video.proj                              visual_projection.weight, transposed
"""

import re

import torch

from train.weights.converted import LOGIT_SCALE, TEMPORAL_EMBEDDING, Converted, Tensors, convert_names

_VIDEO = {
    "class_embedding": "embeddings.class_embedding",
    "conv1.weight": "embeddings.patch_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_pre.weight": "pre_layrnorm.weight",
    "ln_pre.bias": "pre_layrnorm.bias",
    "ln_post.weight": "post_layernorm.weight",
    "ln_post.bias": "post_layernorm.bias",
}
_TEXT = {
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}
_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_PROJECTIONS = {"video.proj": "visual_projection.weight", "text.text_projection": "text_projection.weight"}
_SINGLE = {
    **{f"video.{ours}": f"vision_model.{theirs}" for ours, theirs in _VIDEO.items()},
    **{f"text.{ours}": f"text_model.{theirs}" for ours, theirs in _TEXT.items()},
    **_PROJECTIONS,
    LOGIT_SCALE: LOGIT_SCALE,
}
_SINGLE_BACK = {theirs: ours for ours, theirs in _SINGLE.items()}
_BLOCK_BACK = {theirs: ours for ours, theirs in _BLOCK.items()}
_LAYER = re.compile(r"(vision|text)_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_RESBLOCK = re.compile(r"(video|text)\.transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
_QKV = re.compile(r"((?:vision|text)_model\.encoder\.layers\.\d+)\.self_attn\.([qkv])_proj\.(weight|bias)")
_IN_PROJ = re.compile(r"(video|text)\.transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")
_JOINED = re.compile(r"(vision|text)_model\.encoder\.layers\.(\d+)\.in_proj_(weight|bias)")
NO_WEIGHTS = ("position_ids",)


def our_name(name: str) -> str | None:
    """Our name of a tensor of CLIPModel in which q, k and v have been joined, or None."""
    if name in _SINGLE_BACK:
        return _SINGLE_BACK[name]
    if match := _JOINED.fullmatch(name):
        tower, number, kind = match.groups()
        return f"{_our_tower(tower)}.transformer.resblocks.{number}.attn.in_proj_{kind}"
    if (match := _LAYER.fullmatch(name)) and match[3] in _BLOCK_BACK:
        tower, number, part, kind = match.groups()
        return f"{_our_tower(tower)}.transformer.resblocks.{number}.{_BLOCK_BACK[part]}.{kind}"
    return None


def from_hf(state: Tensors) -> Converted:
    """A state dict of CLIPModel under our names."""
    found = convert_names(
        _joined(state), our_name, no_weights=NO_WEIGHTS, transforms=dict.fromkeys(_PROJECTIONS, _transposed)
    )
    origins = {
        ours: re.sub(r"\.in_proj_", ".self_attn.{q,k,v}_proj.", theirs) for ours, theirs in found.origins.items()
    }
    return Converted(tensors=found.tensors, origins=origins, unknown=found.unknown, ignored=found.ignored)


def to_hf(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Our tensors as a state dict of CLIPModel; the temporal embedding has no place there.

    Raises:
        ValueError: a tensor has a name that CLIPModel knows nothing like.
    """
    state = {}
    for name, tensor in tensors.items():
        if name == TEMPORAL_EMBEDDING:
            continue
        if name in _SINGLE:
            state[_SINGLE[name]] = _transposed(tensor) if name in _PROJECTIONS else tensor
        elif match := _IN_PROJ.fullmatch(name):
            tower, number, kind = match.groups()
            for letter, third in zip("qkv", tensor.chunk(3), strict=True):
                state[f"{_their_tower(tower)}.encoder.layers.{number}.self_attn.{letter}_proj.{kind}"] = third
        elif (match := _RESBLOCK.fullmatch(name)) and match[3] in _BLOCK:
            tower, number, part, kind = match.groups()
            state[f"{_their_tower(tower)}.encoder.layers.{number}.{_BLOCK[part]}.{kind}"] = tensor
        else:
            raise ValueError(f"CLIPModel has no place for {name}")
    return state


def _joined(state: Tensors) -> dict[str, torch.Tensor]:
    """The tensors with q, k and v of a block in one; where one of the three is missing, all stay as they are."""
    joined = dict(state)
    for name in state:
        match = _QKV.fullmatch(name)
        if match is None or match[2] != "q":
            continue
        layer, _, kind = match.groups()
        parts = [f"{layer}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        if all(part in state and state[part].shape == state[name].shape for part in parts):
            joined[f"{layer}.in_proj_{kind}"] = torch.cat([joined.pop(part) for part in parts])
    return joined


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous() if tensor.ndim == 2 else tensor


def _our_tower(tower: str) -> str:
    return "video" if tower == "vision" else "text"


def _their_tower(tower: str) -> str:
    return "vision_model" if tower == "video" else "text_model"
