"""One text a video, token by token: greedy, or drawn.

Shape suffixes: V videos, r those that are still computed, L tokens, P tokens of the prompt, W words of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from train.device.random import uniform
from train.tasks.caption.settings import (
    DecodingSettings,
    length_penalty_of,
    max_tokens_of,
    num_beams_of,
    temperature_of,
)

# What decoding asks of a model: the same of one process and of the stages of a pipeline.
#
# `train.models.captioner.Captioner` has it. Where several processes have a part of the model each, all of them decode
# in step: each has the logits of the last stage from `step`, and so chooses the same tokens.
#
# Shape suffixes: V videos, R rows of text (V * n, those of a video one behind the other), L tokens, W words of the
# vocabulary.


class Cache(Protocol):
    """What a model keeps of texts that are being written."""

    def keep(self, rows_r: torch.Tensor, videos_v: torch.Tensor | None = None) -> None:
        """Puts other rows in the places of the rows.

        Args:
            rows_r: int64, which row each of the new ones goes on from.
            videos_v: int64, the videos that are left, whose rows these are; all of them when left out.
        """


C = TypeVar("C", bound=Cache)


class Writer(Protocol[C]):
    """A model that writes about videos."""

    def start(self, video: torch.Tensor, /, *, num_tokens: int, rows_per_video: int = 1) -> C:
        """A cache with room for texts of so many tokens."""

    def step(self, tokens_RL: torch.Tensor, cache: C, /) -> torch.Tensor:
        """Logits [R, W] of what follows these tokens: all that is given in the first step, one a row later."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Captions.

    Attributes:
        tokens_VL: int64, what was written, with the end where there is one, and ends behind it.
        scores_V: of a beam search: sums of log probabilities, over the length to the power of the penalty.
    """

    tokens_VL: torch.Tensor
    scores_V: torch.Tensor | None = None


# Which tokens may be drawn, and how likely each is: pure functions of logits.
#
# Shape suffixes: R rows, W words of the vocabulary. What must not be drawn has the logit -inf.


def warmed(logits_RW: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits at a temperature: below 1 the likely becomes likelier."""
    return logits_RW / temperature


def among_likeliest(logits_RW: torch.Tensor, top_k: int) -> torch.Tensor:
    """The K likeliest tokens alone (Fan et al. 2018, section 5.4), and those that are as likely as the K-th."""
    if top_k >= logits_RW.shape[1]:
        return logits_RW
    least_R1 = logits_RW.topk(top_k, dim=1).values[:, -1:]
    return logits_RW.masked_fill(logits_RW < least_R1, -torch.inf)


