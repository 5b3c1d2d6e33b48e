"""Construction of captioners: open the decoder, build the model from its settings, and initialise it from weights.

The decoder comes from one of four sources: `--decoder.weights` (a GPT-2); `--decoder.lm` (any causal language model,
clipmill.train.tasks.caption.language); the captioner in `--init.weights`; or random weights, with a tokenizer trained
on the captions. The first two sources are folders or Hugging Face names. The decoder and its tokenizer are always
opened together, because tensor shapes do not reveal whether a tokenizer belongs to a decoder.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import LIBRARY, kind_of
from clipmill.train.engine.task import UNUSED_PARTS, drop_parts
from clipmill.train.models.attention import Attend
from clipmill.train.models.captioner import Captioner, Gpt2, Gpt2Size, VideoTower, gpt2_size
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.library_towers import LibraryImage, image_tower, num_heads_of
from clipmill.train.models.timesformer import TimeSformer, interpolate_positions, interpolate_times
from clipmill.train.models.transformer import NORM_EPS, TransformerSize, checkpoint_blocks, drop_path_of
from clipmill.train.models.video_vit import clip_tower
from clipmill.train.models.videomae import VideoMAEEncoder
from clipmill.train.optim.parameters import CROSS_ATTENTION
from clipmill.train.run.folder import RunFolder, is_run
from clipmill.train.tasks.caption.language import (
    LANGUAGE_FILES,
    LANGUAGE_FOLDER,
    LanguageCaptioner,
    LanguageDecoder,
    VisualProjector,
    checkpoint_language_blocks,
    open_language,
    read_language,
)
from clipmill.train.tasks.caption.spec import CaptionerSettings, DecoderSettings, has_captioner
from clipmill.train.tasks.caption.tokenizer import CaptionTokenizer, has_tokenizer, read_tokenizer, train_tokenizer
from clipmill.train.weights.files import MODEL_FILES, TOKENIZER_FILES, hub_folder, read_config
from clipmill.train.weights.hf_caption import caption_config_of, read_caption_folder
from clipmill.train.weights.loading import Change, LoadedWeights, fit_to
from clipmill.train.weights.source import KINDS, Say, Source, effective_clip_settings
from clipmill.train.weights.sources import path_of_weights

# Pattern of a Hugging Face name. Any other value must be a folder.
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class DecoderParts:
    """Tokenizer, size and weights of a GPT-2 decoder.

    Args:
        hint: Hint for the error if the tokenizer does not belong to the decoder.

    Attributes:
        tensors: Weights, keyed by their names in a captioner; empty for random weights.
        source: Source of the weights, as the user specified it.

    Raises:
        UserError: The tokenizer has more tokens than the decoder.
    """

    tokenizer: CaptionTokenizer
    size: Gpt2Size
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    source: str = ""
    hint: InitVar[str] = "use the tokenizer that the decoder was trained with"

    def __post_init__(self, hint: str) -> None:
        if self.tokenizer.vocabulary_size > self.size.vocabulary_size:
            raise UserError(
                f"the tokenizer has {self.tokenizer.vocabulary_size:,} tokens, but the decoder has only "
                f"{self.size.vocabulary_size:,}: they do not belong together",
                hint=hint,
            )

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a caption, including the end token."""
        return self.size.context_length


Decoder = DecoderParts | LanguageDecoder


