"""Image-text-to-text models of transformers: where one is, and the hash of its files. This module imports no torch."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.prep.core.request import model_folder

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
    directory = model_folder(name, files=_FILES, what="model", asked="--model", hint=_SUGGESTION)
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
    is_local = Path(name).expanduser().is_dir()
    return Model(
        directory.name if is_local else name, str(directory) if is_local else name, directory, digest.hexdigest()
    )
