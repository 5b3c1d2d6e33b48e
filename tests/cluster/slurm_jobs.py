"""Runs the sbatch files in `scripts/` on a real SLURM cluster of two nodes, and removes nodes and jobs from it.

Run `python -m tests.cluster.slurm_jobs` as root; see README.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.slurm_nodes import NODES, Cluster, enter_namespaces, wait_for
from tests.conftest import ROOT
from tests.prep.running import contents

VIDEOS = ("--videos", 16, "--minutes", 0.25)
CHUNKS = ("chunk", "--len", "1s", "--preset", "veryslow", "--short-side", 96)
LONG_CHUNKS = (*CHUNKS[:-1], 240, "--fps", 60)  # SLURM checks time limits every 30 s
TRAINING = (
    *("dual-encoder", "--model", "tiny", "--device", "cpu", "--num-frames", 2, "--size-px", 32, "--batch", 8),
    *("--steps", 120, "--warmup-steps", 10, "--checkpoint-every", 10, "--workers", 1),
)


class Trial:
    """Cluster, and a data folder whose shards one command has made.

    Args:
        folder: Folder for all files of the trial.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder / "slurm")
        self.programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self._begin_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        sys.stdout.write(f"{time.monotonic() - self._begin_s:6.0f} s  {text}\n")
        sys.stdout.flush()

    def prep(self, *words: object) -> str:
        """Run `prep` without SLURM; return its output."""
        command = [sys.executable, "-m", "clipmill.prep.cli", *map(str, words)]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    def begin(self) -> None:
        """Make videos, and the shards that all jobs must reproduce."""
        self.prep("manifest", "synthetic", *VIDEOS, "--data", self.folder / "begun")
        self.say("16 synthetic videos of 15 s")
        self.make("one", CHUNKS)
        self.make("one-long", LONG_CHUNKS)

    def make(self, name: str, chunks: tuple[object, ...]) -> None:
        """Make the shards of a new data folder with one command, as a reference."""
        shutil.copytree(self.folder / "begun", self.folder / name)
        self.prep(*chunks, "--engine", "processes", "--workers", 2, "--data", self.folder / name)

    def data(self, name: str) -> Path:
        """Return a new data folder without shards."""
        shutil.copytree(self.folder / "begun", self.folder / name)
        return self.folder / name

    def submit(self, script: str, *words: object, options: tuple[object, ...], **environment: str) -> str:
        """Submit a script from `scripts/`; the logs are in the folder."""
        flags = ("--chdir", self.folder, "--cpus-per-task", 1, *options)
        return self.cluster.submit(
            *flags, ROOT / "scripts" / script, *words, environment={**self.programs, **environment}
        )

    def wait_for_commits(self, data: Path, number: int) -> None:
        """Wait until a data folder has this number of commits."""
        wait_for(lambda: len(list(data.glob("video/*/commits/**/*.json"))) >= number, "commits", seconds=300)

    def lose_node(self, name: str) -> None:
        """Cut the power of a node, and tell SLURM about it."""
        self.cluster.kill_node(name)
        self.cluster.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def return_node(self, name: str) -> None:
        """Start a lost node again."""
        self.cluster.start_node(name)
        self.cluster.run("scontrol", "update", f"nodename={name}", "state=resume")
        wait_for(lambda: self.cluster.node_state(name).partition("+")[0] in ("IDLE", "MIXED", "ALLOCATED"), name)

    def require_equal(self, data: Path, reference: str = "one") -> None:
        """Check that the shards and records of a data folder equal those of the reference."""
        digests, expected = contents(data), contents(self.folder / reference)
        assert digests == expected, sorted(digests.items() ^ expected.items())
        self.say(f"{data.name}: {len(digests)} files, the bytes of one command")


def try_array(trial: Trial) -> None:
    """Run six parts on two nodes; one part is requeued, one is cancelled, and a node is lost."""
    data, cluster = trial.data("array"), trial.cluster
    job = trial.submit("slurm_prep.sh", *CHUNKS, "--data", data, options=("--array", "1-6"))
    trial.wait_for_commits(data, 2)
    trial.say(f"array {job}: {cluster.states(job)}")
    cluster.run("scontrol", "requeue", f"{job}_2")
    cluster.run("scancel", f"{job}_3")
    trial.lose_node("n2")
    trial.say(f"part 2 requeued, part 3 cancelled, n2 lost: {cluster.states(job)}")
    trial.return_node("n2")
    states = cluster.wait(job)
    restarts = {name: record["Restarts"] for name, record in cluster.jobs(job).items()}
    trial.say(f"array {job}: {states}, restarts {restarts}")
    assert {name.rpartition("_")[2] for name, state in states.items() if state != "COMPLETED"} == {"3"}
    status = json.loads(trial.prep("status", "--json", "--data", data))["columns"]["video"]
    trial.say(f"prep status: {status['to_make']}")
    assert status["to_make"]["missing"] > 0
    again = trial.submit("slurm_prep.sh", *CHUNKS, "--data", data, options=("--array", "3"), PARTS="6")
    assert cluster.wait(again) == {f"{again}_3": "COMPLETED"}
    trial.require_equal(data)


