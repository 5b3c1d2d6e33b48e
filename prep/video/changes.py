"""What is encoded and what is copied in the shards of a plan, and why.

A worker copies the chunks whose encoder pass is unchanged from stored tars: that of the shard, and those of shards that
videos leave, because they are removed, renamed or moved to another split. Comparing the plan with the indexes tells
beforehand which these are.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from clipmill.manifests.progress import Activity
from clipmill.manifests.quoting import counted
from clipmill.manifests.storage.mirrors import mirror_of
from clipmill.prep.core.plan import NUM_CHECK_THREADS, ShardPlan, ShardState
from clipmill.prep.video.plan import Plan
from clipmill.prep.video.span_task import SPAN_COLUMN, StoredTar
from clipmill.shards.commits import Commit
from clipmill.shards.damage import Damaged
from clipmill.shards.index import extensions_of, open_index
from clipmill.shards.salvage import index_of, uncommitted_tars

_COMPARED = (ShardState.CHANGED, ShardState.RETRY)
_RETURNED = "videos that returned, were renamed or moved"
_Tars = Mapping[str, tuple[StoredTar, float]]  # fingerprint of a span -> a tar with its chunks, mean bytes of a chunk
_COLUMNS = ("video_id", SPAN_COLUMN)


@dataclass(frozen=True)
class ShardChange:
    """How a shard differs from the stored one.

    Attributes:
        rows: rows of the plan with the spans that are encoded; those of the others are copied.
        num_copied: number of chunks that are copied; None if it is unknown how much of a damaged shard is intact.
        copied_bytes: their size in the tar and the index, about.
        because: why the shard is written.
        others: tars of other shards, or of earlier commits, with chunks that are copied.
    """

    rows: tuple[int, ...]
    num_copied: int | None
    copied_bytes: float
    because: str
    others: tuple[StoredTar, ...] = ()


@dataclass(frozen=True)
class StoredSpans:
    """Content of the index of a tar.

    Attributes:
        spans: (video ID, fingerprint) of each span.
        chunk_bytes: mean size of a chunk with its share of the tar and of the index.
    """

    spans: frozenset[tuple[str, str]] = frozenset()
    has_captions: bool = False
    chunk_bytes: float = 0.0


def with_changes(plan: Plan, commits: Mapping[int, Commit], variant_dir: Path) -> dict[int, ShardChange]:
    """Compare the shards of a plan with the stored ones; return how they differ, by shard ID.

    `plan.shards` then have `num_copied`. Shards none of whose chunks are stored are left out, and so are changed ones
    whose index cannot be read.
    """
    if not any(shard.has_work for shard in plan.shards):
        return {}
    left = [shard.shard_id for shard in plan.shards if shard.state in (*_COMPARED, ShardState.ORPHANED)]
    stored = stored_spans(variant_dir, commits, compared=left)
    owned = {tar.commit.shard_id: spans for tar, spans in stored.items() if tar.commit is not None}
    tars = {
        fingerprint: (tar, spans.chunk_bytes)
        for tar, spans in reversed(stored.items())
        for _, fingerprint in spans.spans
    }
    moved = plan.shards_of_moved_videos(commits)
    found: dict[int, ShardChange] = {}
    for shard in plan.shards:
        commit = commits.get(shard.shard_id)
        if shard.state in _COMPARED and commit is not None:
            if commit.files is None or shard.shard_id in owned:
                own, is_moved = owned.get(shard.shard_id, StoredSpans()), shard.shard_id in moved
                found[shard.shard_id] = _change(plan, shard, commit, own, tars, has_moved_videos=is_moved)
        elif shard.has_work and tars and (change := _found_elsewhere(plan, shard, tars)) is not None:
            found[shard.shard_id] = change
    plan.shards = [
        replace(shard, num_copied=found[shard.shard_id].num_copied) if shard.shard_id in found else shard
        for shard in plan.shards
    ]
    return found


def _change(
    plan: Plan,
    shard: ShardPlan,
    commit: Commit,
    own: StoredSpans,
    tars: _Tars,
    *,
    has_moved_videos: bool,
) -> ShardChange:
    """Compare a shard with its commit and what it holds.

    Args:
        own: what its tar holds.
    """
    keys = plan.span_keys(shard.rows)
    held = {fingerprint for _, fingerprint in own.spans}
    lacking = {key for key in keys if key[1] not in held}
    rows = tuple(row for row, key in zip(shard.rows, keys, strict=True) if key in lacking and key[1] not in tars)
    wanted = {video_id for video_id, _ in keys}
    failed = {failure.video_id for failure in commit.failures}
    known = {video_id for video_id, _ in own.spans} | failed
    added, gone = wanted - known, known - wanted
    encoded = {video_id for video_id, fingerprint in lacking if fingerprint not in tars}
    changed = {video_id for video_id, _ in lacking} & known - failed
    removed = "removed or moved to another split" if has_moved_videos else "removed"
    reasons = [
        *([counted(len(added & encoded), "new video")] if added & encoded else []),
        *([_RETURNED] if added - encoded else []),
        *([f"{counted(len(changed), 'video')} changed"] if changed else []),
        *([f"{counted(len(gone), 'video')} {removed}"] if gone else []),
    ]
    if shard.state == ShardState.RETRY:
        reasons = [shard.reason]
    elif not reasons:
        has_captions = plan.has_captions or own.has_captions
        reasons = ["captions changed" if has_captions else "names of videos or datasets changed"]
    found: list[tuple[StoredTar | None, float]] = [(None, own.chunk_bytes) for key in keys if key not in lacking]
    found += [tars[key[1]] for key in keys if key in lacking and key[1] in tars]
    others = tuple(dict.fromkeys(tar for tar, _ in found if tar is not None))
    num_copied = shard.num_chunks - _num_chunks(plan, rows)
    return ShardChange(rows, num_copied, _copied_bytes(num_copied, found), ", ".join(reasons), others)


def _found_elsewhere(plan: Plan, shard: ShardPlan, tars: _Tars) -> ShardChange | None:
    """Return what is copied into a shard that is new, missing or damaged; None if no tar has any of it."""
    keys = plan.span_keys(shard.rows)
    found = [tars[fingerprint] for _, fingerprint in keys if fingerprint in tars]
    others = tuple(dict.fromkeys(tar for tar, _ in found))
    if not others:
        return None
    rows = tuple(row for row, key in zip(shard.rows, keys, strict=True) if key[1] not in tars)
    if shard.state != ShardState.NEW:
        return ShardChange(rows, None, 0.0, "", others)
    encoded = {video_id for video_id, fingerprint in keys if fingerprint not in tars}
    because = f"new videos, and {_RETURNED}" if encoded else _RETURNED
    num_copied = shard.num_chunks - _num_chunks(plan, rows)
    return ShardChange(rows, num_copied, _copied_bytes(num_copied, found), because, others)


def _copied_bytes(num_chunks: int, found: Sequence[tuple[StoredTar | None, float]]) -> float:
    """Return the size of copied chunks, given the mean bytes of a chunk in the tar of each of their spans."""
    return num_chunks * sum(chunk_bytes for _, chunk_bytes in found) / max(1, len(found))


def _num_chunks(plan: Plan, rows: Sequence[int]) -> int:
    return sum(len(span.span.chunk_frames) for span in plan.spans(rows))


def stored_spans(
    variant_dir: Path, commits: Mapping[int, Commit], *, compared: Collection[int]
) -> dict[StoredTar, StoredSpans]:
    """Return the spans in the tars of some shards, and in tars that no commit names; omit unreadable indexes.

    In a bucket, tars without a commit are not used, because looking for them costs requests and time.

    Args:
        commits: Commits of the variant, by shard ID.
        compared: Shards whose tars are opened.
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
