"""Training on two nodes that lose a node, are restarted, or differ in their setup; see README.md. Run as root:

    python -m tests.cluster.elastic              # all cases, 20 to 30 minutes
    python -m tests.cluster.elastic rank_killed  # some cases, after their reference runs

The program prints a line with measurements for each case, and exits with 1 if a case failed. It then keeps the folders
of the cases, with the output of the nodes in `node*.log`.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import elastic_buckets, elastic_losses, elastic_marks, elastic_starts
from tests.cluster.elastic_nodes import nodes
from tests.cluster.elastic_runs import Case, Skipped, end_well
from tests.train.latents.columns import write_columns
from tests.train.tiny_data import Caption, chunks_of, write_captions, write_shard

_VIDEOS = {"a": "train", "b": "train", "c": "train"}
_STAGES = "stages"


def reference(case: Case) -> str:
    """Train with two processes on one node, undisturbed."""
    end_well(case.launch(0, nodes="1", processes=2))
    return "two processes on one node"


def run_undisturbed(case: Case) -> str:
    """Train with one process per node, undisturbed."""
    end_well(*case.launch_both())
    return case.require_same()


def main(names: Sequence[str]) -> int:
    of_modules = (*elastic_losses.CASES, *elastic_starts.CASES, *elastic_buckets.CASES, *elastic_marks.CASES)
    cases: dict[str, Callable[[Case], str]] = {
        case.__name__: case for case in (reference, run_undisturbed, *of_modules)
    }
    if unknown := set(names) - cases.keys():
        sys.exit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    root = Path(tempfile.mkdtemp(prefix="elastic-"))
    write_columns(root / "columns-of").rename(root / "columns")
    _write_videos(root / "videos")
    num_failed = 0
    for name, case in cases.items():
        needed = {"reference"} | ({_STAGES} if any(_STAGES[:-1] in case_name for case_name in names) else set())
        if names and name not in {*names, *needed}:
            continue
        (root / name).mkdir()
        began_s = time.monotonic()
        try:
            with nodes():
                outcome = case(Case(root / name, root))
        except Skipped as reason:
            outcome = f"skipped: {reason}"
        except Exception as error:  # noqa: BLE001 - also of a program that the case needs: the other cases go on
            num_failed += 1
            outcome = f"FAILED: {error if isinstance(error, AssertionError) else repr(error)}"
        print(f"{name:20} {time.monotonic() - began_s:4.0f} s  {outcome}", flush=True)
    if num_failed:
        print(f"kept: {root}")
    else:
        shutil.rmtree(root)
    return 1 if num_failed else 0


def _write_videos(data_dir: Path) -> None:
    write_shard(data_dir, 0, [sample for name in _VIDEOS for sample in chunks_of(name, 55)], split="train")
    write_captions(
        data_dir,
        _VIDEOS,
        [Caption(name, begin, begin + 1.5, f"part {begin} of {name}") for name in _VIDEOS for begin in (0.0, 1.0, 2.0)],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
