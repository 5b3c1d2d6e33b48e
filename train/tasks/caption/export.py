"""Export of captioners for transformers' VisionEncoderDecoderModel or, with a language model, for several libraries.

A captioner with a language model is exported as a folder that transformers, peft and torch can open without clipmill:

    OUT/lm/                   the language model and its tokenizer, as saved by transformers
    OUT/adapter/              the LoRA adapters, as saved by peft, if there are any
    OUT/model.pt2             torch.export program that maps normalised clips to the prefixes of their captions
    OUT/preprocessing.json    number and preprocessing of frames, and the parts of the prefix
    OUT/visual.safetensors    tensors of the video tower and the projector by name
    OUT/visual.json           settings of the tower and the projector
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from clipmill.manifests.errors import UserError
from clipmill.manifests.settings import deferred_checks
from clipmill.train.config.model import Init, Towers, kind_of
from clipmill.train.config.training import weight_settings
from clipmill.train.evaluation.served import PREPROCESSING_FILE, exported_program
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.captioner import Captioner
from clipmill.train.models.dual_encoder import ModelShape, size_of
from clipmill.train.models.timesformer import TimeSformer
from clipmill.train.optim.parameters import rename_as_in
from clipmill.train.spec import AdoptedModel, ExportRequest
from clipmill.train.tasks.caption.language import LanguageCaptioner, LanguageDecoder, add_language_adapters, prefix_of
from clipmill.train.tasks.caption.model import build_captioner, decoder_of_start, effective_settings, has_decoder
from clipmill.train.tasks.caption.spec import (
    CaptionerSettings,
    DecodingSettings,
    length_penalty_of,
    max_tokens_of,
    num_beams_of,
    temperature_of,
)
from clipmill.train.tasks.caption.tokenizer import END, TOKENIZER_FILE
from clipmill.train.weights.architecture import match_size
from clipmill.train.weights.exported import Export, preprocessor_config, require_format, save_json, save_tensors
from clipmill.train.weights.files import read_config
from clipmill.train.weights.hf_caption import (
    TimeSformerShape,
    caption_config_of,
    generation_config,
    hf_caption_config,
    to_hf_caption,
)
from clipmill.train.weights.source import Say, Source


def adopted_captioner(source: Source, path: Path, *, say: Say) -> AdoptedModel | None:
    """Convert the weights of a TimeSformer and GPT-2 captioner; return None if the weights contain no decoder.

    Raises:
        UserError: The folder has no config.json or no tokenizer.
    """
    if not has_decoder(source.converted.tensors):
        return None
    config = read_config(path / "config.json")
    if config is None:
        raise UserError(
            f"{source.title} is a captioner, but there is no config.json with its sizes",
            hint="use a folder that save_pretrained or train export wrote",
        )
    video = caption_config_of(config, source=str(path)).video
    assert video is not None  # a decoder without a tower is not a captioner
    trunk = video.size.trunk
    with deferred_checks():  # the checks of --model do not apply to these weights
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
    return AdoptedModel(settings=settings, shape=shape, open_arguments={"decoder": decoder})


def exported_captioner(request: ExportRequest) -> Export:
    """Export a captioner to the requested format.

    Raises:
        UserError: The format cannot represent the captioner.
    """
    settings, parts = request.settings, request.task.decoder
    assert isinstance(settings, CaptionerSettings)
    if isinstance(parts, LanguageDecoder):
        require_format(request.format_name, ("lm",), what="a captioner with a language model")
        return exported_language(request, parts, decoding=generate_arguments(settings.decoding, parts.context_length))
    require_format(request.format_name, ("hf",), what="a captioner with a GPT-2")
    kind = kind_of(settings.towers)
    if kind != "timesformer":
        raise UserError(
            f"{request.title} is a captioner with a tower of kind {settings.towers.kind}, but --format hf supports "
            "only a TimeSformer",
            hint="export a run with --towers.kind timesformer",
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

    return Export(write=write)


def save_hf(
    captioner: Captioner,
    folder: Path,
    *,
    end_id: int,
    pad_id: int | None = None,
    decoding: DecodingSettings | None = None,
) -> None:
    """Write config.json, generation_config.json and the weights for `VisionEncoderDecoderModel.from_pretrained`.

    Args:
        end_id: Token before and after a caption.
        pad_id: Padding token. Default: `end_id`.
        decoding: Decoding settings that `generate` uses by default. Default: the defaults of transformers.

    Raises:
        UserError: The video tower is not a TimeSformer.
    """
    tower, decoder = captioner.video, captioner.decoder
    if not isinstance(tower, TimeSformer):
        raise UserError(
            f"a captioner with a {type(tower).__name__} cannot be exported: the format supports only a TimeSformer",
            hint="export a run with --towers.kind timesformer",
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
    """Return the content of generation_config.json: special tokens, and the decoding settings of `generate`.

    Args:
        decoding: Decoding settings. Default: the defaults of transformers, such as 20 tokens.
        context_length: Maximum number of tokens of the decoder.
    """
    arguments = {} if decoding is None else generate_arguments(decoding, context_length)
    return generation_config(end_id=end_id, pad_id=pad_id, decoding=arguments)


def generate_arguments(decoding: DecodingSettings, context_length: int | None) -> dict[str, Any]:
    """Return the arguments of `generate` that correspond to decoding settings."""
    max_tokens = min(max_tokens_of(decoding), context_length or max_tokens_of(decoding))
    lengths = {"max_new_tokens": max_tokens}
    if decoding.min_tokens:
        lengths["min_new_tokens"] = min(decoding.min_tokens, max_tokens - 1)
    num_beams = num_beams_of(decoding)
    if decoding.method == "sample":
        # Set top_k, because old versions of transformers sample from the 50 most likely tokens by default.
        limits = {"top_k": decoding.top_k or 0, "top_p": 1.0 if decoding.top_p is None else decoding.top_p}
        return {**lengths, "do_sample": True, "num_beams": 1, "temperature": temperature_of(decoding), **limits}
    if decoding.method == "greedy" or num_beams == 1:
        return {**lengths, "do_sample": False, "num_beams": 1}
    return {
        **lengths,
        "do_sample": False,
        "num_beams": num_beams,
        "length_penalty": length_penalty_of(decoding),
        "early_stopping": bool(decoding.early_stopping),
    }


_LM, _ADAPTER, _VISUAL = "lm", "adapter", "visual"
_SETTINGS = ("model", "num_frames", "sampling", "stride", "size_px", "towers")
_SCRIPT = """\
import json

