"""The text tower on captions of different lengths: packed, padded, and the text tower of open_clip.

    python -m benchmarks.text_tower [--device cuda|cpu] [--captions N] [--rounds N] [--json FILE]

The benchmark measures a forward and backward pass of ViT-B/16's text tower (12 blocks of width 512), in float32 on a
CPU and under bfloat16 autocast on a GPU:

    packed      clipmill's tower, with captions concatenated without padding (--towers.packed-text, the default)
    padded      clipmill's tower, with every caption padded to 77 tokens
    open_clip   encode_text of open_clip's CLIP, with rows of 77 tokens

The captions have 12 tokens each; 6 to 18 tokens (narrations); 6 to 18 tokens, except for one caption of 77; or 77
tokens each, for which packing has no benefit. The embeddings of all implementations are compared before the timing. The
implementations take turns, in an order that rotates from round to round. Times are medians over the rounds (CPU time on
a CPU), and `/ packed` is the median of the ratios within each round. Target: with 12 tokens each, padded takes at least
3 times as long as packed.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.report import parser_for, print_report
from benchmarks.timing import seconds_of
from clipmill.train.models.attention import Attend, open_attention
from clipmill.train.models.dual_encoder import SIZES
from clipmill.train.models.text import CONTEXT_LENGTH, VOCABULARY_SIZE, TextTower

SETS: dict[str, Callable[[int], list[int]]] = {
    "12 tokens": lambda count: [12] * count,
    "6 to 18": lambda count: [6 + 7 * number % 13 for number in range(count)],
    "6 to 18, one of 77": lambda count: [CONTEXT_LENGTH, *(6 + 7 * number % 13 for number in range(count - 1))],
    "77 tokens": lambda count: [CONTEXT_LENGTH] * count,
}


def main() -> None:
    """Run the benchmark and print the results."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--captions", type=int, help="captions per batch (default 16 on a CPU, 256 on a GPU)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--model", default="b16", choices=[*SIZES], help="model size; open_clip is compared for b16 only"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    num_captions = arguments.captions or (16 if device.type == "cpu" else 256)
    attention = open_attention("auto", device_type=device.type)
    towers = text_towers(arguments.model, attend=attention.attend, device=device)
    rows = []
    for name, lengths_of in SETS.items():
        tokens = captions(lengths_of(num_captions)).to(device)
        check_equal(towers, tokens)
        rows += rows_of(name, tokens, times_of(towers, tokens, num_rounds=arguments.rounds))
    threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    print_report(
        f"text tower of {arguments.model}, {num_captions} captions, on {device.type} ({threads})",
        rows,
        notes=[
            f"torch {torch.__version__}, {'float32' if device.type == 'cpu' else 'bfloat16'}, "
            f"attention: {attention.name}.",
            "Target at 12 tokens: padded / packed at least 3.",
        ],
        json_path=arguments.json,
    )


def text_towers(model: str, *, attend: Attend, device: torch.device) -> dict[str, nn.Module]:
    """Create the implementations with the same weights."""
    size = SIZES[model]
    torch.manual_seed(0)
    packed, padded = (
        TextTower(size.text, embedding_width=size.embedding_width, attend=attend, is_packed=is_packed)
        for is_packed in (True, False)
    )
    padded.load_state_dict(packed.state_dict())
    variants: dict[str, nn.Module] = {"packed": packed, "padded": padded}
    if model == "b16":
        variants["open_clip"] = _OpenClip(packed)
    return {name: tower.to(device).train() for name, tower in variants.items()}


class _OpenClip(nn.Module):
    def __init__(self, weights: TextTower) -> None:
        import open_clip

        super().__init__()
        self.clip: Any = open_clip.create_model("ViT-B-16")
        del self.clip.visual
        self.clip.load_state_dict(weights.state_dict(), strict=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.clip.encode_text(tokens)
        return embedded


def captions(lengths: list[int]) -> torch.Tensor:
    """Create token IDs of captions with the given numbers of tokens, including start and end, padded with zeros."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.zeros(len(lengths), CONTEXT_LENGTH, dtype=torch.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(1, VOCABULARY_SIZE - 2, (length,), generator=generator)
        tokens[row, 0], tokens[row, length - 1] = VOCABULARY_SIZE - 2, VOCABULARY_SIZE - 1
    return tokens


def check_equal(towers: dict[str, nn.Module], tokens: torch.Tensor) -> None:
    """Raise a RuntimeError if the embeddings of the implementations differ."""
    with torch.no_grad():
        expected = towers["packed"](tokens)
        for name, tower in towers.items():
            furthest = (tower(tokens) - expected).abs().max().item()
            if furthest > 1e-2 * expected.abs().max().item():
                raise RuntimeError(f"the embeddings of {name} differ from the embeddings of packed by {furthest}")


def times_of(towers: dict[str, nn.Module], tokens: torch.Tensor, *, num_rounds: int) -> dict[str, list[float]]:
    """Return the times of a pass in seconds by implementation, one per round, after a warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in towers}
    for round_number in range(num_rounds + 1):
        names = list(towers)
        turned = names[round_number % len(names) :] + names[: round_number % len(names)]
        for name in turned:
            seconds = seconds_of_pass(towers[name], tokens)
            if round_number:
                times[name].append(seconds)
    return times


def seconds_of_pass(tower: nn.Module, tokens: torch.Tensor) -> float:
    """Return the time of a forward and backward pass in seconds; on a CPU, CPU time."""
    return seconds_of(lambda: take(tower, tokens), device=tokens.device)


def take(tower: nn.Module, tokens: torch.Tensor) -> None:
    """Run a forward and backward pass."""
    tower.zero_grad(set_to_none=True)
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.is_cuda):
        embedded = tower(tokens)
    embedded.float().square().sum().backward()


def rows_of(name: str, tokens: torch.Tensor, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a table row for each implementation."""
    return [
        {
            "captions": name,
            "way": variant,
            "ms": 1000 * statistics.median(of_variant),
            "captions/s": round(len(tokens) / statistics.median(of_variant)),
            "/ packed": statistics.median(
                one / packed for one, packed in zip(of_variant, times["packed"], strict=True)
            ),
        }
        for variant, of_variant in times.items()
    ]


if __name__ == "__main__":
    main()
