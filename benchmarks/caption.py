"""Captioners: training of the encoder and decoding of captions, compared with transformers.

    python -m benchmarks.caption [--parts encoder decoding] [--device cuda|cpu] [--rounds N] [--json FILE]

encoder: forward and backward pass of TimeSformer-B (8 frames of 224 px, 1569 tokens), compared with TimesformerModel of
transformers, which computes attention eagerly. Both have the same weights and clips, and their losses are compared
before the timing. `checkpointed` computes each block twice (--towers.activation-checkpointing). On a CPU: float32, CPU
seconds, and the memory that torch allocates; on a GPU: bfloat16 autocast, and the allocator's peak. Memory is the peak
of a pass, without weights and clips. Targets: at least 1.2 times the speed on a CPU and 1.5 times on a GPU, at most 0.7
times the memory.

decoding: captions of 30 tokens by GPT-2 (124 M parameters) for clips encoded in advance, compared with `generate` of
transformers with its cache and the same weights. The logits of both are compared first, and equal tokens are counted.
Target: at least as many tokens per second as transformers in greedy decoding.

The variants take turns in every round, in rotating order. Figures are medians over the rounds, and ratios are medians
of the ratios within each round.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.allocated import peak_bytes
from benchmarks.caption_steps import Shape, captioners, generate, take, write
from benchmarks.report import Rows, parser_for, print_report
from benchmarks.timing import seconds_of
from clipmill.train.models.captioner import Captioner
from clipmill.train.models.transformer import Stack
from clipmill.train.tasks.caption.spec import DecodingSettings, max_tokens_of

MB = 1024**2
ENCODER, DECODING = "encoder", "decoding"
OURS, CHECKPOINTED, HF = "clipmill", "clipmill, checkpointed", "transformers"
SHAPES = {
    "base": Shape(width=768, depth=12, num_heads=12, decoder="gpt2", image_px=224),
    "tiny": Shape(width=128, depth=2, num_heads=2, decoder="tiny", image_px=32),
}
BATCH = {"cuda": 16, "cpu": 2}
CAPTIONS = {"cuda": 32, "cpu": 4}
METHODS = {
    "greedy": DecodingSettings(),
    "beam search, 4 beams": DecodingSettings(method="beam", num_beams=4),
}
_CLOSE = 1e-2  # tolerance of the losses in bfloat16


def main() -> None:
    """Run the benchmark and print the results."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", choices=[ENCODER, DECODING], default=[ENCODER, DECODING])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=[*SHAPES], default="base")
    parser.add_argument("--depth", type=int, help="number of encoder blocks (default 12; 2 with --shape tiny)")
    parser.add_argument("--batch", type=int, help="clips per encoder pass (default 2 on a CPU, 16 on a GPU)")
    parser.add_argument("--captions", type=int, help="captions per batch (default 4 on a CPU, 32 on a GPU)")
    arguments = parser.parse_args()
    device, shape = torch.device(arguments.device), SHAPES[arguments.shape]
    shape = replace(shape, depth=arguments.depth or shape.depth)
    ours, theirs = captioners(shape, device=device)
    batch = arguments.batch or BATCH[device.type]
    num_captions = arguments.captions or CAPTIONS[device.type]
    tables: dict[str, Rows] = {}
    if ENCODER in arguments.parts:
        clips = torch.randn(batch, 3, shape.num_frames, shape.image_px, shape.image_px, device=device)
        title = f"TimeSformer, {shape.depth} blocks of {shape.width}, forward and backward pass of {batch} clips"
        tables[title] = encoder_rows(ours, theirs, clips, num_rounds=arguments.rounds)
    if DECODING in arguments.parts:
        num_tokens = 1 + shape.num_frames * (shape.image_px // shape.patch_px) ** 2
        states = torch.randn(num_captions, num_tokens, shape.width, device=device)
        title = f"decoding by {shape.decoder}, {num_captions} captions of {max_tokens_of(METHODS['greedy'])} tokens"
        tables[title] = decoding_rows(ours, theirs, states, num_rounds=arguments.rounds)
    (title, rows), *further = tables.items()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"
    print_report(
        f"{title}, on {where}",
        rows,
        notes=[
            f"torch {torch.__version__}.",
            "Targets: encoder at least 1.2 times the speed on a CPU, 1.5 times on a GPU, and at most 0.7 times the",
            "memory; greedy decoding at least 1.0 times the tokens per second.",
        ],
        json_path=arguments.json,
        further=dict(further),
    )


def encoder_rows(ours: Captioner, theirs: Any, clips: torch.Tensor, *, num_rounds: int) -> list[dict[str, Any]]:
    """Return a table row for each variant of the encoder.

    Raises:
        RuntimeError: The losses of the variants differ.
    """
    device = clips.device
    variants = encoder_variants(ours, theirs, clips)
    memory = {}
    for variant, work in variants.items():
        ours.zero_grad(set_to_none=True)
        theirs.zero_grad(set_to_none=True)
        memory[variant] = peak_bytes(work, device=device)
    times = time_in_turns(variants, device=device, num_rounds=num_rounds, title=ENCODER)
    return [
        {
            "way": variant,
            "s a pass": statistics.median(times[variant]),
            "lowest": min(times[variant]),
            "highest": max(times[variant]),
            "speed / transformers": ratio(times[HF], times[variant]),
            "peak MB": round(memory[variant] / MB),
            "memory / transformers": memory[variant] / memory[HF],
        }
        for variant in variants
    ]


def encoder_variants(ours: Captioner, theirs: Any, clips: torch.Tensor) -> dict[str, Callable[[], float]]:
    """Return functions that run a forward and backward pass of each variant, and return its loss.

    Raises:
        RuntimeError: The losses of the variants differ.
    """
    tower = ours.video.train()
    theirs.encoder.train()

    def pass_of_ours(*, checkpoints: bool) -> float:
        assert isinstance(tower.transformer, Stack)
        tower.transformer.checkpointing = checkpoints
        return take(tower, tower, clips)

    variants: dict[str, Callable[[], float]] = {
        OURS: lambda: pass_of_ours(checkpoints=False),
        CHECKPOINTED: lambda: pass_of_ours(checkpoints=True),
        HF: lambda: take(lambda x: theirs.encoder(x.transpose(1, 2)).last_hidden_state, theirs.encoder, clips),
    }
    losses = {variant: work() for variant, work in variants.items()}
    if any(abs(loss - losses[HF]) > _CLOSE * losses[HF] for loss in losses.values()):
        raise RuntimeError(f"the losses with the same weights differ: {losses}")
    return variants


def check_logits(ours: Captioner, theirs: Any, states: torch.Tensor) -> None:
    """Switch both models to evaluation mode, and raise a RuntimeError if their logits differ."""
    ours.eval()
    theirs.eval()
    tokens = torch.arange(len(states) * 5, device=states.device).view(len(states), 5)
    with torch.no_grad():
        expected = theirs.decoder(input_ids=tokens, encoder_hidden_states=states).logits
        if (ours.decoder(tokens, states) - expected).abs().max() > _CLOSE * expected.abs().max():
            raise RuntimeError("the logits with the same weights differ")


def decoding_rows(ours: Captioner, theirs: Any, states: torch.Tensor, *, num_rounds: int) -> list[dict[str, Any]]:
    """Return a table row for each decoding method and implementation.

    Raises:
        RuntimeError: The logits of the implementations differ.
    """
    device = states.device
    check_logits(ours, theirs, states)
    rows = []
    for method, settings in METHODS.items():
        variants: dict[str, Callable[[], torch.Tensor]] = {
            OURS: lambda settings=settings: write(ours, states, settings),  # type: ignore[misc]
            HF: lambda settings=settings: generate(theirs, states, settings),  # type: ignore[misc]
        }
        tokens = {variant: work() for variant, work in variants.items()}
        length = min(variant_tokens.shape[1] for variant_tokens in tokens.values())
        same = (tokens[OURS][:, :length] == tokens[HF][:, :length]).float().mean().item()
        times = time_in_turns(variants, device=device, num_rounds=num_rounds, title=f"{DECODING}, {method}")
        count = len(states) * max_tokens_of(settings)
        rows += [
            {
                "method": method,
                "way": variant,
                "tokens/s": round(count / statistics.median(times[variant]), 1),
                "lowest": round(count / max(times[variant]), 1),
                "highest": round(count / min(times[variant]), 1),
                "speed / transformers": ratio(times[HF], times[variant]),
                "same tokens": f"{same:.0%}",
            }
            for variant in variants
        ]
    return rows


def time_in_turns(
    variants: dict[str, Callable[[], Any]], *, device: torch.device, num_rounds: int, title: str
) -> dict[str, list[float]]:
    """Return the times of each variant in seconds, one per round."""
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    names = list(variants)
    for number in range(num_rounds):
        turn = number % len(names)
        for variant in names[turn:] + names[:turn]:
            times[variant].append(seconds_of(variants[variant], device=device))
            print(f"{title}, round {number + 1}, {variant}: {times[variant][-1]:.3f} s", file=sys.stderr, flush=True)
    return times


def ratio(theirs: list[float], ours: list[float]) -> float:
    """Return the median over the rounds of `theirs` divided by `ours`."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


if __name__ == "__main__":
    main()
