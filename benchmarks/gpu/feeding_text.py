"""Captions of many ranks: host time to tokenise and pack them, and the waiting time in a step.

A contrastive step of 8 ranks with 256 pairs each has 2048 captions; each rank packs its own 256. Both sizes are
measured on one device, with captions of 4 to 24 words. `lengths ms` is the waiting time for the lengths while the
device is busy for `busy ms`; the remainder of that time is available to the host.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.feeding_steps import device_ms
from benchmarks.gpu.measurements import Result, Setup
from train.device.precision import open_precision
from train.models.attention import open_attention, pack
from train.models.text import TextTower, TextTowerSize, load_tokenizer
from train.models.transformer import TransformerSize

_TEXT = "a person cuts the onion with a sharp knife and puts it into the large pan on the left burner"
_BUSY_SIDE = 4096


def measure_text(setup: Setup) -> Result:
    """Measure host and device milliseconds for captions of one rank and of eight."""
    counts = (4, 16) if setup.is_dry_run else (256, 8 * 256)
    rounds = 1 if setup.is_dry_run else 10
    device = setup.device
    texts, tokenize = _texts(max(counts)), load_tokenizer()
    precision = open_precision("auto", device_type=device.type)
    towers = {is_packed: _tower(setup, is_packed=is_packed) for is_packed in (True, False)}
    rows = []
    for count in counts:
        begin_s = time.perf_counter()
        tokens_BL = torch.from_numpy(np.stack([tokenize(text) for text in texts[:count]]))
        tokenize_us = 1e6 * (time.perf_counter() - begin_s) / count
        lengths = (tokens_BL.argmax(dim=1) + 1).tolist()
        there_BL = tokens_BL.to(device)
        row: dict[str, Any] = {
            "captions": count,
            "tokens": sum(lengths),
            "of padded": round(sum(lengths) / tokens_BL.numel(), 3),
            "tokenize us each": round(tokenize_us, 1),
            "pack ms": round(_host_ms(partial(pack, lengths, device=device), device=device, rounds=rounds), 3),
        }
        if device.type == "cuda":
            row |= _wait_row(there_BL, rounds=rounds)
        for is_packed, tower in towers.items():

            def step(tower: TextTower = tower) -> None:
                tower.zero_grad(set_to_none=True)
                with precision.autocast():
                    embedded = tower(there_BL)  # noqa: B023
                embedded.float().square().mean().backward()

            name = "packed" if is_packed else "padded"
            row[f"{name} step ms"] = round(device_ms(step, device=device, rounds=rounds), 2)
        rows.append(row)
    return Result(
        rows=rows,
        notes=[
            "a step is the text tower's forward and backward pass; `tokenize` runs in the loader's threads and holds "
            "the interpreter lock"
        ],
    )


def _tower(setup: Setup, *, is_packed: bool) -> TextTower:
    width, depth, heads = (64, 1, 2) if setup.is_dry_run else (512, 12, 8)
    torch.manual_seed(0)
    attend = open_attention("auto", device_type=setup.device.type, compiles=False).attend
    size = TextTowerSize(trunk=TransformerSize(width=width, depth=depth, num_heads=heads))
    return TextTower(size, embedding_width=width, attend=attend, is_packed=is_packed).to(setup.device)


def _texts(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(_TEXT.split(), random.integers(4, 25))) for _ in range(count)]


def _host_ms(work: Callable[[], object], *, device: torch.device, rounds: int) -> float:
    """Return median milliseconds until `work` returns, on an idle device."""
    found = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - begin_s))
    return median(found[1:])


def _wait_row(tokens_BL: torch.Tensor, *, rounds: int) -> dict[str, Any]:
    """Measure how long the host waits for lengths from a busy device."""
    square = torch.randn(_BUSY_SIDE, _BUSY_SIDE, device=tokens_BL.device)
    waits, busy = [], []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            square @ square
        end.record()
        begin_s = time.perf_counter()
        (tokens_BL.argmax(dim=1) + 1).tolist()
        waits.append(1000 * (time.perf_counter() - begin_s))
        busy.append(begin.elapsed_time(end))
    return {"lengths ms": round(median(waits[1:]), 3), "busy ms": round(median(busy[1:]), 3)}
