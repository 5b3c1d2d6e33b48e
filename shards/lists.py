"""Plain lists of the committed tars, for tools that take URLs of tars."""

import re
from collections.abc import Mapping
from pathlib import Path

from manifests.publish import naming, publish_bytes
from shards.commits import Commit

ALL_SHARDS_FILE = "shards.txt"
_SPLIT = re.compile(r"[A-Za-z0-9_-]+")


def write_shard_lists(variant_dir: Path, commits: Mapping[int, Commit]) -> None:
    """Writes shards.txt and one shards-<split>.txt for each split that has shards, in order of shard ids.

    Lists that are right already are left alone; the list of a split without shards goes away.

    Raises:
        ValueError: a split's name cannot stand in a file name.
    """
    lists: dict[str, list[str]] = {ALL_SHARDS_FILE: []}
    for _, commit in sorted(commits.items()):
        if commit.files is None:
            continue
        if not _SPLIT.fullmatch(commit.split):
            raise ValueError(f"split {commit.split!r} of shard {commit.shard_id} is no name")
        lists[ALL_SHARDS_FILE].append(commit.files.tar)
        lists.setdefault(f"shards-{commit.split}.txt", []).append(commit.files.tar)
    for file_name, tars in lists.items():
        content = "".join(f"{tar}\n" for tar in tars).encode()
        path = variant_dir / file_name
        with naming(path):
            is_right = path.is_file() and path.read_bytes() == content
        if not is_right:
            publish_bytes(path, content)
    for path in variant_dir.glob("shards-*.txt"):
        if path.name not in lists:
            path.unlink()
