"""One text a video, token by token: greedy, or drawn.

Shape suffixes: V videos, r those that are still computed, L tokens, P tokens of the prompt, W words of the vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from train.device.random import uniform
from train.tasks.caption.caption_decoding_settings import DecodingSettings, max_tokens_of, temperature_of
from train.tasks.caption.filters import among_likeliest, drawn, in_nucleus, warmed
from train.tasks.caption.writer import C, Writer, Written

# Chooses the next tokens: of logits [r, W], of the numbers of the videos [r], and of the token's number.
Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
# Finished texts are computed on with the others until so few are left that copying the caches of those pays.
_FEW = 0.5


def write_single(
    writer: Writer[C],
    video: torch.Tensor,
    prompt_VP: torch.Tensor,
    *,
    choose: Choose,
    end_id: int,
    min_tokens: int,
    max_tokens: int,
) -> Written:
    """Writes until all texts have ended, or have `max_tokens`."""
    num_videos, prompt_length = prompt_VP.shape
    device = prompt_VP.device
    cache = writer.start(video, num_tokens=prompt_length + max_tokens - 1)
    written_VL = torch.full((num_videos, max_tokens), end_id, device=device)
    videos_r = torch.arange(num_videos, device=device)
    is_open_r = torch.ones(num_videos, dtype=torch.bool, device=device)
    given = prompt_VP
    for number in range(max_tokens):
        logits_rW = writer.step(given, cache)
        if number < min_tokens:
            logits_rW[:, end_id] = -torch.inf
        tokens_r = choose(logits_rW, videos_r, number).masked_fill(~is_open_r, end_id)
        written_VL[videos_r, number] = tokens_r
        is_open_r &= tokens_r != end_id
        num_open = int(is_open_r.sum())
        if num_open == 0:
            return Written(tokens_VL=written_VL[:, : number + 1])
        if num_open <= _FEW * len(is_open_r) and number + 1 < max_tokens:
            rows = is_open_r.nonzero()[:, 0]
            cache.keep(rows, rows)
            videos_r, is_open_r, tokens_r = videos_r[rows], is_open_r[rows], tokens_r[rows]
        given = tokens_r[:, None]
    return Written(tokens_VL=written_VL)


def likeliest(logits_rW: torch.Tensor, videos_r: torch.Tensor, number: int) -> torch.Tensor:
    """Greedy: the token with the largest logit."""
    return logits_rW.argmax(dim=1)


def drawing(settings: DecodingSettings, samples: Sequence[int], *, device: torch.device) -> Choose:
    """Draws tokens: temperature, then the likeliest K, then the nucleus.

    Args:
        samples: a number of each video; with the seed and the token's number it decides what is drawn, whatever else
            is in the batch.
    """
    positions = np.asarray(samples, dtype=np.int64)
    draws_VL = torch.from_numpy(
        uniform(positions, max_tokens_of(settings), seed=settings.seed, purpose="tokens of a caption")
    ).to(device)

    def choose(logits_rW: torch.Tensor, videos_r: torch.Tensor, number: int) -> torch.Tensor:
        logits_rW = warmed(logits_rW.to(torch.promote_types(logits_rW.dtype, torch.float32)), temperature_of(settings))
        if settings.top_k is not None:
            logits_rW = among_likeliest(logits_rW, settings.top_k)
        if settings.top_p is not None:
            logits_rW = in_nucleus(logits_rW, settings.top_p)
        return drawn(logits_rW, draws_VL[videos_r, number])

    return choose
