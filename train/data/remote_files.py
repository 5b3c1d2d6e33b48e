"""The small files of a remote data folder, copied to this machine: dataset.json, the manifest, commits and indexes.

The processes that a launcher starts together on a machine use one copy: the first of them copies under a lock, the
others wait for it and read what is there. A process without a launcher copies what has changed each time that it opens
the folder.

Of a column these are contents.json, recipe.json, the commits and the tables that `prep` merges them into. Only those
records of commits are copied that differ from their table, and only those indexes that the table of chunks lacks, to be
added to its copy; any other index is copied when its shard is first read. Whatever has a checksum is verified by it.
Web servers are not listed: contents.json names the shards, and during a first run the page of the directory does.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from clipmill.manifests.errors import DISK_ERRORS, UserError
from clipmill.manifests.locks import hold_lock
from clipmill.manifests.publish import publish_bytes
from clipmill.manifests.schema import MANIFEST_FILE
from clipmill.manifests.storage.objects import ObjectInfo, Objects
from clipmill.manifests.store import CAPTIONS_FILE, MANIFEST_FOLDER, MAPPED_FILES, VIDEOS_FILE, describe, staged_path
from clipmill.shards.chunk_table import has_chunk_table, missing_parts, shards_to_merge, update_chunk_table
from clipmill.shards.columns import command_for, how_to_make
from clipmill.shards.commit_table import commit_folders, confirm, listed_contents, open_commit_table
from clipmill.shards.commits import Commit, commit_bytes, commits_in
from clipmill.shards.dataset import current_variant
from clipmill.shards.format import (
    COMMIT_TABLE_FILE,
    COMMITS_FOLDER,
    CONTENTS_FILE,
    DATASET_FILE,
    RECIPE_FILE,
    commit_name,
    in_folder,
)
from clipmill.shards.opening import scan
from clipmill.shards.reader import Variant
from clipmill.shards.scores import CHUNKS_FILE, score_table_problem

NUM_AT_ONCE = 32
_ETAGS_FILE = ".etags.json"  # of the records that were copied
_LAUNCH_FILE = ".copied-{}.json"
_LINK = re.compile(r'href="([^"/?]+\.json)"')
_Item = TypeVar("_Item")


class RemoteFiles:
    """The small files of the data folder at an address, in the local folder `copy`. Thread-safe.

    Args:
        objects: those below the address.
    """

    def __init__(self, objects: Objects, copy: Path) -> None:
        self.objects, self.copy = objects, copy

    def copy_manifest(self) -> None:
        """Copy dataset.json and the manifest, unless they are here.

        Raises:
            UserError: the address is not a data folder, or it cannot be read, or the copy cannot be written.
        """
        with self._errors(missing="name one that prep made, or tars: {000..999}.tar"), self._once("manifest") as is_due:
            if is_due:
                _publish(self.copy / DATASET_FILE, self.objects.read(DATASET_FILE))
                self._copy_manifest()

    def copy_column(self, column: str) -> None:
        """Copy the small files of the current variant of a column, unless they are here.

        Raises:
            UserError: as of `copy_manifest`.
        """
        variant = current_variant(self.copy, column)
        if variant is None:
            address = self.objects.address
            raise UserError(f"{address} has no {column} shards", hint=f"run {how_to_make(column, address)}")
        with self._errors(missing=f"run prep {command_for(column)}"), self._once(f"{column}-{variant}") as is_due:
            if is_due:
                self._copy_variant(f"{column}/{variant}")

    def copy_file(self, key: str, *, sha256: str | None = None, size_bytes: int | None = None) -> None:
        """Copy one file, unless it is here with this digest or size.

        Raises:
            OSError: it cannot be read, or is not the file of this digest or size.
        """
        path = self.copy / key
        if _is_whole(path, sha256=sha256, size_bytes=size_bytes):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(path.parent / f".{path.name}.lock"):
            if _is_whole(path, sha256=sha256, size_bytes=size_bytes):
                return
            self.objects.fetch(key, path)
            if not _is_whole(path, sha256=sha256, size_bytes=size_bytes):
                path.unlink()
                raise OSError(f"{self.objects.address_of(key)} is not the file that was committed")

    def _copy_manifest(self) -> None:
        local = self.copy / MANIFEST_FOLDER
        content = self.objects.read(f"{MANIFEST_FOLDER}/{MANIFEST_FILE}")
        path = local / MANIFEST_FILE
        try:
            manifest = json.loads(content)
            mark, recorded = manifest["fingerprint"], manifest.get("tables", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            mark, recorded = "", {}  # damaged: reading the copy reports it
        is_same = path.is_file() and path.read_bytes() == content
        local.mkdir(parents=True, exist_ok=True)
        for name in (VIDEOS_FILE, CAPTIONS_FILE, *(name for name in MAPPED_FILES if name in recorded)):
            wanted = recorded.get(name)
            if not (is_same and (local / name).is_file() and wanted in (None, describe(local / name))):
                self._copy_table(name, mark=mark, wanted=wanted)
        # Last: if it exists, so do the tables it refers to.
        _publish(path, content)

    def _copy_table(self, name: str, *, mark: str, wanted: dict[str, Any] | None) -> None:
        """The current table: under its plain name, unless writing the manifest was interrupted at its very end."""
        path = self.copy / MANIFEST_FOLDER / name
        staged = staged_path(Path(MANIFEST_FOLDER), name, fingerprint=mark).as_posix()
        for key in (f"{MANIFEST_FOLDER}/{name}", staged):
            with suppress(FileNotFoundError):  # damaged: reading the copy reports it
                self.objects.fetch(key, path)
                if wanted in (None, describe(path)):
                    return

    def _copy_variant(self, folder: str) -> None:
        local = self.copy / folder
        # Before the commits: a new commit may be missing in the list, never the other way round.
        for name in (CONTENTS_FILE, RECIPE_FILE):
            self._copy_if_there(f"{folder}/{name}", local / name)
        self._copy_commits(folder, local)
        if self._copy_chunk_table(folder, local):
            return
        variant = Variant(local)
        files = [shard.commit.files for shard in shards_to_merge(variant) if shard.commit.files is not None]
        _at_once(lambda one: self.copy_file(f"{folder}/{one.index}", sha256=one.index_sha256), files)
        with suppress(UserError):  # opening the set reports what is wrong with an index
            update_chunk_table(variant, column=folder.partition("/")[0])

    def _copy_chunk_table(self, folder: str, local: Path) -> bool:
        """Copy the parts of the merged table that are not here; False if one is of other commits, or missing."""
        variant = Variant(local)

        def fetch(part: str) -> None:
            (local / part).parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                self.objects.fetch(f"{folder}/{part}", local / part)

        _at_once(fetch, _missing_parts(variant))
        return not _missing_parts(variant)

    def _copy_commits(self, folder: str, local: Path) -> None:
        """Copy the records that have changed and that no table stands for, and remove copies of all others."""
        listed = self._list_commits(folder, local)
        of_table = self._records_of_table(folder, local, listed)
        # The table stands for folders whose records are all the same.
        by_table = {"", *map(_folder, of_table)} if of_table else set()
        if self.objects.is_writable:
            by_table -= set(map(_folder, listed.keys() ^ of_table.keys()))
        wanted = {name: info for name, info in listed.items() if _folder(name) not in by_table}
        before = _read_etags(local)
        root = local / COMMITS_FOLDER
        changed = {name for name, info in wanted.items() if not info.etag or before.get(name) != info.etag}
        changed |= {name for name in wanted if not (root / name).is_file()}
        for name in of_table.keys() & changed:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(commit_bytes(of_table[name]))  # not flushed: it is written again without its etag
        absent = [name for name in changed if name not in of_table]
        _at_once(lambda name: self._copy_if_there(f"{folder}/{COMMITS_FOLDER}/{name}", root / name), absent)
        for name in by_table:
            (root / name).mkdir(parents=True, exist_ok=True)
        for path in root.rglob("*.json"):
            if path.relative_to(root).as_posix() not in wanted:
                path.unlink(missing_ok=True)
        if (etags := {name: info.etag for name, info in wanted.items() if info.etag}) != before:
            _publish(local / _ETAGS_FILE, json.dumps(etags).encode())
        if by_table:
            folders, sha256 = commit_folders(local), listed_contents(local).files[COMMIT_TABLE_FILE]
            confirm(local, sha256=sha256, folders=folders, except_for=folders.keys() - by_table)

    def _records_of_table(self, folder: str, local: Path, listed: dict[str, ObjectInfo]) -> dict[str, Commit]:
        """Copy the table of commits; return its records by name, without those that have changed, with those gone."""
        sha256 = listed_contents(local).files.get(COMMIT_TABLE_FILE)
        if sha256 is None:
            return {}
        try:
            self.copy_file(f"{folder}/{COMMIT_TABLE_FILE}", sha256=sha256)
            written_s = self.objects.info(f"{folder}/{COMMIT_TABLE_FILE}").modified_s
        except (OSError, UserError):
            return {}  # a run is just replacing it
        table = open_commit_table(local, sha256=sha256)
        if table is None:
            return {}
        commits = commits_in(table.rows)
        held = {in_folder(shard_id, commit_name(shard_id)): commit for shard_id, commit in commits.items()}
        if not self.objects.is_writable:
            is_same = listed_contents(local).shard_ids == commits.keys()
            return held if is_same else {}
        return {
            name: commit
            for name, commit in held.items()
            if name not in listed or listed[name].modified_s <= written_s or _is_record(listed[name], commit)
        }

    def _list_commits(self, folder: str, local: Path) -> dict[str, ObjectInfo]:
        """The records of a variant by their names in the folder of commits."""
        prefix = f"{folder}/{COMMITS_FOLDER}/"
        if self.objects.is_writable:
            listed = {info.key.removeprefix(prefix): info for info in self.objects.list(prefix)}
            return {name: info for name, info in listed.items() if name.endswith(".json")}
        shard_ids = sorted(listed_contents(local).shard_ids)
        names = [in_folder(shard_id, commit_name(shard_id)) for shard_id in shard_ids]
        if not names:
            names = _LINK.findall(self.objects.read(prefix).decode(errors="replace"))
        return {name: ObjectInfo(prefix + name, 0, "", 0.0) for name in names}

    def _copy_if_there(self, key: str, path: Path) -> None:
        try:
            _publish(path, self.objects.read(key))
        except FileNotFoundError:
            path.unlink(missing_ok=True)

    @contextmanager
    def _once(self, what: str) -> Iterator[bool]:
        """Hold the lock of the copy; yields False if a process of the same launch has already done `what`."""
        self.copy.mkdir(parents=True, exist_ok=True)
        path, launch = self.copy / _LAUNCH_FILE.format(what), _launch()
        with hold_lock(self.copy / ".lock"):
            is_due = launch is None or not path.is_file() or path.read_text() != launch
            yield is_due
            if is_due and launch is not None:
                _publish(path, launch.encode())

    @contextmanager
    def _errors(self, *, missing: str) -> Iterator[None]:
        address = self.objects.address
        try:
            yield
        except FileNotFoundError as error:
            raise UserError(f"{address} is not a data folder: {error.filename} is missing", hint=missing) from error
        except UserError:
            raise
        except OSError as error:
            if is_local(error):
                raise cache_unusable(self.copy, address, error) from error
            raise UserError(f"{address} cannot be read: {error}", hint="check the address") from error


def is_local(error: OSError) -> bool:
    """Whether a copy cannot be written, as opposed to read from object storage, which raises AccessRefused."""
    is_refused = isinstance(error, PermissionError) and not isinstance(error, UserError)
    return is_refused or error.errno in DISK_ERRORS


def cache_unusable(folder: Path, address: str, error: OSError) -> UserError:
    """The error for a cache that cannot take a copy of `address`."""
    hint = "make room, or choose another folder with --cache DIR"
    return UserError(f"{folder} cannot take a copy of {address}: {error.strerror}", hint=hint)


def _launch() -> str | None:
    """What the processes of one launch on this machine have in common; None for a process without a launcher.

    torchrun and srun are the parent of all their processes on a machine; a restart by torchrun has a number of its own.
    """
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1) < 2:
        return None
    parent = os.getppid()
    try:
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    return f"{parent} {began} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"


def _is_whole(path: Path, *, sha256: str | None, size_bytes: int | None) -> bool:
    if not path.is_file() or size_bytes not in (None, path.stat().st_size):
        return False
    return sha256 is None or scan(path).sha256 == sha256


def _folder(name: str) -> str:
    """The folder of a record; empty for `commits/` itself."""
    return name.rpartition("/")[0]


def _is_record(info: ObjectInfo, commit: Commit) -> bool:
    """Whether an object is the record of a commit, as far as its etag tells: in S3 it is often the MD5 of the content.

    A data folder that was uploaded has its records at any time, before and after the table.
    """
    content = commit_bytes(commit)
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return info.size_bytes == len(content) and info.etag.strip('"') == md5


def _missing_parts(variant: Variant) -> list[str]:
    """The files of the merged table that are not up to date, relative to the variant's folder."""
    if has_chunk_table(variant.directory.parent.name):
        return missing_parts(variant)
    return [] if score_table_problem(variant) is None else [CHUNKS_FILE]


def _read_etags(local: Path) -> dict[str, str]:
    try:
        return dict(json.loads((local / _ETAGS_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _at_once(copy: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Copy several files at a time, since each waits for the network."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        # Consumed, so that errors are raised here.
        list(pool.map(copy, items))


def _publish(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (path.is_file() and path.read_bytes() == content):
        publish_bytes(path, content)
