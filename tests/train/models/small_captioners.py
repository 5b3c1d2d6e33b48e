"""Small captioners for float64 on a CPU: transformers' model, and clipmill's model with the same weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, TimesformerConfig, VisionEncoderDecoderConfig, VisionEncoderDecoderModel

from clipmill.train.config.model import Init
from clipmill.train.models.attention import Attend, attend_with_sdpa
from clipmill.train.models.captioner import Captioner, Gpt2
from clipmill.train.models.timesformer import TimeSformer
from clipmill.train.tasks.caption.model import fit_captioner
from clipmill.train.weights.hf_caption import read_caption_folder
from clipmill.train.weights.loading import copy_into
from clipmill.train.weights.sources import open_weights
from tests.train.models.small_towers import spread_out
from tests.train.weights.small import ignore_line

NUM_FRAMES, IMAGE_PX, VOCABULARY = 4, 32, 61
END, PAD = 60, 59


def their_captioner(*, video_width: int = 32, text_width: int = 24, num_frames: int = NUM_FRAMES, seed: int = 0) -> Any:
    """Make transformers' captioner in float64, with three blocks per part, patches of 8 px, and random weights."""
    encoder = TimesformerConfig(
        image_size=IMAGE_PX,
        patch_size=8,
        num_frames=num_frames,
        hidden_size=video_width,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=4 * video_width,
    )
    decoder = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=40,
        n_embd=text_width,
        n_layer=3,
        n_head=4,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=PAD,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    for part in (config, config.decoder):
        part.decoder_start_token_id, part.eos_token_id, part.pad_token_id = END, END, PAD
    torch.manual_seed(seed)
    theirs = VisionEncoderDecoderModel(config=config).eval()
    # The weights are filled in float32, because clipmill reads them in float32.
    spread_out(theirs)
    return theirs.double()


def ours_with_weights_of(theirs: Any, folder: Path, *, attend: Attend = attend_with_sdpa) -> Captioner:
    """Return clipmill's captioner, read from a folder that transformers wrote."""
    theirs.save_pretrained(folder)
    return captioner_in(folder, attend=attend).double().eval()


def captioner_in(
    folder: Path, *, attend: Attend = attend_with_sdpa, num_frames: int | None = None, image_px: int | None = None
) -> Captioner:
    """Return clipmill's captioner with the weights of a transformers folder, as `--init.weights` does."""
    config, source = read_caption_folder(folder).config, open_weights(Init(weights=str(folder)))
    assert config.video is not None and config.decoder is not None and source is not None
    tower = TimeSformer(
        config.video.size,
        image_px=image_px or config.video.image_px,
        num_frames=num_frames or config.video.num_frames,
        attend=attend,
    )
    captioner = Captioner(tower, Gpt2(config.decoder, attend=attend))
    copy_into(captioner, fit_captioner(captioner, source, allow=(), say=ignore_line))
    return captioner


def clips(num_clips: int, *, num_frames: int = NUM_FRAMES, image_px: int = IMAGE_PX, seed: int = 0) -> torch.Tensor:
    """Return random clips [B, 3, T, H, W]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_clips, 3, num_frames, image_px, image_px, generator=generator, dtype=torch.float64)


def for_them(video_BCTHW: torch.Tensor) -> torch.Tensor:
    """Transpose clips to the layout of transformers, [B, T, C, H, W]."""
    return video_BCTHW.transpose(1, 2)


def targets(*lengths: int, seed: int = 0) -> torch.Tensor:
    """Return random captions of the given lengths as targets, int64 [B, L]: tokens, the end token, padding of -100."""
    generator = torch.Generator().manual_seed(seed)
    targets_BL = torch.full((len(lengths), max(lengths) + 1), -100)
    for row, length in enumerate(lengths):
        targets_BL[row, :length] = torch.randint(0, PAD, (length,), generator=generator)
        targets_BL[row, length] = END
    return targets_BL
