"""`TaskSpec` of `train caption`, its settings, flags of the caption commands, and the table of its evaluation.

This module imports no heavy library, so that help and the checks of flags are fast.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from cyclopts import Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.plugins import import_late
from clipmill.manifests.publish import parse_json
from clipmill.manifests.settings import FRACTION, Checked, GoesWith, Needs, Range, errors_of
from clipmill.train.config import fields as groups
from clipmill.train.config.clips import AS_TRAINED, CaptionSettings, ClipSettings, NumFrames, Overrides, adapted_towers
from clipmill.train.config.evaluation import EVERY, EvaluatedData, EvaluationSettings
from clipmill.train.config.fields import FIRST_RUN, SEVERAL, help_group
from clipmill.train.config.model import SIZE, Freeze, Tower, check_frame_size
from clipmill.train.config.training import Device
from clipmill.train.evaluation.tables import Cell, Row, Table, protocol_of
from clipmill.train.spec import CurveGroup, EvaluationSpec, Features, FirstRun, TaskSpec

Method = Literal["greedy", "sample", "beam"]
VideoFormat = Literal["json", "srt"]  # output format of `train caption-video`

_TEMPERATURE, _NUM_BEAMS, _LENGTH_PENALTY, _MAX_TOKENS = 1.0, 4, 1.0, 30
# Effective values of settings that are None.
_DEFAULTS = {
    "temperature": _TEMPERATURE,
    "top_p": 1.0,
    "num_beams": _NUM_BEAMS,
    "length_penalty": _LENGTH_PENALTY,
    "early_stopping": False,
}
_SAMPLE, _BEAM = Needs("method", ("sample",)), Needs("method", ("beam",))


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(Checked):
    """Settings for generating captions."""

    prefix = "decoding"

    method: Method = "greedy"
    """Decoding method. greedy: the most likely token at each step; sample: random sampling; beam: beam search."""
    temperature: Annotated[
        float | None,
        Range(above=0, hint="use a finite number above 0; for the limit at 0, use the decoding method greedy"),
        _SAMPLE,
    ] = None
    """sample: temperature. Default: 1."""
    top_k: Annotated[int | None, Range(least=1), _SAMPLE] = None
    """sample: number of most likely tokens to sample from. Default: all tokens."""
    top_p: Annotated[float | None, Range(above=0, most=1), _SAMPLE] = None
    """sample: total probability of the most likely tokens to sample from (nucleus sampling). Default: 1."""
    num_beams: Annotated[int | None, Range(1, 1000), _BEAM] = None
    """beam: number of beams. Default: 4."""
    length_penalty: Annotated[float | None, Range(), _BEAM] = None
    """beam: length penalty, the exponent of the length by which the sum of log probabilities is divided. Higher values
    favour longer captions. Default: 1."""
    early_stopping: Annotated[bool | None, _BEAM] = None
    """beam: stop once there are as many finished captions as beams. Default: continue while the best unfinished
    caption scores higher than the worst finished caption."""
    min_tokens: Annotated[int, Range(least=0)] = 0
    """Minimum number of tokens before the end token."""
    max_tokens: Annotated[int | None, Range(least=1)] = None
    """Maximum number of tokens, including the end token. Default: 30, or the decoder's context if it is shorter."""
    seed: int = 0
    """sample: random seed, combined with the index of the clip or, in video files, with the start of the window."""

    def rules(self) -> Iterator[UserError]:
        """Yield an error if the minimum length is not below the maximum length."""
        # The default maximum depends on the decoder: see `fit_decoding`.
        if self.max_tokens is not None and self.min_tokens >= self.max_tokens:
            yield UserError(
                f"{self.flag('min_tokens')} is {self.min_tokens}, but {self.flag('max_tokens')} is {self.max_tokens}",
                hint=f"use a number below {self.max_tokens}, or a larger {self.flag('max_tokens')}",
                flags=(self.flag("min_tokens"),),
            )


