"""Names of Hugging Face's VideoMAEForPreTraining and VideoMAEForVideoClassification.

ours                                    theirs
video.conv1.*                           videomae.embeddings.patch_embeddings.projection.*
video.transformer.resblocks.N.*         videomae.encoder.layer.N.*
...attn.in_proj_weight                  ...attention.attention.{query,key,value}.weight
...attn.q_bias, attn.v_bias             ...attention.attention.{q_bias,v_bias}, or {query,value}.bias
video.ln_post.*                         videomae.layernorm.*            (only where use_mean_pooling is false)
decoder.embed.weight                    encoder_to_decoder.weight
decoder.mask_token, [D]                 mask_token, [1, 1, D]
decoder.transformer.resblocks.N.*       decoder.decoder_layers.N.*
decoder.ln_post.*, decoder.head.*       decoder.norm.*, decoder.head.*
fc_norm.*, head.*                       fc_norm.*, classifier.*

A bare VideoMAEModel has the same names without `videomae.`. Files have `q_bias` and `v_bias`, whatever the version of
transformers that wrote them calls these parameters itself, but for some versions 5. The values of a cube are in the
same order (t p p c).
"""

import re
from collections.abc import Sequence
from typing import Any

import torch

from train.config.training import ClipSettings
from train.models.transformer import TransformerSize
from train.weights.converted import IMAGENET_MEAN, IMAGENET_STD, Converted, Tensors, convert_names
from train.weights.videomae_format import FROM_VIDEOMAE, MASK_TOKEN, as_videomae

_SINGLE = {
    "video.conv1.weight": "videomae.embeddings.patch_embeddings.projection.weight",
    "video.conv1.bias": "videomae.embeddings.patch_embeddings.projection.bias",
    "video.ln_post.weight": "videomae.layernorm.weight",
    "video.ln_post.bias": "videomae.layernorm.bias",
    "decoder.embed.weight": "encoder_to_decoder.weight",
    MASK_TOKEN: "mask_token",
    "decoder.ln_post.weight": "decoder.norm.weight",
    "decoder.ln_post.bias": "decoder.norm.bias",
    "decoder.head.weight": "decoder.head.weight",
    "decoder.head.bias": "decoder.head.bias",
    "fc_norm.weight": "fc_norm.weight",
    "fc_norm.bias": "fc_norm.bias",
    "head.weight": "classifier.weight",
    "head.bias": "classifier.bias",
}
_BLOCK = {
    "ln_1.weight": "layernorm_before.weight",
    "ln_1.bias": "layernorm_before.bias",
    "attn.q_bias": "attention.attention.q_bias",
    "attn.v_bias": "attention.attention.v_bias",
    "attn.out_proj.weight": "attention.output.dense.weight",
    "attn.out_proj.bias": "attention.output.dense.bias",
    "ln_2.weight": "layernorm_after.weight",
    "ln_2.bias": "layernorm_after.bias",
    "mlp.c_fc.weight": "intermediate.dense.weight",
    "mlp.c_fc.bias": "intermediate.dense.bias",
    "mlp.c_proj.weight": "output.dense.weight",
    "mlp.c_proj.bias": "output.dense.bias",
}
_JOINED, _IN_PROJ = "attention.attention.qkv.weight", "attn.in_proj_weight"
# Some versions of transformers give keys a bias. It adds the same to all scores of a query, which softmax takes out.
_KEY_BIAS = "attention.attention.key.bias"
_SINGLE_BACK = {theirs: ours for ours, theirs in _SINGLE.items()}
_BLOCK_BACK = {theirs: ours for ours, theirs in _BLOCK.items()} | {
    "attention.attention.query.bias": "attn.q_bias",
    "attention.attention.value.bias": "attn.v_bias",
    _JOINED: _IN_PROJ,
}
_LAYERS = {"video": "videomae.encoder.layer", "decoder": "decoder.decoder_layers"}
_OURS = re.compile(r"(video|decoder)\.transformer\.resblocks\.(\d+)\.(.+)")
_THEIRS = re.compile(r"(videomae\.encoder\.layer|decoder\.decoder_layers)\.(\d+)\.(.+)")
_QUERY = re.compile(r"(.+\.\d+\.attention\.attention)\.query\.weight")
# What a bare VideoMAEModel has without `videomae.`.
_OF_MODEL = ("embeddings.", "encoder.layer.", "layernorm.")


