"""Facts about a machine, for `train doctor`: host, disk of a folder, video decoder, and the defaults of training.

Facts about the host come from /proc and /sys. If a file is missing, as in many containers, the value is None.

Measuring a disk takes a few seconds (clipmill.shards.disk_speed). In a data folder, only parts of an existing tar are
read. In other folders, a file of 48 MB is written, flushed, read and removed.
"""

import errno
import os
import platform
import re
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import commands_of
from clipmill.shards.disk_speed import DiskSpeed, measure_file, measure_folder
from clipmill.train.config.training import TrainingSettings
from clipmill.train.doctor.accelerator import Accelerator, ask_child, examine_accelerator
from clipmill.train.run.environment import processor, versions

_MIN_FREE_BYTES = 200_000_000  # four times the size of the temporary file for measuring a disk
_TIMEOUT_S = 15.0
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "pvfs2"),
    *("orangefs", "wekafs", "davfs", "fuse.davfs2", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.glusterfs"),
    *("fuse.ceph", "fuse.rclone", "fuse.goofys", "fuse.juicefs", "fuse.mount-s3", "fuse.blobfuse2"),
}
# File systems for folders of the host of a virtual machine or sandbox, whose disk cannot be examined from within.
_HOST = {"9p", "virtiofs", "gofer", "vboxsf", "fuse.lima", "fuse.grpcfuse"}
_MEMORY = {"tmpfs", "ramfs"}
_CHECK_MOUNT = "check the mount and its permissions"
_MAKE_ROOM = "free some space, have the quota or the number of inodes raised, or write runs to another disk (--out)"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_CGROUP = Path("/sys/fs/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


Level = Literal["broken", "warning", "note"]
LEVELS: tuple[Level, ...] = ("broken", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """Problem of a machine, or a note.

    Attributes:
        level: broken: training cannot start, or stops; warning: training is slower than possible, or different; note:
            only for information.
    """

    level: Level
    what: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Host:
    """Facts about the host.

    Attributes:
        allowed_cores: Number of cores in this process's affinity mask.
        quota_cores: CPU time per wall-clock time that the cgroup allows, if limited.
        memory_bytes, free_bytes: Memory of the machine, or of the cgroup if that is less.
        shm_bytes: Size of /dev/shm.
    """

    processor: str
    num_cores: int
    allowed_cores: int
    quota_cores: float | None
    memory_bytes: int | None
    free_bytes: int | None
    shm_bytes: int | None
    thread_variables: dict[str, str]
    compiler: str | None


def examine_host() -> Host:
    """Examine this machine. This takes milliseconds."""
    lines = re.findall(r"^(\w+):[ \t]*(\d+)\b", _read(Path("/proc/meminfo")), flags=re.MULTILINE)
    fields = {name: int(number_kb) * 1024 for name, number_kb in lines}
    total, free = fields.get("MemTotal"), fields.get("MemAvailable", fields.get("MemFree"))
    limit = _limit(_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes")
    if limit is not None and (total is None or limit < total):
        used = _limit(_CGROUP / "memory.current", _CGROUP / "memory/memory.usage_in_bytes") or 0
        total, free = limit, min(limit - used, free if free is not None else limit)
    # cgroup v1 stores the two numbers of cpu.max in separate files.
    version_1 = " ".join(_read(_CGROUP / "cpu" / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    # The compilers that torch.compile looks for.
    compilers = (os.environ.get("CC"), os.environ.get("CXX"), "cc", "gcc", "clang", "g++")
    return Host(
        processor=processor(),
        num_cores=os.cpu_count() or 1,
        allowed_cores=len(os.sched_getaffinity(0)),
        quota_cores=quota_of(_read(_CGROUP / "cpu.max")) or quota_of(version_1),
        memory_bytes=total,
        free_bytes=free,
        shm_bytes=_shared_memory(),
        thread_variables={name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        compiler=next((path for name in compilers if name and (path := shutil.which(name))), None),
    )


def quota_of(text: str) -> float | None:
    """Return the number of cores that a line from cpu.max allows ("200000 100000": 2.0); None without a limit."""
    quota, _, period = text.strip().partition(" ")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _limit(*paths: Path) -> int | None:
    for path in paths:
        text = _read(path).strip()
        if text.isdigit() and int(text) < 2**60:  # in cgroup v1, a huge number means no limit
            return int(text)
    return None


def _shared_memory() -> int | None:
    try:
        shared_memory = os.statvfs("/dev/shm")
    except OSError:
        return None
    return shared_memory.f_blocks * shared_memory.f_frsize


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Facts about the disk of a folder.

    Attributes:
        kind: local, network, host (a folder that belongs to the host), memory, or unknown.
        speed: Measured speed; None if it was not measured.
        problem: Reason why the disk could not be measured.
    """

    path: str
    file_system: str | None = None
    kind: str = "unknown"
    free_bytes: int | None = None
    speed: DiskSpeed | None = None
    problem: Finding | None = None


def examine_disk(folder: Path, *, is_data: bool) -> Disk:
    """Measure the disk of a folder in at most 15 seconds, even if it does not respond. Data folders are only read."""
    disks: list[Disk] = []
    # If the server of a mount is gone, calls block forever. The thread is then abandoned.
    worker = threading.Thread(target=lambda: disks.append(_examine(folder, is_data=is_data)), daemon=True)
    worker.start()
    worker.join(_TIMEOUT_S)
    if disks:
        return disks[0]
    kind, file_system = file_system_of(folder, _read(_MOUNTS))
    timeout = Finding("broken", f"no response within {_TIMEOUT_S:.0f} s", _CHECK_MOUNT)
    return Disk(path=str(folder), kind=kind, file_system=file_system, problem=timeout)


def file_system_of(folder: Path, mounts: str) -> tuple[str, str | None]:
    """Return kind and type of the file system of an absolute path, from the text of /proc/self/mountinfo."""
    best, file_system = "", None
    for line in mounts.splitlines():
        mount_text, _, type_text = line.partition(" - ")
        fields, types = mount_text.split(), type_text.split()
        if len(fields) < 5 or not types:
            continue
        mount = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        is_above = mount == "/" or str(folder) == mount or str(folder).startswith(f"{mount}/")
        if is_above and len(mount) >= len(best):  # if a folder is mounted twice, the last mount is visible
            best, file_system = mount, types[0]
    if file_system is None:
        return "unknown", None
    default = "unknown" if file_system.startswith("fuse") else "local"
    kinds = (("network", _NETWORK), ("host", _HOST), ("memory", _MEMORY), (default, {file_system}))
    return next(kind for kind, types in kinds if file_system in types), file_system


def _examine(folder: Path, *, is_data: bool) -> Disk:
    path = folder.absolute()
    try:
        path = folder.resolve(strict=True)
        stat = os.statvfs(path)
    except OSError as error:
        return Disk(path=str(path), problem=_unreadable_finding(error))
    kind, file_system = file_system_of(path, _read(_MOUNTS))
    free_bytes = stat.f_bavail * stat.f_frsize
    known: Any = {"path": str(path), "kind": kind, "file_system": file_system, "free_bytes": free_bytes}
    try:
        if not is_data:
            return Disk(**known, speed=measure_folder(path) if free_bytes >= _MIN_FREE_BYTES else None)
        # The largest tar, because tars of scores are tiny; OSError for unreadable folders, which glob would skip.
        variants = (variant for column in _folders(path) for variant in _folders(column))
        tars = [entry for variant in variants for entry in os.scandir(variant) if entry.name.endswith(".tar")]
        tar = Path(max(tars, key=lambda entry: entry.stat().st_size).path) if tars else None
        if tar is None:
            none = Finding(
                "note",
                "there is no shard to read, so the speed was not measured",
                f"run {commands_of(path, VIDEO)} first",
            )
            return Disk(**known, problem=none)
        with tar.open("rb", buffering=0) as file:
            return Disk(**known, speed=measure_file(file.fileno()))
    except OSError as error:
        if is_data:
            return Disk(**known, problem=_unreadable_finding(error))
        if error.errno in _NO_SPACE:
            return Disk(**known, problem=Finding("warning", "the disk is full, so it was not measured", _MAKE_ROOM))
        return Disk(**known, problem=Finding("note", f"not measured: {error.strerror}", _CHECK_MOUNT))


def _unreadable_finding(error: OSError) -> Finding:
    where = f" ({error.filename})" if error.filename else ""
    hint = "give this user access to it" if error.errno == errno.EACCES else _CHECK_MOUNT
    return Finding("broken", f"cannot be read: {error.strerror}{where}", hint)


def _folders(folder: Path) -> list[Path]:
    # Folders of columns are not hidden, and are not the file system's lost+found.
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    return [folder / name for name in names if name != "lost+found" and not name.startswith(".")]


# Decoders for the codecs of `prep chunk` (clipmill.train.data.decoders); the default codec's decoder comes first.
CODECS = ("h264", "hevc", "libdav1d", "vp9", "mjpeg")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """PyAV and its libavcodec, and the `CODECS` that are missing; or the error from importing PyAV."""

    pyav: str | None = None
    libavcodec: str | None = None
    missing: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Examined:
    """Facts about a machine.

    Attributes:
        asked_device: Value of `--device`.
        disk: Disk of the data folder or the current folder; None if it was not examined.
        versions: Versions of Python and packages, as on a run's page.
        is_run: True if a starting run examined the machine. The run reports elsewhere what it uses.
    """

    asked_device: str
    host: Host
    accelerator: Accelerator
    decoder: Decoder
    versions: dict[str, str]
    system: str
    disk: Disk | None = None
    is_run: bool = False


@dataclass(frozen=True, kw_only=True)
class Used:
    """Defaults of the training commands on a machine."""

    device: str
    precision: str
    attention: str
    loader_threads: int
    compiles: bool


def examine(*, device: str, shards: Path | None) -> Examined:
    """Examine everything in about 10 seconds, including the disk of `shards` or, without it, the current folder."""
    disk = examine_disk(shards or Path(), is_data=shards is not None)
    return _examine_parts(device, ask_child(), disk=disk)


def examine_in_run(*, asked_device: str, device_type: str) -> Examined:
    """Examine, for a run's page, all facts that take only milliseconds, in this process; no measurements or trials."""
    return _examine_parts(asked_device, examine_accelerator(tries=False, has_gpus=device_type == "cuda"), is_run=True)


def _examine_parts(asked_device: str, accelerator: Accelerator, **others: Any) -> Examined:
    libc = " ".join(platform.libc_ver())
    return Examined(
        asked_device=asked_device,
        host=examine_host(),
        accelerator=accelerator,
        decoder=examine_decoder(),
        versions=versions(),
        system=f"{platform.system()} {platform.release()}, {libc or 'unknown libc'}",
        **others,
    )


def examine_decoder() -> Decoder:
    """Examine PyAV by creating a decoder for each codec."""
    try:
        import av
    except (ImportError, OSError) as error:
        return Decoder(error=str(error).strip().splitlines()[0])
    missing = []
    for codec in CODECS:
        try:
            av.CodecContext.create(codec, "r")
        except (ValueError, av.FFmpegError):
            missing.append(codec)
    version = ".".join(map(str, av.library_versions.get("libavcodec", ())))
    return Decoder(pyav=av.__version__, libavcodec=version, missing=tuple(missing))


def used_by_training(examined: Examined) -> Used:
    """Return the defaults of the training commands on this machine."""
    accelerator = examined.accelerator
    is_cuda = bool(accelerator.gpus) and examined.asked_device != "cpu"
    attention = accelerator.attention if is_cuda else "sdpa"
    if attention == "xformers":
        attention = "xformers, or sdpa for heads and precisions without an xformers kernel"
    return Used(
        device="cuda" if is_cuda else "cpu",
        precision=accelerator.precision if is_cuda else "fp32",
        attention=attention,
        loader_threads=TrainingSettings.workers,
        compiles=examined.host.compiler is not None and (not is_cuda or accelerator.has_triton),
    )


def as_json(examined: Examined) -> dict[str, Any]:
    """Return all facts as a JSON-serialisable dict."""
    return {"machine": asdict(examined), "training": asdict(used_by_training(examined))}
