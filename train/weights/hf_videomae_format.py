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

import torch

from train.weights.converted import Converted, Tensors, convert_names
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
