"""Runs in buckets have the files and bits of runs on a disk, whatever faults the bucket has."""

import os
import signal
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipmill.manifests.errors import FailedWork, Stopped, UserError
from clipmill.manifests.storage.leases import LeaseHeld
from clipmill.manifests.storage.mirrors import show_urls
from clipmill.manifests.storage.objects import open_objects
from clipmill.train.config.shards import local_folder
from clipmill.train.config.training import TrainingSettings
from clipmill.train.data.outcomes import LoadedBatch
from clipmill.train.run import bucket as buckets
from clipmill.train.run.checkpoint import all_checkpoints
from clipmill.train.run.folder import RunFolder, create_run
from tests import workers
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.google import google_server
from tests.object_storage.server import S3Server
from tests.train.plane import LoadedPoints, assert_same, settings, train_plane
from tests.train.running import all_files, weights_of


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Undisturbed run on a disk, with a checkpoint in each step."""
    return train_plane(_steps(tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture
def address(bucket: str, other_machine: Callable[[], Path]) -> str:
    """URL of a run that does not exist yet; this process has no local copies."""
    other_machine()
    return f"{bucket}/runs/first"


@pytest.fixture
def impatient(few_retries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the time that checkpoints wait for a bucket to seconds."""
    monkeypatch.setattr(buckets, "PATIENCE_S", 20.0)
    monkeypatch.setattr(buckets, "_PAUSE_S", 0.1)


def _steps(out: Path, **changes: Any) -> TrainingSettings:
    return replace(settings(out, steps=5, batch=4, checkpoint_every=1, keep_checkpoints=2, workers=1), **changes)


def _train(address: str, *, kind: type[LoadedPoints] = LoadedPoints, **changes: Any) -> RunFolder:
    """Start or continue a run in a bucket, as `train` does."""
    run = RunFolder(local_folder(address))
    chosen = _steps(run.path, **changes)
    if not run.settings.exists():
        create_run(chosen)
    with run.hold(), run.upload_periodically():
        return train_plane(chosen, kind=kind)


def test_a_run_in_a_bucket_has_the_files_and_bits_of_a_run_on_a_disk(
    address: str, whole_run: RunFolder, other_machine: Callable[[], Path]
) -> None:
    _train(address)
    other_machine()
    run = RunFolder(local_folder(address))
    assert_same(run, whole_run)
    names = {_without_attempt(name) for name in all_files(run.path)}
    assert names == {_without_attempt(name) for name in all_files(whole_run.path)}
    assert f"out: {address}\n" in run.settings.read_text()
    assert run.name == "first" and show_urls(f"{run.path}1 {run.path}/x") == f"{run.path}1 {address}/x"


def _without_attempt(name: str) -> str:
    """Return the name of a part without its attempt."""
    head, is_part, _ = name.partition("/__0_")
    return f"{head}{is_part}"


