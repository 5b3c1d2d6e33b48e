"""Settings of `train caption`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from train.config.data import CaptionSettings
from train.config.evaluation import EvaluationSettings
from train.config.model import PATCH_PX, Towers
from train.config.training import ClipSettings, check_best
from train.tasks.caption.caption_decoding_settings import DecodingSettings

DecoderName = Literal["tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
Frozen = Literal["encoder", "decoder", "decoder-except-cross-attention"]

_CAPTIONS = Parameter(group="Captions")
_DECODER = Parameter(group="Decoder")
_DECODING = Parameter(group="Decoding")
_TOWERS = Parameter(group="Towers")
_TRAINING = Parameter(group="Training", negative_iterable=(), consume_multiple=True)
_EVALUATION = Parameter(group="Evaluation")

# Numbers of the evaluation in the loop.
NUMBERS = ("loss", "bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider_d", "cider", "exact_match")
_LONGEST = 1024  # GPT-2's context
_LARGEST_VOCABULARY = 1_000_000


@dataclass(frozen=True, kw_only=True)
class CaptionTowers(Towers):
    """The encoder: a TimeSformer, a joint space-time tower (clip), or VideoMAE's."""

    width: int | None = None
    """Of the encoder; that of --model when left out. So for the three below."""
    depth: int | None = None
    """Blocks of the encoder."""
    heads: int | None = None
    """Of each block."""
    patch_px: int | None = None
    """Side of a patch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("width", "depth", "heads", "patch_px"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 65_536:
                raise UserError(f"--towers.{name.replace('_', '-')} is {value}", hint="it must be from 1 to 65,536")


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """A GPT-2 that looks at the clip by cross-attention, and its tokens."""

    name: DecoderName = "gpt2"
    """Size of a decoder with new weights."""
    weights: str | None = None
    """A folder with GPT-2's weights and tokenizer, or a name to download them by (gpt2, gpt2-medium, gpt2-xl)."""
    width: int | None = None
    """Of a decoder with new weights; that of --decoder.name when left out. So for the two below."""
    depth: int | None = None
    """Its blocks."""
    heads: int | None = None
    """Of each block."""
    tokenizer: str | None = None
    """Folder of a tokenizer; that of --decoder.weights, else one is made of the captions."""
    vocabulary: int = 8192
    """Tokens of a tokenizer that is made of the captions, at most."""
    max_tokens: int = 64
    """Tokens of a caption with its end; longer ones are cut, and counted."""
    dropout: float = 0.0
    """Share of the values that training leaves out: of embeddings and of what each part of a block adds."""

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "vocabulary": (257, _LARGEST_VOCABULARY),
            "max_tokens": (2, _LONGEST),
            **dict.fromkeys(("width", "depth", "heads"), (1, 65536)),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                flag = f"--decoder.{name.replace('_', '-')}"
                raise UserError(f"{flag} is {value}", hint=f"it must be from {least:,} to {most:,}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--decoder.dropout is {self.dropout}", hint="it must be 0 or more, and less than 1")
        if self.weights is not None:
            for name in ("width", "depth", "heads"):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"--decoder.{name} is {getattr(self, name)}, and --decoder.weights have their own",
                        hint="leave one of them out",
                    )


@dataclass(frozen=True, kw_only=True)
class CaptionEvaluation(EvaluationSettings):
    """How a captioner is evaluated while it is trained: by the captions that it finds."""

    max_samples: int = 500
    """Clips at most: every k-th of the split, with the smallest k that is enough."""


_ENCODER = CaptionTowers()
_GPT2 = DecoderSettings()
_GREEDY = DecodingSettings()
_NO_EVALUATION = CaptionEvaluation()
_ALL_CAPTIONS = CaptionSettings()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CaptionerSettings(ClipSettings):
    """Settings of `train caption`."""

    command = "caption"

    num_frames: Annotated[int, Parameter(group="Clips")] = 8
    """Pictures of a clip."""
    towers: Annotated[CaptionTowers, _TOWERS] = _ENCODER
    """The encoder beyond its size."""
    decoder: Annotated[DecoderSettings, _DECODER] = _GPT2
    """What says the captions."""
    captions: Annotated[CaptionSettings, _CAPTIONS] = _ALL_CAPTIONS
    """Which captions there are, and how likely a visit has each."""
    captions_per_visit: Annotated[int, _CAPTIONS] = 1
    """Captions of a clip that a visit learns, drawn without repeats; all where it has no more."""
    label_smoothing: Annotated[float, _TRAINING] = 0.0
    """Part of a target that is spread over the vocabulary."""
    freeze: Annotated[tuple[Frozen, ...], _TRAINING] = ()
    """Parts that keep the weights that they start from."""
    decoding: Annotated[DecodingSettings, _DECODING] = _GREEDY
    """How captions are written, in the evaluation in the loop and where nothing else is said."""
    evaluate: Annotated[CaptionEvaluation, _EVALUATION] = _NO_EVALUATION
    """Evaluation while the model is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.captions.min_relevancy is not None:
            raise UserError(
                "--captions.min-relevancy draws captions of other clips, which a captioner must not say",
                hint="leave it out",
            )
        if not 1 <= self.captions_per_visit <= 1000:
            raise UserError(f"--captions-per-visit is {self.captions_per_visit}", hint="it must be from 1 to 1,000")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(
                f"--label-smoothing is {self.label_smoothing}", hint="it must be 0 or more, and less than 1"
            )
        patch_px = self.towers.patch_px or PATCH_PX[self.model]
        if self.size_px % patch_px:
            raise UserError(f"--size-px is {self.size_px}", hint=f"it must be a multiple of {patch_px}, the patch")
        if "decoder" in self.freeze and "encoder" in self.freeze:
            raise UserError("--freeze encoder decoder leaves nothing to train", hint="leave one of them out")
        check_best(self.best, split=self.evaluate.split, names=NUMBERS)
