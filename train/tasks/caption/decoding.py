"""Generation of captions token by token, with greedy search, sampling or beam search.

A generator is any object with the methods `start` and `step` (`Generator`): a captioner in one process, or its stages
in a pipeline. The processes of a pipeline decode in lockstep: `step` returns the logits of the last stage in every
process, so all processes choose the same tokens.

Shape suffixes: V videos, v unfinished videos, R rows of text (rows of a video are adjacent), r rows that are
still computed, B beams, c candidates (2 B), L tokens, P prompt tokens, W size of the vocabulary.

The likelihood of a text is the mean natural logarithm of the probabilities of its tokens, including the end token. The
model's unmodified probabilities are used, so temperature, top-k, top-p and a minimum length do not affect the
likelihood.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from clipmill.train.device.random import draw_uniform
from clipmill.train.models.video_vit import choose_rows
from clipmill.train.tasks.caption.spec import (
    DecodingSettings,
    length_penalty_of,
    max_tokens_of,
    num_beams_of,
    temperature_of,
)

# Function that chooses the next tokens [r] from their logits [r, W], the indices of the rows [r], and the position.
Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
# Finished videos are removed from the batch and the cache once at most this fraction of the videos is unfinished.
_COMPACT_AT = 0.5
_NEVER = -1e9  # score of an empty beam


class Cache(Protocol):
    """Cached keys and values of texts that are being generated."""

    def keep(self, rows_r: torch.Tensor, videos_v: torch.Tensor | None = None) -> None:
        """Select rows for the next step.

        Args:
            rows_r: Index of the current row that each new row continues, int64.
            videos_v: Indices of the current videos that the new rows belong to, int64. Default: all videos.
        """


C = TypeVar("C", bound=Cache)


class Generator(Protocol[C]):
    """A model that generates text about videos, such as `clipmill.train.models.captioner.Captioner`."""

    def start(self, video: torch.Tensor, /, *, num_tokens: int, rows_per_video: int = 1) -> C:
        """Encode clips, and return a cache for texts of at most `num_tokens` tokens."""

    def step(self, tokens_RL: torch.Tensor, cache: C, /) -> torch.Tensor:
        """Return the logits [R, W] for the next token.

        The first step takes the prompt, and later steps take one token per row.
        """


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Generated captions.

    Attributes:
        tokens_VL: Tokens, int64, including the end token if it was reached, padded with end tokens. The shape is [R, L]
            if there are several texts per video.
        likelihoods_V: Mean log probability per token, float32. The shape is [R] if there are several texts per video.
        scores_V: Scores of a beam search: sum of log probabilities / length ** length_penalty. None for other methods.
    """

    tokens_VL: torch.Tensor
    likelihoods_V: torch.Tensor
    scores_V: torch.Tensor | None = None


