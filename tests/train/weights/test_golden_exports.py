"""Exports hold what golden_exports.json says: tensors bit for bit, each value of a configuration.

Configurations may have more keys: those of transformers' own classes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.model import Init, Towers
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Captioner
from clipmill.train.models.dual_encoder import ModelShape, size_of
from clipmill.train.models.gpt2 import Gpt2, Gpt2Size
from clipmill.train.models.masked_autoencoder import decoder_size
from clipmill.train.models.timesformer import TimeSformer
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import VideoViTSize
from clipmill.train.tasks.caption.export import hf_generation_config
from clipmill.train.tasks.caption.settings import DecodingSettings
from clipmill.train.tasks.classify.export import classifier_config
from clipmill.train.tasks.mae.export import pretraining_config
from clipmill.train.weights.exported import preprocessor_config
from clipmill.train.weights.hf_caption import to_hf_caption
from clipmill.train.weights.hf_caption_config import TimeSformerShape, hf_caption_config
from clipmill.train.weights.hf_clip import hf_config, to_hf
from clipmill.train.weights.hf_videomae import exported_videomae, to_hf_videomae
from clipmill.train.weights.open_clip import open_clip_config, to_open_clip
from clipmill.train.weights.videomae import to_videomae
from tests.train.weights.small import IMAGE_PX, SIZE, our_model
from tests.train.weights.small_videomae import our_autoencoder, our_classifier

GOLDEN = json.loads(Path(__file__).with_name("golden_exports.json").read_text())
SETTINGS = ClipSettings(model="tiny", size_px=32, num_frames=4, towers=Towers(kind="videomae", video_norm_eps=1e-9))
CAPTION_TOWER = VideoViTSize(trunk=TransformerSize(width=32, depth=2, num_heads=4, norm_eps=1e-6), patch_px=8)
DECODER = Gpt2Size(trunk=TransformerSize(width=24, depth=2, num_heads=4), vocabulary_size=61, context_length=40)
DECODINGS = {
    "beam": DecodingSettings(method="beam", num_beams=3, length_penalty=0.5, early_stopping=True, max_tokens=9),
    "sample": DecodingSettings(method="sample", temperature=0.5, top_p=0.75, min_tokens=2),
    "greedy": DecodingSettings(),
}


def small_captioner() -> Captioner:
    tower = TimeSformer(CAPTION_TOWER, image_px=32, num_frames=4, attend=attend_with_sdpa)
    return Captioner(tower, Gpt2(DECODER, attend=attend_with_sdpa))


def counted(model: nn.Module, *, without: str = "-") -> dict[str, torch.Tensor]:
    """The model's state with numbers that are all different, the same on every machine."""
    state = {name: one for name, one in model.state_dict().items() if name != without}
    return {
        name: (torch.arange(state[name].numel(), dtype=torch.float32) + 10_000 * index).view(state[name].shape)
        for index, name in enumerate(sorted(state))
    }


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, shapes and bytes."""
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(f"{name} {tuple(state[name].shape)} {state[name].dtype}".encode())
        whole.update(state[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("open_clip", lambda: to_open_clip(counted(our_model()))),
        ("hf", lambda: to_hf(counted(our_model(), without="video.temporal_embedding"))),
        ("hf_videomae", lambda: to_hf_videomae(counted(our_autoencoder()))),
        ("hf_videomae_classifier", lambda: to_hf_videomae(counted(our_classifier()))),
        ("videomae", lambda: to_videomae(counted(our_autoencoder()))),
        ("videomae_classifier", lambda: to_videomae(counted(our_classifier()))),
        ("hf_caption", lambda: to_hf_caption(counted(small_captioner()))),
    ],
)
def test_tensors_are_golden(name: str, written: Callable[[], dict[str, torch.Tensor]]) -> None:
    assert digest(written()) == GOLDEN["tensors"][name]


def videomae_config(folder: Path, model: Mapping[str, Any], *, is_latent: bool = False) -> Any:
    """config.json of an exported model with the tiny tower."""
    conv = torch.zeros(128, 4, 2, 2) if is_latent else torch.zeros(128, 3, 2, 8, 8)
    shape = ModelShape(size=size_of(SETTINGS.model, SETTINGS.towers), image_px=8 if is_latent else SETTINGS.size_px)
    exported = exported_videomae(SETTINGS, {"video.conv1.weight": conv}, shape=shape, form="hf", model=model)
    exported.write(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", GOLDEN["configs"])
def test_configurations_have_each_golden_value(name: str, tmp_path: Path) -> None:
    decoder = decoder_size(TransformerSize(width=128, depth=4, num_heads=4, has_key_bias=False), depth=2)
    shape = TimeSformerShape(size=CAPTION_TOWER, image_px=32, num_frames=4)
    init = Init(pixel_mean=(0.42, 0.46, 0.41))
    configs: dict[str, Callable[[], Any]] = {
        "open_clip": lambda: open_clip_config(SIZE, init, image_px=IMAGE_PX),
        "clip": lambda: hf_config(SIZE, image_px=IMAGE_PX, log_scale=2.5),
        "clip_preprocessor": lambda: preprocessor_config("CLIPImageProcessor", SETTINGS, kind="clip"),
        "videomae_preprocessor": lambda: preprocessor_config("VideoMAEImageProcessor", SETTINGS, kind="videomae"),
        "pretraining": lambda: videomae_config(tmp_path, pretraining_config(decoder)),
        "latents": lambda: videomae_config(tmp_path, pretraining_config(decoder), is_latent=True),
        "classifier": lambda: videomae_config(tmp_path, classifier_config(("a disc", "a star", "ein Stück"))),
        "caption": lambda: hf_caption_config(shape, DECODER, end_id=60, pad_id=59, dropout=0.1),
        **{
            f"generation_{method}": partial(
                hf_generation_config, end_id=60, pad_id=59, decoding=decoding, context_length=40
            )
            for method, decoding in DECODINGS.items()
        },
    }
    assert lost_from(json.loads(json.dumps(configs[name]())), GOLDEN["configs"][name]) == []


def lost_from(new: Any, old: Any, key: str = "") -> list[str]:
    """The keys of `old` that are not in `new`, or have another value there."""
    if not isinstance(old, dict):
        return [] if new == old and type(new) is type(old) else [f"{key}: {new!r}, golden {old!r}"]
    found = new if isinstance(new, dict) else {}
    return [one for name in old for one in lost_from(found.get(name, "missing"), old[name], f"{key}.{name}")]
