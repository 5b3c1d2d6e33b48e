"""Decoupled contrastive learning (Yeh et al. 2022, eq. 6): InfoNCE without the pair among its negatives."""

import math

import torch

from clipmill.train.losses.contrastive import Pairs
from clipmill.train.losses.settings import Loss, LossSpec


def decoupled(pairs: Pairs, settings: Loss) -> torch.Tensor:
    """Return the mean loss of this rank's pairs (scalar)."""
    own_b1 = pairs.target_b[:, None]
    clips_bB = pairs.scale * pairs.video_bE @ pairs.text_BE.T
    captions_bB = pairs.scale * pairs.text_bE @ pairs.video_BE.T
    negatives_b = sum(logits_bB.scatter(1, own_b1, -math.inf).logsumexp(1) for logits_bB in (clips_bB, captions_bB))
    return (negatives_b / 2 - clips_bB.gather(1, own_b1)[:, 0]).mean()


DECOUPLED = LossSpec(name="decoupled", loss=decoupled, settings={"temperature": 0.07, "freeze_temperature": False})
