"""Folders of models on the Hugging Face Hub, in its cache or downloaded."""

from collections.abc import Sequence
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.manifests.hub import hub_if_reachable
from clipmill.train.models.hugging_face import PROCESSOR_FILES

MODEL_FILES = ("config.json", *PROCESSOR_FILES, "model*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")


def hub_folder(name: str, *, files: Sequence[str] = (*MODEL_FILES, *TOKENIZER_FILES), what: str = "weights") -> Path:
    """The folder of a model of the Hub, from its cache, else downloaded.

    Args:
        files: patterns of the files that are needed.
        what: what the folder has, for the hint.

    Raises:
        UserError: it is in neither.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with hub_if_reachable():
            return Path(snapshot_download(name, allow_patterns=[*files]))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"there is no folder {name}, and no model of that name in Hugging Face's cache or to download: "
            f"{str(error).splitlines()[0]}",
            hint=f"check the network, fill the cache on a machine that has one, or name a folder with {what}",
        ) from error
