"""A captioner with a language model as a folder that transformers, peft and torch open without clipmill.

OUT/lm/                   the language model and its tokenizer, as transformers save them
OUT/adapter/              peft's LoRA, if there is one
OUT/model.pt2             program of torch.export: normalised clips to the prefix of their captions
OUT/preprocessing.json    which frames a clip has, how they become the input, and what the prefix consists of
OUT/visual.safetensors    tensors of video tower and projector by name
OUT/visual.json           settings of tower and projector
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from clipmill.train.config.training import shaping
from clipmill.train.evaluation.served import PREPROCESSING_FILE, exported_program
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.optim.parameters import rename_as_in
from clipmill.train.spec import ExportRequest
from clipmill.train.tasks.caption.language.model import LanguageCaptioner, add_language_adapters, prefix_of
from clipmill.train.tasks.caption.language.opening import LanguageDecoder
from clipmill.train.tasks.caption.model import build_captioner
from clipmill.train.weights.exported import Exported, save_json, save_tensors

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
    how = json.load(file)["input"]
prefix = torch.export.load(f"{folder}/model.pt2").module()
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/lm")
lm = AutoModelForCausalLM.from_pretrained(f"{folder}/lm")
PEFT_LOAD
with av.open(video) as container:
    frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
count, side = how["num_frames"], how["size_px"]
clip = torch.stack([frames[(2 * i + 1) * len(frames) // (2 * count)] for i in range(count)])  # evenly spaced
clip = clip.permute(0, 3, 1, 2) / 255
height, width = clip.shape[2:]
short = min(height, width)
top, left = (height - short) // 2, (width - short) // 2
clip = clip[:, :, top : top + short, left : left + short]
clip = torch.nn.functional.interpolate(clip, (side, side), mode="bilinear", antialias=True)
mean, std = (torch.tensor(how[name])[:, None, None] for name in ("mean", "std"))
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
        for name, embedded in zip(("before", "after"), captioner.prompt(), strict=True):
            self.register_buffer(name, embedded.detach().clone())

    def forward(self, clips_BCTHW: Tensor) -> Tensor:
        return prefix_of(self, clips_BCTHW, self.before, self.after)


def exported_language(request: ExportRequest, parts: LanguageDecoder, *, decoding: Mapping[str, Any]) -> Exported:
    """The files of a captioner with a language model.

    Args:
        decoding: arguments of `generate`.

    Raises:
        UserError: the tower cannot be traced, or peft is not installed.
    """
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of save_pretrained, among our own lines
    settings = request.settings
    captioner = build_captioner(settings, parts, attend=attend_with_sdpa)
    assert isinstance(captioner, LanguageCaptioner)
    is_adapted = any(".lora_A." in name for name in request.weights)
    if is_adapted:
        add_language_adapters(captioner.decoder, settings.lora)
    captioner.load_state_dict(rename_as_in(captioner, request.weights))
    language, end_id = captioner.decoder, parts.tokenizer.end_id
    if is_adapted:
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
    program = exported_program(replace(request, form="torch"), _Prefix(captioner), prefix)
    visual = {name: one for name, one in request.weights.items() if not name.startswith("decoder.")}
    about = {name: value for name, value in shaping(settings).items() if name.partition(".")[0] in _SETTINGS}

    def write(folder: Path) -> None:
        program.write(folder)
        save_tensors(visual, folder / f"{_VISUAL}.safetensors", metadata={"format": "pt"})
        save_json(folder / f"{_VISUAL}.json", {**about, "decoder": parts.facts()})
        language.save_pretrained(folder / _LM)
        for name, content in parts.files.items():
            if name != "config.json":
                (folder / _LM / name).write_bytes(content)
        if is_adapted:
            captioner.decoder.save_pretrained(folder / _ADAPTER)

    return Exported(write=write, usage=_usage(is_adapted=is_adapted))


def _usage(*, is_adapted: bool) -> str:
    imported, loaded = "", ""
    if is_adapted:
        imported = "from peft import PeftModel\n"
        loaded = f'lm = PeftModel.from_pretrained(lm, f"{{folder}}/{_ADAPTER}")\n'
    script = _SCRIPT.replace("PEFT_IMPORT\n", imported).replace("PEFT_LOAD\n", loaded)
    script = script.replace("PREPROCESSING", PREPROCESSING_FILE)
    return f"In this folder, with torch, transformers and av:\n\n```python\n{script}\n```"
