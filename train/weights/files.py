"""Read tensors and configurations from untrusted files without executing code in them.

safetensors files contain only tensors. torch.save files are read with `weights_only`, which builds tensors and plain
values, and rejects everything else. The archives that OpenAI published are programs (TorchScript). Such an archive is
opened only if its SHA-256 is in open_clip's list of OpenAI's archives.
"""

import argparse
import codecs
import hashlib
import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.hub import hub_if_reachable
from clipmill.manifests.publish import parse_json
from clipmill.shards.opening import open_regular
from clipmill.train.config.model import EPS_RANGE, PIXEL_MEAN, PIXEL_STD
from clipmill.train.models.hugging_face import PROCESSOR_FILES, TRIPLE, is_triple
from clipmill.train.weights.conversion import Mean

# Configuration files next to weights: parse the JSON, check the values that are used, and build transformers' objects.

_REPAIR_HINT = "correct the file, or download the folder again"


def read_config(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in a file; return None if the file does not exist.

    Raises:
        UserError: The file cannot be read, or a value has the wrong type or is out of range for its key.
    """
    if not path.is_file():
        return None
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}", hint=_REPAIR_HINT) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object", hint=_REPAIR_HINT)
    _check(value, path=path, parent="")
    return value


def as_config(config_class: Callable[..., Any], entries: Mapping[str, Any], *, keys: str, source: str) -> Any:
    """Build a transformers configuration object, with default values for missing entries.

    Args:
        config_class: Class of the configuration, such as VideoMAEConfig.
        entries: Entries of a config.json that `read_config` has checked.
        keys: Names of the entries to use, separated by spaces. Other entries are ignored, because `read_config` does
            not check their values.
        source: Origin of the entries, for error messages.

    Raises:
        UserError: The class rejects the values.
    """
    from huggingface_hub.errors import StrictDataclassError

    values = {key: entries[key] for key in keys.split() if key in entries}
    # The classes reject integers where they expect floats.
    values |= {key: float(value) for key, value in values.items() if key in _EPS}
    try:
        return config_class(**values)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}", hint=_REPAIR_HINT) from error


def rgb_values(values: Any) -> Mean | None:
    """Return the three values for R, G and B as floats; None for None."""
    if values is None:
        return None
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def _check(config: Mapping[str, Any], *, path: Path, parent: str) -> None:
    for name, value in config.items():
        for names, is_valid, expected in _TYPES:
            if name in names and not is_valid(value):
                raise UserError(f"{path}: {parent}{name} is {value!r}, but must be {expected}", hint=_REPAIR_HINT)
        if name in _OBJECTS and value is not None:
            _check(value, path=path, parent=f"{parent}{name}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_integer(value) and value >= 1


# Nested objects, whose entries are also checked.
_OBJECTS = frozenset(
    {
        *("vision_config", "text_config", "encoder", "decoder", "model_config", "model_cfg", "preprocess_cfg"),
        *("vision_cfg", "text_cfg", "norm_kwargs"),
    }
)
_SIZES = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("decoder_num_attention_heads", "num_channels", "num_frames", "vocab_size", "n_positions", "n_embd"),
        *("n_layer", "n_head", "num_heads", "width", "head_width", "heads"),
    }
)
_EPS = frozenset({"layer_norm_eps", "layer_norm_epsilon", "eps"})
_TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"})
_SWITCHES = frozenset({"qkv_bias", "qv_bias", "use_mean_pooling", "norm_pix_loss", "quick_gelu"})
_TYPES: tuple[tuple[frozenset[str], Callable[[Any], bool], str], ...] = (
    (_OBJECTS, lambda value: value is None or isinstance(value, dict), "an object"),
    (_SIZES, _is_size, "a whole number of at least 1"),
    (
        frozenset({"image_size", "patch_size"}),
        lambda value: all(map(_is_size, value)) if isinstance(value, list) else _is_size(value),
        "a whole number of at least 1",
    ),
    (
        _EPS,
        lambda value: (
            (_is_integer(value) or isinstance(value, float)) and math.isfinite(value) and EPS_RANGE.holds(value)
        ),
        f"a number {EPS_RANGE}",
    ),
    (_TOKENS, lambda value: value is None or _is_integer(value), "a whole number"),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (
        frozenset({"hidden_act", "activation_function", "model_type"}),
        lambda value: isinstance(value, str),
        "a string",
    ),
    (
        frozenset({"architectures"}),
        lambda value: value is None or (isinstance(value, list) and all(isinstance(text, str) for text in value)),
        "a list of strings",
    ),
    (frozenset({"mean"}), lambda value: is_triple(value, PIXEL_MEAN), TRIPLE.format(PIXEL_MEAN)),
    (frozenset({"std"}), lambda value: is_triple(value, PIXEL_STD), TRIPLE.format(PIXEL_STD)),
)


# Error that torch.load raises for files that contain more than tensors and plain containers.
_UnpicklingError: type[Exception] = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]
_DOWNLOAD_AGAIN = "download the file again, and compare its size with the original"
_scalar = np.float64(0).__reduce__()[0]  # function that builds a NumPy scalar from bytes
# Globals that a torch.save file may use. Besides tensors, training checkpoints of AVION and LaViLa contain arguments (a
# namespace of plain values) and a score (a NumPy scalar, whose constructor moved between versions of NumPy).
_ALLOWED_GLOBALS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64, np.bool_)),
    (_scalar, "numpy.core.multiarray.scalar"),
    (_scalar, "numpy._core.multiarray.scalar"),
]
# Names of weights files in a folder, by priority. An index lists the files of sharded weights.
_INDEX = ".index.json"
WEIGHT_FILES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    f"model.safetensors{_INDEX}",
    "open_clip_pytorch_model.bin",
    "pytorch_model.bin",
    f"pytorch_model.bin{_INDEX}",
    "checkpoint.pth",
)
# Keys under which training checkpoints store the model's state dict, the most common key first.
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "module")
_PREFIXES = ("module.", "_orig_mod.", "model.")


def weights_file(folder: Path) -> Path:
    """Return the weights file in a folder, or the index of its shards. Raise a UserError if there is neither."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"there are no weights in {folder}", hint=f"use a folder that contains one of {', '.join(WEIGHT_FILES)}"
    )


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the state dict in a file, or in the shards that an index lists, into CPU memory.

    Raises:
        UserError: The file cannot be read, is damaged, contains no tensors, or would execute code.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:  # rejects pipes and devices, which may never end
            head = file.read(512)
    except OSError as error:
        raise UserError(
            f"cannot read the weights {path}: {error.strerror}", hint="use a readable file or folder"
        ) from error
    if not head:
        raise UserError(f"{path} is empty", hint=_DOWNLOAD_AGAIN)
    if head.lstrip()[:1] == b"<":
        raise UserError(f"{path} is a web page, not a weights file: the download failed", hint=_DOWNLOAD_AGAIN)
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a Git LFS pointer, not a weights file", hint="run `git lfs pull` in its repository")
    if path.name.endswith(_INDEX):
        return _read_shards(path)
    if _is_printable(head):
        raise UserError(
            f"{path} is a text file, not a safetensors or torch file", hint="use the file that contains the weights"
        )
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(
                f"the weights {path} are damaged or truncated: {first_line(error)}", hint=_DOWNLOAD_AGAIN
            ) from error
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            return _read_openai_archive(path)
        if any(name.endswith("/models/model.json") for name in names):
            raise UserError(
                f"{path} is a torch.export program, not a weights file",
                hint="use the run or the weights that the program was exported from",
            )
    return _read_torch(path)


