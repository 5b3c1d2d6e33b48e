"""Names, configuration and tokenizer of Hugging Face's CLIPModel.

A CLIPModel has separate matrices for queries, keys and values, and its projections are transposed.
"""

import html
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from html.entities import html5
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.models.dual_encoder import DualEncoderSize
from clipmill.train.weights.conversion import LOGIT_SCALE, Format, NameTable, SourceFacts, any_starts_with
from clipmill.train.weights.exported import save_json
from clipmill.train.weights.files import as_config, rgb_values

_OUR_BLOCK, _LAYER = "transformer.resblocks.N", "encoder.layers.N"
_PROJECTIONS = {"video.proj": "visual_projection.weight", "text.text_projection": "text_projection.weight"}
_START_TOKEN_ID = 49406
# End token in configurations from old versions of transformers. It stands for the largest ID of the vocabulary.
_OLD_END_TOKEN_ID = 2


def _tower_names(our_tower: str, their_tower: str) -> dict[str, str]:
    rows = {
        "positional_embedding": "embeddings.position_embedding.weight",
        f"{_OUR_BLOCK}.attn.in_proj_*": f"{_LAYER}.self_attn.{{q,k,v}}_proj.*",
        f"{_OUR_BLOCK}.attn.out_proj.*": f"{_LAYER}.self_attn.out_proj.*",
        f"{_OUR_BLOCK}.mlp.c_fc.*": f"{_LAYER}.mlp.fc1.*",
        f"{_OUR_BLOCK}.mlp.c_proj.*": f"{_LAYER}.mlp.fc2.*",
        f"{_OUR_BLOCK}.ln_1.*": f"{_LAYER}.layer_norm1.*",
        f"{_OUR_BLOCK}.ln_2.*": f"{_LAYER}.layer_norm2.*",
    }
    return {f"{our_tower}.{name}": f"{their_tower}.{other}" for name, other in rows.items()}


