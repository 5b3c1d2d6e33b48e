"""Tiny models of open_clip, timm and transformers with random weights, built and saved by their libraries."""

import json
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from timm.models import register_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn

PX = 32
RESNET, SIGLIP2, CLIP = "test-RN", "test-SigLIP2", "test-CLIP"
_VIT: dict[str, Any] = {"img_size": PX, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_TEXT: dict[str, Any] = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
_SIGLIP_TEXT: dict[str, Any] = {
    "no_causal_mask": True,
    "proj_bias": True,
    "pool_type": "last",
    "norm_kwargs": {"eps": 1e-6},
    "act_kwargs": {"approximate": "tanh"},
    "tokenizer_kwargs": {"clean": "canonicalize"},
}


def _tiny(name: str, **options: Any) -> nn.Module:
    overlay = {"input_size": (3, PX, PX)}
    return timm.create_model(name, **{**_VIT, **options, "pretrained_cfg_overlay": overlay, "pretrained_cfg": None})


@register_model
def tiny_siglip(pretrained: bool = False, **options: Any) -> nn.Module:
    return _tiny("vit_base_patch16_siglip_224", **options)


@register_model
def tiny_pe(pretrained: bool = False, **options: Any) -> nn.Module:
    return _tiny("vit_pe_core_base_patch16_224", ref_feat_shape=(4, 4), **{"num_classes": 24, **options})


def add_open_clip(folder: Path, *, tokenizer: Path | None = None) -> None:
    """Register tiny open_clip models: one with a ResNet, one like SigLIP 2, and a CLIP."""
    siglip = {**_TEXT, **_SIGLIP_TEXT, "context_length": 16, "vocab_size": 200, "hf_tokenizer_name": str(tokenizer)}
    vision = {"image_size": PX, "timm_model_name": "tiny_siglip", "timm_pool": "map", "timm_proj": "none"}
    vit = {"image_size": PX, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16}
    configs: dict[str, dict[str, Any]] = {
        RESNET: {"vision_cfg": {"image_size": PX, "layers": [1, 1, 1, 1], "width": 8}, "text_cfg": _TEXT},
        SIGLIP2: {"custom_text": True, "init_logit_bias": -10, "vision_cfg": vision, "text_cfg": siglip},
        CLIP: {"vision_cfg": vit, "text_cfg": _TEXT},
    }
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps({"embed_dim": 32, **config}))
    open_clip.add_model_config(folder)


def train_tokenizer(folder: Path) -> Path:
    """Make a WordPiece tokenizer of a few words, saved in the files of transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    texts = ["a dog catches a frisbee", "a cat sleeps in the sun", "two people talk"]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.model_max_length = 16
    fast.save_pretrained(folder)
    return folder


def save_hf(folder: Path, kind: str) -> nn.Module:
    """Save a tiny transformers model with random weights and its processor: siglip2, siglip, clip, dinov2 or bert."""
    import transformers as hf

    wide = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision: dict[str, Any] = {**wide, "image_size": PX, "patch_size": 8}
    text: dict[str, Any] = {**wide, "vocab_size": 200, "max_position_embeddings": 16}
    torch.manual_seed(0)
    if kind == "bert":
        model = hf.BertModel(hf.BertConfig(**text, pad_token_id=0))
    elif kind == "dinov2":
        model = hf.Dinov2Model(hf.Dinov2Config(**{**vision, "mlp_ratio": 2}))
    else:
        prefix = {"siglip2": "Siglip2", "siglip": "Siglip", "clip": "CLIP"}[kind]
        vision |= {"num_patches": 16} if kind == "siglip2" else {}
        if kind == "clip":
            vision, text = vision | {"projection_dim": 24}, text | {"projection_dim": 24, "eos_token_id": 3}
        options = {"projection_dim": 24} if kind == "clip" else {}
        text |= {"projection_size": 32} if kind != "clip" else {}
        config = getattr(hf, f"{prefix}Config")(vision_config=vision, text_config=text, **options)
        model = getattr(hf, f"{prefix}Model")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if kind != "bert":
        processor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "resample": 3, "size": {"height": PX}}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if kind != "dinov2":
        train_tokenizer(folder)
    return model.eval()
