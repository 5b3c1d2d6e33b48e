"""Where weights come from: a file, a folder, or a name and tag of open_clip."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.errors import UserError
from train.config.model import Init, Kind
from train.weights.configs import facts_of_hf, facts_of_open_clip, read_config
from train.weights.converted import Converted, Facts, by_origin, kind_of_tensors, require_floats, require_whole_dtypes
from train.weights.extras import EXTRAS_FILE, read_extras
from train.weights.files import read_tensors
from train.weights.formats import FORMATS, detect_format, without_prefixes
from train.weights.hf_caption_configs import facts_of_hf_caption
from train.weights.runs import is_run, read_run
from train.weights.videomae_format import facts_of_hf_videomae, facts_of_videomae_v2

_NAME_AND_TAG = re.compile(r"([\w.@-]+):([\w.-]+)")
# What a folder may call its weights; the first that is there is read.
_FILES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    "checkpoint.pth",
)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Weights that were read.

    Attributes:
        title: where they came from and in which format, for the user.
        converted: the tensors under our names.
        facts: what is known beside them.
    """

    title: str
    converted: Converted
    facts: Facts

    @property
    def kind(self) -> Kind | None:
        """The kind of the video tower; None where there is none."""
        return kind_of_tensors(self.converted.tensors)

    @property
    def tubelet(self) -> int | None:
        """Frames of a cube of the video tower; None where it has patches, or is not there."""
        conv = self.converted.tensors.get("video.conv1.weight")
        return int(conv.shape[2]) if conv is not None and conv.ndim == 5 else None


def fetch_tag(init: Init, *, say: Say) -> None:
    """Has open_clip download the weights of a NAME:TAG that are not in its cache; does nothing about files.

    Raises:
        UserError: open_clip knows no such weights, or cannot get them.
    """
    if (
        init.weights is not None
        and not Path(init.weights).exists()
        and (match := _NAME_AND_TAG.fullmatch(init.weights))
    ):
        say(f"weights: {init.weights} from open_clip's cache, or else downloaded")
        _file_of_tag(match[1], match[2])


def open_weights(init: Init) -> Source | None:
    """Reads the weights that the settings name, None where they name none.

    Raises:
        UserError: they are not there, damaged, of no known format, of no floating point, or of a model that the towers
            cannot be.
    """
    if init.weights is None:
        return None
    path, match = Path(init.weights), _NAME_AND_TAG.fullmatch(init.weights)
    if is_run(path):
        converted, facts_of_run, title = read_run(path)
        return Source(title=title, converted=converted, facts=facts_of_run)
    if path.is_dir():
        file, facts = _file_in(path), _facts_in(path)
    elif path.is_file() or not match:
        file, facts = path, None
    else:
        file, facts = _file_of_tag(match[1], match[2])
    state = without_prefixes(read_tensors(file))
    require_whole_dtypes(state, source=file)
    form = FORMATS[init.format] if init.format != "auto" else detect_format(state)
    converted = form.convert(state)
    if path.is_dir() and (extras := read_extras(path, beside=file)):
        converted = replace(
            converted,
            tensors={**converted.tensors, **extras},
            origins={**converted.origins, **{name: f"{EXTRAS_FILE}: {name}" for name in extras}},
        )
    require_floats(by_origin(converted), source=file)
    return Source(title=f"{init.weights} ({form.title})", converted=converted, facts=facts or form.facts)


def _file_of_tag(name: str, tag: str) -> tuple[Path, Facts]:
    import open_clip
    from open_clip.pretrained import download_pretrained, get_pretrained_cfg, list_pretrained_tags_by_model

    entry, model = get_pretrained_cfg(name, tag), open_clip.get_model_config(name)
    if not entry or model is None:
        tags = list_pretrained_tags_by_model(name)
        raise UserError(
            f"there is no file {name}:{tag}, and open_clip has no weights of that name and tag",
            hint=f"tags of {name}: {', '.join(tags)}" if tags else "names: open_clip.list_pretrained()",
        )
    facts = facts_of_open_clip(model, entry, source=f"{name}:{tag}")
    try:
        return Path(download_pretrained(entry)), facts
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot download {name}:{tag}, and it is not in the cache: {str(error).splitlines()[0]}",
            hint="is there a network? On a machine with one, open_clip.create_model fills the cache; or name a file",
        ) from error


def _file_in(folder: Path) -> Path:
    for name in _FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"there are no weights in {folder}", hint=f"one of {', '.join(_FILES)}")


def _facts_in(folder: Path) -> Facts | None:
    own = read_config(folder / "open_clip_config.json")
    if own is not None:
        preprocess = own.get("preprocess_cfg", {})
        return facts_of_open_clip(own.get("model_cfg", own), preprocess, source=str(folder))
    config = read_config(folder / "config.json")
    if config is None:
        return None
    preprocess = read_config(folder / "preprocessor_config.json") or {}
    if config.get("model_type") == "videomae":
        return facts_of_hf_videomae(config, preprocess, source=str(folder))
    if isinstance(config.get("model_config"), dict) and str(config.get("model_type")).startswith("VideoMAEv2"):
        return facts_of_videomae_v2(config, preprocess, source=str(folder))
    if config.get("model_type") in ("timesformer", "vision-encoder-decoder", "gpt2"):
        return facts_of_hf_caption(config, preprocess, source=str(folder))
    return facts_of_hf(config, preprocess, source=str(folder))
