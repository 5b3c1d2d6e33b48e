"""A captioner whose layers lie on the stages of a pipeline, as one that is whole: every stage calls it alike.

Shape suffixes: V videos, R rows of text (V * n), L tokens, W words of the vocabulary.
"""

import torch
from torch import nn

from train.distributed.chain import from_last, run_along
from train.distributed.world import World
from train.models.gpt2_block import TextCache
from train.tasks.caption.stages import CaptionerPart


def whole_captioner(model: nn.Module, *, stages: World, device: torch.device) -> nn.Module:
    """What every stage of a pipeline can call as a whole captioner; the model itself where there is one stage."""
    if stages.size == 1:
        return model
    assert isinstance(model, CaptionerPart)
    return StagedCaptioner(model, stages=stages, device=device)


class StagedCaptioner(nn.Module):
    """What `train.models.captioner.Captioner` computes; only the first stage is asked what the clips look like.

    The states of the encoder go through the stages once, and each keeps what its own blocks know of the texts. What the
    last one finds is sent to all, R * W numbers a token: so all of them choose the same tokens.

    Args:
        part: this stage's layers.
    """

    def __init__(self, part: CaptionerPart, *, stages: World, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self._stages, self._device = stages, device
        # Those before have no text.
        self._first = stages.gather_objects(part.has("token_embedding")).index(True)

    def forward(self, video_VCTHW: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [R, L, W] of the token after each; see `Captioner.forward`."""

        def run(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            found = self.part(*(given or (video_VCTHW,)), tokens=tokens)
            return found if isinstance(found, tuple) else (found,)

        return self._from_last(run_along(self._stages, run, device=self._device))

    def start(self, video_VCTHW: torch.Tensor, *, num_tokens: int, rows_per_video: int = 1) -> TextCache:
        """A cache of this stage's blocks; see `Captioner.start`."""

        def run(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (self.part.encode(*(given or (video_VCTHW,))),)

        (video_VND,) = run_along(self._stages, run, device=self._device)
        return self.part.start(video_VND, num_tokens=num_tokens, rows_per_video=rows_per_video)

    def step(self, tokens_RL: torch.Tensor, cache: TextCache) -> torch.Tensor:
        """Logits [R, W] of what follows these tokens; see `Captioner.step`."""

        def run(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (self.part.step(given[0] if given else tokens_RL, cache),)

        return self._from_last(run_along(self._stages, run, first=self._first, device=self._device))

    def _from_last(self, found: tuple[torch.Tensor, ...]) -> torch.Tensor:
        is_last = self._stages.rank == self._stages.size - 1
        return from_last(self._stages, found[0] if is_last else None, device=self._device)
