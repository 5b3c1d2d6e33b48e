"""Whether a variant may take the place of another one: the rule of runs, `prep status` and `prep gc`.

It may, unless it lacks samples that the other variant holds for a reason that can pass: refused credentials, a full
disk, a lost worker. `prep retry`, or the same command, then makes them. A source that is damaged for good blocks
nothing.
"""

from collections.abc import Collection
from pathlib import Path

from clipmill.manifests.keys import split_key
from clipmill.prep.core.failure_list import FAILURES_FILE, read_failures, shard_name
from clipmill.prep.core.failures import SOURCE_AWAY, TRANSIENT, FailureCode
from clipmill.shards.commits import Failure
from clipmill.shards.dataset import variant_dir
from clipmill.shards.index import open_index
from clipmill.shards.opening import Damaged
from clipmill.shards.reader import Variant

# An encoder may also fail because of the settings of the variant.
_CAN_PASS = TRANSIENT | SOURCE_AWAY | {FailureCode.ENCODE_FAILED}


def lost_samples(data_dir: Path, column: str, *, variant: str, former: str | None) -> list[Failure]:
    """Return the failures for which a variant lacks samples of another one, although another try may make them.

    Args:
        variant: Name of the variant that would be kept.
        former: Name of the variant that would be given up; None if there is none.
    """
    if former is None or former == variant:
        return []
    new = Variant(variant_dir(data_dir, column, variant))
    listed = read_failures(new.directory / FAILURES_FILE)  # includes sources that belong to no shard
    failures = [*(failure for commit in new.commits.values() for failure in commit.failures), *listed]
    failures = [failure for failure in dict.fromkeys(failures) if failure.code in _CAN_PASS]
    folder = variant_dir(data_dir, column, former)
    if not failures or not folder.is_dir():
        return []
    old = Variant(folder)
    shards = {shard_name(shard.shard_id) for shard in old.shards()}
    shards -= {shard_name(shard.shard_id) for shard in new.shards()}
    try:
        video_ids = {failure.video_id for failure in failures}
        latest: dict[str, int] = {}  # of the samples that only the other variant holds, by video
        for video_id, start_ms in _starts(old, video_ids) - _starts(new, video_ids):
            latest[video_id] = max(start_ms, latest.get(video_id, 0))
    except (Damaged, OSError):
        return failures  # what they hold is unknown
    return [
        failure
        for failure in failures
        # A failed part begins with the sample that it is named after.
        if failure.video_id in shards
        or latest.get(failure.video_id, -1) >= (0 if failure.key is None else _place(failure.key)[1])
    ]


def _starts(variant: Variant, video_ids: Collection[str]) -> set[tuple[str, int]]:
    """Return the video and the start in ms of all samples of some videos."""
    starts = set()
    for shard in variant.shards():
        for key in open_index(shard.index_path, columns=["key"])["key"].to_pylist():
            if key in video_ids:  # a sample that holds the complete video
                starts.add((key, 0))
            elif (place := _place(key))[0] in video_ids:
                starts.add(place)
    return starts


def _place(key: str) -> tuple[str, int]:
    """Return the video and the start in ms of a chunk; (key, 0) for a sample that is not one."""
    try:
        return split_key(key)
    except ValueError:
        return key, 0