def in_nucleus(logits_RW: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest likeliest tokens whose probabilities have `top_p` as their sum (Holtzman et al. 2020, section 3.1)."""
    if top_p >= 1:
        return logits_RW
    sorted_RW, order_RW = logits_RW.sort(dim=1, descending=True, stable=True)
    probabilities_RW = sorted_RW.softmax(dim=1)
    # Those before it do not have enough yet; the first is always in.
    before_RW = probabilities_RW.cumsum(dim=1) - probabilities_RW
    is_out_RW = before_RW >= top_p
    is_out_RW[:, 0] = False
    return logits_RW.masked_fill(is_out_RW.gather(1, order_RW.argsort(dim=1)), -torch.inf)


def drawn(logits_RW: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The token that a number from [0, 1) draws, int64 [R]: tokens share the interval by their probabilities."""
    sums_RW = logits_RW.double().softmax(dim=1).cumsum(dim=1)
    # Sums of probabilities end near 1, not at it.
    wanted_R1 = (uniform_R[:, None] * sums_RW[:, -1:]).to(sums_RW.dtype)
    return torch.searchsorted(sums_RW, wanted_R1, right=True)[:, 0].clamp(max=logits_RW.shape[1] - 1)


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


# Beam search, with the rules of transformers' `generate`.
#
# Of all continuations of a video's running texts the best 2 B are looked at, which always holds B that have not
# ended. Those that have ended and are among the best B are finished: with their sum of log probabilities, over their
# length to the power of the penalty, they compete for the B places of finished texts. A video is done when its
# finished texts cannot be improved on, judged by the best running text at its present length; or, with early
# stopping, as soon as there are B of them. At the last token everything counts as ended.
#
# Shape suffixes: V videos, v those that are not done, B beams, r rows (v * B), c candidates (2 B), L tokens, P tokens
# of the prompt, W words of the vocabulary.


_NEVER = -1e9  # the score of what is not there


def write_by_beams(
    writer: Writer[C],
    video: torch.Tensor,
    prompt_VP: torch.Tensor,
    *,
    num_beams: int,
    length_penalty: float,
    early_stopping: bool,
    end_id: int,
    min_tokens: int,
    max_tokens: int,
) -> Written:
    """Writes the best text of each video."""
    num_videos, prompt_length = prompt_VP.shape
    device = prompt_VP.device
    cache = writer.start(video, num_tokens=prompt_length + max_tokens - 1, rows_per_video=num_beams)
    given = prompt_VP.repeat_interleave(num_beams, 0)
    running_vBL = torch.full((num_videos, num_beams, max_tokens), end_id, device=device)
    running_scores_vB = torch.full((num_videos, num_beams), _NEVER, device=device)
    running_scores_vB[:, 0] = 0  # at first all are the same text
    finished_vBL = running_vBL.clone()
    finished_scores_vB = torch.full_like(running_scores_vB, _NEVER)
    best_VL = running_vBL[:, 0].clone()
    best_scores_V = torch.full((num_videos,), _NEVER, device=device)
    videos_v = torch.arange(num_videos, device=device)

    for number in range(max_tokens):
        log_probabilities = writer.step(given, cache).float().log_softmax(dim=1)
        if number < min_tokens:
            log_probabilities[:, end_id] = -torch.inf
        vocabulary = log_probabilities.shape[1]
        totals = running_scores_vB[..., None] + log_probabilities.view(-1, num_beams, vocabulary)
        scores_vc, places_vc = totals.flatten(1).topk(2 * num_beams, dim=1)
        beams_vc, tokens_vc = places_vc // vocabulary, places_vc % vocabulary
        texts_vcL = _rows(running_vBL, beams_vc)
        texts_vcL[:, :, number] = tokens_vc
        has_ended_vc = tokens_vc == end_id if number + 1 < max_tokens else torch.ones_like(tokens_vc, dtype=torch.bool)

        power = (number + 1) ** length_penalty
        ended_scores_vB = (scores_vc / power).masked_fill(~has_ended_vc, _NEVER)[:, :num_beams]
        merged_scores = torch.cat([finished_scores_vB, ended_scores_vB], dim=1)
        finished_scores_vB, chosen_vB = merged_scores.topk(num_beams, dim=1)
        finished_vBL = _rows(torch.cat([finished_vBL, texts_vcL[:, :num_beams]], dim=1), chosen_vB)

        running_scores_vB, chosen_vB = scores_vc.masked_fill(has_ended_vc, _NEVER).topk(num_beams, dim=1)
        running_vBL = _rows(texts_vcL, chosen_vB)
        beams_vB = beams_vc.gather(1, chosen_vB)

        is_full_v = (finished_scores_vB > _NEVER).all(dim=1)
        is_done_v = (
            is_full_v if early_stopping else is_full_v & (running_scores_vB[:, 0] / power <= finished_scores_vB[:, -1])
        )
        best_VL[videos_v], best_scores_V[videos_v] = finished_vBL[:, 0], finished_scores_vB[:, 0]
        left = (~is_done_v).nonzero()[:, 0]
        if len(left) == 0 or number + 1 == max_tokens:
            return Written(tokens_VL=best_VL[:, : number + 1], scores_V=best_scores_V)
        rows_r = (left[:, None] * num_beams + beams_vB[left]).flatten()
        cache.keep(rows_r, left if len(left) < len(is_done_v) else None)
        if len(left) < len(is_done_v):
            videos_v, running_vBL, running_scores_vB, finished_vBL, finished_scores_vB = (
                x[left] for x in (videos_v, running_vBL, running_scores_vB, finished_vBL, finished_scores_vB)
            )
        given = running_vBL[:, :, number].reshape(-1, 1)
    raise AssertionError("the last token ends everything")


def _rows(texts: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return texts.gather(1, numbers[..., None].expand(-1, -1, texts.shape[2]))


# Writes the captions of a batch of clips as the settings say.


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
