"""Tests of `--part K/N`: several commands make one column, whatever happens to them, with the bytes of one command."""

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from threading import Event, Thread

import pytest

from clipmill.manifests import locks
from clipmill.manifests.errors import UserError
from clipmill.prep.core import parts
from clipmill.prep.core.data_folder import column_lock, lock_for_writing
from clipmill.prep.core.parts import Part, PartRun, register_part
from clipmill.prep.engines.admission import source_sha256
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.shards.dataset import current_variant
from tests.conftest import ROOT
from tests.forks import Forks
from tests.prep.running import Ran, chunk, contents, identities, manifest, prep_here, wait_until

Start = Callable[..., "subprocess.Popen[str]"]
QUICK = ("--len", "500ms", "--preset", "ultrafast", "--short-side", 32)
SLOW = ("--len", "500ms", "--preset", "veryslow", "--fps", "60")  # an encoder pass takes half a second or more
HERE = ("--engine", "processes", "--workers", 1, "--json")


@pytest.fixture(scope="module")
def begun_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create five videos, one file that is not a video, and a complete variant in three shards."""
    root = tmp_path_factory.mktemp("parts")
    for number in range(5):
        FrameNumberVideo(num_frames=60 + 30 * number, fps=Fraction(30), width=240, height=180).write(
            root / f"videos/{number}.mp4"
        )
    (root / "videos/text.mp4").write_text("not a video")
    rows = [f"{number},{text},0,1" for number in range(5) for text in ("all", f"only {number}", f"one of {number % 2}")]
    (root / "captions.csv").write_text("\n".join(["video,text,begin_s,end_s", *rows]) + "\n")
    manifest(root / "begun", root / "videos", "--captions", root / "captions.csv")
    assert chunk(root / "begun", *QUICK, status=1)["num_shards"] == 3
    return root / "begun"


@pytest.fixture
def data(begun_data: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun_data, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture(scope="module")
def undisturbed_files(begun_data: Path) -> dict[str, str]:
    """Return the digests of the data folder after one command."""
    folder = begun_data.with_name("undisturbed")
    shutil.copytree(begun_data, folder)
    chunk(folder, *SLOW, status=1)
    return contents(folder)


@pytest.fixture
def start_part(forks: Forks) -> Iterator[Start]:
    """Start `prep chunk --part` as a separate process."""
    with ExitStack() as running:

        def start(data: Path, part: str, *settings: object) -> "subprocess.Popen[str]":
            flags = ("chunk", "--data", data, *HERE, "--part", part, *(settings or SLOW))
            process = subprocess.Popen(
                [forks.python(), "-m", "clipmill.prep.cli", *map(str, flags)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.callback(process.kill)
            return process

        yield start


def end_of(process: "subprocess.Popen[str]") -> Ran:
    stdout, stderr = process.communicate(timeout=120)
    return Ran(process.returncode, stdout, stderr)


def lock_of(data: Path, part: str, column: str = "video") -> Path:
    number, _, count = part.partition("/")
    return data / f".{column}.part-{number}-of-{count}.lock"


@contextmanager
def running(data: Path, part: str, *, column: str = "video", makes: str = "a") -> Iterator[PartRun]:
    """Run a part that has started to make its shards."""
    with register_part(data, Part.parse(part), column=column) as run:
        run.agree(makes, where=None)
        run.begin()
        yield run


@pytest.mark.parametrize("text", ["0/16", "17/16", "3", "a/b", "3/", "/3", "-1/3", "1/0", "1.5/3", "", "1/2/3", "٣/٤"])
def test_a_part_that_does_not_exist_is_refused_before_anything_is_made(text: str, data: Path) -> None:
    before = identities(data)
    refused = prep_here("chunk", "--data", data, *HERE, "--part", text, *SLOW, status=2)
    assert f"--part {text}" in refused.error or f'--part "{text}"' in refused.error
    assert identities(data) == before


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_every_shard_belongs_to_exactly_one_part(count: int) -> None:
    every = [Part(number, count) for number in range(1, count + 1)]
    for shard_id in range(50):
        (part,) = (part for part in every if part.owns(shard_id))
        assert shard_id % count == part.number - 1


def test_parts_at_once_that_are_killed_and_run_again_leave_the_bytes_of_one_command(
    start_part: Start, data: Path, undisturbed_files: dict[str, str]
) -> None:
    quick = current_variant(data, "video")
    processes = {part: start_part(data, part) for part in ("1/3", "2/3", "3/3")}
    killed = processes.pop("2/3")
    wait_until(lambda: "h264" in locks.holder_of(lock_of(data, "2/3")) or killed.poll() is not None)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "the part ended before it was killed"
    rans = {part: end_of(process) for part, process in processes.items()}
    lasts = [part for part, ran in rans.items() if ran.summary["part"]["is_last"]]
    assert len(lasts) == 1, "exactly one part must be the last"
    (last,) = lasts
    assert rans[last].summary["part"]["not_made"].keys() == {"2/3"}
    assert rans[last].summary["failures"] == {"source_unreadable": 1} and rans[last].status == 1
    (other,) = rans.keys() - {last}
    assert (rans[other].summary["failures"], rans[other].status) == ({}, 0), "the other part lacks shards"
    assert current_variant(data, "video") == quick, "a variant with a gap became the current one"
    variant = rans[last].summary["variant"]
    listed = (data / "video" / variant / "failures.jsonl").read_text()
    assert "part 2/3 has not made the shard" in listed
    again = end_of(start_part(data, "2/3"))
    assert again.summary["part"] == {"part": "2/3", "is_last": True, "num_running": 0, "not_made": {}}
    assert current_variant(data, "video") == variant
    assert contents(data) == undisturbed_files


def test_gc_keeps_what_parts_have_begun_and_a_command_without_part_finishes_it(
    data: Path, undisturbed_files: dict[str, str]
) -> None:
    first = prep_here("chunk", "--data", data, *HERE, "--part", "1/2", *SLOW, status=1).summary
    assert (first["num_shards_made"], first["part"]["not_made"]) == (2, {"2/2": 1})
    assert first["next"].startswith("prep chunk --len 500ms ") and first["next"].endswith(" --part 2/2")
    missing = prep_here("status", "--data", data, "--json").summary["columns"]["video"]
    new = [variant for variant in missing["variants"] if variant["name"] == first["variant"]]
    assert new[0]["num_shards"] == 2 and new[0]["num_wanted"] > new[0]["num_samples"]
    assert "incomplete: 1 shard not made yet: prep chunk --len " in prep_here("status", "--data", data).stdout
    name, current = first["variant"], current_variant(data, "video")
    kept, last = prep_here("gc", "--data", data).stdout.splitlines()[-2:]
    assert kept.startswith(f"kept       video/{name}: {current} stays the current variant: it has samples that ")
    assert kept.endswith(f"; to complete {name}, run: prep retry --data {data}") and last == "nothing to remove"
    rest = chunk(data, *SLOW)  # the first part failed because of a file that is not a video
    assert (rest["num_shards_made"], rest["num_shards"]) == (1, 3)
    assert contents(data) == undisturbed_files
    none = prep_here("chunk", "--data", data, *HERE, "--part", "7/7", *SLOW)  # there are only three shards
    assert none.summary["num_shards_made"] == 0 and contents(data) == undisturbed_files


def test_other_parts_wait_for_the_first_and_probe_nothing_again(
    data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "_NUM_TRIES", 1)
    (data / "probes.parquet").unlink()
    (data / "layout" / "500ms-keep.parquet").unlink()
    joined = Event()
    with register_part(data, Part(1, 2), column="video") as first:

        def join() -> None:
            with running(data, "2/2"):
                joined.set()

        second = Thread(target=join)
        second.start()
        assert not joined.wait(0.3), "the part did not wait"
        assert "part 2/2 waits: part 1/2 is planning (process" in capfd.readouterr().err
        first.begin()
        second.join()
        assert joined.is_set() and first.is_first
    with running(data, "3/4", makes=str(current_variant(data, "video"))):
        probed = chunk(data, *QUICK, "--part", "4/4", status=0)
        assert probed["part"]["num_running"] == 1 and (data / "probes.parquet").exists()
        monkeypatch.setattr(
            "clipmill.prep.sources.probe_processes.probe_each",
            lambda *_, **__: pytest.fail("it probes sources again"),
        )
        assert chunk(data, *QUICK, "--part", "2/4", status=0)["num_shards"] == 1


def test_parts_of_another_count_are_refused_while_others_run_and_harmless_afterwards(data: Path) -> None:
    with running(data, "3/8"):
        with pytest.raises(
            UserError, match=r"--part 3/16 divides the run into 16 parts, but part 3/8 is running \(process"
        ):
            register_part(data, Part(3, 16), column="video").__enter__()
        with running(data, "4/8"):
            pass
    with running(data, "3/16") as run:
        assert run.is_first and run.end()
    assert not list(data.glob(".video.part-*"))


def test_a_part_that_runs_already_is_refused(data: Path) -> None:
    with running(data, "2/3"), pytest.raises(UserError, match=r"part 2/3 is running already \(process"):
        register_part(data, Part(2, 3), column="video").__enter__()


def test_parts_exclude_commands_without_part_other_settings_and_other_code(
    begun_data: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(data, "1/2", makes="a") as run:
        for command in (("chunk", *HERE, *QUICK), ("gc",), ("manifest", "folder", begun_data.parent / "videos")):
            assert "another command is writing" in prep_here(*command, "--data", data, status=2).error
        other = running(data, "2/2", makes="b")
        with pytest.raises(UserError, match="part 2/2 would make b, but part 1/2, which is running, makes a"), other:
            pass
        source, other = str(source_sha256("clipmill.prep"))[:8], running(data, "2/2", makes="a")
        monkeypatch.setattr(parts, "source_sha256", lambda package: "0123abcd")
        with (
            pytest.raises(UserError, match=f"source 0123abcd, but part 1/2, .*source {source}"),
            other,
        ):
            pass
        assert run.end(), "the refused part counts as running"
    with lock_for_writing(data), pytest.raises(UserError, match="another command is writing"):
        register_part(data, Part(1, 2), column="video").__enter__()
    refused = prep_here("text", "--clip", "tiny", "--address", "auto", "--part", "1/2", "--data", data, status=2)
    assert "--part 1/2 cannot be used with --address auto" in refused.error
    with running(data, "1/2", column="latents"), column_lock(data):
        pass  # locks of different columns are independent


def test_exactly_one_of_many_parts_that_end_at_once_is_the_last(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_TRY_INTERVAL_S", 0.001)

    def end(run: PartRun) -> bool:
        is_last = run.end()
        run.leave()
        return is_last

    for _ in range(10):
        with ExitStack() as stack, ThreadPoolExecutor(6) as pool:
            runs = [stack.enter_context(running(data, f"{number}/6")) for number in range(1, 7)]
            assert sorted(pool.map(end, runs)) == [False] * 5 + [True]


def test_locks_that_do_not_reach_other_nodes_are_noticed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "TOUCH_INTERVAL_S", 0.05)
    elsewhere = lock_of(data, "2/3")
    elsewhere.write_text("process 7 on another-node\na\n")  # no process on this node holds the lock
    stopped = Event()

    def live() -> None:
        while not stopped.wait(0.02):
            os.utime(elsewhere)

    alive = Thread(target=live)
    alive.start()
    try:
        for part in ("1/3", "2/3"):
            with pytest.raises(UserError, match="do not reach other nodes: process 7 on another-node"):
                register_part(data, Part.parse(part), column="video").__enter__()
    finally:
        stopped.set()
        alive.join()
    with running(data, "1/3") as run:  # the part was killed
        assert run.is_first and not elsewhere.exists()


def test_the_last_part_waits_for_commits_that_its_node_does_not_see_yet(
    data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "_LAG_INTERVAL_S", 0.01)
    late = iter([{0: 2}, {0: 2, 1: 2}, {0: 2, 1: 3}])
    with running(data, "1/2") as first:
        with running(data, "2/2") as second:
            assert not second.end()
            second.report_made(3)
        assert first.end()
        first.await_others(lambda: next(late))
    assert next(late, None) is None, "the part did not wait"
    assert "part 1/2 waits: commits of other parts are not visible" in capfd.readouterr().err
    monkeypatch.setattr(parts, "_MAX_LAG_S", 0.05)
    with running(data, "1/2") as first:
        with running(data, "2/2") as second:
            second.end()
            second.report_made(3)
        assert first.end()
        first.await_others(dict)  # the commits have been removed
    with running(data, "1/2") as first:
        assert first.end()
        first.await_others(iter([{}]).__next__)  # no part has reported commits since


def test_a_file_system_without_locks_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    refused = prep_here("chunk", "--data", data, *HERE, "--part", "1/2", *QUICK, status=2)
    assert "does not support locks: Function not implemented" in refused.error


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_locks_obey_the_umask_so_that_a_group_shares_a_data_folder(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with lock_for_writing(tmp_path):
            pass
        with register_part(tmp_path, Part(1, 2), column="scores"):
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys((".lock", ".scores.lock", ".scores.parts.lock", ".scores.part-1-of-2.lock"), mode)
