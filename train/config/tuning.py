"""Settings of what is trained of a model: frozen parts, and low-rank adapters (LoRA)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import Checked, GoesWith, Range
from clipmill.train.config.fields import MODEL, SEVERAL

Target = Literal["attention", "mlp"]
Tower = Literal["video", "text", "decoder"]

Freeze = Annotated[tuple[str, ...], MODEL, SEVERAL]

_PART = re.compile(r"(?P<tower>video|text|decoder)(?:\.blocks:(?P<count>\d{1,4}))?")
# Names for parts that the pattern has no place for.
_ALIASES = {"encoder": "video"}
_WITH_CROSS_ATTENTION_TRAINED = "decoder-except-cross-attention"
_OF_ADAPTERS = GoesWith("rank", use="8")


@dataclass(frozen=True, kw_only=True)
class Lora(Checked):
    """Low-rank adapters of linear layers (Hu et al. 2021)."""

    prefix = "lora"

    rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of LoRA adapters. The towers that have them keep their initial weights. 0: no adapters."""
    alpha: Annotated[float | None, Range(above=0, most=1e6), _OF_ADAPTERS] = None
    """LoRA scale: outputs of adapters are multiplied by alpha / rank. Default: the rank, which is a factor of 1."""
    targets: Annotated[tuple[Target, ...], _OF_ADAPTERS] = ("attention", "mlp")
    """Layers with adapters: the projections of attention, the layers of MLPs, or both."""
    towers: Annotated[tuple[Tower, ...], _OF_ADAPTERS] = ()
    """Towers with adapters. Default: video and text, if the model has them and they are not frozen."""

    @property
    def scale(self) -> float:
        """Factor of the output of adapters."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def rules(self) -> Iterator[UserError]:
        """Yields adapters without any layer."""
        if self.rank and not self.targets:
            yield UserError(
                "--lora.targets names no layers", hint="use attention, mlp, or both", flags=("--lora.targets",)
            )


@dataclass(frozen=True)
class FrozenPart:
    """A part of a model that keeps its initial weights.

    Attributes:
        tower: name of the module.
        num_blocks: freezes what comes before the first block, and so many blocks; None for the whole tower.
        trains_cross_attention: the cross-attention of the tower is trained nevertheless.
        given: the value of --freeze.
    """

    tower: str
    num_blocks: int | None = None
    trains_cross_attention: bool = False
    given: str = field(default="", compare=False)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the tower is trained."""
        return self.num_blocks is None and not self.trains_cross_attention


def frozen_part(name: str) -> FrozenPart:
    """The part that a value of --freeze names: `video`, `text.blocks:6`, `blocks:6` (of the video tower).

    Raises:
        UserError: it names none.
    """
    if name == _WITH_CROSS_ATTENTION_TRAINED:
        return FrozenPart("decoder", trains_cross_attention=True, given=name)
    match = _PART.fullmatch(_ALIASES.get(name, f"video.{name}" if name.startswith("blocks:") else name))
    if match is None:
        raise UserError(
            f"--freeze is {name}",
            hint="name a tower (video, text), or the first N blocks of one (blocks:N, text.blocks:N)",
            flags=("--freeze",),
        )
    return FrozenPart(match["tower"], None if match["count"] is None else int(match["count"]), given=name)


def random_freeze_warning(freeze: Sequence[str]) -> str:
    """The warning about --freeze for a model with random weights; empty if it freezes only a decoder."""
    names = [part.given for part in map(frozen_part, freeze) if part.tower != "decoder"]
    return f"--freeze {' '.join(names)} keeps random weights: --init.weights names none" if names else ""


def towers_to_adapt(lora: Lora, freeze: Sequence[str], *, towers: Sequence[Tower]) -> tuple[Tower, ...]:
    """The towers that get adapters, of a model with these towers."""
    if not lora.rank:
        return ()
    whole = {part.tower for part in map(frozen_part, freeze) if part.is_whole}
    return lora.towers or tuple(one for one in towers if one != "decoder" and one not in whole)


def tuning_mistakes(
    freeze: Sequence[str], lora: Lora, *, towers: Sequence[Tower], has_head: bool, has_weights: bool
) -> Iterator[UserError]:
    """Yield the mistakes in --freeze and --lora.* for a model.

    Args:
        towers: that the model has.
        has_head: it has trained parameters besides.
        has_weights: it starts from the weights that --init.weights names.
    """
    parts = []
    for name in freeze:
        try:
            parts.append(frozen_part(name))
        except UserError as error:
            yield error
            return
        if parts[-1].tower not in towers:
            yield _no_tower(f"--freeze {name}", parts[-1].tower, towers)
            return
    whole = {part.tower for part in parts if part.is_whole}
    if not has_head and whole >= set(towers):
        hint = "leave one of them out" if len(freeze) > 1 else "leave it out, or freeze the first blocks: blocks:N"
        yield UserError(f"--freeze {' '.join(freeze)} leaves nothing to train", hint=hint, flags=("--freeze",))
        return
    if not lora.rank:
        return
    if not has_weights:
        yield UserError(
            f"--lora.rank is {lora.rank}, and adapters are for pretrained weights",
            hint="name the weights to adapt: --init.weights, or train without --lora.rank",
            flags=("--lora.rank",),
        )
    for tower in lora.towers:
        if tower not in towers:
            yield _no_tower(f"--lora.towers {tower}", tower, towers)
        elif tower in whole:
            yield UserError(
                f"--lora.towers {tower} adapts a tower that --freeze {' '.join(freeze)} keeps as it is",
                hint="leave it out of one of them: the weights of a tower with adapters are frozen in any case",
                flags=("--lora.towers", "--freeze"),
            )
    if not towers_to_adapt(lora, freeze, towers=towers):
        yield UserError(
            f"--lora.rank is {lora.rank}, and --freeze {' '.join(freeze)} leaves no tower to adapt",
            hint="leave out one of them",
            flags=("--lora.rank", "--freeze"),
        )


def _no_tower(flag: str, tower: str, towers: Sequence[str]) -> UserError:
    return UserError(
        f"{flag}: the model has no {tower} tower of its own", hint=f"it has: {', '.join(towers)}", flags=(flag,)
    )
