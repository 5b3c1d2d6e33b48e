"""Speed of attention with the shapes that occur in the models: which implementation is fastest on this GPU?

Shape suffixes: B batch, M queries, N keys, H heads, K head dimension.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.implementations import Implementation, Timings, faster_than, flops_columns, release, take_turns
from benchmarks.gpu.measurements import Result, Setup, Target, one_line
from clipmill.train.models.attention import Attend, Packing, attend_naively, attend_with_sdpa, open_attention, pack

AUTO, NAIVE, XFORMERS = "auto", "naive", "xformers"
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Entries of the profiler that are not kernels.
_NO_KERNELS = ("Activity Buffer", "Lazy Function", "Memcpy", "Memset")
_MB = 1024**2
_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of an attention call.

    Attributes:
        queries: Length of the sequences; `keys` is the number of keys if it differs.
        packed: True if the sequences are concatenated in one row.
    """

    name: str
    batch: int
    queries: int
    heads: int
    keys: int | None = None
    width: int = 64
    causal: bool = False
    packed: bool = False

    @property
    def forward_flops(self) -> int:
        """FLOPs of both matrix products. Causal attention is counted in full, as torch does."""
        return 4 * self.batch * self.heads * self.queries * (self.keys or self.queries) * self.width


SHAPES = (
    Shape(name="ViT-B/16, 4 frames", batch=32, queries=785, heads=12),
    Shape(name="text, 12 tokens, packed", batch=512, queries=12, heads=8, causal=True, packed=True),
    Shape(name="text, 77 tokens", batch=256, queries=77, heads=8, causal=True),
    Shape(name="VideoMAE-B, visible", batch=64, queries=160, heads=12),
    Shape(name="VideoMAE-B, decoder", batch=16, queries=1568, heads=6),
    Shape(name="TimeSformer, space", batch=128, queries=197, heads=12),
    Shape(name="TimeSformer, 8 frames", batch=3136, queries=8, heads=12),
    Shape(name="TimeSformer, 16 frames", batch=3136, queries=16, heads=12),
    Shape(name="caption decoder, itself", batch=32, queries=30, heads=12, causal=True),
    Shape(name="caption decoder, video", batch=32, queries=30, keys=1569, heads=12),
)


def measure_attention(setup: Setup) -> Result:
    """Time a forward and backward pass of every implementation, for each shape and precision."""
    rows = []
    failures: dict[str, list[str]] = {}
    for precision, dtype in PRECISIONS.items():
        if setup.is_dry_run and precision != "fp32":
            continue
        for shape in SHAPES:
            row, failed = _row(tiny(shape) if setup.is_dry_run else shape, setup, precision=precision, dtype=dtype)
            rows.append(row)
            for text in failed:
                failures.setdefault(text, []).append(f"{shape.name} {precision}")
            release()
    attention = open_attention("auto", device_type=setup.device.type)
    slowdowns = [row["auto / fastest"] for row in rows if row["auto / fastest"] is not None]
    return Result(
        rows=rows,
        notes=[
            f"ms per forward and backward pass; auto selected {attention.name}: {attention.reason}.",
            "`auto ran` and `xformers ran` are the operators that were called, with the longest kernel of a forward "
            "pass if CUPTI reports it.",
            f"fp32 matrix products do not use TF32 ({torch.get_float32_matmul_precision()} precision). MFU and peak "
            "memory are the values of the fastest implementation.",
            *_skipped_backends(setup),
            *(f"{text} ({len(where)} rows: {', '.join(where)})" for text, where in failures.items()),
        ],
        targets=[
            Target(
                what="time of auto / fastest, worst row",
                figure=max(slowdowns, default=None),
                goal=1.05,
                is_at_most=True,
            )
        ],
    )


def attentions(setup: Setup) -> dict[str, Callable[[], Attend]]:
    """Return functions that open every implementation that may work on the device, by name."""
    kind = setup.device.type
    found: dict[str, Callable[[], Attend]] = {
        AUTO: lambda: open_attention("auto", device_type=kind).attend,
        NAIVE: lambda: attend_naively,
        "sdpa": lambda: attend_with_sdpa,
    }
    if kind == "cuda":
        found |= {name: partial(_forced, backend) for name, backend in BACKENDS.items()}
        found[XFORMERS] = lambda: open_attention("xformers", device_type=kind).attend
    return found


