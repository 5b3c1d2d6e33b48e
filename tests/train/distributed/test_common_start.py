"""Ranks with different commands or data end together before they train, and report the difference."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from clipmill.shards.commits import read_commit, write_commit
from clipmill.train.distributed.launch import difference
from clipmill.train.engine.rank_consistency import launch_facts
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, read_lines
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings
from tests.train.distributed.forked import end_well, fork_ranks, free_port
from tests.train.distributed.runs import run_own_commands
from tests.train.latents.columns import FLAGS

DUAL = ("dual-encoder", *FLAGS, "--batch", "8", "--steps", "2", "--warmup-steps", "1", "--device", "cpu")
MAE = ("mae", "--input", "latents", "--model", "tiny", "--segment", "2s", "--num-frames", "2", "--device", "cpu")

# Value of each flag on the second rank, and the message that both ranks print about it.
DIFFERING: list[dict[str, tuple[str, str]]] = [
    {
        "--lr": ("0.001", "0.0003 on rank 0 and 0.001 on rank 1"),
        "--seed": ("7", "0 on rank 0 and 7 on rank 1"),
        "--optimizer.name": ("lion", "adamw on rank 0 and lion on rank 1"),
        "--loss.kind": ("siglip", "infonce on rank 0 and siglip on rank 1"),
        "--batch": ("4", "8 on rank 0 and 4 on rank 1"),
        "--steps": ("9", "2 on rank 0 and 9 on rank 1"),
    },
    {
        "--num-frames": ("4", "2 on rank 0 and 4 on rank 1"),
        "--split": ("val", "train on rank 0 and val on rank 1"),
        "--parallel.strategy": ("fsdp", "ddp on rank 0 and fsdp on rank 1"),
    },
    {"--preset": ("tiny-latents", "")},
]


def ends_of(folder: Path, cases: list[tuple[Sequence[str], ...]]) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """Return the exit status and stderr of both ranks for each case."""
    end_well(fork_ranks(run_own_commands, folder, cases, [free_port() for _ in cases], size=2, folder=folder))
    first, second = (json.loads((folder / f"ends-{rank}.json").read_bytes()) for rank in (0, 1))
    return [(tuple(first_row), tuple(other)) for first_row, other in zip(first, second, strict=True)]


def test_ranks_that_were_not_started_alike_end_with_the_flag_and_both_values(columns: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shared = (*DUAL, "--shards", str(columns), "--out", str(out))
    cases: list[tuple[Sequence[str], ...]] = [(shared, with_flags(shared, added)) for added in DIFFERING]
    cases.append((shared, (*MAE, "--shards", str(columns), "--out", str(out))))
    expected = [[f"{flag} is {value}" for flag, (_, value) in added.items() if value] for added in DIFFERING]
    expected[2] = ["--towers.temporal is zero on rank 0 and random on rank 1"]  # which the preset sets
    expected.append(["command is train dual-encoder on rank 0 and train mae on rank 1"])
    for ends, parts in zip(ends_of(tmp_path, cases), expected, strict=True):
        for status, error in ends:
            assert status == 2 and "Traceback" not in error
            assert all(part in error for part in parts), error
            assert error.startswith("error: the ranks were started differently: ")
            assert "\nhint: start every rank with the same command and flags" in error
    assert not out.exists()


def test_ranks_train_on_copies_of_a_folder_and_not_on_other_data(columns: Path, tmp_path: Path) -> None:
    copied, other, out = tmp_path / "copied", tmp_path / "other", tmp_path / "run"
    shutil.copytree(columns, copied)
    shutil.copytree(columns, other)
    # One latents shard differs, but samples, spans and captions are the same.
    commit = sorted((other / "latents").glob("*/commits/*.json"))[0]
    rewrite_checksum(commit)
    cases = [
        ((*DUAL, "--shards", str(columns), "--out", str(out)), (*DUAL, "--shards", str(path), "--out", str(out)))
        for path in (copied, other, tmp_path / "missing")
    ]
    alike, differing, missing = ends_of(tmp_path, [*cases])
    assert [status for status, _ in alike] == [0, 0], alike
    assert list(all_checkpoints(RunFolder(out).checkpoints)) == [2]
    for status, error in differing:
        assert status == 2
        assert "error: the ranks do not have the same data: column latents is " in error
        assert f"--shards is {columns} on rank 0 and {other} on rank 1" in error
        assert "manifest" not in error
    for status, error in missing:
        assert status == 2 and "missing" in error and "Traceback" not in error


@pytest.mark.nightly
def test_ranks_evaluate_copies_of_a_folder_and_not_other_data(columns: Path, tmp_path: Path) -> None:
    copied, other, out = tmp_path / "copied", tmp_path / "other", tmp_path / "run"
    shutil.copytree(columns, copied)
    shutil.copytree(columns, other)
    rewrite_checksum(sorted((other / "latents").glob("*/commits/*.json"))[0])
    shared = (*DUAL, "--shards", str(columns), "--out", str(out), "--evaluate.every", "2", "--evaluate.split", "train")
    cases = [
        tuple((*shared, "--evaluate.shards", shards) for shards in (f"far={columns}", second))
        for second in (f"far={copied}", f"far={other}", f"near={copied}")
    ]
    alike, differing, renamed = ends_of(tmp_path, [*cases])
    assert [status for status, _ in alike] == [0, 0], alike
    assert "far/text_to_video_r1" in read_lines(RunFolder(out).metrics)[-1]
    for status, error in differing:
        assert status == 2 and "error: the ranks do not have the same data: column latents of far is " in error
        assert "manifest" not in error
    for status, error in renamed:
        assert status == 2 and "--evaluate.shards is " in error


def test_versions_count_and_what_a_machine_may_have_of_its_own_does_not() -> None:
    start = launch_facts(DualEncoderSettings(shards="here", workers=3), resume=False)
    assert start == launch_facts(DualEncoderSettings(shards="there", workers=9, batches_ahead=1), resume=False)
    assert start["command"] == "train dual-encoder" and start["--resume"] is False and start["--loss.kind"] == "infonce"
    other = {**start, "clipmill": "0.0.1", "torch": "1.0"}
    message = difference([start, other])
    assert message is not None and "clipmill is " in message and "torch is " in message and "1.0 on rank 1" in message


def test_differences_name_the_ranks_that_have_each_value() -> None:
    starts = [{"--lr": 0.1, "--seed": 0}, {"--lr": 0.1, "--seed": 0}, {"--lr": 0.3}]
    assert difference(starts) == (
        "--lr is 0.1 on ranks 0, 1 and 0.3 on rank 2; --seed is 0 on ranks 0, 1 and missing on rank 2"
    )
    assert difference(starts[:2]) is None
    message = difference([{f"--{name}": rank for name in "abcdefgh"} for rank in range(9)])
    assert message is not None and message.endswith("; and 2 more")


def with_flags(words: Sequence[str], added: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return a command line in which the added flags replace flags of the same name."""
    kept = [word for at, word in enumerate(words) if not {word, words[at - 1]} & set(added)]
    return [*kept, *(word for flag, (value, _) in added.items() for word in (flag, value))]


def rewrite_checksum(path: Path) -> None:
    """Change the tar checksum in a commit, as if the tar had different bytes."""
    commit = read_commit(path)
    assert commit.files is not None
    write_commit(path.parent.parent, replace(commit, files=replace(commit.files, tar_sha256="0" * 64)))
