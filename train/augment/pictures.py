"""From YUV planes to RGB frames in one pass: all colour changes are affine, and combine to one 3x4 matrix per clip.

Chroma, which has half the size of luma, is upsampled bilinearly, with samples at the centres of the four pixels they
represent, as planes are cropped and resized (and as swscale positions them). Swscale's default repeats each sample
instead, which is less accurate; the README has the figures. Upsampled values are whole sixteenths, exact in float32, so
that flipping the planes mirrors the result exactly.

Peak memory of a clip in bytes per pixel of a frame: result 12, upsampled chroma 8, flipped planes 1.5.
"""

from functools import cache

import torch
from torch.nn.functional import interpolate

from train.augment.colour import rgb_matrices
from train.augment.draws import Draw
from train.augment.effects import GREY_WEIGHTS, blur_clips, colour_map, erase_clips
from train.augment.rand_augment import Triple, rand_augment_clips
from train.device.transfer import sent


@torch.no_grad()
def to_model_input(
    video: torch.Tensor,
    colour: torch.Tensor,
    *,
    size_px: int,
    mean: Triple,
    std: Triple,
    draw: Draw | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Convert clips to a model's input: RGB, augmented as drawn, clamped between black and white, normalised.

    Args:
        video: uint8 [B, T, S * S * 3 // 2], frames as planes Y, U, V; S is `size_px`, even.
        colour: uint8 [B], the clips' colour kinds (train.augment.colour), on the same device.
        mean, std: of each channel, for values from 0 to 1.
        draw: the augmentation; none by default.
        dtype: of the result; the arithmetic is float32.

    Returns:
        [B, 3, T, S, S].

    Raises:
        ValueError: the frames are not of `size_px`.
    """
    if size_px % 2 or video.shape[-1] != size_px * size_px * 3 // 2:
        raise ValueError(f"pictures of {video.shape[-1]} bytes are no 4:2:0 planes of {size_px} x {size_px}")
    device = video.device
    has_contrast = draw is not None and bool((draw.contrast != 1).any())
    flip = sent(draw.flip, device) if draw is not None and draw.flip.any() else None
    to_normalised = sent(colour_map(draw, mean=mean, std=std), device)
    pictures = one_pass(
        video,
        _rgb_matrices(device)[colour.long()],
        to_normalised,
        flip,
        size_px=size_px,
        has_contrast=has_contrast,
        black=tuple(-m / s for m, s in zip(mean, std, strict=True)),
        white=tuple((1 - m) / s for m, s in zip(mean, std, strict=True)),
    )
    if draw is not None:
        rand_augment_clips(pictures, draw, mean=mean, std=std)
        blur_clips(pictures, draw.blur_sigma_px)
        erase_clips(pictures, draw)
    return pictures.to(dtype)


def to_rgb_uint8(video: torch.Tensor, colour: torch.Tensor, *, size_px: int) -> torch.Tensor:
    """Convert clips to RGB frames for display: uint8 [B, T, S, S, 3]."""
    scaled = to_model_input(video, colour, size_px=size_px, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
    return scaled.round_().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


def one_pass(
    video: torch.Tensor,
    to_rgb_B34: torch.Tensor,
    to_normalised_B35: torch.Tensor,
    flip_B: torch.Tensor | None,
    *,
    size_px: int,
    has_contrast: bool,
    black: tuple[float, ...],
    white: tuple[float, ...],
) -> torch.Tensor:
    """The pass itself, on tensors alone, so that torch.compile can compile it whole; see `to_model_input`."""
    num_luma, half_px = size_px * size_px, size_px // 2
    luma = video[..., :num_luma].unflatten(-1, (size_px, size_px))
    chroma = video[..., num_luma:].unflatten(-1, (2, half_px, half_px))
    if flip_B is not None:
        luma = torch.where(flip_B[:, None, None, None], luma.flip(-1), luma)
        chroma = torch.where(flip_B[:, None, None, None, None], chroma.flip(-1), chroma)
    # Products of these small matrices are written out, because autocast and TF32 would round them.
    matrix = (to_normalised_B35[:, :, :3, None] * to_rgb_B34[:, None]).sum(2)
    offset = to_normalised_B35[:, :, 3]
    if has_contrast:
        offset = offset + to_normalised_B35[:, :, 4] * _mean_grey(luma, chroma, to_rgb_B34)[:, None]
    offset = offset + matrix[:, :, 3]
    matrix, offset = matrix[..., None, None, None], offset[..., None, None, None]
    enlarged = interpolate(chroma.flatten(1, 2).float(), scale_factor=2, mode="bilinear", align_corners=False)
    enlarged = enlarged.unflatten(1, (-1, 2))
    pictures = torch.addcmul(offset, luma[:, None], matrix[:, :, 0])
    pictures.addcmul_(enlarged[:, None, :, 0], matrix[:, :, 1]).addcmul_(enlarged[:, None, :, 1], matrix[:, :, 2])
    for number, (low, high) in enumerate(zip(black, white, strict=True)):
        pictures[:, number].clamp_(low, high)
    return pictures


def _mean_grey(luma: torch.Tensor, chroma: torch.Tensor, to_rgb_B34: torch.Tensor) -> torch.Tensor:
    """[B]. Sums of integers are exact, whatever the order of additions on a device."""
    num_frames, size_px = luma.shape[1:3]
    luma_B = luma.sum((2, 3), dtype=torch.int32).sum(1) / (num_frames * size_px**2)
    chroma_B2 = chroma.sum((3, 4), dtype=torch.int32).sum(1) / (num_frames * (size_px // 2) ** 2)
    mean_B4 = torch.cat([luma_B[:, None], chroma_B2, torch.ones_like(luma_B[:, None])], dim=1)
    red, green, blue = GREY_WEIGHTS
    grey_B4 = red * to_rgb_B34[:, 0] + green * to_rgb_B34[:, 1] + blue * to_rgb_B34[:, 2]
    return (grey_B4 * mean_B4).sum(1)


@cache
def _rgb_matrices(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rgb_matrices()).float().to(device)
