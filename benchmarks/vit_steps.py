"""Training steps of the video tower by the ways that `benchmarks.vit` compares."""

from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.timing import seconds_of
from train.models.attention import Attend, AttentionChoice, open_attention
from train.models.dual_encoder import SIZES
from train.models.transformer import checkpoint_blocks, compile_blocks
from train.models.video_vit import VideoViT

NAIVE, OPEN_CLIP = "naive", "open_clip"
TIMED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Way:
    """A tower and how it is trained.

    Attributes:
        attend: instead of what `attention` names.
    """

    attention: AttentionChoice = "auto"
    attend: Attend | None = None
    checkpoints: bool = False
    compiles: bool = False
    patch_dropout: float = 0.0
    is_open_clip: bool = False
    takes_frames: bool = False  # a frame is a clip of its own


WAYS = {
    NAIVE: Way(attention="naive"),
    "fused": Way(),
    "fused, checkpointed": Way(checkpoints=True),
    "fused, compiled": Way(compiles=True),
    "fused, half dropped": Way(patch_dropout=0.5),
    "one frame": Way(takes_frames=True),
    OPEN_CLIP: Way(is_open_clip=True, takes_frames=True),
    "open_clip, checkpointed": Way(is_open_clip=True, takes_frames=True, checkpoints=True),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all ways of a run share."""

    model: str
    image_px: int
    num_frames: int
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether it is the one that the targets are about."""
        return self.device.type == "cuda"


class Steps:
    """Training steps of one way."""

    def __init__(self, way: Way, setup: Setup) -> None:
        self._way, self.setup = way, setup
        torch.manual_seed(0)
        with setup.device:  # where it is also drawn: a CPU takes longer for the weights than a GPU for the steps
            self.model = _tower(way, setup).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def clips(self, num_clips: int) -> torch.Tensor:
        """Clips as the way's model takes them, frames as pictures where it takes those."""
        setup = self.setup
        px, num_frames = setup.image_px, setup.num_frames
        if self._way.is_open_clip:
            return torch.randn(num_clips * num_frames, 3, px, px, device=setup.device)
        if self._way.takes_frames:
            return torch.randn(num_clips * num_frames, 3, 1, px, px, device=setup.device)
        return torch.randn(num_clips, 3, num_frames, px, px, device=setup.device)

    def loss(self, clips: torch.Tensor) -> torch.Tensor:
        """Some loss of a batch, in the run's precision."""
        with torch.autocast(self.setup.device.type, dtype=torch.bfloat16, enabled=self.setup.is_cuda):
            embedded = self.model(clips)
        return embedded.float().square().mean()

    def take(self, clips: torch.Tensor) -> None:
        """One step."""
        self._optimizer.zero_grad(set_to_none=True)
        self.loss(clips).backward()
        self._optimizer.step()

    def seconds(self, clips: torch.Tensor) -> float:
        """Mean seconds of some steps; CPU time on a CPU."""
        return seconds_of(lambda: self.take(clips), device=self.setup.device, count=TIMED_STEPS)

    def kept_bytes(self, num_clips: int) -> int:
        """Bytes that a forward pass leaves for the backward pass."""
        known = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        kept: dict[int, int] = {}
        held = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
                held.append(tensor)  # so that its place is not given to another
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.loss(self.clips(num_clips))
        return sum(kept.values())


def _tower(way: Way, setup: Setup) -> nn.Module:
    if way.is_open_clip:
        return _open_clips_tower(way, setup)
    attend = way.attend
    if attend is None:
        attend = open_attention(way.attention, device_type=setup.device.type, compiles=way.compiles).attend
    size = SIZES[setup.model]
    tower = VideoViT(
        size.video,
        image_px=setup.image_px,
        num_frames=1 if way.takes_frames else setup.num_frames,
        embedding_width=size.embedding_width,
        attend=attend,
        patch_dropout=way.patch_dropout,
    )
    if way.checkpoints:
        checkpoint_blocks(tower)
    if way.compiles:
        torch.compiler.reset()  # what was compiled for batches of any size is slower
        # A CPU shows that it works, without a C++ compiler.
        compile_blocks(tower, backend="inductor" if setup.is_cuda else "aot_eager")
    return tower


def _open_clips_tower(way: Way, setup: Setup) -> nn.Module:
    from open_clip.transformer import VisionTransformer

    size = SIZES[setup.model]
    trunk = size.video.trunk
    tower = VisionTransformer(
        image_size=setup.image_px,
        patch_size=size.video.patch_px,
        width=trunk.width,
        layers=trunk.depth,
        heads=trunk.num_heads,
        mlp_ratio=4.0,
        output_dim=size.embedding_width,
    )
    tower.set_grad_checkpointing(way.checkpoints)
    return tower


def wait_for(device: torch.device) -> None:
    """Returns once all that was begun on a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
