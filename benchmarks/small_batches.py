"""Training with small batches: InfoNCE compared with FastCLIP-v3 at batch size 16, with equal steps, data and tuning.

    python -m benchmarks.small_batches [--seeds 5] [--steps 600] [--json FILE]

Scenes of the synthetic set (a colour, a shape, a motion: 144 sentences), rendered without encoding: 4 frames of 32 px,
no augmentation. 480 scenes for training, and 144 held-out scenes, one for each sentence. The model is narrower than
`tiny` (video: width 64, 2 blocks; text: width 64, 1 block, a token a word), the optimizer is the AdamW of `train`; the
initial weights and the order of samples are the same for all losses at each seed.

Tuning is the same for all: each point of a grid of learning rates and initial temperatures, with two seeds that are not
among those reported; the point with the best mean R@1 is used. Everything else is as published for each loss. R@1 is
the mean of both directions among the 144 held-out clips.
"""

import statistics
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import cast

import torch

from benchmarks.report import parser_for, print_report
from prep.synthetic.shapes import COMBINATIONS, HEIGHT, WIDTH, Scene, draw_scenes, plan_scenes
from train.config.model import Towers
from train.data.batch import Batch
from train.distributed.world import Step, World
from train.losses.contrastive import DatasetSize
from train.losses.registry import build_contrast
from train.losses.settings import Convention, Loss
from train.models.attention import open_attention
from train.models.dual_encoder import DualEncoder, DualEncoderSize
from train.models.text import TextTowerSize
from train.models.transformer import TransformerSize
from train.models.video_vit import VideoViTSize
from train.optim.optimizer import clip_gradients, make_optimizer, set_learning_rates
from train.tasks.dual_encoder.settings import DualEncoderSettings

SIZE_PX, NUM_FRAMES, BATCH = 32, 4, 16
NUM_TRAIN, NUM_HELD_OUT = 480, len(COMBINATIONS)
GRID = {"lr": (2.5e-4, 5e-4, 1e-3), "temperature": (0.03, 0.07)}
TUNING_SEEDS = (100, 101)
WORDS = sorted({word for combination in COMBINATIONS for word in f"a {' '.join(combination)}".split()})
TEXT_LENGTH = 8
SIZE = DualEncoderSize(
    video=VideoViTSize(trunk=TransformerSize(width=64, depth=2, num_heads=2), patch_px=16),
    text=TextTowerSize(
        trunk=TransformerSize(width=64, depth=1, num_heads=2),
        vocabulary_size=len(WORDS) + 1,
        context_length=TEXT_LENGTH,
    ),
    embedding_width=64,
)
VARIANTS: dict[str, tuple[str, Convention]] = {
    "infonce": ("infonce", "fast_clip"),
    "fastclip-v3": ("fastclip-v3", "fast_clip"),
    "fastclip-v3, paper": ("fastclip-v3", "paper"),
}


@dataclass(frozen=True)
class Clips:
    """Scenes as model input: video [N, 3, T, S, S], tokens [N, L]."""

    video: torch.Tensor
    tokens: torch.Tensor


def draw_clips(split: str, count: int) -> Clips:
    """Render the first scenes of a split, each on its own background."""
    scenes: dict[object, Scene] = {}
    for number in range(count):
        for place, scene in enumerate(plan_scenes(duration_s=60, seed=0, split=split, number=number)):
            # One scene of each sentence is held out, so that every caption has exactly one correct clip.
            scenes.setdefault(scene.text if split == "val" else (number, place), scene)
        if len(scenes) >= count:
            break
    chosen = list(scenes.values())[:count]
    return Clips(
        torch.stack([_pictures(scene, seed=number) for number, scene in enumerate(chosen)]),
        torch.tensor([_tokens(scene.text) for scene in chosen]),
    )


def _tokens(text: str) -> list[int]:
    """Map each word to a number; the end token (the largest) is also the padding."""
    numbers = [WORDS.index(word) for word in text.split()]
    return numbers + [len(WORDS)] * (TEXT_LENGTH - len(numbers))


