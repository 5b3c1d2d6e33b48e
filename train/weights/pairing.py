"""Weights of two sources: a video tower of one, and a text tower of another (`--init.text`)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import DualEncoderInit, DualEncoderTowers, Init, Towers
from clipmill.train.weights.conversion import LOGIT_SCALE, ConvertedStateDict, SourceFacts
from clipmill.train.weights.library import OF_TEXT

_SETTINGS_OF_TEXT = ("text", "text_pooling", "context_length")


def parts_of(init: DualEncoderInit, towers: Towers) -> list[tuple[Init, Towers]]:
    """The settings of both sources of weights, with the towers that each is for."""
    of_text = DualEncoderTowers()
    if isinstance(towers, DualEncoderTowers) and towers.text is not None:
        of_text = DualEncoderTowers(text=towers.text, text_pooling=towers.text_pooling)
    return [(replace(init, text=None), DualEncoderTowers(image=towers.image)), (Init(weights=init.text), of_text)]


def paired_tensors(video: ConvertedStateDict, text: ConvertedStateDict, *, title: str) -> ConvertedStateDict:
    """The tensors of `video`, and those of the text tower of `text` in place of its own.

    The temperature of `video` is left out: it was that of its own pair.

    Args:
        title: of `text`.

    Raises:
        UserError: it has no text tower.
    """
    if not any(_root(name) == "text" for name in text.tensors):
        raise UserError(f"{title}: there is no text tower", hint="name weights that have one with --init.text")

    def merge_facts(of_video: Mapping[str, Any], of_text: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: one for name, one in of_video.items() if _root(name) not in OF_TEXT}
        return kept | {name: one for name, one in of_text.items() if _root(name) in OF_TEXT and name != LOGIT_SCALE}

    return ConvertedStateDict(
        tensors=merge_facts(video.tensors, text.tensors),
        origins=merge_facts(video.origins, text.origins),
        unknown=merge_facts(video.unknown, text.unknown),
        ignored=(*video.ignored, *text.ignored),
    )


def paired_facts(video: SourceFacts, text: SourceFacts, towers: Towers) -> SourceFacts:
    """What no tensor of `paired_tensors` shows.

    Raises:
        UserError: both are towers of this project, which have one activation, and they were trained with two.
    """
    has_own_text = getattr(towers, "text", None) is None
    of_video, of_text = video.activation or "gelu", text.activation or "gelu"
    if towers.image is None and has_own_text and of_video != of_text:
        raise UserError(
            f"--init.weights has the activation {of_video}, and --init.text {of_text}: the towers of --model share one",
            hint="let open_clip build the text tower, with an activation of its own: --towers.text open_clip:NAME",
            flags=("--init.weights", "--init.text", "--model"),
        )
    return replace(
        video,
        activation=video.activation if towers.image is None else text.activation,
        text_eps=text.text_eps,
        text_heads=text.text_heads,
        towers={**video.towers, **{name: text.towers.get(name) for name in _SETTINGS_OF_TEXT}},
        remarks=(*video.remarks, *text.remarks),
    )


def _root(name: str) -> str:
    return name.partition(".")[0]
