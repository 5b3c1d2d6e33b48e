"""A run reads one variant of each column from its beginning to its end, whichever is current; `--variant` names one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from clipmill.shards.dataset import current_variant, reading_variants, set_current_variant
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder
from tests.object_storage.folders import upload
from tests.object_storage.server import S3Server
from tests.train.running import SMALL, facts, train, two_lines, weights_of
from tests.train.tiny_data import VARIANT

OTHER = "h265-test-89abcdef"
STEPS = ("--steps", 2, "--checkpoint-every", 1, "--device", "cpu", "--workers", 1)


@pytest.fixture
def data(moving: Path, tmp_path: Path) -> Path:
    """A data folder with two variants of its chunks, of which the first is current."""
    shutil.copytree(moving, tmp_path / "data")
    (tmp_path / "data" / "video" / VARIANT / "recipe.json").write_text("{}")
    shutil.copytree(tmp_path / "data" / "video" / VARIANT, tmp_path / "data" / "video" / OTHER)
    return tmp_path / "data"


def variant_of(run: Path) -> Any:
    return facts(run)["variant"]


def forget_last_step(run: Path) -> None:
    shutil.rmtree(all_checkpoints(RunFolder(run).checkpoints)[2])


def test_a_run_is_resumed_and_evaluated_on_its_own_variant(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train("dual-encoder", *SMALL, *STEPS, "--shards", data, "--out", whole) == 0
    shutil.copytree(whole, run)
    forget_last_step(run)
    set_current_variant(data, "video", OTHER)
    assert train("dual-encoder", "--resume", "--out", run) == 0
    assert variant_of(run) == VARIANT and current_variant(data, "video") == OTHER
    expected = weights_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(run).items())
    capsys.readouterr()
    assert train("eval", "retrieval", run, "--json") == 0
    assert f'"variant": "{VARIANT}"' in capsys.readouterr().out

    shutil.rmtree(data / "video" / VARIANT)
    assert train("eval", "retrieval", run, "--json") == 0
    said = capsys.readouterr()
    assert (
        f'"variant": "{OTHER}"' in said.out and f"variant {VARIANT} of video, on which the run was trained" in said.err
    )
    forget_last_step(run)
    assert train("dual-encoder", "--resume", "--out", run) == 2
    error, hint = two_lines(capsys)
    assert f"variant {VARIANT} of video, which {data} no longer has; the current one is {OTHER}" in error
    assert "prep chunk" in hint and "--out" in hint


def test_a_variant_is_chosen_by_name(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    command = ("dual-encoder", *SMALL, *STEPS, "--shards", data, "--out", run, "--variant")
    assert train(*command, "h264-none") == 2
    assert "--variant h264-none: there is no such variant in" in two_lines(capsys)[0] and not run.exists()
    assert train(*command, OTHER) == 0
    assert variant_of(run) == OTHER and current_variant(data, "video") == VARIANT
    forget_last_step(run)
    assert train("dual-encoder", "--resume", "--out", run) == 0
    assert variant_of(run) == OTHER


def test_a_variant_in_a_bucket_is_chosen_by_name(data: Path, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    upload(data, bucket)
    run, cache = tmp_path / "run", tmp_path / "cache"
    where = ("--shards", f"{bucket}", "--cache", cache, "--out", run)
    assert train("dual-encoder", *SMALL, *STEPS, *where, "--variant", OTHER) == 0
    assert variant_of(run) == OTHER


def test_a_choice_ends_with_its_command(data: Path) -> None:
    with reading_variants({data: {"video": OTHER}}):
        assert current_variant(data, "video") == OTHER
    assert current_variant(data, "video") == VARIANT
