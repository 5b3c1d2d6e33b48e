"""The spans whose chunks the tars of a variant hold: what a run can copy in place of encoding it.

A tar that no commit names any more keeps its chunks until `prep gc`: videos that return, or come back under another
name, find them there. Nothing is taken from such a tar but what its checksums and its content prove to be right.
"""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from clipmill.manifests.progress import Activity
from clipmill.manifests.quoting import counted
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.prep.core.plan import NUM_CHECK_THREADS
from clipmill.shards.commits import Commit
from clipmill.shards.damage import Damaged
from clipmill.shards.index import extensions_of, open_index
from clipmill.shards.salvage import (
    SalvagedSample,
    index_of,
    readable_rows,
    rows_of_uncommitted,
    uncommitted_tars,
)

SPAN_COLUMN = "span_fingerprint"
_COLUMNS = ("video_id", SPAN_COLUMN)


@dataclass(frozen=True)
class StoredTar:
    """A tar of a variant, by its path in the variant's folder, and its commit if one names it."""

    tar: str
    commit: Commit | None

    def rows(self, variant_dir: Path, fingerprints: Collection[str]) -> Iterator[SalvagedSample]:
        """Yield the intact chunks of some spans."""
        wanted = (SPAN_COLUMN, fingerprints)
        if self.commit is not None:
            return readable_rows(variant_dir, self.commit, wanted=wanted)
        return rows_of_uncommitted(variant_dir / self.tar, wanted=wanted)


@dataclass(frozen=True)
class StoredSpans:
    """What the index of a tar says.

    Attributes:
        spans: (video ID, fingerprint) of each span.
        chunk_bytes: mean size of a chunk with its share of the tar and of the index.
    """

    spans: frozenset[tuple[str, str]] = frozenset()
    has_captions: bool = False
    chunk_bytes: float = 0.0


def stored_spans(
    variant_dir: Path, commits: Mapping[int, Commit], *, compared: Collection[int]
) -> dict[StoredTar, StoredSpans]:
    """Return the spans in the tars of some shards, and in those that no commit names; unreadable indexes are left out.

    In a bucket, where looking for the latter costs requests and time, they are not used.

    Args:
        commits: those of the variant, by shard ID.
        compared: shards whose tars to open.
    """
    chosen = [commits[shard_id] for shard_id in compared if shard_id in commits]
    tars = [StoredTar(commit.files.tar, commit) for commit in chosen if commit.files is not None]
    if mirror_of(variant_dir) is None and variant_dir.is_dir():
        others = uncommitted_tars(variant_dir, commits.values())
        tars += [StoredTar(tar.relative_to(variant_dir).as_posix(), None) for tar in others]
    if not tars:
        return {}
    comparing = f"comparing {counted(len(tars), 'stored shard')}"
    found: dict[StoredTar, StoredSpans] = {}
    with Activity(comparing) as now, ThreadPoolExecutor(NUM_CHECK_THREADS) as pool:
        show = now.counter(comparing)
        for number, (tar, spans) in enumerate(
            zip(tars, pool.map(lambda tar: _spans_in(variant_dir, tar), tars), strict=True), 1
        ):
            show(number, len(tars))
            if spans is not None:
                found[tar] = spans
    return found


def _spans_in(variant_dir: Path, stored: StoredTar) -> StoredSpans | None:
    tar = variant_dir / stored.tar
    try:
        index = open_index(index_of(tar), columns=_COLUMNS)
        if stored.commit is not None and stored.commit.files is not None:
            size_bytes = stored.commit.files.size_bytes
        else:
            size_bytes = tar.stat().st_size + index_of(tar).stat().st_size
    except (Damaged, OSError):
        return None
    spans = frozenset(zip(*(index[name].to_pylist() for name in _COLUMNS), strict=True))
    return StoredSpans(spans, "txt" in extensions_of(index), size_bytes / index.num_rows)
