"""The formats by name, and how the names of tensors tell them apart."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from manifests.errors import UserError
from train.weights.avion_format import AVION_FACTS, LAVILA_FACTS, from_avion, from_lavila
from train.weights.converted import CLIP_MEAN, CLIP_STD, Converted, Facts, Tensors
from train.weights.hf_caption_format import from_hf_caption
from train.weights.hf_format import from_hf
from train.weights.hf_videomae_format import from_hf_videomae
from train.weights.open_clip_format import from_open_clip
from train.weights.videomae_format import HF_EPS, VIDEOMAE_FACTS, from_videomae

_OPENAI_FACTS = Facts(activation="quick_gelu", video_eps=1e-5, text_eps=1e-5, mean=CLIP_MEAN, std=CLIP_STD, remarks=())
_NOTHING_KNOWN = Facts()
_TIMESFORMER_EPS = 1e-6
_PREFIXES = ("module.", "_orig_mod.", "model.")
# Sizes of the model, which OpenAI's archives hold and open_clip's files do not.
_OPENAI_SIZES = frozenset({"input_resolution", "context_length", "vocab_size"})
# What other vision transformers of the same names have, and VideoMAE has not.
_CLASS_TOKENS = ("cls_token", "embeddings.cls_token")


@dataclass(frozen=True, kw_only=True)
class Format:
    """Who wrote a state dict.

    Attributes:
        name: of `--init.format`.
        title: for the user.
        convert: a state dict under our names.
        facts: what all weights of this format have in common.
    """

    name: str
    title: str
    convert: Callable[[Tensors], Converted]
    facts: Facts = _NOTHING_KNOWN


FORMATS = {
    one.name: one
    for one in (
        Format(name="open_clip", title="open_clip", convert=from_open_clip),
        Format(name="openai", title="OpenAI's CLIP", convert=from_open_clip, facts=_OPENAI_FACTS),
        Format(name="hf", title="Hugging Face's CLIPModel", convert=from_hf),
        Format(name="avion", title="AVION", convert=from_avion, facts=AVION_FACTS),
        Format(name="lavila", title="LaViLa", convert=from_lavila, facts=LAVILA_FACTS),
        Format(name="videomae", title="VideoMAE", convert=from_videomae, facts=VIDEOMAE_FACTS),
        Format(
            name="hf_videomae",
            title="Hugging Face's VideoMAE",
            convert=from_hf_videomae,
            facts=replace(VIDEOMAE_FACTS, video_eps=HF_EPS),
        ),
        Format(
            name="hf_timesformer",
            title="Hugging Face's TimeSformer, or a captioner of it",
            convert=from_hf_caption,
            facts=Facts(activation="gelu", video_eps=_TIMESFORMER_EPS),
        ),
    )
}


def without_prefixes(state: Tensors) -> dict[str, torch.Tensor]:
    """The tensors without what wrappers put before every name: DDP's `module.`, torch.compile's `_orig_mod.`."""
    names = list(state)
    for _ in range(len(_PREFIXES)):
        for prefix in _PREFIXES:
            if names and all(name.startswith(prefix) for name in names):
                names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, state.values(), strict=True))


def detect_format(names: Iterable[str]) -> Format:
    """The format of a state dict, by the names of its tensors.

    Raises:
        UserError: no format has such names, or a tower of another kind.
    """
    known = set(names)

    def has(*beginnings: str) -> bool:
        return any(name.startswith(beginnings) for name in known)

    if has("vision_model.", "text_model."):
        return FORMATS["hf"]
    if has("timesformer.", "encoder.embeddings.time_embeddings", "embeddings.time_embeddings"):
        return FORMATS["hf_timesformer"]
    if has("videomae.", "decoder.decoder_layers.") or (has("embeddings.patch_embeddings.") and not has(*_CLASS_TOKENS)):
        return FORMATS["hf_videomae"]
    if has("encoder.patch_embed.", "encoder.blocks.") or (has("patch_embed.", "blocks.") and not has(*_CLASS_TOKENS)):
        return FORMATS["videomae"]
    if has("textual.") and has("visual."):
        return FORMATS["avion"]
    if has("visual.blocks.", "visual.patch_embed."):
        return FORMATS["lavila"]
    other = {"visual.layer1.": "a ResNet", "visual.trunk.": "a tower of timm", "text.transformer.encoder.": "a BERT"}
    for beginning, kind in other.items():
        if has(beginning):
            raise UserError(
                f"these weights are of {kind} (tensors {beginning}*); the towers here are CLIP's Transformers",
                hint="use the weights of a CLIP with a vision Transformer (ViT)",
            )
    if has("visual.conv1.") or has("transformer.resblocks.", "text.transformer.resblocks."):
        return FORMATS["openai" if known >= _OPENAI_SIZES else "open_clip"]
    first = ", ".join(sorted(known)[:3])
    raise UserError(
        "these are not the weights of a CLIP, VideoMAE or TimeSformer of any known format; the first tensors: "
        f"{first or 'none'}",
        hint=f"known are {', '.join(FORMATS)}; name one with --init.format to see what fits",
    )
