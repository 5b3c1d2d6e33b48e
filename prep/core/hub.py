"""Models that a flag names: a folder on this machine, or a model on the Hugging Face Hub, downloaded once."""

from collections.abc import Sequence
from pathlib import Path

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.hub import hub_if_reachable


def model_folder(name: str, *, files: Sequence[str], what: str, asked: str, hint: str) -> Path:
    """Return the folder of a model, absolute if it is one on this machine.

    Args:
        files: patterns of the files to download.
        what: what the model is, for messages: "VAE", "model"; "" without a word.
        asked: the flag that asks for it, with its value where that is not `name`.
        hint: of the error.

    Raises:
        UserError: there is no such folder, and no such model on the Hub or in its cache.
    """
    local, noun = Path(name).expanduser(), f"{what} " if what else ""
    if local.is_dir():
        return local.resolve()
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise UserError(f"the {noun}folder {name} (asked for by {asked}) does not exist", hint=hint)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise UserError("huggingface_hub is not installed", hint="install clipmill[columns]") from None
    try:
        with hub_if_reachable():
            return Path(snapshot_download(name, allow_patterns=list(files)))
    # The exceptions for network, cache and server errors all derive from these.
    except (OSError, HFValidationError, ValueError) as error:
        the = f"the {what} " if what else ""
        raise UserError(
            f'{the}"{name}" cannot be downloaded from the Hugging Face Hub: {first_line(error)}', hint=hint
        ) from None
