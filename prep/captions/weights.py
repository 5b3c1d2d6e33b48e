"""Image-text-to-text models of transformers: where one is, and the hash of its files. This module imports no torch."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.hub import hub_if_reachable

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_SUGGESTION = (
    "give a folder written by save_pretrained of model and processor, or a name such as Qwen/Qwen3-VL-2B-Instruct"
)


@dataclass(frozen=True)
class Model:
    """A model that was found.

    Attributes:
        name: name given by the user; for a folder only its last component.
        source: name or absolute path, with which another machine finds it.
        sha256: hash of configuration, processor, tokenizer and weights.
    """

    name: str
    source: str
    directory: Path
    sha256: str


@lru_cache(maxsize=1)
def find_model(name: str) -> Model:
    """Find a model on this machine, or download it, and hash its files; once per process.

    Raises:
        UserError: it does not exist, or lacks weights or a processor.
    """
    local = Path(name).expanduser()
    directory = local.resolve() if local.is_dir() else _downloaded(name)
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise UserError(f"{directory} has no config.json and *.safetensors", hint=_SUGGESTION)
    if not any((directory / file).is_file() for file in _PROCESSORS):
        raise UserError(f"{directory} has no processor ({' or '.join(_PROCESSORS)})", hint=_SUGGESTION)
    digest = hashlib.sha256()
    try:
        for path in sorted({path for pattern in _FILES for path in directory.glob(pattern)}):
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}", hint=_SUGGESTION) from None
    is_local = local.is_dir()
    return Model(
        directory.name if is_local else name, str(directory) if is_local else name, directory, digest.hexdigest()
    )


def _downloaded(name: str) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise UserError(f"the model folder {name} (asked for by --model) does not exist", hint=_SUGGESTION)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise UserError("huggingface_hub is not installed", hint="install clipmill[columns]") from None
    try:
        with hub_if_reachable():
            return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    # The exceptions for network, cache and server errors all derive from these.
    except (OSError, HFValidationError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f'the model "{name}" cannot be downloaded from the Hugging Face Hub: {reason}', hint=_SUGGESTION
        ) from None
