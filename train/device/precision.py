"""In which precision a model computes. Weights, optimizer and losses are float32 in all of them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from manifests.errors import UserError
from train.device.transfer import Scalar

PrecisionChoice = Literal["auto", "bf16", "fp16", "tf32", "fp32"]

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# torch.amp.GradScaler's numbers.
_FIRST_SCALE = 65536.0
_STEPS_TO_DOUBLE = 2000


@dataclass
class Precision:
    """The precision of a run and, for fp16, the scale that keeps small gradients from vanishing.

    The scale follows torch.amp.GradScaler: a step whose gradients are not finite is left out and halves it, 2000 good
    steps in a row double it. It asks for the norm of all gradients, on all ranks, which clipping knows anyway: so all
    ranks decide alike, whatever part of the gradients each of them has. What is decided stays on the device; the host
    does not wait for it.

    Attributes:
        reason: why this one, for the log.
        loss_scale: what losses are multiplied by before their backward pass; a tensor of the device once the first norm
            of an fp16 run has been seen, float64 without dimensions, and so the two below.
        num_skipped: steps that were left out so far.
        num_good: steps that were taken since the last one that was not, or since the scale was doubled.
    """

    name: str
    reason: str
    device_type: str
    loss_scale: Scalar = 1.0
    num_skipped: Scalar = 0
    num_good: Scalar = 0

    @property
    def products(self) -> torch.dtype | None:
        """What matrix products are computed in; None for the precision of the weights."""
        return _HALVES.get(self.name)

    def autocast(self) -> AbstractContextManager[None]:
        """A context in which matrix products are computed in this precision."""
        if self.products is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.products)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss whose backward pass may be taken; `clip_gradients` divides by `loss_scale` again."""
        if self.name != "fp16":
            return loss
        scale = self.loss_scale
        return loss * (scale.to(loss.dtype) if isinstance(scale, torch.Tensor) else scale)

    @property
    def skips_steps(self) -> bool:
        """Whether gradients that are not finite are left out, and the run goes on."""
        return self.name == "fp16"

    def accepts(self, grad_norm: Scalar) -> torch.Tensor:
        """Whether the optimizer may step with gradients of this norm; called once a step, it moves the scale.

        Returns:
            A bool where the norm is.
        """
        norm = torch.as_tensor(grad_norm)
        if not self.skips_steps:
            return torch.ones_like(norm, dtype=torch.bool)
        is_good = norm.isfinite()
        if not isinstance(self.loss_scale, torch.Tensor):
            self.loss_scale, self.num_skipped, self.num_good = (
                torch.full((), float(one), dtype=torch.float64, device=norm.device)
                for one in (self.loss_scale, self.num_skipped, self.num_good)
            )
        num_good = self.num_good + 1
        is_doubled = is_good & (num_good == _STEPS_TO_DOUBLE)
        # Never in place: what was logged of the step before may still be on its way.
        self.loss_scale = self.loss_scale * torch.where(is_good, torch.where(is_doubled, 2.0, 1.0), 0.5)
        self.num_skipped = self.num_skipped + ~is_good
        self.num_good = torch.where(is_good & ~is_doubled, num_good, 0.0)
        return is_good

    def state_dict(self) -> dict[str, float]:
        """What a run that is resumed goes on with; the device is waited for."""
        return {
            "loss_scale": float(self.loss_scale),
            "num_skipped": int(self.num_skipped),
            "num_good": int(self.num_good),
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes over what `state_dict` gave."""
        self.loss_scale = float(state["loss_scale"])
        self.num_skipped, self.num_good = int(state["num_skipped"]), int(state["num_good"])


def open_precision(choice: PrecisionChoice, *, device_type: str) -> Precision:
    """Chooses a precision for a device (`cpu`, `cuda`), and sets whether torch may round to TF32.

    Only tf32 rounds float32: similarities at a temperature of 0.01 are not what rounding spares.

    Raises:
        UserError: bf16 was asked for and the GPU does not have it.
    """
    has_bf16 = device_type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if choice == "bf16" and device_type == "cuda" and not has_bf16:
        raise UserError(
            f"{torch.cuda.get_device_name()} has no bf16 (asked for by --precision bf16)",
            hint="use --precision fp16, or fp32",
        )
    name, reason = str(choice), f"asked for by --precision {choice}"
    if choice == "auto":
        name = "bf16" if has_bf16 else "fp32"
        reason = "the GPU has it" if has_bf16 else f"a {device_type} without bf16"
        if device_type == "cpu":
            reason = "the device is a cpu"
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    return Precision(name, reason, device_type, loss_scale=_FIRST_SCALE if name == "fp16" else 1.0)


def choose_device(name: str) -> torch.device:
    """The device of `--device`.

    Raises:
        UserError: cuda was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("torch finds no CUDA device (asked for by --device cuda)", hint="use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
