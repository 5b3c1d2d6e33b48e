"""Throughput of a run: samples, FLOPs and memory in every line of metrics.jsonl, and the peak FLOP/s of GPUs."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from clipmill.train.device.transfer import buffers_kept

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
            with buffers_kept(module), torch.no_grad(), torch.random.fork_rng(devices), eager, counter:
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
        if packet in flop_registry:
            self.num_flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif str(packet) == "xformers_flash.flash_fwd":
            # xformers wraps torch's kernel in an operator of its own, without a formula and with one more argument.
            query, key, value, starts_q, starts_k, _, longest_q, longest_k = args[:8]
            formula = flop_registry[torch.ops.aten._flash_attention_forward]
            self.num_flops += formula(query, key, value, starts_q, starts_k, longest_q, longest_k)
        return out


# Peak TFLOP/s of GPUs, the 100 % of model FLOP/s utilisation (MFU): dense bf16 or fp16 matrix products with float32
# accumulation at boost clock, from NVIDIA's data sheets and architecture white papers, most of which print the doubled
# figure for sparse matrices. The first pattern that is found in the device's name applies.
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
    """Peak FLOP/s of a GPU by its name in torch, in bf16, fp16 or tf32; None if the table does not have it."""
    tflops = next((tflops for pattern, tflops in _TFLOPS if re.search(pattern, device_name)), None)
    if tflops is None or precision not in ("bf16", "fp16", "tf32"):
        return None
    if precision == "tf32":
        # Tensor cores run tf32 at half the rate.
        return None if _WITHOUT_TF32.search(device_name) else tflops * 1e12 / 2
    return tflops * 1e12
