"""Beam search, with the rules of transformers' `generate`.

Of all continuations of a video's running texts the best 2 B are looked at, which always holds B that have not ended.
Those that have ended and are among the best B are finished: with their sum of log probabilities, over their length to
the power of the penalty, they compete for the B places of finished texts. A video is done when its finished texts
cannot be improved on, judged by the best running text at its present length; or, with early stopping, as soon as there
are B of them. At the last token everything counts as ended.

Shape suffixes: V videos, v those that are not done, B beams, r rows (v * B), c candidates (2 B), L tokens, P tokens of
the prompt, W words of the vocabulary.
"""

import torch

from train.tasks.caption.writer import C, Writer, Written

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