def try_dependency(trial: Trial) -> None:
    """Make scores in two parts, which SLURM starts once the chunks are made."""
    data, cluster = trial.data("columns"), trial.cluster
    chunks = trial.submit("slurm_prep.sh", *CHUNKS, "--data", data, options=("--array", "1-3"))
    options = ("--array", "1-2", "--dependency", f"afterok:{chunks}")
    scores = trial.submit("slurm_prep.sh", "scores", "--data", data, options=options)
    assert set(cluster.wait(scores).values()) == {"COMPLETED"}
    status = json.loads(trial.prep("status", "--json", "--data", data))["columns"]
    num_chunks = [status[name]["variants"][0]["num_samples"] for name in ("video", "scores")]
    trial.say(f"array {scores} after array {chunks}: chunks, scores: {num_chunks}")
    assert num_chunks[0] == num_chunks[1] and not status["scores"]["to_make"]


def try_time_limit(trial: Trial) -> None:
    """Run two parts that reach their time limit and continue after they are requeued."""
    data, cluster = trial.data("limit"), trial.cluster
    limits = ("--array", "1-2", "--time", 1, "--signal", "B:USR1@50")
    job = trial.submit("slurm_prep.sh", *LONG_CHUNKS, "--data", data, options=limits)
    wait_for(lambda: any(record["Restarts"] != "0" for record in cluster.jobs(job).values()), "a requeue", seconds=180)
    trial.say(f"array {job} near its time limit: {cluster.states(job)}")
    assert set(cluster.wait(job, seconds=1200).values()) == {"COMPLETED"}
    trial.require_equal(data, "one-long")


def try_ray(trial: Trial) -> None:
    """Let a Ray cluster in a job lose a working node and continue; requeue another job."""
    cluster = trial.cluster

    def works(node: str) -> bool:
        titles = cluster.processes(node)
        return any(title.startswith("ray::") and not title.startswith("ray::IDLE") for title in titles)

    for name in ("ray-lost", "ray-requeued"):
        data = trial.data(name)
        job = trial.submit("slurm_prep_ray.sh", *LONG_CHUNKS, "--data", data, options=("--nodes", 2))
        wait_for(lambda: all(works(node) for node in NODES), "tasks on both nodes", seconds=300)
        trial.wait_for_commits(data, 2)
        if name == "ray-lost":
            trial.lose_node("n2")
        else:
            cluster.run("scontrol", "requeue", job)
        num_made = len(list(data.glob("video/*/commits/**/*.json")))
        trial.say(f"{name} at {num_made} shards, job {job}: {cluster.states(job)}")
        assert cluster.wait(job, seconds=900) == {job: "COMPLETED"}
        if name == "ray-lost":
            trial.return_node("n2")
        trial.require_equal(data, "one-long")


def try_training(trial: Trial) -> None:
    """Train on two nodes; requeue the job, then lose a node, then cancel the job and submit it again."""
    cluster = trial.cluster
    options = ("--nodes", 2, "--gpus-per-node", 0)

    def submit(name: str) -> str:
        out = trial.folder / name
        return trial.submit(
            "slurm_train.sh", *TRAINING, "--shards", trial.folder / "one", "--out", out, options=options
        )

    def step_of(name: str) -> int:
        path = trial.folder / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def wait_for_step(step: int) -> None:
        wait_for(lambda: step_of("run") >= step, f"step {step}", seconds=300)

    whole = submit("whole")
    assert cluster.wait(whole) == {whole: "COMPLETED"}
    trial.say(f"job {whole}: {step_of('whole')} steps without a fault")
    job = submit("run")
    wait_for_step(15)
    cluster.run("scontrol", "requeue", job)
    trial.say(f"job {job} requeued at step {step_of('run')}")
    wait_for_step(45)
    trial.lose_node("n2")
    trial.say(f"job {job}: n2 lost at step {step_of('run')}: {cluster.states(job)}")
    trial.return_node("n2")
    wait_for_step(75)
    cluster.run("scancel", job)
    assert cluster.wait(job) == {job: "CANCELLED"}
    trial.say(f"job {job} cancelled at step {step_of('run')}; submitted again")
    again = submit("run")
    assert cluster.wait(again) == {again: "COMPLETED"}
    steps = [json.loads(line)["step"] for line in (trial.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 121)), steps
    weights, expected = (weights_of(trial.folder / name) for name in ("run", "whole"))
    assert weights.keys() == expected.keys()
    assert all(bool((value == expected[name]).all()) for name, value in weights.items())
    trial.say(f"job {again}: {len(steps)} steps, each once; the weights of the job without a fault")


def weights_of(run: Path) -> dict[str, Any]:
    """Read the weights from the last checkpoint of a run."""
    from clipmill.train.run.checkpoint import latest_checkpoint, read_weights  # slow import
    from clipmill.train.run.folder import RunFolder

    path = latest_checkpoint(RunFolder(run).checkpoints)
    assert path is not None
    return dict(read_weights(path))


TRIALS: dict[str, Callable[[Trial], None]] = {
    "array": try_array,
    "dependency": try_dependency,
    "limit": try_time_limit,
    "ray": try_ray,
    "train": try_training,
}


def main() -> None:
    """Run the trials in the arguments; the folder is removed unless a trial fails or --keep is set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trials", nargs="*", choices=[*TRIALS, []], help="trials to run; default: all")
    parser.add_argument("--keep", action="store_true", help="keep the folder of logs and data")
    given = parser.parse_args()
    enter_namespaces()
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # the path of a socket must be short
    (folder / "slurm").mkdir()
    trial = Trial(folder)
    has_passed = False
    try:
        trial.begin()
        trial.cluster.start()
        for name in given.trials or TRIALS:
            TRIALS[name](trial)
        has_passed = True
    finally:
        trial.cluster.stop()
        if has_passed and not given.keep:
            shutil.rmtree(folder)
        else:
            trial.say(f"logs: {folder}")


if __name__ == "__main__":
    main()
