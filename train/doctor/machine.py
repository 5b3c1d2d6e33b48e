"""Facts about a machine for `train doctor`: host, disk of a folder, torch and GPUs, decoder, and training defaults.

Facts about the host come from /proc and /sys. If a file is missing, as in many containers, the value is None.

Measuring a disk takes a few seconds (clipmill.shards.disk_speed). In a data folder, only parts of an existing tar are
read. In other folders, a file of 48 MB is written, flushed, read and removed.

When run as a program (`python -m clipmill.train.doctor.machine`), this module prints the facts about torch, the GPUs
and attention trials as one JSON object. `train doctor` runs this program as a child process with a timeout
(`ask_child`), because a damaged driver can hang or kill any process that uses the driver.
"""

import errno
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from clipmill.manifests.errors import first_line
from clipmill.shards.columns import VIDEO
from clipmill.shards.dataset import commands_of
from clipmill.shards.disk_speed import DiskSpeed, measure_file, measure_folder
from clipmill.train.config.training import TrainingSettings
from clipmill.train.run.environment import installed_version, processor, versions

_MIN_FREE_BYTES = 200_000_000  # four times the size of the temporary file for measuring a disk
_DISK_TIMEOUT_S = 15.0
_NETWORK_TYPES = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "pvfs2"),
    *("orangefs", "wekafs", "davfs", "fuse.davfs2", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.glusterfs"),
    *("fuse.ceph", "fuse.rclone", "fuse.goofys", "fuse.juicefs", "fuse.mount-s3", "fuse.blobfuse2"),
}
# File systems through which a virtual machine or sandbox accesses folders of its host. Their disk cannot be examined.
_HOST_TYPES = {"9p", "virtiofs", "gofer", "vboxsf", "fuse.lima", "fuse.grpcfuse"}
_MEMORY_TYPES = {"tmpfs", "ramfs"}
_CHECK_MOUNT = "check the mount and its permissions"
_MAKE_ROOM = "free some space, raise the quota or the number of inodes, or write runs to another disk (--out)"
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
        level: "broken" if training cannot start or would stop, "warning" if training is slow or differs from the
            default, "note" for information only.
        what: Description of the problem.
        hint: Advice about what to do.
    """

    level: Level
    what: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Host:
    """Facts about the host.

    Attributes:
        allowed_cores: Number of cores in the affinity mask of this process.
        quota_cores: CPU quota of the cgroup, in cores; None without a limit.
        memory_bytes: Memory of the machine, or of the cgroup if that is less.
        free_bytes: Free part of this memory.
        shm_bytes: Size of /dev/shm.
        thread_variables: Environment variables that limit the threads of OpenMP, MKL and OpenBLAS, if they are set.
        compiler: Path of a C or C++ compiler for `--compile`; None if there is none.
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
    """Examine this machine's host. This takes only milliseconds."""
    lines = re.findall(r"^(\w+):[ \t]*(\d+)\b", _read(Path("/proc/meminfo")), flags=re.MULTILINE)
    fields = {name: int(number_kb) * 1024 for name, number_kb in lines}
    memory_bytes, free_bytes = fields.get("MemTotal"), fields.get("MemAvailable", fields.get("MemFree"))
    limit_bytes = _limit(_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes")
    if limit_bytes is not None and (memory_bytes is None or limit_bytes < memory_bytes):
        used_bytes = _limit(_CGROUP / "memory.current", _CGROUP / "memory/memory.usage_in_bytes") or 0
        memory_bytes, free_bytes = (
            limit_bytes,
            min(limit_bytes - used_bytes, limit_bytes if free_bytes is None else free_bytes),
        )
    # cgroup v1 stores the two numbers of cpu.max in separate files.
    version_1_quota = " ".join(
        _read(_CGROUP / "cpu" / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    )
    # Compilers that torch.compile looks for.
    compilers = (os.environ.get("CC"), os.environ.get("CXX"), "cc", "gcc", "clang", "g++")
    return Host(
        processor=processor(),
        num_cores=os.cpu_count() or 1,
        allowed_cores=len(os.sched_getaffinity(0)),
        quota_cores=quota_of(_read(_CGROUP / "cpu.max")) or quota_of(version_1_quota),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        shm_bytes=_shared_memory(),
        thread_variables={name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        compiler=next((path for name in compilers if name and (path := shutil.which(name))), None),
    )


def quota_of(text: str) -> float | None:
    """Return the number of cores that a line of cpu.max allows (2.0 for "200000 100000"); None without a limit."""
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
    """Measure the disk of a folder. Give up after 15 seconds without a response. Data folders are only read."""
    disks: list[Disk] = []
    # If the server of a mount does not respond, calls block forever. The thread is then abandoned.
    worker = threading.Thread(target=lambda: disks.append(_examine(folder, is_data=is_data)), daemon=True)
    worker.start()
    worker.join(_DISK_TIMEOUT_S)
    if disks:
        return disks[0]
    kind, file_system = file_system_of(folder, _read(_MOUNTS))
    timeout = Finding("broken", f"no response within {_DISK_TIMEOUT_S:.0f} s", _CHECK_MOUNT)
    return Disk(path=str(folder), kind=kind, file_system=file_system, problem=timeout)


def file_system_of(folder: Path, mounts: str) -> tuple[str, str | None]:
    """Return the kind and type of the file system of an absolute path, from the text of /proc/self/mountinfo."""
    longest_mount, file_system = "", None
    for line in mounts.splitlines():
        mount_text, _, type_text = line.partition(" - ")
        fields, types = mount_text.split(), type_text.split()
        if len(fields) < 5 or not types:
            continue
        mount = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        contains_folder = mount == "/" or str(folder) == mount or str(folder).startswith(f"{mount}/")
        if contains_folder and len(mount) >= len(longest_mount):  # the last of two mounts at a folder is visible
            longest_mount, file_system = mount, types[0]
    if file_system is None:
        return "unknown", None
    default = "unknown" if file_system.startswith("fuse") else "local"
    kinds = (("network", _NETWORK_TYPES), ("host", _HOST_TYPES), ("memory", _MEMORY_TYPES), (default, {file_system}))
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
    facts: Any = {"path": str(path), "kind": kind, "file_system": file_system, "free_bytes": free_bytes}
    try:
        if not is_data:
            return Disk(**facts, speed=measure_folder(path) if free_bytes >= _MIN_FREE_BYTES else None)
        # Read the largest tar, because tars with scores are tiny. Unlike glob, scandir raises for unreadable folders.
        variants = (variant for column in _folders(path) for variant in _folders(column))
        tars = [entry for variant in variants for entry in os.scandir(variant) if entry.name.endswith(".tar")]
        tar = Path(max(tars, key=lambda entry: entry.stat().st_size).path) if tars else None
        if tar is None:
            finding = Finding(
                "note",
                "there is no shard to read, so the speed was not measured",
                f"run {commands_of(path, VIDEO)} first",
            )
            return Disk(**facts, problem=finding)
        with tar.open("rb", buffering=0) as file:
            return Disk(**facts, speed=measure_file(file.fileno()))
    except OSError as error:
        if is_data:
            return Disk(**facts, problem=_unreadable_finding(error))
        if error.errno in _NO_SPACE:
            return Disk(**facts, problem=Finding("warning", "the disk is full, so it was not measured", _MAKE_ROOM))
        return Disk(**facts, problem=Finding("note", f"not measured: {error.strerror}", _CHECK_MOUNT))


def _unreadable_finding(error: OSError) -> Finding:
    where = f" ({error.filename})" if error.filename else ""
    hint = "give this user read permission" if error.errno == errno.EACCES else _CHECK_MOUNT
    return Finding("broken", f"cannot be read: {error.strerror}{where}", hint)


def _folders(folder: Path) -> list[Path]:
    # Skip hidden folders and the file system's lost+found, which are not columns.
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    return [folder / name for name in names if name != "lost+found" and not name.startswith(".")]


# Facts about torch, the GPUs and attention trials. Only a process that imports torch can collect them.
#
# Shape suffixes: B batch, M tokens, H heads, K width of a head.

_CHILD_TIMEOUT_S = 180.0
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """GPU, as reported by torch; `free_bytes` is None if it was not queried."""

    name: str
    memory_bytes: int
    free_bytes: int | None
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class AttentionTrial:
    """Trial of an attention backend on the device, with the kernels that the backend used or the error.

    Attributes:
        attention: Name of the backend.
        kind: Input of the trial: "clips", or "packed captions" for captions of different lengths in one row.
    """

    attention: str
    kind: str
    dtype: str
    kernels: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Facts about torch and the GPUs.

    Attributes:
        torch_error: Reason why torch cannot be used. All other facts are then unknown.
        torch_cuda: CUDA version that torch was built for; None for torch without CUDA.
        needed_driver: Oldest NVIDIA driver that supports this CUDA version.
        driver: Version of the NVIDIA driver; None if there is no driver.
        cuda_error: Error from torch if torch finds no GPU.
        unusable_gpu: Reason why torch cannot use a GPU of this machine (`why_no_gpu`); None if there is no such GPU.
        xformers: Version of xformers, "not installed" or "not loaded".
        xformers_library: Reason why xformers' own compiled library cannot be loaded.
        attention: Name of the backend that `--attention auto` uses on the first GPU; "sdpa" if no trials were run.
        has_triton: True if triton is installed. torch.compile needs triton to generate GPU kernels.
        tried: Trials of attention backends.
        environment: Facts for bug reports to PyTorch (torch.utils.collect_env); empty if no trials were run.
    """

    torch_error: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    needed_driver: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    cuda_error: str | None = None
    unusable_gpu: str | None = None
    num_threads: int | None = None
    gpus: list[Gpu] = field(default_factory=list)
    xformers: str = "not installed"
    xformers_library: str | None = None
    has_triton: bool = False
    precision: str = "fp32"
    attention: str = "sdpa"
    tried: list[AttentionTrial] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)


def examine_accelerator(*, runs_trials: bool = True, looks_for_gpus: bool = True) -> Accelerator:
    """Examine torch and the GPUs.

    Args:
        runs_trials: True to run each attention backend and to load xformers. This may change torch's settings.
        looks_for_gpus: True to look for GPUs. This initialises CUDA.
    """
    # Import the driver checks only here, because a run needs them only for its page.
    from clipmill.train.device.driver import driver_version, required_driver, why_no_gpu

    try:
        import torch
    except (ImportError, OSError) as error:
        return Accelerator(torch_error=first_line(error), driver=driver_version())
    from clipmill.train.models.attention_choice import cudnn_version

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "needed_driver": required_driver(torch.version.cuda),
        "driver": driver_version(),
        "num_threads": torch.get_num_threads(),
        "has_triton": find_spec("triton") is not None,
        "xformers": installed_version("xformers"),
    }
    if looks_for_gpus:
        try:
            torch.cuda.init()
            facts["gpus"] = [_gpu(index, queries_free_memory=runs_trials) for index in range(torch.cuda.device_count())]
            facts["cudnn"] = cudnn_version()
        except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
            facts |= {"cuda_error": first_line(error), "unusable_gpu": why_no_gpu()}
    if runs_trials:
        from torch.utils.collect_env import get_env_info

        from clipmill.train.device.precision import open_precision
        from clipmill.train.models.attention_choice import FASTEST_BACKENDS

        try:
            facts["environment"] = get_env_info()._asdict()
        except (OSError, RuntimeError, AttributeError) as error:  # collect_env runs programs, which may fail
            facts["environment"] = {"error": first_line(error)}
        device_type = "cuda" if facts.get("gpus") else "cpu"
        precision = open_precision("auto", device_type=device_type)
        facts |= {"precision": precision.name, **_xformers()}
        has_xformers = facts["xformers"] not in ("not installed", "not loaded")
        if facts.get("gpus"):
            facts["attention"] = FASTEST_BACKENDS.get(
                facts["gpus"][0].capability, "xformers" if has_xformers else "sdpa"
            )
        names = ["sdpa", *(["xformers"] if has_xformers else []), "cudnn", "flash"] if facts.get("gpus") else ["sdpa"]
        kinds = ("clips", "packed captions")
        facts["tried"] = [_try_attention(name, kind, precision.name, device_type) for name in names for kind in kinds]
    return Accelerator(**facts)


def accelerator_of(values: dict[str, Any]) -> Accelerator:
    """Convert JSON values to an `Accelerator`."""
    gpus = [Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in values["gpus"]]
    tried = [AttentionTrial(**trial) for trial in values["tried"]]
    return Accelerator(**{**values, "gpus": gpus, "tried": tried})


def _gpu(index: int, *, queries_free_memory: bool) -> Gpu:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    # Query only on request: the query creates a context of several hundred megabytes on each GPU.
    free_bytes = torch.cuda.mem_get_info(index)[0] if queries_free_memory else None
    return Gpu(name=gpu.name, memory_bytes=gpu.total_memory, free_bytes=free_bytes, capability=(gpu.major, gpu.minor))


def _xformers() -> dict[str, Any]:
    from clipmill.train.models.attention import load_xformers

    if find_spec("xformers") is None:
        return {}
    try:
        return {"xformers_library": load_xformers()}
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # unsupported version of torch
        return {"xformers": "not loaded", "xformers_library": first_line(error)}


def _try_attention(name: str, kind: str, precision: str, device_type: str) -> AttentionTrial:
    """Run a forward and a backward pass of attention for clips or for packed captions."""
    import torch

    from clipmill.train.models.attention import open_attention, pack
    from clipmill.train.models.attention_choice import kernels_of

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    device, is_packed = torch.device(device_type), kind != "clips"
    lengths = (12, 9, 17, 26)
    trial = {"attention": name, "kind": kind, "dtype": str(dtype).removeprefix("torch.")}
    try:
        attend = open_attention(name, device_type=device_type).attend  # type: ignore[arg-type]
        packing = pack(lengths, device=device) if is_packed else None
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, sum(lengths), 3, 4, 64) if is_packed else (2, 197, 3, 4, 64)
        qkv = torch.randn(shape, dtype=dtype, device=device, generator=generator, requires_grad=True)
        out = attend(*qkv.unbind(2), causal=is_packed, packing=packing)
        out.sum().backward()
        if qkv.grad is None or not bool(qkv.grad.isfinite().all()):
            return AttentionTrial(**trial, error="the gradients are not finite")
        return AttentionTrial(**trial, kernels=str(kernels_of(name, *qkv.unbind(2), causal=is_packed, packing=packing)))
    # Versions of libraries may be incompatible.
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:
        return AttentionTrial(**trial, error=first_line(error))


def ask_child(*, timeout_s: float = _CHILD_TIMEOUT_S, module: str = "clipmill.train.doctor.machine") -> Accelerator:
    """Examine torch in a child process. If the child hangs or crashes, `torch_error` contains the reason."""
    from clipmill.train.device.driver import driver_version

    command, pipe = [sys.executable, "-P", "-m", module], subprocess.PIPE
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            process.communicate(timeout=_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass  # a driver that does not respond blocks the child in the kernel
        reason = f"torch and the GPU did not respond within {timeout_s:.0f} s"
    else:
        try:
            return accelerator_of(json.loads(output))
        except (ValueError, KeyError, TypeError):
            lines = errors.decode(errors="replace").strip().splitlines() or ["no output"]
            reason = f"the process that tests torch and attention ended with code {process.returncode}: {lines[-1]}"
    return Accelerator(torch_error=reason, driver=driver_version())


# Decoders for the codecs of `prep chunk` (clipmill.train.data.decoders), the decoder of the default codec first.
CODECS = ("h264", "hevc", "libdav1d", "vp9", "mjpeg")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Versions of PyAV and libavcodec, and the `CODECS` that are missing; or the error from importing PyAV."""

    pyav: str | None = None
    libavcodec: str | None = None
    missing: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts about a machine.

    Attributes:
        asked_device: Value of `--device`.
        versions: Versions of Python and packages, as on the page of a run.
        system: Operating system, with the versions of kernel and libc.
        disk: Disk of the data folder or the current folder; None if it was not examined.
        is_run: True if the machine was examined at the start of a run. A run reports its own device and precision.
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
class TrainingDefaults:
    """Defaults of the training commands on a machine.

    Attributes:
        compiles: True if `--compile` can be used.
    """

    device: str
    precision: str
    attention: str
    loader_threads: int
    compiles: bool


def examine(*, device: str, shards: Path | None) -> MachineFacts:
    """Examine everything in about 10 seconds, including the disk of `shards` or, by default, of the current folder."""
    disk = examine_disk(shards or Path(), is_data=shards is not None)
    return _examine_parts(device, ask_child(), disk=disk)


def examine_in_run(*, asked_device: str, device_type: str) -> MachineFacts:
    """Examine everything that takes only milliseconds, in this process, for the page of a run."""
    return _examine_parts(
        asked_device, examine_accelerator(runs_trials=False, looks_for_gpus=device_type == "cuda"), is_run=True
    )


def _examine_parts(asked_device: str, accelerator: Accelerator, **options: Any) -> MachineFacts:
    libc = " ".join(platform.libc_ver())
    return MachineFacts(
        asked_device=asked_device,
        host=examine_host(),
        accelerator=accelerator,
        decoder=examine_decoder(),
        versions=versions(),
        system=f"{platform.system()} {platform.release()}, {libc or 'unknown libc'}",
        **options,
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


def training_defaults(machine: MachineFacts) -> TrainingDefaults:
    """Return the defaults of the training commands on this machine."""
    accelerator = machine.accelerator
    is_cuda = bool(accelerator.gpus) and machine.asked_device != "cpu"
    attention = accelerator.attention if is_cuda else "sdpa"
    if attention == "xformers":
        attention = "xformers, or sdpa for heads and precisions without an xformers kernel"
    return TrainingDefaults(
        device="cuda" if is_cuda else "cpu",
        precision=accelerator.precision if is_cuda else "fp32",
        attention=attention,
        loader_threads=TrainingSettings.workers,
        compiles=machine.host.compiler is not None and (not is_cuda or accelerator.has_triton),
    )


def as_json(machine: MachineFacts) -> dict[str, Any]:
    """Return all facts as a JSON-serialisable dict."""
    return {"machine": asdict(machine), "training": asdict(training_defaults(machine))}


def _main() -> None:
    # Redirect the output of libraries to standard error, so that standard output contains only the JSON object.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(asdict(examine_accelerator()), output)
    output.flush()
    # Exit without cleaning up, because the libraries of a damaged driver can hang at exit.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