def _transpose(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous() if name in _PROJECTIONS and tensor.ndim == 2 else tensor


NAMES = NameTable(
    owner="CLIPModel",
    names={
        "video.class_embedding": "vision_model.embeddings.class_embedding",
        "video.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "video.ln_pre.*": "vision_model.pre_layrnorm.*",  # transformers spells it this way
        **_tower_names("video", "vision_model"),
        "video.ln_post.*": "vision_model.post_layernorm.*",
        "text.token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        **_tower_names("text", "text_model"),
        "text.ln_final.*": "text_model.final_layer_norm.*",
        **_PROJECTIONS,
        LOGIT_SCALE: LOGIT_SCALE,
    },
    ignored=("position_ids",),
    to_ours=_transpose,
    to_theirs=_transpose,
)
from_hf, to_hf = NAMES.read, NAMES.write


def facts_of_hf(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> SourceFacts:
    """Return facts from config.json and the processor (`read_processor`) of a CLIPModel.

    Raises:
        UserError: The model uses a feature that our towers lack.
    """
    from transformers import CLIPTextConfig, CLIPVisionConfig

    keys = "hidden_size hidden_act layer_norm_eps num_attention_heads num_hidden_layers"
    text_values = config.get("text_config") or {}
    vision = as_config(CLIPVisionConfig, config.get("vision_config") or {}, keys=keys, source=source)
    text = as_config(CLIPTextConfig, text_values, keys=f"{keys} vocab_size eos_token_id", source=source)
    activations = {vision.hidden_act, text.hidden_act}
    if activations not in ({"gelu"}, {"quick_gelu"}):
        raise UserError(
            f"{source}: the activations are {', '.join(sorted(activations))}, but both towers must have the same one, "
            "gelu or quick_gelu",
            hint="use the weights of a plain CLIP",
        )
    end = text.eos_token_id
    if "vocab_size" in text_values and end not in (_OLD_END_TOKEN_ID, text.vocab_size - 1):
        raise UserError(
            f"{source}: captions end with token {end}, but must end with the largest token ID",
            hint="use the weights of a plain CLIP",
        )
    return SourceFacts(
        activation=vision.hidden_act,
        video_eps=vision.layer_norm_eps,
        text_eps=text.layer_norm_eps,
        mean=rgb_values(preprocess.get("image_mean")),
        std=rgb_values(preprocess.get("image_std")),
        video_heads=vision.num_attention_heads,
        text_heads=text.num_attention_heads,
        video_depth=vision.num_hidden_layers,
        text_depth=text.num_hidden_layers,
    )


def hf_config(size: DualEncoderSize, *, image_px: int, log_scale: float) -> dict[str, Any]:
    """Return the content of config.json for a CLIPModel whose vision tower takes single frames."""
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
        # The largest ID. A CLIPModel and our text tower take the embedding at the first position with this ID.
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


# CLIP's pattern for words. CLIP ignores case, so "s" also matches U+017F (long s).
_SPLIT = r"'[s\u017f]|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


# Note for the user of an export.
TOKENIZER_REMARK = (
    "the exported tokenizer, loaded with AutoTokenizer, cleans texts as in training, except that it does not repair "
    "text decoded with the wrong encoding; docs/weights.md lists all exceptions, and explains how to avoid them"
)


def save_tokenizer(folder: Path, *, context_length: int) -> None:
    """Write CLIP's tokenizer for transformers, with open_clip's vocabulary and cleaning.

    transformers' CLIPTokenizer ignores the normaliser in tokenizer.json. Therefore the files specify the class
    PreTrainedTokenizerFast, which uses tokenizer.json unchanged.
    """
    from open_clip.tokenizer import SimpleTokenizer
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    simple_bpe = SimpleTokenizer()
    start, end = (simple_bpe.decoder[index] for index in (simple_bpe.sot_token_id, simple_bpe.eot_token_id))
    merges = list(simple_bpe.bpe_ranks)
    bpe = models.BPE(simple_bpe.encoder, merges, unk_token=end, continuing_subword_prefix="", end_of_word_suffix="</w>")
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = cleaning_normalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # open_clip looks for these tokens in the cleaned text, hence `normalized=True`.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=True) for token in (start, end)])
    ends = (end, simple_bpe.eot_token_id), (start, simple_bpe.sot_token_id)
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=False, add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace("</w>", " "), decoders.Strip(" ", 0, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"bos_token": start, "eos_token": end, "unk_token": end, "pad_token": end}
    config = {
        **special_tokens,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    save_json(folder / "special_tokens_map.json", special_tokens)
    save_json(folder / "tokenizer_config.json", config)


HF_CLIP = Format(
    name="hf",
    title="Hugging Face's CLIPModel",
    convert=from_hf,
    matches=lambda names: any_starts_with(names, "vision_model.", "text_model."),
    model_types=("clip",),
    read_config=facts_of_hf,
)


# open_clip's cleaning of texts as a normaliser of the tokenizers library, for exported tokenizers.
#
# open_clip repairs texts with ftfy, unescapes HTML twice, collapses white space and converts to lower case. A
# normaliser is a list of replacements. It can represent steps whose results depend on only a few characters. It cannot
# handle:
#
# - text that was decoded with the wrong encoding ("schÃ¶n"), which ftfy recognises by statistics;
# - HTML entities in a text with "<", where ftfy keeps the quotes and ligatures that the entities stand for;
# - numeric character references outside of `_REFERENCES`, and HTML that was escaped repeatedly without semicolons.

# Code points whose numeric references are replaced: Latin letters, punctuation, symbols, and emoji. Each code point
# adds a replacement, which costs time for every text.
_REFERENCES = (
    *(range(32, 0x180), range(0x2000, 0x2070), range(0x20A0, 0x20C0), range(0x2100, 0x2150)),
    *(range(0x2600, 0x27C0), range(0x1F300, 0x1F650)),
)
_AMPERSAND = "&"
_SIGMA = "(?<=[\\p{Lu}\\p{Ll}\\p{Lt}])\u03a3(?!\\p{M}*[\\p{Lu}\\p{Ll}\\p{Lt}])"


def cleaning_normalizer() -> Any:
    """Return a normaliser (`tokenizers.normalizers.Sequence`) that cleans texts as open_clip does."""
    from tokenizers import Regex, normalizers

    # Old HTML entities that need no semicolon. Longer names come first, because a shorter name may be their prefix.
    old_names = sorted((name for name in html5 if not name.endswith(";")), key=len, reverse=True)
    without_semicolons = ((Regex(f"&{name};?"), html5[name]) for name in old_names)
    # In the list of rules, None stands for NFC normalisation.
    rules = (*_replacements(), None, *without_semicolons, (Regex(r"\s+"), " "))
    steps = [normalizers.NFC() if rule is None else normalizers.Replace(*rule) for rule in rules]
    # Python converts a sigma at the end of a word to a final sigma, but `Lowercase` of tokenizers does not.
    return normalizers.Sequence(
        [*steps, normalizers.Strip(), normalizers.Replace(Regex(_SIGMA), "\u03c2"), normalizers.Lowercase()]
    )


def _replacements() -> Iterator[tuple[Any, str]]:
    """Yield each string or pattern to replace, with its replacement, in ftfy's order."""
    from open_clip import tokenizer as open_clip_tokenizer
    from tokenizers import Regex

    chardata: Any = open_clip_tokenizer.ftfy.chardata
    # Ampersands that were escaped once or repeatedly.
    yield Regex(r"&(?:(?:amp|AMP|#0*38|#[xX]0*26);)+"), _AMPERSAND
    patterns = defaultdict[str, list[str]](list)
    for name, value in {**{f"&{name}": value for name, value in html5.items()}, **chardata.HTML_ENTITIES}.items():
        if name.endswith(";") and value != _AMPERSAND:
            patterns[value].append(re.escape(name))
    for number in (number for numbers in _REFERENCES for number in numbers):
        value = html.unescape(f"&#{number};")
        patterns[value] += [f"&#0*{number}(?![0-9]);?", f"&#[xX]0*(?i:{number:x})(?![0-9a-fA-F]);?"]
    for value, alternatives in patterns.items():
        yield Regex("|".join(alternatives)), value
    # ISO 8859-1 control characters are read as Windows-1252 characters.
    for number in range(0x80, 0xA0):
        yield chr(number), bytes([number]).decode("cp1252", errors="replace").replace("\ufffd", chr(number))
    for number, value in {**chardata.LIGATURES, **chardata.WIDTH_MAP}.items():
        yield chr(number), value
    yield Regex(chardata.SINGLE_QUOTE_RE.pattern), "'"
    yield Regex(chardata.DOUBLE_QUOTE_RE.pattern), '"'
    yield Regex("\\x1b\\[[0-9;]*[a-zA-Z]"), ""
    dropped_codes = (number for number, value in chardata.CONTROL_CHARS.items() if value is None)
    yield Regex(f"[{''.join(f'{chr(92)}x{{{number:x}}}' for number in dropped_codes)}]"), ""