def _forced(backend: SDPBackend) -> Attend:
    """Return SDPA restricted to one backend, which raises a RuntimeError for unsupported inputs."""

    def attend(
        q_BMHK: torch.Tensor,
        k_BMHK: torch.Tensor,
        v_BMHK: torch.Tensor,
        *,
        causal: bool = False,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend_with_sdpa(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)

    return attend


def _row(shape: Shape, setup: Setup, *, precision: str, dtype: torch.dtype) -> tuple[dict[str, Any], list[str]]:
    calls = AttentionCalls(shape, device=setup.device, dtype=dtype)
    attends = attentions(setup)
    openings = {
        name: lambda opens=opens: Implementation(
            step=partial(calls.forward_and_backward, opens()),
            num_flops=_FORWARD_AND_BACKWARD * shape.forward_flops,
        )
        for name, opens in attends.items()
    }
    taken = take_turns(openings, setup, num_steps=10)
    times = {name: one.median_s for name, one in taken.items() if one.median_s is not None}
    # The plain formula is only a comparison, and not a practical choice.
    fastest = min((name for name in times if name != AUTO), key=lambda name: times[name], default=None)
    slowdown = None if fastest is None else faster_than(taken, fastest, AUTO)
    best = Timings() if fastest is None else taken[fastest]
    row = {
        "shape": shape.name,
        "precision": precision,
        **{name: 1000 * times[name] if name in times else "failed" for name in attends},
        "fastest": fastest,
        "auto / fastest": slowdown,
        "auto ran": calls.describe_operators(attends[AUTO]) if AUTO in times else None,
        "xformers ran": calls.describe_operators(attends[XFORMERS]) if XFORMERS in times else None,
        "naive peak MB": _megabytes(taken[NAIVE].peak_bytes),
        "peak MB": _megabytes(best.peak_bytes),
        **flops_columns(best.num_flops, best.median_s, setup, precision=precision),
    }
    return row, [f"{name}: {one.error}" for name, one in taken.items() if one.error is not None]


class AttentionCalls:
    """Attention calls on queries, keys and values that are slices of one tensor, as in a model."""

    def __init__(self, shape: Shape, *, device: torch.device, dtype: torch.dtype) -> None:
        self._causal, self._device = shape.causal, device
        rows, tokens = (1, shape.batch * shape.queries) if shape.packed else (shape.batch, shape.queries)
        self._packing = pack([shape.queries] * shape.batch, device=device) if shape.packed else None

        def drawn(num_tokens: int) -> list[torch.Tensor]:
            qkv = torch.randn(rows, num_tokens, 3, shape.heads, shape.width, device=device, dtype=dtype)
            return [x.detach().requires_grad_() for x in qkv.unbind(2)]

        self._q, self._k, self._v = drawn(tokens)
        if shape.keys is not None:
            _, self._k, self._v = drawn(shape.keys)
        self._gradient = torch.randn_like(self._q)

    def forward(self, attend: Attend) -> torch.Tensor:
        return attend(self._q, self._k, self._v, causal=self._causal, packing=self._packing)

    def forward_and_backward(self, attend: Attend) -> None:
        torch.autograd.grad(self.forward(attend), (self._q, self._k, self._v), self._gradient)

    def gradients(self, attend: Attend, *, in_float32: bool = False) -> list[torch.Tensor]:
        """Return the gradients of queries, keys and values, computed in their precision or in float32."""
        inputs = [self._q, self._k, self._v]
        if in_float32:
            inputs = [x.detach().float().requires_grad_() for x in inputs]
        out = attend(*inputs, causal=self._causal, packing=self._packing)
        return [*torch.autograd.grad(out, inputs, self._gradient.to(out.dtype))]

    def describe_operators(self, opens: Callable[[], Attend]) -> str:
        """Return the names of the attention operators, and of the longest kernel of a forward pass."""
        attend, seen = opens(), _Operators()
        try:
            with seen:
                self.forward(attend)
            kernel = self._longest_kernel(attend) if self._device.type == "cuda" else None
        except Exception as error:  # noqa: BLE001  the row matters more than names, and a profiler may be forbidden
            kernel = one_line(error, most_chars=80)
        operators = ", ".join(dict.fromkeys(seen.names)) or "products of matrices"
        return f"{operators} ({kernel})" if kernel else operators

    def _longest_kernel(self, attend: Attend) -> str | None:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.forward(attend)
            torch.cuda.synchronize(self._device)
        found = [
            one
            for one in profiled.key_averages()
            if one.device_type == DeviceType.CUDA and not one.key.startswith(_NO_KERNELS)
        ]
        if not found:
            return None
        longest = max(found, key=lambda one: one.self_device_time_total)
        return re.split(r"[<(]", longest.key.removeprefix("void "))[0].strip()


class _Operators(TorchDispatchMode):
    """Recorder of the attention operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func._overloadpacket)
        if re.search("attention|flash|fmha|cutlass", name):
            self.names.append(name.removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def tiny(shape: Shape) -> Shape:
    """Return a small version of a shape, for a dry run."""
    return replace(shape, batch=2, queries=min(shape.queries, 20), keys=shape.keys and 24, heads=2, width=16)


def _skipped_backends(setup: Setup) -> list[str]:
    if setup.device.type == "cuda":
        return []
    return [f"Not in a dry run, because they need CUDA: {', '.join([*BACKENDS, XFORMERS])}; bf16 and fp16."]


def _megabytes(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / _MB