Decoding = TypeVar("Decoding", bound=DecodingSettings)


def temperature_of(settings: DecodingSettings) -> float:
    """Return the temperature, which divides the logits."""
    return _TEMPERATURE if settings.temperature is None else settings.temperature


def num_beams_of(settings: DecodingSettings) -> int:
    """Return the number of beams per clip."""
    return _NUM_BEAMS if settings.num_beams is None else settings.num_beams


def length_penalty_of(settings: DecodingSettings) -> float:
    """Return the length penalty: the sum of log probabilities is divided by the length to this power."""
    return _LENGTH_PENALTY if settings.length_penalty is None else settings.length_penalty


def max_tokens_of(settings: DecodingSettings) -> int:
    """Return the maximum number of tokens of a caption, not limited by the decoder's context."""
    return _MAX_TOKENS if settings.max_tokens is None else settings.max_tokens


def fit_decoding(settings: Decoding, context_length: int, *, is_stored: bool = False) -> Decoding:
    """Return the effective decoding settings for a decoder, in a canonical form.

    `max_tokens` is limited by the decoder's context. Other values become None if they equal their defaults, and the
    seed becomes 0 unless it is used, so that settings with the same effect are equal.

    Args:
        context_length: Maximum number of tokens of the decoder.
        is_stored: True for settings that a run stored. Old runs stored the default of 30, which may exceed the context.

    Raises:
        UserError: A limit exceeds the context, or the minimum is not below the maximum.
    """
    min_flag, max_flag = settings.flag("min_tokens"), settings.flag("max_tokens")
    if is_stored and settings.max_tokens == _MAX_TOKENS:
        settings = replace(settings, max_tokens=None)
    if settings.max_tokens is not None and settings.max_tokens > context_length:
        raise UserError(
            f"{max_flag} is {settings.max_tokens}, but the decoder's context has {context_length} tokens",
            hint=f"use at most {context_length}, or omit it",
            flags=(max_flag,),
        )
    if settings.min_tokens >= context_length:
        raise UserError(
            f"{min_flag} is {settings.min_tokens}, but the decoder's context has {context_length} tokens",
            hint=f"use at most {context_length - 1}",
            flags=(min_flag,),
        )
    max_tokens = min(max_tokens_of(settings), context_length)
    if settings.min_tokens >= max_tokens:
        raise UserError(
            f"{min_flag} is {settings.min_tokens}, but captions have at most {max_tokens} tokens",
            hint=f"use at most {max_tokens - 1}, or a larger {max_flag}: the context has {context_length} tokens",
            flags=(min_flag,),
        )
    defaults: dict[str, Any] = {name: None for name, value in _DEFAULTS.items() if getattr(settings, name) == value}
    seed = settings.seed if settings.method == "sample" else 0
    return replace(settings, max_tokens=max_tokens, seed=seed, **defaults)


