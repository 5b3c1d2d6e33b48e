"""InfoNCE, CLIP's loss (van den Oord et al. 2018, eq. 4; Radford et al. 2021, figure 3)."""

import torch
from torch.nn import functional


def info_nce(video_BE: torch.Tensor, text_BE: torch.Tensor, *, log_scale: torch.Tensor) -> torch.Tensor:
    """Mean of the losses of finding each clip's caption and each caption's clip among those of the batch.

    Two equal captions of a batch stay each other's negatives, as in CLIP: the least loss is then to give both the
    same share, which moves its value up and leaves the ranking of different captions alone. Retrieval is scored with
    equal captions as one (train.evaluation.retrieval).

    Args:
        video_BE: embeddings of unit length, [B, E].
        text_BE: embeddings of unit length, [B, E]; row i belongs to clip i.
        log_scale: log of 1 / temperature, a scalar.
    """
    if video_BE.dtype in (torch.bfloat16, torch.float16):
        # Half precision rounds similarities by more than a small temperature forgives.
        video_BE, text_BE = video_BE.float(), text_BE.float()
    logits_BB = log_scale.exp() * (video_BE @ text_BE.T)
    target_B = torch.arange(len(logits_BB), device=logits_BB.device)
    return (functional.cross_entropy(logits_BB, target_B) + functional.cross_entropy(logits_BB.T, target_B)) / 2
