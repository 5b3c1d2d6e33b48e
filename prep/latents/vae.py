"""The single interface to torch and diffusers: a VAE on a device that turns pictures into latents."""

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.prep.latents.frames import generator
from clipmill.prep.latents.weights import TINY_CONFIG, Vae

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "cuda"]
Precision = Literal["float32", "float16", "bfloat16"]

# Epsilon of the normalisation layers of the tiny VAE: being untrained, it would otherwise amplify noise in flat areas.
_TINY_EPS = 0.1


class Encoder:
    """The encoder of a VAE.

    Args:
        model: a diffusers AutoencoderKL.
    """

    def __init__(self, model: Any, *, vae: Vae, device: Device, precision: Precision) -> None:
        import torch

        model.decoder = None  # not needed, and larger than the encoder
        self._model = model.to(device=device, dtype=getattr(torch, precision)).eval().requires_grad_(False)
        self._device, self._dtype = torch.device(device), getattr(torch, precision)
        self._scale, self._shift = vae.scaling_factor, vae.shift_factor or 0.0

    def resized(self, crops: NDArray[np.uint8], *, size: int) -> "torch.Tensor":
        """Resize square pictures [N, S, S, 3] to uint8 [N, 3, size, size] on the device (antialiased, bilinear)."""
        import torch
        from torch.nn import functional

        pictures = torch.from_numpy(crops).permute(0, 3, 1, 2)
        if pictures.shape[-1] != size:
            # Always on the CPU: CUDA does not resize uint8, and in float32 a quarter of the bytes differ, which changes
            # the latents more than half precision does.
            pictures = functional.interpolate(pictures, size=(size, size), mode="bilinear", antialias=True)
        return pictures.to(self._device)

    def encode(self, parts: "list[torch.Tensor]", *, noise: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Return the latents [N, C, h, w] of the N uint8 pictures [3, H, W] in all parts, shifted and scaled.

        Args:
            noise: standard normal [N, C, h, w] to sample the posterior; None for its mean.

        Raises:
            MemoryError: the GPU does not have enough memory for the batch.
        """
        import torch

        with torch.inference_mode():
            scaled = torch.cat(parts).to(self._dtype).div_(127.5).sub_(1)
            try:
                posterior = self._model.encode(scaled.contiguous()).latent_dist
            except torch.OutOfMemoryError:
                raise MemoryError(
                    f"a batch of {len(scaled)} frames does not fit in GPU memory: use a smaller --batch"
                ) from None
            latents = posterior.mean.float()
            if noise is not None:
                latents = latents + posterior.std.float() * torch.from_numpy(noise).to(self._device)
            found: NDArray[np.float32] = ((latents - self._shift) * self._scale).cpu().numpy()
            return found


@lru_cache(maxsize=1)
def open_encoder(vae: Vae, *, device: Device, precision: Precision, num_threads: int) -> Encoder:
    """Load `vae`, once per process.

    Raises:
        UserError: torch or diffusers is missing, or the weights do not match the configuration.
    """
    # diffusers imports xformers if it is installed; its warnings are irrelevant, since its attention is not used.
    logging.getLogger("xformers").setLevel(logging.ERROR)
    try:
        import torch
        from diffusers import AutoencoderKL
        from diffusers.utils import logging as diffusers_logging
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", hint="install clipmill[columns]") from None
    diffusers_logging.set_verbosity_error()
    torch.set_num_threads(num_threads)
    # By default, convolutions would use TF32, which keeps 11 significant bits instead of float32's 24.
    torch.backends.cudnn.allow_tf32 = False
    if vae.directory is None:
        model = tiny_vae()
    else:
        try:
            model = AutoencoderKL.from_pretrained(
                vae.directory, use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the VAE in {vae.directory} cannot be loaded: {reason}",
                hint="give weights and config.json of the same model, as written by save_pretrained",
            ) from None
    return Encoder(model, vae=vae, device=device, precision=precision)


def tiny_vae() -> Any:
    """Return the small VAE without pretrained weights; numpy generates its numbers, the same on every machine."""
    import torch
    from diffusers import AutoencoderKL

    kind: Any = AutoencoderKL
    model = kind.from_config(TINY_CONFIG)
    for module in model.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.eps = _TINY_EPS
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:
                drawn = generator(0, name, "tiny").standard_normal(parameter.shape, dtype=np.float32)
                parameter.copy_(torch.from_numpy(drawn * np.float32(parameter[0].numel() ** -0.5)))
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return model