DecoderName = Literal["tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
Reducer = Literal["pool", "attention"]
VIDEO_MARK = "{video}"
_WITH_LM = GoesWith("lm")

DECODER = help_group("Decoder", 6)
DECODING = help_group("Decoding", 7)

# Names of the metrics that an evaluation during training logs.
METRIC_NAMES = ("loss", "bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider_d", "cider", "exact_match")
# Labels of the metrics, in the order of tables.
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
# Settings of a new decoder or tokenizer, and the settings that select an existing decoder or tokenizer instead.
_NEW_PARTS = {"name": ("weights", "lm"), "vocabulary": ("weights", "lm", "tokenizer")}


@dataclass(frozen=True, kw_only=True)
class DecoderSettings(Checked):
    """Settings of a decoder and its tokenizer. The decoder is a GPT-2 with cross-attention, or a language model."""

    prefix = "decoder"

    lm: Annotated[str | None, FIRST_RUN] = None
    """Causal language model from transformers that replaces the GPT-2 and reads the video as a prefix: a folder that
    also contains the tokenizer, or the Hugging Face name of a model to download."""
    visual_tokens: Annotated[int, Range(1, 4096), _WITH_LM] = 32
    """Number of visual tokens per clip in the prefix of --decoder.lm."""
    reducer: Annotated[Reducer, _WITH_LM] = "pool"
    """Reduction of the encoder's tokens to visual tokens. pool: means of consecutive tokens; attention: learned queries
    that attend to all tokens."""
    prompt: Annotated[str, _WITH_LM] = VIDEO_MARK
    """Prompt of --decoder.lm. {video} stands for the visual tokens. The caption follows the prompt."""

    name: Annotated[DecoderName, FIRST_RUN] = "gpt2"
    """Size of a decoder with random weights."""
    weights: Annotated[str | None, FIRST_RUN] = None
    """Pretrained GPT-2: a folder that also contains the tokenizer, or the Hugging Face name of a model to download
    (such as gpt2)."""
    width: Annotated[int | None, SIZE] = None
    """Width of a decoder with random weights. Default: the width of --decoder.name."""
    depth: Annotated[int | None, SIZE] = None
    """Number of decoder blocks. Default: as in --decoder.name."""
    heads: Annotated[int | None, SIZE] = None
    """Number of attention heads per decoder block. Default: as in --decoder.name."""
    tokenizer: str | None = None
    """Tokenizer folder. Default: the tokenizer of the pretrained decoder, or a tokenizer trained on the captions."""
    vocabulary: Annotated[int, Range(257, 1_000_000)] = 8192
    """Maximum vocabulary size of a tokenizer trained on the captions."""
    max_tokens: Annotated[int, Range(2, 8192)] = 64
    """Maximum number of tokens per caption in training, including the end token. Longer captions are truncated, and
    their number is reported."""
    dropout: Annotated[float, FRACTION] = 0.0
    """Dropout probability of embeddings and residual branches."""

    def rules(self) -> Iterator[UserError]:
        """Yield errors for sizes that contradict pretrained weights, and for prompts without exactly one video mark."""
        pretrained = "lm" if self.lm is not None else "weights"
        for name in ("width", "depth", "heads", *(("weights", "dropout") if pretrained == "lm" else ())):
            if getattr(self, pretrained) is not None and getattr(self, name):
                yield UserError(
                    f"{self.flag(name)} is {getattr(self, name)}, but {self.flag(pretrained)} has its own {name}",
                    hint="omit one of the two",
                    flags=(self.flag(name), self.flag(pretrained)),
                )
        if self.prompt.count(VIDEO_MARK) != 1:
            yield UserError(
                f"--decoder.prompt is {self.prompt!r}, which contains {VIDEO_MARK} "
                f"{count_noun(self.prompt.count(VIDEO_MARK), 'time')} instead of once",
                hint=f"write {VIDEO_MARK} once, at the position of the visual tokens",
                flags=("--decoder.prompt",),
            )


@dataclass(frozen=True, kw_only=True)
class CaptionEvaluation(EvaluationSettings):
    """Settings for the evaluation of generated captions during training."""

    lower_is_better = ("loss",)

    max_samples: Annotated[int, Range(least=2), EVERY] = 500
    """Maximum number of clips. Every k-th clip of the split is used, and k is as small as possible."""
    java: Annotated[bool, EVERY] = False
    """Also compute METEOR, which needs Java, and SPICE if --evaluate.spice-jars is set."""
    spice_jars: Annotated[Path | None, GoesWith("java", (True,))] = None
    """Folder with the two jar files that SPICE needs. Default: SPICE is omitted."""

    def metric_names(self, data: EvaluatedData) -> tuple[str, ...]:
        """Return the names of the metrics of generated captions."""
        with_java = ("meteor",) if self.spice_jars is None else ("meteor", "spice")
        return (*METRIC_NAMES, *with_java) if self.java else METRIC_NAMES


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CaptionerSettings(ClipSettings):
    """Settings of `train caption`."""

    command = "caption"
    other_data_values: ClassVar[Mapping[str, Any]] = {"captions": CaptionSettings()}
    free_on_resume = frozenset({"decoding"})

    num_frames: NumFrames = 8
    decoder: Annotated[DecoderSettings, DECODER] = field(default_factory=DecoderSettings)
    """Decoder and tokenizer."""
    captions: Annotated[CaptionSettings, groups.CAPTIONS] = field(default_factory=CaptionSettings)
    """Captions to train on, and their sampling weights."""
    captions_per_visit: Annotated[int, groups.CAPTIONS, Range(1, 1000)] = 1
    """Number of captions per sample, drawn from the clip's captions without replacement. A clip with fewer captions
    uses all of them."""
    label_smoothing: Annotated[float, groups.TRAINING, FRACTION] = 0.0
    """Label smoothing: fraction of the target that is spread over the vocabulary."""
    freeze: Annotated[Freeze, FIRST_RUN] = ()
    """Parts to freeze: encoder, decoder, decoder-except-cross-attention, blocks:N (the encoder's embeddings and its
    first N blocks), decoder.blocks:N."""
    decoding: Annotated[DecodingSettings, DECODING] = field(default_factory=DecodingSettings)
    """Decoding settings of evaluations during training, and the defaults for other commands."""
    evaluate: Annotated[CaptionEvaluation, groups.EVALUATION] = field(default_factory=CaptionEvaluation)

    def tower_names(self) -> tuple[Tower, ...]:
        """Return the towers of the model."""
        return ("video", "decoder")

    def trains_besides_towers(self) -> bool:
        """Return True if there is a projector. It is always trained, because --freeze does not accept projectors."""
        return self.decoder.lm is not None

    def adapts_pretrained(self) -> bool:
        """Return True if the towers with adapters have pretrained weights, as language models always do."""
        adapts_lm = self.decoder.lm is not None and adapted_towers(self) == ("decoder",)
        return adapts_lm or super().adapts_pretrained()

    def rules(self) -> Iterator[UserError]:
        """Yield errors for settings that the decoder does not support, and for unsuitable captions and frame sizes."""
        yield from super().rules()
        if self.decoder.lm is not None and self.parallel.stages > 1:
            yield UserError(
                f"--parallel.stages is {self.parallel.stages}, but a captioner with --decoder.lm has no stages",
                hint="use --parallel.strategy fsdp",
                flags=("--parallel.stages", "--decoder.lm"),
            )
        if self.decoder.lm is not None and "decoder-except-cross-attention" in self.freeze:
            yield UserError(
                "--freeze decoder-except-cross-attention applies only to a GPT-2: --decoder.lm has no cross-attention",
                hint="use --freeze decoder",
                flags=("--freeze", "--decoder.lm"),
            )
        if self.captions.min_relevancy is not None:
            yield UserError(
                "--captions.min-relevancy draws captions from other clips, which do not describe the sampled clip",
                hint="omit it",
                flags=("--captions.min-relevancy",),
            )
        yield from errors_of(check_frame_size, self.model, self.towers, size_px=self.size_px)

    def check_effects(self, typed: Mapping[str, str]) -> Iterator[UserError]:
        """Yield errors for flags of a new decoder or tokenizer if an existing decoder or tokenizer is used."""
        yield from super().check_effects(typed)
        start = self.init.weights
        for name, alternatives in _NEW_PARTS.items():
            sources = {self.decoder.flag(source): getattr(self.decoder, source) for source in alternatives}
            if start and has_captioner(Path(start)):
                sources = {"--init.weights": start, **sources}
            flag, source_flag = self.decoder.flag(name), next((key for key, value in sources.items() if value), None)
            if flag in typed and source_flag is not None:
                yield UserError(
                    f"{flag} is {typed[flag]}, which has no effect: {source_flag} is {sources[source_flag]}",
                    hint="omit it",
                    flags=(flag, source_flag),
                )


def has_captioner(folder: Path) -> bool:
    """Return True if a folder is a run of `train caption`, or contains an encoder-decoder model from transformers.

    Only small JSON files are read.
    """
    is_run = _value(folder / "run.json", "task") == "caption"
    return is_run or _value(folder / "config.json", "model_type") == "vision-encoder-decoder"


def _value(path: Path, name: str) -> object:
    """Return the value of a key in a JSON file; None if the file is missing or damaged, which other code reports."""
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return values.get(name) if isinstance(values, dict) else None


# Columns of the table, with their labels. Captioners are compared by the first column.
_CAPTION_COLUMNS = {
    "cider_d": "CIDEr-D",
    "bleu4": "BLEU-4",
    "meteor": "METEOR",
    "rouge_l": "ROUGE-L",
    "cider": "CIDEr",
    "spice": "SPICE",
    "exact_match": "exact match",
}


@dataclass(frozen=True, kw_only=True)
class CaptionFlags(Checked):
    """Flags of `train eval caption`."""

    split: str = "val"
    """Split to evaluate on."""
    max_samples: Annotated[int, Range(least=1)] = 100_000
    """Maximum number of clips. Every k-th clip of the split is used, and k is as small as possible (at most 12 of 52
    clips: every 5th clip, 11 in total)."""
    spice_jars: Path | None = None
    """Folder with the two jar files that SPICE needs. Default: SPICE is omitted."""
    decoding: Annotated[DecodingSettings | None, DECODING] = None
    """Decoding settings. Default: the settings of the run."""


def caption_table(result: dict[str, Any]) -> Table:
    """Return a table with the metrics of the generated captions and of the best constant caption."""
    names = [name for name in _CAPTION_COLUMNS if name in result["means"]]
    constant = result["constant"]
    rows = [
        (
            "captions",
            f"{count_noun(result['num_samples'], 'clip')}, {count_noun(result['num_references'], 'reference')}",
            result["means"],
        ),
        ("constant caption", "the same caption for every clip", constant["means"]),
    ]
    table_rows = []
    for label, detail, means in rows:
        cells = []
        for name in names:
            value = means.get(name)
            # CIDEr has no upper bound, so its cell has no bar.
            share = None if value is None or name.startswith("cider") else min(max(value, 0.0), 1.0)
            cells.append(Cell("-" if value is None else f"{100 * value:.1f}", share=share))
        cells.append(Cell(f"{result['loss']:.3f}" if label == "captions" else "-"))
        table_rows.append(Row(label, detail, tuple(cells), is_baseline=label != "captions"))
    absent = "; ".join(f"no {_CAPTION_COLUMNS[name]}: {reason}" for name, reason in result["absent"].items())
    protocol = protocol_of(
        result,
        f"{count_noun(result['num_samples'], 'clip')} (hash of the clip names: {result['ids_hash']}); all metrics "
        "times 100",
        captions=result["decoding"],
        loss=result["loss_rule"],
        constant_caption=f"“{constant['caption']}”: {constant['chosen']}",
        left_out=absent,
    )
    columns = (*(_CAPTION_COLUMNS[name] for name in names), "loss")
    return Table("Captions", columns, tuple(table_rows), protocol)


def _strips(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"words": clip["caption"], **{name: clip[name] for name in ("frames", "is_right")}} for clip in result["said"]
    ]


