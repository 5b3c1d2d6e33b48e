"""Whether tensors from elsewhere hold numbers that a model can start from."""

import torch

from manifests.errors import UserError
from train.weights.converted import Converted, Tensors

_LEAST_BYTES = 2


def require_floats(tensors: Tensors, *, source: object) -> None:
    """Raises a UserError at the first tensor that is not of floating point of 16, 32 or 64 bits.

    Integers and 8-bit floats are what quantisation leaves: without their scales they are other numbers.
    """
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < _LEAST_BYTES:
            raise UserError(
                f"{source}: {name} is of {str(tensor.dtype).removeprefix('torch.')}, and weights are floating point of "
                "16, 32 or 64 bits",
                hint="use the weights as they were before they were quantised or converted",
            )


def require_whole_dtypes(state: Tensors, *, source: object) -> None:
    """The same before tensors are put together, of what cannot be a size, a position or a mask by its dtype or name."""
    certain = {
        name: tensor
        for name, tensor in state.items()
        if name.endswith("weight") or tensor.is_floating_point() or tensor.is_complex()
    }
    require_floats(certain, source=source)


def by_origin(converted: Converted) -> dict[str, torch.Tensor]:
    """The tensors that have a place here, by the names that they came with."""
    return {converted.origins[name]: tensor for name, tensor in converted.tensors.items()}


def require_finite(tensors: Tensors, *, source: object) -> None:
    """Raises a UserError at the first tensor that holds NaN or infinity in float32, which models are trained in."""
    for name, tensor in tensors.items():
        if not bool(tensor.float().isfinite().all()):
            raise UserError(
                f"{source}: {name} holds numbers that are not finite (NaN or infinity)",
                hint="the training that made these weights went wrong, or the file is damaged: use other weights",
            )
