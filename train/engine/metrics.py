"""Metrics of training steps: throughput, checks for non-finite values, the log (one step late), and GPU hours."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from clipmill.manifests.errors import FailedWork
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import publish_json
from clipmill.train.device.transfer import DeviceEvent, LateMetrics, keep_buffers
from clipmill.train.distributed.parallel import local_part
from clipmill.train.distributed.world import Step, World
from clipmill.train.run.folder import RunFolder
from clipmill.train.run.tracking import Trackers

# For each matrix product of the forward pass, the backward pass computes two.
_FORWARD_AND_BACKWARD = 3
# torch 2.11 has no FLOP formula for attention on a CPU. Use the formula for GPUs, because the FLOPs are the same.
flop_registry.setdefault(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    flop_registry[torch.ops.aten._scaled_dot_product_flash_attention],
)


class Throughput:
    """Samples per second over all ranks, and FLOP/s of this rank's device.

    Attributes:
        flops_per_step: FLOPs of the model on this rank; None until they have been counted.
    """

    def __init__(self, *, device: torch.device, precision: str) -> None:
        self._device = device
        self._peak_flops = None
        if device.type == "cuda":
            self._peak_flops = peak_flops(torch.cuda.get_device_name(device), precision)
        self.flops_per_step: int | None = None

    @contextmanager
    def count_flops(self, model: nn.Module) -> Iterator[None]:
        """Count the FLOPs of the step within the block; later steps are assumed to cost the same.

        Only forward passes with gradients are counted, so that recomputed activations count once, as in the definition
        of MFU. The FLOPs of a model with frozen parameters are not counted, because the relative cost of its backward
        pass is unknown.

        While FLOPs are counted, compiled blocks run in eager mode, which rounds differently. For a model with compiled
        blocks, the FLOPs are therefore counted in an additional forward pass that leaves generators and buffers
        unchanged.
        """
        if not all(parameter.requires_grad for parameter in model.parameters()):
            self.flops_per_step = 0
            yield
            return
        counter, counted_pass = FlopCounter(), ExitStack()
        devices = [self._device] if self._device.type == "cuda" else []
        is_compiled = any(module._compiled_call_impl is not None for module in model.modules())

        def start_counting(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.is_grad_enabled():
                return
            if not is_compiled:
                counted_pass.enter_context(counter)
                return
            eager = torch.compiler.set_stance("force_eager")
            with keep_buffers(module), torch.no_grad(), torch.random.fork_rng(devices), eager, counter:
                module.forward(*args, **kwargs)  # without hooks

        hooks = (
            model.register_forward_pre_hook(start_counting, with_kwargs=True),
            model.register_forward_hook(lambda *_: counted_pass.close(), always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.flops_per_step = _FORWARD_AND_BACKWARD * counter.num_flops

    def metrics(self, *, step_s: float, waited_s: float, num_samples: int) -> dict[str, float]:
        """Return the metrics of a step, for metrics.jsonl.

        `gpu_memory_gb` is the peak of allocated memory since the process started, in 10^9 bytes. `mfu` is omitted if
        the peak FLOP/s of the GPU are unknown.

        Args:
            step_s: Time of the step in seconds, including `waited_s`.
            waited_s: Time that the step waited for data, in seconds.
            num_samples: Number of samples in the step, over all ranks.
        """
        metrics = {
            "samples_per_s": num_samples / step_s,
            "step_s": step_s,
            "data_wait_s": waited_s,
            "data_wait_share": waited_s / step_s,
        }
        if self._device.type == "cuda":
            metrics["gpu_memory_gb"] = torch.cuda.max_memory_allocated(self._device) / 1e9
        if self.flops_per_step:
            metrics["tflops"] = self.flops_per_step / step_s / 1e12
            if self._peak_flops is not None:
                metrics["mfu"] = self.flops_per_step / step_s / self._peak_flops
        return metrics


class FlopCounter(TorchDispatchMode):
    """Counter of the FLOPs in a block. It uses torch's formulas for matrix products, convolutions and attention.

    Attributes:
        num_flops: Number of FLOPs so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        if packet not in flop_registry:
            with self:  # in inference mode, even a linear layer has not been decomposed yet
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        out = func(*args, **(kwargs or {}))
        if packet is torch.ops.aten._efficient_attention_forward:
            self.num_flops += efficient_flops(*args, **(kwargs or {}))
        elif packet in flop_registry:
            self.num_flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif str(packet) == "xformers_flash.flash_fwd":
            # This operator of xformers wraps torch's kernel. It has no formula, and takes one more argument.
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
    *args: Any,
    **kwargs: Any,
) -> int:
    """Return the FLOPs of xformers' memory-efficient kernel for inputs [B, M, H, K].

    torch's formula for inputs without sequence bounds expects [B, H, M, K].
    """
    if cu_seqlens_q is not None:
        formula = flop_registry[torch.ops.aten._efficient_attention_forward]
        return int(formula(query, key, value, bias, cu_seqlens_q, *args, **kwargs))
    return int(sdpa_flop_count(*(x.transpose(1, 2).shape for x in (query, key, value))))