def _pictures(scene: Scene, *, seed: int) -> torch.Tensor:
    """Render a scene at 0, 1/4, 1/2 and 3/4 of its duration, [3, T, S, S]: Y, Cb and Cr, centred at zero."""
    whole = replace(scene, begin_s=0.0, end_s=1.0)
    pictures = []
    for frame in draw_scenes([whole], fps=Fraction(NUM_FRAMES), num_frames=NUM_FRAMES, seed=seed):
        planes = torch.from_numpy(frame).float()
        luma, chroma = planes[:HEIGHT][None, None], planes[HEIGHT:].reshape(1, 2, HEIGHT // 2, WIDTH // 2)
        small = [torch.nn.functional.interpolate(one, (SIZE_PX, SIZE_PX), mode="area") for one in (luma, chroma)]
        pictures.append(torch.cat(small, dim=1)[0])
    return (torch.stack(pictures, dim=1) - 110) / 60


def train(clips: Clips, loss: Loss, *, lr: float, steps: int, seed: int) -> DualEncoder:
    """Train a tiny model for `steps` steps."""
    torch.manual_seed(seed)
    attention = open_attention("sdpa", device_type="cpu")
    model = DualEncoder(
        SIZE,
        image_px=SIZE_PX,
        num_frames=NUM_FRAMES,
        attend=attention.attend,
        towers=Towers(temporal="random", packed_text=False),
    )
    settings = DualEncoderSettings(
        steps=steps, batch=BATCH, lr=lr, warmup_steps=steps // 10, num_frames=NUM_FRAMES, size_px=SIZE_PX, loss=loss
    )
    dataset = DatasetSize(num_clips=NUM_TRAIN, num_captions=NUM_TRAIN, num_epochs=steps * BATCH / NUM_TRAIN)
    objective = build_contrast(
        loss, inputs=lambda batch: (batch["latents"], batch["tokens"]), dataset=dataset, world=World()
    )
    optimizer = make_optimizer(model, objective, settings)
    parameters = [*model.parameters(), *objective.parameters()]
    order = torch.Generator().manual_seed(seed)
    steps_of_epoch = NUM_TRAIN // BATCH
    for number in range(steps):
        if number % steps_of_epoch == 0:
            ids = torch.randperm(NUM_TRAIN, generator=order).split(BATCH)
        rows = ids[number % steps_of_epoch]
        batch = cast(
            Batch,
            {"clip_id": rows, "caption_id": rows, "latents": clips.video[rows], "tokens": clips.tokens[rows]},
        )
        optimizer.zero_grad()
        step = Step(number=number + 1, epoch=number / steps_of_epoch, seed=seed)
        objective.backward(model, batch, step)
        set_learning_rates(optimizer, number + 1, settings, objective=objective)
        clip_gradients(parameters, max_norm=settings.max_grad_norm)
        optimizer.step()
        objective.after_step(step)
    return model


@torch.no_grad()
def recall(model: DualEncoder, clips: Clips) -> float:
    """Return R@1 in percent, the mean of both directions."""
    video, text = model.eval()(clips.video, clips.tokens)
    similarity = video @ text.T
    right = torch.arange(len(similarity))
    found = [(one.argmax(dim=1) == right).float().mean().item() for one in (similarity, similarity.T)]
    return 50 * sum(found)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--points", type=int, default=None, help="only the first points of the grid")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train_clips, held_out = draw_clips("train", NUM_TRAIN), draw_clips("val", NUM_HELD_OUT)

    def score(variant: str, lr: float, temperature: float, seed: int) -> float:
        kind, convention = VARIANTS[variant]
        loss = Loss(kind=kind, convention=convention, temperature=temperature)
        found = recall(train(train_clips, loss, lr=lr, steps=arguments.steps, seed=seed), held_out)
        print(f"{variant}, lr {lr:g}, temperature {temperature}, seed {seed}: {found:.1f}", file=sys.stderr, flush=True)
        return found

    rows, tuning = [], []
    for variant in VARIANTS:
        points = list(product(*GRID.values()))[: arguments.points]
        tuned = {
            (lr, temperature): statistics.mean(score(variant, lr, temperature, seed) for seed in TUNING_SEEDS)
            for lr, temperature in points
        }
        best = max(tuned, key=lambda point: tuned[point])
        tuning += [
            {"loss": variant, "lr": f"{lr:g}", "temperature": str(temperature), "R@1 %": found}
            for (lr, temperature), found in tuned.items()
        ]
        recalls = [score(variant, best[0], best[1], seed) for seed in range(arguments.seeds)]
        rows.append(
            {
                "loss": variant,
                "lr": f"{best[0]:g}",
                "temperature": str(best[1]),
                "R@1 %": statistics.mean(recalls),
                "spread": statistics.stdev(recalls) if len(recalls) > 1 else None,
                "by seed": " ".join(f"{one:.1f}" for one in recalls),
            }
        )
    print_report(
        f"Held-out R@1 after {arguments.steps} steps of batch {BATCH}",
        rows,
        notes=[f"Spread: standard deviation over seeds. Chance level: {100 / NUM_HELD_OUT:.1f} %."],
        json_path=arguments.json,
        further={"Tuning, mean of two other seeds": tuning},
    )


if __name__ == "__main__":
    main()