_NUM_SAMPLES, _TOP_P = 5, 0.9  # defaults of `train caption-chunks`


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChunkDecoding(DecodingSettings):
    """Settings for generating captions of chunks. The default is nucleus sampling of several captions per clip."""

    prefix = ""

    method: Method = "sample"
    """Decoding method. sample: random sampling; greedy: the most likely token at each step; beam: beam search."""
    num_samples: Annotated[int | None, Range(1, 1000), Needs("method", ("sample",))] = None
    """sample: number of captions per clip. Default: 5."""
    top_p: Annotated[float | None, Range(above=0, most=1), Needs("method", ("sample",))] = None
    """sample: total probability of the most likely tokens to sample from (nucleus sampling). Default: 0.9."""
    seed: int = 0
    """sample: random seed, combined with the clip's key and start and the caption's index."""

    def with_defaults(self) -> "ChunkDecoding":
        """Return the settings, with this command's defaults for sampling."""
        if self.method != "sample":
            return self
        num_samples = _NUM_SAMPLES if self.num_samples is None else self.num_samples
        return replace(self, num_samples=num_samples, top_p=_TOP_P if self.top_p is None else self.top_p)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChunkCaptionsRequest(Checked):
    """Flags of `train caption-chunks`."""

    shards: str
    """Data folder."""
    variant: Annotated[tuple[str, ...], SEVERAL] = ()
    """Names of variants to read, as listed by prep status. Default: the variants of the training run; for other
    data, the current variants."""
    out: Path
    """Parquet file to write."""
    split: str = "train"
    """Split of the data."""
    where: str | None = None
    """Condition that selects the chunks, such as 'num_captions == 0' for videos without captions (docs/data.md).
    Default: all chunks."""
    segment: str | None = None
    """Length of the segments to caption, such as 5s. A remainder shorter than a quarter of a segment is merged into the
    last segment of the chunk. Default: complete chunks."""
    batch: Annotated[int, Range(least=1)] = 16
    """Number of clips per batch and process."""
    workers: Annotated[int, Range(least=1)] = 4
    """Number of threads per process that read and decode clips."""
    device: Device = "auto"
    """Device to run the model on."""
    shown: Overrides = AS_TRAINED
    decoding: Annotated[ChunkDecoding, DECODING] = ChunkDecoding()
    json: Annotated[bool, Parameter(name="--json", negative="")] = False
    """Print the result as one JSON object."""