def open_decoder(settings: DecoderSettings, texts: Iterable[str], *, say: Say) -> Decoder:
    """Open the decoder that the settings select.

    Args:
        texts: Captions for training a tokenizer if the settings do not select a tokenizer.

    Raises:
        UserError: A folder is missing or damaged, or belongs to a different model; the tokenizer does not belong to the
            decoder; the width is not a multiple of the number of heads; or captions may exceed the decoder's context.
    """
    if settings.lm is not None:
        lm_folder = decoder_folder(settings.lm, flag="--decoder.lm", files=LANGUAGE_FILES, say=say)
        language = open_language(lm_folder, settings, tokenizer_folder=Path(settings.tokenizer or lm_folder))
        # Read the weights now, so that errors in their files are reported before a run is created.
        return replace(language, loaded_models=[language.new_model()])
    folder = None if settings.weights is None else decoder_folder(settings.weights, say=say)
    tokenizer_folder = Path(settings.tokenizer) if settings.tokenizer is not None else folder
    if tokenizer_folder is not None:
        tokenizer = read_tokenizer(tokenizer_folder)
    else:
        tokenizer = train_tokenizer(texts, vocabulary_size=settings.vocabulary)
    if folder is None:
        size = decoder_size(settings, vocabulary_size=tokenizer.vocabulary_size)
        return DecoderParts(tokenizer=tokenizer, size=size)
    weights = read_caption_folder(folder, needs_decoder=True)
    pretrained_size = weights.config.decoder
    if pretrained_size is None:
        raise UserError(
            f"{folder} contains no GPT-2 (--decoder.weights)",
            hint="use a folder with a GPT-2",
            flags=("--decoder.weights",),
        )
    _check_max_tokens(settings, f"the decoder of {folder}", pretrained_size.context_length)
    tensors = {name: tensor for name, tensor in weights.converted.tensors.items() if name.startswith("decoder.")}
    hint = "use the tokenizer of the decoder, or omit --decoder.tokenizer"
    if settings.tokenizer is None:
        hint = f"use --decoder.tokenizer with the decoder's tokenizer, or repair the tokenizer in {folder}"
    return DecoderParts(
        tokenizer=tokenizer, size=pretrained_size, tensors=tensors, source=str(settings.weights), hint=hint
    )


def _check_max_tokens(settings: DecoderSettings, decoder: str, context_length: int) -> None:
    if settings.max_tokens > context_length:
        raise UserError(
            f"--decoder.max-tokens is {settings.max_tokens}, but {decoder} has a context of {context_length} tokens",
            hint=f"use --decoder.max-tokens {context_length} or less",
            flags=("--decoder.max-tokens",),
        )


def decoder_of_start(settings: CaptionerSettings) -> Decoder | None:
    """Return the size and the tokenizer of the decoder in the `--init.weights` folder.

    The result is None if the folder contains no captioner, or if `--decoder.lm` replaces the captioner's decoder. In
    the second case, only the captioner's tower is used.

    Raises:
        UserError: Neither the folder nor the settings provide a tokenizer; the settings specify a different tokenizer
            or size; or a file is damaged.
    """
    init_weights, decoder = settings.init.weights, settings.decoder
    folder = None if init_weights is None else path_of_weights(init_weights)
    if folder is None or not has_captioner(folder):
        return None
    if (folder / LANGUAGE_FOLDER).is_dir():
        return decoder_of_run(RunFolder(folder))["decoder"]
    if decoder.lm is not None:
        return None
    if is_run(folder):
        size: Gpt2Size | None = decoder_size_of(RunFolder(folder))
    else:
        size = caption_config_of(read_config(folder / "config.json") or {}, source=str(folder)).decoder
    if size is None:
        return None
    for name, value in (("width", size.trunk.width), ("depth", size.trunk.depth), ("heads", size.trunk.num_heads)):
        setting = getattr(decoder, name)
        if setting not in (None, value):
            raise UserError(
                f"--decoder.{name} is {setting}, but the decoder of {folder} has {value} (--init.weights)",
                hint="omit it: the decoder comes with these weights",
                flags=(f"--decoder.{name}", "--init.weights"),
            )
    tokenizer_of_folder = read_tokenizer(folder) if has_tokenizer(folder) else None
    requested_tokenizer = None if decoder.tokenizer is None else read_tokenizer(Path(decoder.tokenizer))
    tokenizer = tokenizer_of_folder or requested_tokenizer
    if tokenizer is None:
        raise tokenizer_error(str(init_weights))
    if (
        tokenizer_of_folder
        and requested_tokenizer
        and tokenizer_of_folder.token_ids() != requested_tokenizer.token_ids()
    ):
        raise UserError(
            f"the tokens of --decoder.tokenizer {decoder.tokenizer} differ from the tokens that the decoder of "
            f"{folder} was trained with (--init.weights)",
            hint="omit --decoder.tokenizer: the tokenizer comes with these weights",
            flags=("--decoder.tokenizer", "--init.weights"),
        )
    return DecoderParts(tokenizer=tokenizer, size=size)