def our_name(name: str) -> str | None:
    """Our name of a tensor of VideoMAE in which queries, keys and values have been joined, or None."""
    if name.startswith(_OF_MODEL):
        name = f"videomae.{name}"
    if match := _THEIRS.fullmatch(name):
        part = _BLOCK_BACK.get(match[3])
        tower = "decoder" if match[1] == _LAYERS["decoder"] else "video"
        return f"{tower}.transformer.resblocks.{match[2]}.{part}" if part else None
    return _SINGLE_BACK.get(name)


def from_hf_videomae(state: Tensors) -> Converted:
    """A state dict of one of VideoMAE's models under our names."""
    found = convert_names(_joined(state), our_name, no_weights=(_KEY_BIAS,), transforms=FROM_VIDEOMAE)
    origins = {ours: theirs.replace(".qkv.", ".{query,key,value}.") for ours, theirs in found.origins.items()}
    return Converted(tensors=found.tensors, origins=origins, unknown=found.unknown, ignored=found.ignored)


def to_hf_videomae(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Our tensors as a state dict of VideoMAEForPreTraining, or with a classifier's of VideoMAEForVideoClassification.

    Raises:
        ValueError: a tensor has a name that VideoMAE knows nothing like.
    """
    state = {}
    for name, tensor in tensors.items():
        match = _OURS.fullmatch(name)
        if name in _SINGLE:
            state[_SINGLE[name]] = as_videomae(name, tensor)
        elif match and match[3] == _IN_PROJ:
            for part, third in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                state[f"{_LAYERS[match[1]]}.{match[2]}.attention.attention.{part}.weight"] = third
        elif match and match[3] in _BLOCK:
            state[f"{_LAYERS[match[1]]}.{match[2]}.{_BLOCK[match[3]]}"] = tensor
        else:
            raise ValueError(f"VideoMAE has no place for {name}")
    return state


def _joined(state: Tensors) -> dict[str, torch.Tensor]:
    """The tensors with q, k and v of a block in one; where one of the three is missing, all stay as they are."""
    joined = dict(state)
    for name in state:
        if match := _QUERY.fullmatch(name):
            parts = [f"{match[1]}.{part}.weight" for part in ("query", "key", "value")]
            if all(part in state and state[part].shape == state[name].shape for part in parts):
                joined[f"{match[1]}.qkv.weight"] = torch.cat([joined.pop(part) for part in parts])
    return joined


# The configuration files beside weights of transformers' VideoMAE: pure functions of sizes and settings.


_BILINEAR = 2  # as PIL numbers it


def encoder_config(trunk: TransformerSize, *, cube: tuple[int, int, int], num_frames: int, side: int) -> dict[str, Any]:
    """What config.json says of an encoder.

    Args:
        cube: channels, frames and side of a cube.
        side: of the square that is cut into cubes.
    """
    num_channels, tubelet, patch = cube
    return {
        "model_type": "videomae",
        "image_size": side,
        "patch_size": patch,
        "num_channels": num_channels,
        "num_frames": num_frames,
        "tubelet_size": tubelet,
        "hidden_size": trunk.width,
        "num_hidden_layers": trunk.depth,
        "num_attention_heads": trunk.num_heads,
        "intermediate_size": 4 * trunk.width,
        "hidden_act": trunk.activation,
        "layer_norm_eps": trunk.norm_eps,
        # Old versions of transformers read this name, and new ones take it for qv_bias.
        "qkv_bias": True,
    }


def pretraining_config(encoder: dict[str, Any], decoder: TransformerSize) -> dict[str, Any]:
    """config.json of VideoMAEForPreTraining."""
    return {
        "architectures": ["VideoMAEForPreTraining"],
        **encoder,
        # This alone gives its encoder a last layer norm.
        "use_mean_pooling": False,
        "norm_pix_loss": True,
        "decoder_hidden_size": decoder.width,
        "decoder_num_hidden_layers": decoder.depth,
        "decoder_num_attention_heads": decoder.num_heads,
        "decoder_intermediate_size": 4 * decoder.width,
    }


def classifier_config(encoder: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """config.json of VideoMAEForVideoClassification."""
    return {
        "architectures": ["VideoMAEForVideoClassification"],
        **encoder,
        "use_mean_pooling": True,
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
        "problem_type": "single_label_classification",
    }


def videomae_preprocessor_config(settings: ClipSettings) -> dict[str, Any]:
    """preprocessor_config.json: the short side to size, the centre square, normalised."""
    return {
        "image_processor_type": "VideoMAEImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": settings.size_px},
        "resample": _BILINEAR,
        "do_center_crop": True,
        "crop_size": {"height": settings.size_px, "width": settings.size_px},
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": list(settings.init.pixel_mean or IMAGENET_MEAN),
        "image_std": list(settings.init.pixel_std or IMAGENET_STD),
    }
