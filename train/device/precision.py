"""Selection of a run's device and precision, and dynamic loss scaling for fp16.

Weights, optimizer state and losses are float32 in every precision.
"""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.device.transfer import Scalar

PrecisionChoice = Literal["auto", "bf16", "fp16", "tf32", "fp32"]

_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Default values of torch.amp.GradScaler.
_INITIAL_SCALE = 65536.0
_STEPS_TO_DOUBLE = 2000


@dataclass
class Precision:
    """Precision of a run and, for fp16, dynamic loss scaling.

    Loss scaling follows torch.amp.GradScaler: a step with non-finite gradients is skipped, and halves the scale; 2000
    successful steps in a row double the scale. Whether a step is skipped depends on the global gradient norm, which
    clipping computes anyway, so all ranks make the same decision. The decision is made on the device, without
    synchronising with the host.

    Attributes:
        name: Name of the precision: bf16, fp16, tf32 or fp32.
        reason: Reason for the choice, for the log.
        device_type: Type of the device: cpu or cuda.
        loss_scale: Factor that multiplies losses before the backward pass. After the first fp16 step, this factor and
            the two counts are zero-dimensional float64 tensors on the device.
        num_skipped: Number of skipped steps.
        num_good: Number of steps taken since the last skipped step, or since the scale was last doubled.
    """

    name: str
    reason: str
    device_type: str
    loss_scale: Scalar = 1.0
    num_skipped: Scalar = 0
    num_good: Scalar = 0

    @property
    def matmul_dtype(self) -> torch.dtype | None:
        """Dtype of matrix products under autocast; None if it is the dtype of the weights."""
        return _HALF_DTYPES.get(self.name)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of this precision."""
        if self.matmul_dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.matmul_dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss before its backward pass; `clip_gradients` unscales the gradients."""
        if self.name != "fp16":
            return loss
        scale = self.loss_scale
        return loss * (scale.to(loss.dtype) if isinstance(scale, torch.Tensor) else scale)

    @property
    def skips_steps(self) -> bool:
        """True if a step with non-finite gradients is skipped and the run continues."""
        return self.name == "fp16"

    def accepts(self, grad_norm: Scalar) -> torch.Tensor:
        """Update the loss scale. Return a bool tensor on the device: True if the step may be taken.

        Call this method once per step.
        """
        norm = torch.as_tensor(grad_norm)
        if not self.skips_steps:
            return torch.ones_like(norm, dtype=torch.bool)
        is_good = norm.isfinite()
        if not isinstance(self.loss_scale, torch.Tensor):
            self.loss_scale, self.num_skipped, self.num_good = (
                torch.full((), float(number), dtype=torch.float64, device=norm.device)
                for number in (self.loss_scale, self.num_skipped, self.num_good)
            )
        num_good = self.num_good + 1
        is_doubled = is_good & (num_good == _STEPS_TO_DOUBLE)
        # Create new tensors, because the previous ones may still be in transfer to the host as metrics.
        self.loss_scale = self.loss_scale * torch.where(is_good, torch.where(is_doubled, 2.0, 1.0), 0.5)
        self.num_skipped = self.num_skipped + ~is_good
        self.num_good = torch.where(is_good & ~is_doubled, num_good, 0.0)
        return is_good

    def state_dict(self) -> dict[str, float]:
        """Return the loss scale and the two counts, for checkpoints. This method synchronises with the device."""
        scale, num_skipped, num_good = float(self.loss_scale), int(self.num_skipped), int(self.num_good)
        return {"loss_scale": scale, "num_skipped": num_skipped, "num_good": num_good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the loss scale and the two counts from the output of `state_dict`."""
        self.loss_scale = float(state["loss_scale"])
        self.num_skipped, self.num_good = int(state["num_skipped"]), int(state["num_good"])


def open_precision(choice: PrecisionChoice, *, device_type: str) -> Precision:
    """Select a precision for a device, and enable or disable TF32 in torch.

    TF32 is used only with --precision tf32, because it is too coarse for similarities at a temperature of 0.01.

    Args:
        device_type: Type of the device: cpu or cuda.

    Raises:
        UserError: bf16 was requested, but the GPU does not support it.
    """
    has_bf16 = device_type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if choice == "bf16" and device_type == "cuda" and not has_bf16:
        raise UserError(
            f"{torch.cuda.get_device_name()} does not support bf16 (requested by --precision bf16)",
            hint="use --precision fp16 or fp32",
            flags=("--precision",),
        )
    name, reason = str(choice), f"requested by --precision {choice}"
    if choice == "auto":
        name = "bf16" if has_bf16 else "fp32"
        reason = "the GPU supports bf16" if has_bf16 else "the GPU does not support bf16"
        if device_type == "cpu":
            reason = "the device is a CPU"
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    return Precision(name, reason, device_type, loss_scale=_INITIAL_SCALE if name == "fp16" else 1.0)


def choose_device(name: str, *, needs_gpu: bool = False) -> torch.device:
    """Return the device for `--device`. `auto` falls back to the CPU, and prints a note if a GPU cannot be used.

    Args:
        name: Value of `--device`: auto, cpu or cuda.
        needs_gpu: Value of `--require-gpu`.

    Raises:
        UserError: No GPU can be used, but --device cuda or --require-gpu requests one.
    """
    if name == "cpu" or torch.cuda.is_available():
        return torch.device("cuda" if name == "auto" else name)
    from clipmill.train.device.driver import why_no_gpu  # loaded only if torch finds no GPU

    reason = why_no_gpu()
    if name == "cuda" or needs_gpu:
        flag = "--require-gpu" if needs_gpu else "--device cuda"
        raise UserError(
            f"torch finds no CUDA device{f': {reason}' if reason else ''} (requested by {flag})",
            hint="use --device cpu or auto" if not needs_gpu else "repair the GPU's setup, or omit --require-gpu",
            flags=(flag,),
        )
    if reason is not None:
        _print_once(f"note: the CPU is used because torch cannot use the GPU of this machine: {reason}")
    return torch.device("cpu")


@cache
def _print_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{line}\n")
