"""Precomputed data of finetrainers (huggingface/finetrainers), which it reads with --precomputation_reuse.

    finetrainers-precomputed-data/condition-N.pt   the padded sequence of a caption, and its mask
    finetrainers-precomputed-data/latent-N.pt      the parameters of the posterior

The trainer samples the posterior of each segment and normalises the sample. Its parameters here are the latents as the
VAE gives them and, because they are stored without the posterior's width, a standard deviation of almost zero.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipmill.manifests.errors import UserError
from clipmill.prep.exports.kinds import Exported, Progress, TrainerFlags
from clipmill.prep.exports.trainers import Part, Segment, Segments, torch_saved, write_cache

if TYPE_CHECKING:
    import torch

_FOLDER = "finetrainers-precomputed-data"
_LOG_VARIANCE = -1e4  # the trainer takes all below -30 for -30, after it has divided it by latents_std for Wan
# Class of the VAE: entry of the mask of a caption.
_MODELS = {
    "AutoencoderKLWan": None,
    "AutoencoderKLLTXVideo": "encoder_attention_mask",
    "AutoencoderKLCogVideoX": "prompt_attention_mask",
}


def write_finetrainers_data(data_dir: Path, destination: Path, flags: TrainerFlags, show: Progress) -> Exported:
    """Write the precomputed data.

    Raises:
        UserError: see `Segments` and `write_cache`; or the VAE is not that of a model of this trainer with a T5.
    """
    segments = Segments(data_dir, split=flags.split, with_texts=_MODELS)
    if segments.kind not in _MODELS:
        raise UserError(
            f"finetrainers has no model with {segments.kind} and the text encoder T5",
            hint=f"use {' or '.join(_MODELS)}",
        )

    def parts(found: list[Segment]) -> Iterator[Part]:
        for number, segment in enumerate(found):
            for name, mark, made in (
                ("condition", segments.text_mark(segment), _condition),
                ("latent", segments.latents_mark(segment), _latents),
            ):
                content = partial(lambda made, segment: [torch_saved(made(segments, segment))], made, segment)
                yield Part(f"{_FOLDER}/{name}-{number}.pt", mark, content, (number,))

    return write_cache(destination, segments, parts, form="finetrainers", show=show)


def _latents(segments: Segments, segment: Segment) -> dict[str, Any]:
    import torch

    mean = segments.raw(segment)
    moments = torch.cat([mean, torch.full_like(mean, _LOG_VARIANCE)])[None].to(torch.bfloat16)
    if segments.kind == "AutoencoderKLCogVideoX":
        return {"latents": moments.transpose(1, 2).contiguous()}
    statistics = [torch.tensor(one) for one in segments.statistics]
    if segments.kind == "AutoencoderKLWan":
        return {"latents": moments, "latents_mean": statistics[0], "latents_std": 1 / statistics[1]}
    frames, height, width = mean.shape[1:]
    shape = {"num_frames": frames, "height": height, "width": width}
    return {"latents": moments, **shape, "latents_mean": statistics[0], "latents_std": statistics[1]}


def _condition(segments: Segments, segment: Segment) -> dict[str, "torch.Tensor"]:
    import torch

    sequence = segments.sequence(segment)
    padded = torch.zeros(1, int(segments.text_recipe["max_tokens"]), sequence.shape[1], dtype=torch.bfloat16)
    padded[0, : len(sequence)] = sequence
    mask = _MODELS[segments.kind]
    found = {"encoder_hidden_states": padded}
    return found if mask is None else {**found, mask: (torch.arange(padded.shape[1]) < len(sequence))[None]}
