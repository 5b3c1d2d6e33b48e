"""Cost of a contrastive loss without a model: from embeddings to their gradients, for 2048 pairs of width 512.

    python -m benchmarks.losses [--rounds 11] [--pairs 2048] [--width 512] [--device cpu] [--json FILE]

Each implementation takes embeddings of unit length, and computes the gradients of the embeddings and of the parameters
of the loss, including per-sample state and logged values. Ours is `backward` of the objective, as the training loop
calls it, with an identity model. open_clip's is its loss class with autograd. The implementations take turns. On a CPU:
CPU seconds of this process on one thread, because the machine may be shared; on a GPU: CUDA events. Figures are
medians, and ratios are medians of the ratios within each round.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.report import parser_for, print_report
from benchmarks.timing import seconds_of
from clipmill.train.data.batch import Batch
from clipmill.train.distributed.world import Step, World
from clipmill.train.losses.contrastive import DatasetSize, build_contrast
from clipmill.train.losses.settings import LOSSES, Loss

BASE = "infonce"
OPEN_CLIP = "infonce, open_clip"
SIGLIP_OPEN_CLIP = "siglip, open_clip"
NUM_SAMPLES = 100_000  # rows of the per-sample state


class Embeddings(nn.Module):
    """Model that returns its parameters."""

    def __init__(self, num_pairs: int, width: int) -> None:
        super().__init__()
        video, noise = torch.randn(2, num_pairs, width)
        self.video = nn.Parameter(nn.functional.normalize(video, dim=1))
        self.text = nn.Parameter(nn.functional.normalize(video + 2 * noise, dim=1))

    def forward(self, clips: torch.Tensor, captions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings of all clips and captions."""
        return self.video, self.text


def our_variant(kind: str, model: Embeddings, batch: Batch, device: torch.device) -> Callable[[], None]:
    """Return a function that computes the gradients of clipmill's objective, with a moving average of gamma 0.5."""
    settings = Loss(kind=kind, **({"gamma": 0.5, "gamma_schedule": "constant"} if LOSSES[kind].is_global else {}))  # type: ignore[arg-type]
    dataset = DatasetSize(num_clips=NUM_SAMPLES, num_captions=NUM_SAMPLES, num_epochs=10)
    inputs = (model.video, model.text)
    objective = build_contrast(settings, inputs=lambda batch: inputs, dataset=dataset, world=World()).to(device)
    step = Step(number=1, epoch=1.0)

    def once() -> None:
        model.zero_grad()
        objective.zero_grad()
        objective.backward(model, batch, step)

    return once


def their_variant(name: str, model: Embeddings, device: torch.device) -> Callable[[], None]:
    """Return a function that computes the gradients of an open_clip loss with autograd."""
    import open_clip.loss

    log_scale = nn.Parameter(torch.tensor(2.66, device=device))
    bias = nn.Parameter(torch.tensor(-10.0, device=device))
    clip, siglip = open_clip.loss.ClipLoss(), open_clip.loss.SigLipLoss()

    def once() -> None:
        model.zero_grad()
        log_scale.grad = bias.grad = None
        if name == OPEN_CLIP:
            loss = clip(model.video, model.text, log_scale.exp())
        else:
            loss = siglip(model.video, model.text, log_scale.exp(), bias)
        loss.backward()
        loss.item()

    return once


def openings_of(num_pairs: int, width: int, device: torch.device) -> dict[str, Callable[[], Callable[[], None]]]:
    """Return functions that open each implementation with the same embeddings, ours first."""
    torch.manual_seed(0)
    model = Embeddings(num_pairs, width).to(device)
    ids = torch.randperm(NUM_SAMPLES)[:num_pairs]
    batch = Batch(input="latents", clip_id=ids, caption_id=ids)
    variants: dict[str, Callable[[], Callable[[], None]]] = {
        kind: partial(our_variant, kind, model, batch, device) for kind in LOSSES
    }
    return variants | {name: partial(their_variant, name, model, device) for name in (OPEN_CLIP, SIGLIP_OPEN_CLIP)}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--pairs", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    openings = openings_of(arguments.pairs, arguments.width, device)
    variants = {name: opening() for name, opening in openings.items()}
    names = list(variants)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, arguments.rounds):
        # Each round starts with a different implementation.
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            seconds = seconds_of(variants[name], device=device)
            if number >= 0:
                taken[name].append(seconds)
    rows = [
        {
            "loss": name,
            "ms": 1000 * statistics.median(taken[name]),
            "lowest": 1000 * min(taken[name]),
            "highest": 1000 * max(taken[name]),
            "/ infonce": _ratio(taken[name], taken[BASE]),
            "/ open_clip's infonce": _ratio(taken[name], taken[OPEN_CLIP]),
        }
        for name in names
    ]
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    print_report(
        f"Losses of {arguments.pairs} pairs, width {arguments.width}, {where}",
        rows,
        notes=["Target: fastclip-v3 at 1.00 to 1.02 times InfoNCE."],
        json_path=arguments.json,
    )


def _ratio(taken: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(taken, others, strict=True))


if __name__ == "__main__":
    main()
