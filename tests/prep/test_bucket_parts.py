"""Tests of `--part K/N` in a bucket: parts on machines that share only the bucket detect each other."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from threading import Event, Thread

import pytest

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import publish_bytes
from clipmill.manifests.storage import leases, mirrors
from clipmill.manifests.storage.leases import LeaseLost
from clipmill.manifests.storage.objects import Objects, open_objects
from clipmill.manifests.storage.working_copy import WorkingCopy
from clipmill.prep.core.data_folder import column_lock, writer_of
from clipmill.prep.core.parts import Part, PartRun, register_part
from clipmill.prep.synthetic import FrameNumberVideo
from tests.object_storage.faults import Fault, Faults
from tests.object_storage.folders import contents_of, upload
from tests.prep.running import contents, prep_here, start, wait_until
from tests.prep.running import manifest as prep_manifest

CHUNK = ("chunk", "--len", "500ms", "--preset", "ultrafast", "--short-side", 64, "--engine", "processes")
HERE = ("--workers", 1, "--json")
Machine = Callable[[str], Path]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a data folder with a manifest of five videos and eleven texts, and nothing else."""
    folder = tmp_path_factory.mktemp("parts")
    for number in range(5):
        path, num_frames = folder / f"videos/{number}.mp4", 60 + 30 * number
        FrameNumberVideo(num_frames=num_frames, fps=Fraction(30), width=64, height=48).write(path)
    rows = [f"{number},{text},0,1" for number in range(5) for text in ("all", f"only {number}", f"also {number}")]
    (folder / "captions.csv").write_text("\n".join(["video,text,begin_s,end_s", *rows]) + "\n")
    prep_manifest(folder / "data", folder / "videos", "--captions", folder / "captions.csv")
    return folder / "data"


