"""Errors for files of a shard set whose content is not what was written."""

from pathlib import Path

from clipmill.manifests.errors import ClipmillError


class Damaged(ClipmillError):
    """A file of the shard set cannot be trusted.

    Args:
        path: the file.
        why: short description of the damage.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class DamagedCommit(Damaged):
    """A commit record is damaged, missing, or written by another program."""

    @property
    def shard_id(self) -> int:
        """Shard ID, from the record's file name."""
        return int(self.path.stem)


class DamagedContents(Damaged):
    """contents.json is damaged, or a file does not match its checksum in contents.json."""


class DamagedIndex(Damaged):
    """An index is damaged, or was written by another program."""


class DamagedTar(Damaged):
    """A tar is shorter than its index records."""
