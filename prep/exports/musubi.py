"""The cache of musubi-tuner (kohya-ss/musubi-tuner, format_version 1.0.1), from which it trains without VAE and T5.

A segment has two safetensors files, whose names begin alike:

    NAME_00000-FFF_WWWWxHHHH_ARCH.safetensors   latents_T'xhxw_DTYPE [C, T', h, w]
    NAME_ARCH_te.safetensors                    varlen_t5_DTYPE [L, D]

The number of frames FFF and the size are those of the pixels. Latents of Wan are normalised per channel; those of
HunyuanVideo are neither shifted nor scaled, which the trainer does. Its text encoders are not T5, so that its texts are
left to the trainer's own script.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.prep.exports.kinds import Exported, Progress, TrainerFlags
from clipmill.prep.exports.trainers import Part, Segment, Segments, write_cache

_FORMAT_VERSION = "1.0.1"
# Class of the VAE: short and full name of the architecture, and whether latents are normalised.
_ARCHITECTURES = {
    "AutoencoderKLWan": ("wan", "wan", True),
    "AutoencoderKLHunyuanVideo": ("hv", "hunyuan_video", False),
    "AutoencoderKLHunyuanVideo15": ("hv15", "hunyuan_video_1_5", False),
}
_WAN_5B = {"channels": 48, "factor": 16}  # by which the VAE of Wan 2.2 TI2V-5B differs, a model that it does not have
_WITH_T5 = ("AutoencoderKLWan",)


def write_musubi_cache(data_dir: Path, destination: Path, flags: TrainerFlags, show: Progress) -> Exported:
    """Write the cache.

    Raises:
        UserError: see `Segments` and `write_cache`; or the VAE is not that of an architecture of this trainer.
    """
    segments = Segments(data_dir, split=flags.split, with_texts=_WITH_T5)
    kind, recipe = segments.kind, segments.recipe
    if kind not in _ARCHITECTURES:
        raise UserError(f"musubi-tuner has no architecture with {kind}", hint=f"use {' or '.join(_ARCHITECTURES)}")
    if kind == "AutoencoderKLWan" and any(recipe.get(name) == value for name, value in _WAN_5B.items()):
        raise UserError(
            "the latents are those of Wan 2.2 TI2V-5B, a model that musubi-tuner does not have: its VAE has 48 channels"
            " and shrinks each side by 16",
            hint="use prep export diffusion-pipe, or make latents with the VAE of Wan 2.1, which Wan 2.2 14B uses too",
        )
    short, full, is_normalised = _ARCHITECTURES[kind]
    size, num_frames = int(segments.recipe["size"]), segments.num_frames

    def latents(segment: Segment) -> list[bytes]:
        stored = segments.stored(segment)
        values = stored if is_normalised else segments.raw(segment).to(stored.dtype)
        _, frames, height, width = values.shape
        return _saved(
            {f"latents_{frames}x{height}x{width}_{str(values.dtype).removeprefix('torch.')}": values},
            architecture=full,
            width=str(size),
            height=str(size),
            frame_count=str(num_frames),
        )

    def text(segment: Segment) -> list[bytes]:
        return _saved({"varlen_t5_float16": segments.sequence(segment)}, architecture=full, caption1=segment.caption)

    def parts(found: list[Segment]) -> Iterator[Part]:
        for number, segment in enumerate(found):
            name = f"{segment.name}_00000-{num_frames:03d}_{size:04d}x{size:04d}_{short}.safetensors"
            yield Part(name, segments.latents_mark(segment), partial(latents, segment), (number,))
            if segments.has_texts:
                name = f"{segment.name}_{short}_te.safetensors"
                yield Part(name, segments.text_mark(segment), partial(text, segment), (number,))

    return write_cache(destination, segments, parts, form=f"musubi {_FORMAT_VERSION}", show=show)


def _saved(tensors: dict[str, object], **metadata: str) -> list[bytes]:
    from safetensors.torch import save

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}  # type: ignore[attr-defined]
    return [save(contiguous, metadata={**metadata, "format_version": _FORMAT_VERSION})]
