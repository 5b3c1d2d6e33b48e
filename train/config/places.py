"""Folders of data and files of weights that flags name, before torch is imported, which takes seconds.

Only whether anything is there is looked at. What opens it says what else is wrong.
"""

import os
import re
from pathlib import Path

from clipmill.manifests.errors import UserError
from clipmill.train.config.shards import is_local_folder

NAME_AND_TAG = re.compile(r"([\w.@-]+):([\w.-]+)")
HUB_PREFIX = "hf:"  # of the name of a model on the Hugging Face Hub


def is_name_and_tag(weights: str) -> bool:
    """Whether weights are named as NAME:TAG of open_clip, or as hf:NAME of the Hugging Face Hub."""
    return NAME_AND_TAG.fullmatch(weights) is not None or weights.startswith(HUB_PREFIX)


def require_places(*, shards: tuple[str | None, ...] = (), init: tuple[str, ...] = ()) -> None:
    """Raise a UserError for a local data folder, or initial weights, that do not exist.

    Of several processes none looks: where folders differ from node to node, the ranks have to agree on the mistake.
    """
    if "RANK" in os.environ:
        return
    for address in shards:
        if address is not None and is_local_folder(address) and not Path(address).exists():
            raise UserError(
                f"there is no data folder {address}",
                hint="name the data folder that prep made with --shards",
                flags=("--shards",),
            )
    for weights in init:
        if not is_name_and_tag(weights) and not Path(weights).exists():
            raise UserError(
                f"cannot read the weights {weights}: No such file or directory", hint="name a file or a folder"
            )


def require_named_weights(weights: str | Path, *, takes_tags: bool) -> None:
    """Raise a UserError if weights are neither at an existing path nor named as NAME:TAG."""
    if not Path(weights).exists() and not is_name_and_tag(str(weights)):
        raise no_weights(weights, takes_tags=takes_tags)


def no_weights(weights: str | Path, *, takes_tags: bool) -> UserError:
    """The error for a place without weights.

    Args:
        takes_tags: whether a NAME:TAG of open_clip would do.
    """
    kinds = ["a run (a training command's --out)", "an exported folder", "a file of weights"]
    kinds += ["a NAME:TAG of open_clip", "hf:NAME of the Hugging Face Hub"] if takes_tags else []
    return UserError(
        f"there is no run in {weights}, and there are no other weights",
        hint=f"name {', '.join(kinds[:-1])}, or {kinds[-1]}",
    )
