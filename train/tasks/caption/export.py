"""Captioners as transformers' VisionEncoderDecoderModel opens them, with tokenizer and image processor."""

from pathlib import Path
from typing import Any

from manifests.errors import UserError
from train.config.files import load_settings
from train.config.model import kind_of
from train.data.tokenizer import END, TOKENIZER_FILE
from train.models.attention import attend_with_sdpa
from train.run.folder import RunFolder
from train.tasks.caption.decoder import read_decoder_parts
from train.tasks.caption.model import build_captioner
from train.tasks.caption.settings import CaptionerSettings
from train.weights.converted import MEANS, STDS, Tensors
from train.weights.exported import Exported, require_format, save_json
from train.weights.hf_caption import save_hf
from train.weights.hf_caption_configs import hf_generation_config
from train.weights.hf_videomae_format import videomae_preprocessor_config


def exported_captioner(run: RunFolder, weights: Tensors, *, form: str) -> Exported:
    """A captioner.

    Raises:
        UserError: the format cannot hold it.
    """
    require_format(form, ("hf",), what="a captioner")
    settings = load_settings(run.settings, CaptionerSettings)
    if kind_of(settings.towers) != "timesformer":
        raise UserError(
            f"{run.path} is a captioner with a tower of the kind {settings.towers.kind}, and transformers have "
            "captioners of TimeSformers",
            hint="export one with --towers.kind timesformer",
        )
    parts = read_decoder_parts(run)
    captioner = build_captioner(settings, parts.size, attend=attend_with_sdpa)
    captioner.load_state_dict(weights)

    end_id = parts.tokenizer.end_id
    generation = hf_generation_config(
        end_id=end_id, pad_id=end_id, decoding=settings.decoding, context_length=parts.size.context_length
    )

    def write(folder: Path) -> None:
        save_hf(captioner, folder, end_id=end_id)
        save_json(folder / "generation_config.json", generation)
        (folder / TOKENIZER_FILE).write_bytes(parts.tokenizer.as_json())
        save_json(folder / "tokenizer_config.json", _tokenizer_config(settings))
        save_json(folder / "preprocessor_config.json", _preprocessor_config(settings))

    return Exported(write=write)


def _tokenizer_config(settings: CaptionerSettings) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": settings.decoder.max_tokens,
    }


def _preprocessor_config(settings: CaptionerSettings) -> dict[str, Any]:
    config = videomae_preprocessor_config(settings)
    kind = kind_of(settings.towers)
    return {
        **config,
        "image_mean": list(settings.init.pixel_mean or MEANS[kind]),
        "image_std": list(settings.init.pixel_std or STDS[kind]),
    }