def without_prefixes(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Remove prefixes that wrappers add to all names, such as DDP's `module.` and torch.compile's `_orig_mod.`."""
    names = list(state)
    for _ in range(len(_PREFIXES)):
        for prefix in _PREFIXES:
            if names and all(name.startswith(prefix) for name in names):
                names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, state.values(), strict=True))


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    """Read all shards that an index lists. transformers splits the weights of a large model into shards."""
    try:
        shard_of = parse_json(index.read_bytes())["weight_map"]
        names = sorted(set(shard_of.values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{index} is not an index of weight shards: {error!r}", hint=_DOWNLOAD_AGAIN) from error
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{index} lists the shard {name!r}, but shards must be .safetensors files next to the index",
                hint="save the model as safetensors, with model.save_pretrained(FOLDER) from transformers",
            )
        tensors |= read_tensors(index.with_name(name))
    if missing_names := shard_of.keys() - tensors.keys():
        raise UserError(
            f"the shards of {index} lack {len(missing_names)} of the {len(shard_of)} listed tensors, such as "
            f"{min(missing_names)}",
            hint=_DOWNLOAD_AGAIN,
        )
    return tensors


def _read_torch(path: Path) -> dict[str, torch.Tensor]:
    try:
        with torch.serialization.safe_globals(_ALLOWED_GLOBALS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except _UnpicklingError as error:
        # Do not show torch's message, because it suggests executing the code in the file.
        reason, _, global_name = "it is not a tensor file", *str(error).partition("GLOBAL ")[1:]
        if global_name:
            reason = f"it contains {global_name.split()[0]}, but only tensors and plain values are loaded"
        raise UserError(
            f"{path} was not loaded: {reason}",
            hint="save only the state dict, if you trust the file: torch.save(model.state_dict(), FILE)",
        ) from error
    except Exception as error:
        raise UserError(
            f"the weights {path} are damaged or truncated: {first_line(error)}", hint=_DOWNLOAD_AGAIN
        ) from error
    for name in _STATE_DICT_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    tensors = {}
    if isinstance(content, Mapping):
        tensors = {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise UserError(
            f"there are no tensors in {path}",
            hint=f"use a file that contains a state dict, at the top level or under {', '.join(_STATE_DICT_KEYS)}",
        )
    return tensors


def _is_printable(head: bytes) -> bool:
    """Return True if the first bytes of a file are printable text, which is never true of a tensor file."""
    try:
        # Decode incrementally, because the last character may be truncated.
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter.isspace() for letter in text)


def _read_openai_archive(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest not in openai_digests():
        raise UserError(
            f"{path} was not loaded: OpenAI did not publish this TorchScript program (SHA-256 {digest[:12]}...)",
            hint="use open_clip's copy, such as ViT-B-16:openai; or, if you trust the file, save only the state dict: "
            "torch.save(torch.jit.load(FILE, 'cpu').state_dict(), OTHER)",
        )
    return dict(torch.jit.load(path, map_location="cpu").state_dict())


def openai_digests() -> frozenset[str]:
    """Return the SHA-256 of each archive that OpenAI published. The URLs in open_clip's list contain these hashes."""
    from open_clip.pretrained import get_pretrained_url, list_pretrained_models_by_tag

    urls = [get_pretrained_url(name, "openai") for name in list_pretrained_models_by_tag("openai")]
    return frozenset(url.split("/")[-2] for url in urls if "openaipublic" in url)


MODEL_FILES = ("config.json", *PROCESSOR_FILES, "model*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")


def hub_folder(name: str, *, files: Sequence[str] = (*MODEL_FILES, *TOKENIZER_FILES), what: str = "weights") -> Path:
    """Return the local folder of a model from the Hugging Face Hub. Download the model unless it is cached.

    Args:
        name: Name of the model on the Hub.
        files: Patterns of the files to download.
        what: Content of the folder, for the error's hint.

    Raises:
        UserError: The model is not cached and cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with hub_if_reachable():
            return Path(snapshot_download(name, allow_patterns=[*files]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"there is no folder {name}, and the Hugging Face model {name} is neither cached nor downloadable: "
            f"{str(error).splitlines()[0]}",
            hint=f"check the network, fill the cache on a machine with network access, or use a folder with {what}",
        ) from error
