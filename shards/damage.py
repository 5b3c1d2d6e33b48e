"""The errors that say: this file of a shard set is not what was written."""

from pathlib import Path

from manifests.errors import ClipmillError


class Damaged(ClipmillError):
    """A file of the shard set cannot be trusted.

    Args:
        path: the file.
        why: what is wrong with it, in a few words.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class DamagedCommit(Damaged):
    """A commit record that is damaged or missing, or that another program wrote."""

    @property
    def shard_id(self) -> int:
        """Number of the shard, from the record's file name."""
        return int(self.path.stem)


class DamagedContents(Damaged):
    """A contents.json that is damaged, or a file whose checksum in it does not match."""


class DamagedIndex(Damaged):
    """An index that is damaged, or that another program wrote."""


class DamagedTar(Damaged):
    """A tar that is shorter than its index says."""