import av
import torch
PEFT_IMPORT
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, video = ".", "video.mp4"
with open(f"{folder}/PREPROCESSING") as file:
    settings = json.load(file)["input"]
prefix = torch.export.load(f"{folder}/model.pt2").module()
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/lm")
lm = AutoModelForCausalLM.from_pretrained(f"{folder}/lm")
PEFT_LOAD
with av.open(video) as container:
    frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
count, side = settings["num_frames"], settings["size_px"]
clip = torch.stack([frames[(2 * i + 1) * len(frames) // (2 * count)] for i in range(count)])  # evenly spaced
clip = clip.permute(0, 3, 1, 2) / 255
height, width = clip.shape[2:]
short = min(height, width)
top, left = (height - short) // 2, (width - short) // 2
clip = clip[:, :, top : top + short, left : left + short]
clip = torch.nn.functional.interpolate(clip, (side, side), mode="bilinear", antialias=True)
mean, std = (torch.tensor(settings[name])[:, None, None] for name in ("mean", "std"))
clips = ((clip - mean) / std).transpose(0, 1)[None]  # [1, channels, frames, height, width]
ids = lm.generate(inputs_embeds=prefix(clips))
caption = tokenizer.decode(ids[0], skip_special_tokens=True)
print(caption)"""


class _Prefix(nn.Module):
    before: Tensor
    after: Tensor

    def __init__(self, captioner: LanguageCaptioner) -> None:
        super().__init__()
        self.video, self.projection = captioner.video, captioner.projection
        for name, embeddings in zip(("before", "after"), captioner.prompt(), strict=True):
            self.register_buffer(name, embeddings.detach().clone())

    def forward(self, clips_BCTHW: Tensor) -> Tensor:
        return prefix_of(self, clips_BCTHW, self.before, self.after)


def exported_language(request: ExportRequest, parts: LanguageDecoder, *, decoding: Mapping[str, Any]) -> Export:
    """Export a captioner with a language model.

    Args:
        decoding: Arguments that `generate` uses by default.

    Raises:
        UserError: The tower cannot be traced, or peft is not installed.
    """
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # otherwise, save_pretrained prints a progress bar into other output
    settings = request.settings
    captioner = build_captioner(settings, parts, attend=attend_with_sdpa)
    assert isinstance(captioner, LanguageCaptioner)
    has_adapters = any(".lora_A." in name for name in request.weights)
    if has_adapters:
        add_language_adapters(captioner.decoder, settings.lora)
    captioner.load_state_dict(rename_as_in(captioner, request.weights))
    language, end_id = captioner.decoder, parts.tokenizer.end_id
    if has_adapters:
        language = parts.new_model()
        language.load_state_dict({name: request.weights[f"decoder.{name}"] for name in language.state_dict()})
    language.generation_config = GenerationConfig(
        bos_token_id=parts.before[0] if parts.before else end_id, eos_token_id=end_id, pad_token_id=end_id, **decoding
    )
    prefix = {
        "name": "prefix",
        "kind": "inputs_embeds of generate",
        "prompt": parts.prompt,
        "visual_tokens": parts.num_visual,
        "prompt_ids": [list(parts.before), list(parts.after)],
    }
    program = exported_program(replace(request, format_name="torch"), _Prefix(captioner), prefix)
    visual = {name: tensor for name, tensor in request.weights.items() if not name.startswith("decoder.")}
    visual_settings = {
        name: value for name, value in weight_settings(settings).items() if name.partition(".")[0] in _SETTINGS
    }

    def write(folder: Path) -> None:
        program.write(folder)
        save_tensors(visual, folder / f"{_VISUAL}.safetensors", metadata={"format": "pt"})
        save_json(folder / f"{_VISUAL}.json", {**visual_settings, "decoder": parts.facts()})
        language.save_pretrained(folder / _LM)
        for name, content in parts.files.items():
            if name != "config.json":
                (folder / _LM / name).write_bytes(content)
        if has_adapters:
            captioner.decoder.save_pretrained(folder / _ADAPTER)

    peft_import, peft_load = "", ""
    if has_adapters:
        peft_import = "from peft import PeftModel\n"
        peft_load = f'lm = PeftModel.from_pretrained(lm, f"{{folder}}/{_ADAPTER}")\n'
    script = _SCRIPT.replace("PEFT_IMPORT\n", peft_import).replace("PEFT_LOAD\n", peft_load)
    script = script.replace("PREPROCESSING", PREPROCESSING_FILE)
    return Export(write=write, usage=f"In this folder, with torch, transformers and av:\n\n```python\n{script}\n```")
