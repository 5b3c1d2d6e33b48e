"""Folders of exports, which appear under their name when they are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clipmill.manifests.locks import try_lock
from clipmill.manifests.publish import TEMPORARY_PREFIX, rename, target_of, temporary_path


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, and rename it to `folder` once the block has succeeded; remove what killed runs left.

    Where `folder` is a link, it is the folder that it points to.
    """
    folder = folder.resolve()
    for left in folder.parent.glob(f"{TEMPORARY_PREFIX}*"):
        if target_of(left.name) == folder.name and (held := try_lock(left)) is not None:
            shutil.rmtree(left)
            os.close(held)
    temporary = temporary_path(folder)
    temporary.mkdir(parents=True)
    held = try_lock(temporary)
    try:
        yield temporary
        os.sync()  # thousands of files
        if folder.exists():
            old = rename(folder, temporary_path(folder))
            rename(temporary, folder)
            shutil.rmtree(old)
        else:
            rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if held is not None:
            os.close(held)
