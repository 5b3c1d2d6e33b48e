"""Tests of commands that are killed at each change of the file system: after a rerun, no leftovers remain."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clipmill.manifests.publish import temporary_path
from clipmill.prep.core.data_folder import lock_for_writing
from clipmill.shards.columns import COLUMNS
from tests.conftest import ROOT
from tests.prep.running import Ran, chunk
from tests.prep.sets import LEN, ShardSet, rerun

Prep = Callable[..., Ran]

# Program that forks a child for each moment; the child exits silently just before its n-th change below a folder. The
# first child that completes is the last one. After each child, `again` runs undisturbed, and the folder is checked.
KILL_AT_EACH = """
import os, shutil, sys, tempfile
from pathlib import Path
from clipmill.manifests.errors import run_command
from clipmill.manifests.plugins import import_object
from clipmill.prep import cli
from clipmill.prep.registry import columns

for column in columns():  # once, not in every child
    import_object(column.work)
import clipmill.manifests.adapters.folder, clipmill.manifests.adapters.reading, clipmill.manifests.write
import clipmill.prep.commands.manifest_text, clipmill.prep.upkeep.garbage, clipmill.prep.upkeep.verify, pyarrow.dataset

pristine, work, expected = map(Path, sys.argv[1:4])
step = int(sys.argv[4])
command = sys.argv[5:]
EVENTS = {"os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.truncate"}

def run(left=None):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    def counted(event, arguments):
        nonlocal left
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in EVENTS or is_write) and str(work) in str(arguments[0]):
            left -= 1
            if left < 0:
                os._exit(9)
    if left is not None:
        sys.addaudithook(counted)
    try:
        run_command(lambda: cli._run(command))
    except SystemExit as ended:
        os._exit(ended.code or 0)

def state(folder):
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*")) if not path.name.endswith(".lock")
    }

wanted = state(expected)
for moment in range(0, 400, step):
    shutil.rmtree(work, ignore_errors=True)
    if pristine.exists():
        shutil.copytree(pristine, work)
    status = run(moment)
    assert status in (0, 9), f"moment {moment}: exit status {status}"
    assert run() == 0, f"moment {moment}: the rerun failed"
    found = state(work)
    assert found.keys() == wanted.keys(), f"moment {moment}: {sorted(found.keys() ^ wanted.keys())}"
    assert found == wanted, f"moment {moment}: {[name for name in found if found[name] != wanted[name]]}"
    if status == 0:
        print(moment)
        break
"""

# Kill at every moment, or at every seventh, which covers a different change of each kind.
STEPS = pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.nightly), 7])


def kill_at_each(pristine: Path, work: Path, *command: object, expected: Path, step: int) -> int:
    """Kill `prep COMMAND` at each change below `work`, or at each `step`-th.

    Return a lower bound for the number of changes.
    """
    arguments = [sys.executable, "-c", KILL_AT_EACH, pristine, work, expected, step, *command]
    ran = subprocess.run([*map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return int(ran.stdout.split()[-1])


@pytest.fixture(scope="session")
def two_variants(made_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a set whose older variant has two shards, a bank and a heartbeat file."""
    data = tmp_path_factory.mktemp("two") / "data"
    shutil.copytree(made_set, data)
    old = ShardSet(data).variant
    chunk(data, *LEN, "--crf", "40", status=1)
    for name in ("bank/" + "0" * 32 + ".arrow", ".tmp-running/000000.json"):
        (old / name).parent.mkdir()
        (old / name).write_bytes(b"1")
    return data


@STEPS
def test_a_killed_gc_is_finished_by_the_next(prep: Prep, two_variants: Path, tmp_path: Path, step: int) -> None:
    done = tmp_path / "done"
    shutil.copytree(two_variants, done)
    prep("gc", "--data", done)
    assert len(list((done / "video").iterdir())) == 1
    work = tmp_path / "work"
    num_moments = kill_at_each(two_variants, work, "gc", "--data", work, expected=done, step=step)
    assert num_moments > 10


@STEPS
def test_a_killed_manifest_leaves_no_temporary_file(
    prep: Prep, write_video: Callable[..., Path], tmp_path: Path, step: int
) -> None:
    videos, done = tmp_path / "videos", tmp_path / "done"
    write_video(videos / "a.mp4", seconds=0.2)
    prep("manifest", "folder", videos, "--data", done)
    arguments = ("manifest", "folder", videos, "--data", tmp_path / "work")
    assert kill_at_each(tmp_path / "none", tmp_path / "work", *arguments, expected=done, step=step) > 10


def leave_file(data: Path, target: str) -> Path:
    """Create a temporary file of a killed command that was about to become `target`."""
    path = temporary_path(data / target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"1")
    return path


def test_a_rerun_removes_what_the_killed_run_left(prep: Prep, shard_set: ShardSet) -> None:
    data, variant = shard_set.data, shard_set.variant
    before = set(data.rglob("*"))
    for folder in ("", "layout", "manifest", variant.relative_to(data), variant.relative_to(data) / "commits"):
        names = {"": ("dataset.json", "probes.parquet")}.get(str(folder), ("layout.parquet",))
        for name in names:
            leave_file(data, f"{folder}/{name}")
    (variant / ".tmp-running").mkdir()
    (variant / ".tmp-running" / "000000.json").write_text("{}")
    leave_file(data, f"video/.tmp-0123456789ab-{variant.name}/recipe.json")
    temporary_path(variant).mkdir()
    rerun(prep, shard_set, *LEN)
    assert set(data.rglob("*")) - before == {data / ".lock"} - before


def test_a_command_leaves_alone_what_others_may_be_writing(shard_set: ShardSet) -> None:
    data = shard_set.data
    places = {
        "video": (f"video/{shard_set.variant.name}/000000.tar", "layout/2s-keep.parquet", "manifest/videos.parquet"),
        "latents": ("latents/sd-0123abcd/000000.tar",),
        "text": ("text/clip-0123abcd/commits/000000.json", "layout/text.parquet"),
        "scores": ("scores/scores-0123abcd/000000.tar", "scores/scores-0123abcd/chunks.arrow"),
        "captions": ("captions/vlm-0123abcd/000000.tar",),
    }
    for column in set(COLUMNS) - {"video"}:
        recipe = data / places[column][0].partition("/0")[0].removesuffix("/commits") / "recipe.json"
        recipe.parent.mkdir(parents=True)
        recipe.write_text("{}")
    for column in COLUMNS:
        made = {name: [leave_file(data, target) for target in targets] for name, targets in places.items()}
        strays = [leave_file(data, "notes.txt"), data / ".tmp-mine", data / "video" / ".tmp-mine"]
        for stray in strays:
            stray.write_text("mine")
        with lock_for_writing(data, column=column):
            pass
        gone = {name for name, paths in made.items() if not any(path.exists() for path in paths)}
        kept = {name for name, paths in made.items() if all(path.exists() for path in paths)}
        assert (gone, kept) == ({column}, set(COLUMNS) - {column})
        assert all(stray.exists() for stray in strays)
