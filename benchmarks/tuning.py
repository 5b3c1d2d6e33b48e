"""Training steps of a dual encoder that is trained in part: frozen towers and blocks, low-rank adapters.

    python -m benchmarks.tuning [--model s16] [--batch 8] [--frames 4] [--size-px 112] [--rounds 5] [--json FILE]

A step is forward and backward pass of InfoNCE and a fused AdamW step, on clips that are already on the device, without
and with microbatches of a quarter of the batch (GradCache: towers run twice, a frozen one once). `blocks` are three
quarters of the video tower's. Each variant takes its turn in each round. Seconds are CPU seconds of one thread on a
CPU, or CUDA events on a GPU. They are medians, and ratios are medians of the ratios within a round. `peak MB` is what a
step allocates at most: activations, gradients, copies. `state MB` is the optimizer's, `saved MB` what a checkpoint
holds of model and optimizer.
"""

import statistics
from collections.abc import Callable

import torch

from benchmarks.allocated import peak_bytes
from benchmarks.report import parser_for, print_report
from benchmarks.timing import seconds_of, turns
from train.config.tuning import frozen_part
from train.data.batch import Batch
from train.distributed.world import Step, World
from train.losses.registry import build_contrast
from train.losses.settings import Loss
from train.models.adapters import add_adapters
from train.models.attention import open_attention
from train.models.dual_encoder import SIZES, DualEncoder
from train.optim.parameters import freeze

WHOLE = "whole"
MB = 1 << 20
# Arguments of --freeze, and the rank of adapters of both towers.
VARIANTS: dict[str, tuple[tuple[str, ...], int]] = {
    WHOLE: ((), 0),
    "--freeze video": (("video",), 0),
    "--freeze text": (("text",), 0),
    "--freeze blocks": (("blocks",), 0),
    "--lora.rank 8": ((), 8),
    "--freeze blocks --lora.rank 8": (("blocks",), 8),
}


class Steps:
    """Training steps of one variant; all have the same weights and clips."""

    def __init__(
        self, variant: str, *, model: str, batch: int, frames: int, size_px: int, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        attend = open_attention("auto", device_type=device.type).attend
        parts, rank = VARIANTS[variant]
        self._model = DualEncoder(SIZES[model], image_px=size_px, num_frames=frames, attend=attend)
        first = f"blocks:{SIZES[model].video.trunk.depth * 3 // 4}"
        freeze(self._model, [frozen_part(first if part == "blocks" else part) for part in parts])
        for tower in (self._model.video, self._model.text) if rank else ():
            assert tower is not None
            frozen = {id(one) for one in tower.parameters() if not one.requires_grad}
            add_adapters(tower, rank=rank, scale=1.0, targets=("attention", "mlp"), frozen=frozen)
        self._model.to(device).train()
        self.trained = [one for one in self._model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, fused=True)
        clips = torch.randn(batch, 3, frames, size_px, size_px, device=device)
        tokens = torch.randint(1, 1000, (batch, 12), device=device)
        tokens[:, -1] = 49407
        ids = torch.arange(batch)
        self._batch = Batch(input="pixels", video=clips, tokens=tokens, clip_id=ids, caption_id=ids)
        self._objective = build_contrast(
            Loss(), inputs=lambda part: (part["video"], part["tokens"]), dataset=None, world=World()
        ).to(device)

    def take(self, microbatch: int | None = None) -> None:
        """Run one step."""
        self.optimizer.zero_grad(set_to_none=True)
        self._objective.backward(self._model, self._batch, Step(number=1, microbatch=microbatch))
        self.optimizer.step()

    @property
    def saved_bytes(self) -> int:
        """Bytes of weights and optimizer state in a checkpoint: with adapters only what is trained."""
        has_adapters = any(".lora." in name for name, _ in self._model.named_parameters())
        weights = self.trained if has_adapters else list(self._model.parameters())
        return sum(one.nbytes for one in weights) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, after a step."""
        return sum(one.nbytes for state in self.optimizer.state.values() for one in state.values())


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=[*SIZES], default="s16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--frames", type=int, default=4)
    parser.add_argument("--size-px", type=int, default=112)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS], default=[*VARIANTS])
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    device, part = torch.device(wanted.device), max(1, wanted.batch // 4)
    shape = {"batch": wanted.batch, "frames": wanted.frames, "size_px": wanted.size_px}
    all_steps = {variant: Steps(variant, model=wanted.model, device=device, **shape) for variant in wanted.variants}
    works: dict[str, dict[str, Callable[[], None]]] = {
        variant: {"whole batch": steps.take, "microbatches": lambda steps=steps: steps.take(part)}  # type: ignore[misc]
        for variant, steps in all_steps.items()
    }
    taken: dict[str, dict[str, list[float]]] = {variant: {name: [] for name in works[variant]} for variant in works}
    peaks = {}
    for variant, steps in all_steps.items():
        steps.take()  # allocates the optimizer's state
        steps.optimizer.zero_grad(set_to_none=True)
        peaks[variant] = peak_bytes(steps.take, device=device)
    for _, variant in turns(wanted.variants, wanted.rounds):
        for name, work in works[variant].items():
            taken[variant][name].append(seconds_of(work, device=device))
    rows = []
    for variant, steps in all_steps.items():
        row: dict[str, object] = {"variant": variant, "trained": sum(one.numel() for one in steps.trained)}
        for name, seconds in taken[variant].items():
            row[f"s, {name}"] = statistics.median(seconds)
            others = taken[wanted.variants[0]][name]
            row[f"/ {wanted.variants[0]}, {name}"] = statistics.median(
                own / other for own, other in zip(seconds, others, strict=True)
            )
        rows.append(
            {
                **row,
                "peak MB": peaks[variant] / MB,
                "state MB": steps.state_bytes / MB,
                "saved MB": steps.saved_bytes / MB,
            }
        )
    where = "one CPU thread" if device.type == "cpu" else torch.cuda.get_device_name(device)
    print_report(
        f"Dual encoder {wanted.model}, {wanted.batch} clips of {wanted.frames} frames of {wanted.size_px} px, {where}",
        rows,
        notes=[f"torch {torch.__version__}, float32; microbatches of {part}."],
        json_path=wanted.json,
    )


if __name__ == "__main__":
    main()
