"""Reading a variant: its committed shards, any member of any sample, and the place of a key."""

import shlex
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from manifests.errors import UserError
from manifests.json_text import parse_json
from manifests.publish import read_record
from shards.commits import Commit, ShardFiles, read_commits
from shards.contents import Contents, file_sha256, read_contents
from shards.damage import DamagedCommit, DamagedContents, DamagedIndex
from shards.dataset import current_variant, list_variants, variant_dir
from shards.format import CONTENTS_FILE, RECIPE_FILE
from shards.index import extensions_of, open_index
from shards.opening import turn_with
from shards.packets import PacketTables
from shards.scan import scan
from shards.tars import LocalTars, TarBytes

_RECIPE_HINT = "the command that made the data writes it anew: run it again with the same settings"


class CommittedShard:
    """One shard that a commit vouches for. Safe to use from many threads."""

    def __init__(self, variant_directory: Path, *, commit: Commit, files: ShardFiles, tars: TarBytes) -> None:
        self.commit = commit
        self.shard_id = commit.shard_id
        self.split = commit.split
        self.num_samples = files.num_samples
        self.tar_path = variant_directory / files.tar
        self.index_path = variant_directory / files.index
        self._index_sha256 = files.index_sha256
        self._tars = tars
        # One lock a shard: up to Python 3.11 `cached_property` has one for all objects of a class, and a shard whose
        # files do not answer would hold up the others.
        self._lock = threading.Lock()
        self._index: pa.Table | None = None
        self._packet_tables: PacketTables | None = None

    @property
    def index(self) -> pa.Table:
        """The index, mapped on first use; columns as in `shards.format`.

        Raises:
            DamagedIndex: the file is no index of this format.
            OSError: it cannot be read.
        """
        if self._index is None:
            with turn_with(self._lock, self.index_path):
                if self._index is None:
                    self._index = open_index(self.index_path)
        return self._index

    @property
    def packet_tables(self) -> PacketTables:
        """The packet tables of a `video` shard, from an index that was compared with its commit first.

        Raises:
            DamagedIndex: the index is not the one that was committed.
            OSError: it cannot be read.
        """
        index = self.index
        if self._packet_tables is None:
            with turn_with(self._lock, self.index_path):
                if self._packet_tables is None:
                    self.require_committed_index()
                    self._packet_tables = PacketTables(index)
        return self._packet_tables

    def require_committed_index(self) -> None:
        """Reads the index file whole and compares it with its commit.

        Raises:
            DamagedIndex: it is not the file that was committed.
            OSError: it cannot be read.
        """
        if scan(self.index_path).sha256 != self._index_sha256:
            raise DamagedIndex(self.index_path, "it is not the file that was committed")

    @property
    def extensions(self) -> tuple[str, ...]:
        """Extensions of every sample's members, in order."""
        return extensions_of(self.index)

    def member_range(self, row: int, extension: str) -> tuple[int, int]:
        """(offset, size) in bytes of a member's payload in the tar."""
        offset = self.index.column(f"{extension}_offset")[row].as_py()
        return offset, self.index.column(f"{extension}_size")[row].as_py()

    def read(self, row: int, extension: str) -> bytes:
        """The payload of one member; its checksum is not compared (shards.verify does)."""
        return self.read_range(*self.member_range(row, extension))

    def read_range(self, offset: int, size: int) -> bytes:
        """`size` bytes of the tar from `offset`.

        Raises:
            DamagedTar: the tar ends before.
        """
        return self._tars.read(self.tar_path, offset, size)

    @property
    def gap_bytes(self) -> int:
        """What lies between two ranges is better read along when it is shorter than this."""
        return self._tars.gap_bytes


def open_shard(variant_directory: Path, commit: Commit) -> CommittedShard:
    """The shard of one commit, by itself.

    Raises:
        ValueError: the commit has no files.
    """
    if commit.files is None:
        raise ValueError(f"shard {commit.shard_id} has no files")
    return CommittedShard(variant_directory, commit=commit, files=commit.files, tars=LocalTars())


