"""Qwen3-VL with random weights and a word tokenizer, saved as transformers saves models: 100 kB."""

from pathlib import Path
from typing import Any

_WORDS = (
    "a the dog cat person ball car tree plays runs jumps sits red green blue in on and with park street . , frames of "
    "video these pictures are clip order describe one or two sentences what happens"
)
_SPECIAL = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def save_tiny_vlm(folder: Path, *, context: int = 4096) -> None:
    """Write the model and its processor into a new folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForImageTextToText,
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    names = [*_SPECIAL, "<|video_pad|>", *_WORDS.split()]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    given: Any = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<|im_end|>"}
    more = [name for name in names[: len(_SPECIAL) + 1] if name not in given.values()]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=more, **given)
    pixels: Any = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    images = Qwen2VLImageProcessor(min_pixels=64, max_pixels=4096, **pixels)
    processor = Qwen3VLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**pixels),
        chat_template=_TEMPLATE,
    )
    number_of = dict(zip(names, range(len(names)), strict=True))
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(names),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": context,
            "eos_token_id": number_of["<|im_end|>"],
            "pad_token_id": number_of["<pad>"],
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=number_of["<|image_pad|>"],
        video_token_id=number_of["<|video_pad|>"],
        vision_start_token_id=number_of["<|vision_start|>"],
        vision_end_token_id=number_of["<|vision_end|>"],
    )
    torch.manual_seed(0)
    kind: Any = AutoModelForImageTextToText
    model = kind.from_config(config)
    model.generation_config.eos_token_id = [number_of["<|im_end|>"], number_of["dog"]]
    model.generation_config.pad_token_id = number_of["<pad>"]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