@torch.no_grad()
def generate_captions(
    generator: Generator[C],
    video: torch.Tensor,
    settings: DecodingSettings,
    *,
    end_id: int,
    samples: Sequence[int],
    prompt_VP: torch.Tensor | None = None,
    rows_per_video: int = 1,
) -> Generated:
    """Generate captions for a batch of clips.

    Args:
        generator: Captioner in evaluation mode.
        video: Clips, as passed to the generator.
        settings: Decoding settings.
        end_id: Token before and after a caption.
        samples: One number per text, which identifies the text, such as the index of its clip. The random numbers for
            a text depend on this number and on the seed, but not on the other texts of the batch.
        prompt_VP: First tokens of each text, int64. Default: the end token.
        rows_per_video: Number of texts per clip, in adjacent rows. Greedy and beam search support only 1.
    """
    if prompt_VP is None:
        prompt_VP = torch.full((len(samples) // rows_per_video, 1), end_id, device=video.device)
    if settings.method == "beam":
        return beam_search(generator, video, prompt_VP, settings, end_id=end_id)
    choose = greedy_tokens if settings.method == "greedy" else make_sampler(settings, samples, device=prompt_VP.device)
    return generate(
        generator,
        video,
        prompt_VP,
        choose=choose,
        end_id=end_id,
        min_tokens=settings.min_tokens,
        max_tokens=max_tokens_of(settings),
        rows_per_video=rows_per_video,
    )


def generate(
    generator: Generator[C],
    video: torch.Tensor,
    prompt_VP: torch.Tensor,
    *,
    choose: Choose,
    end_id: int,
    min_tokens: int,
    max_tokens: int,
    rows_per_video: int = 1,
) -> Generated:
    """Generate texts until all texts have ended or have `max_tokens` tokens.

    Args:
        choose: Function that chooses the next tokens.
    """
    num_videos, prompt_length = prompt_VP.shape
    device = prompt_VP.device
    cache = generator.start(video, num_tokens=prompt_length + max_tokens - 1, rows_per_video=rows_per_video)
    tokens_RL = torch.full((num_videos * rows_per_video, max_tokens), end_id, device=device)
    totals_R = torch.zeros(len(tokens_RL), device=device)
    rows_r = torch.arange(len(tokens_RL), device=device)
    is_open_r = torch.ones(len(tokens_RL), dtype=torch.bool, device=device)
    next_tokens = prompt_VP.repeat_interleave(rows_per_video, 0)
    for position in range(max_tokens):
        logits_rW = generator.step(next_tokens, cache)
        norms_r = logits_rW.float().logsumexp(dim=1)  # before any token is excluded
        if position < min_tokens:
            logits_rW[:, end_id] = -torch.inf
        tokens_r = choose(logits_rW, rows_r, position).masked_fill(~is_open_r, end_id)
        tokens_RL[rows_r, position] = tokens_r
        log_probabilities_r = logits_rW.gather(1, tokens_r[:, None])[:, 0].float() - norms_r
        totals_R[rows_r] += log_probabilities_r.masked_fill(~is_open_r, 0)
        is_open_r &= tokens_r != end_id
        is_unfinished_v = is_open_r.view(-1, rows_per_video).any(dim=1)
        num_unfinished = int(is_unfinished_v.sum())
        if num_unfinished == 0:
            tokens_RL = tokens_RL[:, : position + 1]
            break
        if num_unfinished <= _COMPACT_AT * len(is_unfinished_v) and position + 1 < max_tokens:
            rows = is_unfinished_v.repeat_interleave(rows_per_video).nonzero()[:, 0]
            cache.keep(rows, is_unfinished_v.nonzero()[:, 0])
            rows_r, is_open_r, tokens_r = rows_r[rows], is_open_r[rows], tokens_r[rows]
        next_tokens = tokens_r[:, None]
    return Generated(tokens_VL=tokens_RL, likelihoods_V=totals_R / num_tokens_of(tokens_RL, end_id=end_id))


def num_tokens_of(tokens_RL: torch.Tensor, *, end_id: int) -> torch.Tensor:
    """Return the number of tokens of each text, including the end token if it was reached, int64 [R]."""
    return ((tokens_RL == end_id).cumsum(dim=1) == 0).sum(dim=1).add(1).clamp(max=tokens_RL.shape[1])


def greedy_tokens(logits_rW: torch.Tensor, rows_r: torch.Tensor, position: int) -> torch.Tensor:
    """Return the tokens with the highest logits."""
    return logits_rW.argmax(dim=1)


def make_sampler(settings: DecodingSettings, samples: Sequence[int], *, device: torch.device) -> Choose:
    """Return a function that applies temperature, top-k and top-p, in this order, and then samples tokens.

    Args:
        samples: One number per text. The random numbers for a text depend on this number and on the seed.
    """
    sample_R = np.asarray(samples, dtype=np.int64)
    draws_RL = torch.from_numpy(
        draw_uniform(sample_R, max_tokens_of(settings), seed=settings.seed, purpose="tokens of a caption")
    ).to(device)

    def choose(logits_rW: torch.Tensor, rows_r: torch.Tensor, position: int) -> torch.Tensor:
        logits_rW = logits_rW.to(torch.promote_types(logits_rW.dtype, torch.float32))
        logits_rW = apply_temperature(logits_rW, temperature_of(settings))
        if settings.top_k is not None:
            logits_rW = filter_top_k(logits_rW, settings.top_k)
        if settings.top_p is not None:
            logits_rW = filter_top_p(logits_rW, settings.top_p)
        return sample_tokens(logits_rW, draws_RL[rows_r, position])

    return choose


def apply_temperature(logits_RW: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide logits by a temperature. A temperature below 1 makes likely tokens even more likely."""
    return logits_RW / temperature


def filter_top_k(logits_RW: torch.Tensor, top_k: int) -> torch.Tensor:
    """Set the logits of all but the k most likely tokens to -inf (Fan et al. 2018, section 5.4)."""
    if top_k >= logits_RW.shape[1]:
        return logits_RW
    threshold_R1 = logits_RW.topk(top_k, dim=1).values[:, -1:]
    return logits_RW.masked_fill(logits_RW < threshold_R1, -torch.inf)


def filter_top_p(logits_RW: torch.Tensor, top_p: float) -> torch.Tensor:
    """Set the logits of all tokens outside the nucleus to -inf (Holtzman et al. 2020, section 3.1).

    The nucleus is the smallest set of most likely tokens whose probabilities add up to at least `top_p`.
    """
    if top_p >= 1:
        return logits_RW
    sorted_RW, order_RW = logits_RW.sort(dim=1, descending=True, stable=True)
    probabilities_RW = sorted_RW.softmax(dim=1)
    # Keep a token if the total probability of all more likely tokens is below top_p. Always keep the most likely token.
    preceding_RW = probabilities_RW.cumsum(dim=1) - probabilities_RW
    is_excluded_RW = preceding_RW >= top_p
    is_excluded_RW[:, 0] = False
    return logits_RW.masked_fill(is_excluded_RW.gather(1, order_RW.argsort(dim=1)), -torch.inf)


def sample_tokens(logits_RW: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Draw tokens, int64 [R], by evaluating the inverse cumulative distribution at uniform numbers from [0, 1)."""
    sums_RW = logits_RW.double().softmax(dim=1).cumsum(dim=1)
    # Scale the numbers by the sum of all probabilities, which may differ from 1 by rounding.
    targets_R1 = (uniform_R[:, None] * sums_RW[:, -1:]).to(sums_RW.dtype)
    return torch.searchsorted(sums_RW, targets_R1, right=True)[:, 0].clamp(max=logits_RW.shape[1] - 1)


def beam_search(
    generator: Generator[C],
    video: torch.Tensor,
    prompt_VP: torch.Tensor,
    settings: DecodingSettings,
    *,
    end_id: int,
) -> Generated:
    """Find the best text for each video by the rules of beam search in `transformers.generate`.

    In each step, the best 2 B continuations of a video's running texts are candidates, so at least B candidates are
    unfinished. Ended candidates among the best B compete with the finished texts, and the best B of these texts are
    kept. Texts are compared by the sum of their log probabilities / length ** length_penalty. A video is done when it
    has B finished texts and its best running text, scored at its current length, is not better than any of them. With
    early stopping, a video is done as soon as it has B finished texts. At the maximum length, every text counts as
    ended.
    """
    num_videos, prompt_length = prompt_VP.shape
    device = prompt_VP.device
    num_beams, length_penalty, max_tokens = num_beams_of(settings), length_penalty_of(settings), max_tokens_of(settings)
    cache = generator.start(video, num_tokens=prompt_length + max_tokens - 1, rows_per_video=num_beams)
    next_tokens = prompt_VP.repeat_interleave(num_beams, 0)
    running_vBL = torch.full((num_videos, num_beams, max_tokens), end_id, device=device)
    running_scores_vB = torch.full((num_videos, num_beams), _NEVER, device=device)
    running_scores_vB[:, 0] = 0  # only one beam, because all beams start with the same text
    finished_vBL = running_vBL.clone()
    finished_scores_vB = torch.full_like(running_scores_vB, _NEVER)
    best_VL = running_vBL[:, 0].clone()
    best_scores_V = torch.full((num_videos,), _NEVER, device=device)
    videos_v = torch.arange(num_videos, device=device)

    for position in range(max_tokens):
        log_probabilities = generator.step(next_tokens, cache).float().log_softmax(dim=1)
        if position < settings.min_tokens:
            log_probabilities[:, end_id] = -torch.inf
        vocabulary = log_probabilities.shape[1]
        totals = running_scores_vB[..., None] + log_probabilities.view(-1, num_beams, vocabulary)
        scores_vc, index_vc = totals.flatten(1).topk(2 * num_beams, dim=1)
        beams_vc, tokens_vc = index_vc // vocabulary, index_vc % vocabulary
        texts_vcL = choose_rows(running_vBL, beams_vc)
        texts_vcL[:, :, position] = tokens_vc
        is_last = position + 1 == max_tokens
        is_ended_vc = torch.ones_like(tokens_vc, dtype=torch.bool) if is_last else tokens_vc == end_id

        power = (position + 1) ** length_penalty
        ended_scores_vB = (scores_vc / power).masked_fill(~is_ended_vc, _NEVER)[:, :num_beams]
        merged_scores = torch.cat([finished_scores_vB, ended_scores_vB], dim=1)
        finished_scores_vB, best_vB = merged_scores.topk(num_beams, dim=1)
        finished_vBL = choose_rows(torch.cat([finished_vBL, texts_vcL[:, :num_beams]], dim=1), best_vB)

        running_scores_vB, best_vB = scores_vc.masked_fill(is_ended_vc, _NEVER).topk(num_beams, dim=1)
        running_vBL = choose_rows(texts_vcL, best_vB)
        beams_vB = beams_vc.gather(1, best_vB)

        is_full_v = (finished_scores_vB > _NEVER).all(dim=1)
        is_done_v = is_full_v
        if not settings.early_stopping:
            is_done_v = is_full_v & (running_scores_vB[:, 0] / power <= finished_scores_vB[:, -1])
        best_VL[videos_v], best_scores_V[videos_v] = finished_vBL[:, 0], finished_scores_vB[:, 0]
        unfinished_videos = (~is_done_v).nonzero()[:, 0]
        if len(unfinished_videos) == 0 or is_last:
            best_VL = best_VL[:, : position + 1]
            lengths_V = num_tokens_of(best_VL, end_id=end_id)
            likelihoods_V = best_scores_V * lengths_V ** (length_penalty - 1)
            return Generated(tokens_VL=best_VL, likelihoods_V=likelihoods_V, scores_V=best_scores_V)
        rows_r = (unfinished_videos[:, None] * num_beams + beams_vB[unfinished_videos]).flatten()
        cache.keep(rows_r, unfinished_videos if len(unfinished_videos) < len(is_done_v) else None)
        if len(unfinished_videos) < len(is_done_v):
            videos_v, running_vBL, running_scores_vB, finished_vBL, finished_scores_vB = (
                values[unfinished_videos]
                for values in (videos_v, running_vBL, running_scores_vB, finished_vBL, finished_scores_vB)
            )
        next_tokens = running_vBL[:, :, position].reshape(-1, 1)
    raise AssertionError("every text ends at the last token")