@pytest.fixture
def machine(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that returns the working copy of a machine, by name; this process uses all of them."""
    monkeypatch.setattr(mirrors, "_mounted", {})

    def attach(name: str) -> Path:
        folder = tmp_path / name
        if mirrors.mirror_of(folder) is None:
            folder.mkdir()
            mirrors.mount(copy := WorkingCopy(bucket, folder))
            copy.sync()
        return folder

    return attach


@contextmanager
def running(data: Path, part: str, *, makes: str = "a") -> Iterator[PartRun]:
    """Run a part that has started to make its shards."""
    with register_part(data, Part.parse(part), column="video") as run:
        run.agree(makes, where=None)
        run.begin()
        yield run


def locks_of(bucket: str) -> dict[str, bool]:
    """Return whether each lease of a part is held, by name."""
    return {
        info.key: not leases.is_released(info)
        for info in open_objects(bucket).list()
        if info.key.startswith(".video.part")
    }


def is_elsewhere(bucket: str, key: str, *, sign: int = 0) -> None:
    """Make the holder of a lease a process on an unknown machine."""
    objects = open_objects(bucket)
    record = json.loads(objects.read(key))
    objects.write(
        key, json.dumps({**record, "machine": "other", "holder": "process 7 on node1", "renewals": sign}).encode()
    )


@pytest.mark.nightly
def test_parts_on_two_machines_one_of_them_killed_leave_the_bytes_of_one_command(
    manifests: Path, bucket: str, faults: Faults, tmp_path: Path, other_machine: Callable[[], Path]
) -> None:
    data = f"{bucket}/data"
    upload(manifests, data)
    faults.set(Fault("hang", method="PUT", path="/commits/000001"))
    with ExitStack() as stack:

        def start_part(part: str) -> "subprocess.Popen[str]":
            (scratch := tmp_path / f"machine{part[0]}").mkdir()
            process = start(*CHUNK, *HERE, "--data", data, "--part", part, TMPDIR=str(scratch))
            stack.callback(process.kill)
            return process

        killed, other = start_part("2/2"), start_part("1/2")
        wait_until(lambda: faults.seen().num_faults or killed.poll() is not None)
        assert killed.poll() is None, killed.communicate()[1]
        other_machine()
        status = prep_here("status", "--data", data).stdout
        assert f"part 2/2, process {killed.pid} on " in status
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        stdout, stderr = other.communicate(timeout=120)
    ended = json.loads(stdout)["part"]
    assert other.returncode == 0, stderr
    probed = [path for method, path in faults.seen().requests if method == "PUT" and path.endswith("/probes.parquet")]
    assert len(probed) == 1, "both parts probed the sources"
    faults.set()
    if not ended["is_last"]:  # the part ended before the other one was killed
        assert ended["num_running"] == 1
    else:
        assert ended["not_made"] == {"2/2": 1}
    other_machine()
    again = prep_here(*CHUNK, *HERE, "--data", data, "--part", "2/2").summary
    assert again["part"] == {"part": "2/2", "is_last": True, "num_running": 0, "not_made": {}}
    shutil.copytree(manifests, local := tmp_path / "local")
    prep_here(*CHUNK, *HERE, "--data", local)
    assert contents_of(data) == contents(local)
    prep_here("verify", "--data", data)


def test_of_a_part_and_a_command_without_one_the_second_is_refused(machine: Machine, bucket: str) -> None:
    with running(machine("a"), "1/2"):
        with pytest.raises(UserError, match=r"another command is writing .*process .*, lock \.video\.part-1-of-2"):
            column_lock(machine("b")).__enter__()
        assert leases.is_released(open_objects(bucket).info(".lock")), "the refused command kept its lock"
        with column_lock(machine("b"), column="latents"):
            pass  # locks of different columns are independent
    with column_lock(machine("a")):
        with pytest.raises(UserError, match="another command is writing"):
            register_part(machine("b"), Part(1, 2), column="video").__enter__()
        assert not any(locks_of(bucket).values())


def test_a_command_sees_what_a_part_published_after_the_command_had_listed_the_bucket(machine: Machine) -> None:
    with running(machine("a"), "1/2"):
        late = machine("b")
        publish_bytes(machine("a") / "shots.parquet", b"of the part")
    with column_lock(late):
        assert (late / "shots.parquet").read_bytes() == b"of the part"


def test_a_command_that_takes_its_lock_while_a_part_registers_is_seen(
    machine: Machine, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        take_turn = PartRun._take_turn

        def take_turn_late(run: PartRun, activity: str) -> None:
            stack.enter_context(column_lock(machine("b")))
            take_turn(run, activity)

        monkeypatch.setattr(PartRun, "_take_turn", take_turn_late)
        with pytest.raises(UserError, match="another command is writing"):
            register_part(machine("a"), Part(1, 2), column="video").__enter__()
    assert not any(locks_of(bucket).values())


def test_parts_agree_on_their_number_count_and_settings(machine: Machine, bucket: str) -> None:
    with running(machine("a"), "3/8", makes="a"):
        for part, says in (("3/8", r"part 3/8 is running already \(process"), ("3/16", "part 3/8 is running")):
            with pytest.raises(UserError, match=says):
                register_part(machine("b"), Part.parse(part), column="video").__enter__()
        with (
            pytest.raises(UserError, match="part 4/8 would make b, but part 3/8"),
            running(machine("b"), "4/8", makes="b"),
        ):
            pass
        with running(machine("b"), "4/8", makes="a") as second:
            assert not second.is_first and not second.end() and second.num_running == 1
        assert list(locks_of(bucket)) == [".video.part-3-of-8.lock", ".video.parts.lock"]


def test_other_parts_wait_for_the_first_and_then_have_what_it_published(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    joined = Event()
    with register_part(machine("a"), Part(1, 2), column="video") as first:

        def join() -> None:
            with running(machine("b"), "2/2"):
                assert (machine("b") / "probes.parquet").read_bytes() == b"of the first"
                joined.set()

        second = Thread(target=join)
        machine("b")
        second.start()
        publish_bytes(machine("a") / "probes.parquet", b"of the first")
        assert not joined.wait(0.3), "the part did not wait"
        first.begin()
        second.join()
        assert joined.is_set() and first.is_first
        assert "part 2/2 waits: part 1/2 is planning (process" in capfd.readouterr().err
        with running(machine("b"), "2/2"):
            publish_bytes(machine("b") / "shots.parquet", b"of the second")
        assert not (machine("a") / "shots.parquet").exists()
        assert first.end()
        assert (machine("a") / "shots.parquet").read_bytes() == b"of the second"


@pytest.mark.parametrize("next_command", ["part", "command"])
def test_a_part_that_died_on_another_machine_does_not_block_and_cannot_publish(
    next_command: str, machine: Machine, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ".video.part-1-of-2.lock"
    with pytest.raises(LeaseLost), running(machine("a"), "1/2") as dead:
        is_elsewhere(bucket, key)
        assert (writer_of(machine("c"), column="video") or "").startswith("part 1/2, process 7 on node1 since 20")
        monkeypatch.setattr(leases, "EXPIRY_S", 0.0)
        with running(machine("b"), "2/2") if next_command == "part" else column_lock(machine("b")) as other:
            assert other is None or (other.is_first and other.end())
            assert not locks_of(bucket)[key]
            with pytest.raises(LeaseLost):  # the holder was only suspended
                publish_bytes(machine("a") / "dataset.json", b"{}")
            with pytest.raises(LeaseLost):
                dead.end()


def test_a_part_that_was_killed_on_another_machine_and_is_run_again_waits_until_its_lease_expires(
    machine: Machine, bucket: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key = ".video.part-1-of-2.lock"
    monkeypatch.setattr(leases, "LAST_POLL_S", 0.05)
    with running(machine("a"), "1/2"):
        is_elsewhere(bucket, key)
        alive = iter(range(10**6))
        server_time_s = leases.server_time_s

        def renew_elsewhere(objects: Objects) -> float:
            is_elsewhere(bucket, key, sign=next(alive))
            return server_time_s(objects)

        with monkeypatch.context() as patch:
            patch.setattr(leases, "server_time_s", renew_elsewhere)
            with pytest.raises(UserError, match=r"part 1/2 is running already \(process 7 on node1\)"):
                register_part(machine("b"), Part(1, 2), column="video").__enter__()
        monkeypatch.setattr(leases, "EXPIRY_S", 2.0)
        with running(machine("b"), "1/2") as again:
            assert again.is_first and again.end()
    assert "part 1/2 waits: process 7 on node1 holds its lock" in capfd.readouterr().err
    assert key not in locks_of(bucket)


@pytest.mark.parametrize("column", [pytest.param("text", marks=pytest.mark.nightly), "scores"])
def test_columns_in_parts_on_machines_have_the_bytes_of_one_command(
    column: str, manifests: Path, bucket: str, tmp_path: Path, other_machine: Callable[[], Path]
) -> None:
    shutil.copytree(manifests, local := tmp_path / "local")
    prep_here(*CHUNK, *HERE, "--data", local)
    upload(local, data := f"{bucket}/data")
    command = (column, *(("--clip", "tiny", "--num-gpus", 0) if column == "text" else ()), *CHUNK[-2:], *HERE)
    prep_here(*command, "--data", local)
    for part, left in (("2/2", {"1/2"}), ("1/2", set())):
        other_machine()
        ran = prep_here(*command, "--data", data, "--part", part).summary
        assert ran["part"]["not_made"].keys() == left
    assert contents_of(data) == contents(local)
