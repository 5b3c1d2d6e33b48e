"""Throughput of a run: samples, FLOPs and memory in every line of metrics.jsonl, and the peak FLOP/s of GPUs."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from clipmill.train.device.transfer import keep_buffers

# A backward pass has two matrix products for each one of the forward pass.
_FORWARD_AND_BACKWARD = 3
# torch 2.11 has no formula for attention on a CPU; it is the same as on a GPU.
flop_registry.setdefault(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    flop_registry[torch.ops.aten._scaled_dot_product_flash_attention],
)


class Throughput:
    """Samples per second of all ranks together, and FLOP/s of this rank's device.

    Attributes:
        flops_per_step: of the model on this rank; None until they have been counted.
    """

    def __init__(self, *, device: torch.device, precision: str) -> None:
        self._device = device
        self._peak_flops = None
        if device.type == "cuda":
            self._peak_flops = peak_flops(torch.cuda.get_device_name(device), precision)
        self.flops_per_step: int | None = None

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """Count the FLOPs of the step in the block while it computes.

        Only forward passes with gradients count, so that recomputed activations count once, as MFU defines it. Later
        steps are assumed to cost the same. With frozen parameters nothing is counted: the factor of the backward pass
        is not known then.

        Compiled blocks would run in eager mode while they are counted, and round otherwise than in later steps. So a
        model with such blocks is counted by an additional forward pass, which leaves generators and buffers as they
        were.
        """
        if not all(one.requires_grad for one in model.parameters()):
            self.flops_per_step = 0
            yield
            return
        counter, counted_pass = FlopCounter(), ExitStack()
        devices = [self._device] if self._device.type == "cuda" else []
        is_compiled = any(module._compiled_call_impl is not None for module in model.modules())

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.is_grad_enabled():
                return
            if not is_compiled:
                counted_pass.enter_context(counter)
                return
            eager = torch.compiler.set_stance("force_eager")
            with keep_buffers(module), torch.no_grad(), torch.random.fork_rng(devices), eager, counter:
                module.forward(*args, **kwargs)  # without hooks

        hooks = (
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(lambda *_: counted_pass.close(), always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.flops_per_step = _FORWARD_AND_BACKWARD * counter.num_flops

    def metrics(self, *, step_s: float, waited_s: float, num_samples: int) -> dict[str, float]:
        """Metrics of a step that took `step_s`, including `waited_s` for data, with `num_samples` on all ranks.

        `gpu_memory_gb` is the peak of allocated memory since the run began, in 10^9 bytes. `mfu` is left out if the
        peak FLOP/s of the GPU are not known.
        """
        found = {
            "samples_per_s": num_samples / step_s,
            "step_s": step_s,
            "data_wait_s": waited_s,
            "data_wait_share": waited_s / step_s,
        }
        if self._device.type == "cuda":
            found["gpu_memory_gb"] = torch.cuda.max_memory_allocated(self._device) / 1e9
        if self.flops_per_step:
            found["tflops"] = self.flops_per_step / step_s / 1e12
            if self._peak_flops is not None:
                found["mfu"] = self.flops_per_step / step_s / self._peak_flops
        return found


class FlopCounter(TorchDispatchMode):
    """Sums torch's FLOP formulas of the operations in the block: matrix products, convolutions, attention.

    Attributes:
        num_flops: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        if packet not in flop_registry:
            with self:  # in inference mode, even a linear layer is not decomposed yet
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        out = func(*args, **(kwargs or {}))
        if packet is torch.ops.aten._efficient_attention_forward:
            self.num_flops += efficient_flops(*args, **(kwargs or {}))
        elif packet in flop_registry:
            self.num_flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif str(packet) == "xformers_flash.flash_fwd":
            # xformers wraps torch's kernel in an operator of its own, without a formula and with one more argument.
            query, key, value, starts_q, starts_k, _, longest_q, longest_k = args[:8]
            formula = flop_registry[torch.ops.aten._flash_attention_forward]
            self.num_flops += formula(query, key, value, starts_q, starts_k, longest_q, longest_k)
        return out


def efficient_flops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: Any = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *others: Any,
    **options: Any,
) -> int:
    """FLOPs of the kernel that xformers calls, with batches [B, M, H, K]; torch's formula takes them [B, H, M, K]."""
    if cu_seqlens_q is not None:
        formula = flop_registry[torch.ops.aten._efficient_attention_forward]
        return int(formula(query, key, value, bias, cu_seqlens_q, *others, **options))
    return int(sdpa_flop_count(*(x.transpose(1, 2).shape for x in (query, key, value))))


# Peak TFLOP/s of GPUs, the 100 % of model FLOP/s utilisation (MFU): dense bf16 or fp16 matrix products with float32
# accumulation at boost clock, from NVIDIA's data sheets and architecture white papers, most of which print the doubled
# figure for sparse matrices. Names are whole words; the longest that occurs in the device's name applies.
_TFLOPS = {
    "B200": 2250.0,
    "GB200": 2500.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "H100": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H800": 989.4,
    "H800 PCIe": 756.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A30": 165.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.1,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX A5000": 111.1,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "V100-PCIE": 112.0,
    "V100S-PCIE": 130.0,
    "T4": 65.0,
}
_WITHOUT_TF32 = ("V100", "V100-PCIE", "V100S-PCIE", "T4")
# A slice of a GPU, and GPUs that share the name of another one and have another speed.
_OTHERS = re.compile(r"\bMIG\b|\b(Laptop|Max-Q|Mobile)\b|\bRTX \d+ (D|Ti|SUPER)\b")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a GPU by its name in torch, in bf16, fp16 or tf32; None if the table does not have it."""
    names = [name for name in _TFLOPS if re.search(rf"(?<![\w-]){re.escape(name)}\b", device_name)]
    if not names or _OTHERS.search(device_name) or precision not in ("bf16", "fp16", "tf32"):
        return None
    name = max(names, key=len)
    if precision == "tf32":
        # Tensor cores run tf32 at half the rate.
        return None if name in _WITHOUT_TF32 else _TFLOPS[name] * 1e12 / 2
    return _TFLOPS[name] * 1e12
