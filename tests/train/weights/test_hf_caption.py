"""Folders from transformers: complete captioners, a TimeSformer, a GPT-2, and folders that are not captioners."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    TimesformerConfig,
    TimesformerForVideoClassification,
    TimesformerModel,
)

from clipmill.manifests.errors import UserError
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Captioner, Gpt2, Gpt2Size
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import VideoViT, VideoViTSize
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.export import hf_generation_config, save_hf
from clipmill.train.tasks.caption.spec import DecodingSettings, max_tokens_of
from clipmill.train.weights.hf_caption import read_caption_folder, to_hf_caption
from tests.train.models.small_captioners import (
    END,
    PAD,
    captioner_in,
    clips,
    for_them,
    ours_with_weights_of,
    their_captioner,
)

TIMESFORMER: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_frames": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
GPT2: dict[str, Any] = {"vocab_size": 61, "n_positions": 40, "n_embd": 24, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize("kind", [TimesformerModel, TimesformerForVideoClassification])
def test_a_timesformer_alone(tmp_path: Path, kind: Any) -> None:
    torch.manual_seed(0)
    theirs = kind(TimesformerConfig(**TIMESFORMER))
    theirs.save_pretrained(tmp_path)
    folder = read_caption_folder(tmp_path)
    assert folder.config.decoder is None and folder.config.video is not None
    assert (folder.config.video.image_px, folder.config.video.num_frames) == (32, 4)
    assert not folder.converted.unknown
    ours = ours_with_weights_of(their_captioner(), tmp_path / "whole")
    names = {name for name in ours.state_dict() if name.startswith("video.") and ".resblocks.2." not in name}
    assert folder.converted.tensors.keys() == names


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, GPT2Model])
@pytest.mark.parametrize("has_cross_attention", [False, True])
def test_a_gpt2_alone_has_all_but_cross_attention_where_it_was_made_without(
    tmp_path: Path, kind: Any, has_cross_attention: bool
) -> None:
    torch.manual_seed(0)
    theirs = kind(GPT2Config(**GPT2, add_cross_attention=has_cross_attention))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")  # writes several files
    assert not (tmp_path / "model.safetensors").exists()
    folder = read_caption_folder(tmp_path)
    size = folder.config.decoder
    assert folder.config.video is None and size is not None
    assert (size.vocabulary_size, size.context_length, size.trunk.depth) == (61, 40, 2)
    assert not folder.converted.unknown
    names = {f"decoder.{name}" for name in Gpt2(size, attend=attend_with_sdpa).state_dict()}
    is_new = {name for name in names if ".cross_attn." in name or ".ln_cross." in name}
    assert folder.converted.tensors.keys() == (names if has_cross_attention else names - is_new)


def test_masks_of_old_versions_are_no_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    converted = read_caption_folder(tmp_path).converted
    assert not converted.unknown and len(converted.ignored) == 2


def test_transformers_writes_the_same_captions_from_our_folder(tmp_path: Path) -> None:
    from transformers import VisionEncoderDecoderModel

    theirs = their_captioner(seed=3)
    ours = ours_with_weights_of(theirs, tmp_path / "theirs")
    save_hf(ours, tmp_path / "ours", end_id=END, pad_id=PAD)
    again: Any = VisionEncoderDecoderModel.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    video = for_them(clips(2))
    expected = theirs.generate(video, max_new_tokens=6, do_sample=False)
    # The folder stores the start, end and padding tokens.
    assert again.eval().generate(video, max_new_tokens=6, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "decoding",
    [
        DecodingSettings(max_tokens=26, min_tokens=24),
        pytest.param(DecodingSettings(), marks=pytest.mark.nightly),
        pytest.param(DecodingSettings(max_tokens=50), marks=pytest.mark.nightly),  # the context has 40 tokens
        DecodingSettings(method="beam", num_beams=3, length_penalty=-1.0, early_stopping=True, max_tokens=9),
        DecodingSettings(method="beam", num_beams=1, length_penalty=2.0, max_tokens=9),
    ],
)
def test_generate_writes_as_a_folder_says(tmp_path: Path, decoding: DecodingSettings) -> None:
    from transformers import GenerationConfig

    theirs = their_captioner(seed=3)
    ours = ours_with_weights_of(theirs, tmp_path)
    config = hf_generation_config(end_id=END, pad_id=END, decoding=decoding, context_length=40)
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    theirs.generation_config = GenerationConfig.from_pretrained(tmp_path)
    theirs.generation_config.validate(strict=True)
    expected = theirs.generate(for_them(clips(2)))[:, 1:]
    written = generate_captions(
        ours, clips(2), replace(decoding, max_tokens=min(40, max_tokens_of(decoding))), end_id=END, samples=range(2)
    ).tokens_VL
    length = max(written.shape[1], expected.shape[1])
    texts = [
        torch.nn.functional.pad(token_ids, (0, length - token_ids.shape[1]), value=END).tolist()
        for token_ids in (written, expected)
    ]
    assert texts[0] == texts[1]


def test_a_folder_says_what_is_drawn() -> None:
    drawn = DecodingSettings(method="sample", temperature=0.5, top_p=0.75)
    config = hf_generation_config(end_id=END, pad_id=END, decoding=drawn)
    expected = {"do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 0.75, "max_new_tokens": 30}
    assert expected.items() <= config.items()


def test_other_clips_have_the_nearest_places(tmp_path: Path) -> None:
    their_captioner().save_pretrained(tmp_path)
    ours = captioner_in(tmp_path, num_frames=6, image_px=48).double()
    tokens = torch.tensor([[END, 3]])
    assert ours(clips(1, num_frames=6, image_px=48), tokens).shape == (1, 2, 61)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("encoder", {"attention_type": "joint_space_time"}, "attention_type is 'joint_space_time'"),
        ("encoder", {"intermediate_size": 100}, "intermediate_size is 100"),
        ("encoder", {"qkv_bias": False}, "qkv_bias is False"),
        ("encoder", {"num_attention_heads": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
        ("encoder", {"image_size": [32, 48]}, r"image_size is \[32, 48\]"),
        ("encoder", {"model_type": "vit"}, "vision-encoder-decoder with vit and gpt2"),
        ("decoder", {"activation_function": "relu"}, "activation_function is 'relu'"),
        ("decoder", {"n_inner": 7}, "n_inner is 7"),
        ("decoder", {"n_head": 5}, "n_embd 24 is not a multiple of n_head 5"),
        (None, {"model_type": "bert"}, "is a bert"),
    ],
)
def test_models_that_compute_something_else_are_refused(
    tmp_path: Path, part: str | None, change: dict[str, Any], says: str
) -> None:
    their_captioner().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    (config if part is None else config[part]).update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=says):
        read_caption_folder(tmp_path)


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*config\.json"):
        captioner_in(tmp_path)
    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no video tower"):
        captioner_in(tmp_path)
    their_captioner().save_pretrained(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    config["decoder"]["n_layer"] = 4
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"missing \(decoder\.transformer\.resblocks\.3\.[^;]*\)(\n|$)"):
        captioner_in(tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="there are no weights"):
        captioner_in(tmp_path / "whole")


def test_another_encoder_has_no_place_there(tmp_path: Path) -> None:
    trunk = TransformerSize(width=32, depth=1, num_heads=4)
    tower = VideoViT(
        VideoViTSize(trunk=trunk, patch_px=8), image_px=32, num_frames=4, embedding_width=None, attend=attend_with_sdpa
    )
    captioner = Captioner(tower, Gpt2(Gpt2Size(trunk=trunk, vocabulary_size=61), attend=attend_with_sdpa))
    with pytest.raises(UserError, match="VideoViT"):
        save_hf(captioner, tmp_path / "out", end_id=60)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="no parameter for"):
        to_hf_caption({"video.ln_pre.weight": torch.ones(1)})
