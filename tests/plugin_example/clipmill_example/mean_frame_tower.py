"""Network of `mean_frame`, which is imported when a model is built."""

from torch import Tensor, nn

from clipmill.train.config.model import Towers
from clipmill.train.models.attention import Attend
from clipmill.train.models.video_vit import VideoViTSize

GRID = 4


class MeanFrame(nn.Module):
    """Encoder of clips [B, C, T, H, W] as embeddings [B, embedding_width]."""

    def __init__(
        self,
        size: VideoViTSize,
        *,
        image_px: int,
        num_frames: int,
        embedding_width: int,
        attend: Attend,
        towers: Towers,
    ) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(GRID)
        self.hidden = nn.Linear(size.num_channels * GRID**2, size.trunk.width)
        self.projection = nn.Linear(size.trunk.width, embedding_width)

    def forward(self, video_BCTHW: Tensor) -> Tensor:
        """Return embeddings that are not normalised to unit length."""
        cells_BV = self.pool(video_BCTHW.mean(2)).flatten(1)
        embedding_BE: Tensor = self.projection(nn.functional.gelu(self.hidden(cells_BV)))
        return embedding_BE