def tokenizer_error(title: str) -> UserError:
    """Return the error for a decoder without a tokenizer."""
    return UserError(
        f"{title} has a decoder, but no tokenizer to turn its tokens into text",
        hint="use the tokenizer that the decoder was trained with: --decoder.tokenizer FOLDER",
    )


def decoder_folder(
    name: str, *, flag: str = "--decoder.weights", files: Sequence[str] = (*MODEL_FILES, *TOKENIZER_FILES), say: Say
) -> Path:
    """Return the folder of a decoder: `name` if it is a folder; otherwise, a download from Hugging Face.

    Args:
        name: Folder or Hugging Face name, the value of `flag`.
        files: Name patterns of the files to download.

    Raises:
        UserError: The folder does not exist and cannot be downloaded.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if _NAME.fullmatch(name) is None:
        raise UserError(f"there is no folder {name} ({flag})", hint="use a folder with model files", flags=(flag,))
    say(f"decoder: there is no folder {name}, so the model is read from Hugging Face's cache or downloaded")
    return hub_folder(name, files=files, what="the model's files")


def decoder_size(settings: DecoderSettings, *, vocabulary_size: int) -> Gpt2Size:
    """Return the size of a new decoder: the size of `--decoder.name`, with the width, depth and heads of the settings.

    Raises:
        UserError: The width is not a multiple of the number of heads.
    """
    size = gpt2_size(settings.name, vocabulary_size=vocabulary_size, context_length=settings.max_tokens)
    trunk = size.trunk.resize(
        width=settings.width, depth=settings.depth, heads=settings.heads or size.trunk.num_heads, flag="--decoder."
    )
    return replace(size, trunk=trunk)


def decoder_facts(decoder: Decoder) -> dict[str, Any]:
    """Return the values in run.json from which the decoder can be rebuilt without its original weights."""
    if isinstance(decoder, LanguageDecoder):
        return decoder.facts()
    trunk = decoder.size.trunk
    return {
        "width": trunk.width,
        "depth": trunk.depth,
        "heads": trunk.num_heads,
        "norm_eps": trunk.norm_eps,
        "vocabulary": decoder.size.vocabulary_size,
        "context": decoder.size.context_length,
    }


def start_facts(model: nn.Module, parts: Decoder) -> dict[str, Any]:
    """Return a description of the decoder's initial weights for run.json; {} for random weights.

    Args:
        model: Captioner, which may be on the meta device.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("decoder.")}
    initial_tensors = parts.tensors if isinstance(parts, DecoderParts) else state if parts.folder is not None else {}
    if not initial_tensors:
        return {}
    changes = [
        Change(kind="created", name=name, new=tuple(tensor.shape), why="a plain GPT-2 has no cross-attention")
        for name, tensor in state.items()
        if name not in initial_tensors
    ]
    start = {
        "source": parts.source,
        "num_copied": len(state) - len(changes),
        "changes": [asdict(change) for change in changes],
    }
    return {"decoder_weights": start}


def start_lines(facts: Mapping[str, Any]) -> list[str]:
    """Format the result of `start_facts` as log lines."""
    lines = []
    if (start := facts.get("decoder_weights")) is not None:
        num_copied, num_new = start["num_copied"], len(start["changes"])
        copied = f"{num_copied} of {num_copied + num_new} tensors copied unchanged"
        remark = f", {num_new} are new (cross-attention)" if num_new else ""
        lines.append(f"decoder: {start['source']}: {copied}{remark}")
    return lines


