"""Captioners for transformers' VisionEncoderDecoderModel, with tokenizer and image processor."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import deferred_checks
from clipmill.train.config.model import Init, Towers, kind_of
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Captioner
from clipmill.train.models.dual_encoder import ModelShape, size_of
from clipmill.train.models.timesformer import TimeSformer
from clipmill.train.spec import Adopted, ExportRequest
from clipmill.train.tasks.caption.decoder import decoder_of_start
from clipmill.train.tasks.caption.language.export import exported_language
from clipmill.train.tasks.caption.language.opening import LanguageDecoder
from clipmill.train.tasks.caption.model import build_captioner, effective_settings, has_decoder
from clipmill.train.tasks.caption.settings import (
    CaptionerSettings,
    DecodingSettings,
    length_penalty_of,
    max_tokens_of,
    num_beams_of,
    temperature_of,
)
from clipmill.train.tasks.caption.tokenizer import END, TOKENIZER_FILE
from clipmill.train.weights.architecture import match_size
from clipmill.train.weights.exported import Exported, preprocessor_config, require_format, save_json, save_tensors
from clipmill.train.weights.files import read_config
from clipmill.train.weights.hf_caption import (
    TimeSformerShape,
    caption_config_of,
    generation_config,
    hf_caption_config,
    to_hf_caption,
)
from clipmill.train.weights.source import Say, Source


def adopted_captioner(source: Source, path: Path, *, say: Say) -> Adopted | None:
    """Weights of a captioner of TimeSformer and GPT-2, in a folder with its tokenizer; None if they have no decoder.

    Raises:
        UserError: the folder lacks what no tensor shows: sizes or tokenizer.
    """
    if not has_decoder(source.converted.tensors):
        return None
    config = read_config(path / "config.json")
    if config is None:
        raise UserError(
            f"{source.title} is a captioner without config.json and tokenizer, which its tokens need",
            hint="name the folder that save_pretrained or train export wrote",
        )
    video = caption_config_of(config, source=str(path)).video
    assert video is not None  # a decoder alone does not make a captioner
    trunk = video.size.trunk
    with deferred_checks():  # which are about --model
        settings = CaptionerSettings(
            num_frames=video.num_frames,
            size_px=video.image_px,
            towers=Towers(
                kind="timesformer",
                width=trunk.width,
                depth=trunk.depth,
                heads=trunk.num_heads,
                patch_px=video.size.patch_px,
            ),
            init=Init(weights=str(path)),
        )
        settings = effective_settings(settings, source, say=say)
        decoder = decoder_of_start(settings)
        settings = replace(settings, init=replace(settings.init, weights=None))
    size = match_size(size_of(settings.model, settings.towers), source)
    shape = ModelShape(size=size, image_px=settings.size_px)
    return Adopted(settings=settings, shape=shape, given={"decoder": decoder})


def exported_captioner(request: ExportRequest) -> Exported:
    """A captioner.

    Raises:
        UserError: the format cannot hold it.
    """
    settings, parts = request.settings, request.task.decoder
    assert isinstance(settings, CaptionerSettings)
    if isinstance(parts, LanguageDecoder):
        require_format(request.form, ("lm",), what="a captioner with a language model")
        return exported_language(request, parts, decoding=generate_arguments(settings.decoding, parts.context_length))
    require_format(request.form, ("hf",), what="a captioner with a GPT-2")
    kind = kind_of(settings.towers)
    if kind != "timesformer":
        raise UserError(
            f"{request.title} is a captioner with a tower of the kind {settings.towers.kind}, and the format takes a "
            "TimeSformer only",
            hint="export a run of --towers.kind timesformer",
        )
    captioner = build_captioner(settings, parts, attend=attend_with_sdpa)
    assert isinstance(captioner, Captioner)
    captioner.load_state_dict(request.weights)
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": settings.decoder.max_tokens,
    }

    def write(folder: Path) -> None:
        save_hf(captioner, folder, end_id=parts.tokenizer.end_id, decoding=settings.decoding)
        (folder / TOKENIZER_FILE).write_bytes(parts.tokenizer.as_json())
        save_json(folder / "tokenizer_config.json", tokenizer)
        preprocessor = preprocessor_config("VideoMAEImageProcessor", settings, kind=kind)
        save_json(folder / "preprocessor_config.json", preprocessor)

    return Exported(write=write)


def save_hf(
    captioner: Captioner,
    folder: Path,
    *,
    end_id: int,
    pad_id: int | None = None,
    decoding: DecodingSettings | None = None,
) -> None:
    """Writes config.json, generation_config.json and the weights for `VisionEncoderDecoderModel.from_pretrained`.

    Args:
        end_id: the token before and after a caption.
        pad_id: the padding token; `end_id` when left out.
        decoding: as `generate` decodes by default; transformers' own defaults when left out.

    Raises:
        UserError: the video tower is not a TimeSformer.
    """
    tower, decoder = captioner.video, captioner.decoder
    if not isinstance(tower, TimeSformer):
        raise UserError(
            f"a captioner with a {type(tower).__name__} cannot be exported: the format takes a TimeSformer only",
            hint="export a run of --towers.kind timesformer",
        )
    num_patches = len(tower.positional_embedding) - 1
    shape = TimeSformerShape(
        size=tower.size,
        image_px=tower.size.patch_px * round(num_patches**0.5),
        num_frames=len(tower.temporal_embedding),
    )
    pad_id = end_id if pad_id is None else pad_id
    config = hf_caption_config(shape, decoder.size, end_id=end_id, pad_id=pad_id, dropout=decoder.dropout.p)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(to_hf_caption(captioner.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    generation = hf_generation_config(
        end_id=end_id, pad_id=pad_id, decoding=decoding, context_length=decoder.size.context_length
    )
    save_json(folder / "generation_config.json", generation)
    save_json(folder / "config.json", config)


def hf_generation_config(
    *, end_id: int, pad_id: int, decoding: DecodingSettings | None = None, context_length: int | None = None
) -> dict[str, Any]:
    """generation_config.json: the special tokens of `generate`, and how it decodes.

    Args:
        decoding: transformers' own defaults, 20 tokens among them, when left out.
        context_length: maximum number of tokens of the decoder.
    """
    chosen = {} if decoding is None else generate_arguments(decoding, context_length)
    return generation_config(end_id=end_id, pad_id=pad_id, decoding=chosen)


def generate_arguments(decoding: DecodingSettings, context_length: int | None) -> dict[str, Any]:
    """The arguments with which `generate` decodes as the settings say."""
    return {**_lengths(decoding, context_length), **_choice(decoding)}


def _lengths(decoding: DecodingSettings, context_length: int | None) -> dict[str, int]:
    longest = min(max_tokens_of(decoding), context_length or max_tokens_of(decoding))
    shortest = {"min_new_tokens": min(decoding.min_tokens, longest - 1)} if decoding.min_tokens else {}
    return {"max_new_tokens": longest, **shortest}


def _choice(decoding: DecodingSettings) -> dict[str, Any]:
    """How `generate` chooses the next token."""
    num_beams = num_beams_of(decoding)
    if decoding.method == "sample":
        # Old versions restrict sampling to the 50 most probable tokens by default.
        limits = {"top_k": decoding.top_k or 0, "top_p": 1.0 if decoding.top_p is None else decoding.top_p}
        return {"do_sample": True, "num_beams": 1, "temperature": temperature_of(decoding), **limits}
    if decoding.method == "greedy" or num_beams == 1:
        return {"do_sample": False, "num_beams": 1}
    return {
        "do_sample": False,
        "num_beams": num_beams,
        "length_penalty": length_penalty_of(decoding),
        "early_stopping": bool(decoding.early_stopping),
    }
