"""Folders of Hugging Face's VisionEncoderDecoderModel, and of the TimeSformer and the GPT-2 that it is made of."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from manifests.errors import UserError
from manifests.publish import publish_json, published
from train.models.attention import Attend
from train.models.captioner import Captioner
from train.models.gpt2 import Gpt2
from train.models.timesformer import TimeSformer, nearest_places, nearest_times
from train.weights.configs import read_config
from train.weights.converted import Converted, by_origin, require_finite, require_floats, require_whole_dtypes
from train.weights.files import read_tensors
from train.weights.formats import without_prefixes
from train.weights.hf_caption_configs import (
    CaptionConfig,
    TimeSformerShape,
    caption_config_of,
    hf_caption_config,
    hf_generation_config,
)
from train.weights.hf_caption_format import from_hf_caption, to_hf_caption

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_POSITIONS, _TIMES = "video.positional_embedding", "video.temporal_embedding"


@dataclass(frozen=True, kw_only=True)
class CaptionFolder:
    """What a folder has: sizes, and weights under our names."""

    config: CaptionConfig
    converted: Converted


def read_caption_folder(folder: Path, *, needs_decoder: bool = False) -> CaptionFolder:
    """Reads config.json and the weights of the whole, of a TimeSformer, or of a GPT-2.

    Args:
        needs_decoder: a TimeSformer is no use, and not named as one.

    Raises:
        UserError: they are not there, damaged, or of a model that a captioner cannot be made of.
    """
    values = read_config(folder / "config.json")
    if values is None:
        raise UserError(f"there is no {folder / 'config.json'}", hint="name a folder that save_pretrained wrote")
    wanted = {"hint": "use a GPT-2, or a vision-encoder-decoder with one"} if needs_decoder else {}
    config = caption_config_of(values, source=str(folder), **wanted)
    for name in _WEIGHTS:
        if (folder / name).is_file():
            # A model of the whole is all that may begin with these prefixes, and has two of them.
            state = without_prefixes(read_tensors(folder / name))
            require_whole_dtypes(state, source=folder / name)
            converted = from_hf_caption(state)
            require_floats(by_origin(converted), source=folder / name)
            require_finite(by_origin(converted), source=folder / name)
            return CaptionFolder(config=config, converted=converted)
    raise UserError(f"there are no weights in {folder}", hint=f"one of {', '.join(_WEIGHTS)}")


def load_hf(folder: Path, *, attend: Attend, num_frames: int | None = None, image_px: int | None = None) -> Captioner:
    """A captioner with the weights of a VisionEncoderDecoderModel's folder.

    Args:
        num_frames: of the clips; those of the weights when left out. Embeddings of other places are the nearest ones.
        image_px: side of the pictures, likewise.

    Raises:
        UserError: see `read_caption_folder`; or a tensor is missing or left over.
    """
    found = read_caption_folder(folder)
    video, decoder = found.config.video, found.config.decoder
    if video is None or decoder is None:
        raise UserError(
            f"{folder} has no {'decoder' if decoder is None else 'encoder'}",
            hint="use the folder of a whole captioner (VisionEncoderDecoderModel.save_pretrained)",
        )
    num_frames, image_px = num_frames or video.num_frames, image_px or video.image_px
    captioner = Captioner(
        TimeSformer(video.size, image_px=image_px, num_frames=num_frames, attend=attend), Gpt2(decoder, attend=attend)
    )
    tensors = dict(found.converted.tensors)
    missing = captioner.state_dict().keys() - tensors.keys()
    left_over = [*found.converted.unknown, *(tensors.keys() - captioner.state_dict().keys())]
    if missing or left_over:
        raise UserError(
            f"the weights of {folder} do not fit its config.json: "
            f"missing {_some(missing)}; left over {_some(left_over)}",
            hint="get the folder again",
        )
    tensors[_POSITIONS] = nearest_places(tensors[_POSITIONS], (image_px // video.size.patch_px) ** 2)
    tensors[_TIMES] = nearest_times(tensors[_TIMES], num_frames)
    captioner.load_state_dict(tensors)
    return captioner


def save_hf(captioner: Captioner, folder: Path, *, end_id: int, pad_id: int | None = None) -> None:
    """Writes what `VisionEncoderDecoderModel.from_pretrained` reads: config.json, generation_config.json, weights.

    Args:
        end_id: the token before and behind a caption.
        pad_id: the token that fills rows up; `end_id` when left out.

    Raises:
        UserError: the video tower is no TimeSformer.
    """
    tower = captioner.video
    if not isinstance(tower, TimeSformer):
        raise UserError(
            f"transformers have no captioner with this encoder ({type(tower).__name__})",
            hint="export one with a TimeSformer",
        )
    num_patches = len(tower.positional_embedding) - 1
    shape = TimeSformerShape(
        size=tower.size,
        image_px=tower.size.patch_px * round(num_patches**0.5),
        num_frames=len(tower.temporal_embedding),
    )
    pad_id = end_id if pad_id is None else pad_id
    config = hf_caption_config(
        shape, captioner.decoder.size, end_id=end_id, pad_id=pad_id, dropout=captioner.decoder.dropout.p
    )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu() for name, tensor in captioner.state_dict().items()}
    with published(folder / "model.safetensors") as temporary:
        contiguous = {name: tensor.contiguous() for name, tensor in to_hf_caption(tensors).items()}
        save_file(contiguous, temporary, metadata={"format": "pt"})
    publish_json(folder / "generation_config.json", hf_generation_config(end_id=end_id, pad_id=pad_id))
    publish_json(folder / "config.json", config)


def _some(names: Any) -> str:
    ordered = sorted(names)
    return f"{', '.join(ordered[:3])}{' and others' if len(ordered) > 3 else ''}" if ordered else "nothing"