class Variant:
    """One variant of one column, as its commits have it when it is opened.

    Args:
        tars: how bytes of its tars are read; None where they lie beside the indexes.
    """

    def __init__(self, directory: Path, *, tars: TarBytes | None = None) -> None:
        self.directory = directory
        found = read_commits(directory)
        self.commits: dict[int, Commit] = found.commits
        self.damaged: tuple[DamagedCommit, ...] = found.damaged  # records whose shards cannot be read
        self.contents_damage: DamagedContents | None = None
        self._contents: Contents | None = None
        try:
            self._contents = read_contents(directory)
        except DamagedContents as error:
            self.contents_damage = error
        tars = tars or LocalTars()
        self._shards = [
            CommittedShard(directory, commit=commit, files=commit.files, tars=tars)
            for commit in self.commits.values()
            if commit.files is not None
        ]
        self._lock = threading.Lock()
        self._lookup: KeyLookup | None = None

    @classmethod
    def open(
        cls, data_dir: Path, *, column: str = "video", variant: str | None = None, tars: TarBytes | None = None
    ) -> "Variant":
        """Opens a variant of `column`: the current one, unless `variant` names another.

        Raises:
            UserError: there is no such variant, or nothing is committed in it.
        """
        flags = {"video": "chunk", "latents": "latents --vae NAME", "text": "text --clip NAME"}
        command = flags.get(column, column)
        hint = f"run prep {command} --data {shlex.quote(str(data_dir))}"
        name = variant or current_variant(data_dir, column)
        if name is None:
            raise UserError(f"{data_dir} holds no {column} shards", hint=hint)
        directory = variant_dir(data_dir, column, name)
        if not directory.is_dir():
            there = ", ".join(list_variants(data_dir, column)) or "none"
            raise UserError(f"{data_dir} has no variant {name!r} of {column}", hint=f"there are: {there}; or {hint}")
        opened = cls(directory, tars=tars)
        if not opened.commits and not opened.damaged:
            raise UserError(f"no shard of {directory} is committed", hint=hint)
        return opened

    def whole(self) -> "Variant":
        """Itself, where no commit is damaged or missing.

        Raises:
            UserError: one is, so that its shard's samples would be missing without a word.
        """
        if self.damaged:
            num_more = len(self.damaged) - 1
            more = f", and so are {num_more} more" if num_more else ""
            raise UserError(f"{self.damaged[0]}{more}", hint=self._repair_hint("those shards are made again by"))
        if self.contents_damage is not None:
            raise UserError(str(self.contents_damage), hint=self._repair_hint("it is written again by"))
        return self

    def _repair_hint(self, what: str) -> str:
        data_dir, column = self.directory.parent.parent, self.directory.parent.name
        verify = f"prep verify --column {column} --data {shlex.quote(str(data_dir))}"
        command = "chunk" if column == "video" else column
        return f"{what} `prep {command}` with the settings of {self.directory.name}; `{verify}` prints that command"

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The settings that made the variant.

        Raises:
            UserError: recipe.json is missing or damaged.
        """
        path = self.directory / RECIPE_FILE
        try:
            content = read_record(path)
            recipe = parse_json(content)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}", hint=_RECIPE_HINT) from error
        recorded = None if self._contents is None else self._contents.files.get(RECIPE_FILE)
        if recorded is not None and recorded != file_sha256(content):
            raise UserError(f"{path} is damaged: its checksum does not match {CONTENTS_FILE}", hint=_RECIPE_HINT)
        if not isinstance(recipe, dict):
            raise UserError(f"{path} is not a recipe", hint=_RECIPE_HINT)
        return recipe

    def shards(self, split: str | None = None) -> list[CommittedShard]:
        """Committed shards in order of their ids, of one split or of all."""
        return [shard for shard in self._shards if split is None or shard.split == split]

    def find(self, key: str) -> tuple[CommittedShard, int]:
        """Shard and row of the sample `key`. The first call reads the keys of all shards.

        Raises:
            KeyError: no committed shard has it.
        """
        with self._lock:
            if self._lookup is None:
                self._lookup = KeyLookup(self._shards)
        return self._lookup.find(key)

    def iterate(self, split: str | None = None) -> Iterator[dict[str, Any]]:
        """Samples in order, as WebDataset has them: `__key__`, and a payload for each extension."""
        for shard in self.shards(split):
            for row, key in enumerate(shard.index.column("key")):
                members = {extension: shard.read(row, extension) for extension in shard.extensions}
                yield {"__key__": key.as_py(), **members}


class KeyLookup:
    """Sorted keys of many shards in one Arrow array: a million keys take their own bytes, not a million objects."""

    def __init__(self, shards: list[CommittedShard]) -> None:
        self._shards = shards
        keys = pa.chunked_array([shard.index.column("key").chunk(0) for shard in shards], type=pa.string())
        order = pc.sort_indices(keys)
        self._keys = keys.cast(pa.large_string()).combine_chunks().take(order)
        self._positions = order.to_numpy()
        self._first_rows = [0]
        for shard in shards:
            self._first_rows.append(self._first_rows[-1] + shard.index.num_rows)

    def find(self, key: str) -> tuple[CommittedShard, int]:
        """Shard and row of `key`, by bisection; KeyError where there is none."""
        low = bisect_left(self._keys, key, key=_text)
        if low == len(self._keys) or self._keys[low].as_py() != key:
            raise KeyError(key)
        position = int(self._positions[low])
        number = bisect_right(self._first_rows, position) - 1
        return self._shards[number], position - self._first_rows[number]


def _text(scalar: pa.Scalar) -> str:
    return str(scalar.as_py())