CAPTIONS = EvaluationSpec(
    name="caption",
    result="captions",
    help="Evaluate a captioner: CIDEr-D, BLEU, METEOR, ROUGE-L, SPICE and exact match against all references.\n\n"
    "The best constant caption is the baseline. Captions are also written in COCO results format.",
    example="train eval caption runs/captions --shards data --decoding.method beam",
    run_help="Run folder of train caption.",
    settings=CaptionFlags,
    score=import_late("clipmill.train.tasks.caption.evaluation:score_run"),
    table=caption_table,
    pictures="said",
    section=Path(__file__).with_name("examples.html.j2"),
    strips=_strips,
    curves=tuple(
        CurveGroup(f"({re.escape(name)})", words[:1].upper() + words[1:] + ", times 100", METRIC_LABELS.__getitem__)
        for name, words in METRIC_LABELS.items()
    ),
)
TASK = TaskSpec(
    name="caption",
    help="Train a captioner: a video encoder and a GPT-2 with cross-attention, or any causal language model.",
    example="train caption --shards data --preset tiny --out runs/captions",
    settings=CaptionerSettings,
    make=import_late("clipmill.train.tasks.caption.task:CaptionTask"),
    run_arguments=import_late("clipmill.train.tasks.caption.model:decoder_of_run"),
    effective_settings=import_late("clipmill.train.tasks.caption.model:effective_settings"),
    evaluations=(CAPTIONS,),
    start_lines=import_late("clipmill.train.tasks.caption.model:start_lines"),
    formats={
        "hf": "VisionEncoderDecoderModel.from_pretrained('OUT')",
        "lm": "AutoModelForCausalLM.from_pretrained('OUT/lm')",
    },
    export=import_late("clipmill.train.tasks.caption.export:exported_captioner"),
    adopt=import_late("clipmill.train.tasks.caption.export:adopted_captioner"),
    adoptable="a TimeSformer and GPT-2 captioner",
    features=Features(
        description="the encoder's class token, or the mean of all tokens if the encoder has no class token",
        inputs=lambda task: task.inputs,
    ),
    first_run=FirstRun(cpu_preset="tiny"),
    pipeline="video-text-to-text",
)
