"""Writes the captions of a batch of clips as the settings say."""

from collections.abc import Sequence

import torch

from train.tasks.caption.beam import write_by_beams
from train.tasks.caption.caption_decoding_settings import (
    DecodingSettings,
    length_penalty_of,
    max_tokens_of,
    num_beams_of,
)
from train.tasks.caption.decoding import drawing, likeliest, write_single
from train.tasks.caption.writer import C, Writer, Written


@torch.no_grad()
def write_captions(
    writer: Writer[C],
    video: torch.Tensor,
    settings: DecodingSettings,
    *,
    end_id: int,
    samples: Sequence[int],
    prompt_VP: torch.Tensor | None = None,
) -> Written:
    """Captions of clips.

    Args:
        writer: a captioner, in evaluation mode.
        video: clips as the writer takes them.
        end_id: the token before and behind a caption.
        samples: a number of each clip, of its own in the data set: what is drawn for a clip depends on it and on the
            seed, not on the batch.
        prompt_VP: int64, what each text begins with, instead of the end alone.
    """
    if prompt_VP is None:
        prompt_VP = torch.full((len(samples), 1), end_id, device=video.device)
    limits = {"end_id": end_id, "min_tokens": settings.min_tokens, "max_tokens": max_tokens_of(settings)}
    if settings.method == "beam":
        return write_by_beams(
            writer,
            video,
            prompt_VP,
            num_beams=num_beams_of(settings),
            length_penalty=length_penalty_of(settings),
            early_stopping=bool(settings.early_stopping),
            **limits,
        )
    choose = likeliest if settings.method == "greedy" else drawing(settings, samples, device=prompt_VP.device)
    return write_single(writer, video, prompt_VP, choose=choose, **limits)