class StoppedPoints(LoadedPoints):
    """Points that send SIGTERM in the third step."""

    def batches(self, *, position: int | None = None, max_failures: int) -> Generator[LoadedBatch, None, None]:
        for number, loaded in enumerate(super().batches(position=position, max_failures=max_failures)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield loaded


def test_another_machine_continues_a_run(address: str, whole_run: RunFolder, other_machine: Callable[[], Path]) -> None:
    with pytest.raises(Stopped):
        _train(address, kind=StoppedPoints)
    other_machine()
    assert list(all_checkpoints(RunFolder(local_folder(address)).checkpoints)) == [2, 3]
    assert_same(_train(address), whole_run)


def test_a_checkpoint_whose_last_upload_is_refused_does_not_count(
    address: str, whole_run: RunFolder, faults: Faults, other_machine: Callable[[], Path]
) -> None:
    for name in ("__0_", "tensors.json", "checkpoint.json"):
        faults.set(
            Fault("error", method="PUT", path=f"step_00000[3-5]/{name}", status=403, code="AccessDenied"),
        )
        with pytest.raises(FailedWork, match=r"rank 0 could not write a checkpoint into .*AccessDenied"):
            _train(address)
        faults.set()
        other_machine()
        assert list(all_checkpoints(RunFolder(local_folder(address)).checkpoints)) == [1, 2]
    assert any("step_000003/__0_" in key for key in _keys(address)), "nothing was uploaded, so the test proves nothing"
    assert_same(_train(address), whole_run)
    of_checkpoints = {key.split("/")[1] for key in _keys(address) if key.startswith("checkpoints/")}
    assert of_checkpoints == {"step_000004", "step_000005"}, "a part of a failed checkpoint was not deleted"


def _keys(address: str) -> set[str]:
    return {info.key for info in open_objects(address).list()}


def test_a_run_goes_on_while_its_bucket_is_away(
    address: str, whole_run: RunFolder, faults: Faults, impatient: None, other_machine: Callable[[], Path]
) -> None:
    faults.set(Fault("error", path="/checkpoints/|run.lock|metrics", skip=14, for_s=4.0))
    _train(address)
    refused = [path for _, path in faults.seen().requests]
    assert faults.seen().num_faults > 3 and any("step_000002/__0_" in path for path in refused), refused
    other_machine()
    assert_same(RunFolder(local_folder(address)), whole_run)


def test_a_second_training_is_refused(address: str) -> None:
    run = create_run(_steps(local_folder(address)))
    with run.hold(), pytest.raises(LeaseHeld, match="another command is writing to s3://"), run.hold():
        pass
    with pytest.raises(UserError, match="exists already"):
        create_run(_steps(local_folder(address)))


def test_a_run_killed_in_an_upload_is_continued(
    address: str, whole_run: RunFolder, faults: Faults, other_machine: Callable[[], Path]
) -> None:
    for skip, key in ((2, "__0_"), (1, "checkpoint.json"), (0, "metrics.jsonl")):
        faults.set(Fault("hang", method="PUT", path=key, skip=skip))
        process = workers.process(target=_train, args=(address,), **_environment())
        process.start()
        while not faults.seen().num_faults:
            process.join(0.05)
            assert process.exitcode is None
        process.kill()
        process.join()
        faults.set()
    assert_same(_train(address), whole_run)


def _environment() -> dict[str, Any]:
    return {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "TMPDIR"))}


def test_a_run_in_google_s_storage_is_continued(
    s3: S3Server, whole_run: RunFolder, other_machine: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other_machine()
    with google_server(s3) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        address = f"{server.make_bucket('test-runs')}/first"
        with pytest.raises(Stopped):
            _train(address, kind=StoppedPoints)
        other_machine()
        assert_same(_train(address), whole_run)


def test_a_record_that_arrives_after_its_parts_are_gone_does_not_count(
    address: str, whole_run: RunFolder, other_machine: Callable[[], Path]
) -> None:
    with pytest.raises(Stopped):
        _train(address, kind=StoppedPoints)
    objects = open_objects(address)
    for step in (1, 4, 9):
        record = objects.read("checkpoints/step_000003/checkpoint.json")
        objects.write(f"checkpoints/step_{step:06d}/checkpoint.json", record)
    other_machine()
    assert list(all_checkpoints(RunFolder(local_folder(address)).checkpoints)) == [2, 3]
    assert_same(_train(address), whole_run)
    of_checkpoints = {key.split("/")[1] for key in _keys(address) if key.startswith("checkpoints/")}
    assert of_checkpoints == {"step_000004", "step_000005"}, "a late record was not deleted"


def test_a_damaged_part_in_a_bucket_is_named(address: str, other_machine: Callable[[], Path]) -> None:
    _train(address)
    other_machine()
    objects = open_objects(address)
    (part,) = (key for key in _keys(address) if "step_000005/__0_" in key)
    content = bytearray(objects.read(part))
    content[len(content) // 2] ^= 1
    objects.write(part, bytes(content))
    with pytest.raises(UserError, match=r"step_000005 cannot be read: .*the checksum of __0_\w+.bin"):
        weights_of(local_folder(address))
