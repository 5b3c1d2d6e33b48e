"""Hugging Face's CLIPModel: names and configuration. q, k and v are matrices of their own, projections transposed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.models.dual_encoder import DualEncoderSize
from clipmill.train.weights.conversion import LOGIT_SCALE, Format, NameTable, SourceFacts, any_begins
from clipmill.train.weights.exported import save_json
from clipmill.train.weights.files import as_config, colours

_OUR_BLOCK, _LAYER = "transformer.resblocks.N", "encoder.layers.N"
_PROJECTIONS = {"video.proj": "visual_projection.weight", "text.text_projection": "text_projection.weight"}
_START_TOKEN_ID = 49406
# transformers ends captions at the largest id where a configuration says 2, as files of old versions do.
_OLD_END_TOKEN_ID = 2


def _tower_names(ours: str, theirs: str) -> dict[str, str]:
    rows = {
        "positional_embedding": "embeddings.position_embedding.weight",
        f"{_OUR_BLOCK}.attn.in_proj_*": f"{_LAYER}.self_attn.{{q,k,v}}_proj.*",
        f"{_OUR_BLOCK}.attn.out_proj.*": f"{_LAYER}.self_attn.out_proj.*",
        f"{_OUR_BLOCK}.mlp.c_fc.*": f"{_LAYER}.mlp.fc1.*",
        f"{_OUR_BLOCK}.mlp.c_proj.*": f"{_LAYER}.mlp.fc2.*",
        f"{_OUR_BLOCK}.ln_1.*": f"{_LAYER}.layer_norm1.*",
        f"{_OUR_BLOCK}.ln_2.*": f"{_LAYER}.layer_norm2.*",
    }
    return {f"{ours}.{name}": f"{theirs}.{other}" for name, other in rows.items()}


def _transposed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous() if name in _PROJECTIONS and tensor.ndim == 2 else tensor


NAMES = NameTable(
    owner="CLIPModel",
    names={
        "video.class_embedding": "vision_model.embeddings.class_embedding",
        "video.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "video.ln_pre.*": "vision_model.pre_layrnorm.*",  # spelled so
        **_tower_names("video", "vision_model"),
        "video.ln_post.*": "vision_model.post_layernorm.*",
        "text.token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        **_tower_names("text", "text_model"),
        "text.ln_final.*": "text_model.final_layer_norm.*",
        **_PROJECTIONS,
        LOGIT_SCALE: LOGIT_SCALE,
    },
    ignored=("position_ids",),
    to_ours=_transposed,
    to_theirs=_transposed,
)
from_hf, to_hf = NAMES.read, NAMES.write


def facts_of_hf(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> SourceFacts:
    """Facts from the config.json and the processor (`read_processor`) of a CLIPModel.

    Raises:
        UserError: the model computes something that the towers here do not.
    """
    from transformers import CLIPTextConfig, CLIPVisionConfig

    keys = "hidden_size hidden_act layer_norm_eps num_attention_heads num_hidden_layers"
    given = config.get("text_config") or {}
    vision = as_config(CLIPVisionConfig, config.get("vision_config") or {}, keys=keys, source=source)
    text = as_config(CLIPTextConfig, given, keys=f"{keys} vocab_size eos_token_id", source=source)
    activations = {vision.hidden_act, text.hidden_act}
    if activations not in ({"gelu"}, {"quick_gelu"}):
        raise UserError(
            f"{source}: the activations are {', '.join(sorted(activations))}; here both towers have gelu or quick_gelu",
            hint="use the weights of a plain CLIP",
        )
    end = text.eos_token_id
    if "vocab_size" in given and end not in (_OLD_END_TOKEN_ID, text.vocab_size - 1):
        raise UserError(
            f"{source}: captions end with token {end}; here they end with the largest one", hint="use a plain CLIP"
        )
    return SourceFacts(
        activation=vision.hidden_act,
        video_eps=vision.layer_norm_eps,
        text_eps=text.layer_norm_eps,
        mean=colours(preprocess.get("image_mean")),
        std=colours(preprocess.get("image_std")),
        video_heads=vision.num_attention_heads,
        text_heads=text.num_attention_heads,
        video_depth=vision.num_hidden_layers,
        text_depth=text.num_hidden_layers,
    )


def hf_config(size: DualEncoderSize, *, image_px: int, log_scale: float) -> dict[str, Any]:
    """config.json of a CLIPModel whose vision tower takes single frames."""
    from transformers import CLIPConfig

    towers = {
        name: {
            "hidden_act": trunk.activation,
            "hidden_size": trunk.width,
            "intermediate_size": trunk.mlp_width,
            "layer_norm_eps": trunk.norm_eps,
            "num_attention_heads": trunk.num_heads,
            "num_hidden_layers": trunk.depth,
            "projection_dim": size.embedding_width,
        }
        for name, trunk in (("vision", size.video.trunk), ("text", size.text.trunk))
    }
    vision = {"image_size": image_px, "num_channels": size.video.num_channels, "patch_size": size.video.patch_px}
    text = {
        "bos_token_id": _START_TOKEN_ID,
        # The largest id, at whose first position both read the embedding.
        "eos_token_id": size.text.vocabulary_size - 1,
        "max_position_embeddings": size.text.context_length,
        "vocab_size": size.text.vocabulary_size,
    }
    config = CLIPConfig(
        vision_config={**towers["vision"], **vision},
        text_config={**towers["text"], **text},
        projection_dim=size.embedding_width,
        logit_scale_init_value=log_scale,
        architectures=["CLIPModel"],
    )
    return config.to_dict()


# The special tokens under the names that OpenAI and transformers give them.
_START, _END = "<|startoftext|>", "<|endoftext|>"
_SPECIAL = {"<start_of_text>": _START, "<end_of_text>": _END}


def save_tokenizer(folder: Path, *, context_length: int) -> None:
    """Writes CLIP's tokenizer for transformers, from the vocabulary that open_clip ships."""
    from open_clip.tokenizer import SimpleTokenizer

    tokenizer = SimpleTokenizer()
    special = {"bos_token": _START, "eos_token": _END, "unk_token": _END, "pad_token": _END}
    config = {
        **special,
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": context_length,
        "tokenizer_class": "CLIPTokenizer",
    }
    merges = [" ".join(pair) for pair in tokenizer.bpe_ranks]
    vocabulary = {_SPECIAL.get(token, token): index for token, index in tokenizer.encoder.items()}
    text = json.dumps(vocabulary, ensure_ascii=False, indent=1) + "\n"
    (folder / "vocab.json").write_text(text, encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    save_json(folder / "special_tokens_map.json", special)
    save_json(folder / "tokenizer_config.json", config)


HF_CLIP = Format(
    name="hf",
    title="Hugging Face's CLIPModel",
    convert=from_hf,
    matches=lambda names: any_begins(names, "vision_model.", "text_model."),
    model_types=("clip",),
    read_config=facts_of_hf,
)
