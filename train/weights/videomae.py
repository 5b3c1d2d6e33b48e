"""VideoMAE's own checkpoints, of pre-training and of fine-tuning; VideoMAE V2 has the same names.

Fine-tuned checkpoints have the encoder's names without `encoder.`. Queries, keys and values share a matrix without
bias; the biases of queries and values are `attn.q_bias` and `attn.v_bias`, as here. Position embeddings are fixed,
and in no checkpoint. The values of a cube are in the same order (t p p c).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Init
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.weights.conversion import (
    CONV,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Format,
    NameTable,
    SourceFacts,
    Tensors,
    any_begins,
)
from clipmill.train.weights.exported import Exported
from clipmill.train.weights.files import colours

CHECKPOINT_FILE = "checkpoint.pth"
# What other vision Transformers with the same names have, and VideoMAE does not.
CLASS_TOKENS = ("cls_token", "embeddings.cls_token")
_MASK_TOKEN = "decoder.mask_token"
_EPS, _RGB, _IMAGE_DIMS, _CUBE_DIMS = 1e-6, 3, 4, 5
_BLOCK = {
    "ln_1.*": "norm1.*",
    "attn.in_proj_weight": "attn.qkv.weight",
    "attn.q_bias": "attn.q_bias",
    "attn.v_bias": "attn.v_bias",
    "attn.out_proj.*": "attn.proj.*",
    "ln_2.*": "norm2.*",
    "mlp.c_fc.*": "mlp.fc1.*",
    "mlp.c_proj.*": "mlp.fc2.*",
}
# What is alike in VideoMAE's names and in those of transformers.
SHARED_NAMES = {
    "decoder.embed.weight": "encoder_to_decoder.weight",
    _MASK_TOKEN: "mask_token",
    "decoder.ln_post.*": "decoder.norm.*",
    "decoder.head.*": "decoder.head.*",
    "fc_norm.*": "fc_norm.*",
}


def to_our_layout(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A flat mask token; patches instead of cubes of one frame."""
    if name == _MASK_TOKEN:
        return tensor.flatten()
    return tensor[:, :, 0] if name == CONV and tensor.ndim == _CUBE_DIMS and tensor.shape[2] == 1 else tensor


def to_their_layout(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The mask token as [1, 1, D]; cubes of one frame instead of patches."""
    if name == _MASK_TOKEN:
        return tensor[None, None]
    return tensor[:, :, None] if name == CONV and tensor.ndim == _IMAGE_DIMS else tensor


def _with_encoder(name: str) -> str:
    return f"encoder.{name}" if name.startswith(("patch_embed.", "blocks.", "norm.")) else name


NAMES = NameTable(
    owner="VideoMAE",
    names={
        "video.conv1.*": "encoder.patch_embed.proj.*",
        **{f"video.transformer.resblocks.N.{ours}": f"encoder.blocks.N.{theirs}" for ours, theirs in _BLOCK.items()},
        "video.ln_post.*": "encoder.norm.*",
        **{f"decoder.transformer.resblocks.N.{ours}": f"decoder.blocks.N.{theirs}" for ours, theirs in _BLOCK.items()},
        **SHARED_NAMES,
        "head.*": "head.*",
    },
    canonical=_with_encoder,
    to_ours=to_our_layout,
    to_theirs=to_their_layout,
)
from_videomae = NAMES.read


def to_videomae(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Our tensors as a state dict of VideoMAE, of fine-tuning if a classifier's are among them.

    Raises:
        ValueError: VideoMAE has no such parameter.
    """
    state = NAMES.write(tensors)
    return {name.removeprefix("encoder."): one for name, one in state.items()} if "head.weight" in tensors else state


def exported_checkpoint(trunk: TransformerSize, init: Init, weights: Tensors) -> Exported:
    """checkpoint.pth as VideoMAE's code writes it: `{"model": state dict}`, which `weights_only` reads.

    Raises:
        UserError: VideoMAE's code has no such activation.
    """
    if trunk.activation != VIDEOMAE.facts.activation:
        raise UserError(
            f"VideoMAE's code has no {trunk.activation} (--towers.activation)",
            hint="use --format hf, which does",
            flags=("--towers.activation",),
        )
    remarks = []
    if not math.isclose(trunk.norm_eps, _EPS):
        remarks.append(
            f"VideoMAE's code has layer norms of eps {_EPS:g}, and this run of {trunk.norm_eps:g}: "
            "no checkpoint says it"
        )
    if weights[CONV].shape[1] == _RGB and (init.pixel_mean, init.pixel_std) != (IMAGENET_MEAN, IMAGENET_STD):
        remarks.append(
            "this run normalised pictures otherwise than VideoMAE does (--init.pixel-mean): no checkpoint says it"
        )

    def write(folder: Path) -> None:
        state = {name: tensor.detach().clone() for name, tensor in to_videomae(weights).items()}
        torch.save({"model": state}, folder / CHECKPOINT_FILE)

    return Exported(write=write, remarks=tuple(remarks))


# What configurations of VideoMAE V2 may turn on, and the towers here do not have.
_V2_OPTIONS = ("init_values", "use_learnable_pos_emb", "cos_attn", "qk_scale")


def facts_of_videomae_v2(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> SourceFacts:
    """Facts from the config.json of a model that VideoMAE V2's authors published with code of its own.

    Raises:
        UserError: the model computes something that the towers here do not.
    """
    model = config.get("model_config")
    if not isinstance(model, dict):
        raise UserError(f"{source}: config.json has no model_config", hint="get the folder again")
    for name in _V2_OPTIONS:
        if model.get(name):
            raise UserError(
                f"{source}: {name} is {model[name]!r}, which the towers here do not have",
                hint="use the weights of a plain VideoMAE",
            )
    return SourceFacts(
        activation="gelu",
        video_eps=float(model.get("layer_norm_eps", _EPS)),
        mean=colours(preprocess.get("image_mean")),
        std=colours(preprocess.get("image_std")),
        video_heads=model.get("num_heads"),
    )


VIDEOMAE = Format(
    name="videomae",
    title="VideoMAE",
    convert=from_videomae,
    matches=lambda names: (
        any_begins(names, "encoder.patch_embed.", "encoder.blocks.")
        or (any_begins(names, "patch_embed.", "blocks.") and not any_begins(names, *CLASS_TOKENS))
    ),
    facts=SourceFacts(activation="gelu", video_eps=_EPS, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    model_types=("VideoMAEv2*",),
    read_config=facts_of_videomae_v2,
)
