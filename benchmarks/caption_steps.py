"""Encoder passes and decoding with captioners of clipmill and transformers that have the same weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from clipmill.train.models.attention import open_attention
from clipmill.train.models.captioner import GPT2_SIZES, Captioner, Gpt2, Gpt2Name, TextCache
from clipmill.train.models.timesformer import NORM_EPS, TimeSformer
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import VideoViTSize
from clipmill.train.tasks.caption.decoding import generate_captions
from clipmill.train.tasks.caption.spec import DecodingSettings, max_tokens_of
from clipmill.train.weights.hf_caption import TimeSformerShape, hf_caption_config, to_hf_caption

END = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a captioner."""

    width: int
    depth: int
    num_heads: int
    decoder: Gpt2Name
    image_px: int
    num_frames: int = 8
    patch_px: int = 16

    @property
    def tower(self) -> TimeSformerShape:
        """Dimensions of the encoder."""
        trunk = TransformerSize(width=self.width, depth=self.depth, num_heads=self.num_heads, norm_eps=NORM_EPS)
        size = VideoViTSize(trunk=trunk, patch_px=self.patch_px)
        return TimeSformerShape(size=size, image_px=self.image_px, num_frames=self.num_frames)


def captioners(shape: Shape, *, device: torch.device) -> tuple[Captioner, Any]:
    """Create both captioners. The encoder of transformers supports only eager attention; its GPT-2 uses SDPA."""
    from transformers import VisionEncoderDecoderConfig, VisionEncoderDecoderModel

    torch.manual_seed(0)
    attend = open_attention("auto", device_type=device.type).attend
    tower, text = shape.tower, GPT2_SIZES[shape.decoder]
    ours = Captioner(
        TimeSformer(tower.size, image_px=tower.image_px, num_frames=tower.num_frames, attend=attend),
        Gpt2(text, attend=attend),
    )
    for name, parameter in ours.named_parameters():
        if name.endswith("time_proj.weight"):
            nn.init.normal_(parameter, std=0.02)  # zeros when newly initialised
    config = hf_caption_config(tower, text, end_id=END, pad_id=END, dropout=0.0)
    theirs = VisionEncoderDecoderModel(VisionEncoderDecoderConfig.from_dict(config))
    missing, unexpected = theirs.load_state_dict(to_hf_caption(ours.state_dict()), strict=False)
    if unexpected or missing not in ([], ["decoder.lm_head.weight"]):
        raise RuntimeError(f"the weights do not match: missing {missing}, unexpected {unexpected}")
    theirs.tie_weights()
    return ours.to(device), nn.Module.to(theirs, device)


def take(encode: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, clips: torch.Tensor) -> float:
    """Run a forward and backward pass of an encoder, and return the loss."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(clips.device.type, dtype=torch.bfloat16, enabled=clips.is_cuda):
        tokens = encode(clips)
    loss = tokens.float().square().mean()
    loss.backward()
    return loss.item()


class FromStates:
    """Decoder without an encoder: its input is the encoder's states."""

    def __init__(self, decoder: Gpt2) -> None:
        self._decoder = decoder

    def start(self, states: torch.Tensor, *, num_tokens: int, rows_per_video: int = 1) -> TextCache:
        """See `Gpt2.start`."""
        return self._decoder.start(states, num_tokens=num_tokens, rows_per_video=rows_per_video)

    def step(self, tokens: torch.Tensor, cache: TextCache) -> torch.Tensor:
        """See `Gpt2.step`."""
        return self._decoder.step(tokens, cache)


def write(ours: Captioner, states: torch.Tensor, settings: DecodingSettings) -> torch.Tensor:
    """Decode the maximum number of tokens with clipmill."""
    settings = replace(settings, min_tokens=max_tokens_of(settings) - 1)
    samples = range(len(states))
    return generate_captions(FromStates(ours.decoder), states, settings, end_id=END, samples=samples).tokens_VL


@torch.no_grad()
def generate(theirs: Any, states: torch.Tensor, settings: DecodingSettings) -> torch.Tensor:
    """Decode the maximum number of tokens with `generate` of transformers."""
    from transformers.modeling_outputs import BaseModelOutput

    found: torch.Tensor = theirs.generate(
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        do_sample=False,
        num_beams=settings.num_beams or 1,
        max_new_tokens=max_tokens_of(settings),
        min_new_tokens=max_tokens_of(settings) - 1,
    )
    return found[:, 1:]
