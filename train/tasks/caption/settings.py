"""Settings of `train caption`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from manifests.errors import UserError
from manifests.json_text import parse_json
from train.config.data import CaptionSettings
from train.config.evaluation import EvaluationSettings
from train.config.model import PATCH_PX, Towers
from train.config.training import ClipSettings, check_best

# Settings of decoding: a group of the settings of `train caption` and of what writes captions afterwards.


Method = Literal["greedy", "sample", "beam"]

_TEMPERATURE, _NUM_BEAMS, _LENGTH_PENALTY, _MAX_TOKENS = 1.0, 4, 1.0, 30
_OF_METHOD: dict[Method, tuple[str, ...]] = {
    "greedy": (),
    "sample": ("temperature", "top_k", "top_p"),
    "beam": ("num_beams", "length_penalty", "early_stopping"),
}
_MOST_BEAMS = 1000


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How captions are written."""

    method: Method = "greedy"
    """greedy: the likeliest token each time; sample: drawn; beam: the likeliest captions of a beam search."""
    temperature: float | None = None
    """sample: logits are divided by it; 1 when left out."""
    top_k: int | None = None
    """sample: only the likeliest K tokens are drawn."""
    top_p: float | None = None
    """sample: only the likeliest tokens that have this probability together are drawn (nucleus)."""
    num_beams: int | None = None
    """beam: captions that are followed at once; 4 when left out."""
    length_penalty: float | None = None
    """beam: log probabilities are divided by the length to this power; 1 when left out, more for longer captions."""
    early_stopping: bool | None = None
    """beam: stop at as many finished captions as beams; else, and when left out, once no better ones can come."""
    min_tokens: int = 0
    """Tokens before a caption may end."""
    max_tokens: int | None = None
    """Tokens of a caption at most, its end included; 30 when left out, or the decoder's context if that is less."""
    seed: int = 0
    """sample: of what is drawn, with the clip's own number."""

    def __post_init__(self) -> None:
        for method, names in _OF_METHOD.items():
            for name in names:
                if method != self.method and getattr(self, name) is not None:
                    raise UserError(
                        f"{_flag(name)} {getattr(self, name)} does nothing with {_flag('method')} {self.method}",
                        hint=f"use {_flag('method')} {method}, or leave it out",
                    )
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise UserError(
                f"{_flag('temperature')} is {self.temperature}",
                hint=f"it must be a finite number more than 0; {_flag('method')} greedy is the limit",
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"{_flag('top_k')} is {self.top_k}", hint="it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"{_flag('top_p')} is {self.top_p}", hint="it must be more than 0, and 1 at most")
        if self.num_beams is not None and not 1 <= self.num_beams <= _MOST_BEAMS:
            raise UserError(f"{_flag('num_beams')} is {self.num_beams}", hint=f"it must be from 1 to {_MOST_BEAMS:,}")
        if self.length_penalty is not None and not abs(self.length_penalty) < float("inf"):
            raise UserError(f"{_flag('length_penalty')} is {self.length_penalty}", hint="it must be a number")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"{_flag('max_tokens')} is {self.max_tokens}", hint="it must be at least 1")
        if self.min_tokens < 0:
            raise UserError(f"{_flag('min_tokens')} is {self.min_tokens}", hint="it must be 0 or more")
        # How long captions may be if nothing is said depends on the decoder: see `within`.
        if self.max_tokens is not None and self.min_tokens >= self.max_tokens:
            raise UserError(
                f"{_flag('min_tokens')} is {self.min_tokens}",
                hint=f"it must be from 0 to below {_flag('max_tokens')}, {self.max_tokens}",
            )


def temperature_of(settings: DecodingSettings) -> float:
    """What logits are divided by."""
    return _TEMPERATURE if settings.temperature is None else settings.temperature


def num_beams_of(settings: DecodingSettings) -> int:
    """Captions of a clip that are followed at once."""
    return _NUM_BEAMS if settings.num_beams is None else settings.num_beams


def length_penalty_of(settings: DecodingSettings) -> float:
    """The power of the length that log probabilities are divided by."""
    return _LENGTH_PENALTY if settings.length_penalty is None else settings.length_penalty


def max_tokens_of(settings: DecodingSettings) -> int:
    """Tokens of a caption at most, where the decoder's context has as many."""
    return _MAX_TOKENS if settings.max_tokens is None else settings.max_tokens


def within(settings: DecodingSettings, context_length: int, *, is_of_run: bool = False) -> DecodingSettings:
    """The same for a decoder whose texts have at most so many tokens, with `max_tokens` as a number.

    Args:
        is_of_run: they were saved with a run; runs of before have a default of 30 there, which nobody asked for.

    Raises:
        UserError: a limit that was asked for is beyond them.
    """
    if is_of_run and settings.max_tokens == _MAX_TOKENS:
        settings = replace(settings, max_tokens=None)
    if settings.max_tokens is not None and settings.max_tokens > context_length:
        raise UserError(
            f"{_flag('max_tokens')} is {settings.max_tokens}, and the decoder's context has {context_length} tokens",
            hint=f"give {context_length} at most, or leave it out",
        )
    if settings.min_tokens >= context_length:
        raise UserError(
            f"{_flag('min_tokens')} is {settings.min_tokens}, and the decoder's context has {context_length} tokens",
            hint=f"give {context_length - 1} at most",
        )
    most = min(max_tokens_of(settings), context_length)
    if settings.min_tokens >= most:
        raise UserError(
            f"{_flag('min_tokens')} is {settings.min_tokens}, and captions have {most} tokens at most",
            hint=f"give {most - 1} at most, or a larger {_flag('max_tokens')}: the context has {context_length} tokens",
        )
    return replace(settings, max_tokens=most)


def _flag(name: str) -> str:
    return f"--decoding.{name.replace('_', '-')}"


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
# Metrics in the order of tables, with their names.
METRIC_LABELS = {
    "bleu1": "BLEU-1",
    "bleu2": "BLEU-2",
    "bleu3": "BLEU-3",
    "bleu4": "BLEU-4",
    "meteor": "METEOR",
    "rouge_l": "ROUGE-L",
    "cider_d": "CIDEr-D",
    "cider": "CIDEr",
    "spice": "SPICE",
    "exact_match": "exact match",
}
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
    free_on_resume = frozenset({"decoding"})

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


# Whether a folder has a captioner, by its small files alone. Nothing heavy is imported: flags are checked by it.


def has_captioner(folder: Path) -> bool:
    """Whether it is a run of `train caption`, or what transformers know as a model of an encoder and a decoder."""
    is_run = _value(folder / "run.json", "task") == "caption"
    return is_run or _value(folder / "config.json", "model_type") == "vision-encoder-decoder"


def _value(path: Path, name: str) -> object:
    """Nothing where the file is not there or damaged: whoever needs it says so."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found.get(name) if isinstance(found, dict) else None
