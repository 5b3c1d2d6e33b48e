"""Cases of tests.cluster.elastic_runs in which the two nodes differ in their setup."""

import os
import shutil
import signal
from pathlib import Path

from tests.cluster.elastic_nodes import ranks_of
from tests.cluster.elastic_runs import Case, Skipped, end_well

# torchrun sends times to other nodes as pickles, which contain the name of their class.
_CLOCK = """
import datetime, time
_time = time.time

class datetime_ahead(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds={ahead_s})

datetime_ahead.__name__ = datetime_ahead.__qualname__ = "datetime"
datetime_ahead.__module__ = "datetime"
datetime.datetime, time.time = datetime_ahead, lambda: _time() + {ahead_s}
"""


def folder_not_shared(case: Case) -> str:
    """Use a separate folder as --out on node 1."""
    node_folder = case.folder / "of-node-1"
    node_folder.mkdir()
    case.out.mkdir()
    launches = case.launch(0, max_restarts=0), case.launch(1, max_restarts=0, before=_bind(node_folder, case.out))
    assert [launch.end() for launch in launches] == [1, 1]  # torchrun's own exit status
    assert "is not shared by all nodes: rank 1 on node1 cannot see a file that rank 0 on node0" in launches[0].output
    assert "is not shared by all nodes" in launches[1].output
    assert not list(case.out.iterdir()) and not list(node_folder.iterdir()), "files are left"
    return "refused"


def folder_read_only(case: Case) -> str:
    """Make --out read-only on node 1."""
    case.out.mkdir()
    bind = f"{_bind(case.out, case.out)} && mount -o remount,ro,bind {case.out}"
    launches = case.launch(0, max_restarts=0), case.launch(1, max_restarts=0, before=bind)
    assert [launch.end() for launch in launches] == [1, 1]
    assert f"rank 1 on node1 cannot write into --out {case.out}: Read-only file system" in launches[0].output
    return "refused"


def lagging_folder(case: Case) -> str:
    """Show names and sizes to node 1 10 s late, through a FUSE file system; its writes take effect at once."""
    if shutil.which("bindfs") is None:
        raise Skipped("needs bindfs")
    real = case.folder / "run"
    real.mkdir()
    late = f"bindfs -o entry_timeout=10,negative_timeout=10,attr_timeout=10 {real} {real}"
    first, second = case.launch(0), case.launch(1, before=late)
    case.wait_for_steps(100)
    os.kill(ranks_of(1)[0], signal.SIGKILL)
    restarted_s = case.wait_for_restart()
    end_well(first, second)
    assert first.output.count("attention: ") == 2, "the run was restarted more than once"
    return f"{case.require_same()}; restarted after {restarted_s:.0f} s"


def other_clipmill(case: Case) -> str:
    return _other_version(case, "clipmill", "99.1")


def other_torch(case: Case) -> str:
    return _other_version(case, "torch", "1.0")


def flag_of_one_node(case: Case) -> str:
    launches = case.launch(0, max_restarts=0), case.launch(1, "--seed", 7, max_restarts=0)
    assert [launch.end() for launch in launches] == [1, 1]
    expected = "the ranks were started differently: --seed is 0 on rank 0 and 7 on rank 1"
    assert all(expected in launch.output for launch in launches)
    return "refused by both"


def mistake_of_one_node(case: Case) -> str:
    """Let node 1 exit before it meets the other node, which reports the node that it waits for."""
    launches = case.launch(0, max_restarts=0), case.launch(1, "--nonsense", max_restarts=0)
    assert launches[1].end() == 1
    waited_s = case.wait_for_output(0, "rank 0 of 2 is waiting for the other ranks to start")
    launches[0].process.terminate()
    return f"rank 0 said that it waits after {waited_s:.0f} s"


def clock_ahead(case: Case) -> str:
    """Set the clock of node 1 an hour ahead."""
    end_well(case.launch(0), case.launch(1, environment=_clock(case, 3600)))
    return case.require_same()


def caches_of_nodes(case: Case) -> str:
    """Use a copy of the data at the same path on node 1, and a different --workers."""
    copied = case.folder / "copied"
    shutil.copytree(case.root / "columns", copied)
    end_well(case.launch(0), case.launch(1, "--batches-ahead", 3, before=_bind(copied, case.root / "columns")))
    return case.require_same()


def _other_version(case: Case, name: str, version: str) -> str:
    """Prepare a node on which the metadata of a package states a different version."""
    about = case.folder / "packages" / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    launches = (
        case.launch(0, max_restarts=0),
        case.launch(1, max_restarts=0, environment={"PYTHONPATH": str(about.parent)}),
    )
    assert [launch.end() for launch in launches] == [1, 1]
    for launch in launches:
        assert (
            f"the ranks were started differently: {name} is " in launch.output
            and f"{version} on rank 1" in launch.output
        )
    assert not case.out.exists()
    return "refused by both"


def _bind(source: Path, target: Path) -> str:
    return f"mount --bind {source} {target}"


def _clock(case: Case, ahead_s: int) -> dict[str, str]:
    """Prepare a node on which the wall clock of all Python programs is ahead."""
    folder = case.folder / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_CLOCK.format(ahead_s=ahead_s))
    return {"PYTHONPATH": str(folder)}


CASES = (
    folder_not_shared,
    folder_read_only,
    lagging_folder,
    other_clipmill,
    other_torch,
    flag_of_one_node,
    mistake_of_one_node,
    clock_ahead,
    caches_of_nodes,
)
