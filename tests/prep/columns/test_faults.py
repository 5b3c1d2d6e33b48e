"""Tests of damage, failures, interruptions, full disks and parts.

Each fault is reported, and the next run restores the bytes.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator

import pytest

from clipmill.prep.core.data_folder import column_lock
from clipmill.prep.core.parts import Part, register_part
from clipmill.prep.engines import Check, Outcome, R, T
from clipmill.shards.commits import commit_path
from clipmill.shards.reader import CommittedShard
from tests.prep.columns.cases import CASES, NIGHTLY, Case, Folder, bytes_replaced
from tests.prep.here import Here
from tests.prep.running import contents, failing, identities, prep_here


def cut(shard: CommittedShard) -> None:
    content = shard.tar_path.read_bytes()
    shard.tar_path.unlink()
    shard.tar_path.write_bytes(content[: len(content) // 2])


def flip(shard: CommittedShard) -> None:
    """Flip bytes in the last sample, and keep the modification time of the file."""
    offset = shard.index[f"{shard.extensions[0]}_offset"][shard.num_samples - 1].as_py()
    content = shard.tar_path.read_bytes()
    bytes_replaced(shard.tar_path, offset + 10, bytes(byte ^ 1 for byte in content[offset + 10 :][:4])).__enter__()


def spoil_commit(shard: CommittedShard) -> None:
    (path := commit_path(shard.tar_path.parent, shard.shard_id)).unlink()
    path.write_text("{}")


LOSSES: dict[str, Callable[[CommittedShard], object]] = {
    "tar": lambda shard: shard.tar_path.unlink(),
    "byte": flip,
    "commit": lambda shard: commit_path(shard.tar_path.parent, shard.shard_id).unlink(),
    "end of tar": cut,
    "index": lambda shard: shard.index_path.unlink(),
    "energon index": lambda shard: shard.tar_path.with_name(f"{shard.tar_path.name}.idx").unlink(),
    "content of commit": spoil_commit,
}
OF_EVERY_COLUMN = ("tar", "byte", "commit")  # the other losses affect the shards of all columns alike


@pytest.mark.parametrize(
    ("case", "loss"),
    [
        pytest.param(case, loss, marks=[pytest.mark.nightly] if case.name in NIGHTLY else [])
        for case in CASES
        for loss in LOSSES
        if case.name == "video" or loss in OF_EVERY_COLUMN
    ],
    ids=str,
)
def test_what_is_lost_is_named_and_made_again_with_the_same_bytes(folder: Folder, case: Case, loss: str) -> None:
    before, whole = folder.digests(), identities(folder.column)
    LOSSES[loss](folder.variant.shards()[1])
    assert folder.digests() != before
    ran = folder.prep("verify", "--column", case.name, status=1)
    assert "000001" in ran.stdout and "to repair, run: prep " in ran.stderr
    made = folder.run_printed(ran.stderr)
    assert (made["num_shards_made"], made["failures"]) == (1, {})
    assert folder.digests() == before and not folder.server.log, "stored answers must be used again"
    assert identities(folder.column).items() >= {(name, who) for name, who in whole.items() if "000000-" in name}
    if loss == "byte":
        num_copied = folder.variant.shards()[1].num_samples - 1 if case.is_of_chunks else 0  # a span is made at once
        assert made.get("num_reused", 0) == num_copied


def test_a_failure_is_named_and_tried_again_on_request_alone(folder: Folder) -> None:
    case = folder.case
    folder.read_manifest()  # the sources are next to this copy of the data folder
    before = folder.digests()
    folder.forget_column()
    with folder.broken_chunk():
        assert folder.make(status=1)["failures"] == {case.code: 1}
        assert folder.variant.num_samples == case.num_samples - case.num_failed
        (listed,) = (json.loads(line) for line in (folder.column / folder.current_name / "failures.jsonl").open())
        assert (listed["video_id"], listed["code"]) == ("short", case.code)
        status = folder.status()
        assert status["first_failures"][0]["message"] == listed["message"]
        assert status["variants"][0]["failures"] == {case.code: 1}
        of_column = "" if case.name == "video" else f" of {case.name}"
        told = folder.prep("status").stdout
        column = "" if case.name == "video" else f" --column {case.name}"
        assert f"1 x {case.code}{of_column}" in told
        assert f"to retry: prep retry{column} --data {folder.data}\n" in told
        if not case.is_of_chunks:  # a chunk may have been repaired in the meantime
            again = folder.make()
            assert (again["num_shards_made"], again["failures"], again["unchanged"]) == (0, {case.code: 1}, 1)
            assert folder.retry("--only", "timeout")["num_shards_made"] == 0
        assert folder.retry(status=1)["failures"] == {case.code: 1}
        assert folder.retry("--max-failures", 1)["num_shards_made"] == 1
    mended = folder.make() if case.is_of_chunks else folder.retry()
    assert (mended["num_shards_made"], mended["failures"]) == (1, {})
    assert folder.digests().items() >= before.items()  # the shard that lacks the sample stays until `prep gc`


class Interrupted(Here):
    """Engine that is interrupted after its first task."""

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None, **named: object
    ) -> Iterator[Outcome[T, R] | None]:
        yield next(super().run(function, tasks, check=check))
        raise KeyboardInterrupt


def test_an_interrupted_run_is_finished_by_the_next(folder: Folder) -> None:
    before = folder.digests()
    folder.forget_column()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clipmill.prep.engines.processes.ProcessEngine", lambda num_workers, gpus=None: Interrupted())
        patch.setattr("clipmill.prep.text.bank.MAX_BLOCK_TEXTS", 1)
        ran = folder.prep(folder.case.command, *folder.case.flags, "--engine", "processes", status=130)
    assert "run the same command again" in ran.stderr
    num_asked = len(folder.server.log)
    made = folder.make()
    assert made["num_shards_made"] == (2 if folder.case.name == "text" else 1)
    assert folder.case.name != "captions" or 0 < num_asked < len(folder.server.log) == 5, (
        "no chunk may be requested twice"
    )
    assert folder.case.name != "text" or made["num_encoded"] == 2, "no text may be embedded twice"
    assert folder.digests() == before


def test_a_full_disk_and_a_read_only_folder_lose_nothing(folder: Folder) -> None:
    before = folder.digests()
    folder.forget_column()
    with failing("replace", errno.EACCES, of="recipe.json"):
        ran = folder.prep(folder.case.command, *folder.case.flags, "--engine", "processes", status=2)
    assert os.strerror(errno.EACCES) in ran.error and "recipe.json" in ran.error
    with failing("fsync", errno.ENOSPC, of="000001.tar"):
        made = folder.make(status=1)
    assert made["failures"].keys() == {"disk_full"} and made["num_shards"] == 1
    assert not list(folder.column.rglob(".tmp-*"))
    assert folder.make()["num_shards_made"] == 1 and folder.digests() == before


def test_parts_have_the_bytes_of_one_command(folder: Folder) -> None:
    before = folder.digests()
    folder.forget_column()
    first, last = (folder.make("--part", part) for part in ("2/2", "1/2"))
    assert not last["part"]["not_made"] and "--part" not in (last["next"] or "")
    if folder.case.name != "text":  # parts of `text` divide the texts, and there are only two
        assert len(first["part"]["not_made"]) == 1
        assert first["next"].startswith(f"prep {folder.case.command} ") and first["next"].endswith(" --part 1/2")
    assert folder.digests() == before


def test_two_commands_at_once_are_refused_and_another_column_waits_for_nobody(folder: Folder) -> None:
    case, engine = folder.case, ("--engine", "processes")
    with column_lock(folder.data, column=case.name):
        for command in ((case.command, *case.flags, *engine), ("gc",), ("retry", "--column", case.name, *engine)):
            error = folder.prep(*command, status=2).error
            assert "another command is writing" in error and f"process {os.getpid()}" in error
        other = folder.of("scores" if case.name != "scores" else "latents")
        assert other.make()["num_shards_made"] == 0
    with register_part(folder.data, Part(1, 2), column=case.name):
        assert "another command is writing" in folder.prep(case.command, *case.flags, *engine, status=2).error


def test_wrong_flags_are_named_and_nothing_is_made(folder: Folder) -> None:
    before, case = contents(folder.data), folder.case
    wrong = {
        case.bad: case.refusal,
        ("--workers", 0): "--workers is 0",
        ("--max-failures", "some"): '--max-failures "some" is neither a number of videos nor a percentage',
        ("--address", "nonsense"): '--address "nonsense" is not',
        ("--part", "3/2"): "--part 3/2",
        ("--ever", 1): "unknown option: --ever",
    }
    if case.where:
        wrong |= {("--where", "begins >"): "--where", ("--where", "begins > 1"): "there is no name begins"}
        wrong |= {("--where", "video = 'nobody'"): "selects none of"}
    for flags, message in wrong.items():
        engine = () if "--address" in flags else ("--engine", "processes")
        assert message in folder.prep(case.command, *case.flags, *engine, *flags, status=2).error, flags
    assert contents(folder.data) == before


def test_a_folder_without_manifest_or_chunks_is_named(folder: Folder) -> None:
    (empty := folder.root / "empty").mkdir()
    flags = [folder.server.address if flag == "SERVER" else flag for flag in folder.case.flags]
    command = (folder.case.command, *flags, "--engine", "processes", "--data")
    error = prep_here(*command, empty, status=2).error
    assert ("no chunks" if folder.case.is_of_chunks else "no manifest") in error
    assert not [path for path in empty.iterdir() if path.suffix != ".lock" and path.name != ".lock"]
    assert "none does not exist" in prep_here(*command, folder.root / "none", status=2).error
