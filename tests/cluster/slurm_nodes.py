"""SLURM cluster of two nodes on this machine, in a folder: munged, slurmctld, and one slurmd per node.

The cluster runs in separate namespaces (`enter_namespaces`). The nodes have their own names, their addresses are on a
loopback device that is not visible outside, and every daemon ends with the process that started it. Nothing is written
outside of the folder.
"""

import getpass
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NODES = {"n1": "10.99.0.1", "n2": "10.99.0.2"}  # SLURM ignores a machine that has only loopback addresses
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "unshare", "ip")
CPUS_PER_NODE = 4  # on a machine that may have two cores; SLURM is configured not to check
_MARK = "CLIPMILL_SLURM_NAMESPACE"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")


def enter_namespaces() -> None:
    """Run this program again in namespaces for processes, mounts, network and host name; return inside them."""
    if os.environ.get(_MARK):
        return
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise SystemExit(f"missing programs: {', '.join(missing)}; install slurm-wlm, munge and iproute2")
    if os.geteuid():
        raise SystemExit("only root may make the namespaces of the nodes")
    kinds = ("--mount", "--pid", "--net", "--uts", "--fork", "--kill-child", "--mount-proc")
    command = ["unshare", *kinds, sys.executable, *sys.orig_argv[1:]]
    raise SystemExit(subprocess.run(command, env={**os.environ, _MARK: "1"}, check=False).returncode)


def name_nodes(folder: Path) -> None:
    """Assign the nodes their addresses and names, which are visible only inside the namespaces."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in NODES.items()))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in NODES.values():
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)


class Cluster:
    """Daemons, and the commands of SLURM.

    Args:
        folder: Folder for configuration, state, logs and sockets. Its path must be short, because paths of sockets are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        name_nodes(folder)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (folder / "slurm.conf").write_text(self._configuration())
        # SLURM looks for this file next to slurm.conf; the daemons must not use a file of the machine.
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def _configuration(self) -> str:
        at, user = self._folder, getpass.getuser()
        settings = {
            "ClusterName": "clipmill",
            "SlurmctldHost": f"n1({NODES['n1']})",
            "SlurmctldPort": 17000,
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={at}/munge.socket",
            "CredType": "cred/munge",
            "StateSaveLocation": f"{at}/state",
            "SlurmdSpoolDir": f"{at}/spool-%n",
            "SlurmctldPidFile": f"{at}/slurmctld.pid",
            "SlurmdPidFile": f"{at}/slurmd-%n.pid",
            "SlurmctldLogFile": f"{at}/slurmctld.log",
            "SlurmdLogFile": f"{at}/slurmd-%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SlurmdParameters": "config_overrides",
            "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0",
            "ReturnToService": 2,
            "SlurmdTimeout": 10,
            "KillWait": 30,
            "MinJobAge": 7200,  # job records stay until the end of the tests
        }
        nodes = (
            f"NodeName={name} NodeAddr={address} Port={17001 + number} CPUs={CPUS_PER_NODE} RealMemory=4000"
            for number, (name, address) in enumerate(NODES.items())
        )
        lines = [*(f"{name}={value}" for name, value in settings.items()), *nodes]
        return "\n".join([*lines, "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]) + "\n"

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        at = self._folder
        (at / "state").mkdir()
        files = ("key", "socket", "log", "pid", "seed")
        paths = (f"--{name}-file={at}/munge.{name}" for name in files if name != "socket")
        self._start("munged", ["munged", "--foreground", "--force", f"--socket={at}/munge.socket", *paths])
        wait_for(lambda: (at / "munge.socket").exists(), "munged")
        self._start("slurmctld", ["unshare", "--uts", "sh", "-c", "hostname n1 && exec slurmctld -D"])
        for name in NODES:
            (at / f"spool-{name}").mkdir()
            self.start_node(name)
        wait_for(lambda: all(self.node_state(name).startswith("IDLE") for name in NODES), "the nodes")

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._start(name, ["unshare", "--uts", "sh", "-c", f"hostname {name} && exec slurmd -D -N {name}"])

    def kill_node(self, name: str) -> None:
        """Kill all processes on a node, as a power cut does."""
        for pid in self._pids(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons.pop(name).wait()

    def processes(self, name: str) -> list[str]:
        """Return the titles of the processes on a node."""
        titles = []
        for pid in self._pids(name):
            with suppress(OSError):
                titles.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        return titles

    def _pids(self, name: str) -> list[int]:
        """Return the processes in the UTS namespace of a node; the processes of a job are not children of slurmd."""
        namespace = Path(f"/proc/{self._daemons[name].pid}/ns/uts").readlink()
        nodes = []
        for path in Path("/proc").glob("[0-9]*/ns/uts"):
            with suppress(OSError):
                if path.readlink() == namespace:
                    nodes.append(int(path.parts[2]))
        return nodes

    def stop(self) -> None:
        """Stop all daemons."""
        for name in ("slurmctld", *NODES, "munged"):
            if name in self._daemons:
                self._daemons[name].terminate()
        for daemon in self._daemons.values():
            daemon.wait()

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def run(self, *command: str) -> str:
        """Run a SLURM command; return its output."""
        ran = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{' '.join(command)}: {ran.stdout}{ran.stderr}"
        return ran.stdout.strip()

    def submit(self, *words: object, environment: Mapping[str, str]) -> str:
        """Run `sbatch`; return the job ID."""
        command = ["sbatch", "--parsable", f"--export={','.join(['ALL', *environment])}", *map(str, words)]
        ran = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    def node_state(self, name: str) -> str:
        """Return the state of a node, such as IDLE, or an empty string if slurmctld does not respond yet."""
        ran = subprocess.run(
            ["scontrol", "show", "node", "-o", name], env=self.environment, capture_output=True, text=True, check=False
        )
        match = re.search(r"State=(\S+)", ran.stdout)
        return match[1] if match else ""

    def jobs(self, job: str) -> dict[str, dict[str, str]]:
        """Return the records of a job or of the tasks of an array, by ID (`7` or `7_3`)."""
        states = {}
        for line in self.run("scontrol", "show", "job", "-o", job).splitlines():
            record = dict(word.split("=", 1) for word in line.split() if "=" in word)
            array = record.get("ArrayJobId")
            states[record["JobId"] if array is None else f"{array}_{record['ArrayTaskId']}"] = record
        return states

    def states(self, job: str) -> dict[str, str]:
        """Return the states of a job, or of the tasks of an array."""
        return {name: record["JobState"] for name, record in self.jobs(job).items()}

    def wait(self, job: str, *, seconds: float = 600.0) -> dict[str, str]:
        """Wait until a job and all its tasks have ended; return their states."""
        wait_for(lambda: all(state in _ENDED for state in self.states(job).values()), f"job {job}", seconds=seconds)
        return self.states(job)


def wait_for(condition: Callable[[], object], what: str, *, seconds: float = 60.0) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: The condition did not become true in time.
    """
    deadline_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: nothing happened for {seconds:.0f} s")
        time.sleep(0.2)
