"""Pipeline stages of a captioner. The captioner is treated as a list of layers that can be split anywhere:

    video_embedding                 clips -> x
    video_block 0, 1, ...           x -> x
    video_norm                      x -> video              (the tower's last norm and the projection)
    token_embedding                 video, tokens -> video, text
    text_block 0, 1, ...            video, text -> video, text
    head                            video, text -> logits

One or two floating-point tensors are passed from each stage to the next. The stage with the token embedding also gets
the tokens. Parameters have the same names as in the complete captioner. The token embedding belongs to both the first
and the last layer of the decoder. If these layers are in different stages, each stage has a copy.

Shape suffixes: V videos, N video tokens, R rows of text (grouped by video), L text tokens, D width, W size of the
vocabulary. In `video_VCTHW`: C channels, T frames, H and W height and width.
"""

import re
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.distributed.pipeline import LayerCost, broadcast_from_last, run_along
from clipmill.train.distributed.world import World
from clipmill.train.models.captioner import Captioner, Gpt2, TextCache
from clipmill.train.models.video_vit import TokenTower

LayerKind = Literal["video_embedding", "video_block", "video_norm", "token_embedding", "text_block", "head"]

TIED = "decoder.token_embedding.weight"

_BLOCK = re.compile(r"(video|decoder)\.transformer\.resblocks\.(\d+)\..+")

_NORM = ("video.ln_post.", "projection.")

_HEAD = (TIED, "decoder.ln_final.")

_BLOCK_KIND = "block"


@dataclass(frozen=True)
class Layer:
    """Layer of a captioner.

    Attributes:
        index: Index of a block; 0 for other layers.
    """

    kind: LayerKind
    index: int = 0


def layers_for(*, video_depth: int, text_depth: int) -> tuple[Layer, ...]:
    """Return the layers of a captioner with the given numbers of blocks, in order."""
    return (
        Layer("video_embedding"),
        *(Layer("video_block", index) for index in range(video_depth)),
        Layer("video_norm"),
        Layer("token_embedding"),
        *(Layer("text_block", index) for index in range(text_depth)),
        Layer("head"),
    )


def all_layers(captioner: Captioner) -> tuple[Layer, ...]:
    """Return the layers of a captioner, in order."""
    return layers_for(
        video_depth=len(_tower_of(captioner).transformer.resblocks),
        text_depth=len(captioner.decoder.transformer.resblocks),
    )


def owners_of(name: str) -> tuple[Layer, ...]:
    """Return the layers that a parameter or buffer belongs to. The tied token embedding belongs to two layers.

    Raises:
        ValueError: A captioner has no parameter or buffer with this name.
    """
    if match := _BLOCK.fullmatch(name):
        return (Layer("video_block" if match[1] == "video" else "text_block", int(match[2])),)
    if name.startswith(_NORM):
        return (Layer("video_norm"),)
    if name.startswith("video."):
        return (Layer("video_embedding"),)
    if name == TIED:
        return (Layer("token_embedding"), Layer("head"))
    if name.startswith(_HEAD):
        return (Layer("head"),)
    if name == "decoder.positional_embedding":
        return (Layer("token_embedding"),)
    raise ValueError(f"no layer of a captioner contains {name}")


def parameters_by_layer(captioner: Captioner) -> list[int]:
    """Return the number of parameters of each layer. Tied parameters count in both of their layers."""
    counts = dict.fromkeys(all_layers(captioner), 0)
    for name, parameter in captioner.named_parameters():
        for layer in owners_of(name):
            counts[layer] += parameter.numel()
    return list(counts.values())


def layers_of(captioner: Captioner) -> list[LayerCost]:
    """Return the cost of each layer, in order. Blocks of the tower and of the decoder have the same kind."""
    kinds = [_BLOCK_KIND if layer.kind.endswith(_BLOCK_KIND) else layer.kind for layer in all_layers(captioner)]
    return [LayerCost(*layer) for layer in zip(kinds, parameters_by_layer(captioner), strict=True)]


