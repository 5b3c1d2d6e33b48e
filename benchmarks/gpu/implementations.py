"""Compare implementations of the same work: times measured in turns, peak memory and FLOPs."""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.measurements import Setup, one_line
from benchmarks.timing import seconds_of, turns
from clipmill.train.engine.metrics import Throughput, peak_flops

GIB = 1024**3
_WARM_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Implementation that is ready to run.

    Attributes:
        step: Function that does one unit of the work.
        model: Model. Three times the FLOPs of its forward pass are the FLOPs of a step (clipmill.train.engine.metrics).
        num_flops: FLOPs of a step, if no model is trained.
    """

    step: Callable[[], object]
    model: nn.Module | None = None
    num_flops: int | None = None


Opening = Callable[[], Implementation]


@dataclass(kw_only=True)
class Timings:
    """Measurements of an implementation.

    Attributes:
        seconds: Time of a step in seconds, one value per round.
        peak_bytes: Peak memory in bytes, including weights and optimizer; None on a CPU.
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    num_flops: int | None = None
    error: str | None = None

    @property
    def median_s(self) -> float | None:
        """Median time of a step over the rounds in seconds; None if the implementation failed."""
        return statistics.median(self.seconds) if self.seconds and self.error is None else None


def take_turns(
    openings: Mapping[str, Opening], setup: Setup, *, num_rounds: int = 5, num_steps: int = 5
) -> dict[str, Timings]:
    """Open all implementations, keep all of them in memory, and time `num_steps` steps of each in every round."""
    if setup.is_dry_run:
        num_rounds = num_steps = 1
    taken = {name: Timings() for name in openings}
    variants: dict[str, Implementation] = {}
    for name, opening in openings.items():
        with _surviving(taken[name], setup.device):
            variants[name] = _open(opening, taken[name], setup)
    for _, name in turns(list(variants), num_rounds) if variants else ():
        if name in variants:
            with _surviving(taken[name], setup.device):
                taken[name].seconds.append(seconds_of(variants[name].step, device=setup.device, count=num_steps))
            if taken[name].error is not None:
                del variants[name]
    return taken


def rows_of(
    taken: Mapping[str, Timings],
    setup: Setup,
    *,
    items: int,
    unit: str,
    beside: Sequence[str],
    precision: str = "bf16",
) -> list[dict[str, Any]]:
    """Return a table row for each implementation.

    Args:
        items: Number of `unit` per step.
        beside: Implementations with which the others are compared.
        precision: Precision of the matrix products, for the fraction of the GPU's peak FLOP/s.
    """
    rows = []
    for name, one in taken.items():
        seconds = one.median_s
        row: dict[str, Any] = {
            "way": name,
            "ms a step": seconds and 1000 * seconds,
            "spread": f"{(max(one.seconds) - min(one.seconds)) / seconds:.0%}" if seconds else None,
            f"{unit}/s": seconds and items / seconds,
            **{f"/ {other}": faster_than(taken, name, other) for other in beside},
            "peak GiB": None if one.peak_bytes is None else one.peak_bytes / GIB,
            **flops_columns(one.num_flops, seconds, setup, precision=precision),
        }
        if one.error is not None:
            row["error"] = one.error
        rows.append(row)
    return rows


def faster_than(taken: Mapping[str, Timings], name: str, other: str) -> float | None:
    """Return the median speed-up of an implementation over another one; None if one of them failed."""
    if other not in taken or taken[name].median_s is None or taken[other].median_s is None:
        return None
    pairs = zip(taken[other].seconds, taken[name].seconds, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def flops_columns(
    num_flops: int | None, seconds: float | None, setup: Setup, *, precision: str
) -> dict[str, float | str | None]:
    """Return the TFLOP/s of a model, and their fraction of the GPU's peak if it is known."""
    if not num_flops or not seconds:
        return {"TFLOP/s": None, "MFU": None}
    rate = num_flops / seconds
    peak = None
    if setup.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(setup.device), precision)
    return {"TFLOP/s": rate / 1e12, "MFU": None if peak is None else f"{rate / peak:.1%}"}


def release() -> None:
    """Release unused GPU memory."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def _surviving(taken: Timings, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  a missing kernel must not affect the other implementations
        taken.error = one_line(error)
    if taken.error is not None:
        release()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises if the device is lost for the other implementations too


def _open(opening: Opening, taken: Timings, setup: Setup) -> Implementation:
    is_cuda = setup.device.type == "cuda"
    before = torch.cuda.memory_allocated(setup.device) if is_cuda else 0
    variant = opening()
    throughput = Throughput(device=setup.device, precision="bf16")
    with nullcontext() if variant.model is None else throughput.count_flops(variant.model):
        variant.step()
    taken.num_flops = throughput.flops_per_step if variant.model is not None else variant.num_flops
    if setup.is_dry_run:
        return variant
    for _ in range(_WARM_STEPS):
        variant.step()
    if is_cuda:
        torch.cuda.synchronize(setup.device)
        torch.cuda.reset_peak_memory_stats(setup.device)
        variant.step()
        torch.cuda.synchronize(setup.device)
        taken.peak_bytes = torch.cuda.max_memory_allocated(setup.device) - before
    if variant.model is not None:
        variant.model.zero_grad(set_to_none=True)  # the next implementation may share the model
    return variant
