"""Stages after the towers: contrastive losses compared with open_clip, and decoding compared with transformers."""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.caption import HF, METHODS, OURS, check_logits
from benchmarks.caption_steps import generate, write
from benchmarks.gpu.captioners import open_captioners, shape_of
from benchmarks.gpu.implementations import Implementation, Opening, faster_than, rows_of, take_turns
from benchmarks.gpu.measurements import Result, Setup, Target
from benchmarks.losses import BASE, OPEN_CLIP, openings_of
from clipmill.train.engine.metrics import FlopCounter
from clipmill.train.tasks.caption.spec import DecodingSettings, max_tokens_of

_PAIRS, _WIDTH, _CAPTIONS = 2048, 512, 32
_FASTCLIP = "fastclip-v3"
# One matrix product for the similarities, and one for the gradient of each side.
_PRODUCTS = 3


def measure_losses(setup: Setup) -> Result:
    """Measure the time from embeddings to their gradients."""
    pairs, width = (32, 8) if setup.is_dry_run else (_PAIRS, _WIDTH)
    num_flops = _PRODUCTS * 2 * pairs * pairs * width
    openings: dict[str, Opening] = {
        name: lambda opens=opens: Implementation(step=opens(), num_flops=num_flops)  # type: ignore[misc]
        for name, opens in openings_of(pairs, width, setup.device).items()
    }
    taken = take_turns(openings, setup, num_rounds=11, num_steps=5)
    return Result(
        rows=rows_of(taken, setup, items=pairs, unit="pairs", beside=[BASE, OPEN_CLIP], precision="fp32"),
        notes=[
            f"{pairs} pairs of width {width}, float32; ours with per-sample state and logged metrics, as in the "
            "training loop. FLOPs are counted for one similarity matrix and its gradients. MFU is not given, because "
            "train/engine/metrics.py has no peak for float32.",
        ],
        targets=[
            Target(
                what=f"time of {_FASTCLIP} / {BASE}",
                figure=faster_than(taken, BASE, _FASTCLIP),
                goal=1.02,
                is_at_most=True,
            ),
            Target(what=f"speed of {BASE} / open_clip's", figure=faster_than(taken, BASE, OPEN_CLIP), goal=1.0),
        ],
    )


def measure_decoding(setup: Setup) -> Result:
    """Measure the time to write captions of the maximum length, for clips that were encoded in advance."""
    shape = shape_of(setup)
    ours, theirs = open_captioners(setup)
    num_captions = 2 if setup.is_dry_run else _CAPTIONS
    num_tokens = 1 + shape.num_frames * (shape.image_px // shape.patch_px) ** 2
    states = torch.randn(num_captions, num_tokens, shape.width, device=setup.device)
    check_logits(ours, theirs, states)
    rows, targets = [], []
    for method, settings in METHODS.items():
        if setup.is_dry_run:
            settings = replace(settings, max_tokens=6)
        written = {OURS: write(ours, states, settings), HF: generate(theirs, states, settings)}
        length = min(tokens.shape[1] for tokens in written.values())
        same = (written[OURS][:, :length] == written[HF][:, :length]).float().mean().item()
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=not setup.is_dry_run), FlopCounter() as counter:
            write(ours, states, settings)
        for precision in ("fp32",) if setup.is_dry_run else ("bf16", "fp32"):

            def autocast(precision: str = precision) -> torch.autocast:
                return torch.autocast(setup.device.type, torch.bfloat16, enabled=precision == "bf16")

            def by_ours(settings: DecodingSettings = settings) -> None:
                with autocast():
                    write(ours, states, settings)

            def by_theirs(settings: DecodingSettings = settings) -> None:
                with autocast():
                    generate(theirs, states, settings)

            openings: dict[str, Opening] = {
                name: partial(Implementation, step=work, num_flops=counter.num_flops)
                for name, work in ((OURS, by_ours), (HF, by_theirs))
            }
            taken = take_turns(openings, setup, num_rounds=3, num_steps=1)
            count = num_captions * max_tokens_of(settings)
            of_method = rows_of(taken, setup, items=count, unit="tokens", beside=[HF], precision=precision)
            rows += [
                {"method": method, "precision": precision, **row, "same tokens": f"{same:.0%}"} for row in of_method
            ]
            if precision == "bf16" or setup.is_dry_run:
                figure = faster_than(taken, OURS, HF)
                targets.append(Target(what=f"tokens/s of {method} / {HF}", figure=figure, goal=1.0))
    return Result(
        rows=rows,
        notes=[
            f"{num_captions} captions by {shape.decoder}, both with a KV cache. `same tokens` compares the "
            "captions of both in fp32. FLOPs are counted for clipmill's decoding, for both."
        ],
        targets=targets[:1],
    )
