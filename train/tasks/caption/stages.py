"""A captioner as a flat list of stages, cut anywhere: what one process of a pipeline has of it.

    video_embedding                 clips -> x
    video_block 0, 1, ...           x -> x
    video_norm                      x -> video              (the tower's last norm, and the projection)
    token_embedding                 video, tokens -> video, text
    text_block 0, 1, ...            video, text -> video, text
    head                            video, text -> logits

What goes from one stage to the next is one or two tensors of floating point numbers; tokens are handed to the part that
has the token embedding. Parameters keep the names that they have in the whole captioner, wherever it is cut. The token
embedding belongs to two stages, the first and the last of the decoder: parts that have one of them each have a copy.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from train.distributed.stages import LayerCost, from_last, run_along
from train.distributed.world import World
from train.models.captioner import Captioner, tower_of
from train.models.gpt2 import Gpt2
from train.models.gpt2_block import TextCache

StageKind = Literal["video_embedding", "video_block", "video_norm", "token_embedding", "text_block", "head"]

TIED = "decoder.token_embedding.weight"
_BLOCK = re.compile(r"(video|decoder)\.transformer\.resblocks\.(\d+)\..+")
_NORM = ("video.ln_post.", "projection.")
_HEAD = (TIED, "decoder.ln_final.")


@dataclass(frozen=True)
class Stage:
    """One link of the chain; `number` tells blocks apart."""

    kind: StageKind
    number: int = 0


def stages_of(*, video_depth: int, text_depth: int) -> tuple[Stage, ...]:
    """The stages of a captioner with so many blocks."""
    return (
        Stage("video_embedding"),
        *(Stage("video_block", number) for number in range(video_depth)),
        Stage("video_norm"),
        Stage("token_embedding"),
        *(Stage("text_block", number) for number in range(text_depth)),
        Stage("head"),
    )


def owners_of(name: str) -> tuple[Stage, ...]:
    """The stages that a parameter or buffer of a captioner belongs to; two for the tied embedding.

    Raises:
        ValueError: a captioner has none of that name.
    """
    if match := _BLOCK.fullmatch(name):
        return (Stage("video_block" if match[1] == "video" else "text_block", int(match[2])),)
    if name.startswith(_NORM):
        return (Stage("video_norm"),)
    if name.startswith("video."):
        return (Stage("video_embedding"),)
    if name == TIED:
        return (Stage("token_embedding"), Stage("head"))
    if name.startswith(_HEAD):
        return (Stage("head"),)
    if name == "decoder.positional_embedding":
        return (Stage("token_embedding"),)
    raise ValueError(f"no stage of a captioner has {name}")


def parameters_by_stage(captioner: Captioner) -> list[int]:
    """How many parameters each stage has, in the order of the stages; the tied ones count in both."""
    stages = all_stages(captioner)
    counts = dict.fromkeys(stages, 0)
    for name, parameter in captioner.named_parameters():
        for stage in owners_of(name):
            counts[stage] += parameter.numel()
    return [counts[stage] for stage in stages]


def all_stages(captioner: Captioner) -> tuple[Stage, ...]:
    """The stages of a captioner."""
    return stages_of(
        video_depth=len(tower_of(captioner).transformer.resblocks),
        text_depth=len(captioner.decoder.transformer.resblocks),
    )


class CaptionerPart(nn.Module):
    """Some stages of a captioner that follow one another.

    It takes the captioner over: parameters of the other stages are gone from it afterwards. One that was made on the
    meta device never needs memory for them.

    Args:
        begin, end: numbers of the first stage and of the one after the last.
    """

    def __init__(self, captioner: Captioner, *, begin: int, end: int) -> None:
        super().__init__()
        every = all_stages(captioner)
        if not 0 <= begin < end <= len(every):
            raise ValueError(f"stages {begin} to {end} of a captioner with {len(every)}")
        self.stages = every[begin:end]
        self.video, self.projection, self.decoder = captioner.video, captioner.projection, captioner.decoder
        drop_all_but(captioner, self.stages)

    def has(self, kind: StageKind) -> bool:
        """Whether one of its stages is of a kind."""
        return any(stage.kind == kind for stage in self.stages)

    @property
    def has_text(self) -> bool:
        """It has a stage of the decoder: it takes part in writing."""
        return any(not stage.kind.startswith("video_") for stage in self.stages)

    @property
    def is_first(self) -> bool:
        """It is given clips."""
        return self.has("video_embedding")

    @property
    def is_last(self) -> bool:
        """It gives logits."""
        return self.has("head")

    def forward(
        self, *given: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What its last stage gives, of what its first is given.

        Args:
            given: clips for the first part, else what the part before gave.
            tokens: as `Captioner.forward` takes them; for the part that embeds them.
        """
        carried = given
        for stage in self.stages:
            carried = self._run(stage, carried, tokens)
        return carried[0] if len(carried) == 1 else carried

    def encode(self, *given: torch.Tensor) -> torch.Tensor:
        """As `forward`, through the stages of the tower alone; what it is given where it has none of them."""
        carried = given
        for stage in self.stages:
            if stage.kind.startswith("video_"):
                carried = self._run(stage, carried, None)
        return carried[0]

    def start(self, video_VND: torch.Tensor, *, num_tokens: int, rows_per_video: int = 1) -> TextCache:
        """A cache of this part's text blocks; see `Gpt2.start`."""
        numbers = [stage.number for stage in self.stages if stage.kind == "text_block"]
        decoder = self._decoder()
        return decoder.start(video_VND, num_tokens=num_tokens, rows_per_video=rows_per_video, numbers=numbers)

    def step(self, given: torch.Tensor, cache: TextCache) -> torch.Tensor:
        """Its text stages on the tokens that follow those in the cache.

        Args:
            given: int64 [R, L] for the part that embeds tokens, else what the part before gave, [R, L, D].

        Returns:
            Logits [R, K] of what follows, from the last part; else [R, L, D].
        """
        decoder = self._decoder()
        x_RLD = decoder.embed(given, begin=cache.num_tokens) if self.has("token_embedding") else given
        x_RLD = decoder.run_blocks(x_RLD, cache)
        return decoder.logits(x_RLD[:, -1]) if self.is_last else x_RLD

    def _run(
        self, stage: Stage, carried: tuple[torch.Tensor, ...], tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        decoder = self._decoder()
        tower = tower_of(self)
        match stage.kind:
            case "video_embedding":
                return (tower.embed(carried[0]),)
            case "video_block":
                return (tower.transformer.run(stage.number, carried[0]),)
            case "video_norm":
                x = tower.finish(carried[0])
                return (x if self.projection is None else self.projection(x),)
            case "token_embedding":
                if tokens is None:
                    raise ValueError("the part that embeds tokens needs them")
                return (carried[0], decoder.embed(tokens.flatten(0, -2)))
            case "text_block":
                video, text = carried
                return (video, decoder.transformer.run(stage.number, text, video))
            case "head":
                return (decoder.logits(carried[1]),)

    def _decoder(self) -> Gpt2:
        assert isinstance(self.decoder, Gpt2)
        return self.decoder


def drop_all_but(captioner: nn.Module, stages: Sequence[Stage]) -> None:
    """Takes all parameters and buffers out of a captioner that belong to none of these stages."""
    kept = set(stages)
    names = [name for name, _ in _tensors(captioner)]
    for name in names:
        if kept.isdisjoint(owners_of(name)):
            path, _, leaf = name.rpartition(".")
            module = captioner.get_submodule(path)
            if leaf in module._parameters:
                module.register_parameter(leaf, None)
            else:
                module.register_buffer(leaf, None)


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


# A captioner whose layers lie on the stages of a pipeline, as one that is whole: every stage calls it alike.
#
# Shape suffixes: V videos, R rows of text (V * n), L tokens, W words of the vocabulary.


def whole_captioner(model: nn.Module, *, stages: World, device: torch.device) -> nn.Module:
    """What every stage of a pipeline can call as a whole captioner; the model itself where there is one stage."""
    if stages.size == 1:
        return model
    assert isinstance(model, CaptionerPart)
    return StagedCaptioner(model, stages=stages, device=device)


class StagedCaptioner(nn.Module):
    """What `train.models.captioner.Captioner` computes; only the first stage is asked what the clips look like.

    The states of the encoder go through the stages once, and each keeps what its own blocks know of the texts. What the
    last one finds is sent to all, R * W numbers a token: so all of them choose the same tokens.

    Args:
        part: this stage's layers.
    """

    def __init__(self, part: CaptionerPart, *, stages: World, device: torch.device) -> None:
        super().__init__()
        self.part = part
        self._stages, self._device = stages, device
        # Those before have no text.
        self._first = stages.gather_objects(part.has("token_embedding")).index(True)

    def forward(self, video_VCTHW: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [R, L, W] of the token after each; see `Captioner.forward`."""

        def run(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            found = self.part(*(given or (video_VCTHW,)), tokens=tokens)
            return found if isinstance(found, tuple) else (found,)

        return self._from_last(run_along(self._stages, run, device=self._device))

    def start(self, video_VCTHW: torch.Tensor, *, num_tokens: int, rows_per_video: int = 1) -> TextCache:
        """A cache of this stage's blocks; see `Captioner.start`."""

        def run(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (self.part.encode(*(given or (video_VCTHW,))),)

        (video_VND,) = run_along(self._stages, run, device=self._device)
        return self.part.start(video_VND, num_tokens=num_tokens, rows_per_video=rows_per_video)

    def step(self, tokens_RL: torch.Tensor, cache: TextCache) -> torch.Tensor:
        """Logits [R, W] of what follows these tokens; see `Captioner.step`."""

        def run(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (self.part.step(given[0] if given else tokens_RL, cache),)

        return self._from_last(run_along(self._stages, run, first=self._first, device=self._device))

    def _from_last(self, found: tuple[torch.Tensor, ...]) -> torch.Tensor:
        is_last = self._stages.rank == self._stages.size - 1
        return from_last(self._stages, found[0] if is_last else None, device=self._device)


# A captioner as the layers that a pipeline is cut between.


_BLOCK_KIND = "block"


def layers_of(captioner: Captioner) -> list[LayerCost]:
    """The layers, in order; blocks of tower and decoder are of one kind."""
    kinds = [_BLOCK_KIND if stage.kind.endswith(_BLOCK_KIND) else stage.kind for stage in all_stages(captioner)]
    return [LayerCost(*layer) for layer in zip(kinds, parameters_by_stage(captioner), strict=True)]


def part_of(captioner: Captioner, layers: range) -> CaptionerPart:
    """Some layers of a captioner, which they take over."""
    return CaptionerPart(captioner, begin=layers.start, end=layers.stop)