# Peak TFLOP/s of GPUs, at which model FLOP/s utilisation (MFU) is 100 %: dense bf16 or fp16 matrix products with
# float32 accumulation at boost clock, from NVIDIA's data sheets and architecture white papers. Most documents state the
# figure for sparse matrices, which is twice as high. A name must match complete words; the longest match applies.
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
# MIG slices, and GPUs whose name contains a name in the table, but whose speed differs.
_NOT_IN_TABLE = re.compile(r"\bMIG\b|\b(Laptop|Max-Q|Mobile)\b|\bRTX \d+ (D|Ti|SUPER)\b")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU in bf16, fp16 or tf32; None if the name or the precision is not in the table."""
    names = [name for name in _TFLOPS if re.search(rf"(?<![\w-]){re.escape(name)}\b", device_name)]
    if not names or _NOT_IN_TABLE.search(device_name) or precision not in ("bf16", "fp16", "tf32"):
        return None
    name = max(names, key=len)
    if precision == "tf32":
        # Tensor cores run tf32 at half the rate.
        return None if name in _WITHOUT_TF32 else _TFLOPS[name] * 1e12 / 2
    return _TFLOPS[name] * 1e12


# Checks that end a run before a checkpoint is saved: for a non-finite loss, gradient or state, and for zero gradients.

_MAX_LISTED = 3  # maximum number of tensors in a message
_NUM_IDLE = 10  # the run ends if all gradients of this many initial steps are zero; later steps are not checked


@dataclass(frozen=True)
class BatchIds:
    """Identifiers of a rank's samples in a step, for error reports. Frames are not kept, to save GPU memory.

    Attributes:
        keys: Keys of the chunks, as in the batch.
        caption_id: Caption IDs, int64 [B] on the CPU; None for batches without captions.
    """

    keys: Sequence[str]
    caption_id: torch.Tensor | None


def require_finite(name: str, value: float, batch: BatchIds, *, step: Step, world: World, run: RunFolder) -> None:
    """Raise an error on all ranks if a value is not finite. The value must be the same on all ranks.

    Rank 0 first writes the keys of all samples in the step to bad_batch.json.

    Args:
        name: Name of the value, for the message.

    Raises:
        FailedWork: The value is NaN or infinite.
    """
    if math.isfinite(value):
        return
    path = run.path / "bad_batch.json"
    samples: dict[str, list[Any]] = {"keys": list(batch.keys)}
    if batch.caption_id is not None:
        samples["caption_ids"] = batch.caption_id.tolist()
    ranks = step.world.gather_objects(samples)
    if world.is_first:
        publish_json(path, {"step": step.number, name: str(value), "ranks": ranks})
    raise FailedWork(
        f"the {name} is {value} at step {step.number}; the keys of the batch are in {path}; start a new run with a "
        "lower --lr, or with --max-grad-norm 1"
    )


def require_finite_state(tensors: Mapping[str, torch.Tensor], *, step: int, world: World, run: RunFolder) -> None:
    """Check that the training state is finite. All ranks must call this function before they save a checkpoint.

    Raises:
        FailedWork: A tensor contains NaN or infinity. The error is raised on all ranks.
    """
    if (names := find_non_finite(tensors, world=world)) is not None:
        raise FailedWork(
            f"after step {step} these tensors contain values that are not finite (NaN or infinity): {names}; "
            f"no checkpoint was saved, and earlier checkpoints are still in {run.checkpoints}"
        )


def find_non_finite(tensors: Mapping[str, torch.Tensor], *, world: World) -> str | None:
    """Return the names of the first few non-finite tensors, as text; None if all tensors are finite.

    All ranks must call this function. Each rank checks its shards without copying them, and waits for the device once.
    Some losses store logarithms that are -inf until a sample is first visited, so -inf is allowed in their state.

    Args:
        tensors: Complete or sharded tensors, keyed by their names in checkpoints.
    """
    parts = {name: local_part(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    parts = {name: part.detach() for name, part in parts.items() if part.numel()}
    bad_names: set[str] = set()
    by_device: dict[torch.device, list[str]] = {}
    for name, part in parts.items():
        by_device.setdefault(part.device, []).append(name)
    for names in by_device.values():
        # aminmax propagates NaN.
        ends_N2 = torch.stack([torch.stack(parts[name].aminmax()).double() for name in names]).cpu()
        is_log_N = torch.tensor([name.startswith("objective.") for name in names])
        is_good_N2 = ends_N2.isfinite() | (is_log_N[:, None] & (ends_N2 == -torch.inf))
        bad_names |= {name for name, is_good in zip(names, is_good_N2.all(dim=1).tolist(), strict=True) if not is_good}
    if not world.sum(torch.tensor([float(len(bad_names))])).item():
        return None
    names_of_ranks = sorted({name for names in world.gather_objects(bad_names) for name in names})
    suffix = f" and {len(names_of_ranks) - _MAX_LISTED} more" if len(names_of_ranks) > _MAX_LISTED else ""
    return ", ".join(names_of_ranks[:_MAX_LISTED]) + suffix


@dataclass(frozen=True, kw_only=True)
class PendingStep:
    """Step whose metrics the device may still be computing.

    Attributes:
        metrics: `loss`, `grad_norm` and other metrics for metrics.jsonl, except throughput and evaluation metrics.
        start_event: Event at the end of the previous step, or before the first batch was loaded (first step).
        waited_s: Time that the host waited for the batch, in seconds.
        num_failed: Number of samples that have failed so far.
        batch: Samples of this rank.
        may_skip: True if the optimizer skips a step with a non-finite gradient norm (fp16).
        sources: Number of samples drawn so far from each data folder of a mixture, including failed samples.
    """

    step: Step
    metrics: LateMetrics
    start_event: DeviceEvent
    waited_s: float
    num_failed: int
    batch: BatchIds
    may_skip: bool
    sources: Mapping[str, int] = field(default_factory=dict)


class MetricsLog:
    """Log of metrics, one step late: the device may still be computing a step while the host starts the next one.

    The log holds the pending step, waits for its metrics, checks that they are finite, and passes them to the trackers.
    Every step is logged once, and in order. All ranks must call the methods in the same order.

    Args:
        num_samples: Number of samples per step, over all ranks.
        num_steps: Number of steps of the run.
    """

    def __init__(
        self,
        trackers: Trackers,
        throughput: Throughput,
        *,
        run: RunFolder,
        world: World,
        num_samples: int,
        num_steps: int,
    ) -> None:
        self._trackers, self._throughput = trackers, throughput
        self._run, self._world, self._num_samples = run, world, num_samples
        self._pending: PendingStep | None = None
        self._is_evaluated = False
        self._idle_until, self._has_learned = min(_NUM_IDLE, num_steps), False

    @property
    def end(self) -> DeviceEvent | None:
        """Event at which the pending step ends on the device; None if no step is pending."""
        return None if self._pending is None else self._pending.metrics.end

    def add(self, pending: PendingStep) -> None:
        """Store a step as pending. The previous step must have been settled."""
        assert self._pending is None
        self._pending = pending

    def check(self) -> None:
        """Check the pending step before an evaluation. If the evaluation then fails, the step is not logged.

        Raises:
            FailedWork: The loss or the norm of the gradients is not finite, or all gradients of the first steps are 0.
                The error is raised on all ranks.
        """
        self._check()
        self._is_evaluated = True

    def _check(self) -> None:
        pending = self._pending
        if pending is None:
            return
        metrics = pending.metrics.read()
        checked_values = {"loss": metrics["loss"]}
        if not pending.may_skip:
            checked_values["norm of the gradients"] = metrics["grad_norm"]
        for name, value in checked_values.items():
            if not math.isfinite(value):
                self._pending = None
            require_finite(name, value, pending.batch, step=pending.step, world=self._world, run=self._run)
        self._has_learned |= bool(metrics["grad_norm"])
        if not self._has_learned and pending.step.number == self._idle_until:
            raise FailedWork(
                f"the model learns nothing: the loss is {metrics['loss']:.4f}, and the gradients of the first "
                f"{count_noun(self._idle_until, 'step')} are exactly 0. Either there is nothing to predict (captions "
                "without tokens, a single class, a margin that all pairs satisfy), or all parameters that affect the "
                "loss are frozen"
            )

    def settle(
        self, evaluation: Mapping[str, float] | None = None, batch_metrics: Mapping[str, list[float]] | None = None
    ) -> None:
        """Wait for the pending step, if there is one, and log it.

        Args:
            evaluation: Metrics of an evaluation after the step.
            batch_metrics: Metrics of this evaluation that have one value per batch.

        Raises:
            FailedWork: See `check`. The step is then not logged.
        """
        self._check()
        pending, self._pending = self._pending, None
        self._is_evaluated = False
        if pending is not None:
            batch_entry = {"batches": dict(batch_metrics)} if batch_metrics else {}
            self._trackers.log(self._line(pending, evaluation or {}) | batch_entry)

    def close(self) -> None:
        """Log the pending step if its metrics are finite, without communication. Call this method after errors too."""
        pending, self._pending = self._pending, None
        if pending is None or self._is_evaluated:
            return
        try:
            metrics = pending.metrics.read()
        except RuntimeError:
            return  # the device itself failed
        if math.isfinite(metrics["loss"]) and (pending.may_skip or math.isfinite(metrics["grad_norm"])):
            self._trackers.log(self._line(pending, {}))

    def _line(self, pending: PendingStep, evaluation: Mapping[str, float]) -> dict[str, Any]:
        line: dict[str, Any] = pending.metrics.read()
        if not math.isfinite(line["grad_norm"]):
            line["grad_norm"] = None
        if "num_skipped" in line:
            line["num_skipped"] = int(line["num_skipped"])
        speed = self._throughput.metrics(
            step_s=pending.metrics.end.seconds_since(pending.start_event),
            waited_s=pending.waited_s,
            num_samples=self._num_samples,
        )
        sources = {"sources": dict(pending.sources)} if pending.sources else {}
        return {**line, **speed, **evaluation, **sources, "num_failed": pending.num_failed}


# GPU hours and energy of a run, recorded in its run.json. Runs without a GPU record nothing.
#
# At each checkpoint, all ranks add up their consumption since the run was started or resumed. The consumption between
# the last checkpoint and a kill is not recorded. Energy is measured by NVIDIA's driver (NVML) and covers only the GPUs.
# Energy is omitted unless the driver measures it for every GPU of the run.

FACT = "consumption"
_JOULES_PER_KWH = 3.6e6


class Consumption:
    """Consumption of a run: `gpu_hours`, and `gpu_kwh` if the energy is known. All ranks must call the methods."""

    def __init__(self, run: RunFolder, *, world: World, device: torch.device) -> None:
        self._run, self._world, self._device = run, world, device
        self._previous = world.first(lambda: dict(run.read_facts().get(FACT, {})))
        self._began_s, self._began_j = time.monotonic(), _energy_j(device)

    def measure(self) -> Callable[[], None]:
        """Return a function that writes the current sums over all ranks to run.json. Only rank 0 may call it."""
        if self._device.type != "cuda":
            return lambda: None
        now_j = _energy_j(self._device)
        used_j = None if now_j is None or self._began_j is None else now_j - self._began_j
        ranks = self._world.gather_objects((time.monotonic() - self._began_s, used_j))
        sums = {"gpu_hours": self._previous.get("gpu_hours", 0.0) + sum(used_s for used_s, _ in ranks) / 3600}
        joules = [used_j for _, used_j in ranks if used_j is not None]
        if len(joules) == len(ranks) and ("gpu_kwh" in self._previous or not self._previous):
            sums["gpu_kwh"] = self._previous.get("gpu_kwh", 0.0) + sum(joules) / _JOULES_PER_KWH
        return lambda: publish_json(self._run.facts, {**self._run.read_facts(), FACT: sums})


def _energy_j(device: torch.device) -> float | None:
    """Return the energy (J) that a GPU has used since its driver was loaded; None if it cannot be measured."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def consumption_entry(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the `consumption` entry of run.json, so that a resumed run keeps it; {} if there is no such entry."""
    return {FACT: facts[FACT]} if FACT in facts else {}
