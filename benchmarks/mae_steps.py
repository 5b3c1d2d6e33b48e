"""Steps of masked autoencoders of clipmill and transformers with the same weights, clips and masks."""

from typing import Protocol

import torch
from torch import nn

from benchmarks.allocated import peak_bytes
from benchmarks.timing import seconds_of
from clipmill.train.config.model import ModelName, Towers
from clipmill.train.models.attention import open_attention
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.videomae import MaskedAutoencoder, predicted_cubes
from clipmill.train.tasks.mae.task import normalised_cubes, reconstruction_loss, tube_masks
from clipmill.train.weights.conversion import IMAGENET_STD
from clipmill.train.weights.videomae import to_hf_videomae

OURS, HF = "clipmill", "transformers"
NUM_FRAMES, MASK_RATIO = 16, 0.9


class Steps(Protocol):
    """Forward and backward passes of one model."""

    @property
    def model(self) -> nn.Module:
        """Encoder and decoder."""
        ...

    def loss(self, clips_BCTHW: torch.Tensor, masked_BN: torch.Tensor) -> torch.Tensor:
        """Compute the mean squared error over the masked cubes."""
        ...


class OurSteps:
    """Steps of `train mae`."""

    def __init__(self, model: ModelName, *, image_px: int, decoder_depth: int, device: torch.device) -> None:
        towers = Towers(kind="videomae")
        self._size = size_of(model, towers).video
        torch.manual_seed(0)
        self.model = MaskedAutoencoder(
            self._size,
            decoder_depth=decoder_depth,
            image_px=image_px,
            num_frames=NUM_FRAMES,
            attend=open_attention("auto", device_type=device.type).attend,
            towers=towers,
        ).to(device)
        self.grid = self.model.video.grid

    def masks(self, num_clips: int, *, device: torch.device) -> torch.Tensor:
        """Draw tube masks, bool [B, N]."""
        return tube_masks(torch.arange(num_clips, device=device), self.grid, ratio=MASK_RATIO, seed=0)

    def loss(self, clips_BCTHW: torch.Tensor, masked_BN: torch.Tensor) -> torch.Tensor:
        """Compute the loss as the objective of `train mae` does."""
        num_masked = self.grid.steps * int(MASK_RATIO * self.grid.patches)
        targets_BMV = normalised_cubes(
            clips_BCTHW,
            predicted_cubes(masked_BN, count=num_masked),
            cube_frames=self._size.cube_frames,
            patch_px=self._size.patch_px,
            std=IMAGENET_STD,
        )
        with _autocast(clips_BCTHW.device):
            values_BMV = self.model(clips_BCTHW, masked_BN, num_masked=num_masked)
        return reconstruction_loss(values_BMV, targets_BMV)


class HfSteps:
    """Steps of VideoMAEForPreTraining with SDPA. The model computes its targets."""

    def __init__(self, ours: MaskedAutoencoder, *, device: torch.device) -> None:
        from transformers import VideoMAEConfig, VideoMAEForPreTraining

        encoder, decoder = ours.video.size, ours.decoder.transformer
        width = int(ours.decoder.mask_token.shape[0])
        config = VideoMAEConfig(
            image_size=ours.video.grid.rows * encoder.patch_px,
            patch_size=encoder.patch_px,
            num_frames=NUM_FRAMES,
            tubelet_size=encoder.cube_frames,
            hidden_size=encoder.trunk.width,
            num_hidden_layers=encoder.trunk.depth,
            num_attention_heads=encoder.trunk.num_heads,
            intermediate_size=4 * encoder.trunk.width,
            decoder_hidden_size=width,
            decoder_num_hidden_layers=len(decoder.resblocks),
            decoder_num_attention_heads=encoder.trunk.num_heads // 2,
            decoder_intermediate_size=4 * width,
            use_mean_pooling=False,
        )
        self.model = VideoMAEForPreTraining._from_config(config, attn_implementation="sdpa").to(device)
        state, its_names = {}, self.model.state_dict()
        for name, tensor in to_hf_videomae(ours.state_dict()).items():
            # Some versions of transformers use different names for these biases in memory and in files.
            other = name.replace("q_bias", "query.bias").replace("v_bias", "value.bias")
            state[other if other in its_names else name] = tensor
        # Some versions also have a bias for keys, which does not affect attention.
        state |= {name: bias for name, bias in its_names.items() if name.endswith("key.bias") and name not in state}
        self.model.load_state_dict(state)

    def loss(self, clips_BCTHW: torch.Tensor, masked_BN: torch.Tensor) -> torch.Tensor:
        """Return the loss that the model computes."""
        with _autocast(clips_BCTHW.device):
            found: torch.Tensor = self.model(clips_BCTHW.transpose(1, 2), bool_masked_pos=masked_BN).loss
        return found


def take(steps: Steps, clips_BCTHW: torch.Tensor, masked_BN: torch.Tensor) -> float:
    """Run a forward and backward pass, and return the loss."""
    steps.model.zero_grad(set_to_none=True)
    loss = steps.loss(clips_BCTHW, masked_BN)
    loss.backward()
    return loss.item()


def seconds(steps: Steps, clips_BCTHW: torch.Tensor, masked_BN: torch.Tensor, *, count: int) -> float:
    """Return the mean time of `count` passes in seconds; on a CPU, CPU time."""
    return seconds_of(lambda: take(steps, clips_BCTHW, masked_BN), device=clips_BCTHW.device, count=count)


def peak_bytes_of_pass(steps: Steps, clips_BCTHW: torch.Tensor, masked_BN: torch.Tensor) -> int:
    """Return the peak memory of a pass in bytes, with gradients, and without weights, clips and masks."""
    steps.model.zero_grad(set_to_none=True)
    return peak_bytes(lambda: take(steps, clips_BCTHW, masked_BN), device=clips_BCTHW.device)


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