def decoder_of_run(run: RunFolder) -> dict[str, Decoder]:
    """Return the decoder of a run without its weights, as an argument for the task (`TaskSpec.run_arguments`).

    Raises:
        UserError: `run` is not a run of `train caption`, or a file is missing or damaged.
    """
    facts = run.require_facts().get("decoder")
    if isinstance(facts, dict) and "lm" in facts:
        return {"decoder": read_language(run, facts)}
    return {"decoder": read_decoder_parts(run)}


def read_decoder_parts(run: RunFolder) -> DecoderParts:
    """Read the tokenizer and the decoder size of a run with a GPT-2.

    Raises:
        UserError: `run` is not a run of `train caption`.
    """
    return DecoderParts(tokenizer=read_tokenizer(run.path, hint="restore the run's files"), size=decoder_size_of(run))


def decoder_size_of(run: RunFolder) -> Gpt2Size:
    """Read the decoder size of a run.

    Raises:
        UserError: `run` is not a run of `train caption`.
    """
    try:
        facts = run.require_facts()["decoder"]
        trunk = TransformerSize(
            width=facts["width"],
            depth=facts["depth"],
            num_heads=facts["heads"],
            norm_eps=facts.get("norm_eps", NORM_EPS),
        )
        return Gpt2Size(trunk=trunk, vocabulary_size=facts["vocabulary"], context_length=facts["context"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{run.facts} has no decoder: {run.path} is not a run of train caption",
            hint="see train eval --help for the evaluations of other runs",
        ) from error


_TOKENS, _DECODER_POSITIONS = "decoder.token_embedding.weight", "decoder.positional_embedding"
_LANGUAGE_PROJECTION = "projection.mlp.0.weight"
_POSITIONS, _TIMES = "video.positional_embedding", "video.temporal_embedding"
_UNUSED_PARTS = {
    **UNUSED_PARTS,
    "fc_norm.": "a classifier's norm (fc_norm)",
    "projection.": "the projection to the decoder (projection)",
}
AnyCaptioner = Captioner | LanguageCaptioner


def build_captioner(settings: CaptionerSettings, decoder: Decoder, *, attend: Attend) -> AnyCaptioner:
    """Build a captioner with random weights, except for a decoder that comes with weights.

    Raises:
        UserError: The tower's width is not a multiple of its number of heads; the decoder's weights do not fit; or a
            clip has fewer tokens than the prefix of the language model needs.
    """
    tower = _tower(settings, attend=attend)
    if settings.num_views > 1:
        from clipmill.train.models.views import accept_views

        accept_views(tower, num_views=settings.num_views, rule=settings.towers.views)
    captioner: AnyCaptioner
    if isinstance(decoder, LanguageDecoder):
        captioner = _language_captioner(settings, decoder, tower)
    else:
        captioner = Captioner(tower, Gpt2(decoder.size, attend=attend, dropout=settings.decoder.dropout))
        copy_decoder(captioner, decoder)
    if settings.towers.activation_checkpointing:
        checkpoint_blocks(captioner)
        if isinstance(captioner, LanguageCaptioner):
            checkpoint_language_blocks(captioner.decoder)
    return captioner


def _language_captioner(settings: CaptionerSettings, decoder: LanguageDecoder, tower: nn.Module) -> LanguageCaptioner:
    width = cast(VideoTower, tower).token_width
    if isinstance(tower, LibraryImage):
        cells, num_heads = settings.num_frames * tower.frame_tokens, num_heads_of(width)
    else:
        size = size_of(settings.model, settings.towers).video
        cells = size.grid(image_px=settings.size_px, num_frames=settings.num_frames).cubes
        num_heads = size.trunk.num_heads
    if decoder.reducer == "pool" and cells < decoder.num_visual:
        raise UserError(
            f"--decoder.visual-tokens is {decoder.num_visual}, but the encoder has only {cells} tokens per clip",
            hint=f"use {cells} or fewer, or more --num-frames",
            flags=("--decoder.visual-tokens",),
        )
    language = decoder.new_model()
    projection = VisualProjector(
        width,
        language.get_input_embeddings().embedding_dim,
        num_tokens=decoder.num_visual,
        num_heads=num_heads if decoder.reducer == "attention" else None,
    )
    return LanguageCaptioner(tower, projection, language, before=decoder.before, after=decoder.after)


def _tower(settings: CaptionerSettings, *, attend: Attend) -> nn.Module:
    towers, size = settings.towers, size_of(settings.model, settings.towers).video
    image_px, num_frames = settings.size_px, settings.num_frames
    temporal_std = size.trunk.width**-0.5 if towers.temporal == "random" else 0.0
    drop_path = drop_path_of(towers.drop_path, depth=size.trunk.depth, is_rising=towers.drop_path_rule == "rising")
    match kind_of(towers):
        case "timesformer":
            return TimeSformer(
                size,
                image_px=image_px,
                num_frames=num_frames,
                attend=attend,
                temporal_std=temporal_std,
                drop_path=drop_path,
            )
        case "videomae":
            return VideoMAEEncoder(size, image_px=image_px, num_frames=num_frames, attend=attend, drop_path=drop_path)
        case kind:
            build = image_tower if kind == LIBRARY else clip_tower
            return build(
                size, image_px=image_px, num_frames=num_frames, embedding_width=None, attend=attend, towers=towers
            )


@torch.no_grad()
def copy_decoder(captioner: Captioner, parts: DecoderParts) -> None:
    """Copy the decoder's weights, if any, to a captioner. Missing cross-attention weights stay random.

    Raises:
        UserError: A tensor is unknown, has the wrong shape, or is missing (except for cross-attention).
    """
    if not parts.tensors:
        return
    state = {name: tensor for name, tensor in captioner.state_dict().items() if name.startswith("decoder.")}
    missing = [
        name for name in state if name not in parts.tensors and not any(part in name for part in CROSS_ATTENTION)
    ]
    misfits = [name for name, value in parts.tensors.items() if name not in state or value.shape != state[name].shape]
    if missing or misfits:
        raise UserError(
            f"the decoder's weights do not fit its config.json: {', '.join((missing + misfits)[:3])}",
            hint="download the folder of --decoder.weights again",
        )
    for name, tensor in parts.tensors.items():
        state[name].copy_(tensor)


def effective_settings(settings: CaptionerSettings, source: Source | None, *, say: Say) -> CaptionerSettings:
    """Return the settings that apply with the initial weights `source`. The default tower is a TimeSformer.

    Raises:
        UserError: The settings contradict the weights.
    """
    has_kind = settings.towers.kind is not None or settings.towers.image is not None
    if not has_kind and (source is None or source.kind is None):
        settings = replace(settings, towers=replace(settings.towers, kind="timesformer"))
    if (kind := settings.towers.kind) not in (None, *KINDS):
        raise UserError(
            f"--towers.kind is {kind}, a tower that this task does not support",
            hint=f"use {', '.join(KINDS)}",
            flags=("--towers.kind",),
        )
    if source is not None:
        settings = with_source_decoder(settings, source, say=say)
    return effective_clip_settings(settings, source, say=say)


def with_source_decoder(settings: CaptionerSettings, source: Source, *, say: Say) -> CaptionerSettings:
    """Return the settings of a captioner that starts from `source`, and uses the decoder of `source` if there is one.

    Raises:
        UserError: The settings select another decoder, captions may exceed the decoder's context, or there is no
            tokenizer.
    """
    tensors, decoder = source.converted.tensors, settings.decoder
    folder = path_of_weights(settings.init.weights or "")
    if _LANGUAGE_PROJECTION in tensors:
        return _with_source_language(settings, source, folder)
    if not has_decoder(tensors) or decoder.lm is not None:
        return settings
    if decoder.weights is not None:
        raise UserError(
            f"two decoders are selected: {source.title} has one, and --decoder.weights is {decoder.weights}",
            hint="omit --decoder.weights, or use weights without a decoder for --init.weights",
            flags=("--decoder.weights",),
        )
    if decoder.tokenizer is None and not (has_captioner(folder) and has_tokenizer(folder)):
        raise tokenizer_error(source.title)
    context_length = len(tensors[_DECODER_POSITIONS])
    if decoder.max_tokens <= context_length:
        return settings
    if decoder.max_tokens != DecoderSettings.max_tokens:
        _check_max_tokens(decoder, f"the decoder of {source.title}", context_length)
    say(f"weights: --decoder.max-tokens is {context_length}, the context length of the decoder")
    return replace(settings, decoder=replace(decoder, max_tokens=context_length))


def _with_source_language(settings: CaptionerSettings, source: Source, folder: Path) -> CaptionerSettings:
    """Return the settings of a captioner that starts from another captioner with a language model."""
    decoder_settings, decoder = settings.decoder, decoder_of_run(RunFolder(folder))["decoder"]
    assert isinstance(decoder, LanguageDecoder)
    if (requested_decoder := decoder_settings.lm or decoder_settings.weights) is not None:
        flag = decoder_settings.flag("lm" if decoder_settings.lm else "weights")
        raise UserError(
            f"two decoders are selected: {source.title} has one, and {flag} is {requested_decoder}",
            hint=f"omit {flag}, or use weights without a decoder for --init.weights",
            flags=(flag,),
        )
    if any(".lora_A." in name for name in source.converted.tensors):
        raise UserError(
            f"a new run cannot start from {source.title}, because its language model has adapters",
            hint="continue the old run with --resume, or start from a run without --lora.towers decoder",
        )
    _check_max_tokens(decoder_settings, f"the decoder of {source.title}", decoder.context_length)
    decoder_settings = replace(
        decoder_settings,
        lm=decoder.source,
        visual_tokens=decoder.num_visual,
        reducer=decoder.reducer,
        prompt=decoder.prompt,
    )
    return replace(settings, decoder=decoder_settings)


def has_decoder(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return True if the weights belong to a complete captioner."""
    return _TOKENS in tensors or _LANGUAGE_PROJECTION in tensors


def fit_captioner(model: AnyCaptioner, source: Source, *, allow: Sequence[str], say: Say) -> LoadedWeights:
    """Fit the weights of a captioner or of a video tower to a captioner.

    Args:
        model: Captioner, which may be on the meta device.

    Raises:
        UserError: The weights do not fit.
    """
    part: nn.Module = model
    if (_LANGUAGE_PROJECTION if isinstance(model, LanguageCaptioner) else _TOKENS) not in source.converted.tensors:
        part = nn.Module()
        part.video = model.video
        source = drop_parts(source, _UNUSED_PARTS, model="a captioner", say=say)
    if isinstance(model.video, TimeSformer):
        tensors = _resize_embeddings(source.converted.tensors, model.video, say=say)
        source = replace(source, converted=replace(source.converted, tensors=tensors))
    return fit_to(part, source, allow=allow, say=say)


def _resize_embeddings(tensors: Mapping[str, torch.Tensor], tower: TimeSformer, *, say: Say) -> dict[str, torch.Tensor]:
    """Resize positional and temporal embeddings for the tower's clips (nearest neighbour, as in transformers)."""
    resized = dict(tensors)
    for name, kind in ((_POSITIONS, "positional"), (_TIMES, "temporal")):
        if name not in tensors:
            continue
        count = len(tower.positional_embedding if name == _POSITIONS else tower.temporal_embedding)
        if len(tensors[name]) != count:
            say(f"weights: {kind} embeddings resized from {len(tensors[name])} to {count} (nearest)")
            resize = interpolate_times if name == _TIMES else (lambda old, count: interpolate_positions(old, count - 1))
            resized[name] = resize(tensors[name], count)
    return resized
