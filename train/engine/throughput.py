"""How fast a run goes: the numbers of speed in every line of metrics.jsonl."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# A backward pass computes two products for each of the forward pass.
_FORWARD_AND_BACKWARD = 3
# torch 2.11 has no formula for attention on a CPU; it is that of a GPU.
flop_registry.setdefault(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    flop_registry[torch.ops.aten._scaled_dot_product_flash_attention],
)


class Throughput:
    """Speed of each step, of all ranks together where it is of samples, and of this one's device where it is of FLOPs.

    Attributes:
        flops_per_step: of the model alone on this rank; None until they have been counted.
    """

    def __init__(self, *, device: torch.device, precision: str) -> None:
        self._device = device
        self._peak_flops = None
        if device.type == "cuda":
            self._peak_flops = peak_flops(torch.cuda.get_device_name(device), precision)
        self.flops_per_step: int | None = None

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """Counts the FLOPs of the step taken within, by going through the model once more beforehand.

        Of its forward passes those with gradients count, so that what is computed twice to save memory counts once, as
        MFU wants it. The step itself is not touched: it draws what it would have drawn, and a compiled model is
        counted as it was written. Later steps are taken to cost the same.
        """
        counter = FlopCounter()
        devices = [self._device] if self._device.type == "cuda" else []
        is_counting = False

        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal is_counting
            if is_counting or not torch.is_grad_enabled():
                return
            is_counting = True
            with torch.no_grad(), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), counter:
                module(*args, **kwargs)
            is_counting = False

        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
        self.flops_per_step = _FORWARD_AND_BACKWARD * counter.num_flops

    def numbers(self, *, step_s: float, waited_s: float, num_samples: int) -> dict[str, float]:
        """Numbers of a step that took `step_s`, of which `waited_s` for data, with `num_samples` on all ranks.

        `gpu_memory_gb` is the most that tensors have taken since the run began, in 10^9 bytes; `mfu` is left out where
        the GPU's peak is not known.
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
    """Sums torch's own formulas of the operations within: products of matrices, convolutions, attention.

    Attributes:
        num_flops: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        if packet not in flop_registry:
            with self:  # in inference mode even a linear layer comes whole
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        out = func(*args, **(kwargs or {}))
        if packet in flop_registry:
            self.num_flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif str(packet) == "xformers_flash.flash_fwd":
            # xformers hides torch's own kernel in an operator without a formula; it has one argument more.
            query, key, value, starts_q, starts_k, _, longest_q, longest_k = args[:8]
            formula = flop_registry[torch.ops.aten._flash_attention_forward]
            self.num_flops += formula(query, key, value, starts_q, starts_k, longest_q, longest_k)
        return out


# How many operations a second GPUs are made for: the 100 % of a model's FLOP/s utilisation (MFU).
#
# Dense products of bf16 or fp16 with float32 accumulation, in TFLOP/s at boost clock, from NVIDIA's data sheets and
# architecture white papers (which print the double for sparse matrices of most).


# The first pattern that is found in the device's name counts.
_TFLOPS = (
    (r"\bB200\b", 2250.0),
    (r"\bGH200\b|\bH200\b", 989.4),
    (r"\b(H100|H200) NVL\b", 835.5),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100\b", 989.4),
    (r"\bH800\b", 989.4),
    (r"\bA100\b|\bA800\b", 312.0),
    (r"\bA30\b", 165.0),
    (r"\bA40\b", 149.7),
    (r"\bA10G\b", 70.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.1),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX 6000 Ada\b", 364.2),
    (r"\bRTX A6000\b", 154.8),
    (r"\bRTX A5000\b", 111.1),
    (r"\bRTX 5090\b", 209.5),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b", 71.0),
    (r"\bV100S?-PCIE\b", 112.0),
    (r"\bV100\b", 125.0),
    (r"\bT4\b", 65.0),
)
_WITHOUT_TF32 = re.compile(r"\bV100|\bT4\b")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Operations a second of a GPU (as torch names it) in bf16, fp16 or tf32; None where the table has no number."""
    tflops = next((tflops for pattern, tflops in _TFLOPS if re.search(pattern, device_name)), None)
    if tflops is None or precision not in ("bf16", "fp16", "tf32"):
        return None
    if precision == "tf32":
        # Tensor cores are half as fast on it.
        return None if _WITHOUT_TF32.search(device_name) else tflops * 1e12 / 2
    return tflops * 1e12
