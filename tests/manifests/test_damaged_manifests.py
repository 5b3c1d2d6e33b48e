"""Tests of damage to the files of a manifest: it is rejected or has no effect.

The command that wrote the files repairs them.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.manifests.caption_spans import open_stored_captions
from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_checked_json
from clipmill.manifests.store import (
    MAPPED_FILES,
    TABLE_FILES,
    DamagedManifest,
    captions_path,
    open_captions,
    read_captions,
    read_manifest,
    read_rejected_rows,
    read_videos,
)
from tests.manifests.test_store import file_hashes, reading_of, write

NUM_FLIPS = 60  # flips per file


@pytest.fixture
def data(tmp_path: Path) -> Path:
    captions = [("v", 1.0, 2.0, "one"), ("w", 0.0, 1.0, "two"), ("w", 0.0, 2.0, "three")]
    write(tmp_path / "data", reading_of(tmp_path, ["v", "w"], captions))
    return tmp_path / "data"


def values(data: Path) -> list[Any]:
    """Return everything that readers return for the manifest."""
    manifest = read_manifest(data)
    with open_captions(data) as file:
        opened = file.read().to_pylist()
    assert captions_path(data).exists()
    stored = open_stored_captions(data)
    stored.verify()
    return [
        stored.texts.to_pylist(),
        stored.sources,
        *([np.array(column).tolist() for column in vars(block).values()] for block in stored.blocks()),
        *(read(data).to_pylist() for read in (read_videos, read_captions, read_rejected_rows)),
        opened,
        {name: manifest[name] for name in ("fingerprint", "next_caption_id", "datasets")},
    ]


@pytest.mark.parametrize("name", ["manifest.json", *TABLE_FILES, *MAPPED_FILES])
def test_no_flipped_bit_is_read_as_another_value(data: Path, name: str) -> None:
    path, rng = data / "manifest" / name, random.Random(name)
    content, before = path.read_bytes(), values(data)
    num_refused = 0
    for _ in range(NUM_FLIPS):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert values(data) == before
        except UserError as error:
            num_refused += 1
            assert error.hint
    assert num_refused > NUM_FLIPS // 2  # whitespace in JSON has no meaning


@pytest.mark.parametrize("name", ["manifest.json", *TABLE_FILES, *MAPPED_FILES])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "another record"])
def test_the_command_that_wrote_it_repairs_it(data: Path, tmp_path: Path, name: str, damage: str) -> None:
    path, before = data / "manifest" / name, file_hashes(data)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    elif damage == "another record":
        publish_checked_json(path, {"clipmill_format": 2, "columns": {}})
    else:
        path.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    with pytest.raises(UserError):
        values(data)
    captions = [("v", 1.0, 2.0, "one"), ("w", 0.0, 1.0, "two"), ("w", 0.0, 2.0, "three")]
    write(data, reading_of(tmp_path, ["v", "w"], captions))
    assert file_hashes(data) == before


def test_a_repair_that_would_give_captions_other_ids_is_refused(data: Path, tmp_path: Path) -> None:
    """If the manifest has a history, the command cannot tell which IDs the captions had."""
    captions = [("v", 1.0, 2.0, "one"), ("w", 0.0, 2.0, "three")]
    write(data, reading_of(tmp_path, ["v", "w"], captions))
    write(data, reading_of(tmp_path, ["x"], [], dataset="b"), dataset="b")
    (data / "manifest" / "captions.parquet").write_bytes(b"PAR1")
    before = file_hashes(data)
    with pytest.raises(UserError, match="caption IDs would change") as caught:
        write(data, reading_of(tmp_path, ["v", "w"], captions))
    assert "(a, b)" in str(caught.value.hint)
    assert file_hashes(data) == before


def test_tables_of_two_writes_that_are_exchanged_are_refused(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "other")
    captions = [("v", 1.0, 2.0, "eno"), ("w", 0.0, 1.0, "owt"), ("w", 0.0, 2.0, "eerht")]
    write(tmp_path / "other", reading_of(tmp_path, ["v", "w"], captions))
    for name in (*TABLE_FILES, *MAPPED_FILES):
        kept = (data / "manifest" / name).read_bytes()
        shutil.copy(tmp_path / "other" / "manifest" / name, data / "manifest" / name)
        with pytest.raises(DamagedManifest):
            values(data)
        (data / "manifest" / name).write_bytes(kept)
    values(data)


@pytest.mark.parametrize("name", ["tables", "sha256"])
def test_a_manifest_without_checksums_is_refused_with_what_to_do(data: Path, name: str) -> None:
    path = data / "manifest" / "manifest.json"
    record = read_manifest(data)
    if name == "tables":
        del record[name]
        publish_checked_json(path, record)
    else:
        path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"manifest\.json is damaged: .*it has no checksum") as caught:
        read_captions(data)
    assert "prep manifest" in (caught.value.hint or "")
