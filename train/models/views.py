"""Video towers for clips [B, V, C, T, H, W] of several views, which are recordings of a moment by different cameras.

    mean    the tower processes each view as a separate clip; the output is the mean over the views
    concat  the blocks process the tokens of all views together, so that views attend to each other; a learned
            embedding for each view, initially zero, distinguishes the views

Parameters have the same names as in a tower for one view. The towers also accept clips [B, C, T, H, W] of one view.

Shape suffixes: B batch, V views, C channels, T frames, H and W pixels, L tokens of a view, D width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import ViewRule
from clipmill.train.models.transformer import Transformer
from clipmill.train.models.video_vit import TokenTower

_CLIP_DIMS = 5


def accept_views(tower: nn.Module, *, num_views: int, rule: ViewRule) -> None:
    """Change a tower so that it accepts clips with several views.

    Raises:
        UserError: The rule is concat, but the tower's blocks do not attend to all tokens at once.
    """
    if rule == "concat":
        if not isinstance(tower, TokenTower) or not isinstance(tower.transformer, Transformer):
            raise UserError(
                f"--towers.views is concat, but {type(tower).__name__} has no blocks that attend to all tokens at once",
                hint="use --towers.views mean, or --towers.kind clip with joint attention, or videomae",
                flags=("--towers.views",),
            )
        tower.view_embedding = nn.Parameter(torch.zeros(num_views, tower.token_width))
    # Replace the class, as FSDP does, so that the tower keeps its methods and parameter names.
    tower.__class__ = type(f"{type(tower).__name__}OfViews", (_Views, type(tower)), {})
    assert isinstance(tower, _Views)
    tower.num_views, tower.view_rule = num_views, rule


class _Views(nn.Module):
    """Mixin that extends a tower's methods to several views. It precedes the tower's class in the MRO."""

    num_views: int
    view_rule: ViewRule
    view_embedding: nn.Parameter

    def forward(self, video: Tensor, *arguments: Any) -> Tensor:
        return self._combine_views(super().forward, video, *arguments)

    def features(self, video: Tensor) -> Tensor:
        return self._combine_views(super().features, video)  # type: ignore[misc]

    def tokens(self, video: Tensor) -> Tensor:
        return self._combine_views(super().tokens, video)  # type: ignore[misc]

    def embed(self, video: Tensor, /, *arguments: Any) -> Tensor:
        if video.ndim == _CLIP_DIMS:
            return super().embed(video, *arguments)  # type: ignore[misc, no-any-return]
        x_BVLD = super().embed(video.flatten(0, 1), *arguments).unflatten(0, (-1, self.num_views))  # type: ignore[misc]
        joined_BLD: Tensor = (x_BVLD + self.view_embedding[:, None].to(x_BVLD.dtype)).flatten(1, 2)
        return joined_BLD

    def _combine_views(self, method: Callable[..., Tensor], video: Tensor, *arguments: Any) -> Tensor:
        if video.ndim == _CLIP_DIMS or self.view_rule == "concat":
            return method(video, *arguments)
        return method(video.flatten(0, 1), *arguments).unflatten(0, (-1, self.num_views)).mean(1)
