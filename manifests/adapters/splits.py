"""The three splits, and the names that datasets use for them."""

import re
from pathlib import Path

from clipmill.manifests.errors import UserError

TRAIN = "train"
VAL = "val"
TEST = "test"
_NAMES = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validate", "validation"), VAL),
    **dict.fromkeys(("test", "testing"), TEST),
}
_WORD = re.compile(r"[a-z]+")


def find_split(name: str) -> str | None:
    """Return the split that a dataset calls `name` (`validation` is `val`); None if unknown."""
    return _NAMES.get(name.strip().lower())


def split_in_file_name(file_name: str) -> str:
    """Return the split that occurs as a separate word in a file name (`EPIC_100_validation.csv`); train by default."""
    words = _WORD.findall(file_name.lower())
    return next((_NAMES[word] for word in words if word in _NAMES), TRAIN)


def split_of_list(path: Path, *, example: str) -> str:
    """The split that the name of a list of test or training videos has; UserError if it has none.

    Args:
        example: the published name of such a list.
    """
    if not any(word in _NAMES for word in _WORD.findall(path.name.lower())):
        raise UserError(
            f"the name of {path} does not say of which split its videos are",
            hint=f"rename it, with test, val or train as a word, such as {example}",
        )
    return split_in_file_name(path.name)


def split_of_folders(relative_path: str) -> str:
    """Return the split that the innermost matching folder is named after (`val/a/b.mp4`); train by default."""
    folders = relative_path.split("/")[:-1]
    return next((_NAMES[folder.lower()] for folder in reversed(folders) if folder.lower() in _NAMES), TRAIN)
