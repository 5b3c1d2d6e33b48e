"""Reader for a variant: its committed shards, the members of its samples, and lookup by key."""

import os
import shlex
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.mapped_files import OPEN_MAPS
from clipmill.manifests.publish import parse_json, read_record
from clipmill.shards.columns import VIDEO, command_for, how_to_make
from clipmill.shards.commit_table import file_sha256, open_commits, read_contents
from clipmill.shards.commits import Commit, ShardFiles
from clipmill.shards.dataset import current_variant, list_variants, no_shards, variant_dir
from clipmill.shards.format import CONTENTS_FILE, RECIPE_FILE
from clipmill.shards.index import extensions_of, open_index, open_index_content
from clipmill.shards.opening import DamagedContents, DamagedIndex, open_lock, open_regular, scan
from clipmill.shards.packets import PacketTables
from clipmill.shards.tars import LocalTars, TarBytes, TarFiles

# Maximum number of open shards per variant, 2.5 kB each. The shard that was opened first is dropped first.
MAX_KEPT_SHARDS = 4096
_RECIPE_HINT = "to rewrite it, run the command that created the variant again with the same settings"


class CommittedShard:
    """One committed shard. Thread-safe.

    Its index is mapped on demand, and may be unmapped again if too many files are mapped (OPEN_MAPS).
    """

    def __init__(
        self, directory: Path, *, commit: Commit, files: ShardFiles, tars: TarBytes, verified: dict[int, int]
    ) -> None:
        self.commit = commit
        self.shard_id = commit.shard_id
        self.split = commit.split
        self.num_samples = files.num_samples
        self._directory, self._files = directory, files
        self.tar_bytes, self.tar_sha256 = files.tar_bytes, files.tar_sha256
        self._tars = tars
        # Each shard has its own lock. Up to Python 3.11, `cached_property` has one lock per class, so a shard whose
        # files do not respond would block all others. `cached_property` is used only where no file is opened.
        self._lock = threading.Lock()
        self._index: pa.Table | None = None
        self._packet_tables: PacketTables | None = None
        # Identity of the verified index file, by shard ID. The dict belongs to the variant and outlives this object.
        self._verified = verified

    @cached_property
    def tar_path(self) -> Path:
        """Path of the tar."""
        return self._directory / self._files.tar

    @property
    def tar_name(self) -> str:
        """Name of the tar in messages: its path or URL."""
        return self._tars.name(self.tar_path)

    @cached_property
    def index_path(self) -> Path:
        """Path of the index."""
        return self._directory / self._files.index

    @property
    def index(self) -> pa.Table:
        """Index of the shard, verified against the commit and memory-mapped on first use.

        clipmill.shards.format defines its columns.

        Raises:
            DamagedIndex: The file is not the committed file, or is not an index of this format.
            OSError: The file cannot be read.
        """
        index = self._index
        if index is None:
            with open_lock(self._lock, self.index_path):
                index = self._index
                if index is None:
                    self.require_committed_index()
                    index = self._index = open_index(self.index_path)
        OPEN_MAPS.note_use(self)
        return index

    def close(self) -> bool:
        """Drop the index, which is unmapped once it is no longer in use, and mapped again when needed."""
        self._index = self._packet_tables = None
        OPEN_MAPS.note_close(self)
        return True

    @property
    def packet_tables(self) -> PacketTables:
        """Packet tables of a `video` shard, after the index has been verified; errors as for `index`."""
        tables = self._packet_tables
        if tables is not None:
            OPEN_MAPS.note_use(self)
            return tables
        with open_lock(self._lock, self.index_path):
            tables = self._packet_tables
            if tables is None:
                self.require_committed_index()  # before mapping, because it replaces a damaged copy of a remote index
                tables = self._packet_tables = PacketTables(*open_index_content(self.index_path))
        OPEN_MAPS.note_use(self)
        return tables

    def require_committed_index(self) -> None:
        """Verify the index against its commit. The file is read completely, but again only after it has changed.

        Raises:
            DamagedIndex: The index is not the committed file.
            OSError: The index cannot be read.
        """
        if self.shard_id in self._verified and _identity(self.index_path) == self._verified[self.shard_id]:
            return
        sha256 = self._files.index_sha256
        self._tars.provide(self.index_path, size_bytes=self._files.index_bytes, sha256=sha256)
        identity = _identity(self.index_path)
        if scan(self.index_path).sha256 != sha256:
            raise DamagedIndex(self.index_path, "its content differs from the commit")
        self._verified[self.shard_id] = identity

    @property
    def extensions(self) -> tuple[str, ...]:
        """Extensions of every sample's members, in member order."""
        return extensions_of(self.index)

    def member_range(self, row: int, extension: str) -> tuple[int, int]:
        """Return (offset, size) in bytes of a member's payload in the tar."""
        offset = self.index.column(f"{extension}_offset")[row].as_py()
        return offset, self.index.column(f"{extension}_size")[row].as_py()

    def read(self, row: int, extension: str) -> bytes:
        """Read the payload of one member, without verifying its checksum (see clipmill.shards.verify)."""
        return self.read_range(*self.member_range(row, extension))

    def read_range(self, offset: int, size: int) -> bytes:
        """Read `size` bytes of the tar, starting at `offset`; raises DamagedTar if the tar is too short."""
        return self._tars.read(self.tar_path, offset, size)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges (offset, size) of the tar; raises as `read_range` does."""
        return self._tars.read_ranges(self.tar_path, ranges)

    @property
    def gap_bytes(self) -> int:
        """Length of the gap between two ranges up to which reading it is cheaper than skipping it."""
        return self._tars.gap_bytes


def _identity(path: Path) -> int:
    with os.fdopen(open_regular(path), "rb") as file:  # this fetches the file from a bucket
        status = os.fstat(file.fileno())
    return hash((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


def open_shard(variant_directory: Path, commit: Commit) -> CommittedShard:
    """Open the shard of a single commit.

    Raises:
        ValueError: The commit has no files.
    """
    if commit.files is None:
        raise ValueError(f"shard {commit.shard_id} has no files")
    return CommittedShard(variant_directory, commit=commit, files=commit.files, tars=LocalTars(), verified={})


class Variant:
    """A snapshot of one variant of one column, with the commits that exist when it is opened.

    Args:
        tars: Reader for the bytes of tars; None if the tars are in the same folder as the indexes.

    Attributes:
        leave_mark: Function that marks the folder of a variant when it is opened, and returns an object that keeps the
            mark; None outside of `train` (`clipmill.shards.marks`).
    """

    leave_mark: ClassVar[Callable[[Path], object | None] | None] = None

    def __init__(self, directory: Path, *, tars: TarBytes | None = None) -> None:
        self.directory = directory
        self.mark_user: object | None = None
        self.commits, self.damaged = open_commits(directory)  # a shard with a damaged record is unreadable
        self.contents_damage: DamagedContents | None = None
        self._file_sha256: Mapping[str, str] = {}
        try:
            contents = read_contents(directory)
            self._file_sha256 = {} if contents is None else contents.files
        except DamagedContents as error:
            self.contents_damage = error
        self._tars = tars or LocalTars()
        self._opened: dict[int, CommittedShard] = {}
        self._verified: dict[int, int] = {}
        self._lock = threading.Lock()
        self._lookup: tuple[list[CommittedShard], KeyLookup] | None = None

    @classmethod
    def open(
        cls, data_dir: Path, *, column: str = VIDEO, variant: str | None = None, tars: TarBytes | None = None
    ) -> "Variant":
        """Open a variant of `column`: the current one by default.

        Raises:
            UserError: The variant does not exist.
        """
        name = variant or current_variant(data_dir, column)
        if name is None:
            raise no_shards(data_dir, column)
        hint = f"run {how_to_make(column, data_dir, name)}"
        directory = variant_dir(data_dir, column, name)
        if not directory.is_dir():
            known = ", ".join(list_variants(data_dir, column)) or "none"
            raise UserError(
                f"{data_dir} has no variant {name!r} of {column}", hint=f"available variants: {known}; or {hint}"
            )
        mark_user = None if cls.leave_mark is None else cls.leave_mark(directory)  # before the commits are read
        opened = cls(directory, tars=tars)
        opened.mark_user = mark_user
        return opened

    def require_complete(self) -> "Variant":
        """Return self if the variant is readable: it has commits, and no commit is damaged or missing.

        Raises:
            UserError: There are no commits, or a shard is unreadable, so its samples would be missing without notice.
        """
        if not self.commits and not self.damaged:
            folder = self.directory.parent
            hint = f"run {how_to_make(folder.name, folder.parent, self.directory.name)}"
            raise UserError(f"{self.directory} has no committed shards", hint=hint)
        if self.damaged:
            num_more = len(self.damaged) - 1
            more = f"; {count_noun(num_more, 'more damaged commit record')}" if num_more else ""
            raise UserError(f"{self.damaged[0]}{more}", hint=self._repair_hint())
        if self.contents_damage is not None:
            raise UserError(str(self.contents_damage), hint=self._repair_hint())
        return self

    def _repair_hint(self) -> str:
        data_dir, column = self.directory.parent.parent, self.directory.parent.name
        verify = f"prep verify --column {column} --data {shlex.quote(str(data_dir))}"
        command = command_for(column, self.directory.name)
        settings = f"with the settings of {self.directory.name}"
        return f"to repair it, run `prep {command}` {settings}; `{verify}` prints the command"

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Settings that produced the variant, read on first use.

        Raises:
            UserError: recipe.json is missing or damaged.
        """
        path = self.directory / RECIPE_FILE
        try:
            content = read_record(path)
            recipe = parse_json(content)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}", hint=_RECIPE_HINT) from error
        recorded = self._file_sha256.get(RECIPE_FILE)
        if recorded is not None and recorded != file_sha256(content):
            raise UserError(f"{path} is damaged: its checksum does not match {CONTENTS_FILE}", hint=_RECIPE_HINT)
        if not isinstance(recipe, dict):
            raise UserError(f"{path} is not a valid recipe", hint=_RECIPE_HINT)
        return recipe

    def shards(self, split: str | None = None) -> list[CommittedShard]:
        """Return the committed shards ordered by shard ID, of one split or of all splits."""
        commits = (commit for commit in self.commits.values() if commit.files is not None)
        return [self._open_shard(commit) for commit in commits if split is None or commit.split == split]

    def shard(self, shard_id: int) -> CommittedShard:
        """Return a committed shard; raise KeyError if no committed shard has this ID."""
        shard = self._opened.get(shard_id)
        if shard is None:
            shard = self._open_shard(self.commits[shard_id])
        while len(self._opened) > MAX_KEPT_SHARDS:
            with suppress(StopIteration, RuntimeError):  # another thread has just changed the dict
                self._opened.pop(next(iter(self._opened)), None)
        return shard

    def _open_shard(self, commit: Commit) -> CommittedShard:
        shard = self._opened.get(commit.shard_id)
        if shard is None:
            if commit.files is None:
                raise KeyError(commit.shard_id)
            shard = CommittedShard(
                self.directory, commit=commit, files=commit.files, tars=self._tars, verified=self._verified
            )
        # Threads that open a shard at the same time get the same object.
        return self._opened.setdefault(commit.shard_id, shard)

    @cached_property
    def tar_files(self) -> TarFiles:
        """The tars of the committed shards, ordered by shard ID."""
        rows = self.commits.rows_with_files().combine_chunks()
        shard_ids, sizes, num_samples = (rows[name].to_numpy() for name in ("shard_id", "tar_bytes", "num_samples"))
        names = rows["tar"].chunk(0) if len(rows) else pa.array([], pa.string())
        return TarFiles(self.directory, shard_ids, names, sizes, int(num_samples.sum()))

    @property
    def num_shards(self) -> int:
        """Number of committed shards."""
        return len(self.tar_files)

    @property
    def num_samples(self) -> int:
        """Number of samples in the committed shards, from the commits."""
        return self.tar_files.num_samples

    def find(self, key: str) -> tuple[CommittedShard, int]:
        """Return the shard and row of the sample `key`. The first call reads the keys of all shards.

        Raises:
            KeyError: No committed shard contains the key.
        """
        with self._lock:
            if self._lookup is None:
                shards = self.shards()
                self._lookup = shards, KeyLookup([shard.index for shard in shards])
        number, row = self._lookup[1].find(key)
        return self._lookup[0][number], row

    def iterate(self, split: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the samples in order as dicts with `__key__` and a payload per extension, as WebDataset does."""
        for shard in self.shards(split):
            for row, key in enumerate(shard.index.column("key")):
                members = {extension: shard.read(row, extension) for extension in shard.extensions}
                yield {"__key__": key.as_py(), **members}


class KeyLookup:
    """Sorted keys of many shards' indexes in one Arrow array, which avoids a Python object per key."""

    def __init__(self, indexes: Sequence[pa.Table]) -> None:
        keys = pa.chunked_array([index.column("key").chunk(0) for index in indexes], type=pa.string())
        order = pc.sort_indices(keys)
        self._keys = keys.cast(pa.large_string()).combine_chunks().take(order)
        self._positions = order.to_numpy()
        self._first_rows = [0]
        for index in indexes:
            self._first_rows.append(self._first_rows[-1] + index.num_rows)

    def find(self, key: str) -> tuple[int, int]:
        """Return the number of the index that contains `key`, and the row; raise KeyError if `key` is missing."""
        low = bisect_left(self._keys, key, key=lambda scalar: str(scalar.as_py()))
        if low == len(self._keys) or self._keys[low].as_py() != key:
            raise KeyError(key)
        position = int(self._positions[low])
        number = bisect_right(self._first_rows, position) - 1
        return number, position - self._first_rows[number]
