"""The column's only interface to torch and diffusers: a VAE that encodes pictures or segments to latents."""

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.prep.latents.frames import generator
from clipmill.prep.latents.recipe import Encoding
from clipmill.prep.latents.weights import TINY_CONFIG

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "cuda"]

# Epsilon of the normalisation layers in the tiny VAE. With a smaller value, the untrained VAE would amplify noise in
# flat areas.
_TINY_EPS = 0.1


class Encoder:
    """The encoder of a VAE. It is not thread-safe, because some models cache tensors in the module while they encode.

    Args:
        model: diffusers model whose class is listed in `clipmill.prep.latents.weights`.
    """

    def __init__(self, model: Any, encoding: Encoding, *, device: Device) -> None:
        import torch

        vae, settings = encoding.vae, encoding.settings
        model.decoder = None  # the decoder is not needed, and is larger than the encoder
        if settings.tiling:
            model.enable_tiling()
        if settings.slicing:
            model.enable_slicing()
        self._dtype, self._device = getattr(torch, settings.precision), torch.device(device)
        self._model = model.to(device=device, dtype=self._dtype).eval().requires_grad_(False)
        self._unit_shape, self._segment_frames = encoding.unit_shape, encoding.segment_frames
        self._shift: Any = vae.shift_factor or 0.0
        self._scale: Any = vae.scaling_factor
        if vae.latents_mean is not None:
            frames = encoding.latent_frames or 1
            mean, std = (
                torch.tensor(values, device=self._device).view(vae.channels, -1)[:, :frames, None, None]
                for values in (vae.latents_mean, vae.latents_std)
            )
            self._shift, self._scale = mean, vae.scaling_factor / std

    def resize(self, crops: NDArray[np.uint8], *, size: int) -> "torch.Tensor":
        """Resize square pictures [..., S, S, 3] to uint8 [..., 3, size, size] on the device (antialiased, bilinear)."""
        import torch
        from torch.nn import functional

        pictures = torch.from_numpy(crops).flatten(0, -4).permute(0, 3, 1, 2)
        if pictures.shape[-1] != size:
            # Resize on the CPU, because CUDA cannot resize uint8. If pictures were resized in float32, a quarter of the
            # bytes would differ, and this would change the latents more than half precision does.
            pictures = functional.interpolate(pictures, size=(size, size), mode="bilinear", antialias=True)
        return pictures.unflatten(0, crops.shape[:-3]).to(self._device)

    def encode(self, parts: "list[torch.Tensor]", *, noise: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Return the normalised latents of a batch.

        Args:
            parts: Pictures, uint8 [n, 3, H, W], or segments, uint8 [n, F, 3, H, W]; N in total.
            noise: Standard normal noise for sampling the posterior, with the shape of the result; None to use the mean
                of the posterior.

        Returns:
            Latents, float32 [N, C, h, w] or [N, C, T', h, w].

        Raises:
            MemoryError: The GPU does not have enough memory for the batch.
            UserError: The latents do not have the shape that the configuration implies.
        """
        import torch

        noun = "frames" if len(self._unit_shape) == 3 else f"segments of {self._segment_frames} frames"
        with torch.inference_mode():
            num_units = sum(map(len, parts))
            try:
                inputs = torch.cat(parts).to(self._dtype).div_(127.5).sub_(1)
                if inputs.ndim == 5:
                    inputs = inputs.transpose(1, 2)
                posterior = self._model.encode(inputs.contiguous()).latent_dist
            except torch.OutOfMemoryError:
                remedy = "a smaller --batch" if num_units > 1 else "--tiling or a smaller --size"
                raise MemoryError(f"a batch of {num_units} {noun} does not fit in GPU memory: use {remedy}") from None
            latents = posterior.mode().float()
            if latents.shape != (num_units, *self._unit_shape):
                raise UserError(
                    f"the VAE returned latents of shape {tuple(latents.shape[1:])} for {noun}, but its configuration"
                    f" implies {self._unit_shape}",
                    hint="use a VAE whose config.json matches its weights",
                )
            if noise is not None:
                latents = latents + posterior.std.float() * torch.from_numpy(noise).to(self._device)
            normalised_latents: NDArray[np.float32] = ((latents - self._shift) * self._scale).cpu().numpy()
            return normalised_latents

    @property
    def peak_bytes(self) -> int:
        """Peak memory of this process so far, in bytes; GPU memory if the model is on a GPU."""
        import resource

        import torch

        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@lru_cache(maxsize=1)
def open_encoder(encoding: Encoding, *, device: Device, num_threads: int) -> Encoder:
    """Load the VAE of an encoding from its folder, once per process.

    Raises:
        UserError: torch or diffusers is missing, or the VAE cannot be loaded.
    """
    # If xformers is installed, diffusers imports it. The VAE does not use xformers, so hide the warnings of xformers.
    logging.getLogger("xformers").setLevel(logging.ERROR)
    try:
        import diffusers
        import torch
        from diffusers.utils import logging as diffusers_logging
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", hint="install clipmill[columns]") from None
    diffusers_logging.set_verbosity_error()
    torch.set_num_threads(num_threads)
    # By default, convolutions would use TF32, which has 11 significant bits instead of the 24 of float32.
    torch.backends.cudnn.allow_tf32 = False
    vae = encoding.vae
    if vae.directory is None:
        model = tiny_vae()
    else:
        try:
            model = getattr(diffusers, vae.kind).from_pretrained(
                vae.directory, use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the VAE in {vae.directory} cannot be loaded: {reason}",
                hint="use the weights and config.json of the same model, as written by save_pretrained",
            ) from None
    return Encoder(model, encoding, device=device)


def tiny_vae() -> Any:
    """Return the small VAE with seeded random weights. NumPy draws them, so they are the same on every machine."""
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
                values = generator(0, name, "tiny").standard_normal(parameter.shape, dtype=np.float32)
                parameter.copy_(torch.from_numpy(values * np.float32(parameter[0].numel() ** -0.5)))
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return model
