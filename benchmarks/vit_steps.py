"""Training steps of the variants of the video tower that `benchmarks.vit` compares."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarks.timing import seconds_of
from clipmill.train.models.attention import Attend, AttentionChoice, open_attention
from clipmill.train.models.dual_encoder import SIZES
from clipmill.train.models.space_time import SpaceTimeBlock
from clipmill.train.models.transformer import checkpoint_blocks, compile_blocks
from clipmill.train.models.video_vit import VideoViT

NAIVE, OPEN_CLIP = "naive", "open_clip"
TIMED_STEPS = 5
PARTS = ("LayerNorm", "attention", "MLP")  # as in AVION's figure 3


@dataclass(frozen=True, kw_only=True)
class TowerVariant:
    """Tower with its training options.

    Attributes:
        attend: Attention function that replaces `attention`.
    """

    attention: AttentionChoice = "auto"
    attend: Attend | None = None
    checkpoints: bool = False
    compiles: bool = False
    patch_dropout: float = 0.0
    is_open_clip: bool = False
    takes_frames: bool = False  # True if each frame is a clip
    is_divided: bool = False


VARIANTS = {
    NAIVE: TowerVariant(attention="naive"),
    "fused": TowerVariant(),
    "fused, checkpointed": TowerVariant(checkpoints=True),
    "fused, compiled": TowerVariant(compiles=True),
    "fused, half dropped": TowerVariant(patch_dropout=0.5),
    "divided": TowerVariant(is_divided=True),
    "one frame": TowerVariant(takes_frames=True),
    OPEN_CLIP: TowerVariant(is_open_clip=True, takes_frames=True),
    "open_clip, checkpointed": TowerVariant(is_open_clip=True, takes_frames=True, checkpoints=True),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings that all variants of a run share."""

    model: str
    image_px: int
    num_frames: int
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """True on a GPU, to which the targets apply."""
        return self.device.type == "cuda"


class Steps:
    """Training steps of a variant."""

    def __init__(self, variant: TowerVariant, setup: Setup) -> None:
        self._way, self.setup = variant, setup
        torch.manual_seed(0)
        with setup.device:  # initialisation on a CPU would take longer than the steps on a GPU
            self.model = _tower(variant, setup).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def clips(self, num_clips: int) -> torch.Tensor:
        """Return random clips in the layout of the model, or images if the model takes single frames."""
        setup = self.setup
        px, num_frames = setup.image_px, setup.num_frames
        if self._way.is_open_clip:
            return torch.randn(num_clips * num_frames, 3, px, px, device=setup.device)
        if self._way.takes_frames:
            return torch.randn(num_clips * num_frames, 3, 1, px, px, device=setup.device)
        return torch.randn(num_clips, 3, num_frames, px, px, device=setup.device)

    def loss(self, clips: torch.Tensor) -> torch.Tensor:
        """Compute an arbitrary loss of a batch, in the precision of the run."""
        with torch.autocast(self.setup.device.type, dtype=torch.bfloat16, enabled=self.setup.is_cuda):
            embedded = self.model(clips)
        return embedded.float().square().mean()

    def take(self, clips: torch.Tensor) -> None:
        """Take a step."""
        self._optimizer.zero_grad(set_to_none=True)
        self.loss(clips).backward()
        self._optimizer.step()

    def seconds(self, clips: torch.Tensor) -> float:
        """Return the mean time of several steps in seconds; on a CPU, CPU time."""
        return seconds_of(lambda: self.take(clips), device=self.setup.device, count=TIMED_STEPS)

    def kept_bytes(self, num_clips: int) -> dict[str, int]:
        """Return the bytes that a forward pass keeps for the backward pass, by the part that keeps them first.

        A part is a layer norm, an attention (with its projections) or an MLP; "other" is the rest, such as the inputs
        of checkpointed blocks.
        """
        known = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        kept: dict[str, int] = dict.fromkeys((*PARTS, "other"), 0)
        held, within = [], list[str]()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                kept[within[-1] if within else "other"] += storage.nbytes()
                held.append(tensor)  # keeps its address from being reused
            return tensor

        def leave(*_: object) -> None:
            within.pop()

        hooks = []
        for name, module in self.model.named_modules():
            if (part := _part(name, module)) is not None:
                hooks.append(module.register_forward_pre_hook(lambda *_, part=part: within.append(part)))
                hooks.append(module.register_forward_hook(leave))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.loss(self.clips(num_clips))
        for hook in hooks:
            hook.remove()
        return kept


def _part(name: str, module: nn.Module) -> str | None:
    if isinstance(module, nn.LayerNorm):
        return "LayerNorm"
    if isinstance(module, SpaceTimeBlock):
        return "attention"  # it computes both attentions itself; LayerNorm and MLP are modules within
    return {"attn": "attention", "mlp": "MLP"}.get(name.rpartition(".")[2])


def _tower(variant: TowerVariant, setup: Setup) -> nn.Module:
    if variant.is_open_clip:
        return _open_clips_tower(variant, setup)
    attend = variant.attend
    if attend is None:
        attend = open_attention(variant.attention, device_type=setup.device.type, compiles=variant.compiles).attend
    size = SIZES[setup.model]
    tower = VideoViT(
        replace(size.video, is_divided=variant.is_divided),
        image_px=setup.image_px,
        num_frames=1 if variant.takes_frames else setup.num_frames,
        embedding_width=size.embedding_width,
        attend=attend,
        patch_dropout=variant.patch_dropout,
    )
    if variant.checkpoints:
        checkpoint_blocks(tower)
    if variant.compiles:
        torch.compiler.reset()  # code compiled for dynamic batch sizes is slower
        # On a CPU it only tests the program, without requiring a C++ compiler.
        compile_blocks(tower, backend="inductor" if setup.is_cuda else "aot_eager")
    return tower


def _open_clips_tower(variant: TowerVariant, setup: Setup) -> nn.Module:
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
    tower.set_grad_checkpointing(variant.checkpoints)
    return tower


def wait_for(device: torch.device) -> None:
    """Wait until all pending work on a GPU is finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