class CaptionerPart(nn.Module):
    """Consecutive layers of a captioner.

    The constructor removes the parameters of all other layers from the captioner. If the captioner was built on the
    meta device, these parameters never take up memory.

    Args:
        start: Index of the first layer.
        end: Index after the last layer.

    Raises:
        ValueError: The captioner does not have these layers.
    """

    def __init__(self, captioner: Captioner, *, start: int, end: int) -> None:
        super().__init__()
        layers = all_layers(captioner)
        if not 0 <= start < end <= len(layers):
            raise ValueError(f"there are no layers {start} to {end} in a captioner with {len(layers)} layers")
        self.layers = layers[start:end]
        self.video, self.projection, self.decoder = captioner.video, captioner.projection, captioner.decoder
        # Remove the parameters and buffers of other layers.
        part_layers = set(self.layers)
        for name in [name for name, _ in chain(captioner.named_parameters(), captioner.named_buffers())]:
            if part_layers.isdisjoint(owners_of(name)):
                path, _, leaf = name.rpartition(".")
                module = captioner.get_submodule(path)
                if leaf in module._parameters:
                    module.register_parameter(leaf, None)
                else:
                    module.register_buffer(leaf, None)

    def has_layer(self, kind: LayerKind) -> bool:
        """Return True if one of the layers is of the given kind."""
        return any(layer.kind == kind for layer in self.layers)

    @property
    def is_last(self) -> bool:
        """True if the output is logits."""
        return self.has_layer("head")

    def forward(
        self, *inputs: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run all layers.

        Args:
            inputs: Clips for the first part; the outputs of the previous part for other parts.
            tokens: Tokens for the part that embeds them (`Captioner.forward`).
        """
        x = inputs
        for layer in self.layers:
            x = self._run(layer, x, tokens)
        return x[0] if len(x) == 1 else x

    def encode(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run only the layers of the tower. Without such layers, return the input."""
        x = inputs
        for layer in self.layers:
            if layer.kind.startswith("video_"):
                x = self._run(layer, x, None)
        return x[0]

    def start(self, video_VND: torch.Tensor, *, num_tokens: int, rows_per_video: int = 1) -> TextCache:
        """Return a cache for the text blocks of this part (`Gpt2.start`)."""
        indices = [layer.index for layer in self.layers if layer.kind == "text_block"]
        decoder = self._decoder()
        return decoder.start(video_VND, num_tokens=num_tokens, rows_per_video=rows_per_video, block_indices=indices)

    def step(self, inputs: torch.Tensor, cache: TextCache) -> torch.Tensor:
        """Run the layers of the decoder on the tokens that follow the cached tokens.

        Args:
            inputs: Tokens, int64 [R, L], for the part that embeds them; the output [R, L, D] of the previous part for
                other parts.

        Returns:
            Logits [R, W] for the next token in the last part; the output [R, L, D] in other parts.
        """
        decoder = self._decoder()
        x_RLD = decoder.embed(inputs, offset=cache.num_tokens) if self.has_layer("token_embedding") else inputs
        x_RLD = decoder.run_blocks(x_RLD, cache)
        return decoder.logits(x_RLD[:, -1]) if self.is_last else x_RLD

    def _run(
        self, layer: Layer, inputs: tuple[torch.Tensor, ...], tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        decoder = self._decoder()
        tower = _tower_of(self)
        match layer.kind:
            case "video_embedding":
                return (tower.embed(inputs[0]),)
            case "video_block":
                return (tower.transformer.run(layer.index, inputs[0]),)
            case "video_norm":
                x = tower.finish(inputs[0])
                return (x if self.projection is None else self.projection(x),)
            case "token_embedding":
                if tokens is None:
                    raise ValueError("the part with the token embedding needs tokens")
                return (inputs[0], decoder.embed(tokens.flatten(0, -2)))
            case "text_block":
                video, text = inputs
                return (video, decoder.transformer.run(layer.index, text, video))
            case "head":
                return (decoder.logits(inputs[1]),)

    def _decoder(self) -> Gpt2:
        assert isinstance(self.decoder, Gpt2)
        return self.decoder


def _tower_of(module: nn.Module) -> TokenTower:
    """Return the video tower, which must be able to run block by block.

    Raises:
        UserError: The tower comes from a library, so it cannot be split.
    """
    if not isinstance(module.video, TokenTower):
        raise UserError(
            "--towers.image is a tower from a library, which cannot be split into pipeline stages",
            hint="omit --parallel.stages",
            flags=("--towers.image",),
        )
    return module.video


def part_of(captioner: Captioner, layers: range) -> CaptionerPart:
    """Move the given layers of a captioner to a part. The captioner cannot be used afterwards."""
    return CaptionerPart(captioner, start=layers.start, end=layers.stop)


def complete_captioner(model: nn.Module, *, stages: World, device: torch.device) -> nn.Module:
    """Return a module that each pipeline stage can call like a complete captioner; `model` if there is one stage."""
    if stages.size == 1:
        return model
    assert isinstance(model, CaptionerPart)
    return StagedCaptioner(model, stages=stages, device=device)


class StagedCaptioner(nn.Module):
    """Captioner in pipeline stages, with the interface of `clipmill.train.models.captioner.Captioner`.

    The output of the encoder passes through the stages once. Each stage caches the keys and values of its blocks. The
    last stage broadcasts its logits, R * W values per token, so that all stages choose the same tokens. Only the first
    stage needs pixels.

    Args:
        part: Layers of this stage.
        stages: Pipeline stages of the captioner.
    """

    def __init__(self, part: CaptionerPart, *, stages: World, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self._stages, self._device = stages, device
        # Index of the first stage with text layers.
        self._first_text_stage = stages.gather_objects(part.has_layer("token_embedding")).index(True)

    def forward(self, video_VCTHW: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, L, W] for the token after each token (`Captioner.forward`)."""

        def run(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            outputs = self.part(*(inputs or (video_VCTHW,)), tokens=tokens)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        return self._broadcast_last(run_along(self._stages, run, device=self._device))

    def start(self, video_VCTHW: torch.Tensor, *, num_tokens: int, rows_per_video: int = 1) -> TextCache:
        """Return a cache for the blocks of this stage (`Captioner.start`)."""

        def run(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (self.part.encode(*(inputs or (video_VCTHW,))),)

        (video_VND,) = run_along(self._stages, run, device=self._device)
        return self.part.start(video_VND, num_tokens=num_tokens, rows_per_video=rows_per_video)

    def step(self, tokens_RL: torch.Tensor, cache: TextCache) -> torch.Tensor:
        """Return the logits [R, W] for the next token (`Captioner.step`)."""

        def run(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (self.part.step(inputs[0] if inputs else tokens_RL, cache),)

        return self._broadcast_last(run_along(self._stages, run, first=self._first_text_stage, device=self._device))

    def _broadcast_last(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        is_last = self._stages.rank == self._stages.size - 1
        return broadcast_from_last(self._stages, outputs[0] if is_last else None, device=self._device)
